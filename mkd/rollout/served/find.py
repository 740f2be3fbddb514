"""Finds the servers of --kd-rollout-url before the first step, and checks that they can write the student's texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError
from mkd.rollout.served.apis import NO_ROUTE, WRITING_APIS, WritingApi
from mkd.rollout.served.server import StudentServer
from mkd.rollout.served.sharing import MOST_AT_ONCE
from mkd.teacher.inference.http import ROLLOUT, HttpServer, ServerAddress, ServerRefusal, parse_addresses
from mkd.teacher.inference.probe import find_model, wait_for_server

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class TextSizes:
    """Sizes of the student's texts."""

    vocab: int
    """Tokens that exist."""
    longest: int
    """Tokens of the longest prompt with its answer."""


def addresses_of(kd: KDConfig) -> list[ServerAddress]:
    """The addresses of --kd-rollout-url.

    Raises:
        MkdConfigError: an address is invalid, or there twice.
    """
    return list(parse_addresses(ROLLOUT.url, kd.rollout_url or ()))


def find_servers(kd: KDConfig, sizes: TextSizes, timeout_s: float) -> Sequence[StudentServer]:
    """Find the model at each address.

    Args:
        kd: the flags.
        sizes: of the student's texts.
        timeout_s: seconds to wait for servers that do not answer yet.

    Raises:
        MkdConfigError: an address is invalid, or the server reads shorter texts.
        MkdTeacherTimeout: a server does not answer.
        MkdTeacherError: it is not an inference server, or loads no weights.
    """
    found = []
    for address in addresses_of(kd):
        server = HttpServer(address, kd.rollout_timeout, MOST_AT_ONCE, ROLLOUT)
        origin = f"{ROLLOUT.url} {address}"
        found.append(wait_for_server(partial(_find, server, address, kd.rollout_api, sizes), origin, timeout_s))
    return found


def _find(server: HttpServer, address: ServerAddress, flag_value: str, sizes: TextSizes) -> StudentServer:
    card = find_model(server, address, flag_value, ROLLOUT.url)
    api = WRITING_APIS[card.api]()
    remedy = api.remedy.format(length=sizes.longest + 1)
    if card.positions is not None and card.positions <= sizes.longest:
        raise MkdConfigError(
            f"{ROLLOUT.url} {address} reads texts of {card.positions} tokens; the longest prompt with "
            f"--kd-rollout-tokens has {sizes.longest}, and one more is needed: start it with {remedy}"
        )
    _check_route(server, api, remedy)
    return StudentServer(server, api, card.name, sizes.vocab)


def _check_route(server: HttpServer, api: WritingApi, remedy: str) -> None:
    """Refuse a server without the route for new weights. It takes POST only, and refuses this request by its method."""
    try:
        server.get(api.loading, _MOST_BYTES)
    except ServerRefusal as error:
        if error.answer == NO_ROUTE:
            raise MkdConfigError(
                f"{ROLLOUT.url} {server} has no route {api.loading}, by which it is given the student's weights: start "
                f"it with {remedy}"
            ) from None
        if error.answer in (401, 403):
            raise
