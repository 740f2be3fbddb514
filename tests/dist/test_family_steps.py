"""Every family: two training steps, as student and as teacher, have transformers' losses and the gradient of every
parameter.

Without `-m slow`, families with layers of mkd's own run packed rows with TP and SP and padded ones with PP, and one
model of every other family runs packed rows on one rank; `-m slow` runs every model in every layout that it allows.
"""

from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.models import GPTModelBuilder, GPTModelConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.config.kd_config import KDConfig
from mkd.distributed.groups import Groups
from mkd.losses import LossOptions
from mkd.models import mamba, state_space
from mkd.models.gpt import gpt_config
from mkd.models.model_options import ModelOptions
from mkd.teacher.online import OnlineTeacher
from mkd.train.objective import LossContext
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep
from tests.dist.test_hf_families import GEMMA2, GEMMA3, GLM4, NO_SPECIAL_TOKENS, OLMO3, TWO
from tests.dist.test_hf_families import MODELS as EVERY_MODEL
from tests.support.delta_rule import exact_delta_rule
from tests.support.dist.kd_samples import ROW, microbatches, samples
from tests.support.dist.kd_step import Layout, model_arguments, parallel_state
from tests.support.dist.outcome import total
from tests.support.hf_folders import make_model
from tests.support.hf_models import HYBRID_MODELS, MIXER_MODELS
from tests.support.slow import slow
from tests.support.tolerance import gradient_error

