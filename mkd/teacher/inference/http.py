"""Requests to an inference server over HTTP, with bounds: the server is not trusted."""

import http.client
import io
import os
import re
import socket
import time
from collections.abc import Buffer, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from mkd.errors import MkdConfigError, MkdTeacherError
from mkd.utils.json_files import parse_json

_CONNECT_S = 10.0
_PIECE_BYTES = 1 << 20
_QUOTED = 400
"""Characters of a server's own message that an error quotes."""
_TRANSIENT = {408, 425, 429}
_NEVER = {501, 505}
"""Statuses of 500 and above with which a server answers a request that it does not know at all."""
_INTERNALS = re.compile(r"_Timed\w+\([^()]*\): ")
"""Text of urllib3 before the cause: a class of this file with host and port, which the message has already."""


class ServerLost(Exception):
    """A server that does not answer, or cannot at the moment: the request may be sent again, also to another one."""

    status: int | None = None
    """Status of the answer; None without one."""


class ServerRefusal(MkdTeacherError):
    """An answer with a status that means that the request itself cannot be answered."""

    answer: int
    """Status of the answer."""


@dataclass(frozen=True)
class ServerFlags:
    """Names by which a user gives servers of one use, for messages."""

    url: str
    """Flag of the addresses."""
    api: str
    """Flag of the protocol."""
    key: str
    """Environment variable of the key that a server may require."""


TEACHER = ServerFlags("--kd-teacher-url", "--kd-teacher-api", "MKD_TEACHER_API_KEY")
ROLLOUT = ServerFlags("--kd-rollout-url", "--kd-rollout-api", "MKD_ROLLOUT_API_KEY")


@dataclass(frozen=True)
class ServerAddress:
    """http://HOST:PORT/PREFIX, or https; ?model=NAME where a server has several."""

    scheme: str
    host: str
    port: int
    prefix: str = ""
    model: str | None = None

    @classmethod
    def parse(cls, flag: str, text: str) -> "ServerAddress":
        """Parse the value of a flag. A path that ends with /v1, /v1/completions or /generate is the same without it.

        Raises:
            MkdConfigError: it is no such address.
        """
        wrong = MkdConfigError(
            f"{flag} is {text}; the address of an inference server is http://HOST:PORT, such as http://127.0.0.1:8000, "
            "with ?model=NAME where it serves several"
        )
        try:
            parts = urlsplit(text)
            usual = {"http": 80, "https": 443}[parts.scheme]
            port = usual if parts.port is None else parts.port
            query = parse_qs(parts.query, strict_parsing=bool(parts.query))
        except (ValueError, KeyError):
            raise wrong from None
        is_plain = not (parts.username or parts.password or parts.fragment) and set(query) <= {"model"}
        is_plain = is_plain and port > 0 and "%" not in (parts.hostname or "")
        if not parts.hostname or not is_plain or not text.isascii() or not text.isprintable() or " " in text:
            raise wrong
        try:
            parts.hostname.encode("idna")
        except UnicodeError:  # an empty part, or one that is too long
            raise wrong from None
        path = parts.path.rstrip("/")
        for end in ("/completions", "/generate", "/v1"):
            path = path.removesuffix(end)
        return cls(parts.scheme, parts.hostname, port, path, query["model"][-1] if query else None)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


def parse_addresses(flag: str, urls: Sequence[str]) -> tuple[ServerAddress, ...]:
    """Parse the values of a flag.

    Raises:
        MkdConfigError: one is no address, or two are the same in other words.
    """
    addresses = tuple(ServerAddress.parse(flag, url) for url in urls)
    if len(set(map(str, addresses))) < len(addresses):
        raise MkdConfigError(f"{flag} {' '.join(urls)} has an address twice: leave one out")
    return addresses


