"""A teacher that runs beside the student, on the same ranks and in the same parallel layout."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder, GPTModelConfig
from torch import Tensor, nn

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.models.gpt import lm_head, logit_scale
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.layer_outputs import LayerRecorder


def _final_hidden_states(*, hidden_states: Tensor, **unused: Any) -> Tensor:
    """Output processor of the last stage: stop before the LM head."""
    return hidden_states


class OnlineTeacher:
    """A frozen GPT model of its own width, depth and heads, one chunk a pipeline stage.

    It has no gradients, no optimizer state and no data-parallel wrapper, and is in no checkpoint of the student.
    """

    def __init__(
        self,
        config: GPTModelConfig,
        groups: Groups,
        load_weights: Callable[[list[GPTModel]], None],
        fingerprint: str,
        offload: bool = False,
        view: int | None = None,
        head_columns: Tensor | None = None,
    ) -> None:
        """Build the model, fill it and freeze it.

        Args:
            config: the teacher's own; its vocabulary is padded like the student's where the two share a tokenizer.
            groups: the student's layout, which is also the teacher's.
            load_weights: fills every parameter of the chunks it is given.
            fingerprint: of architecture and weights.
            offload: keep the weights in host memory between calls of `signals`.
            view: which of `KDBatch.teacher_views` the teacher reads; None: the student's tokens.
            head_columns: [columns] int64 ids whose rows of the LM head this tensor-parallel rank gives with its
                signals, in this order; None: as they are cut in the model.
        """
        self._config, self._groups, self._fingerprint = config, groups, fingerprint
        with torch.no_grad():  # with gradients, weights in FP8 would be kept transposed as well, and once more in bf16
            wrapped = GPTModelBuilder(config).build_distributed_models(
                pg_collection=groups.collection, wrap_with_ddp=False, data_parallel_random_init=False
            )
            load_weights(wrapped)
        # Float16Module would turn the hidden states into fp32 on the way out: run the model inside it.
        self._model: GPTModel = unwrap_model(wrapped[0]).requires_grad_(False).eval()
        self._view, self._head = view, None
        if head_columns is not None:
            self._head = self._take_head(head_columns)
        self._on_host: list[tuple[nn.Parameter, Tensor]] = []
        if offload:
            # Frozen weights are copied out once and only ever copied in again.
            self._on_host = [(p, p.data.to("cpu").pin_memory()) for p in self._model.parameters()]
            self._leave_device()

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`: weights that leave the device come back once a step."""
        return bool(self._on_host)

    def facts(self) -> dict[str, float]:
        """See `Teacher.facts`."""
        return {}

    def fingerprint(self) -> str:
        return self._fingerprint

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`."""
        return list(batches)

    def record_layers(self, layers: Collection[int]) -> LayerRecorder:
        """From now on keep what these layers put out, as far as this stage has them; they count from 1."""
        return LayerRecorder.on(self._model, layers)

    @torch.no_grad()
    def signals(self, batches: Sequence[KDBatch]) -> list[HiddenSignal]:
        """See `Teacher.signals`. Under pipeline parallelism this is one forward-only schedule over all microbatches."""
        batches = [self._read(batch) for batch in batches]
        self._enter_device()
        hidden = list(self._hidden_states(batches))
        signals = []
        if hidden:  # on the last stage
            # Stays on the device after the other weights have left it.
            head = lm_head(self._model).detach() if self._head is None else self._head
            signals = [HiddenSignal(h, head, logit_scale(self._model.config), self._view) for h in hidden]
        self._leave_device()
        return signals

    def _read(self, batch: KDBatch) -> KDBatch:
        """A microbatch in the tokens that this teacher reads."""
        return batch if self._view is None else batch.teacher_views[self._view].batch

    def _hidden_states(self, batches: Sequence[KDBatch]) -> Iterator[Tensor]:
        """Of each microbatch on the last stage, one after the other; nothing on the others."""
        if self._groups.pp.size() > 1:
            yield from self._pipelined(batches)
        else:
            yield from map(self._forward, batches)

    @torch.no_grad()
    def _take_head(self, columns: Tensor) -> Tensor | None:
        """[columns, Ht] rows of the LM head, which lie on any rank; None off the last stage."""
        own = self._give_up_head()
        if own is None:
            return None
        whole = own.new_empty((own.shape[0] * self._groups.tp.size(), own.shape[1]))
        dist.all_gather_into_tensor(whole, own, group=self._groups.tp)
        return whole.index_select(0, columns.to(whole.device))

    def _give_up_head(self) -> Tensor | None:
        """[V/tp, Ht] of the last stage, which the model no longer has where it can do without; None on others."""
        if not self._groups.is_last_stage:
            return None
        own = lm_head(self._model).detach().contiguous()
        if not (self._model.pre_process and self._model.share_embeddings_and_output_weights):
            self._model.output_layer.weight.data = own.new_empty((0, own.shape[1]))
        return own

    def _forward(self, batch: KDBatch) -> Tensor:
        return self._model(
            batch.tokens,
            batch.position_ids,
            None,
            output_processor=_final_hidden_states,
            packed_seq_params=batch.packed,
        )

    def _pipelined(self, batches: Sequence[KDBatch]) -> list[Tensor]:
        """Hidden states of every microbatch on the last stage; an empty list on the others."""

        def forward_step(iterator: Iterator[KDBatch], model: GPTModel) -> tuple[Tensor, None]:
            return self._forward(next(iterator)), None

        micro_batch_size, tokens = batches[0].tokens.shape
        run = get_forward_backward_func(pp_size=self._groups.pp.size(), vp_size=None)
        return run(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=tokens * self._groups.cp.size(),
            micro_batch_size=micro_batch_size,
            forward_only=True,
            p2p_communicator=P2PCommunicator(pp_group=self._groups.pp, config=self._config.transformer),
            pg_collection=self._groups.collection,
        )

    def _enter_device(self) -> None:
        for parameter, host in self._on_host:
            parameter.data = host.to("cuda", non_blocking=True)

    def _leave_device(self) -> None:
        for parameter, host in self._on_host:
            parameter.data = host
