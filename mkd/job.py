"""A job from its command line to the objects that `megatron.training.pretrain` is given."""

import json
import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.global_vars import get_tokenizer
from megatron.training.models import GPTModelConfig
from megatron.training.training import get_train_valid_test_num_samples, update_train_iters
from torch.utils.data import default_collate

from mkd import arguments, cpu
from mkd.checkpoint.assets import store_assets
from mkd.checkpoint.durable import replacing
from mkd.checkpoint.hf_folder import HFFolder, tokenizer_hash
from mkd.checkpoint.megatron_folder import MegatronFolder
from mkd.checkpoint.resume import Choice
from mkd.checkpoint.source import ModelSource, common_vocabulary
from mkd.config import KDConfig
from mkd.data.batch import KDBatch
from mkd.data.chat import ChatTokenizer
from mkd.data.datasets import build_datasets, check_data, check_splits
from mkd.data.packing import RowLayout
from mkd.data.row_sets import RowSets
from mkd.data.rows import RowOptions
from mkd.data.stores import check_chat_file, is_chat_file
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.flag_checks import check_layer_pairs, check_rows, check_top_k, length_multiple
from mkd.groups import Groups
from mkd.hidden_layers import HiddenLayers
from mkd.losses import LossOptions
from mkd.memory import estimate_memory
from mkd.metrics import MetricsLog, perplexity
from mkd.models.gpt import gpt_config
from mkd.models.layer_maps import KEY_PREFIX, pair_of_key
from mkd.resuming import check_checkpoint, check_first_weights, choose_checkpoint
from mkd.schedule import TeacherThenStudent
from mkd.step import teacher_cross_entropy
from mkd.teacher.online import OnlineTeacher


