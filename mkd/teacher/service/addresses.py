"""Addresses of teacher services, and who may connect to them.

Without a secret a service listens on this machine only: at 127.0.0.1 every process of the machine may use it, at a
socket file only its user. With MKD_TEACHER_TOKEN, on both sides, connections are those of CurveZMQ: both sides prove
that they have the secret, and everything is encrypted and authenticated. The long-term keys of both sides are derived
from the secret (scrypt), and the service accepts no other client key.
"""

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from mkd.errors import MkdConfigError, MkdTeacherError
from mkd.teacher.service.socket_file import SCHEME, SocketFile

TOKEN = "MKD_TEACHER_TOKEN"
"""Environment variable of the secret."""
FEWEST_CHARACTERS = 16
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
_WAITING = 64
"""Answers that wait for a client which does not read them; further ones are dropped. Clients have 4 requests under way
at one time, so that none of theirs is."""
_HEARTBEAT_MS, _LOST_AFTER_MS = 5_000, 20_000


@dataclass(frozen=True)
class ServiceAddress:
    """tcp://HOST:PORT."""

    host: str
    port: int

    @classmethod
    def parse(cls, flag: str, text: str) -> "ServiceAddress":
        """Parse the value of a flag.

        Raises:
            MkdConfigError: it is no such address.
        """
        found = _ADDRESS.fullmatch(text)
        if found is None or not 0 < int(found[2]) < 2**16:
            raise MkdConfigError(
                f"{flag} is {text}; it must be tcp://HOST:PORT, such as tcp://127.0.0.1:5757, or ipc:///FOLDER/NAME"
            )
        return cls("127.0.0.1" if found[1] == "localhost" else found[1], int(found[2]))

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def bind(self, service: zmq.Socket) -> None:
        """Listen; at port 0 at one that the system chooses.

        Raises:
            zmq.ZMQError: the address cannot be used.
        """
        service.ipv6 = self.host.startswith("[")
        service.bind(str(self) if self.port else f"tcp://{self.host}:*")


Address = ServiceAddress | SocketFile


def parse_address(flag: str, text: str) -> Address:
    """Parse the value of a flag: tcp://HOST:PORT or ipc:///FOLDER/NAME.

    Raises:
        MkdConfigError: it is no such address.
    """
    return (SocketFile if text.startswith(SCHEME) else ServiceAddress).parse(flag, text)


@dataclass(frozen=True)
class Secret:
    """Keys of CurveZMQ that both sides derive from MKD_TEACHER_TOKEN."""

    service: bytes
    client: bytes

    @classmethod
    def of(cls, token: str) -> "Secret":
        """Derive the keys. The same token always gives the same keys, which are therefore as secret as the token."""
        return cls(*(_secret_key(token, role) for role in (b"service", b"client")))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Secret | None":
        """The secret of this process; None if there is none.

        Raises:
            MkdConfigError: it is too short.
        """
        token = environ.get(TOKEN, "")
        if not token:
            return None
        if len(token) < FEWEST_CHARACTERS:
            raise MkdConfigError(
                f"{TOKEN} has {len(token)} characters: it must be a random text of at least {FEWEST_CHARACTERS}, such "
                "as that of openssl rand -hex 32"
            )
        return cls.of(token)

    def callback(self, domain: str, key: bytes) -> bool:
        """True for the public key of a client with the secret; pyzmq calls it for each connection."""
        return key == zmq.curve_public(self.client)


def _secret_key(token: str, role: bytes) -> bytes:
    salt = b"mkd teacher service, protocol 1, " + role
    return z85.encode(hashlib.scrypt(token.encode(), salt=salt, n=2**14, r=8, p=1, dklen=32))


def require_secret(flag: str, address: Address, secret: Secret | None) -> None:
    """Refuse an address that others can reach, or that reaches others, without a secret."""
    if secret is None and not address.is_loopback:
        raise MkdConfigError(
            f"{flag} {address} is not on this machine alone, which needs a secret: set {TOKEN} to the same random text "
            "on both sides (openssl rand -hex 32), or use 127.0.0.1 or ipc:///FOLDER/NAME"
        )


def service_socket(
    context: zmq.Context, address: Address, secret: Secret | None, most_bytes: int
) -> tuple[zmq.Socket, ThreadAuthenticator | None]:
    """A bound socket of a service, and the thread that checks keys of clients.

    Args:
        context: ZeroMQ's.
        address: where to listen.
        secret: None accepts every process that reaches the address.
        most_bytes: largest frame that is received; a peer that sends a larger one is disconnected.

    Raises:
        MkdConfigError: see `SocketFile.bind`.
        zmq.ZMQError: the address cannot be used.
    """
    authenticator, socket = None, context.socket(zmq.ROUTER)
    _limit(socket, most_bytes)
    socket.sndhwm = _WAITING
    if secret is not None:
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", secret)
        socket.curve_server, socket.curve_secretkey = True, secret.service
        socket.curve_publickey = zmq.curve_public(secret.service)
    try:
        address.bind(socket)
    except BaseException:
        socket.close(0)
        if authenticator is not None:
            authenticator.stop()
        raise
    return socket, authenticator


def client_socket(
    context: zmq.Context, address: Address, secret: Secret | None, most_bytes: int
) -> tuple[zmq.Socket, zmq.Socket]:
    """A socket that connects to a service, and keeps trying to, and the socket of its connection's events.

    Raises:
        MkdTeacherError: see `SocketFile.check_service`; or the host is no name.
    """
    if isinstance(address, SocketFile):
        address.check_service()
    socket = context.socket(zmq.DEALER)
    _limit(socket, most_bytes)
    socket.immediate, socket.reconnect_ivl, socket.reconnect_ivl_max = True, 100, 2_000
    socket.ipv6 = isinstance(address, ServiceAddress) and address.host.startswith("[")
    if secret is not None:
        socket.curve_serverkey = zmq.curve_public(secret.service)
        socket.curve_secretkey, socket.curve_publickey = secret.client, zmq.curve_public(secret.client)
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    events |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    monitor = socket.get_monitor_socket(events)
    try:
        socket.connect(str(address))
    except zmq.ZMQError as error:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
        raise MkdTeacherError(
            f"{address} is no address to connect to ({zmq.strerror(error.errno)}): correct it"
        ) from None
    return socket, monitor


def _limit(socket: zmq.Socket, most_bytes: int) -> None:
    socket.maxmsgsize, socket.linger = most_bytes, 0
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _LOST_AFTER_MS
    socket.handshake_ivl = _LOST_AFTER_MS
