"""What peers note of each other, in the words of somebody who watches a run.

A trace says what a protocol calls it (``docs/trace.md``); people read this, in the live view and the report.
"""

from __future__ import annotations

WORDS = {
    "silent": "does not answer",
    "heard again": "answers again",
    "left": "is not waited for any more",
    "has left": "has left",
    "comes": "is on its way in",
    "takes part": "takes part",
    "declared dead": "is taken for dead: nobody hears of it any more",
    "back": "is back",
    "healed": "is back",
    "never came": "never came",
    "lost": "is lost",
    "seat taken": "has a successor: another process has its number now",
    "lost its seat": "was out of reach for so long that its number was given away",
    "joins anew": "joins its crew anew",
    "no member any more": "is no member of its crew any more",
    "in step": "is in step with its crew",
    "not in step": "is not in step with its crew",
    "state": "has taken over its crew's state",
    "no state": "found no state of its crew to take over",
    "flooding": "sends too much",
    "refused": "is refused",
}
"""What is said of the peer that a note is about."""
UNTOLD = frozenset({"refuted"})
"""Of use to whoever looks into the protocol only: a peer that is doubted says that it is there."""


def in_words(what: str, detail: str = "", between: str = ": ") -> str:
    """What is said of a peer; a note that has no words of its own stands as it is."""
    if what == "skipped":
        return f"skipped {detail}"
    return WORDS.get(what, what) + (f"{between}{detail}" if detail else "")
