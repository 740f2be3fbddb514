"""Limits of time and memory, and that they end with their block."""

import resource
import signal
import time

import pytest

from mkd.utils.limits import call_within, limited


def test_time() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="too long"), limited(0.05):
        while True:
            pass
    assert time.monotonic() - begin < 5


def test_memory() -> None:
    with pytest.raises(MemoryError), limited(5, 1 << 28):
        "a" * 2**30


def test_nothing_stays() -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyError), limited(0.05):
        raise KeyError
    with limited(0.05):
        bytearray(1 << 20)
    time.sleep(0.1)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits and signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_lower_limit_is_kept() -> None:
    with limited(5, 1 << 28):
        inner = resource.getrlimit(resource.RLIMIT_DATA)
        with limited(5, 1 << 40):
            assert resource.getrlimit(resource.RLIMIT_DATA) == inner


def test_calls_in_another_thread() -> None:
    assert call_within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        call_within(5, lambda: {}["a"])
    with pytest.raises(TimeoutError, match=r"did not end in 0.05 s"):
        call_within(0.05, lambda: time.sleep(0.5))

    class PanicError(BaseException):
        """As of Rust."""

    def panic() -> None:
        raise PanicError("regex\nover limit")

    with pytest.raises(RuntimeError, match="regex over limit"):
        call_within(5, panic)
