"""A driver's waits end when something comes, and on time."""

from __future__ import annotations

import fcntl
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from ragtag.network.driver.ready import SELECTED_MAX, ready


@pytest.fixture(params=["few descriptors", "more than select takes"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        if request.param == "few descriptors":
            yield one, other
            return
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most < SELECTED_MAX + 64:
            pytest.skip(f"a process may have {most} descriptors here")
        far = fcntl.fcntl(one.fileno(), fcntl.F_DUPFD_CLOEXEC, SELECTED_MAX)  # the first free one from there
        with socket.socket(fileno=far) as moved:
            yield moved, other


def test_what_can_be_read_or_written_is_told_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    fd = one.fileno()
    assert ready([fd], [], 0.0) == set()
    assert ready([], [fd], 60.0) == {fd}
    other.send(b"x")
    assert ready([fd, other.fileno()], [], 60.0) == {fd}
    assert ready([fd], [fd], 60.0) == {fd}


def test_nobody_is_woken_for_what_it_does_not_ask_for(pair: tuple[socket.socket, socket.socket]) -> None:
    _, other = pair
    other.send(b"x")
    assert ready([other.fileno()], [], 0.01) == set()


def test_a_wait_is_less_than_a_millisecond_where_it_is_asked_for() -> None:
    """A train that is due in a quarter of one leaves then: the quickest of many waits, on a busy machine."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        took_s = []
        for _ in range(50):
            began_s = time.perf_counter()
            ready([one.fileno()], [], 2.5e-4)
            took_s.append(time.perf_counter() - began_s)
    assert 2.5e-4 <= min(took_s) < 9e-4
