"""Ways to damage a file: bytes of any format, JSON documents, headers of safetensors, and the folder entry itself."""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

type Draw = random.Random

NUMBERS: list[Any] = [0, -1, 1, 2, 7, 10**6, 10**18, -(2**63), 2**64, 1e30, -0.5, 1e-300, float("nan"), float("inf")]
VALUES: list[Any] = [*NUMBERS, None, True, False, "", "x", "7", "../..", "\0", [], {}, [[]], {"a": 1}, "🙂" * 9]


def flip_bit(data: bytes, draw: Draw) -> tuple[bytes, str]:
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"bit {bit} of byte {at} is flipped"


def set_bytes(data: bytes, draw: Draw) -> tuple[bytes, str]:
    at, count, value = draw.randrange(len(data)), draw.choice([1, 2, 4, 8, 64]), draw.choice([0, 0xFF, 0x7F, 0x20])
    whole = data[:at] + bytes([value]) * len(data[at : at + count]) + data[at + count :]
    return whole, f"{count} bytes from {at} are {value:#x}"


def truncate(data: bytes, draw: Draw) -> tuple[bytes, str]:
    at = draw.choice([0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, draw.randrange(len(data))])
    return data[:at], f"cut after {at} of {len(data)} bytes"


def extend(data: bytes, draw: Draw) -> tuple[bytes, str]:
    tail = draw.choice([b"\0", b"\n", b"\0" * 8, b"{}", os.urandom(1) * 64, data[:64], data])
    return data + tail, f"{len(tail)} bytes more at the end"


def remove_block(data: bytes, draw: Draw) -> tuple[bytes, str]:
    at, count = draw.randrange(len(data)), draw.choice([1, 2, 8, 64])
    return data[:at] + data[at + count :], f"{count} bytes from {at} are missing"


def double_block(data: bytes, draw: Draw) -> tuple[bytes, str]:
    at, count = draw.randrange(len(data)), draw.choice([1, 8, 64])
    return data[: at + count] + data[at:], f"{count} bytes from {at} are there twice"


def swap_blocks(data: bytes, draw: Draw) -> tuple[bytes, str]:
    size = draw.choice([1, 4, 8, 32])
    if len(data) < 2 * size:
        return flip_bit(data, draw)
    a, b = sorted((draw.randrange(len(data) - 2 * size + 1), draw.randrange(len(data) - 2 * size + 1)))
    b = max(b, a + size)
    whole = data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]
    return whole, f"{size} bytes at {a} and {b} are swapped"