@dataclass(frozen=True)
class Job:
    """Everything that was asked for, checked; no weight is loaded and no process group exists yet."""

    args: Namespace
    """Megatron's arguments, also global by now."""
    teacher_args: Namespace
    """Those that describe the teacher."""
    kd: KDConfig
    teacher_source: ModelSource
    student_source: ModelSource | None
    teacher_config: GPTModelConfig
    student_config: GPTModelConfig
    true_vocab: int
    """Tokens that exist; ids from here up pad the vocabulary."""
    loss_options: LossOptions
    choice: Choice | None
    """The checkpoint to continue from."""
    notes: list[str]
    """What is otherwise than in that checkpoint."""

    @classmethod
    def from_command_line(cls) -> "Job":
        """Parse and check.

        Raises:
            MkdError: anything that would stop the job later.
        """
        args, kd = arguments.parse_command_line()
        teacher = _teacher_source(kd)
        student = None
        choice = choose_checkpoint(args)
        if kd.student_hf is not None:
            student = ModelSource.from_hf(kd.student_hf, "--kd-student-hf")
            arguments.adopt_architecture(args, student.architecture, student.origin)
            args.tokenizer_type = args.tokenizer_type or "HuggingFaceTokenizer"
            args.tokenizer_model = args.tokenizer_model or kd.student_hf
        elif args.use_checkpoint_args:
            _adopt_what_megatron_forgets(args)
        arguments.finish(args, kd)
        true_vocab = arguments.true_vocabulary(args)
        origin = student.origin if student else f"--tokenizer-model {args.tokenizer_model}"
        student_hash = student.tokenizer_hash if student else _hash_of_tokenizer(args)
        _check_tokenizer(args, student)
        check_layer_pairs(kd.layer_pairs, args, teacher.architecture["num_layers"])
        check_first_weights(args)
        notes = check_checkpoint(args, kd, choice, teacher)
        _check_stored_maps(args, kd, mapped=teacher.architecture["hidden_size"] != args.hidden_size)
        true_vocab = common_vocabulary(origin, true_vocab, student_hash, teacher)
        check_top_k(kd, true_vocab)
        names = arguments.data_prefixes(args)
        chats = [name for name in names if is_chat_file(name)]
        check_rows(args, kd, has_chats=bool(chats))
        check_data([name for name in names if name not in chats], true_vocab, student_hash)
        for name in chats:
            check_chat_file(name, ChatTokenizer(args.tokenizer_model))
        check_splits(arguments.dataset_config(args, get_tokenizer()), evaluates=args.eval_iters > 0)
        _check_writable("--save", args.save)
        if kd.metrics_file is not None:
            _check_writable("--kd-metrics-file", str(Path(kd.metrics_file).parent))
        teacher_args = arguments.teacher_arguments(teacher.architecture, args, kd.teacher_dtype)
        device = torch.device("cpu" if cpu.is_active() else "cuda")
        options = LossOptions.of(kd, device, args.params_dtype, args.tensor_model_parallel_size)
        configs = gpt_config(teacher_args), gpt_config(args)
        for config in configs:
            config.transformer.variable_seq_lengths = kd.variable_seq_lengths  # megatron has no flag for it
        job = cls(args, teacher_args, kd, teacher, student, *configs, true_vocab, options, choice, notes)
        if student is not None and not arguments.resumes(args):
            job.student_config.pre_wrap_hooks.append(job._load_student)
            job.student_config.perform_initialization = False  # the folder fills every parameter, or is refused
        return job

    def _load_student(self, chunks: list[Any]) -> list[Any]:
        self.student_source.load(chunks, None)
        return chunks

    def build_teacher(self, groups: Groups) -> OnlineTeacher | None:
        """The teacher on this rank; None when the run never looks at it."""
        if self.kd.is_plain_pretraining:
            return None
        return OnlineTeacher(
            self.teacher_config,
            groups,
            load_weights=lambda chunks: self.teacher_source.load(chunks, self.true_vocab),
            fingerprint=self.args.kd_teacher_fingerprint,
            offload=self.kd.teacher_offload,
        )

    def pair_layers(self, groups: Groups, teacher: OnlineTeacher | None) -> HiddenLayers | None:
        """What --kd-hidden-loss asks for, to be placed in the student when it is built; None without the flag."""
        if not self.kd.layer_pairs:
            return None
        layers = HiddenLayers(
            self.kd.layer_pairs,
            self.kd.hidden_loss_type,
            self.kd.hidden_loss_weight,
            groups,
            teacher.record_layers({pair.teacher for pair in self.kd.layer_pairs}),
            seed=self.args.seed,
        )
        self.student_config.pre_wrap_hooks.append(layers.attach)
        return layers

    def datasets(self) -> list[Any]:
        """Train, validation and test set. Collective over all ranks."""
        update_train_iters(self.args)
        config = arguments.dataset_config(self.args, get_tokenizer())
        return build_datasets(
            config,
            get_train_valid_test_num_samples(),
            evaluated=self.args.eval_iters * self.args.eval_global_batch_size,
            rows=self._row_sets(config) if self.has_own_rows else None,
        )

    def check_all_data(self) -> None:
        """Tokenize chat files and plan rows without ranks: what a dry run can do beyond `from_command_line`."""
        if self.has_own_rows and self.args.rank == 0:
            self.datasets()

    @property
    def has_own_rows(self) -> bool:
        """Whether rows are made of whole samples, and not by Megatron's concatenation of documents."""
        return self.kd.packing != "none" or any(map(is_chat_file, arguments.data_prefixes(self.args)))

    def _row_sets(self, config: GPTDatasetConfig) -> RowSets:
        args, kd = self.args, self.kd
        layout = RowLayout(args.seq_length, kd.packing_multiple, kd.packing != "none", kd.mask == "all")
        return RowSets(
            config=config,
            options=RowOptions(layout, drop_long=kd.long_samples == "drop", seed=args.seed),
            tokenizer=ChatTokenizer(args.tokenizer_model),
            true_vocab=self.true_vocab,
            say=lambda text: print(f"mkd: data       {text}", flush=True) if args.rank == 0 else None,
        )

    @property
    def length_multiple(self) -> int | None:
        """What micro-batches' lengths are rounded up to with --kd-variable-seq-lengths; None without it."""
        return length_multiple(self.args) if self.kd.variable_seq_lengths else None

    def metrics(self) -> MetricsLog:
        file = self.kd.metrics_file
        if file is None and self.args.save is not None:
            file = str(Path(self.args.save) / "metrics.jsonl")
        return MetricsLog(
            train_iters=self.args.train_iters,
            log_interval=self.args.log_interval,
            tokens_per_sample=self.args.seq_length,
            file=None if file is None else Path(file),
            writes=self.args.rank == self.args.world_size - 1,
        )

    def print_plan(self) -> None:
        """On rank 0."""
        for name, text in self.plan().items() if self.args.rank == 0 else ():
            print(f"mkd: {name:10s} {text}", flush=True)

    def plan(self) -> dict[str, str]:
        """What will happen, a line each."""
        args, kd = self.args, self.kd
        layout = {
            "DP": args.data_parallel_size,
            "TP": args.tensor_model_parallel_size,
            "PP": args.pipeline_model_parallel_size,
            "VPP": args.virtual_pipeline_model_parallel_size or 1,
            "CP": args.context_parallel_size,
            "EP": args.expert_model_parallel_size,
        }
        weights = "random"
        if arguments.resumes(args):
            weights = f"checkpoint {args.kd_resume_from}"
        elif self.student_source is not None:
            weights = str(self.student_source.path)
        elif args.pretrained_checkpoint is not None:
            weights = args.pretrained_checkpoint
        return {
            "teacher": f"{_shape_of(self.teacher_config)}, {_name(self.teacher_config.params_dtype)}, "
            f"{self.teacher_source.path}",
            "student": f"{_shape_of(self.student_config)}, {_name(args.params_dtype)}, weights: {weights}",
            "loss": f"(1 - R) CE + R T^2 {kd.loss}, R = {kd.ratio_over_time}, T = {kd.temperature_over_time}"
            + ("" if kd.temperature_squared else " (without T^2)")
            + (f", z-loss {kd.z_loss:g}" if kd.z_loss else "")
            + f", computed by {self.loss_options.impl}"
            + ("; R is 0: the teacher is not run" if kd.is_plain_pretraining else ""),
            **self._plan_of_layers(),
            "layout": ", ".join(f"{name} {size}" for name, size in layout.items() if size > 1 or name == "DP")
            + (", SP" if args.sequence_parallel else ""),
            **({"rows": self._plan_of_rows()} if self.has_own_rows else {}),
            "batch": f"{args.global_batch_size} samples of {args.seq_length} tokens, "
            f"micro-batch {args.micro_batch_size}",
            "steps": f"{args.train_iters} iterations",
            "vocabulary": f"{self.true_vocab} tokens, padded to {args.padded_vocab_size}",
            **({"changed": "; ".join(self.notes)} if self.notes else {}),
            "memory": self._memory(),
        }

    def _plan_of_rows(self) -> str:
        kd = self.kd
        how = "one sample each" if kd.packing == "none" else f"packed, padded to multiples of {kd.packing_multiple}"
        return f"{how}; longer ones are {'split' if kd.long_samples == 'split' else 'dropped'}; KD on {kd.mask}"

    def _plan_of_layers(self) -> dict[str, str]:
        kd, pairs = self.kd, ", ".join(map(str, self.kd.layer_pairs))
        widths = [config.transformer.hidden_size for config in (self.student_config, self.teacher_config)]
        maps = "" if widths[0] == widths[1] else f", mapped from width {widths[0]} to {widths[1]}"
        text = f"+ R {kd.hidden_loss_weight:g} {kd.hidden_loss_type} of layers {pairs} (student:teacher){maps}"
        return {"layers": text} if pairs else {}

    def _memory(self) -> str:
        parts = estimate_memory(
            self.args,
            None if self.kd.is_plain_pretraining else self.teacher_args,
            self.kd.loss_chunk_rows,
            all_at_once=self.args.pipeline_model_parallel_size > 1 or self.kd.teacher_offload,
            paired_layers=len(self.kd.layer_pairs),
        )
        listed = ", ".join(f"{name} {gib:.2f}" for name, gib in parts.items())
        return f"about {sum(parts.values()):.2f} GiB on the fullest rank besides activations: {listed}"