VOCAB, PADDED = 131, 256
RATIO, TEMPERATURE, RATE = 0.3, 2.0, 0.01
OWN_LAYERS: dict[str, dict[str, Any]] = {
    "olmo2": {"model_type": "olmo2", **TWO},
    "olmo3": OLMO3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "glm4": GLM4,
    **{name: sizes | {"layer_types": ["full_attention", "linear_attention"]} for name, sizes in HYBRID_MODELS.items()},
    **MIXER_MODELS,
}
LIKE_OTHERS = "qwen3.5 moe"
"""Its layers are those of Qwen3-Next and Qwen3.5."""
RATES = dict.fromkeys([*HYBRID_MODELS, "qwen3_5", "qwen3_5_moe"], 0.0002)
"""Learning rates other than `RATE`: after a larger step, rounding in the first gradients is amplified in the second."""
NEAR = {
    name: sizes
    for name, sizes in EVERY_MODEL.items()
    if sizes["model_type"] not in {sizes["model_type"] for sizes in OWN_LAYERS.values()}
}
"""Models of Megatron's own layers."""
ONE_PER_FAMILY = list({sizes["model_type"]: name for name, sizes in NEAR.items()}.values())
"""The last model of each family, which has the most of its options."""
TOLERANCE = 1e-4
"""fp32, two implementations of a model whose weights are large: gradients pass through all layers in another order."""
ROUTING = {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
"""transformers' logits have no load-balancing loss; config.json's coefficient would add one to the student's loss."""


@dataclass
class References:
    """Steps of transformers and autograd, computed when a test needs them."""

    root: Path
    found: dict[tuple[str, str], list[tuple[float, Path]]] = field(default_factory=dict)
    model_class: ClassVar[Any] = AutoModelForCausalLM

    def make(self, root: Path, name: str, sizes: dict[str, Any]) -> None:
        """Save student and teacher."""
        make_model(root / "student", **{**NO_SPECIAL_TOKENS, **sizes})
        make_model(root / "teacher", **{**NO_SPECIAL_TOKENS, **teacher_sizes(name, sizes)})

    def models(self, models: dict[str, dict[str, Any]], data: str) -> dict[str, dict[str, Any]]:
        """name -> sizes, folders of student and teacher, and the loss and a folder of gradients of each step."""
        data = "padded" if data == "packed" else data
        return {name: self._model(name, sizes, data) for name, sizes in models.items()}

    def _model(self, name: str, sizes: dict[str, Any], data: str) -> dict[str, Any]:
        root = self.root / name
        if not root.exists():
            self.make(root, name, sizes)
        if (name, data) not in self.found:
            self.found[name, data] = reference_steps(root, data, RATES.get(name, RATE), self.model_class)
        return {"sizes": sizes, "root": root, "steps": self.found[name, data], "rate": RATES.get(name, RATE)}


def teacher_sizes(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Wider than the student; with layers of mkd's own also deeper."""
    if sizes["model_type"] in ("helium", "olmoe", "cohere2"):  # heads are together as wide as the hidden states
        return sizes | {"hidden_size": 60, "head_dim": 10}
    if name not in OWN_LAYERS:
        return sizes | {"hidden_size": 60}
    kinds = {key: sizes[key] * 2 for key in ("layer_types", "layers_block_type") if key in sizes}
    return sizes | {"hidden_size": 60, "num_hidden_layers": 4} | kinds


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("steps"))


def reference_steps(root: Path, data: str, rate: float, model_class: Any) -> list[tuple[float, Path]]:
    """(loss, folder with the gradients in place of the weights) of two steps of transformers and autograd."""
    student, teacher = (
        model_class.from_pretrained(root / name, dtype=torch.float32, attn_implementation="eager")
        for name in ("student", "teacher")
    )
    rows = samples(data, 1)
    tokens, labels, mask = (torch.stack([row[name] for row in rows]) for name in ("tokens", "labels", "loss_mask"))
    steps = []
    for step in range(2):
        with exact_delta_rule():
            logits = student(tokens).logits
            with torch.no_grad():
                target = (teacher(tokens).logits / TEMPERATURE).log_softmax(-1)
        ce = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        kl = (target.exp() * (target - (logits / TEMPERATURE).log_softmax(-1))).sum(-1) * TEMPERATURE**2
        loss = (((1 - RATIO) * ce + RATIO * kl) * mask).sum() / mask.sum()
        student.zero_grad()
        loss.backward()
        weights = {name: p.data.clone() for name, p in student.named_parameters()}
        for p in student.parameters():
            if p.grad is None:  # a vision tower, which no image goes through
                p.grad = torch.zeros_like(p)
            p.data = p.grad.clone()
        folder = root / f"{data}-{step}"
        student.save_pretrained(folder)
        for name, p in student.named_parameters():
            p.data = weights[name] - rate * p.grad
        steps.append((loss.item(), folder))
    return steps


def configuration(folder: Path, layout: Layout) -> GPTModelConfig:
    sizes = read_architecture(HFFolder(folder, "--hf"))[1]
    return gpt_config(model_arguments(sizes | ROUTING, layout, False, VOCAB, PADDED))


def build(root: Path, layout: Layout, groups: Groups) -> tuple[list[nn.Module], OnlineTeacher]:
    """The student's chunks and the teacher."""
    chunks = GPTModelBuilder(configuration(root / "student", layout)).build_distributed_models(
        pg_collection=groups.collection,
        ddp_config=DistributedDataParallelConfig(),
        data_parallel_random_init=False,
    )
    load_hf_weights(chunks, HFFolder(root / "student", "--hf"))
    for chunk in chunks:
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    teacher = OnlineTeacher.build(
        configuration(root / "teacher", layout),
        groups,
        load_weights=lambda some: load_hf_weights(some, HFFolder(root / "teacher", "--hf")),
        fingerprint="",
        offload=False,
    )
    return chunks, teacher


def train(
    rank: int, world_size: int, models: dict[str, dict[str, Any]], layout: Layout, data: str
) -> dict[str, list[dict[str, Any]]]:
    """name -> per step: reports, and the error of the gradient of each parameter on this rank."""
    found = {}
    # Megatron does not shard experts with biases.
    biased = {name: model for name, model in models.items() if model["sizes"]["model_type"] == "gpt_oss"}
    others = {name: model for name, model in models.items() if name not in biased}
    for some, own in ((others, layout), (biased, replace(layout, etp=1))):
        if not some:
            continue
        with parallel_state(own):
            groups = Groups.from_megatron()
            for name, model in some.items():
                chunks, teacher = build(model["root"], own, groups)
                found[name] = []
                for _, folder in model["steps"]:
                    reports = one_step(chunks, teacher, groups, own, data)
                    errors = gradient_errors(chunks, folder)
                    descend(chunks, model["rate"])
                    found[name].append({"reports": reports, "errors": errors})
    return found


def one_step(
    chunks: list[nn.Module], teacher: OnlineTeacher, groups: Groups, layout: Layout, data: str
) -> dict[str, Tensor]:
    """The sums of the reports; the gradients are in the parameters' `main_grad`."""
    kd = KDConfig(teacher_hf=["T"], ratio=RATIO, temperature=TEMPERATURE)
    schedule = TeacherThenStudent(kd, groups, teacher, VOCAB, lambda: 0, None, None)
    batches = microbatches(data, layout.cp, layout.mbs, groups.dp.rank(), groups.dp.size())
    for chunk in chunks:
        chunk.zero_grad_buffer()
    reports = schedule.around(get_forward_backward_func(pp_size=layout.pp, vp_size=None))(
        forward_step_func=ForwardStep(LossContext(groups, VOCAB, LossOptions(chunk_rows=5))),
        data_iterator=iter(batches),
        model=chunks,
        num_microbatches=len(batches),
        seq_length=ROW,
        micro_batch_size=layout.mbs,
        forward_only=False,
    )
    if groups.is_last_stage and groups.tp.rank() == 0:
        return {name: sum(report[name].double() for report in reports) for name in reports[0]}
    return {}


@torch.no_grad()
def gradient_errors(chunks: list[nn.Module], folder: Path) -> dict[str, float]:
    """Error of each parameter's gradient against a folder of gradients."""
    named = [item for chunk in chunks for item in unwrap_model(chunk).named_parameters()]
    weights = [p.data.clone() for _, p in named]
    load_hf_weights(chunks, HFFolder(folder, "--hf"))
    args = read_architecture(HFFolder(folder, "--hf"))[1]
    options = ModelOptions.of(Namespace(**args))
    errors = {name: gradient_error(name, p.main_grad, p.data, options) for name, p in named}
    for (_, p), weight in zip(named, weights, strict=True):
        p.data.copy_(weight)
    return errors


@torch.no_grad()
def descend(chunks: list[nn.Module], rate: float) -> None:
    """A step of plain SGD."""
    for chunk in chunks:
        for p in unwrap_model(chunk).parameters():
            p.data -= rate * p.main_grad


LAYOUTS = {
    "one rank": (Layout(), "text"),
    "packed": (Layout(), "packed"),
    "one microbatch, packed": (Layout(mbs=8), "packed"),
    "TP2, SP, packed": (Layout(tp=2, sp=True), "packed"),
    "TP2": (Layout(tp=2), "padded"),
    "PP2": (Layout(pp=2), "text"),
    "CP2": (Layout(cp=2), "text"),
    "CP2, packed": (Layout(cp=2), "packed"),
    "EP2": (Layout(ep=2), "text"),
}


def allows(sizes: dict[str, Any], layout: Layout) -> bool:
    """True if Megatron trains the model in the layout: mixtures need --sequence-parallel with TP."""
    is_mixture = "num_experts_per_tok" in sizes
    return not (layout.ep > 1 and not is_mixture) and not (layout.tp > 1 and not layout.sp and is_mixture)


def assert_two_steps(
    gloo_pool: Any, references: References, models: dict[str, dict[str, Any]], layout_name: str, steps: Any = train
) -> None:
    layout, data = LAYOUTS[layout_name]
    expected = references.models({name: some for name, some in models.items() if allows(some, layout)}, data)
    results = gloo_pool(layout.tp * layout.pp * layout.cp * layout.ep).run(steps, expected, layout, data)
    for name, model in expected.items():
        for step, (loss, _) in enumerate(model["steps"]):
            sums = total([result[name][step]["reports"] for result in results])
            assert sums["loss"][0] / sums["loss"][1] == pytest.approx(loss, rel=TOLERANCE), (name, step)
            errors = [result[name][step]["errors"] for result in results]
            assert all(errors)
            assert {key: error for some in errors for key, error in some.items() if not error <= TOLERANCE} == {}, name


@pytest.mark.parametrize(
    "layout_name", ["TP2, SP, packed", "PP2", "EP2", *slow(["one rank", "packed", "TP2", "CP2", "CP2, packed"])]
)
def test_two_steps(gloo_pool: Any, references: References, layout_name: str) -> None:
    models = {name: sizes for name, sizes in OWN_LAYERS.items() if name != LIKE_OTHERS}
    assert_two_steps(gloo_pool, references, models, layout_name)


def train_in_blocks(*args: Any) -> dict[str, list[dict[str, Any]]]:
    """`train` with Mamba layers that compute 8 tokens at one time."""
    usual, state_space.BLOCK, mamba.CHUNK = (state_space.BLOCK, mamba.CHUNK), 8, 4
    try:
        return train(*args)
    finally:
        state_space.BLOCK, mamba.CHUNK = usual


@pytest.mark.parametrize("layout_name", ["TP2, SP, packed", "CP2, packed", *slow(["packed", "TP2", "CP2"])])
def test_blocks_of_tokens(gloo_pool: Any, references: References, layout_name: str) -> None:
    """The state, and the last tokens for the convolution, pass from block to block."""
    assert_two_steps(gloo_pool, references, {"nemotron-h": MIXER_MODELS["nemotron-h"]}, layout_name, train_in_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("layout_name", [name for name in LAYOUTS if name != "one microbatch, packed"])
def test_two_steps_with_layers_of_others(gloo_pool: Any, references: References, layout_name: str) -> None:
    assert_two_steps(gloo_pool, references, {LIKE_OTHERS: OWN_LAYERS[LIKE_OTHERS]}, layout_name)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_two_steps_of_near_families(gloo_pool: Any, references: References, name: str) -> None:
    assert_two_steps(gloo_pool, references, {name: NEAR[name]}, "one microbatch, packed")


def test_norm_of_the_latent_without_sequence_parallelism(gloo_pool: Any, references: References) -> None:
    """Its gradient is not summed over tensor-parallel ranks."""
    assert_two_steps(gloo_pool, references, {"youtu": NEAR["youtu"]}, "TP2")


@pytest.mark.slow
@pytest.mark.parametrize("layout_name", [name for name in LAYOUTS if name != "one microbatch, packed"])
def test_every_near_model(gloo_pool: Any, references: References, layout_name: str) -> None:
    assert_two_steps(gloo_pool, references, NEAR, layout_name)
