"""Faults as one line of text: ``loss=0.1,freeze=3@10+4,kill=5@20``, and back.

The command line, the launcher's environment and the trace all write faults this way. Times are in
seconds since the crew met; ``@5+3`` lasts 3 s from second 5 on, ``@5..8`` the same, ``@5`` has no end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ragtag.core.errors import Error
from ragtag.core.faults import BurstLoss, Crash, Faults, Freeze, Loss, OneWay, Partition, Slow, Window
from ragtag.core.types import SEATS_MAX, PeerId

SYNTAX: Mapping[str, str] = {
    "loss": "loss=P",
    "burst": "burst=ENTER/LEAVE[/GOOD[/BAD]]",
    "delay": "delay=S",
    "jitter": "jitter=S",
    "rate": "rate=BYTES_PER_S",
    "queue": "queue=BYTES",
    "duplicate": "duplicate=P",
    "reorder": "reorder=P[/S]",
    "oneway": "oneway=FROM>TO[@FROM_S[+FOR_S]]",
    "partition": "partition=PEERS[@FROM_S[+FOR_S]]  (PEERS: one side, as 0-2/5; the others are the other)",
    "kill": "kill=PEER@AT_S",
    "freeze": "freeze=PEER@AT_S+FOR_S",
    "slow": "slow=PEERxFACTOR[@FROM_S[+FOR_S]]",
}
"""How each fault is written."""

_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_WINDOW = rf"(?:@(?P<start>{_NUMBER})(?:\+(?P<span>{_NUMBER})|\.\.(?P<until>{_NUMBER}))?)?"
_PEERS = r"\d+(?:-\d+)?(?:/\d+(?:-\d+)?)*"
_PATTERNS = {
    "oneway": re.compile(rf"(?P<source>\d+)>(?P<dest>\d+){_WINDOW}"),
    "partition": re.compile(rf"(?P<peers>{_PEERS}){_WINDOW}"),
    "kill": re.compile(rf"(?P<peer>\d+)@(?P<start>{_NUMBER})"),
    "freeze": re.compile(rf"(?P<peer>\d+)@(?P<start>{_NUMBER})\+(?P<span>{_NUMBER})"),
    "slow": re.compile(rf"(?P<peer>\d+)x(?P<factor>{_NUMBER}){_WINDOW}"),
}
_ONE_NUMBER = re.compile(_NUMBER)
_FIELDS = {
    "delay": "latency_s",
    "jitter": "jitter_s",
    "rate": "rate_bytes_per_s",
    "queue": "queue_bytes",
    "duplicate": "duplicate",
}
_ENDLESS = ("rate_bytes_per_s", "queue_bytes")
_LISTS = {
    "oneway": "one_way",
    "partition": "partitions",
    "kill": "crashes",
    "freeze": "freezes",
    "slow": "slow",
}


class FaultSyntaxError(Error, ValueError):
    """A part of a faults text that cannot be read; the message names the part and shows the syntax."""


def parse_faults(text: str) -> Faults:
    """Read faults from text; the empty text is a perfect network.

    Raises:
        FaultSyntaxError: naming the part that is wrong and how it should be written.
    """
    fields: dict[str, Any] = {}
    for part in text.split(","):
        part = part.strip()
        if not part:
            if text.strip():
                raise FaultSyntaxError(f"faults: an empty part in {text!r}; parts are separated by one comma")
            continue
        name, _, value = part.partition("=")
        if name not in SYNTAX:
            known = ", ".join(SYNTAX)
            raise FaultSyntaxError(f"faults: no fault is called {name!r} (in {part!r}); there are {known}")
        try:
            _READERS.get(name, _read_number)(fields, name, value)
        except FaultSyntaxError:
            raise
        except ValueError as error:
            reason = str(error).removeprefix("faults: ")
            raise FaultSyntaxError(f"faults: {part!r}: {reason}; write {SYNTAX[name]}") from None
    return Faults(**fields)


def format_faults(faults: Faults) -> str:
    """Write faults as text that ``parse_faults`` reads back as the same value."""
    return ",".join(named_parts(faults))


def named_parts(faults: Faults) -> list[str]:
    """The parts of ``format_faults``, each one fault."""
    parts: list[str] = []
    if isinstance(faults.loss, Loss):
        parts.append(f"loss={_text(faults.loss.p)}")
    elif faults.loss is not None:
        loss = faults.loss
        parts.append("burst=" + "/".join(map(_text, (loss.enter, loss.leave, loss.good, loss.bad))))
    default = Faults()
    for name, field in _FIELDS.items():
        if getattr(faults, field) != getattr(default, field):
            parts.append(f"{name}={_text(getattr(faults, field))}")
    if faults.reorder or faults.reorder_s:
        parts.append(f"reorder={_text(faults.reorder)}/{_text(faults.reorder_s)}")
    parts += [f"oneway={w.source}>{w.dest}{_window_text(w.window)}" for w in faults.one_way]
    parts += [f"partition={_peers_text(p.side)}{_window_text(p.window)}" for p in faults.partitions]
    parts += [f"kill={c.peer}@{_text(c.at_s)}" for c in faults.crashes]
    parts += [f"freeze={f.peer}@{_text(f.at_s)}+{_text(f.for_s)}" for f in faults.freezes]
    parts += [f"slow={s.peer}x{_text(s.factor)}{_window_text(s.window)}" for s in faults.slow]
    return parts


def check_peers(faults: Faults, n: int) -> None:
    """Refuse faults that name peers which a crew of ``n`` does not have.

    Raises:
        ValueError: naming the fault and the peer.
    """
    named: list[tuple[str, Iterable[PeerId]]] = [
        *((f"oneway={w.source}>{w.dest}", (w.source, w.dest)) for w in faults.one_way),
        *((f"partition={_peers_text(p.side)}", p.side) for p in faults.partitions),
        *((f"kill={c.peer}", (c.peer,)) for c in faults.crashes),
        *((f"freeze={f.peer}", (f.peer,)) for f in faults.freezes),
        *((f"slow={s.peer}", (s.peer,)) for s in faults.slow),
    ]
    for what, peers in named:
        for peer in sorted(peers):
            if peer >= n:
                raise ValueError(
                    f"faults: {what!r} names peer {peer}, but the {n} peers are numbered 0 to {n - 1}"
                )


def check_sides(faults: Faults, n: int) -> None:
    """Refuse partitions that part nobody: all of a crew of ``n`` are on one side, ``0-1/2-4`` of 5.

    A crew that is joined has others.

    Raises:
        ValueError: naming the fault.
    """
    for partition in faults.partitions:
        if partition.side >= frozenset(range(n)):
            raise ValueError(
                f"faults: 'partition={_peers_text(partition.side)}' has all {n} peers on one side, and parts "
                f"nobody; name the peers of one side, as partition=0"
            )


# -- Reading


def _read_number(fields: dict[str, Any], name: str, value: str) -> None:
    field = _FIELDS[name]
    _once(fields, name, field)
    fields[field] = math.inf if value == "inf" and field in _ENDLESS else _number(value)
    Faults(**{field: fields[field]})  # its range is checked where the field lives


def _read_loss(fields: dict[str, Any], name: str, value: str) -> None:
    if "loss" in fields:
        raise ValueError("'loss' and 'burst' together are given more than once")
    numbers = [_number(item) for item in value.split("/")]
    if name == "loss":
        if len(numbers) != 1:
            raise ValueError(f"{value!r} is not one number")
        fields["loss"] = Loss(numbers[0])
    else:
        if not 2 <= len(numbers) <= 4:
            raise ValueError(f"{value!r} is not 2 to 4 numbers")
        fields["loss"] = BurstLoss(*numbers)


def _read_reorder(fields: dict[str, Any], name: str, value: str) -> None:
    _once(fields, name, "reorder")
    numbers = [_number(item) for item in value.split("/")]
    if not 1 <= len(numbers) <= 2:
        raise ValueError(f"{value!r} is not 1 or 2 numbers")
    fields |= dict(zip(("reorder", "reorder_s"), numbers, strict=False))
    Faults(reorder=numbers[0])


def _read_listed(fields: dict[str, Any], name: str, value: str) -> None:
    found = _PATTERNS[name].fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} cannot be read")
    got = found.groupdict()
    fault: OneWay | Partition | Crash | Freeze | Slow
    if name == "oneway":
        fault = OneWay(_peer(got["source"]), _peer(got["dest"]), _window(got))
        if fault.source == fault.dest:
            raise ValueError("a peer always hears itself")
    elif name == "partition":
        fault = Partition(_peers(got["peers"]), _window(got))
    elif name == "kill":
        fault = Crash(_peer(got["peer"]), _number(got["start"]))
    elif name == "freeze":
        fault = Freeze(_peer(got["peer"]), _number(got["start"]), _number(got["span"]))
    else:
        fault = Slow(_peer(got["peer"]), _number(got["factor"]), _window(got))
        if not fault.factor >= 1:
            raise ValueError(f"{fault.factor} times slower is no slowdown; the factor is 1 or more")
    fields[_LISTS[name]] = (*fields.get(_LISTS[name], ()), fault)


_READERS: Mapping[str, Callable[[dict[str, Any], str, str], None]] = {
    "loss": _read_loss,
    "burst": _read_loss,
    "reorder": _read_reorder,
    **dict.fromkeys(_LISTS, _read_listed),
}


def _once(fields: dict[str, Any], name: str, field: str) -> None:
    if field in fields:
        raise ValueError(f"{name!r} is given more than once")


def _number(text: str) -> float:
    if _ONE_NUMBER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a number of 0 or more")
    if math.isinf(number := float(text)):
        raise ValueError(f"{text!r} is too large")
    return number


def _peer(text: str) -> PeerId:
    if len(text) > 4 or int(text) >= SEATS_MAX:
        raise ValueError(f"peer {text[:8]}: a crew has at most {SEATS_MAX} peers, numbered from 0")
    return int(text)


def _peers(text: str) -> frozenset[PeerId]:
    side: set[PeerId] = set()
    for item in text.split("/"):
        first, _, last = item.partition("-")
        a, b = _peer(first), _peer(last or first)
        if b < a:
            raise ValueError(f"the range {item!r} runs backwards")
        side.update(range(a, b + 1))
    return frozenset(side)


def _window(got: Mapping[str, str | None]) -> Window:
    from_s = _number(got["start"] or "0")
    if got["span"] is not None:
        until_s = from_s + _number(got["span"])
    else:
        until_s = math.inf if got["until"] is None else _number(got["until"])
    if not until_s > from_s:
        raise ValueError(f"the time from {_text(from_s)} to {_text(until_s)} s is empty")
    return Window(from_s, until_s)


# -- Writing


def _text(value: float) -> str:
    """The shortest text that reads back as this float; no plus sign, which separates times."""
    return repr(float(value)).removesuffix(".0").replace("e+", "e")


def _window_text(window: Window) -> str:
    if window == Window():
        return ""
    start = f"@{_text(window.from_s)}"
    if math.isinf(window.until_s):
        return start
    span = window.until_s - window.from_s
    if window.from_s + span == window.until_s:
        return f"{start}+{_text(span)}"
    return f"{start}..{_text(window.until_s)}"  # the difference was rounded


def _peers_text(side: frozenset[PeerId]) -> str:
    items: list[str] = []
    peers = sorted(side)
    at = 0
    while at < len(peers):
        end = at
        while end + 1 < len(peers) and peers[end + 1] == peers[end] + 1:
            end += 1
        items.append(str(peers[at]) if end == at else f"{peers[at]}-{peers[end]}")
        at = end + 1
    return "/".join(items)
