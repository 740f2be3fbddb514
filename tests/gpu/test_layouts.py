"""On GPUs with Transformer Engine in bf16 and FP8: every layout trains like one GPU.

    pytest -m gpu tests/gpu/test_layouts.py -s

Rounding differs in every layout, so "like" needs a yardstick: how far bf16 on one GPU is from fp32 on one GPU, and for
runs in FP8 how far FP8 on one GPU is from bf16 on one GPU. Several runs share the GPUs at a time. The table goes to
docs/benchmarks.md; with MKD_BENCH_OUT=DIR it is also written there as JSON.
"""

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.gpu.layout_runs import KEYS, difference, launch, row, save_models, write_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS = 20
VOCAB = 32000
AT_A_TIME = max(1, (os.cpu_count() or 1) // 3)
"""Runs at a time. Most of a run's time is imports, on one core per rank."""


@dataclass(frozen=True)
class Run:
    """A training, and what it is compared with."""

    ranks: int
    flags: tuple[str, ...] = ()
    like: str = "one GPU"
    """The run whose metrics it has, but for rounding."""
    noise: tuple[str, str] = ("one GPU, fp32", "one GPU")
    """Two runs that differ by rounding alone: the yardstick."""
    rounds_anew: bool = False
    """True if the noise of this run is another one of the same size; see `bounds_of`."""
    models: str = "dense"
    fp32: bool = False


MBS2 = ("--micro-batch-size", "2")
PP2 = (*MBS2, "--pipeline-model-parallel-size", "2")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
TP2_SP = (*MBS2, "--tensor-model-parallel-size", "2", "--sequence-parallel")
CP2 = (*MBS2, "--context-parallel-size", "2")
EP2 = (*MBS2, *OVERLAP, "--expert-model-parallel-size", "2")
TEACHER_TP2, TEACHER_PP2, TEACHER_CP2, TEACHER_EP2 = (
    (f"--kd-teacher-{kind}-parallel-size", "2")
    for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
)
LARGE_PASSES = ("--kd-teacher-micro-batch-size", "8")
GRAPH = (*LARGE_PASSES, "--kd-teacher-cuda-graph")
STUDENT_GRAPHS = ("--cuda-graph-impl", "transformer_engine")
LAYOUTS = {
    "mbs4": Run(1, ("--micro-batch-size", "4")),
    "teacher-offload": Run(1, (*MBS2, "--kd-teacher-offload")),
    "tp2-sp": Run(2, TP2_SP),
    "tp2-sp, large passes": Run(2, (*TP2_SP, *LARGE_PASSES)),
    "tp2-sp, graph": Run(2, (*TP2_SP, *GRAPH)),
    "pp2": Run(2, PP2),
    "pp2, large passes": Run(2, (*PP2, *LARGE_PASSES)),
    "pp2, signals on the host": Run(2, (*PP2, "--kd-teacher-signals", "host")),
    "pp2, 5 and 3 layers": Run(2, (*PP2, "--decoder-last-pipeline-num-layers", "3")),
    "pp2-vp2": Run(2, (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")),
    "dp2": Run(2, MBS2),
    "dp2-overlap": Run(2, (*MBS2, *OVERLAP)),
    "cp2": Run(2, CP2),
    "cp2-all-gather": Run(2, (*CP2, "--cp-comm-type", "all_gather")),
    "cp2-a2a": Run(2, (*CP2, "--cp-comm-type", "a2a")),
    "dp2-overlap, student graphs": Run(2, (*MBS2, *OVERLAP, *STUDENT_GRAPHS)),
    "tp2-sp, both graphs": Run(2, (*TP2_SP, *STUDENT_GRAPHS, *GRAPH)),
    "pp2, student graphs": Run(2, (*PP2, *STUDENT_GRAPHS)),
    "pp2-vp2, student graphs": Run(2, (*PP2, "--num-virtual-stages-per-pipeline-rank", "2", *STUDENT_GRAPHS)),
    "cp2, student graphs": Run(2, (*CP2, *STUDENT_GRAPHS)),
}
TEACHER_LAYOUTS = {
    "dp2, teacher tp2": Run(2, (*MBS2, *OVERLAP, *TEACHER_TP2)),
    "dp2, teacher tp2, graph": Run(2, (*MBS2, *OVERLAP, *TEACHER_TP2, *GRAPH)),
    "dp2, teacher pp2": Run(2, (*MBS2, *TEACHER_PP2)),
    "tp2-sp, teacher cp2": Run(2, (*TP2_SP, "--kd-teacher-tensor-model-parallel-size", "1", *TEACHER_CP2)),
    "pp2, teacher dp2": Run(2, (*PP2, "--kd-teacher-pipeline-model-parallel-size", "1")),
    "tp2-sp, student graphs, teacher dp2": Run(
        2, (*TP2_SP, *STUDENT_GRAPHS, "--kd-teacher-tensor-model-parallel-size", "1")
    ),
}
"""The teacher has a layout of its own."""


def packed(ranks: int, flags: Iterable[str]) -> Run:
    """Documents of very different lengths, several a row; compared with one GPU that has the same rows. Transformer
    Engine has no fp32 attention over packed rows: the noise is that of whole rows."""
    data = ("--data-path", "{folder}/short", "--kd-packing", "best_fit")
    return Run(ranks, (*flags, *data), like="packed, one GPU")


PACKED_LAYOUTS = {
    "packed, mbs4": packed(1, ("--micro-batch-size", "4")),
    "packed, cp2": packed(2, CP2),
    "packed, cp2-a2a": packed(2, (*CP2, "--cp-comm-type", "a2a")),
    "packed, tp2-sp": packed(2, TP2_SP),
    "packed, pp2": packed(2, PP2),
    "packed, cp2, teacher tp2": packed(2, (*CP2, "--kd-teacher-context-parallel-size", "1", *TEACHER_TP2)),
}
FP8_STUDENT, FP8_TEACHER = ("--fp8-format", "hybrid"), ("--kd-teacher-dtype", "fp8")
LIKE_FP8_STUDENT = dict(like="FP8 student, one GPU", noise=("FP8 student, one GPU", "one GPU"))
LIKE_FP8_TEACHER = dict(like="FP8 teacher, one GPU", noise=("FP8 teacher, one GPU", "one GPU"))
ROUNDS_ANEW = dict(noise=LIKE_FP8_TEACHER["noise"], rounds_anew=True)
FP8_LAYOUTS = {
    "FP8 student, dp2": Run(2, (*MBS2, *OVERLAP, *FP8_STUDENT), **LIKE_FP8_STUDENT),
    "FP8 student, tp2-sp": Run(2, (*TP2_SP, *FP8_STUDENT), **LIKE_FP8_STUDENT),
    "FP8 student, tp2-sp, graphs": Run(2, (*TP2_SP, *FP8_STUDENT, *STUDENT_GRAPHS), **LIKE_FP8_STUDENT),
    "FP8 teacher, dp2": Run(2, (*MBS2, *OVERLAP, *FP8_TEACHER), **LIKE_FP8_TEACHER),
    # Each shard of a weight has a scale of its own: such a teacher differs from that of one GPU as two independent
    # roundings do, so it is compared with bf16. tests/gpu/test_fp8_teacher.py compares how finely both round.
    "FP8 teacher, tp2-sp": Run(2, (*TP2_SP, *FP8_TEACHER), **ROUNDS_ANEW),
    "FP8 teacher, tp2-sp, graph": Run(2, (*TP2_SP, *FP8_TEACHER, *GRAPH), **ROUNDS_ANEW),
    "dp2, FP8 teacher tp2": Run(2, (*MBS2, *OVERLAP, *FP8_TEACHER, *TEACHER_TP2), **ROUNDS_ANEW),
}
LIKE_EXPERTS = dict(like="experts, one GPU", noise=("experts, one GPU, fp32", "experts, one GPU"), models="experts")
EXPERT_LAYOUTS = {
    "experts, ep2": Run(2, EP2, **LIKE_EXPERTS),
    "experts, tp2-sp": Run(2, TP2_SP, **LIKE_EXPERTS),
    "experts, dp2, teacher ep2": Run(2, (*MBS2, *OVERLAP, *TEACHER_EP2), **LIKE_EXPERTS),
    "experts, ep2, teacher dp2": Run(2, (*EP2, "--kd-teacher-expert-model-parallel-size", "1"), **LIKE_EXPERTS),
}
REFERENCES = {
    "one GPU": Run(1, MBS2),
    "one GPU, fp32": Run(1, MBS2, fp32=True),
    "packed, one GPU": packed(1, MBS2),
    "FP8 student, one GPU": Run(1, (*MBS2, *FP8_STUDENT)),
    "FP8 teacher, one GPU": Run(1, (*MBS2, *FP8_TEACHER)),
    "experts, one GPU": Run(1, MBS2, models="experts"),
    "experts, one GPU, fp32": Run(1, MBS2, models="experts", fp32=True),
}
"""The runs that others are compared with, or whose differences are yardsticks."""
COMPARED = LAYOUTS | TEACHER_LAYOUTS | PACKED_LAYOUTS | FP8_LAYOUTS | EXPERT_LAYOUTS
RUNS = REFERENCES | COMPARED
NEAR = {"loss": 0.03, "ce": 0.02, "kd": 0.05, "grad_norm": 0.2}
"""Bounds of what FP8 itself may change, those of tests/gpu/test_fp8_teacher.py."""
NEAR_STEPS = 8
"""Steps of that test. Later, small differences between weights have grown: bf16 alone changes gradient norms by 8%."""


def write_dense(folder: Path) -> None:
    """A teacher of about 0.9e9 parameters with a peaked distribution, and a student of 0.2e9."""
    teacher = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_key_value_heads=8)
    student = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_key_value_heads=4)
    common = dict(vocab_size=VOCAB, num_attention_heads=16, max_position_embeddings=4096)
    write_models(folder, teacher, {**student, "tie_word_embeddings": True}, **common)


def write_experts(folder: Path) -> None:
    """The same for mixtures of 8 experts, of which 2 compute a token: 0.5e9 and 0.1e9 parameters."""
    common = dict(vocab_size=VOCAB, num_attention_heads=16, head_dim=64, max_position_embeddings=4096)
    common |= dict(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=False)
    teacher = dict(hidden_size=1024, moe_intermediate_size=1024, num_hidden_layers=16, num_key_value_heads=8)
    student = dict(hidden_size=512, moe_intermediate_size=512, num_hidden_layers=8, num_key_value_heads=4)
    sizes = {"teacher": Qwen3MoeConfig(**common, **teacher), "student": Qwen3MoeConfig(**common, **student)}
    save_models(folder, Qwen3MoeForCausalLM, sizes)


def write_texts(folder: Path) -> None:
    """Text with structure in whole rows, and in documents of very different lengths."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    short = np.clip(np.random.default_rng(1).lognormal(5.0, 1.0, 3000), 2, 1024).astype(int)
    lengths = {"text": [1024] * 600, "short": short.tolist()}
    for name, of_documents in lengths.items():
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        for length in of_documents:
            tokens = np.minimum(rng.zipf(1.3, size=length), VOCAB - 2)
            builder.add_document(torch.from_numpy(tokens), [length])
        builder.finalize(str(folder / f"{name}.idx"))


def needed(names: Iterable[str]) -> list[str]:
    """The compared runs with these names, after the runs that they are compared with."""
    names = list(dict.fromkeys(names))
    wanted = {name for run in map(COMPARED.get, names) for name in (run.like, *run.noise)}
    return [*(name for name in REFERENCES if name in wanted), *names]


def train(root: Path, name: str, number: int) -> list[dict]:
    """A run of pretrain_kd.py; its metrics, one dictionary per iteration.

    Args:
        root: folder of the models and the texts.
        name: name of the run.
        number: spreads runs of one rank over the GPUs.
    """
    run = RUNS[name]
    models, flags = root / run.models, [flag.format(folder=root) for flag in run.flags]
    words = [
        *("--kd-teacher-hf", str(models / "teacher"), "--kd-student-hf", str(models / "student")),
        *("--kd-ratio", "0.5", "--tokenizer-type", "NullTokenizer"),
        *(() if "--data-path" in flags else ("--data-path", str(root / "text"))),
        *("--split", "90,10,0", "--seq-length", "1024", "--global-batch-size", "16"),
        *("--train-iters", str(STEPS), "--lr", "3e-4", "--lr-warmup-iters", "2"),
        *("--eval-interval", "1000", "--eval-iters", "1", "--seed", "7"),
        *([] if run.fp32 else ["--bf16"]),
    ]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    listed = gpus.split(",")
    alone = {"CUDA_VISIBLE_DEVICES": listed[number % len(listed)]} if run.ranks == 1 else {}
    began = time.monotonic()
    lines = launch(name, root, run.ranks, [*words, *flags], **alone)
    print(f"\n{name}: {time.monotonic() - began:.0f} s", flush=True)
    return lines


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """name -> its metrics, of the selected tests and of what these compare with; several at a time."""
    root = tmp_path_factory.mktemp("layouts")
    items = [item for item in request.session.items if "runs" in item.fixturenames]
    names = needed(item.callspec.params["name"] for item in items)
    writers = {"dense": write_dense, "experts": write_experts}
    write_texts(root)
    for models in {RUNS[name].models for name in names}:
        writers[models](root / models)
    pool = ThreadPoolExecutor(AT_A_TIME)
    yield {name: pool.submit(train, root, name, number) for number, name in enumerate(names)}
    pool.shutdown(cancel_futures=True)


def compare(runs: dict[str, Future], name: str) -> None:
    """Print a run's row of the table, and check it against its yardstick."""
    run = COMPARED[name]
    one, steps = runs[run.like].result(), NEAR_STEPS if run.rounds_anew else STEPS
    assert one[-1]["ce"] < one[0]["ce"]
    bounds = bounds_of(run, *(runs[other].result()[:steps] for other in run.noise))
    values = row(name, runs[name].result()[:steps], one[:steps], like=run.like, noise=bounds)
    for key in KEYS:
        assert values[key] <= bounds[key], (
            f"{key} differs by {values[key]}, {' from '.join(run.noise)} by {bounds[key]}"
        )


def bounds_of(run: Run, rounded: list[dict], exact: list[dict]) -> dict[str, float]:
    """The largest differences that a run may have: those of its noise. Of another noise of the same size the largest
    values are others: a quarter more, and for gradient norms, which vary most, what FP8 may change."""
    noise = {key: difference(rounded, exact, key) for key in KEYS}
    if not run.rounds_anew:
        return noise
    return {key: 1.25 * value for key, value in noise.items()} | {"grad_norm": NEAR["grad_norm"]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_like_one_gpu(runs: dict[str, Future], name: str) -> None:
    one = runs["one GPU"].result()
    assert one[-1]["ce"] < one[0]["ce"]
    compare(runs, name)


@pytest.mark.parametrize("name", TEACHER_LAYOUTS)
def test_a_teacher_in_another_layout_teaches_like_on_one_gpu(runs: dict[str, Future], name: str) -> None:
    compare(runs, name)


@pytest.mark.parametrize("name", PACKED_LAYOUTS)
def test_packed_layout_trains_like_one_gpu(runs: dict[str, Future], name: str) -> None:
    compare(runs, name)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
)
@pytest.mark.parametrize("name", FP8_LAYOUTS)
def test_layout_in_fp8_trains_like_one_gpu_in_fp8(runs: dict[str, Future], name: str) -> None:
    """FP8 on one GPU is near bf16. A layout that rounds as one GPU does is nearer to it than that; another one is as
    near bf16 as one GPU is."""
    noise = FP8_LAYOUTS[name].noise
    seen = row(noise[0], *(runs[other].result() for other in noise))
    assert {key: seen[key] <= NEAR[key] for key in KEYS} == dict.fromkeys(KEYS, True)
    compare(runs, name)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_on_two_gpus_train_like_on_one(runs: dict[str, Future], name: str) -> None:
    compare(runs, name)
