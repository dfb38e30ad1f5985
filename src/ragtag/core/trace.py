"""The trace: what happened in a run, one JSON record per line, the same from live and simulated runs.

Each peer writes ``peer-NN.jsonl`` in the run's folder, the launcher or the simulated world ``crew.jsonl``
(``ragtag.app.tracefile`` does the writing and reading). ``docs/trace.md`` describes every field for those
that read traces with other tools.

Import the module, not the names (``from ragtag.core import trace; trace.Round(...)``): a *round* is also a
machine, and a *run* also what moves between machines.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

VERSION = 2
"""Grows when a reader of the previous version would misread a trace; added fields and kinds do not count."""
LINE_BYTES_MAX = 1 << 20
"""A longer line is damage. ``encode`` shortens texts so that none comes about."""
TEXT_CHARS_MAX = 16_384
_SECRET = re.compile(rb"ragtag\d+-[a-z2-7]{16,}", re.IGNORECASE)
"""An invitation (``ragtag.app.invitation.token``). It holds a key, and traces and reports are passed on."""

CREW = -1
"""The ``peer`` of a record that is about the whole crew."""

PeerNumber = Annotated[int, Meta(ge=-1, lt=1 << 20)]
LastRound = Annotated[int, Meta(ge=-1, lt=1 << 62)]
Peers = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 20)]], Meta(max_length=1 << 16)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Channel = Annotated[int, Meta(ge=0, lt=1 << 62)] | Annotated[str, Meta(max_length=256)]
"""A channel's name; of a simulated one, its number."""
Some = Annotated[int, Meta(ge=1, lt=1 << 62)]
Counts = Annotated[list[Count], Meta(max_length=1 << 16)]
Time = Annotated[float, Meta(ge=-1e9, le=1e9)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=1.000001)]
Mean = Annotated[float, Meta(ge=0.0, le=1e9)]
Amount = Annotated[float, Meta(ge=0.0, le=1e30)]


def _how_often(peers: list[int], times: list[int]) -> Counter[int]:
    """Each peer once, unless it is said how often."""
    if len(times) != len(peers):
        return Counter(set(peers))
    counted: Counter[int] = Counter()
    for peer, n in zip(peers, times, strict=True):
        counted[peer] += n
    return counted


