"""A teacher model that runs beside the student, on the same ranks in the same parallel layout."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder, GPTModelConfig
from torch import Tensor, nn

from mkd.config.values import SignalsMemory
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.losses import LogitMap
from mkd.models.gpt import lm_head, logit_scale
from mkd.teacher.captured_forward import CapturedForward
from mkd.teacher.forward_pass import ForwardPass, PassSize
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.layer_outputs import LayerRecorder
from mkd.teacher.waiting_states import MOST_ON_DEVICE, HostStates, WaitingStates


def _final_hidden_states(*, hidden_states: Tensor, **unused: Any) -> Tensor:
    """Output processor of the last stage that skips the LM head."""
    return hidden_states


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a teacher's forward passes. They change no result, except by rounding."""

    size: PassSize | None = None
    """Consecutive microbatches are joined to passes of at most this size; None: each microbatch is a pass."""
    captures: bool = False
    """On a GPU, passes over rows that are not packed are CUDA graphs."""
    memory: SignalsMemory = "device"
    """Memory in which hidden states of several passes wait for the student."""


class OnlineTeacher:
    """A frozen GPT model with its own architecture, one model chunk per pipeline stage.

    It has no gradients, no optimizer state and no data-parallel wrapper, and is not part of the student's checkpoints.
    """

    def __init__(
        self,
        model: GPTModel,
        groups: Groups,
        fingerprint: str,
        head: Tensor | None = None,
        on_host: Sequence[tuple[nn.Parameter, Tensor]] = (),
        view: int | None = None,
        options: ForwardOptions = ForwardOptions(),
    ) -> None:
        """Args:
        model: the model chunk of this stage, frozen.
        groups: its layout.
        fingerprint: fingerprint of architecture and weights.
        head: `HiddenSignal.head` on this rank; None: the model's own shard.
        on_host: weights that are on the device during `signals` only.
        view: index in `KDBatch.teacher_views` of the tokens that the teacher reads; None: the student's tokens.
        options: options of the forward passes.
        """
        self._model, self._groups, self._fingerprint, self._head = model, groups, fingerprint, head
        self._on_host, self._view, self._options = on_host, view, options
        captures = options.captures and next(model.parameters()).is_cuda
        self._captured = CapturedForward(model, self._compute) if captures else None

    @classmethod
    def build(
        cls,
        config: GPTModelConfig,
        groups: Groups,
        load_weights: Callable[[list[GPTModel]], None],
        *,
        offload: bool = False,
        head_columns: Tensor | None = None,
        **options: Any,
    ) -> "OnlineTeacher":
        """Build the model and load its weights. Collective over all ranks.

        Args:
            config: the teacher's configuration; its vocabulary is padded like the student's if they share a tokenizer.
            groups: the layout of student and teacher.
            load_weights: fills every parameter of the given model chunks.
            offload: keep the weights in host memory between calls of `signals`.
            head_columns: [columns] int64 ids whose rows of the LM head are `HiddenSignal.head` on this tensor-parallel
                rank, in this order; None: the model's own shard.
            options: of `__init__`.
        """
        model = frozen_model(config, groups, load_weights)
        head = None if head_columns is None else _gathered_head(model, groups, head_columns)
        return cls(model, groups, head=head, on_host=weights_on_host(model) if offload else (), **options)

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`: offloaded weights are copied to the device once per step."""
        return bool(self._on_host)

    @property
    def model(self) -> GPTModel:
        """The model chunk of this stage."""
        return self._model

    @property
    def begins_early(self) -> bool:
        """See `Teacher.begins_early`."""
        return False

    def begin(self, batch: KDBatch) -> None:
        """See `Teacher.begin`."""

    def metrics(self) -> dict[str, float]:
        """See `Teacher.metrics`."""
        return {}

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._fingerprint

    def close(self) -> None:
        """See `Teacher.close`: there is nothing to end."""

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`."""
        return list(batches)

    def record_layers(self, layers: Collection[int]) -> LayerRecorder:
        """Record the outputs of those of these layers (counted from 1) that this stage has, from now on."""
        return LayerRecorder.on(self._model, layers)

    @torch.no_grad()
    def signals(self, batches: Sequence[KDBatch]) -> Iterable[HiddenSignal]:
        """See `Teacher.signals`. With pipeline parallelism, one forward-only schedule over all microbatches."""
        batches = [self._batch_view(batch) for batch in batches]
        self._reload()
        states = self._all_states(batches)
        signals = self._signals_of(states, batches)
        offload_weights(self._on_host)
        return signals

    def _signals_of(self, states: WaitingStates, batches: Sequence[KDBatch]) -> Iterable[HiddenSignal]:
        """The signals of hidden states, which are empty off the student's last stage."""
        if not len(states):
            return []
        # The signals keep this weight on the device after the others are offloaded.
        head = lm_head(self._model).detach() if self._head is None else self._head
        logit_map = LogitMap(*logit_scale(self._model.config))
        signals = (
            HiddenSignal(one, head, logit_map, self._view, selected=batch.supervised is not None)
            for one, batch in zip(_in_order(states), batches, strict=True)
        )
        return signals if isinstance(states, HostStates) else list(signals)

    def _batch_view(self, batch: KDBatch) -> KDBatch:
        """The microbatch in the teacher's tokenizer."""
        return batch if self._view is None else batch.teacher_views[self._view].batch

    def _all_states(self, batches: Sequence[KDBatch]) -> WaitingStates:
        """The hidden states of all microbatches on the last stage, none on other stages."""
        passes = self._passes(batches)
        states = self._new_states(len(batches), len(passes))
        if self._groups.pp.size() > 1:
            self._pipelined(passes, states)
        else:
            for hidden in self._outputs_of(passes):
                states[len(states)] = hidden
        return states

    def _hidden_states(self, batches: Sequence[KDBatch]) -> Iterator[Tensor]:
        """Yields the hidden states of each microbatch on the last stage, nothing on other stages; without pipeline
        stages when its pass has run."""
        if self._groups.pp.size() > 1:
            yield from _in_order(self._all_states(batches))
        else:
            yield from self._outputs_of(self._passes(batches))

    def _passes(self, batches: Sequence[KDBatch]) -> list[ForwardPass]:
        cp, size = self._groups.cp.size(), self._options.size
        if size is None:
            return [ForwardPass((batch,), batch.tokens, batch.position_ids, batch.packed) for batch in batches]
        return [ForwardPass.of(run, cp) for run in size.divide(batches, cp)]

    def _new_states(self, microbatches: int, passes: int) -> WaitingStates:
        """Empty states. Those of a single pass are on the device at once, and stay there."""
        memory = self._options.memory
        if memory == "auto":
            waits = microbatches > MOST_ON_DEVICE and next(self._model.parameters()).is_cuda
            memory = "host" if waits else "device"
        return HostStates() if memory == "host" and passes > 1 else {}

    def _outputs_of(self, passes: Sequence[ForwardPass]) -> Iterator[Tensor]:
        for one in passes:
            yield from self._outputs(one, self._forward(one))

    def _forward(self, one: ForwardPass) -> Tensor:
        """The output of this stage; on the last one final hidden states."""
        if self._captured is not None and one.packed is None:
            return self._captured(one.tokens, one.position_ids)
        return self._compute(one.tokens, one.position_ids, one.packed)

    def _compute(self, tokens: Tensor, position_ids: Tensor, packed: PackedSeqParams | None = None) -> Tensor:
        return self._model(tokens, position_ids, None, output_processor=_final_hidden_states, packed_seq_params=packed)

    def _outputs(self, one: ForwardPass, hidden: Tensor) -> list[Tensor]:
        """The final hidden states of each microbatch of a pass, of supervised tokens if it has them."""
        tp, is_cut = self._groups.tp, self._model.config.sequence_parallel
        rank, parts = (tp.rank(), tp.size()) if is_cut else (0, 1)
        each = [hidden] if len(one.batches) == 1 else one.split(hidden, tp if is_cut else None)
        return [
            own if batch.supervised is None else batch.supervised.take(own.flatten(0, 1), rank, parts)
            for batch, own in zip(one.batches, each, strict=True)
        ]

    def _pipelined(self, passes: Sequence[ForwardPass], states: WaitingStates) -> None:
        """Run all passes through the stages; adds the hidden states of every microbatch on the last stage."""

        def forward_step(iterator: Iterator[ForwardPass], model: GPTModel) -> tuple[Tensor, None]:
            one = next(iterator)
            output = self._forward(one)
            if not self._groups.is_last_stage:
                return output, None
            for hidden in self._outputs(one, output):
                states[len(states)] = hidden
            return output.new_empty(0), None  # the schedule keeps what it gets

        config, shapes = self._model.config, {one.tokens.shape for one in passes}
        micro_batch_size, tokens = passes[0].tokens.shape
        run = get_forward_backward_func(pp_size=self._groups.pp.size(), vp_size=None)
        differ = config.variable_seq_lengths
        config.variable_seq_lengths = differ or len(shapes) > 1  # stages then send shapes too
        try:
            run(
                forward_step_func=forward_step,
                data_iterator=iter(passes),
                model=[self._model],
                num_microbatches=len(passes),
                seq_length=tokens * self._groups.cp.size(),
                micro_batch_size=micro_batch_size,
                forward_only=True,
                p2p_communicator=P2PCommunicator(pp_group=self._groups.pp, config=config),
                pg_collection=self._groups.collection,
            )
        finally:
            config.variable_seq_lengths = differ

    def _reload(self) -> None:
        for parameter, host in self._on_host:
            parameter.data = host.to("cuda", non_blocking=True)


