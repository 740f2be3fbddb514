"""A teacher that runs beside the student, on the same ranks and in a parallel layout of its own."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.training.models import GPTModelConfig
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups, OwnLayout
from mkd.models.gpt import logit_scale
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.online import OnlineTeacher
from mkd.teacher.resharded.exchange import Exchange
from mkd.teacher.resharded.plan import Cut


class ReshardedTeacher(OnlineTeacher):
    """Looks at all microbatches of a step first, each replica of it at its share.

    The student gets what it would get of a teacher in its own layout: hidden states cut as its own, and the rows of
    the LM head that belong to its shard of the vocabulary.
    """

    def __init__(
        self,
        config: GPTModelConfig,
        layout: OwnLayout,
        student: Groups,
        load_weights: Callable[[list[GPTModel]], None],
        fingerprint: str,
        *,
        head_columns: Tensor,
        student_sequence_parallel: bool,
        offload: bool = False,
        view: int | None = None,
    ) -> None:
        """Build the model in its layout and hand out its LM head. Collective over all ranks.

        Args:
            config: the teacher's own, with the sizes of its layout.
            layout: its groups.
            student: the student's.
            load_weights, fingerprint, offload, view: see `OnlineTeacher`.
            head_columns: [V/tp] int64 ids whose rows of the LM head the loss wants on this rank of the student.
            student_sequence_parallel: whether the student's tensor-parallel ranks have slices of the sequence.
        """
        transformer = config.transformer
        self._layout, self._student = layout, student
        self._width, self._dtype = transformer.hidden_size, transformer.params_dtype
        self._whole: list[KDBatch] = []
        self._exchange = Exchange(
            student,
            layout,
            Cut(student.tp.size(), student.cp.size(), student_sequence_parallel),
            Cut(layout.groups.tp.size(), layout.groups.cp.size(), transformer.sequence_parallel),
        )
        with layout.active():
            super().__init__(config, layout.groups, load_weights, fingerprint, offload, view, head_columns)

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`: replicas share a step's microbatches."""
        return True

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`."""
        self._whole = list(batches)
        return self._whole

    @torch.no_grad()
    def signals(self, batches: Sequence[KDBatch]) -> list[HiddenSignal]:
        """See `Teacher.signals`: of microbatches that `prepare` has seen. Collective over all ranks."""
        step = self._exchange.step([self._read(self._whole[batch.number]) for batch in batches])
        with self._layout.active():
            self._enter_device()
            hidden = self._hidden_states([batch.on_rank(self._groups.cp) for batch in step.batches])
            answers = step.answers(hidden, self._width, self._dtype)
            self._leave_device()
        return [HiddenSignal(answer, self._head, logit_scale(self._model.config), self._side) for answer in answers]

    @torch.no_grad()
    def _take_head(self, columns: Tensor) -> Tensor | None:
        """The rows that the student's last stage wants, from whoever has them; None off that stage."""
        wanted = columns if self._student.is_last_stage else columns[:0]
        head = self._exchange.head(self._give_up_head(), wanted, self._width, self._dtype)
        return head if self._student.is_last_stage else None
