"""A teacher model that runs beside the student, on the same ranks in a parallel layout of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from megatron.core.models.gpt import GPTModel
from megatron.training.models import GPTModelConfig
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups, ParallelLayout
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.online import ForwardOptions, OnlineTeacher
from mkd.teacher.resharded.exchange import TeacherExchange
from mkd.teacher.resharded.plan import RowSharding


class ReshardedTeacher(OnlineTeacher):
    """Runs over all microbatches of a step before the student; each replica of the teacher runs its assigned ones.

    The signals are those of a teacher in the student's layout: hidden states split like the student's own, and the rows
    of the LM head that belong to this rank's vocabulary shard of the student.
    """

    def __init__(
        self,
        config: GPTModelConfig,
        layout: ParallelLayout,
        student: Groups,
        load_weights: Callable[[list[GPTModel]], None],
        fingerprint: str,
        *,
        head_columns: Tensor,
        student_sequence_parallel: bool,
        offload: bool = False,
        view: int | None = None,
        options: ForwardOptions = ForwardOptions(),  # noqa: B008
    ) -> None:
        """Build the model in its layout and distribute its LM head. Collective over all ranks.

        Args:
            config: the teacher's configuration, with the sizes of its layout.
            layout: the teacher's layout.
            student: the student's groups.
            load_weights, fingerprint, offload, view, options: see `OnlineTeacher`.
            head_columns: [V/tp] int64 ids whose rows of the LM head the loss needs on this rank of the student.
            student_sequence_parallel: True if the student's tensor-parallel ranks hold slices of the sequence.
        """
        transformer = config.transformer
        self._layout, self._student = layout, student
        self._width, self._dtype = transformer.hidden_size, transformer.params_dtype
        self._whole: list[KDBatch] = []
        self._exchange = TeacherExchange(
            student,
            layout,
            RowSharding(student.tp.size(), student.cp.size(), student_sequence_parallel),
            RowSharding(layout.groups.tp.size(), layout.groups.cp.size(), transformer.sequence_parallel),
        )
        with layout.active():
            super().__init__(config, layout.groups, load_weights, fingerprint, offload, view, head_columns, options)

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
            self._offload()
        return self._signals_of(states, own)

    @torch.no_grad()
    def _take_head(self, columns: Tensor) -> Tensor | None:
        """[columns, Ht] rows of the LM head that this rank of the student's last stage needs; None off that stage."""
        needed = columns if self._student.is_last_stage else columns[:0]
        head = self._exchange.lm_head_rows(self._detach_head(), needed, self._width, self._dtype)
        return head if self._student.is_last_stage else None