def _in_order(states: WaitingStates) -> Iterable[Tensor]:
    """Hidden states on the device, in the order of the microbatches."""
    return states.in_order() if isinstance(states, HostStates) else [states[number] for number in sorted(states)]


def frozen_model(config: GPTModelConfig, groups: Groups, load_weights: Callable[[list[GPTModel]], None]) -> GPTModel:
    """The model chunk of this stage, with its weights and without gradients."""
    with torch.no_grad():  # with gradients, FP8 weights would keep a transposed and a bf16 copy as well
        wrapped = GPTModelBuilder(config).build_distributed_models(
            pg_collection=groups.collection, wrap_with_ddp=False, data_parallel_random_init=False
        )
        load_weights(wrapped)
    # Unwrapped, because Float16Module casts the hidden states that it returns to fp32.
    return unwrap_model(wrapped[0]).requires_grad_(False).eval()


def weights_on_host(model: GPTModel) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter, which is moved to the host, with its values there. Frozen weights are copied to the host once;
    afterwards they are only copied to the device."""
    on_host = [(parameter, parameter.data.to("cpu").pin_memory()) for parameter in model.parameters()]
    offload_weights(on_host)
    return on_host


def offload_weights(on_host: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Release the parameters' memory on the device."""
    for parameter, host in on_host:
        parameter.data = host


def detached_head(model: GPTModel, groups: Groups) -> Tensor | None:
    """[V/tp, Ht] weight of the LM head, removed from the model unless it is tied; None off the last stage."""
    if not groups.is_last_stage:
        return None
    own = lm_head(model).detach().contiguous()
    if not (model.pre_process and model.share_embeddings_and_output_weights):
        model.output_layer.weight.data = own.new_empty((0, own.shape[1]))
    return own


@torch.no_grad()
def _gathered_head(model: GPTModel, groups: Groups, columns: Tensor) -> Tensor | None:
    """[columns, Ht] rows of the LM head, gathered from all tensor-parallel ranks; None off the last stage."""
    own = detached_head(model, groups)
    if own is None:
        return None
    whole = own.new_empty((own.shape[0] * groups.tp.size(), own.shape[1]))
    dist.all_gather_into_tensor(whole, own, group=groups.tp)
    return whole.index_select(0, columns.to(whole.device))