class _TimedReader(io.RawIOBase):
    """Bytes of a socket until a moment, however few arrive at a time: the limit of a socket is one of each read."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, limit_s: float) -> None:
        self._raw, self._connection, self._limit_s = raw, connection, limit_s
        self._ends = time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"its answer is not complete after {self._limit_s:g} s")
        usual = self._connection.gettimeout()
        self._connection.settimeout(left)
        try:
            return self._raw.readinto(buffer)
        finally:
            self._connection.settimeout(usual)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """An answer whose status, headers and content arrive within a limit of time together."""

    def __init__(self, connection: socket.socket, *, limit_s: float, **options: Any) -> None:
        super().__init__(connection, **options)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), connection, limit_s))


class HttpServer:
    """One address; may be used by several threads."""

    def __init__(
        self, address: ServerAddress, timeout_s: float, connections: int = 1, flags: ServerFlags = TEACHER
    ) -> None:
        """No connection is made yet.

        Args:
            address: the server.
            timeout_s: longest time of one request.
            connections: number of threads that use it.
            flags: the names of its use.

        Raises:
            MkdConfigError: the key in the environment cannot be one.
        """
        self.address, self.flags, self._timeout_s = address, flags, timeout_s
        kind = urllib3.HTTPSConnectionPool if address.scheme == "https" else urllib3.HTTPConnectionPool
        limits = urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s)
        self._pool = kind(address.host, address.port, maxsize=connections, timeout=limits, retries=False)
        timed = staticmethod(partial(_TimedResponse, limit_s=timeout_s))
        self._pool.ConnectionCls = type("_TimedConnection", (kind.ConnectionCls,), {"response_class": timed})
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if key := os.environ.get(flags.key):
            if not (key.isascii() and key.isprintable()):
                raise MkdConfigError(
                    f"{flags.key} has characters that no key has, such as a line break at its end: set it to the key "
                    "alone"
                )
            self._headers["Authorization"] = f"Bearer {key}"

    def __str__(self) -> str:
        return str(self.address)

    def get(self, path: str, most_bytes: int) -> Any:
        """The JSON value at a path; for the errors see `post`."""
        return self._request("GET", path, None, most_bytes)

    def post(self, path: str, body: bytes, most_bytes: int) -> Any:
        """The JSON value that answers a request.

        Args:
            path: below the address.
            body: JSON.
            most_bytes: largest answer that is read.

        Raises:
            ServerLost: the server does not answer now.
            ServerRefusal: it does not answer this request.
            MkdTeacherError: it redirects, or its answer is too large or not JSON.
        """
        return self._request("POST", path, body, most_bytes)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._pool.close()

    def _request(self, method: str, path: str, body: bytes | None, most_bytes: int) -> Any:
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        ends = time.monotonic() + self._timeout_s
        try:
            response = self._pool.urlopen(
                method,
                self.address.prefix + path,
                body=body,
                headers=headers,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            try:
                content = self._read(response, most_bytes if response.status == 200 else 1 << 16, ends)
            finally:
                # A connection is used again only if its answer was read to the end.
                response.close()
        except (HTTPError, OSError) as error:
            raise ServerLost(f"{self} does not answer: {_reason(error)}") from None
        if response.status == 200:
            return self._parse(content, most_bytes)
        text = " ".join(content[: 4 * _QUOTED].decode(errors="replace").split())[:_QUOTED]
        if (response.status >= 500 and response.status not in _NEVER) or response.status in _TRANSIENT:
            lost = ServerLost(f"{self} answers with status {response.status}: {text}")
            lost.status = response.status
            raise lost
        if 300 <= response.status < 400:
            raise MkdTeacherError(
                f"{self} redirects to {response.headers.get('Location', 'another address')!r:.200}, which is not "
                "followed: give the server's own address"
            )
        key = f"; set {self.flags.key} to the key of the server" if response.status in (401, 403) else ""
        refusal = ServerRefusal(f"{self} refuses {path} with status {response.status}: {text}{key}")
        refusal.answer = response.status
        raise refusal

    def _read(self, response: urllib3.BaseHTTPResponse, most_bytes: int, ends: float) -> bytes:
        pieces, size = [], 0
        while piece := response.read1(_PIECE_BYTES):  # returns what has arrived, so that the limit of time holds
            pieces.append(piece)
            size += len(piece)
            if size > most_bytes:
                if response.status != 200:
                    break
                raise MkdTeacherError(
                    f"{self} answers with more than {most_bytes:,} bytes, which no answer to this request has: is it "
                    "an inference server?"
                )
            if time.monotonic() > ends:
                raise TimeoutError(f"its answer is not complete after {self._timeout_s:g} s")
        return b"".join(pieces)

    def _parse(self, content: bytes, most_bytes: int) -> Any:
        try:
            return parse_json(content, most_bytes)
        except ValueError as error:
            raise MkdTeacherError(
                f"{self} answers with something else than JSON ({error}): is it an inference server?"
            ) from None


def pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds until the next request to a server that has failed `failures` times in a row: doubled each time."""
    # A server may be lost for days; 2.0**1024 is not a float.
    return min(first_s * 2.0 ** min(failures, 64), longest_s)


def _reason(error: Exception) -> str:
    """The last part of a chain of errors, which names the cause."""
    text = str(error)
    return _INTERNALS.sub("", text.rpartition("Caused by ")[2] or text)