class Base(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What every record has.

    t: seconds since the run began (virtual seconds in a simulated run).
    peer: the one that the record is about; -1: the crew.
    """

    t: Time
    peer: PeerNumber = CREW


class Run(Base, frozen=True, kw_only=True, tag="run"):
    """A run begins: the first record of ``crew.jsonl``.

    version: of the trace.
    world: "live" or "simulated".
    peers: how many, numbered from 0. Those that join a crew have other numbers, and are not counted here.
    method: how models are averaged.
    config: all settings, as text.
    steps_planned: steps per peer, where known.
    planned_s: how long it is to take, where known (both for progress bars).
    command: what to type to run it again.
    """

    world: str
    name: str
    seed: int
    peers: Count
    method: str
    config: dict[str, str] = {}
    started_unix_s: float = 0.0
    steps_planned: Count | None = None
    planned_s: Seconds | None = None
    command: str = ""
    version: int = VERSION


class Join(Base, frozen=True, kw_only=True, tag="join"):
    """A peer is ready.

    rtt_s: mean round trip to the others.
    others: how many were met.
    sealed: whether what it sends to them is encrypted.
    client: whether it owns nothing of what is averaged.
    """

    address: str = ""
    rtt_s: Seconds | None = None
    others: Count = 0
    sealed: bool = False
    client: bool = False


class Phase(Base, frozen=True, kw_only=True, tag="phase"):
    """A part of a peer's way into its crew is over; ``t`` is its end.

    name: "let in" (by a member), "seat", "greeting", "schema" (meetings), "state" (fetched), "heard" (of a
    newer round), "average" (from then on to the first one with others).
    """

    name: str
    took_s: Seconds


class Round(Base, frozen=True, kw_only=True, tag="round", omit_defaults=True):
    """A round of averaging is over on ``peer``; ``t`` is its end.

    arrived: share of what the others sent that was averaged (see ``core.arrival``); 0: this peer was alone.
    contributors: mean number of peers in a chunk.
    waited_for, missed: other peers; a missed one was waited for and did not deliver all in time.
    expired: a deadline ended the round, not arrivals.
    bytes_sent, bytes_received: of this peer, since the start.

    In a long run a record stands for several rounds in a row (``of``), ``round`` and ``t`` being the last
    one's: times and shares are means, ``longest_s`` and ``lowest_arrived`` the extremes, and the ``_times``
    say how often (for each of the peers listed).
    """

    round: Count
    scatter_s: Seconds
    gather_s: Seconds
    total_s: Seconds
    arrived: Share
    channel: Channel = 0
    contributors: Mean = 0.0
    waited_for: Peers = []
    missed: Peers = []
    expired: bool = False
    bytes_sent: Count = 0
    bytes_received: Count = 0
    of: Some = 1
    longest_s: Seconds | None = None
    lowest_arrived: Share | None = None
    waited_for_times: Counts = []
    missed_times: Counts = []
    expired_times: Count | None = None

    @property
    def how_often_waited_for(self) -> Counter[int]:
        """In how many of the rounds that this stands for each other peer was waited for."""
        return _how_often(self.waited_for, self.waited_for_times)

    @property
    def how_often_missed(self) -> Counter[int]:
        """In how many of them each other peer was missed."""
        return _how_often(self.missed, self.missed_times)

    @property
    def how_often_expired(self) -> int:
        """How many of them a deadline ended."""
        return int(self.expired) if self.expired_times is None else self.expired_times

    @property
    def longest(self) -> float:
        """The longest of the rounds that this record stands for, in seconds."""
        return self.total_s if self.longest_s is None else self.longest_s

    @property
    def lowest(self) -> float:
        """The lowest share that was averaged in any of these rounds."""
        return self.arrived if self.lowest_arrived is None else self.lowest_arrived


class Sparse(Base, frozen=True, kw_only=True, tag="sparse", omit_defaults=True):
    """What a round that sent selections came to on ``peer``.

    entries, density: what was selected.
    bytes, dense_bytes: of the peer's message, and of all its values.
    captured: the share of the energy (squared norm) that was selected.
    residual_norm: of what is kept.
    committed, restored: fragments that are in the round's sum, that went back into the residual.
    late: rows of earlier rounds.
    given_up: blocks of which some rows never came.
    dense: the selection was by-passed, and all values were sent.

    As ``of`` several rounds in a row: counts and bytes are sums, shares means; ``residual_norm`` is the last.
    """

    round: Count
    entries: Count
    density: Share
    bytes: Count
    dense_bytes: Count
    captured: Share
    residual_norm: Mean
    channel: Channel = 0
    committed: Count = 0
    restored: Count = 0
    late: Count = 0
    given_up: Count = 0
    dense: bool = False
    of: Some = 1
    dense_times: Count | None = None

    @property
    def how_often_dense(self) -> int:
        """In how many of the rounds that this stands for all values were sent."""
        return int(self.dense) if self.dense_times is None else self.dense_times


class Align(Base, frozen=True, kw_only=True, tag="align"):
    """What ``peer`` saw when replicas that average gradients were compared after a round.

    units: how many parts of the model were looked at.
    apart: how many of these differed between peers.
    own: how many of these this peer had in another version than most.
    peers: how many peers told theirs.
    given, taken: units given to and taken from others.
    distance: norm of what its parameters were changed by, over that of those parts (0: nothing was changed).
    """

    round: Count
    units: Count
    apart: Count
    own: Count
    peers: Count
    given: Count = 0
    taken: Count = 0
    distance: Mean = 0.0
    channel: Channel = 0
    expired: bool = False


class Kfac(Base, frozen=True, kw_only=True, tag="kfac"):
    """What ``peer`` preconditions gradients by, after a round of K-FAC's factors.

    layers: how many are preconditioned.
    plain: how many of these took the last step with a gradient as it was.
    dropped: how often passes of a layer were not finite, so far.
    bases: of how many factors there is a decomposition here.
    age_rounds: of the oldest of these.
    """

    round: Count
    step: Count
    layers: Count
    plain: Count = 0
    dropped: Count = 0
    bases: Count = 0
    age_rounds: Count = 0
    channel: Channel = 0


class Target(Base, frozen=True, kw_only=True, tag="target"):
    """What has become of the samples of ``peer``, whose crew steps by a target batch; counts since the start.

    round: the last one.
    target: samples of a step.
    step_samples: of all peers, in the last step.
    steps: of the crew, that it took part in.
    computed: samples that had a gradient: those counted, dropped and pending.
    counted: in means of steps. stale: of these, how many in a later step than they were computed for.
    dropped: by reason.
    overshoot: the mean over steps of what they had beyond the target, as a share of it.
    goodput: counted, over what it would have computed in the same time without waits, averages and losses.
    """

    round: LastRound
    target: Amount
    steps: Count
    computed: Amount
    counted: Amount
    pending: Amount = 0.0
    stale: Amount = 0.0
    dropped: Annotated[dict[str, Amount], Meta(max_length=32)] = {}
    step_samples: Amount = 0.0
    overshoot: float = 0.0
    goodput: Annotated[float, Meta(ge=0.0)] = 0.0
    channel: Channel = 0


class Privacy(Base, frozen=True, kw_only=True, tag="privacy"):
    """What ``peer`` has spent of the privacy of its own samples, over all runs that its ledger knows of.

    holder: whose samples these are.
    steps: that drew from them, whatever became of these.
    epsilon, delta: what they come to.
    noise_multiplier, rate: of the steps now: the noise over the clipped norm, each sample's chance.
    """

    holder: str
    steps: Count
    epsilon: Amount
    delta: Share
    noise_multiplier: Amount
    rate: Share


class Guarded(Base, frozen=True, kw_only=True, tag="guard", omit_defaults=True):
    """What a guard made of the shares that came to ``peer`` as an owner, since its last such record.

    round: the last one that is in it.
    rounds: how many are.
    peers: whose shares were judged; the other lists are in their order.
    values: how many values of each.
    cut: the part of these that was left out, or clipped away.
    far: root mean square distance from the result, over the middle peer's; the mean of rounds.
    capped: in how many chunks a weight was more than is believed.
    short: how many chunks have no average, since too few shares of them came.
    """

    round: Count
    rounds: Count
    peers: Peers
    values: Counts
    cut: Annotated[list[Share], Meta(max_length=1 << 16)]
    far: Annotated[list[Mean], Meta(max_length=1 << 16)]
    capped: Counts = []
    short: Count = 0
    channel: Channel = 0


class Leaderboard(Base, frozen=True, kw_only=True, tag="persons"):
    """The samples of each person, in a crew that takes persons, so far.

    Each figure is what that person's own peers tell of themselves. ``peer`` has heard it and added it up, and
    cannot check it.

    persons: names; the other lists are in their order.
    samples: since each of the person's processes began.
    processes: how many have told.
    """

    persons: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=1 << 12)]
    samples: Counts
    processes: Counts


class Step(Base, frozen=True, kw_only=True, tag="step", omit_defaults=True):
    """A local step. samples: since the start.

    loss: of the batch of this step, or of one shortly before; null: it was not finite; absent: not told.
    As ``of`` several such records: ``loss`` is the mean of the ``finite`` ones; ``not_finite``: how many were
    not.
    """

    step: Count
    samples: Count
    loss: float | msgspec.UnsetType | None = msgspec.UNSET
    of: Some = 1
    finite: Count | None = None
    not_finite: Count | None = None

    @property
    def how_often_good(self) -> int:
        """Of how many finite losses ``loss`` is the mean."""
        good = isinstance(self.loss, float) and math.isfinite(self.loss)
        return int(good) if self.finite is None else self.finite

    @property
    def how_often_bad(self) -> int:
        """How many of the losses that this stands for were not finite."""
        bad = self.loss is None or (isinstance(self.loss, float) and not math.isfinite(self.loss))
        return int(bad) if self.not_finite is None else self.not_finite


class Pace(Base, frozen=True, kw_only=True, tag="pace", omit_defaults=True):
    """Where a peer's time went since its last such record; ``t`` is the end of an average.

    compute_s: from the end of one step of the optimizer to the end of the next local step.
    average_s: in averages.
    wait_s: put off by its schedule.
    lost_s: of computing, by the share of its values that averages overwrote without having them.
    steps, averages: how many.
    waited_for, waited_s: peers that it waited for, in averages and for its schedule, and how long.
    stale: of the averages, to how many it came after 0, 1, 2 to 3, 4 to 7, ... rounds without it; at a
        central state, of its updates of blocks, how many were so many versions old.
    coherence, coherence_steps: of its gradients with earlier ones, where that is measured; at which steps.
    """

    steps: Count
    averages: Count
    compute_s: Seconds
    average_s: Seconds
    wait_s: Seconds = 0.0
    lost_s: Seconds = 0.0
    waited_for: Peers = []
    waited_s: Annotated[list[Seconds], Meta(max_length=1 << 16)] = []
    stale: Annotated[list[Count], Meta(max_length=64)] = []
    coherence: Annotated[list[float], Meta(max_length=1 << 10)] = []
    coherence_steps: Annotated[list[Count], Meta(max_length=1 << 10)] = []


class Epoch(Base, frozen=True, kw_only=True, tag="epoch"):
    """All peers are done with an epoch of a split data set; counts of samples, as far as ``peer`` knows.

    samples: that it has.
    missed: that nobody is known to have used.
    twice: that several peers used.
    """

    epoch: Count
    samples: Count
    missed: Count
    twice: Count


class Eval(Base, frozen=True, kw_only=True, tag="eval"):
    """A model was evaluated.

    model: "own" (the peer's) or "mean" (of all peers' models).
    loss, accuracy: null: not finite, or not measured.
    n: examples.
    """

    model: str
    step: Count
    loss: float | None = None
    accuracy: Share | None = None
    n: Count = 0


class Fault(Base, frozen=True, kw_only=True, tag="fault"):
    """A fault was injected or seen. until_t: null: for good, or to the end of the run."""

    name: str
    detail: str = ""
    until_t: float | None = None


class Note(Base, frozen=True, kw_only=True, tag="note"):
    """Something worth a line: ``peer`` saw ``what`` of ``other``."""

    what: str
    other: PeerNumber = CREW
    detail: str = ""


class Error(Base, frozen=True, kw_only=True, tag="error"):
    """Something went wrong on a peer.

    what: one line.
    detail: the rest (a traceback).
    """

    what: str
    detail: str = ""


class Result(Base, frozen=True, kw_only=True, tag="result"):
    """A figure that the run came to, to stand beside what was expected.

    value: null: not finite.
    expected: null: nothing was expected.
    passed: null: nothing was judged.
    """

    name: str
    value: float | None
    unit: str = ""
    expected: float | None = None
    tolerance: Annotated[float, Meta(ge=0.0)] | None = None
    passed: bool | None = None
    detail: str = ""


class Link(Base, frozen=True, kw_only=True, tag="link"):
    """What a peer knows of the way to another one when it ends; counts since the start.

    sent, lost: datagrams that left, and that did not come.
    late: messages whose deadline passed before they left.
    rate_bytes_per_s: what the path delivers, as rate control has measured it; 0: not known.
    rtt_s, min_rtt_s: round trips, smoothed with what busy ends keep, and the path's shortest; 0: none known.
    datagram_bytes: how large datagrams were at the end, without headers of UDP and IP; 0: not known. What
        ``sent`` and ``lost`` count are packets of 1,152 bytes, of which a large datagram holds several.
    through: the peer that relayed what was sent, at the end; -1: none, it went there directly.
    protocol: by which it left, at the end: udp; tcp, where UDP does not get through.
    held_s: what kept messages from leaving, and for how long in all: keys, socket, receiver, window, rate,
        driver.
    """

    other: Annotated[int, Meta(ge=0, lt=1 << 20)]
    sent: Count
    lost: Count = 0
    late: Count = 0
    rate_bytes_per_s: Annotated[float, Meta(ge=0.0, le=1e15)] = 0.0
    rtt_s: Seconds = 0.0
    min_rtt_s: Seconds = 0.0
    datagram_bytes: Annotated[int, Meta(ge=0, le=65_535)] = 0
    through: Annotated[int, Meta(ge=-1, lt=1 << 20)] = -1
    protocol: Literal["udp", "tcp"] = "udp"
    held_s: Annotated[dict[str, Seconds], Meta(max_length=32)] = {}


class Leave(Base, frozen=True, kw_only=True, tag="leave"):
    """A peer ends; all counts since the start. failed: not as planned, an error has ended it.

    digest: of the state that averages left it with, as hexadecimal digits; peers with equal digests hold the
        same model. Empty: it has not come to the end of its training, or averaged nothing.
    round: the newest one up to which it has kept up with the others; -1: none.
    rounds_alone: in so many of its rounds it heard of nobody else, though its crew had others.
    refused: datagrams that came and were not accepted, by reason.
    relayed: packets of other peers that it passed on.

    Of peer -1 (with no counts): the launcher or the world has seen the run to its end.
    """

    steps: Count = 0
    samples: Count = 0
    bytes_sent: Count = 0
    bytes_received: Count = 0
    datagrams_lost: Count = 0
    failed: bool = False
    digest: str = ""
    round: LastRound = -1
    rounds_alone: Count = 0
    refused: Annotated[dict[str, Count], Meta(max_length=32)] = {}
    relayed: Count = 0


class Unknown(Base, frozen=True, kw_only=True, tag="unknown"):
    """A record of a kind that this version does not know; only ``decode`` makes it."""

    of_kind: str


Known = (
    Run
    | Join
    | Phase
    | Round
    | Sparse
    | Align
    | Kfac
    | Target
    | Privacy
    | Guarded
    | Leaderboard
    | Step
    | Pace
    | Epoch
    | Eval
    | Fault
    | Note
    | Error
    | Result
    | Link
    | Leave
)
Record = Known | Unknown

_TYPES: dict[str, type[Base]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Known)}
_FIELDS = {kind: frozenset(of.__struct_fields__) for kind, of in _TYPES.items()}
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Known)
# Floats that may not be null: JSON has no NaN, so one of these written as null would not be read again.
_FLOATS = (float, Time, Seconds, Share, Mean)
_MUST_BE_FINITE = {
    of: tuple(f.name for f in msgspec.structs.fields(of) if f.type in _FLOATS) for of in _TYPES.values()
}


def kind_of(record: Record) -> str:
    """The record's ``kind``, as it stands in the file."""
    return record.of_kind if isinstance(record, Unknown) else str(record.__struct_config__.tag)


def encode(record: Record) -> bytes:
    """One line of JSON, newline and all; at most ``LINE_BYTES_MAX`` bytes.

    A loss or accuracy that is not finite becomes null. Texts are shortened to ``TEXT_CHARS_MAX`` characters
    if the line would be too long. ``TOKEN`` stands for an invitation, as in the traceback of a script that
    was given one.

    Raises:
        ValueError: a time or share is not finite, or the record is of a kind of another version.
    """
    names = _MUST_BE_FINITE.get(type(record))
    if names is None:
        raise ValueError(f"trace: a record of kind {kind_of(record)!r} cannot be written by this version")
    for name in names:
        if not math.isfinite(getattr(record, name)):
            value = getattr(record, name)
            raise ValueError(f"trace: {name} of a {kind_of(record)!r} record is {value}; it must be finite")
    try:
        line = _encoder.encode(record)
    except UnicodeEncodeError:  # half a surrogate pair, as in an undecodable file name
        line = _encoder.encode(_cleaned(record))
    if len(line) >= LINE_BYTES_MAX:
        line = _encoder.encode(_cleaned(record))
    if len(line) >= LINE_BYTES_MAX:
        raise ValueError(f"trace: a {kind_of(record)!r} record of {len(line)} bytes; shorten its config")
    return _SECRET.sub(b"TOKEN", line) + b"\n"


def _clean(text: str) -> str:
    if len(text) > TEXT_CHARS_MAX:
        text = text[:TEXT_CHARS_MAX] + f" ... ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cleaned(record: Record) -> Record:
    changes: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, str):
            changes[name] = _clean(value)
        elif isinstance(value, dict):
            changes[name] = {_clean(key): _clean(text) for key, text in value.items()}
    return msgspec.structs.replace(record, **changes)


