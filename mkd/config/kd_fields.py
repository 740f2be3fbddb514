"""The fields of `KDConfig`, one per `--kd-*` flag. The docstring under a field is the flag's `--help` text."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal

from mkd.config.lora import LoraOptions
from mkd.config.loss_spec import Divergence, LossSpec
from mkd.config.schedules import Schedule
from mkd.config.values import (
    BadRecordsMode,
    BestMetric,
    CutOffMode,
    DataFormat,
    GuardMode,
    HiddenLossType,
    LayerPair,
    LogitsDtype,
    LossImplementation,
    Packing,
    RolloutApi,
    ServedTargets,
    SignalsMemory,
    TeacherApi,
    TeachersMode,
    XTokenLoss,
)
from mkd.utils.logging import LogLevel

TEACHER_SIZES = tuple(
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
"""Megatron argument names of the sizes that a teacher may have its own value of; `teacher_<name>` is the field."""


ON_POLICY_COMPARE_INTERVAL = 10
"""Default of --kd-compare-interval with --kd-on-policy."""


@dataclass(frozen=True, kw_only=True)
class KDFields:
    """Options of knowledge distillation as given, unchecked: `KDConfig` checks them."""

    config: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """YAML files of flags, Megatron's and these: FLAG: VALUE, true for a flag without a value, grouped under headings
    or not. Later files replace values of earlier ones, and the command line those of files. Each job writes such a
    file, run.yaml, into --save."""

    teacher_hf: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "DIR"}})
    """Teacher: a Hugging Face folder (config.json and safetensors). Its architecture is read from its own config.json.
    Exactly one teacher source must be given; this one may name several teachers."""

    teacher_weights: list[float] | None = field(default=None, metadata={"argparse_meta": {"metavar": "W"}})
    """With several teachers: the weight > 0 of each teacher's divergence in the sum, or of its logits in the average.
    Default: equal weights with sum 1."""

    teachers_mode: TeachersMode = "sum"
    """Combination of several teachers. sum: their divergences are added. averaged_logits: one teacher with the weighted
    mean of their logits; they must share one tokenizer and vocabulary. select: each text is distilled from the teacher
    with the lowest cross-entropy on it."""

    teacher_load: str | None = None
    """Teacher: a Megatron checkpoint folder (torch_dist). Its architecture is read from the arguments stored in it.
    Exactly one teacher source must be given."""

    teacher_cache: str | None = None
    """Teacher: a folder of cached targets (mkd cache); the teacher's weights are not loaded. The data must
    be that from which the cache was written. Exactly one teacher source must be given. Beside an http address in
    --kd-teacher-url: a new folder or a cache, in which answers are kept and found again."""

    teacher_url: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "URL"}})
    """Teacher: one or more addresses of the same teacher, which share the work. tcp://HOST:PORT, or ipc:///FOLDER/NAME
    on the same host: services of mkd (mkd serve-teacher), with --kd-teacher-weights or --kd-teachers-mode of several
    teachers. http://HOST:PORT: vLLM or SGLang, whose --kd-top-k most probable tokens are used, or hidden states of vLLM
    (--kd-teacher-states-dir). Exactly one teacher source must be given; http may have --kd-teacher-cache beside it,
    where answers are kept."""

    teacher_api: TeacherApi = "auto"
    """Protocol of --kd-teacher-url. auto: mkd for tcp and ipc; for http the one that the server reports."""

    teacher_states_dir: str | None = None
    """With addresses of vLLM in --kd-teacher-url: the folder to which these servers write hidden states
    (shared_storage_path of their ExampleHiddenStatesConnector), shared with this job. Losses are then those over the
    whole vocabulary, also without --kd-top-k. Files are removed when they have been read."""

    teacher_head_hf: str | None = None
    """With --kd-teacher-states-dir: the Hugging Face folder of the served model. Its final norm and its LM head are
    read, and no other weights."""

    teacher_tokenizer: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "DIR"}})
    """With --kd-teacher-url and --kd-xtoken-loss: the folder with the tokenizer of each served teacher whose tokenizer
    is not the student's."""

    teacher_targets: ServedTargets = "hidden_states"
    """Answers of services at tcp and ipc addresses. hidden_states: exact for every loss, and for --kd-top-k. top_k: the
    --kd-top-k most probable tokens, computed by the service. They are fewer bytes, and the student's ranks hold no LM
    head of the teacher; the divergence is that of --kd-top-k to rounding. sampled: --kd-teacher-samples tokens sampled
    from the teacher, as in a cache with samples."""

    teacher_samples: int | None = None
    """With --kd-teacher-targets sampled: samples per token, from 1 to 4095."""

    teacher_ahead: int = 2
    """With --kd-teacher-url: steps whose texts are sent to the teacher before the present step is computed. It changes
    no number."""

    teacher_buffer_gb: float = 8.0
    """With --kd-teacher-url: GB of host memory for answers to later steps, on each rank that receives answers."""

    teacher_timeout: float = 600.0
    """With --kd-teacher-url: seconds without an answer after which a waiting job saves and ends with exit status 75. No
    step is ever made without the teacher."""

    cache_missing: Literal["error", "ce_only"] = "error"
    """Handling of texts that are not in --kd-teacher-cache. error: the job ends before the step. ce_only: they are
    trained with cross-entropy only, and the metrics count them (kd_missing)."""

    student_hf: str | None = None
    """Initial student weights, architecture and vocabulary from a Hugging Face folder. Size flags are not needed; one
    that contradicts the folder is an error. A checkpoint in --load takes precedence for the weights, so the same
    command line resumes."""

    ratio: float | None = None
    """R in [0, 1]: loss = (1 - R) * CE + R * T^2 * KD. CE is not computed at R = 1, nor KD at R = 0. Required
    unless --kd-ratio-schedule is given."""

    ratio_schedule: str = "constant"
    """R as a function of the iteration: constant, linear:START:END:STEPS or cosine:START:END:STEPS."""

    balance: bool = False
    """Scale KD to the size of CE: in each step KD is multiplied by CE / KD of the previous step, both means over the
    whole global batch; by 1 in the first step. The reported ce and kd exclude the factor. Requires R below 1 in every
    step."""

    loss: Divergence = "forward_kl"
    """Divergence between teacher p and student q. forward_kl: KL(p || q). reverse_kl: KL(q || p). jsd: beta KL(p || m)
    + (1 - beta) KL(q || m), m = beta p + (1 - beta) q. skew_forward_kl: KL(p || skew p + (1 - skew) q).
    skew_reverse_kl: KL(q || (1 - skew) p + skew q). tvd: half of sum |p - q|."""

    beta: float = LossSpec.beta
    """Teacher's share of the mixture in jsd, 0 < beta < 1. The endpoints are not the KLs and are refused."""

    skew: float = LossSpec.skew
    """Skew of skew_forward_kl and skew_reverse_kl, 0 <= skew < 1; 0 is the plain KL."""

    z_loss: float = LossSpec.z_loss
    """Coefficient >= 0 of (ln sum exp z)^2, which is added to CE with CE's weight 1 - R. The reported ce excludes
    it."""

    temperature: float = 1.0
    """T from 0.01 to 1000: teacher and student logits are divided by T in the divergence, never in CE."""

    temperature_schedule: str = "constant"
    """T as a function of the iteration: constant, linear:START:END:STEPS or cosine:START:END:STEPS."""

    temperature_squared: bool = True
    """Do not multiply the divergence by T^2."""

    top_k: int | None = None
    """K >= 1: restrict the divergence to the teacher's top-K tokens, to measure the effect of truncation. Default: all
    tokens."""

    top_k_tail: Literal["bucket", "renormalize"] = "bucket"
    """Treatment of the other tokens with --kd-top-k. bucket: they form one more category. renormalize: the
    probabilities of both models are divided by their sum over the top K; the other tokens get no gradient."""

    hidden_loss: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "S:T,..."}})
    """Pairs of layers, counted from 1: the student's hidden states after layer S are pulled toward the teacher's after
    layer T. If the widths differ, a linear map from the student's width to the teacher's is trained for each pair. Adds
    R * W * (sum of the pairs' distances) to the loss per token."""

    hidden_loss_weight: float = 1.0
    """Weight W > 0 of --kd-hidden-loss."""

    hidden_loss_type: HiddenLossType = "mse"
    """Distance of --kd-hidden-loss. mse: mean over the teacher's width of the squared difference. cosine: 1 - cosine of
    the angle."""

    same_tokenizer: bool = False
    """Accept a teacher whose tokenizer differs from the student's in the names of control tokens only: special tokens,
    and added ones named like <think>. The teacher reads the student's ids as they are; those that differ are
    printed."""

    xtoken_loss: XTokenLoss | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "?", "const": "partition_kl"}}
    )
    """The teacher has a different tokenizer. Selects the loss that compares aligned pieces of text (text chunks):
    partition_kl, the default if the flag has no value, p_kl, gold or gold_relaxed; see docs/cross_tokenizer.md."""

    projection: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """Teacher tokens that stand for each student token, written by mkd build-projection. Default: built when the
    job starts and kept in the data cache."""

    teacher_seq_length: int | None = None
    """Tokens per row of a teacher with a different tokenizer. A sample must fit into the student's row and the
    teacher's. Default: --seq-length times the teacher's tokens per student token in the first texts, plus 5 percent."""

    logits_dtype: LogitsDtype = "auto"
    """Precision of the logits that the LM-head GEMMs produce. auto: bf16 for bf16 models on GPU, else fp32. bf16 is
    faster, but once the student is close to the teacher, the gradient of KD consists mostly of rounding error."""

    loss_impl: LossImplementation = "auto"
    """Implementation of the loss. reference: the definition with autograd, on one tensor-parallel rank. eager: plain
    PyTorch. triton: GPU kernels. auto: triton on GPU where it applies, else eager; the choice is printed."""

    loss_chunk_rows: int | None = None
    """Tokens per loss chunk; the logits of one or two chunks exist at one time. Default: as many as keep one model's
    logits of a chunk below 192 MiB, but at least 768 on a GPU."""

    teacher_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Precision of the teacher's weights and forward pass. fp8 applies to the layers; the rest is bf16. Default: the
    student's."""

    teacher_offload: bool = False
    """Keep the teacher's weights in host memory while the student trains: the teacher runs over all microbatches
    of a step, then its weights are moved to
    host memory."""

    teacher_micro_batch_size: int | None = None
    """Rows of one forward pass of the teacher: consecutive microbatches of a step are joined to passes of up to
    this number of rows. A multiple of --micro-batch-size. Default: --micro-batch-size."""

    teacher_signals: SignalsMemory = "auto"
    """Memory in which the teacher's final hidden states wait for the student where the teacher runs first over all
    microbatches of a step. device: all of them stay on the device. host: pinned host memory, with a few on the device
    at a time. auto: host for more than 8 microbatches on a GPU."""

    teacher_cuda_graph: bool = False
    """Run the teacher's forward passes as CUDA graphs, which the host launches at once. For teachers without experts
    or pipeline stages, on rows that are not packed; the memory of a pass is then held all the time. No effect on a
    CPU."""

    teacher_tensor_model_parallel_size: int | None = None
    """Tensor-parallel size of the teacher, on the student's ranks. Default of this and the following sizes: the
    student's."""

    teacher_pipeline_model_parallel_size: int | None = None
    """Pipeline-parallel size of the teacher."""

    teacher_context_parallel_size: int | None = None
    """Context-parallel size of the teacher."""

    teacher_expert_model_parallel_size: int | None = None
    """Expert-parallel size of a teacher with experts."""

    teacher_expert_tensor_parallel_size: int | None = None
    """Tensor-parallel size of the teacher's experts. Default: the student's, or the teacher's tensor-parallel size if
    that differs from the student's."""

    lora: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "RANK[:ALPHA]"}})
    """Train low-rank adapters on the linear layers of a frozen student: W x + (ALPHA / RANK) B A x, A random and B zero
    at first. ALPHA is RANK by default. The frozen weights are read from --kd-student-hf at each start; checkpoints hold
    the adapters alone. Default: all weights are trained."""

    lora_modules: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "NAME"}})
    """Names of the Hugging Face linear layers that have adapters, as in PEFT's target_modules, such as q_proj v_proj.
    Routed experts by experts.gate_up_proj and experts.down_proj, also beside all-linear. Default: all-linear, which is
    every linear layer except routers, routed experts and the LM head."""

    save_hf_interval: int | None = None
    """Iterations between Hugging Face folders: <save>/hf/iter_XXXXXXX is written together with the checkpoint of such
    an iteration. Must be a multiple of --save-interval. Default: none are written."""

    save_hf_keep: int | None = None
    """Number of Hugging Face folders to keep; older ones are removed. Default: all."""

    keep_last: int | None = None
    """Number of checkpoints to keep in --save: after each save older ones are removed, except multiples of
    --save-retain-interval. Hugging Face folders stay; see --kd-save-hf-keep. Default: all are kept."""

    keep_best: BestMetric | None = None
    """Keep the checkpoint with the best evaluation too: the highest accuracy of --kd-eval-tasks, or the lowest
    cross-entropy. best_checkpoint.json in --save names it. --save-interval must be a multiple of --eval-interval.
    Default: checkpoints are not compared."""

    skip_checkpoint_hashes: bool = False
    """Do not write the SHA-256 of a checkpoint's files when it is saved, and do not check them when it is loaded."""

    allow_bad_teacher: bool = False
    """Allow a teacher whose loss on the first validation microbatch is far above uniform guessing (ln V). Default: an
    error."""

    other_teacher: bool = False
    """Continue from a checkpoint that was trained with a different teacher. Default: an error."""

    epochs: float | None = None
    """Length of the run in epochs of the training data instead of --train-iters: E > 0, fractions allowed. The number
    of iterations is printed. Default: --train-iters or --train-samples."""

    data_format: DataFormat = "auto"
    """Form of the conversations in --data-path. messages: role and content. sharegpt: conversations of from and value.
    alpaca: instruction, input and output. prompt_completion: prompt and completion or response. auto: the form that the
    keys of each record show; it is printed with a sample."""

    bad_records: BadRecordsMode = "error"
    """Handling of broken records in chat files. error: the first one ends the job before it trains. skip: they are left
    out; their number and the first line numbers are printed."""

    packing: Packing = "none"
    """none: documents are concatenated and cut as in Megatron, and each conversation has a row of its own. best_fit:
    several whole samples share a row of --seq-length tokens and do not attend to each other."""

    packing_multiple: int = 16
    """Each sample in a packed row is padded to a multiple of this number of tokens. Must be divisible by twice the
    context-parallel size of student and teacher. The same value gives the same rows under every parallel layout."""

    long_samples: Literal["split", "drop"] = "split"
    """Handling of samples longer than --seq-length, in chat files and with --kd-packing best_fit."""

    variable_seq_lengths: bool = False
    """Trim every microbatch to its longest text, if rows end in padding (conversations that are not packed).
    Microbatches then differ in length: there is less to compute, and pipeline stages exchange shapes first."""

    mask: Literal["labels", "all"] = "labels"
    """Tokens of the divergence. labels: the supervised tokens, as for CE (all tokens of documents, the assistant's
    tokens in chats). all: the other tokens of conversations as well."""

    compare_interval: int | None = None
    """Iterations between training steps that also measure the entropies of student and teacher and how often their most
    probable tokens agree. Such a step computes the logits of both LM heads once more; gradients do not change. Default:
    only evaluations measure it; with --kd-on-policy also every 10th iteration."""

    on_policy: float | None = None
    """L in (0, 1]: share of the rows of each global batch whose answers the student writes, with its present weights,
    after the prompts of --kd-prompts. Their written tokens count in the divergence and in no cross-entropy. The other
    rows are those of --data-path. Default: none."""

    on_policy_schedule: str = "constant"
    """L as a function of the iteration: constant, linear:START:END:STEPS or cosine:START:END:STEPS. Replaces
    --kd-on-policy."""

    prompts: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """Prompts of --kd-on-policy: JSON lines, each {"prompt": TEXT} or a conversation in any form of chat data, such as
    {"messages": [...]}, whose last answer is left out. "teacher": NAME in a record, the last part of a folder of
    --kd-teacher-hf, makes this the only teacher of its answers."""

    rollout_tokens: int = 256
    """Tokens that the student writes at most for each prompt of --kd-prompts. A text that reaches them is cut off; see
    --kd-rollout-cut-off."""

    rollout_temperature: float = 1.0
    """Temperature from which the student's tokens are sampled; 0 writes the most probable one. Independent of
    --kd-temperature."""

    rollout_top_p: float = 1.0
    """P in (0, 1]: the student's tokens are sampled from the most probable ones whose probabilities sum to P."""

    rollout_samples: int = 1
    """Answers that the student writes to each prompt of --kd-prompts, independent of each other."""

    rollout_stop: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "TEXT"}})
    """Strings that end a written text, beside the end tokens of the tokenizer. The string is the end of the text.
    Default: none."""

    rollout_cut_off: CutOffMode = "learn"
    """Handling of written texts without an end. learn: they count like the others. drop: nothing is learned from
    them."""

    rollout_steps: int = 1
    """N >= 1: the student writes the texts of N steps at once, with its weights before the first of them; the texts are
    then up to N - 1 optimizer steps old."""

    rollout_memory_gb: float | None = None
    """GB on each rank for keys and values of the texts that the student writes at the same time; they are freed before
    it learns from them. More are written one group after the other. Default: as many texts at a time as have the tokens
    of a microbatch, for each pipeline stage."""

    rollout_offload: bool = False
    """Keep the optimizer's state in host memory while the student writes: moments and fp32 parameters leave the device
    before, and come back while the teacher and the student compute. No number changes."""

    rollout_url: list[str] | None = field(default=None, metadata={"argparse_meta": {"metavar": "URL"}})
    """http://HOST:PORT of one or more inference servers (vLLM, SGLang), which share the work: they write the texts of
    --kd-on-policy with the student's weights, in the place of the training ranks. Default: none."""

    rollout_api: RolloutApi = "auto"
    """Protocol of --kd-rollout-url. auto: the one that the server reports."""

    rollout_refresh: int = 1
    """N >= 1: with --kd-rollout-url, the servers are given the student's present weights at a rollout if those that
    they have are N or more steps old."""

    rollout_weights: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "DIR"}})
    """With --kd-rollout-url: folder in which the student's weights are written as Hugging Face folders for the servers,
    which must find them under the same path. Default: the subfolder rollout of --save."""

    rollout_timeout: float = 600.0
    """With --kd-rollout-url: seconds for one text, and without any answer, after which the job saves and ends with
    status 75."""

    rollout_guard: GuardMode = "warn"
    """Reaction to texts that run away: above one of the two thresholds below in three rollouts in a row. off: none.
    warn: a warning. stop: the job ends before the step."""

    rollout_most_repeated: float = 0.5
    """Threshold of --kd-rollout-guard: share of the runs of 4 tokens that have occurred before in the same text."""

    rollout_most_cut_off: float = 0.95
    """Threshold of --kd-rollout-guard: share of texts that are cut off at --kd-rollout-tokens. 1 never reacts."""

    position_weight: float | None = None
    """H > 0: the weight of a written token in the divergence is halved every H tokens of its text. Default: all written
    tokens have the same weight."""

    sample_prompts: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """JSON lines with up to 32 prompts, each {"prompt": TEXT} or a conversation in any form of chat data, such as
    {"messages": [...]}. At each evaluation the student continues them, always with its most probable token; the texts
    are printed and written to the metrics file and the trackers. Default: none."""

    sample_tokens: int = 64
    """Tokens that the student writes at most for each prompt of --kd-sample-prompts."""

    eval_tasks: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """JSON lines with up to 10,000 tasks, each with prompt or messages, answer, and match: exact (default), number,
    contains or regex. At each evaluation the student answers them, always with its most probable token; the share of
    right answers is printed and written to the metrics (valid_accuracy). Default: none."""

    eval_tokens: int = 256
    """Tokens that the student writes at most for each task of --kd-eval-tasks."""

    metrics_file: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """Metrics as JSON lines, one per iteration (iteration, loss, ce, kd, grad_norm, lr, tokens, tokens_per_s,
    elapsed_s); the names in validation lines start with valid_. Default: metrics.jsonl in the --save folder."""

    mlflow_experiment: str | None = None
    """Also write the metrics to this MLflow experiment, which is created if it does not exist; needs the package
    mlflow. Default: not written. TensorBoard and Weights & Biases have Megatron's flags --tensorboard-dir and --wandb-
    project."""

    mlflow_uri: str | None = None
    """MLflow's tracking server, or sqlite:///FILE. Default: MLflow's own, which is MLFLOW_TRACKING_URI or the current
    folder."""

    dry_run: bool = False
    """Check flags, teacher, student, data and layout, print the plan, and exit without training."""

    verbose: bool = False
    """Print everything that Megatron prints: its arguments, every parameter, its own memory report."""

    log_level: LogLevel = "info"
    """Lowest level of the lines that mkd prints and writes to mkd.log in --save."""

    @property
    def uses_inference_server(self) -> bool:
        """True if --kd-teacher-url is vLLM or SGLang."""
        return self.teacher_url is not None and self.teacher_url[0].startswith(("http://", "https://"))

    @property
    def uses_states_of_server(self) -> bool:
        """True if --kd-teacher-url is vLLM, and hidden states are read."""
        return self.teacher_states_dir is not None

    @property
    def number_of_teachers(self) -> int:
        """Folders in --kd-teacher-hf; 1 for other sources. For services behind --kd-teacher-url an upper limit:
        addresses of the same teacher count once."""
        if self.teacher_url is not None and not self.uses_inference_server:
            if self.teacher_weights is not None:
                return len(self.teacher_weights)
            return 1 if self.teachers_mode == "sum" else len(self.teacher_url)
        return 1 if self.teacher_hf is None else len(self.teacher_hf)

    def weights_of_teachers(self, count: int) -> tuple[float, ...]:
        """Weight of each of `count` teachers, in their order."""
        if self.teachers_mode == "select":
            return (1.0,) * count
        return (1.0 / count,) * count if self.teacher_weights is None else tuple(self.teacher_weights)

    @property
    def teacher_sizes(self) -> dict[str, int]:
        """Megatron argument name -> size, for the parallel sizes of the teacher that are given."""
        sizes = {name: getattr(self, f"teacher_{name}") for name in TEACHER_SIZES}
        return {name: size for name, size in sizes.items() if size is not None}

    @cached_property
    def lora_options(self) -> LoraOptions | None:
        """The adapters of --kd-lora; None without the flag."""
        return None if self.lora is None else LoraOptions.parse(self.lora, self.lora_modules)

    @cached_property
    def layer_pairs(self) -> tuple[LayerPair, ...]:
        """The pairs of --kd-hidden-loss; empty without the flag."""
        return () if self.hidden_loss is None else LayerPair.parse_all("--kd-hidden-loss", self.hidden_loss)

    @cached_property
    def ratio_over_time(self) -> Schedule:
        """R by iteration."""
        if self.ratio_schedule == "constant":
            return Schedule.constant(self.ratio)
        return Schedule.parse("--kd-ratio-schedule", self.ratio_schedule)

    @cached_property
    def temperature_over_time(self) -> Schedule:
        """T by iteration."""
        if self.temperature_schedule == "constant":
            return Schedule.constant(self.temperature)
        return Schedule.parse("--kd-temperature-schedule", self.temperature_schedule)

    @property
    def is_on_policy(self) -> bool:
        """True if the student writes texts that it learns from."""
        return self.on_policy is not None or self.on_policy_schedule != "constant"

    @cached_property
    def on_policy_over_time(self) -> Schedule:
        """L by iteration; 0 without --kd-on-policy."""
        if self.on_policy_schedule == "constant":
            return Schedule.constant(self.on_policy or 0.0)
        return Schedule.parse("--kd-on-policy-schedule", self.on_policy_schedule)

    @property
    def is_plain_pretraining(self) -> bool:
        """True if R is 0 for the whole run: the teacher is not run."""
        ratio = self.ratio_over_time
        return ratio.start == 0.0 and ratio.end == 0.0

    def compares(self, iteration: int) -> bool:
        """True if the training step of an iteration, counted from 0, is one of --kd-compare-interval."""
        interval = self.compare_interval
        if interval is None and self.is_on_policy:
            interval = ON_POLICY_COMPARE_INTERVAL
        return interval is not None and (iteration + 1) % interval == 0

    def loss_spec(self, iteration: int) -> LossSpec:
        """The loss at an iteration, counted from 0."""
        return LossSpec(
            divergence=self.loss,
            beta=self.beta,
            skew=self.skew,
            temperature=self.temperature_over_time.value(iteration),
            temperature_squared=self.temperature_squared,
            z_loss=self.z_loss,
        )


def kd_flags() -> list[str]:
    """The flags of the fields, as Megatron's `ArgumentGroupFactory` names them: a field that is True by default has two
    that turn it off. Torch and megatron, whose import takes seconds, are not needed."""
    return [
        f"--kd-{prefix}{one.name.replace('_', '-')}"
        for one in fields(KDFields)
        for prefix in (("no-", "disable-") if one.default is True else ("",))
    ]


def flag_of(field: str) -> str:
    """The flag of a field."""
    return f"--kd-{field.replace('_', '-')}"
