"""Models of bench_step: teacher and student with random weights in megatron-core and Hugging Face transformers.

All implementations read the same tokens and compute the gradient of every parameter of the student. megatron-core
accumulates gradients in persistent fp32 buffers; Hugging Face allocates them in the model's dtype in each step.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_cache import random_targets
from bench_common import DTYPES, MASKS, Stopwatch, supervised_mask
from bench_heads import Objective, with_ce
from bench_peers import eager_objective, model_optimizer_module
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder
from torch import Tensor, nn

import mkd.cpu
from mkd.config.flags import default_arguments
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.fp8_teacher import compute_in_fp8
from mkd.cpu.flags import set_cpu_values
from mkd.data.batch import KDBatch
from mkd.distributed.groups import Groups
from mkd.losses import LossOptions
from mkd.models.gpt import gpt_config
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.teacher import CachedTeacher
from mkd.teacher.cache.writer import StoreWriter
from mkd.teacher.interface import Teacher
from mkd.teacher.online import OnlineTeacher
from mkd.train.objective import LossContext
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep

ROTARY_BASE, NORM_EPSILON = 500000, 1e-5
TEACHER_LAYERS, STUDENT_LAYERS, BACKWARD, HEADS = "teacher", "student forward", "student backward", "heads and loss"
"""Parts of a step. Everything after the layers of a model in the forward pass, and before them in the backward pass, is
LM heads and loss (and the student's embedding)."""


SUPERVISED = ", supervised: "
"""In the name of a table row, before the share of supervised tokens."""


class Sizes(NamedTuple):
    """Sizes of a Llama model."""

    layers: int
    width: int
    ffn: int
    heads: int
    groups: int
    tied: bool
    rope_factor: float


@dataclass(frozen=True)
class Step:
    """The step of one implementation."""

    prepare: Callable[[], None]
    """Clears gradients, as an optimizer does between steps. Not timed."""
    run: Callable[[], None]
    """Runs forward and backward on one microbatch."""


def watch_layers(watch: Stopwatch, student_layers: nn.Module, teacher_layers: nn.Module) -> None:
    """Mark the start and end of the layers of both models, for the student also in the backward pass."""

    def begins(name: str) -> Callable:
        return lambda *unused, **options: watch.mark(name)

    def ends(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output.last_hidden_state
        watch.mark(HEADS)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: watch.mark(BACKWARD))

    for layers, name in ((student_layers, STUDENT_LAYERS), (teacher_layers, TEACHER_LAYERS)):
        layers.register_forward_pre_hook(begins(name))
        layers.register_forward_hook(ends)


def random_sample(args: Namespace) -> dict[str, Tensor]:
    """A microbatch [b, s] of random tokens, all supervised, in the form of Megatron's data loader."""
    shape = (args.samples, args.seq_length)
    return {
        "tokens": torch.randint(0, args.vocab, shape, device="cuda"),
        "labels": torch.randint(0, args.vocab, shape, device="cuda"),
        "loss_mask": torch.ones(shape, device="cuda"),
        "position_ids": torch.arange(args.seq_length, device="cuda").expand(shape),
    }


def model_arguments(sizes: Sizes, args: Namespace) -> Namespace:
    """Megatron arguments of a model without dropout, on one rank."""
    values = dict(
        num_layers=sizes.layers,
        hidden_size=sizes.width,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        group_query_attention=True,
        num_query_groups=sizes.groups,
        kv_channels=sizes.width // sizes.heads,
        swiglu=True,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPSILON,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
        use_rope_scaling=True,
        rope_scaling_factor=sizes.rope_factor,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        max_position_embeddings=args.seq_length,
        seq_length=args.seq_length,
        vocab_size=args.vocab,
        padded_vocab_size=args.vocab,
        untie_embeddings_and_output_weights=not sizes.tied,
        params_dtype=DTYPES[args.dtype],
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=_has_apex(),
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
    )
    arguments = default_arguments()
    for name, value in values.items():
        setattr(arguments, name, value)
    if mkd.cpu.is_active():
        set_cpu_values(arguments)
    return arguments


def _has_apex() -> bool:
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True)
class MegatronModels:
    """Both models in megatron-core, with Transformer Engine on a GPU."""

    chunks: list[nn.Module]
    """The student in Megatron's wrappers, with fp32 gradient buffers."""
    student: GPTModel
    teacher: OnlineTeacher | None
    teacher_model: GPTModel | None
    groups: Groups
    args: Namespace
    sample: dict[str, Tensor]
    watch: Stopwatch
    folders: ExitStack
    """Deletes temporary folders together with the models."""

    @classmethod
    @contextmanager
    def built(
        cls, args: Namespace, watch: Stopwatch, with_teacher: bool = True, fp8: bool = False
    ) -> Iterator["MegatronModels"]:
        """Build both models, or the student alone; the teacher may run in FP8."""
        groups = Groups.from_megatron()
        student = GPTModelBuilder(gpt_config(model_arguments(args.student, args)))
        chunks = student.build_distributed_models(
            pg_collection=groups.collection,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            data_parallel_random_init=False,
        )
        inner, teacher, teacher_model = unwrap_model(chunks[0]), None, None
        if with_teacher:
            seen: list[nn.Module] = []
            teacher_args = model_arguments(args.teacher, args)
            if fp8:
                compute_in_fp8(teacher_args)
            config = gpt_config(teacher_args)
            teacher = OnlineTeacher.build(config, groups, load_weights=seen.extend, fingerprint="")
            teacher_model = unwrap_model(seen[0])
        watch_layers(watch, inner.decoder, teacher_model.decoder if with_teacher else nn.Identity())
        with ExitStack() as folders:
            yield cls(chunks, inner, teacher, teacher_model, groups, args, random_sample(args), watch, folders)

    def clear(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def ours(self, divergence: str, mask: str | None = None) -> Step:
        """mkd as in training: its schedule around Megatron's, its forward step, CE and a divergence at R = 0.5.

        Args:
            divergence: its name.
            mask: kind of `supervised_mask`; None: all tokens are supervised.
        """
        sample = {name: value.cpu() for name, value in self.sample.items()}
        if mask is not None:
            sample["loss_mask"] = supervised_mask(mask, self.args.supervised, *sample["tokens"].shape)
        return self._trained(self.teacher, divergence, sample)

    def cached(self, divergence: str, top_k: int = 64) -> Step:
        """The same from random cached targets of `top_k` tokens. They are read once; in training this happens a step
        ahead."""
        sample = {name: value.cpu() for name, value in self.sample.items()}
        folder = Path(self.folders.enter_context(tempfile.TemporaryDirectory()))
        writer = StoreWriter(folder, CacheMeta("random", None, self.args.vocab, top_k, "log12"))
        for key in KDBatch.from_sample(sample, self.args.vocab).segment_hashes:
            rows = random_targets(self.args.seq_length, self.args.vocab, top_k, np.random.default_rng(0))
            writer.add(key, rows)
        writer.flush()
        reader = CacheReader(TeacherStore(folder, "--cache"), top_k, 1.0)
        teacher = CachedTeacher(reader, self.groups, tolerant=False, row_length=self.args.seq_length)
        return self._trained(teacher, divergence, sample)

    def _trained(self, teacher: Teacher, divergence: str, sample: dict[str, Tensor]) -> Step:
        kd = KDConfig(teacher_hf=["random weights"], ratio=0.5, loss=divergence)
        vocab = self.args.vocab
        schedule = TeacherThenStudent(kd, self.groups, teacher, vocab, current_iteration=lambda: 0)
        forward_backward = schedule.around(get_forward_backward_func(pp_size=1, vp_size=None))
        forward = ForwardStep(LossContext(self.groups, vocab, LossOptions(self.args.chunk_rows)))

        def run() -> None:
            forward_backward(
                forward_step_func=forward,
                data_iterator=iter([sample]),
                model=self.chunks,
                num_microbatches=1,
                seq_length=self.args.seq_length,
                micro_batch_size=self.args.samples,
                forward_only=False,
            )

        return Step(self.clear, run)

    def logits(self, model: GPTModel) -> Tensor:
        """[s, b, V] output of the LM head."""

        def head(
            *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, **unused: Any
        ) -> Tensor:
            return output_layer(hidden_states, weight=output_weight)[0]

        return model(self.sample["tokens"], self.sample["position_ids"], None, output_processor=head)

    @torch.no_grad()
    def teacher_logits(self) -> Tensor:
        """[s, b, V]"""
        return self.logits(self.teacher_model)

    def fused_ce(self, kind: str) -> Step:
        """No distillation: the teacher's logits are computed and discarded, the student trains on Megatron's own CE.
        A lower bound for any system that computes the teacher's logits. `kind`: te (Transformer Engine's kernel) or
        native (compiled pieces); on CPU it is unfused."""
        self.student.config.cross_entropy_fusion_impl = kind

        def run() -> None:
            self.teacher_logits()
            tokens, positions, labels = (self.sample[name] for name in ("tokens", "position_ids", "labels"))
            self.student(tokens, positions, None, labels=labels).mean().backward()

        return Step(self.clear, run)

    def model_optimizer(self) -> Step:
        """Model-Optimizer's `LogitsKLLoss` of all logits at once; forward KL without CE, its default."""
        from modelopt.torch.distill.plugins.megatron import LogitsKLLoss

        module = model_optimizer_module(LogitsKLLoss, 1)

        def run() -> None:
            teacher_logits = self.teacher_logits()
            per_token, *_ = module(self.logits(self.student), teacher_logits)
            per_token.mean().backward()

        return Step(self.clear, run)

    def eager(self, objective: Objective) -> Step:
        """Plain PyTorch on all logits at once, softmaxes in fp32."""

        def run() -> None:
            u = self.teacher_logits().flatten(0, 1)
            z = self.logits(self.student).flatten(0, 1)
            labels = self.sample["labels"].t().flatten()
            (eager_objective(z, u, labels, objective) / len(z)).backward()

        return Step(self.clear, run)


@dataclass(frozen=True)
class HuggingFaceModels:
    """Both models in transformers with its default attention, optionally with Liger's layers."""

    student: nn.Module
    teacher: nn.Module
    sample: dict[str, Tensor]

    @classmethod
    @contextmanager
    def built(cls, args: Namespace, watch: Stopwatch, liger_layers: bool) -> Iterator["HuggingFaceModels"]:
        """Build both models; inside the block Liger's layers may replace those of transformers."""
        from transformers.models.llama import modeling_llama

        replaced = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
        originals = {name: getattr(modeling_llama, name) for name in replaced}
        try:
            if liger_layers:
                from liger_kernel.transformers import apply_liger_kernel_to_llama

                apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
            student = _llama(args.student, args).train()
            teacher = _llama(args.teacher, args).eval().requires_grad_(False)
            watch_layers(watch, student.model, teacher.model)
            yield cls(student, teacher, random_sample(args))
        finally:
            for name, original in originals.items():
                setattr(modeling_llama, name, original)

    def clear(self) -> None:
        self.student.zero_grad(set_to_none=True)

    def eager(self, objective: Objective) -> Step:
        """Plain PyTorch on all logits at once, softmaxes in fp32."""

        def run() -> None:
            with torch.no_grad():
                u = self.teacher(self.sample["tokens"], use_cache=False).logits.flatten(0, 1)
            z = self.student(self.sample["tokens"], use_cache=False).logits.flatten(0, 1)
            (eager_objective(z, u, self.sample["labels"].flatten(), objective) / len(z)).backward()

        return Step(self.clear, run)

    def liger(self, make_loss: Callable[[], nn.Module]) -> Step:
        """A Liger loss from the hidden states and LM heads of both models."""
        module = make_loss()

        def hidden(model: nn.Module) -> Tensor:
            return model.model(self.sample["tokens"], use_cache=False).last_hidden_state.flatten(0, 1)

        def run() -> None:
            with torch.no_grad():
                u = hidden(self.teacher)
            z = hidden(self.student)
            heads = self.student.lm_head.weight, self.teacher.lm_head.weight
            module(z, heads[0], u, heads[1], self.sample["labels"].flatten()).backward()

        return Step(self.clear, run)


def _llama(sizes: Sizes, args: Namespace) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        tie_word_embeddings=sizes.tied,
        rms_norm_eps=NORM_EPSILON,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": float(ROTARY_BASE),
            "factor": sizes.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], attn_implementation="sdpa")


