"""A teacher model that runs beside the student, on the same ranks in a parallel layout of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.training.models import GPTModelConfig
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups, ParallelLayout
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.online import OnlineTeacher, detached_head, frozen_model, offload_weights, weights_on_host
from mkd.teacher.resharded.exchange import TeacherExchange
from mkd.teacher.resharded.plan import RowSharding


class ReshardedTeacher(OnlineTeacher):
    """Runs over all microbatches of a step before the student; each replica of the teacher runs its assigned ones.

    The signals are those of a teacher in the student's layout: hidden states split like the student's own, and the rows
    of the LM head that belong to this rank's vocabulary shard of the student.
    """

    def __init__(self, model: GPTModel, layout: ParallelLayout, exchange: TeacherExchange, **options: Any) -> None:
        """Args:
        model, options: see `OnlineTeacher`.
        layout: the teacher's layout.
        exchange: between the student's layout and the teacher's.
        """
        super().__init__(model, layout.groups, **options)
        self._layout, self._exchange = layout, exchange
        self._width, self._dtype = model.config.hidden_size, model.config.params_dtype
        self._whole: list[KDBatch] = []

    @classmethod
    def build_in(
        cls,
        layout: ParallelLayout,
        config: GPTModelConfig,
        student: Groups,
        load_weights: Callable[[list[GPTModel]], None],
        *,
        head_columns: Tensor,
        student_sequence_parallel: bool,
        offload: bool = False,
        **options: Any,
    ) -> "ReshardedTeacher":
        """Build the model in its layout and distribute its LM head. Collective over all ranks.

        Args:
            layout: the teacher's layout.
            config: the teacher's configuration, with the sizes of its layout.
            student: the student's groups.
            load_weights, offload: see `OnlineTeacher.build`.
            head_columns: [V/tp] int64 ids whose rows of the LM head the loss needs on this rank of the student.
            student_sequence_parallel: True if the student's tensor-parallel ranks hold slices of the sequence.
            options: of `OnlineTeacher`.
        """
        transformer, own, is_last = config.transformer, layout.groups, student.is_last_stage
        exchange = TeacherExchange(
            student,
            layout,
            RowSharding(student.tp.size(), student.cp.size(), student_sequence_parallel),
            RowSharding(own.tp.size(), own.cp.size(), transformer.sequence_parallel),
        )
        with layout.active(), torch.no_grad():
            model = frozen_model(config, own, load_weights)
            needed, size = head_columns if is_last else head_columns[:0], (transformer.hidden_size, config.params_dtype)
            head = exchange.lm_head_rows(detached_head(model, own), needed, *size)
            options |= dict(head=head if is_last else None, on_host=weights_on_host(model) if offload else ())
        return cls(model, layout, exchange, **options)

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`: the microbatches of a step are divided among the replicas."""
        return True

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`."""
        self._whole = list(batches)
        return self._whole

    @torch.no_grad()
    def signals(self, batches: Sequence[KDBatch]) -> Iterable[HiddenSignal]:
        """See `Teacher.signals`. Collective over all ranks; `prepare` has had the same microbatches."""
        own = [self._batch_view(batch) for batch in batches]
        whole = [
            replace(self._batch_view(self._whole[batch.number]), supervised=part.supervised)
            for batch, part in zip(batches, own, strict=True)
        ]
        step = self._exchange.start_step(whole)
        with self._layout.active():
            self._reload()
            hidden = self._hidden_states([batch.on_rank(self._groups.cp) for batch in step.batches])
            # Each microbatch arrives by itself, so it may wait on the host even if the teacher's pass was a single one.
            states = self._new_states(len(batches), len(batches))
            step.send_states(hidden, self._width, self._dtype, states)
            offload_weights(self._on_host)
        return self._signals_of(states, own)