def _teacher_source(kd: KDConfig) -> ModelSource:
    if kd.teacher_hf is not None:
        return ModelSource.from_hf(kd.teacher_hf, "--kd-teacher-hf")
    return ModelSource.from_megatron(kd.teacher_load, "--kd-teacher-load")


def _adopt_what_megatron_forgets(args: Namespace) -> None:
    """megatron-core 0.19's --use-checkpoint-args leaves these out, and would compute another model without a word."""
    path = args.kd_resume_from or args.pretrained_checkpoint
    if path is None:
        return
    folder = MegatronFolder(path, "--use-checkpoint-args")
    names = (
        *("layernorm_epsilon", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
        *("qk_layernorm", "qk_l2_norm", "window_size", "window_attn_skip_freq", "softmax_type", "no_rope_freq"),
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        *("yarn_correction_range_round_to_int", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value"),
        *("moe_router_num_groups", "moe_router_group_topk", "attention_output_gate", "use_mup"),
        "layernorm_zero_centered_gamma",
    )
    values = {name: getattr(folder.args, name) for name in names if hasattr(folder.args, name)}
    arguments.adopt_architecture(args, values, f"the checkpoint in {path}")


def _hash_of_tokenizer(args: Namespace) -> str | None:
    if args.tokenizer_type != "HuggingFaceTokenizer" or not Path(args.tokenizer_model).is_dir():
        return None
    return tokenizer_hash(Path(args.tokenizer_model), "--tokenizer-model")


def _check_tokenizer(args: Namespace, student: ModelSource | None) -> None:
    """Refuse a --tokenizer-model that is not the student's own."""
    given = _hash_of_tokenizer(args)
    if student is not None and given and student.tokenizer_hash and given != student.tokenizer_hash:
        raise MkdConfigError(
            f"--tokenizer-model {args.tokenizer_model} is another tokenizer than that of {student.origin}: leave it out"
        )


def _check_stored_maps(args: Namespace, kd: KDConfig, mapped: bool) -> None:
    """Refuse to resume with other maps between layers than the checkpoint has.

    Args:
        args: Megatron's.
        kd: names the pairs of layers.
        mapped: whether each pair has a map.
    """
    if not arguments.resumes(args) or args.finetune or args.ckpt_format != "torch_dist":
        return
    stored = MegatronFolder(args.kd_resume_from, "--load").metadata.state_dict_metadata
    had = sorted(pair_of_key(key) for key in stored if key.startswith(KEY_PREFIX))
    wanted = sorted(kd.layer_pairs) if mapped else []
    if had != wanted:
        texts = [",".join(map(str, pairs)) or "none" for pairs in (had, wanted)]
        raise MkdConfigError(
            f"--load {args.load} has trained maps for the pairs of layers {texts[0]}, this command line needs maps for "
            f"{texts[1]}: give the same --kd-hidden-loss, or begin anew from its weights with --pretrained-checkpoint"
        )


def _check_writable(flag: str, folder: str | None) -> None:
    """Refuse a folder that cannot be made or written to, before hours of training end there."""
    if folder is None:
        return
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise MkdConfigError(f"{flag}: folder {folder} cannot be written: {existing} is no folder, or is read-only")


def _shape_of(config: GPTModelConfig) -> str:
    t = config.transformer
    experts = f", {t.num_moe_experts} experts" if t.num_moe_experts else ""
    return f"{t.num_layers} layers x {t.hidden_size}, {t.num_attention_heads} heads{experts}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Hooks:
    """mkd's part of the training loop: the schedule and the metrics."""

    def __init__(self, job: Job, schedule: TeacherThenStudent, log: MetricsLog) -> None:
        self._job, self._schedule, self._log = job, schedule, log
        self.before_training = log.start
        self.after_evaluation = log.evaluation

    def around(self, schedule: Callable) -> Callable:
        run = self._schedule.around(schedule)

        def timed(*, forward_only: bool = False, **options: Any) -> list[dict]:
            if not forward_only:
                self._log.step_begins()
            return run(forward_only=forward_only, **options)

        return timed

    def after_iteration(
        self, iteration: int, losses: dict[str, Any], lr: float | None, grad_norm: float | None, skipped: bool
    ) -> None:
        kd = self._job.kd
        self._log.iteration(
            iteration,
            losses,
            samples=arguments.current_global_batch_size(),
            lr=lr,
            grad_norm=grad_norm,
            skipped=skipped,
            extra={
                "ratio": kd.ratio_over_time.value(iteration - 1),
                "temperature": kd.temperature_over_time.value(iteration - 1),
            },
        )


def introduce_teacher(teacher: OnlineTeacher, samples: Any, groups: Groups, job: Job) -> None:
    """Print the teacher's perplexity on a first microbatch, beside that of a model that knows nothing, and its
    fingerprint.

    Args:
        teacher: the teacher.
        samples: a dataset; its first micro-batch is read.
        groups: the student's layout. Collective over all ranks.
        job: for sizes.

    Raises:
        MkdCheckpointError: the teacher computes something that is not finite.
    """
    batch = _first_batch(samples, job.args.micro_batch_size, job.true_vocab).on_rank(groups.cp)
    total = torch.zeros(2, dtype=torch.float64, device="cuda")
    for signal in teacher.signals([batch]):
        ce = teacher_cross_entropy(
            signal,
            batch,
            true_vocab=job.true_vocab,
            tp_group=groups.tp,
            sequence_parallel=job.teacher_config.sequence_parallel,
            options=job.loss_options,
        )
        total += torch.stack([(ce * batch.ce_mask).sum(), batch.ce_mask.sum()])
    dist.all_reduce(total)
    ce = (total[0] / total[1]).item()
    if not math.isfinite(ce):
        raise MkdCheckpointError(
            f"the teacher's loss on the first validation micro-batch is {ce}, not finite: {job.teacher_source.origin} "
            "holds numbers that are not, or overflows in this precision (--kd-teacher-dtype)"
        )
    if dist.get_rank() == 0:
        print(
            f"mkd: teacher {teacher.fingerprint()}: CE {ce:.4f}, perplexity {perplexity(ce):.2f} on the first "
            f"validation micro-batch (knowing nothing: CE ln V = {math.log(job.true_vocab):.4f}, "
            f"perplexity {job.true_vocab})",
            flush=True,
        )


def _first_batch(samples: Any, size: int, true_vocab: int) -> KDBatch:
    """The first microbatch, whole. Where it is all prompt, as --kd-mask all allows, CE is that of the prompt."""
    sample = default_collate([samples[i] for i in range(min(size, len(samples)))])
    batch = KDBatch.from_sample(sample, true_vocab)
    return batch if batch.ce_mask.any() else replace(batch, ce_mask=batch.kd_mask)


def record(job: Job) -> None:
    """Leave beside the checkpoints what is needed to understand and to export them.

    kd_config.json has the resolved distillation settings and the plan; the student's Hugging Face configuration and
    tokenizer go along, so that tools/convert.py needs no other folder.
    """
    if job.args.rank != 0 or job.args.save is None:
        return
    folder = Path(job.args.save)
    folder.mkdir(parents=True, exist_ok=True)
    if job.kd.student_hf is not None:
        store_assets(HFFolder(job.kd.student_hf, "--kd-student-hf"), folder)
    with replacing(folder / "kd_config.json") as out:
        out.write(json.dumps({"kd": asdict(job.kd), "plan": job.plan()}, indent=2) + "\n")
