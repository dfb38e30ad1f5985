"""Asking a peer whether it is there: its node answers at once, though its trainer may still compute.

A round that lacks only a few peers' messages asks those peers. A peer that answers has its whole deadline.
One that does not is frozen, dead or cut off, and is waited for no longer. So a frozen peer costs the others
as long as GATHER usually takes and may take, in which little is computed, rather than the deadline that the
slowest trainer needs. One that answers, and still sends nothing, is asked again.

A peer that has ended that round, or assigns the blocks otherwise, answers that the message comes no more.
The message may be on its way, so it has as long as an answer may take; then it is waited for no longer. Else
two peers could wait for each other until the deadline: in different rounds, or for blocks that each takes for
the other's.

All messages are one chunk with no values in it. The end mark of each says as much as its chunk, and is
repeated until it is answered. So loss makes no peer look dead.
"""

from __future__ import annotations

from ragtag.core.types import MessageKey, PeerId, Run, Send
from ragtag.protocols.rounds.base import GATHER, SCATTER, blob_message

QUESTION, HERE, NEVER = 0x40, 0x44, 0x45
"""Stages of a message key. The question adds the stage of the message that is asked for. The answers: this
peer is there; that message comes no more."""
QUESTIONS = QUESTION | SCATTER, QUESTION | GATHER
ANSWERS = HERE, NEVER
ANSWER = 2.0
"""An answer may take so many round trips, each with its margin: what was lost is repeated after one."""


def question(peer: PeerId, key: MessageKey) -> Run:
    """Ask a peer for a message that has not come. key: the message's."""
    return blob_message(peer, key._replace(stage=QUESTION | key.stage), b"")


def here(now_s: float, run: Run, rtt_s: float, never: bool = False) -> Send:
    """The answer to a question. never: the message was sent before, if at all, or goes to another peer."""
    key = run.key._replace(stage=NEVER if never else HERE)
    return Send(blob_message(run.peer, key, b""), now_s + ANSWER * rtt_s)
