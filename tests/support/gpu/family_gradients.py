"""Gradients of every parameter of a family's model against transformers', in bf16 and fp32, on a GPU and on CPU.

Processes of two kinds work on one folder. Those on CPU (`references`) write models, transformers' gradients, and the
error of Megatron's local layers on CPU. Those on GPUs (`measurements`) load each model as soon as it is there.
"""

import gc
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.layouts import TensorShard
from mkd.checkpoint.hf.load import HFParameters, global_name, load_hf_weights
from mkd.compat.experts import (
    add_router_biases_in_fp32,
    balance_experts_over_unequal_ranks,
    train_biased_experts_on_whole_ranks,
)
from mkd.config.flags import default_arguments
from mkd.cpu import is_active
from mkd.cpu.flags import set_cpu_values
from mkd.models.gpt import gpt_config
from tests.dist.test_hf_gradients import RUN
from tests.gpu.test_families import CASES, VOCAB, build
from tests.support.delta_rule import exact_delta_rule

ROWS, LENGTH = 2, 128
TOKENS = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
UPSTREAM = torch.randn(ROWS, LENGTH, VOCAB, generator=torch.Generator().manual_seed(3)).bfloat16().float()
NAMES = [name for name, case in CASES.items() if not case.flags]
"""Models, without the cases that train adapters of one of these models."""
SMALL_GRADIENT = 1e-4
"""A parameter's error is relative to its gradient, or to this part of the whole gradient where that is larger: some
gradients are 0 but for rounding (the router of one normalized expert per token)."""
LAUNCH = (
    "import mkd.cpu; mkd.cpu.wanted() and mkd.cpu.activate(); "
    "from tests.support.gpu import family_gradients; family_gradients.main()"
)
"""A process on CPU redirects torch.cuda before it imports megatron."""
CPU = {"MKD_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Without a visible GPU, transformers computes with PyTorch's operations only."""
PATIENCE = 900.0
"""Seconds that a process on a GPU waits for a reference; the test ends it when no process writes one any more."""


@dataclass(frozen=True)
class Errors:
    """Errors in the 2-norm, relative."""

    logits: float
    total: float
    parameters: dict[str, float]
    """By Megatron's names."""

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter with the largest error."""
        name = max(self.parameters, key=self.parameters.__getitem__)
        return name, self.parameters[name]

    def beyond(self, yardstick: "Errors", factor: float = 1.5, of_parameter: float = 2.0) -> dict[str, float]:
        """Errors above a multiple of another computation's error; empty if there are none.

        A parameter's error is compared with the largest one of its kind in all layers and experts, or with the total
        error: a vector of four numbers may be right by chance.

        Args:
            yardstick: errors of an equally exact computation.
            factor: for logits and the total.
            of_parameter: for a single parameter.
        """
        kinds: dict[str, float] = {}
        for name, error in yardstick.parameters.items():
            kinds[kind_of(name)] = max(kinds.get(kind_of(name), yardstick.total), error)
        bounds = {name: of_parameter * kinds.get(kind_of(name), yardstick.total) for name in self.parameters}
        found = {"logits": self.logits, "total": self.total, **self.parameters}
        bounds |= {"logits": factor * yardstick.logits, "total": factor * yardstick.total}
        return {name: error for name, error in found.items() if not error <= bounds[name]}


_SPELLINGS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("linear_q_up_proj.layer_norm_", "q_layernorm."),
    ("linear_kv_up_proj.layer_norm_", "kv_layernorm."),
)
"""Norms that Transformer Engine computes in the linear layers that follow, as local layers name them."""


def kind_of(name: str) -> str:
    """The name of a parameter without the numbers of its layer and expert, under any layer spec."""
    for fused, local in _SPELLINGS:
        name = name.replace(fused, local)
    name = re.sub(r"\.experts\.(linear_fc[12]\.(?:weight|bias))\d+$", r".experts.\1", name)
    return re.sub(r"\.(?:local_experts\.)?\d+\.", ".", name).replace("experts.local_experts.", "experts.")


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Random values that bf16 represents for every parameter, with hidden states and attention scores of about 1.

    In mixtures, tokens of one remainder modulo the number of experts share a large direction of their embedding, which
    the routers' rows recognize: rounding sends no token to another expert.
    """
    generator = torch.Generator().manual_seed(20)
    config = getattr(model.config, "text_config", model.config)
    counts = [getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts, chosen = next((count for count in counts if count), 0), getattr(config, "num_experts_per_tok", None) or 1
    width = config.hidden_size
    directions = torch.linalg.qr(torch.randn(width, max(experts, 1), generator=generator)).Q.T
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        last = name.rpartition(".")[2]
        if value is model.get_input_embeddings().weight:
            value.normal_(0.0, 0.5, generator=generator)
            if experts:
                value += 24.0 * directions[torch.arange(len(value)) % experts]
        elif experts and value.shape == (experts, width) and re.search(r"(gate|router|router\.linear)\.weight$", name):
            shares = [(1 - j / (2 * chosen)) * directions.roll(j, 0) for j in range(chosen)]
            value.copy_(0.15 * torch.stack(shares).sum(0)).add_(0.005 * torch.randn(value.shape, generator=generator))
        elif last == "e_score_correction_bias":
            value.uniform_(-0.03, 0.03, generator=generator)
        elif not isinstance(value, nn.Parameter):
            continue
        elif last in ("A_log", "dt_bias"):
            value.uniform_(-1.0, 1.0, generator=generator)
        elif last == "sinks" or last.endswith("bias"):
            value.uniform_(-0.5, 0.5, generator=generator)
        elif value.dim() == 1:
            value.uniform_(0.5, 1.5, generator=generator)
        else:
            value.normal_(0.0, 0.3 if "conv1d" in name else width**-0.5, generator=generator)
        value.copy_(value.bfloat16())


def write_reference(root: Path, name: str) -> None:
    """Write a model to root/hf, its logits, and gradients of sum(logits * UPSTREAM) under its tensors' names."""
    torch.manual_seed(0)
    sizes = CASES[name].sizes
    model = build(sizes).float()
    randomize(model)
    model.save_pretrained(root / "hf")
    # Read from the folder, a Mistral with windows by layer is another class.
    kind = AutoModelForImageTextToText if "text_config" in sizes else AutoModelForCausalLM
    model = kind.from_pretrained(root / "hf", dtype=torch.float32, attn_implementation="eager").train()
    for experts in model.modules():
        if type(experts).__name__ == "GptOssExperts":  # older transformers have a constant for `swiglu_limit`
            experts.limit = model.config.swiglu_limit
    logits = model(input_ids=TOKENS).logits
    logits.backward(UPSTREAM)
    save_file({"logits": logits.detach().contiguous()}, root / "logits.safetensors")
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    model.save_pretrained(root / "gradients")


Edit = Callable[[Any], None]


def measure(
    root: Path,
    dtype: torch.dtype,
    grouped: bool = False,
    edit_config: Edit = lambda config: None,
    edit_model: Edit = lambda model: None,
) -> Errors:
    """Errors of the model in `root` as a job builds it.

    Args:
        root: folder of `write_reference`.
        dtype: of the parameters.
        grouped: as --moe-grouped-gemm.
        edit_config: changes Megatron's `GPTModelConfig`.
        edit_model: changes the loaded model.
    """
    folder = HFFolder(root / "hf", "--hf")
    family, architecture = read_architecture(folder)
    config = _configuration(architecture, dtype, grouped)
    edit_config(config)
    config.pre_wrap_hooks.append(lambda chunks: load_hf_weights(chunks, folder) or chunks)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (chunk,) = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    model = unwrap_model(chunk)
    edit_model(model)
    logits = _logits(model.train())
    (logits * UPSTREAM.to(logits.device)).sum().backward()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    wanted = load_file(root / "logits.safetensors")["logits"]
    expected = HFParameters(HFFolder(root / "gradients", "--hf"), family, architecture)
    parameters, total = _parameter_errors(model, expected)
    return Errors(_norm(logits.detach().cpu() - wanted) / _norm(wanted), total, parameters)


def _configuration(architecture: dict[str, Any], dtype: torch.dtype, grouped: bool) -> GPTModelConfig:
    args = default_arguments()
    vars(args).update(architecture | RUN)
    args.params_dtype, args.bf16 = dtype, dtype == torch.bfloat16
    args.perform_initialization, args.gradient_accumulation_fusion = False, False
    args.seq_length, args.micro_batch_size = LENGTH, ROWS
    args.padded_vocab_size, args.moe_grouped_gemm = args.vocab_size, grouped
    if is_active():
        set_cpu_values(args)
    config = gpt_config(args)
    config.parallel_output = False
    return config


def _logits(model: GPTModel) -> Tensor:
    """[b, s, V] fp32, after the softcap, which is a part of mkd's losses."""
    device = next(model.parameters()).device
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None] if is_active() else None
    positions = torch.arange(LENGTH, device=device).expand(ROWS, LENGTH)
    logits = model(TOKENS.to(device), positions, mask)[..., :VOCAB].float()
    softcap = model.config.logit_softcap
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _parameter_errors(model: GPTModel, expected: HFParameters) -> tuple[dict[str, float], float]:
    """(name -> error, error of the whole gradient)."""
    differences, sizes = {}, {}
    for name, param in model.named_parameters():
        wanted = expected.read(global_name(model, name), TensorShard(0, 1), tuple(param.shape))
        found = torch.zeros_like(param) if param.grad is None else param.grad
        differences[name] = _norm(found.cpu().double() - wanted.double())
        sizes[name] = _norm(wanted)
    whole = _norm(torch.tensor(list(sizes.values())))
    errors = {name: value / max(sizes[name], SMALL_GRADIENT * whole) for name, value in differences.items()}
    return errors, _norm(torch.tensor(list(differences.values()))) / whole


def _norm(values: Tensor) -> float:
    return torch.linalg.vector_norm(values.double()).item()


@contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's groups of one rank, and the patches of a job."""
    balance_experts_over_unequal_ranks()
    train_biased_experts_on_whole_ranks()
    add_router_biases_in_fp32()
    dist.init_process_group("gloo" if is_active() else "nccl", rank=0, world_size=1, store=dist.HashStore())
    if not is_active():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    ps.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        ps.destroy_model_parallel()
        dist.destroy_process_group()


def variants(name: str) -> dict[str, tuple[torch.dtype, bool]]:
    """Computations on the GPU: label -> dtype, and grouped experts or one after another."""
    found = {"bf16": (torch.bfloat16, False), "fp32": (torch.float32, False)}
    if CASES[name].has_experts:
        found["bf16, grouped"] = (torch.bfloat16, True)
    return found


def main() -> None:
    """Arguments: `references` or `measurements`, the folder, names of models as JSON. One subfolder per model."""
    role, folder, names = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    print(f"{role}: imported", flush=True)
    with one_rank(), exact_delta_rule():
        for name in names:
            root = folder / str(NAMES.index(name))
            if role == "references":
                root.mkdir(parents=True)
                work = {"reference": lambda root=root, name=name: write_reference(root, name)}
                dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
                work |= {key: lambda root=root, dtype=dtype: measure(root, dtype) for key, dtype in dtypes.items()}
            else:
                runs = variants(name).items()
                work = {"reference": lambda root=root: _wait_for(root / "references.json")}
                work |= {key: lambda root=root, run=run: measure(root, *run) for key, run in runs}
            _write(root / f"{role}.json", {key: _attempt(one) for key, one in work.items()})
            gc.collect()


def _attempt(work: Callable[[], Errors | None]) -> dict[str, Any]:
    """The errors that `work` returns, or the error that it raises."""
    began = time.monotonic()
    try:
        found = work()
    except Exception:  # another model may work
        return {"failure": traceback.format_exc()[-3000:]}
    return {**(vars(found) if found else {}), "seconds": round(time.monotonic() - began, 2)}


def _write(file: Path, content: dict[str, Any]) -> None:
    """Write a whole file, or none."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(file)


def _wait_for(file: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} was not written within {PATIENCE:.0f} s")
        time.sleep(0.05)


def start(role: str, folder: Path, names: Sequence[str], log: str, **variables: str) -> subprocess.Popen:
    """A process that works on these models; its output goes to folder/`log`."""
    command = [sys.executable, "-c", LAUNCH, role, str(folder), json.dumps(list(names))]
    with (folder / log).open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variables})


def errors_in(content: dict[str, Any]) -> Errors:
    """The errors of one computation.

    Raises:
        AssertionError: the computation failed.
    """
    assert "failure" not in content, content["failure"]
    return Errors(content["logits"], content["total"], content["parameters"])
