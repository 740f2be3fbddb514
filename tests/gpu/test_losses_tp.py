"""The losses with the vocabulary cut over two GPUs: every gradient against the float64 reference on one.

pytest -m gpu tests/gpu/test_losses_tp.py
"""

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mkd.losses import LossSpec, fused_linear_loss, reference
from mkd.losses.divergences import DIVERGENCES
from tests.support.tolerance import FP32, HALF_FACTOR, assert_close_norm, norm_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS = 2
ROWS, VOCAB, TRUE_VOCAB = 402, 5120, 5003
UPSTREAM = 3.7
DTYPES = (torch.float32, torch.bfloat16)
CASES = [(name, sp, dtype) for name in DIVERGENCES for sp in (False, True) for dtype in DTYPES]


def make_inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """([student hidden, LM head, teacher hidden, LM head], labels, CE weights, KD weights), the same everywhere."""
    gen = torch.Generator().manual_seed(3)
    shapes = [(ROWS, 64), (VOCAB, 64), (ROWS, 96), (VOCAB, 96)]
    tensors = [torch.randn(s, generator=gen).mul(0.6).to(dtype).cuda() for s in shapes]
    labels = torch.randint(0, TRUE_VOCAB, (ROWS,), generator=gen).cuda()
    weights = torch.rand(2, ROWS, generator=gen).cuda()
    weights[:, 5] = 0
    return tensors, labels, *weights


def spec_of(divergence: str) -> LossSpec:
    return LossSpec(divergence=divergence, temperature=2.0, z_loss=1e-3)


def plain_gradients(divergence: str, dtype: torch.dtype, inputs: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradients of student hidden and LM head) on one GPU by autograd: GEMMs in `dtype`, the rest in float64."""
    tensors, labels, ce_weight, kd_weight = inputs
    hidden, head, teacher_hidden, teacher_head = (t.detach().to(dtype) for t in tensors)
    hidden.requires_grad_(), head.requires_grad_()
    spec = spec_of(divergence)
    z = (hidden @ head.t())[:, :TRUE_VOCAB].double()
    u = (teacher_hidden @ teacher_head.t())[:, :TRUE_VOCAB].double()
    ce = reference.cross_entropy(z, labels) + spec.z_loss * reference.z_loss(z)
    loss = (ce_weight * ce + kd_weight * reference.DIVERGENCES[divergence](z, u, spec)).sum()
    return loss.detach(), *torch.autograd.grad(UPSTREAM * loss, (hidden, head))


def run_case(rank: int, divergence: str, sequence_parallel: bool, dtype: torch.dtype) -> list[Tensor]:
    """[loss, ce, kd, gradient of hidden states, of this rank's LM head] on the CPU, the same to the bit in two runs."""
    tensors, *rows = make_inputs(dtype)
    heads = [t.chunk(RANKS)[rank].clone() for t in (tensors[1], tensors[3])]
    states = [t.chunk(RANKS)[rank].clone() if sequence_parallel else t for t in (tensors[0], tensors[2])]
    runs = []
    for _ in range(2):
        hidden, head = states[0].detach().requires_grad_(), heads[0].detach().requires_grad_()
        out = fused_linear_loss(
            hidden,
            head,
            states[1],
            heads[1],
            *rows,
            spec=spec_of(divergence),
            true_vocab=TRUE_VOCAB,
            tp_group=torch.distributed.group.WORLD,
            sequence_parallel=sequence_parallel,
            chunk_rows=100,
        )
        (UPSTREAM * out.loss).backward()
        runs.append([t.detach().cpu() for t in (*out, hidden.grad, head.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "two runs differ"
    return runs[0]


def worker(rank: int, port: int, folder: str) -> None:
    """Run all cases and save what they return to `folder`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=RANKS)
    torch.save([run_case(rank, *case) for case in CASES], Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, list[list[Tensor]]]:
    """Case -> what each rank returned."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(folder)), nprocs=RANKS)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    return dict(zip(CASES, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("divergence, sequence_parallel, dtype", CASES)
def test_two_gpus(results: dict, divergence: str, sequence_parallel: bool, dtype: torch.dtype) -> None:
    ranks = results[divergence, sequence_parallel, dtype]
    for values in zip(*(r[:3] for r in ranks), strict=True):
        assert torch.equal(*values), "values differ between ranks"
    inputs = make_inputs(dtype)
    loss, *truth = (t.cpu() for t in plain_gradients(divergence, torch.float64, inputs))
    _, *eager = (t.cpu() for t in plain_gradients(divergence, dtype, inputs))
    hidden = [r[3] for r in ranks]
    complete = [torch.cat(hidden)] if sequence_parallel else hidden
    head = torch.cat([r[4] for r in ranks])
    assert not head[TRUE_VOCAB:].any()
    if dtype == torch.float32:
        assert_close_norm(ranks[0][0], loss, FP32, "loss")
    for name, mine, theirs, right in (
        *(("hidden", h, eager[0], truth[0]) for h in complete),
        ("head", head, eager[1], truth[1]),
    ):
        assert norm_error(mine, right) <= (
            FP32 if dtype == torch.float32 else HALF_FACTOR * norm_error(theirs, right)
        ), name