def liger_chunked_jsd() -> nn.Module:
    """Half JSD, half CE; compiled."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    return LigerFusedLinearJSDLoss(weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, compiled=True)


def liger_fused_jsd() -> nn.Module:
    """JSD alone."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=0.5)


def cached_rows(divergences: list[str]) -> list[tuple[str, Objective, Callable[[MegatronModels], Step]]]:
    """Name, objective and step of mkd with a cached teacher."""
    return [("mkd, cached teacher, K=64", with_ce(d), lambda models, d=d: models.cached(d)) for d in divergences]


def our_rows(
    divergences: list[str], name: str = "mkd", supervised: float = 1.0
) -> list[tuple[str, Objective, Callable[[MegatronModels], Step]]]:
    """Name, objective and step of mkd for each divergence, and with this share of supervised tokens if it is below 1.

    The name of the latter ends with the share and the kind of mask, after `SUPERVISED`.
    """
    rows = [(name, with_ce(d), lambda models, d=d: models.ours(d)) for d in divergences]
    for mask in MASKS if supervised < 1 else ():
        about = f"{name}{SUPERVISED}{supervised:.0%} {mask}"
        rows += [(about, with_ce(d), lambda models, d=d, mask=mask: models.ours(d, mask)) for d in divergences]
    return rows