class Decoder:
    """Decodes lines, and counts what a newer version has added.

    unknown_kinds, extra_fields: how often each occurred ("kind", "kind.field"), at most ``names_max``
    different names; the rest is counted under "(others)".
    """

    def __init__(self, names_max: int = 100) -> None:
        self.unknown_kinds: Counter[str] = Counter()
        self.extra_fields: Counter[str] = Counter()
        self._names_max = names_max

    def decode(self, line: bytes | str, number: int | None = None) -> Record:
        """One line to a record.

        Raises:
            ValueError: the line is damaged; the message names its ``number`` and what is wrong.
        """
        try:
            return _decoder.decode(line)
        except msgspec.ValidationError:
            return self._tolerant(line, number)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
            raise _damaged(number, reason) from None

    def _tolerant(self, line: bytes | str, number: int | None) -> Record:
        try:
            raw = msgspec.json.decode(line)
            if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
                raise ValueError("no object with a kind")
            kind: str = raw["kind"]
            if kind not in _TYPES:
                self._count(self.unknown_kinds, kind)
                common = {name: raw[name] for name in ("t", "peer") if name in raw}
                return msgspec.convert({**common, "of_kind": kind, "kind": "unknown"}, Unknown)
            extra = raw.keys() - _FIELDS[kind] - {"kind"}
            record: Known = msgspec.convert({k: v for k, v in raw.items() if k not in extra}, Known)
        except (msgspec.DecodeError, ValueError, RecursionError) as reason:
            raise _damaged(number, reason) from None
        for name in extra:
            self._count(self.extra_fields, f"{kind}.{name}")
        return record

    def _count(self, counter: Counter[str], name: str) -> None:
        name = name[:100]
        known = name in counter or len(counter) < self._names_max
        counter[name if known else "(others)"] += 1


def decode(line: bytes | str, number: int | None = None) -> Record:
    """One line to a record; see ``Decoder``, which also counts what it does not know.

    Raises:
        ValueError: the line is damaged; the message names its ``number`` and what is wrong.
    """
    return Decoder().decode(line, number)


def _damaged(number: int | None, reason: Exception) -> ValueError:
    where = "trace" if number is None else f"trace line {number}"
    return ValueError(f"{where}: not a record: {reason}")
