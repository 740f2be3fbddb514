"""What a run of mkd is asked to do: frozen dataclasses, one field for each `--kd-*` flag.

The docstring under a field is that flag's `--help` text. Everything that can be checked without reading a file is
checked when the object is made.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from mkd.config.checks import (
    check_cache,
    check_other_tokenizer,
    check_snapshots,
    check_teacher_sizes,
    check_teachers,
    check_tracking,
)
from mkd.config.values import (
    SKEWED,
    Divergence,
    LayerPair,
    LossSpec,
    Schedule,
    TeachersMode,
    XTokenLoss,
    require_choice,
    require_ratio,
    require_temperature,
)
from mkd.errors import MkdConfigError
from mkd.utils.logging import LogLevel

LogitsDtype = Literal["auto", "bf16", "fp32"]
"""Precision in which logits leave the LM heads' matrix products."""

LossImplementation = Literal["auto", "reference", "eager", "triton"]
"""Who computes the loss."""

HiddenLossType = Literal["mse", "cosine"]
"""Distances between hidden states of a student's and a teacher's layer."""

Packing = Literal["none", "best_fit"]
"""How samples become rows."""


@dataclass(frozen=True, kw_only=True)
class KDConfig:
    """Knowledge distillation: where the teacher comes from and what is learned from it."""

    teacher_hf: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "DIR"}})
    """Teacher: a Hugging Face folder (config.json and safetensors). Its architecture is read from its own config.json.
    Exactly one teacher source must be given, but this one may name several teachers."""

    teacher_weights: list[float] | None = field(default=None, metadata={"argparse_meta": {"metavar": "W"}})
    """With several teachers, the weight > 0 of each one's divergence in their sum, or of its logits in their average.
    Default: equal ones that add up to 1."""

    teachers_mode: TeachersMode = "sum"
    """What several teachers are together. sum: their divergences are added up. averaged_logits: one teacher with the
    weighted mean of their logits, which needs one tokenizer and vocabulary. select: each text is taught by the one
    that has the lowest cross-entropy on it."""

    teacher_load: str | None = None
    """Teacher: a Megatron checkpoint folder (torch_dist). Its architecture is read from the arguments stored in it.
    Exactly one teacher source must be given."""

    teacher_cache: str | None = None
    """Teacher: a folder of its stored answers (tools/cache_teacher.py); none of its weights is in memory. The data must
    be what the folder was written from. Exactly one teacher source must be given."""

    cache_missing: Literal["error", "ce_only"] = "error"
    """What happens to texts that --kd-teacher-cache does not have. error: the job ends before the step. ce_only: they
    have cross-entropy only, and the metrics count them (kd_missing)."""

    student_hf: str | None = None
    """Initial student weights, architecture and vocabulary from a Hugging Face folder: no size flags are needed, and
    one that contradicts the folder is an error. A checkpoint in --load goes before it, so the same command line
    resumes."""

    ratio: float | None = None
    """R in [0, 1]: loss = (1 - R) * CE + R * T^2 * KD. CE is not computed at R = 1 and KD not at R = 0. Required,
    unless --kd-ratio-schedule gives it."""

    ratio_schedule: str = "constant"
    """R over iterations: constant, linear:START:END:STEPS or cosine:START:END:STEPS."""

    balance: bool = False
    """Bring KD to the size of CE: in each step KD is multiplied by CE / KD of the step before, means over the whole
    global batch; by 1 in the first step. Reported ce and kd are without it. Needs an R below 1 in every step."""

    loss: Divergence = "forward_kl"
    """Divergence between teacher p and student q. forward_kl: KL(p || q). reverse_kl: KL(q || p). jsd: beta KL(p || m)
    + (1 - beta) KL(q || m), m = beta p + (1 - beta) q. skew_forward_kl: KL(p || skew p + (1 - skew) q).
    skew_reverse_kl: KL(q || (1 - skew) p + skew q). tvd: half of sum |p - q|."""

    beta: float = LossSpec.beta
    """Teacher's share of the mixture in jsd, 0 < beta < 1. The end points are not the KLs and are refused."""

    skew: float = LossSpec.skew
    """Skew of skew_forward_kl and skew_reverse_kl, 0 <= skew < 1; 0 is the plain KL."""

    z_loss: float = LossSpec.z_loss
    """Coefficient >= 0 of (ln sum exp z)^2, which is added to CE and has CE's weight 1 - R. The reported ce is without
    it."""

    temperature: float = 1.0
    """T > 0: teacher and student logits are divided by T in the divergence (never in CE)."""

    temperature_schedule: str = "constant"
    """T over iterations: constant, linear:START:END:STEPS or cosine:START:END:STEPS."""

    temperature_squared: bool = True
    """Do not multiply the divergence by T^2."""

    top_k: int | None = None
    """K >= 1: the divergence looks at the teacher's K most probable tokens only, to see what that costs. Default: at
    all tokens."""

    top_k_tail: Literal["bucket", "renormalize"] = "bucket"
    """What becomes of the other tokens with --kd-top-k. bucket: they are one more category. renormalize: both models'
    probabilities are divided by their sum over the K, and the others get no gradient."""

    hidden_loss: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "S:T,..."}})
    """Pairs of layers, counted from 1: the student's hidden states after layer S are pulled toward the teacher's
    after layer T. Where the widths differ, a linear map from the student's to the teacher's is trained for each pair.
    Adds R * W * (sum over pairs of the distance) to the loss of a token."""

    hidden_loss_weight: float = 1.0
    """W > 0 of --kd-hidden-loss."""

    hidden_loss_type: HiddenLossType = "mse"
    """Distance in --kd-hidden-loss. mse: mean over the teacher's width of the squared difference. cosine: 1 - cosine
    of the angle."""

    xtoken_loss: XTokenLoss | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "?", "const": "partition_kl"}}
    )
    """The teacher has another tokenizer. What compares pieces of text (chunks): partition_kl, which is also meant by
    the flag alone, p_kl, gold or gold_relaxed; docs/cross_tokenizer.md tells them apart."""

    projection: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """Which teacher tokens stand for each student token, as tools/build_projection.py wrote it. Default: made when the
    job begins, and kept in the data cache."""

    teacher_seq_length: int | None = None
    """Tokens of a row of a teacher with another tokenizer. A sample must fit the student's row and the teacher's.
    Default: --seq-length times the tokens that the teacher's tokenizer makes of one token of the student's in the first
    texts, and 5 per cent."""

    logits_dtype: LogitsDtype = "auto"
    """Precision in which logits leave the LM heads' matrix products. auto: bf16 for bf16 models on GPU, else fp32. bf16
    is faster and puts a floor under the gradient of KD: once the student is close to the teacher, it is mostly rounding
    error."""

    loss_impl: LossImplementation = "auto"
    """Who computes the loss. reference: the definition by autograd, one tensor-parallel rank. eager: plain PyTorch.
    triton: GPU kernels. auto: triton on GPU where it can, else eager; the choice is printed."""

    loss_chunk_rows: int | None = None
    """Tokens in a chunk of the loss; logits of one or two chunks exist at one time. Default: as many as keep one
    model's logits of a chunk under 192 MiB, but at least 768 on a GPU."""

    teacher_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Precision of the teacher's weights and forward pass; fp8: that of its layers, bf16 for the rest. Default: the
    student's."""

    teacher_offload: bool = False
    """Keep the teacher's weights in host memory while the student trains: the teacher runs over all microbatches of a
    step first, then makes room."""

    teacher_tensor_model_parallel_size: int | None = None
    """Tensor-parallel ranks of the teacher, on the ranks of the student. Default, here and below: the student's."""

    teacher_pipeline_model_parallel_size: int | None = None
    """Pipeline stages of the teacher."""

    teacher_context_parallel_size: int | None = None
    """Context-parallel ranks of the teacher."""

    teacher_expert_model_parallel_size: int | None = None
    """Expert-parallel ranks of a teacher with experts."""

    teacher_expert_tensor_parallel_size: int | None = None
    """Tensor-parallel ranks of each of the teacher's experts. Default: the student's, or where the teacher has another
    tensor-parallel size that one."""

    save_hf_interval: int | None = None
    """Iterations between Hugging Face folders: when a checkpoint is saved at a multiple of it, <save>/hf/iter_XXXXXXX
    is written as well. A multiple of --save-interval. Default: none are written."""

    save_hf_keep: int | None = None
    """How many of the newest Hugging Face folders stay; older ones are removed. Default: all."""

    skip_checkpoint_hashes: bool = False
    """Do not write the SHA-256 of a checkpoint's files when it is saved, and do not check them when it is loaded."""

    allow_bad_teacher: bool = False
    """Learn from a teacher that is far worse than one that knows nothing. Without it that is an error."""

    other_teacher: bool = False
    """Continue from a checkpoint that was trained with another teacher. Without it that is an error."""

    packing: Packing = "none"
    """none: documents are concatenated and cut as Megatron does, a conversation has a row of its own. best_fit:
    several whole samples share a row of --seq-length tokens and do not see each other."""

    packing_multiple: int = 16
    """Each sample in a packed row is padded to a multiple of so many tokens. Must be divisible by twice the size of
    context parallelism, of student and teacher. The same value gives the same rows under every parallel layout."""

    long_samples: Literal["split", "drop"] = "split"
    """What happens to samples longer than --seq-length, of chat files and with --kd-packing best_fit."""

    variable_seq_lengths: bool = False
    """Cut every microbatch behind its longest text, where rows end in padding (conversations that are not packed).
    Microbatches then differ in length: less to compute, and pipeline stages tell each other the shapes first."""

    mask: Literal["labels", "all"] = "labels"
    """Where the divergence from the teacher is taken. labels: on supervised tokens, which CE is taken of (all tokens of
    documents, the assistant's in chats). all: on the other tokens of conversations too."""

    compare_interval: int | None = None
    """Iterations between training steps that also measure the entropies of student and teacher and how often their most
    probable token is the same. Costs another forward product of both LM heads in these steps; gradients are the same.
    Default: evaluations measure it, training steps do not."""

    metrics_file: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """JSON lines, one an iteration (iteration, loss, ce, kd, grad_norm, lr, tokens, tokens_per_s, elapsed_s);
    validation lines carry valid_ names. Default: metrics.jsonl in the --save folder."""

    mlflow_experiment: str | None = None
    """Write the metrics to this MLflow experiment too, which is made if it does not exist. Needs the package mlflow.
    Default: not written. TensorBoard and Weights & Biases have Megatron's flags --tensorboard-dir and
    --wandb-project."""

    mlflow_uri: str | None = None
    """MLflow's tracking server, or sqlite:///FILE. Default: MLflow's own, MLFLOW_TRACKING_URI or the present folder."""

    dry_run: bool = False
    """Check flags, teacher, student, data and layout, print the plan, and exit without training."""

    verbose: bool = False
    """Print all that Megatron prints: its arguments, every parameter, its own memory report."""

    log_level: LogLevel = "info"
    """Lowest level of the lines that mkd prints and writes to mkd.log in --save."""

    def __post_init__(self) -> None:
        sources = {
            "--kd-teacher-hf": None if self.teacher_hf is None else " ".join(self.teacher_hf),
            "--kd-teacher-load": self.teacher_load,
            "--kd-teacher-cache": self.teacher_cache,
        }
        given = [f"{flag} {value}" for flag, value in sources.items() if value is not None]
        if len(given) != 1:
            seen = " and ".join(given) or "none"
            raise MkdConfigError(
                f"exactly one teacher source is needed, got {seen}: give one of {' or '.join(sources)}"
            )
        check_teachers(
            1 if self.teacher_hf is None else len(self.teacher_hf),
            self.teacher_weights,
            self.teachers_mode,
            self.hidden_loss,
        )
        check_cache(
            self.teacher_cache,
            self.cache_missing,
            hidden_loss=self.hidden_loss,
            teacher_dtype=self.teacher_dtype,
            teacher_offload=self.teacher_offload,
        )
        self._check_ratio()
        self._check_temperature()
        self._check_loss()
        self._check_hidden_loss()
        self._check_top_k()
        check_other_tokenizer(
            self.xtoken_loss,
            settings={"projection": self.projection, "teacher-seq-length": self.teacher_seq_length},
            hidden_loss=self.hidden_loss,
            teacher_cache=self.teacher_cache,
            loss_impl=self.loss_impl,
        )
        require_choice("--kd-logits-dtype", self.logits_dtype, get_args(LogitsDtype))
        require_choice("--kd-loss-impl", self.loss_impl, get_args(LossImplementation))
        require_choice("--kd-packing", self.packing, get_args(Packing))
        require_choice("--kd-long-samples", self.long_samples, ("split", "drop"))
        require_choice("--kd-mask", self.mask, ("labels", "all"))
        if self.variable_seq_lengths and self.packing != "none":
            raise MkdConfigError(
                f"--kd-variable-seq-lengths does not work with --kd-packing {self.packing}: packed rows have one length"
            )
        if self.packing_multiple < 1:
            raise MkdConfigError(f"--kd-packing-multiple is {self.packing_multiple}; it must be at least 1")
        if self.loss_chunk_rows is not None and self.loss_chunk_rows < 1:
            raise MkdConfigError(f"--kd-loss-chunk-rows is {self.loss_chunk_rows}; it must be at least 1")
        check_snapshots(self.save_hf_interval, self.save_hf_keep)
        check_tracking(self.compare_interval, self.is_plain_pretraining, self.mlflow_experiment, self.mlflow_uri)
        check_teacher_sizes(self.teacher_sizes, self.teacher_cache, self.hidden_loss)

    def _check_ratio(self) -> None:
        if self.ratio_schedule == "constant":
            if self.ratio is None:
                raise MkdConfigError("--kd-ratio is required: loss = (1 - R) * CE + R * T^2 * KD, with R in [0, 1]")
            require_ratio("--kd-ratio", self.ratio)
            self._check_balance()
            return
        if self.ratio is not None:
            raise MkdConfigError(
                f"--kd-ratio {self.ratio} and --kd-ratio-schedule {self.ratio_schedule} both set R: give one of them"
            )
        schedule = Schedule.parse("--kd-ratio-schedule", self.ratio_schedule)
        require_ratio("START of --kd-ratio-schedule", schedule.start)
        require_ratio("END of --kd-ratio-schedule", schedule.end)
        self._check_balance()

    def _check_balance(self) -> None:
        ratio = self.ratio_over_time
        if self.balance and (max(ratio.start, ratio.end) == 1.0 or self.is_plain_pretraining):
            raise MkdConfigError(
                f"--kd-balance brings KD to the size of CE, and with R = {ratio} one of them is not computed: leave it "
                "out, or give an R between 0 and 1"
            )

    def _check_temperature(self) -> None:
        require_temperature("--kd-temperature", self.temperature)
        if self.temperature_schedule == "constant":
            return
        if self.temperature != 1.0:
            raise MkdConfigError(
                f"--kd-temperature {self.temperature} and --kd-temperature-schedule {self.temperature_schedule} both "
                "set T: give one of them"
            )
        schedule = Schedule.parse("--kd-temperature-schedule", self.temperature_schedule)
        require_temperature("START of --kd-temperature-schedule", schedule.start)
        require_temperature("END of --kd-temperature-schedule", schedule.end)

    def _check_loss(self) -> None:
        self.loss_spec(0)
        for flag, value, default, users in (
            ("--kd-beta", self.beta, LossSpec.beta, ("jsd",)),
            ("--kd-skew", self.skew, LossSpec.skew, SKEWED),
        ):
            if value != default and self.loss not in users:
                raise MkdConfigError(
                    f"{flag} is {value}, which --kd-loss {self.loss} does not use: leave it out, or give --kd-loss "
                    f"{' or '.join(users)}"
                )
        ratio = self.ratio_over_time
        if self.z_loss > 0.0 and ratio.start == ratio.end == 1.0:
            raise MkdConfigError(
                f"--kd-z-loss is {self.z_loss}, but it is a part of CE, and at R = 1 CE is not computed: leave it out, "
                "or give a --kd-ratio below 1"
            )
        if self.z_loss > 0.0 and self.is_plain_pretraining:
            raise MkdConfigError(
                f"--kd-z-loss is {self.z_loss}, but at R = 0 the loss is Megatron's own, which has none: leave it out, "
                "or give a --kd-ratio above 0"
            )

    def _check_top_k(self) -> None:
        require_choice("--kd-top-k-tail", self.top_k_tail, ("bucket", "renormalize"))
        if self.top_k is None:
            if self.top_k_tail != "bucket" and self.teacher_cache is None:
                raise MkdConfigError(f"--kd-top-k-tail is {self.top_k_tail}, but all tokens are used: give --kd-top-k")
            return
        least = 2 if self.top_k_tail == "renormalize" else 1
        if self.top_k < least:
            raise MkdConfigError(
                f"--kd-top-k is {self.top_k}; with --kd-top-k-tail {self.top_k_tail} it must be at least {least}"
            )
        if self.is_plain_pretraining:
            raise MkdConfigError(f"--kd-top-k is {self.top_k}, but at R = 0 nothing is learned from the teacher")

    @property
    def weights_of_teachers(self) -> tuple[float, ...]:
        """Of each teacher, in the order of --kd-teacher-hf."""
        count = 1 if self.teacher_hf is None else len(self.teacher_hf)
        if self.teachers_mode == "select":
            return (1.0,) * count
        return (1.0 / count,) * count if self.teacher_weights is None else tuple(self.teacher_weights)

    @property
    def teacher_sizes(self) -> dict[str, int]:
        """The teacher's own parallel sizes that are given, by Megatron argument name."""
        kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
        sizes = {f"{kind}_parallel_size": getattr(self, f"teacher_{kind}_parallel_size") for kind in kinds}
        return {name: size for name, size in sizes.items() if size is not None}

    def _check_hidden_loss(self) -> None:
        require_choice("--kd-hidden-loss-type", self.hidden_loss_type, get_args(HiddenLossType))
        if not (math.isfinite(self.hidden_loss_weight) and self.hidden_loss_weight > 0.0):
            raise MkdConfigError(
                f"--kd-hidden-loss-weight is {self.hidden_loss_weight}; a weight must be a finite number > 0"
            )
        if self.hidden_loss is None:
            given = {"weight": self.hidden_loss_weight != 1.0, "type": self.hidden_loss_type != "mse"}
            for name in (name for name, changed in given.items() if changed):
                raise MkdConfigError(
                    f"--kd-hidden-loss-{name} is {getattr(self, 'hidden_loss_' + name)}, but no layers are paired: "
                    "give --kd-hidden-loss S:T,..., or leave it out"
                )
        pairs = self.layer_pairs
        if pairs and self.is_plain_pretraining:
            flag = "--kd-ratio" if self.ratio_schedule == "constant" else "--kd-ratio-schedule"
            raise MkdConfigError(
                f"--kd-hidden-loss is {self.hidden_loss}, but {flag} makes R = 0 for the whole run, where nothing is "
                "learned from the teacher: leave it out, or give an R above 0"
            )

    @property
    def layer_pairs(self) -> tuple[LayerPair, ...]:
        """The pairs of --kd-hidden-loss; none without it."""
        return () if self.hidden_loss is None else LayerPair.parse_all("--kd-hidden-loss", self.hidden_loss)

    @property
    def ratio_over_time(self) -> Schedule:
        if self.ratio_schedule == "constant":
            return Schedule.constant(self.ratio)
        return Schedule.parse("--kd-ratio-schedule", self.ratio_schedule)

    @property
    def temperature_over_time(self) -> Schedule:
        if self.temperature_schedule == "constant":
            return Schedule.constant(self.temperature)
        return Schedule.parse("--kd-temperature-schedule", self.temperature_schedule)

    @property
    def is_plain_pretraining(self) -> bool:
        """Whether R is 0 for the whole run, so that nothing is learned from the teacher."""
        ratio = self.ratio_over_time
        return ratio.start == 0.0 and ratio.end == 0.0

    def compares(self, iteration: int) -> bool:
        """Whether the training step of an iteration counted from 0 is one of --kd-compare-interval."""
        return self.compare_interval is not None and (iteration + 1) % self.compare_interval == 0

    def loss_spec(self, iteration: int) -> LossSpec:
        """The loss at an iteration counted from 0."""
        return LossSpec(
            divergence=self.loss,
            beta=self.beta,
            skew=self.skew,
            temperature=self.temperature_over_time.value(iteration),
            temperature_squared=self.temperature_squared,
            z_loss=self.z_loss,
        )
