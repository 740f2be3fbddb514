"""Messages between a teacher service and its clients.

A message is a list of ZeroMQ frames:

    frame 0     16 bytes: magic, protocol version, kind, two zero bytes, request id; then a JSON object
    frame 1...  the bytes of each tensor, row by row and little-endian, of the dtypes and shapes in the JSON object

Nothing in a message is unpickled or run, and every size is checked before memory is taken for it.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkd.utils.json_files import parse_json

PROTOCOL = 2
"""Version of the protocol; both sides must have the same."""
MOST_HEAD_BYTES = 16 << 10
"""Largest frame 0."""
MOST_TENSORS = 6
MOST_ANSWER_BYTES = 64 << 20
"""Largest part of the LM head in one answer."""
_HEAD = struct.Struct("<4sHBxQ")
_MAGIC = b"MKDT"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16)
}


class Kind(IntEnum):
    """Kinds of messages; those of the service follow the request that they answer."""

    HELLO = 1
    FACTS = 2
    """JSON of `TeacherFacts`."""
    FORWARD = 3
    """A microbatch, see `mkd.teacher.service.requests`."""
    HIDDEN = 4
    """[n, Ht] final hidden states of the wanted tokens."""
    HEAD = 5
    """start and count of rows of the LM head."""
    ROWS = 6
    """[count, Ht] rows of the LM head."""
    STATUS = 7
    COUNTERS = 8
    """Numbers about the work of the service so far."""
    REFUSED = 9
    """`reason` names the fault of the request."""
    TARGETS = 10
    """[n, columns] targets of the wanted tokens, see `mkd.teacher.service.targets`."""


class ProtocolError(ValueError):
    """A message that is not one of this protocol."""


@dataclass(frozen=True)
class Message:
    """One request or answer."""

    kind: Kind
    number: int = 0
    """Number of the request, chosen by the client; its answer has the same."""
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    """On the host."""

    def frames(self) -> list[Any]:
        """The frames; those of tensors share memory with them."""
        tensors = [tensor.detach().contiguous() for tensor in self.tensors]
        described = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors]
        text = json.dumps({"values": dict(self.values), "tensors": described}, separators=(",", ":")).encode()
        head = _HEAD.pack(_MAGIC, PROTOCOL, self.kind, self.number) + text
        assert len(head) <= MOST_HEAD_BYTES, f"{len(head)} bytes in the head of a message"
        return [head, *(memoryview(one.reshape(-1).view(torch.uint8).numpy()) for one in tensors)]

    @classmethod
    def of(cls, frames: Sequence[Any], *, pins: bool = False) -> "Message":
        """Parse the frames of a message (bytes or buffers), which are not trusted.

        Args:
            frames: all of them.
            pins: copy tensors into pinned host memory.

        Raises:
            ProtocolError: it is not a message, of another version, or its tensors do not have the described sizes.
        """
        if not 1 <= len(frames) <= 1 + MOST_TENSORS:
            raise ProtocolError(f"{len(frames)} frames")
        head = bytes(frames[0]) if len(frames[0]) <= MOST_HEAD_BYTES else b""
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise ProtocolError("no message of a teacher service")
        _, version, kind, number = _HEAD.unpack_from(head)
        if version != PROTOCOL:
            raise ProtocolError(f"version {version} of the protocol; this side has {PROTOCOL}")
        try:
            content = parse_json(head[_HEAD.size :].decode())
            values, described = content["values"], content["tensors"]
            kind = Kind(kind)
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"a head that cannot be read: {error}") from None
        if not isinstance(values, dict) or not isinstance(described, list) or len(described) != len(frames) - 1:
            raise ProtocolError("a head that does not describe its frames")
        tensors = tuple(_tensor(one, frame, pins) for one, frame in zip(described, frames[1:], strict=True))
        return cls(kind, number, values, tensors)


def _tensor(described: Any, frame: Any, pins: bool) -> Tensor:
    match described:
        case [str(name), list(shape)] if name in _DTYPES and len(shape) <= 3:
            pass
        case _:
            raise ProtocolError("a tensor of an unknown dtype or shape")
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise ProtocolError(f"a tensor of shape {shape}")
    dtype, size = _DTYPES[name], len(frame)
    if math.prod(shape) * dtype.itemsize != size:
        raise ProtocolError(f"{size} bytes for a {name} tensor of shape {shape}")
    found = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
    found.numpy()[:] = np.frombuffer(frame, dtype=np.uint8)
    return found.view(dtype).view(shape)
