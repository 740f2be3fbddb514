"""Passes of a teacher that are captured as CUDA graphs, on a stand-in for CUDA that computes when a graph is replayed.
Real graphs: tests/gpu/test_cuda_graphs.py."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.teachers import check_captured_passes
from mkd.errors import MkdConfigError
from mkd.teacher import captured_forward
from mkd.teacher.captured_forward import MOST_SHAPES, CapturedForward


class Cuda:
    """Counts captures, passes and replays."""

    def __init__(self) -> None:
        self.captures = self.passes = self.replays = 0
        self.pools: list[Any] = []
        self.fails = False

    def compute(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.passes += 1
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self._last = (tokens, positions, tokens + 10.0 * positions)
        return self._last[2]

    @contextmanager
    def graph(self, graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.captures += 1
        self.pools.append(pool)
        yield
        graph.parts = self._last

    def new_graph(self) -> Any:
        graph = SimpleNamespace()

        def replay() -> None:
            tokens, positions, output = graph.parts
            output.copy_(tokens + 10.0 * positions)
            self.replays += 1

        graph.replay = replay
        return graph


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    functions = SimpleNamespace(CUDAGraph=stand_in.new_graph, graph=stand_in.graph, graph_pool_handle=lambda: object())
    monkeypatch.setattr(captured_forward, "torch", SimpleNamespace(cuda=functions))
    return stand_in


def inputs(rows: int, value: int = 0) -> tuple[Tensor, Tensor]:
    return torch.full((rows, 3), float(value)), torch.arange(3.0).expand(rows, 3)


def test_second_pass_of_a_shape_is_captured(cuda: Cuda) -> None:
    forward = CapturedForward(nn.Identity(), cuda.compute)
    seen = [forward(*inputs(2, value)) for value in range(5)]
    assert (cuda.passes, cuda.captures, cuda.replays) == (2, 1, 4)
    for value, hidden in enumerate(seen):  # each has memory of its own
        assert torch.equal(hidden, inputs(2, value)[0] + 10.0 * inputs(2)[1])


def test_shapes_share_one_pool_and_are_bounded(cuda: Cuda) -> None:
    forward = CapturedForward(nn.Identity(), cuda.compute)
    for _ in range(3):
        for rows in range(1, MOST_SHAPES + 3):
            forward(*inputs(rows))
    assert cuda.captures == MOST_SHAPES
    assert len(set(map(id, cuda.pools))) == 1
    assert cuda.passes == 2 * MOST_SHAPES + 2 * 3


def test_a_pass_that_cannot_be_captured(cuda: Cuda) -> None:
    forward = CapturedForward(nn.Identity(), cuda.compute)
    forward(*inputs(2))
    cuda.fails = True
    with pytest.raises(MkdConfigError, match=r"--kd-teacher-cuda-graph: .*stream is capturing\): leave it out"):
        forward(*inputs(2))


TEACHER = dict(
    num_experts=None,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    experimental_attention_variant=None,
    multi_latent_attention=False,
)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_experts": 8}, "tokens of each of its experts"),
        ({"pipeline_model_parallel_size": 2}, "2 pipeline stages"),
        ({"context_parallel_size": 2}, "2 context-parallel ranks"),
        ({"experimental_attention_variant": "gated_delta_net"}, "gated_delta_net"),
        ({"multi_latent_attention": True}, "latent attention"),
        ({"layer_mixers": ["M", "-", "*"]}, "Mamba layers"),
    ],
)
def test_teachers_without_graphs(sizes: dict[str, Any], words: str) -> None:
    kd = KDConfig(teacher_hf=["T"], ratio=0.5, teacher_cuda_graph=True)
    with pytest.raises(MkdConfigError, match="--kd-teacher-cuda-graph does not work with this teacher") as error:
        check_captured_passes(Namespace(**TEACHER | sizes), kd)
    assert words in str(error.value) and "leave it out" in str(error.value)
    check_captured_passes(Namespace(**TEACHER), kd)
    check_captured_passes(Namespace(**TEACHER | sizes), KDConfig(teacher_hf=["T"], ratio=0.5))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"packing": "best_fit"}, "--kd-packing best_fit"),
        ({"variable_seq_lengths": True}, "--kd-variable-seq-lengths"),
        ({"teacher_offload": True}, "--kd-teacher-offload: a graph holds the addresses"),
        ({"hidden_loss": "1:1"}, "--kd-hidden-loss 1:1"),
        ({"teacher_hf": None, "teacher_url": ["tcp://a:1"]}, "--kd-teacher-url tcp://a:1"),
        ({"teacher_hf": None, "teacher_cache": "C"}, "--kd-teacher-cache C"),
    ],
)
def test_flags_without_graphs(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(MkdConfigError, match="--kd-teacher-cuda-graph does not work with") as error:
        KDConfig(**{"teacher_hf": ["T"], "ratio": 0.5, "teacher_cuda_graph": True} | flags)
    assert words in str(error.value) and "leave one of them out" in str(error.value)
