"""Asking a peer whether it is there at all: its node answers at once, though its trainer may still compute.

A round that lacks only a few peers' messages asks those. Who answers gets its whole deadline; who does not is
frozen, dead or cut off, and is waited for no longer. So a peer that froze costs the others two measured
budgets of a stage in which little is computed, rather than the deadline that the slowest trainer needs.

Both messages are one chunk with no values in it, of the round in question. The end mark of either says as
much as its chunk, and is repeated until it is answered: loss makes nobody look dead.
"""

from __future__ import annotations

from ragtag.core.types import MessageKey, PeerId, Run, Send
from ragtag.protocols.base import told

HAIL, HERE = 0x40, 0x41
"""Stages of a message key: the question, and the answer."""
ANSWER = 2.0
"""An answer may take so many round trips, each with its margin: what was lost once is repeated after one."""


def hail(peer: PeerId, key: MessageKey) -> Run:
    """Ask a peer. key: of any message of the round."""
    return told(peer, key._replace(stage=HAIL), b"")


def here(now_s: float, run: Run, rtt_s: float) -> Send:
    """The answer to a question."""
    return Send(told(run.peer, run.key._replace(stage=HERE), b""), now_s + ANSWER * rtt_s)