BYTES: list[Callable[[bytes, Draw], tuple[bytes, str]]] = [
    flip_bit,
    flip_bit,
    set_bytes,
    truncate,
    extend,
    remove_block,
    double_block,
    swap_blocks,
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a JSON document."""
    found = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        found += _places(value[key])
    return found


def change_json(data: bytes, draw: Draw) -> tuple[bytes, str]:
    """Change one value of a JSON document, or its text in a way that parsers suffer from."""
    content = json.loads(data)
    top = [(content, key) for key in content] if isinstance(content, dict) else []
    places = _places(content)
    if not places:
        return flip_bit(data, draw)
    # Long lists, such as vocabularies, must not hide the keys at the top.
    container, key = draw.choice(top if top and draw.random() < 0.6 else places)
    kind = draw.choice(["value", "value", "value", "near", "near", "type", "remove", "add", "double", "bomb"])
    old = container[key]
    if kind == "remove":
        del container[key]
        return json.dumps(content).encode(), f"{key!r} is removed"
    if kind == "add" and isinstance(container, dict):
        container[draw.choice(["extra", "quantization_config", "auto_map", "torch_dtype", "__class__"])] = draw.choice(
            VALUES
        )
        return json.dumps(content).encode(), "a key is added"
    if kind == "double" and isinstance(container, dict):
        mark, other = "@double@", json.dumps(draw.choice(VALUES))
        container[mark] = 0
        text = json.dumps(content).replace(f'"{mark}": 0', f"{json.dumps(key)}: {other}")
        return text.encode(), f"{key!r} is there twice, the second time as {other[:40]}"
    if kind == "bomb":
        mark = "@bomb@"
        container[key] = mark
        name, bomb = draw.choice(
            [
                ("100,000 open brackets", "[" * 100_000),
                ("nested 100,000 times", "[" * 100_000 + "]" * 100_000),
                ("a number of 10,000 digits", "9" * 10_000),
                ("a word of 20 MB", '"' + "x" * 20_000_000 + '"'),
            ]
        )
        return json.dumps(content).replace(f'"{mark}"', bomb).encode(), f"{key!r} is {name}"
    if kind == "near" and isinstance(old, int | float) and not isinstance(old, bool):
        container[key] = draw.choice([old + 1, old - 1, old * 2, -old, old / 2])
    elif kind == "near" and isinstance(old, str) and old:
        container[key] = draw.choice([old + "x", old[:-1], old.upper(), old[::-1]])
    elif kind == "type":
        container[key] = draw.choice([str(old), [old], {"value": old}])
    else:
        container[key] = draw.choice(VALUES)
    return json.dumps(content).encode(), f"{key!r} is {str(container[key])[:60]!r} instead of {str(old)[:60]!r}"


def change_header(data: bytes, draw: Draw) -> tuple[bytes, str]:
    """Change the JSON header of a safetensors file, with its right or a wrong length."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    if draw.random() < 0.15:
        wrong = draw.choice([0, 1, size - 1, size + 1, 2**31, 2**62, 2**64 - 1])
        return struct.pack("<Q", wrong) + header + body, f"the header has {wrong} bytes instead of {size}"
    if draw.random() < 0.3:
        content = json.loads(header)
        names = [name for name in content if name != "__metadata__"]
        one, other = draw.choice(names), draw.choice(names)
        field = draw.choice(["data_offsets", "shape", "dtype"])
        content[one][field] = draw.choice(
            [content[other][field], [0, 0], [2**62, 2**62], [-4, 8], [1], "F64", "BOOL", None, [10**9, 10**9]]
        )
        header, note = json.dumps(content).encode(), f"{field} of {one} is {content[one][field]}"
    else:
        header, note = change_json(header, draw)
    return struct.pack("<Q", len(header)) + header + body, note


def change_text(data: bytes, draw: Draw) -> tuple[bytes, str]:
    """Change one line of a text file."""
    lines = data.split(b"\n")
    at, kind = draw.randrange(len(lines)), draw.choice(["drop", "twice", "blank", "json", "nul", "latin1", "long"])
    line = lines[at]
    if kind == "json" and line.strip():
        try:
            lines[at] = change_json(line, draw)[0]
        except ValueError:
            lines[at] = line[::-1]
    else:
        lines[at] = {
            "drop": b"",
            "twice": line + b"\n" + line,
            "blank": b"   ",
            "nul": line + b"\0",
            "latin1": line + b"\xe9\xff",
            "long": line[:-2] + b"x" * 3_000_000 + line[-2:],
        }.get(kind, line[::-1])
    return b"\n".join(lines), f"line {at + 1}: {kind}"


TEMPLATES = [
    "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{% set x = [0] %}{% for i in range(40) %}{% set x = x + x %}{% endfor %}{{ x }}",
    "{{ raise_exception('no') }}",
    "{% if %}",
    "{{ undefined.name.other }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ messages | map(attribute='content') | join('x' * 1000000) }}",
    "{% include '/etc/passwd' %}",
    "{{ 2 ** 10000000 }}",
]


def change_template(data: bytes, draw: Draw) -> tuple[bytes, str]:
    """A hostile template, alone or in front of the right one."""
    template = draw.choice(TEMPLATES)
    if draw.random() < 0.5:
        return template.encode(), f"the template is {template[:60]}"
    return template.encode() + data, f"the template begins with {template[:60]}"


def change_words(data: bytes, draw: Draw) -> tuple[bytes, str]:
    """Set one 4- or 8-byte integer of a binary file."""
    size, kind = draw.choice([(4, "<i"), (8, "<q")])
    if len(data) < size:
        return flip_bit(data, draw)
    at = draw.randrange((len(data)) // size) * size + draw.choice([0, 0, 1, 2, 4, 9]) % size
    at = min(at, len(data) - size)
    (old,) = struct.unpack_from(kind, data, at)
    limit = 2 ** (8 * size - 1)
    new = draw.choice([0, 1, -1, old + 1, old - 1, old * 2, -old, limit - 1, -limit, 2**30, draw.randrange(400)])
    new = max(-limit, min(limit - 1, new))
    return data[:at] + struct.pack(kind, new) + data[at + size :], f"the integer at byte {at} is {new} instead of {old}"


def replace_entry(path: Path, draw: Draw) -> str:
    """Replace a file by something that is not a file."""
    path.unlink()
    kind = draw.choice(["missing", "a folder", "a named pipe", "a link to itself", "a link to nothing", "/dev/zero"])
    if kind == "a folder":
        path.mkdir()
    elif kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "a link to nothing":
        path.symlink_to("nothing")
    elif kind == "/dev/zero":
        path.symlink_to(kind)
    return f"it is {kind}"
