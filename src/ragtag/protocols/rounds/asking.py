"""Asking a peer whether it is there at all: its node answers at once, though its trainer may still compute.

A round that lacks only a few peers' messages asks those. Who answers gets its whole deadline; who does not is
frozen, dead or cut off, and is waited for no longer. So a peer that froze costs the others two measured
budgets of a stage in which little is computed, rather than the deadline that the slowest trainer needs.

Who has ended that round, or deals the blocks otherwise, says that what is asked for comes no more. Unless it
does while an answer may take (it may be under way), it is waited for no longer either. Else two could wait
for each other, in different rounds or for blocks that each takes for the other's, until the deadline.

All messages are one chunk with no values in it. The end mark of each says as much as its chunk, and is
repeated until it is answered: loss makes nobody look dead.
"""

from __future__ import annotations

from ragtag.core.types import MessageKey, PeerId, Run, Send
from ragtag.protocols.rounds.base import GATHER, SCATTER, told

QUESTION, HERE, NEVER = 0x40, 0x44, 0x45
"""Stages of a message key: the question (plus the stage of the message that is asked for) and the answers:
this peer is there, or that message comes no more."""
QUESTIONS = QUESTION | SCATTER, QUESTION | GATHER
ANSWERS = HERE, NEVER
ANSWER = 2.0
"""An answer may take so many round trips, each with its margin: what was lost once is repeated after one."""


def question(peer: PeerId, key: MessageKey) -> Run:
    """Ask a peer for a message that has not come. key: that message's."""
    return told(peer, key._replace(stage=QUESTION | key.stage), b"")


def here(now_s: float, run: Run, rtt_s: float, never: bool = False) -> Send:
    """The answer to a question. never: what it asks for was sent before, if at all, or goes elsewhere."""
    key = run.key._replace(stage=NEVER if never else HERE)
    return Send(told(run.peer, key, b""), now_s + ANSWER * rtt_s)
