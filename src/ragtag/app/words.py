"""What a trace says, in plain English: figures, faults, what peers note of each other, how models ended.

A trace says what a protocol calls it (``docs/trace.md``); people read this, in the live view and the report.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ragtag.core import trace
from ragtag.core.faults import Faults, Loss
from ragtag.core.faultspec import parse_faults


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun: ``1 peer``, ``2 peers``.

    many: the plural, where it is not ``one`` with an s.
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def these_peers(numbers: Iterable[int]) -> str:
    """Which peers: ``peer 2``, ``peers 0 and 2``, ``peers 0 to 3, 5 and 7``."""
    stretches: list[list[int]] = []
    for number in sorted(set(numbers)):
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    parts: list[str] = []
    for stretch in stretches:
        if len(stretch) > 2:
            parts.append(f"{stretch[0]} to {stretch[-1]}")
        else:
            parts += map(str, stretch)
    if len(parts) > 1:
        parts = [", ".join(parts[:-1]) + f" and {parts[-1]}"]
    several = sum(map(len, stretches)) > 1
    return f"peer{'s' if several else ''} {''.join(parts)}" if parts else "no peer"


# -- Figures


def to_three_figures(value: float) -> float:
    """So a unit is chosen for what is shown: 999.9 ms are 1 s."""
    return float(f"{value:.3g}")


def seconds(value: float) -> str:
    """A duration, to three figures, with its unit."""
    shown = to_three_figures(value)
    if value == 0:
        return "0 s"
    if shown < 1e-3:
        return f"{shown * 1e6:.3g} µs"
    if shown < 1:
        return f"{shown * 1e3:.3g} ms"
    return f"{shown:g} s" if value < 120 else clock(value)


def clock(value: float) -> str:
    """A time since the start: 12 s, 3:05, 2:00:00."""
    if value < 120:
        return f"{value:.4g} s"
    whole = round(value)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.3g} %"


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units."""
    size, units = to_three_figures(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


# -- Faults


def fault_text(fault: trace.Fault) -> str:
    """A fault in words; a detail that is the fault as it was asked for ("loss=0.1") says it all."""
    if not fault.detail:
        return fault.name
    if not fault.detail.startswith(f"{fault.name}="):
        return f"{fault.name}: {fault.detail}"
    try:
        faults = parse_faults(fault.detail)
    except ValueError:
        return fault.detail
    return _fault_in_words(fault.name, faults) or fault.detail


def _fault_in_words(name: str, faults: Faults) -> str:
    """The only fault in ``faults``; empty where it is as well said as it was asked for."""
    if name == "loss" and isinstance(faults.loss, Loss):
        return f"loss {percent(faults.loss.p)}"
    if name in ("delay", "jitter"):
        return f"{name} {seconds(faults.latency_s if name == 'delay' else faults.jitter_s)}"
    if name in ("duplicate", "reorder"):
        return f"{name} {percent(faults.duplicate if name == 'duplicate' else faults.reorder)}"
    if name == "slow" and len(faults.slow) == 1:
        return f"slowed {faults.slow[0].factor:g}\N{MULTIPLICATION SIGN}"
    return ""


# -- What a peer notes of another

WORDS = {
    "silent": "does not answer",
    "heard again": "answers again",
    "left": "is not waited for any more",
    "has left": "has left",
    "comes": "is on its way in",
    "takes part": "takes part",
    "assists": "averages for the crew as an auxiliary, and trains nothing",
    "no owner": "has nobody left to average for it but clients",
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
    "donor: newcomer": "was asked for its state by a newcomer",
    "donor: refused": "refused one that asked for its state",
    "donor: failed": "gives its state to no newcomer any more",
    "flooding": "sends too much",
    "refused": "is refused",
    "apart": "averages by other shares",
    "shares": "plans who averages which share",
    "equal shares": "goes by equal shares",
}
"""What is said of the peer that a note is about."""
UNTOLD = frozenset({"refuted"})
"""Notes of use only where the protocol is looked into: a doubted peer says that it is there."""


def in_words(what: str, detail: str = "", between: str = ": ") -> str:
    """What is said of a peer; a note that has no words of its own stands as it is."""
    if what == "skipped":
        return f"skipped {detail}"
    return WORDS.get(what, what) + (f"{between}{detail}" if detail else "")


# -- How models ended

SHOWN = 12
"""So many digits of a digest are shown."""
GROUPS_MAX = 4
"""So many different models are named."""


@dataclass(frozen=True, slots=True)
class Final:
    """What a peer ended with.

    digest: of its averaged state ("": not known).
    round: the newest one up to which it has kept up with the others (-1: none).
    """

    digest: str
    round: int


def models_in_words(finals: Mapping[int, Final]) -> str:
    """One line about the peers' final models; "" where fewer than two are known."""
    known = {peer: final for peer, final in finals.items() if _is_hex(final.digest)}
    if len(known) < 2:
        return ""
    groups: dict[str, list[int]] = {}
    for peer, final in sorted(known.items()):
        groups.setdefault(final.digest, []).append(peer)
    unknown = sorted(finals.keys() - known.keys())
    rest = f"; of {these_peers(unknown)} it is not known" if unknown else ""
    if len(groups) == 1:
        return f"{counted(len(known), 'peer')} hold the same model ({next(iter(groups))[:SHOWN]}){rest}"
    newest = max(final.round for final in finals.values())
    most = sorted(groups, key=lambda digest: (-len(groups[digest]), groups[digest]))
    parts = [_group(digest, groups[digest], known, newest) for digest in most[:GROUPS_MAX]]
    if more := sum(len(groups[digest]) for digest in most[GROUPS_MAX:]):
        parts.append(f"{counted(more, 'more peer')} {'holds another' if more == 1 else 'hold others'}")
    return f"replicas differ: {'; '.join(parts)}{rest}"


def _group(digest: str, peers: list[int], finals: Mapping[int, Final], newest: int) -> str:
    last = max(finals[peer].round for peer in peers)  # it is that one's model; others have taken it
    behind = ""
    if last < 0:
        behind = " (never averaged)"
    elif last < newest:
        behind = f" ({counted(newest - last, 'round')} behind)"
    return f"{these_peers(peers)} {'holds' if len(peers) == 1 else 'hold'} {digest[:SHOWN]}{behind}"


def _is_hex(text: str) -> bool:
    return bool(text) and set(text) <= set(string.hexdigits)
