"""Properties of a served teacher, which a client checks before it loads anything."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from mkd.teacher.service.messages import MOST_ANSWER_BYTES, ProtocolError

_MOST_WIDTH = 1 << 17
"""Memory is taken for an LM head of this width; the widest published model has 20,480."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class TeacherFacts:
    """Properties of a served teacher and limits of its service, equal for all its clients."""

    fingerprint: str
    """See `Teacher.fingerprint`."""
    description: str
    """Layers, width and folder, for the run summary."""
    tokenizer: str | None
    """Hash of its tokenizer; None if unknown."""
    vocab: int
    """Vocabulary size without padding."""
    positions: int | None
    """Longest text; None if unlimited."""
    width: int
    """Ht, the width of final hidden states."""
    logit_scale: float
    logit_softcap: float | None = None
    """See `LogitMap`."""
    dtype: str
    """Dtype of its final hidden states and of its LM head."""
    is_fp8: bool = False
    """True if its layers compute in FP8."""
    packed: bool
    """True if it computes packed rows."""
    most_tokens: int
    """Tokens of a request at most."""
    row_multiple: int
    """Divisor of the length of rows."""
    segment_multiple: int
    """Divisor of the length of segments of packed rows."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TeacherFacts":
        """The facts in a message, which is not trusted.

        Raises:
            ProtocolError: one is missing, unknown or of another type.
        """
        if set(values) != {one.name for one in fields(cls)}:
            raise ProtocolError("other facts about the teacher")
        for one in fields(cls):
            value = values[one.name]
            if not isinstance(value, one.type) or (isinstance(value, bool) and one.type is not bool):
                raise ProtocolError(f"{one.name} of the teacher is {value!r}")
        facts = cls(**values)
        sizes = (facts.vocab, facts.most_tokens, facts.row_multiple, facts.segment_multiple)
        is_capped_right = facts.logit_softcap is None or 0 < facts.logit_softcap < math.inf
        is_possible = all(0 < size < 2**31 for size in sizes) and 0 < facts.width <= _MOST_WIDTH
        if facts.dtype not in _DTYPES or not (is_capped_right and is_possible and math.isfinite(facts.logit_scale)):
            raise ProtocolError(f"impossible facts about the teacher: {facts}")
        return facts

    def is_same(self, other: "TeacherFacts") -> bool:
        """True if both services compute the same; the teacher's folder may have another name."""
        return replace(self, description="") == replace(other, description="")

    def values(self) -> dict[str, Any]:
        """The facts for a message."""
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        """See `dtype`."""
        return _DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the final hidden states of one token."""
        return self.width * self.torch_dtype.itemsize

    @property
    def most_head_rows(self) -> int:
        """Rows of the LM head in one answer at most."""
        return max(1, MOST_ANSWER_BYTES // self.bytes_per_token)
