"""A peer's process, and what of its output is shown."""

from __future__ import annotations

import selectors

from ragtag.app.launch.process import PeerProcess
from ragtag.app.terminal.output import HOLD_S, SeenErrors
from tests.app.terminal.test_output import TRACEBACK


def test_a_traceback_that_was_held_back_for_long_is_shown_of_the_first_peer_that_has_it() -> None:
    """A process on a busy machine takes longer to die of its error than a traceback is held back."""
    shown: list[str] = []
    seen = SeenErrors()
    with selectors.DefaultSelector() as selector:
        for number in (1, 2):
            peer = PeerProcess(
                number, ["-c", "pass"], {}, (), selector, lambda text, _error: shown.append(text)
            )
            peer.tracebacks.feed(TRACEBACK, now_s=10.0)
            peer.release(10.0 + HOLD_S, seen)
            assert peer.tracebacks.passed_on == "\n".join(TRACEBACK)
            peer.reap()
            peer.drain()
    assert shown == [*TRACEBACK, "the same traceback as peer 1's"]
    assert seen.same_as(2, "\n".join(TRACEBACK)) == 1
