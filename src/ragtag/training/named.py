"""Named tensors: what a part of training averages, or computes at one owner and has all others take.

tensors = crew.tensors("kfac", averaged={"fc1.A": (33, 33)}, computed={"fc1.QA": (33, 33)})
factors = tensors.average({"fc1.A": a_t_a}, weight=n_samples).result()
tensors.publish({name: basis(factors["fc1.A"]) for name in tensors.mine(costs)})
newest = tensors.newest("fc1.QA")  # .tensor, .age_rounds; None: none has come yet

Two kinds, since they travel differently. *Averaged* tensors are one vector on a channel of rounds of their
own: any averager that averages at once, ``RPS`` by default. A round carries all of them; what is averaged at
another pace belongs to another ``crew.tensors``. *Computed* tensors go by ``protocols.publish``: an owner
publishes one when it likes, all others have it some round trips later, and nobody waits for it.

``protocols.publish.assignment`` says which peer computes what: a function of costs and of the living peers.
Owners compute what is theirs; the second owner of a name does so, too, when it has missed two turns of its
owner, until the owner's values come again. What a turn is, is measured: the middle number of rounds between
versions.

The clock is the rounds of the averaged tensors, over all runs of a training, or, where nothing is averaged,
the turns of publishing.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import torch

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DenseName
from ragtag.core.channels import channel_of
from ragtag.core.errors import NotFinite
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import Bytes, Floats, Outcome, PeerId, Publish, Version
from ragtag.core.wire import n_chunks, name_hash
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.publish.assignment import OwnerPair, assigned
from ragtag.protocols.publish.channel import NONE, TENSORS_MAX, Held, Publisher, digest_of, published
from ragtag.protocols.rounds.rps import RPS
from ragtag.training.exchange.asked import averaging_of, codec_of
from ragtag.training.tensors.finite import require_weight
from ragtag.training.transport import Pending, PublishingTransport

BYTES_MAX = 1 << 30
"""Of all tensors of one ``crew.tensors``, as float32; a peer keeps up to three versions of each."""
MISSED = 2
"""Turns of its owner that a name has missed, from which on its second owner computes it."""
_INTERVALS = 32

Shape = Sequence[int] | torch.Tensor
"""A tensor's shape, or an example; what comes then is on the example's device."""


@dataclass(frozen=True, slots=True)
class Share:
    """How far the average of one tensor came.

    contributors: peers whose values are in it (mean over its chunks).
    arrived: the share of its chunks for which an average came; elsewhere this peer's own values are.
    """

    contributors: float
    arrived: float


@dataclass(frozen=True, slots=True, eq=False)
class NamedMean:
    """An average of named tensors: ``mean["fc1.A"]``, float32, not shared with anything.

    shares: by name.
    missed: the peers that were waited for in vain.
    round: the channel's; -1: this peer is on its way into the crew, and averaged with nobody.
    """

    tensors: Mapping[str, torch.Tensor]
    shares: Mapping[str, Share]
    missed: tuple[PeerId, ...]
    round: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass(frozen=True, slots=True, eq=False)
class Newest:
    """The newest whole value of a computed tensor.

    tensor: float32, not to be changed.
    version: grows with each publication.
    peer: the one that published it.
    age_rounds: rounds since (see ``named``).
    age_s: seconds, without the time that it travelled.
    missed: how many turns of its owner have brought nothing since.
    """

    tensor: torch.Tensor
    version: int
    peer: PeerId
    age_rounds: int
    age_s: float
    missed: int


class Averaging:
    """A round of named tensors under way."""

    def __init__(self, wait: Callable[[], NamedMean], over: Callable[[], bool] = lambda: True) -> None:
        self._wait, self._over = wait, over
        self._mean: NamedMean | None = None

    @property
    def over(self) -> bool:
        """Whether the round is done, so that ``result()`` returns at once."""
        return self._mean is not None or self._over()

    def result(self) -> NamedMean:
        """Wait until the round is done, which its own deadline bounds."""
        if self._mean is None:
            self._mean = self._wait()
        return self._mean


@dataclass(slots=True, eq=False)
class _Known:
    """A value that was decoded: of which version, when it was published on the transport's clock."""

    version: Version
    tensor: torch.Tensor
    made_s: float


class NamedTensors:
    """A part of training's own tensors, under one name; made by ``crew.tensors``.

    averaged, computed: names to shapes (or examples), on all peers the same; a name is in one of them.
    method: how the former are averaged; all at once.
    codec: how both travel.
    pushed: computed values go out whole when they are published, as for those that stand still for them; else
        others ask for them, a window at a time, and nothing else waits behind them.
    settings: in words, what else all peers have to do alike; peers with others are refused.
    founded: how many seats the crew had at first.
    away: whether this peer is still on its way into the crew; asked with the channel of the averages.
    require_in: raises ``ragtag.HasLeft``, with what is asked for, where this peer has left.
    on_outcome: told of each round.
    on_publish: called after values were published.

    Raises:
        ValueError: there are no names, too many, a shape is empty, or ``BYTES_MAX`` is exceeded.
        ragtag.SchemaMismatch: other peers have other names, shapes or settings; the message names the first.
    """

    def __init__(
        self,
        transport: PublishingTransport,
        name: str,
        averaged: Mapping[str, Shape] | None = None,
        computed: Mapping[str, Shape] | None = None,
        *,
        method: Averager | str | None = None,
        codec: Codec | DenseName | None = None,
        seed: int = 0,
        pushed: bool = False,
        settings: str = "",
        founded: int | None = None,
        away: Callable[[int], bool] = lambda channel: False,
        require_in: Callable[[str], None] = lambda asked: None,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        on_publish: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._transport = name, transport
        self._averaged, self._computed = _forms(averaged or {}), _forms(computed or {})
        _require_forms(self._averaged, self._computed)
        self._codec = codec_of(codec)
        self._seed = seed ^ name_hash(name)
        self._founded = transport.n if founded is None else founded
        self._away, self._on_outcome, self._on_publish = away, on_outcome, on_publish
        self._require_in = require_in
        self._channel = channel_of(f"{name}/averaged")
        """Of the averaged tensors' rounds."""
        self._published = channel_of(f"{name}/computed")
        self._pending: Averaging | None = None
        self._last_round = -1
        self._base = 0
        self._opened: int | None = None
        self._known: dict[str, _Known] = {}
        self._taken_since = dict.fromkeys(self._computed, 0)
        """Of the computed names that this peer takes, the clock from which on it does."""
        self._intervals: deque[int] = deque(maxlen=_INTERVALS)
        averager = _averager(method)
        alike = f" ({settings})" if settings else ""
        if self._averaged:
            self._schema = Schema(
                _specs(self._averaged), self._codec.name, averager.name, f"{name}: averaged{alike}"
            )
            transport.configure(self._channel, self._schema, averager, self._codec)
        if self._computed:
            sizes = [self._rows(form) for form in self._computed.values()]
            by = published(sizes, pushed=pushed)
            schema = Schema(_specs(self._computed), self._codec.name, by.name, f"{name}: computed{alike}")
            transport.configure(self._published, schema, by, self._codec)
            transport.publish(Publish(self._published, {}))

    def __repr__(self) -> str:
        return f"NamedTensors({self._name!r}, {len(self._averaged)} averaged, {len(self._computed)} computed)"

    @property
    def name(self) -> str:
        """Of all of them together; the same on all peers."""
        return self._name

    # -- Averages

    def average(self, values: Mapping[str, torch.Tensor], weight: float = 1.0) -> Averaging:
        """Begin a round with these values, which are copied; ``result()`` waits for its end.

        values: of each averaged name, of its shape.
        weight: how much they count (samples).

        The round before is waited for, if nobody has. A peer that is on its way into the crew averages with
        nobody. Values that are not finite count for nothing, and so does what shares a chunk with them.

        Raises:
            TypeError: a value is no tensor.
            ValueError: names or shapes are not those that were given, or the weight is below 0 or too large.
            ragtag.HasLeft: this peer has left its crew.
        """
        self._require_in("tensors.average()")
        if not self._averaged:
            raise ValueError(f"{self._name!r} averages nothing: give crew.tensors averaged={{name: shape}}")
        self._require(values, self._averaged, all_of_them=True)
        weight = require_weight(weight)
        if self._pending is not None:
            self._pending.result()
        table = self._table(values)
        if self._away(self._channel):
            alone = {name: Share(1.0, 0.0) for name in self._averaged}
            mean = NamedMean(self._cut(table), alone, (), -1)
            return Averaging(lambda: mean)
        pending = self._transport.start(self._channel, table, weight)
        made = self._pending = Averaging(lambda: self._end(pending), lambda: pending.over)
        return made

    def _end(self, pending: Pending) -> NamedMean:
        outcome = pending.wait()
        self._last_round, self._pending = outcome.round, None
        if self._opened is None:
            self._opened = self.clock
        self._on_outcome(outcome)
        heard = np.bitwise_count(outcome.heard)
        shares = {}
        for at, (name, form) in enumerate(self._averaged.items()):
            first = self._schema.offsets[at]
            span = slice(
                first // self._codec.elements, (first + form.n_values - 1) // self._codec.elements + 1
            )
            shares[name] = Share(float(heard[span].mean()), float(outcome.averaged[span].mean()))
        return NamedMean(self._cut(outcome.mean), shares, outcome.missed, outcome.round)

    def _table(self, values: Mapping[str, torch.Tensor]) -> Floats:
        elements = self._codec.elements
        table = np.zeros((self._schema.n_chunks(elements), elements), np.float32)
        flat = table.reshape(-1)
        for first, name in zip(self._schema.offsets, self._averaged, strict=False):
            plain = _plain(values[name])
            flat[first : first + plain.size] = plain
        return table

    def _cut(self, table: Floats) -> dict[str, torch.Tensor]:
        flat, cut = table.reshape(-1), {}
        for first, (name, form) in zip(self._schema.offsets, self._averaged.items(), strict=False):
            part = torch.from_numpy(flat[first : first + form.n_values].copy())
            cut[name] = part.reshape(form.shape).to(form.device)
        return cut

    # -- Owners

    @property
    def _publisher(self) -> Publisher:
        return self._transport.published(self._published)[0]

    @property
    def clock(self) -> int:
        """Rounds of the whole training, as far as this peer has heard."""
        rounds = self._last_round + 1
        if not self._computed:
            return self._base + rounds
        publisher = self._publisher
        return max(max(self._base, publisher.base) + rounds, publisher.latest)

    def owners(self, costs: Mapping[str, float] | None = None) -> dict[str, OwnerPair]:
        """The peer that computes each name now, and the one that stands in; peers with the same view agree.

        costs: what computing each takes, in any unit, the same on all peers (by default its values).
        Raises ValueError: a cost is missing, not above 0, or of no computed name.
        """
        costs = {name: form.n_values for name, form in self._computed.items()} if costs is None else costs
        if costs.keys() != self._computed.keys():
            odd = sorted(costs.keys() ^ self._computed.keys())
            raise ValueError(f"costs of {self._name!r} are not those of the computed names: {odd[0]!r}")
        seats, live = self._transport.n, self._transport.live
        live = live - self._transport.clients or live
        return assigned(costs, live, seats=seats, founded=min(self._founded, seats), seed=self._seed)

    def mine(self, costs: Mapping[str, float] | None = None) -> list[str]:
        """The names that this peer is to compute now: its own, and those for whose silent owner it stands in.

        costs: as in ``owners``.
        """
        self._look()
        me, names = self._transport.me, []
        for name, (first, second) in self.owners(costs).items():
            known = self._known.get(name)
            version = NONE if known is None else known.version
            stood_in = known is not None and version.maker == me
            if first == me or (second == me and (stood_in or self._missed(name, version) >= MISSED)):
                names.append(name)
        return names

    def _missed(self, name: str, version: Version) -> int:
        """How many turns should have brought a newer version by now; 0 as long as no turn is known."""
        turn = median_low(self._intervals) if self._intervals else math.inf
        since = max(self._opened or 0, version.clock, self._taken_since.get(name, self.clock))
        return max(0, int((self.clock - since) // turn) - 1)

    # -- Values of one owner

    def publish(self, values: Mapping[str, torch.Tensor], costs: Mapping[str, float] | None = None) -> None:
        """Have all peers take these values, which are copied. Waits for nobody.

        values: of any computed names, of their shapes. A name's owner is meant to; what its second owner
        publishes gives way to what the owner publishes in the same round.
        costs: as in ``owners``, by which owners are told from second ones.

        Raises:
            TypeError: a value is no tensor.
            ValueError: a name or shape is not one that was given.
            ragtag.NotFinite: a value is NaN or infinite, or too large for float32; nothing is published.
            ragtag.HasLeft: this peer has left its crew.
        """
        self._require_in("tensors.publish()")
        self._require(values, self._computed, all_of_them=False)
        for name, value in values.items():
            if not np.isfinite(_plain(value)).all():
                raise NotFinite(
                    f"{name!r} of {self._name!r} has values that are not finite; it is not published"
                )
        names, owners, me = list(self._computed), self.owners(costs), self._transport.me
        clock = self.clock
        own = {name: value for name, value in values.items() if owners[name].first == me}
        for part, at in ((own, clock), ({n: v for n, v in values.items() if n not in own}, clock - 1)):
            if part:
                rows = {names.index(name): self._encode(value) for name, value in part.items()}
                self._transport.publish(Publish(self._published, rows, max(0, at), self._base))
        self._on_publish()

    def newest(self, name: str) -> Newest | None:
        """The newest whole value of a computed name that has come here; ``None``: none has. Never waits.

        Raises ValueError: no such name is computed.
        """
        if name not in self._computed:
            raise ValueError(
                f"{self._name!r} has no computed tensor {name!r}; it has {list(self._computed)[:8]}"
            )
        self._look()
        known = self._known.get(name)
        if known is None:
            return None
        version = known.version
        age_s = max(0.0, self._transport.now_s() - known.made_s)
        age = max(0, self.clock - version.clock)
        return Newest(known.tensor, version.clock, version.maker, age, age_s, self._missed(name, version))

    def only(self, names: Sequence[str]) -> None:
        """From now on this peer takes these computed names, and no others, from their owners.

        So eigenbases go to a layer's gradient workers alone (KAISA's hybrid placement). Raises ValueError:
        there is no such name.
        """
        self._require_in("tensors.only()")
        for name in names:
            if name not in self._computed:
                raise ValueError(f"{self._name!r} has no computed tensor {name!r}")
        every = list(self._computed)
        clock = self.clock
        self._taken_since = {name: self._taken_since.get(name, clock) for name in names}
        wanted = frozenset(every.index(name) for name in names)
        self._transport.publish(Publish(self._published, {}, wanted=wanted))

    def _look(self) -> None:
        """Decode what has come since."""
        publisher, there_s = self._transport.published(self._published)
        here_s = self._transport.now_s()
        for at, name in enumerate(self._computed):
            held, known = publisher.held[at], self._known.get(name)
            if held is None or (known is not None and held.version <= known.version):
                continue
            if known is not None and held.version.clock > known.version.clock:
                self._intervals.append(held.version.clock - known.version.clock)
            made_s = here_s - (there_s - held.made_s)
            self._known[name] = _Known(held.version, self._decode(name, held), made_s)

    def _rows(self, form: _Form) -> int:
        return n_chunks(form.n_values, self._codec.elements)

    def _encode(self, value: torch.Tensor) -> Bytes:
        plain = _plain(value)
        table = np.zeros((n_chunks(plain.size, self._codec.elements), self._codec.elements), np.float32)
        table.reshape(-1)[: plain.size] = plain
        return self._codec.encode(table)

    def _decode(self, name: str, held: Held) -> torch.Tensor:
        form = self._computed[name]
        table = np.empty((len(held.rows), self._codec.elements), np.float32)
        self._codec.decode(held.rows, table)
        return torch.from_numpy(table.reshape(-1)[: form.n_values]).reshape(form.shape).to(form.device)

    # -- Snapshots and checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The newest values, of all computed names, with their versions; of one form on all peers."""
        if self._computed:
            self._look()
        versions, values = [], {}
        for name, form in self._computed.items():
            known = self._known.get(name)
            value = torch.zeros(form.shape, device="cpu") if known is None else known.tensor.cpu().clone()
            version = NONE if known is None else known.version
            versions.append((version.clock, version.maker, _check(version, value)))
            values[name] = value
        table = torch.tensor(versions, dtype=torch.int64, device="cpu").reshape(-1, 3)
        clock = self.clock  # a run that resumes begins with it; a peer that comes into this one has its base
        return {"clock": clock, "base": clock - self._last_round - 1, "versions": table, "values": values}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take values back, where this peer has no newer ones; all peers then take the newest of anybody's.

        A value that is not of its version (donors of one snapshot may have had different ones) is left out.
        Raises ValueError, naming the first name or shape that differs; nothing has changed then.
        """
        clock, base, versions, values = map(state.get, ("clock", "base", "versions", "values"))
        if type(clock) is not int or type(base) is not int or not 0 <= base <= clock:
            raise ValueError(f"the state of {self._name!r} has no clock of a training")
        if not isinstance(values, Mapping):
            raise ValueError(f"the state of {self._name!r} has other parts than it should")
        if list(values) != list(self._computed) and set(values) != set(self._computed):
            odd = sorted(set(values) ^ set(self._computed))
            raise ValueError(f"the state of {self._name!r} is of other computed names: {odd[0]!r}")
        shape = (len(self._computed), 3)
        if not isinstance(versions, torch.Tensor) or tuple(versions.shape) != shape:
            raise ValueError(f"the state of {self._name!r} has no versions of shape {shape}")
        self._require(values, self._computed, all_of_them=True)
        begun = self._last_round >= 0 or (bool(self._computed) and self._publisher.heard)
        self._base = max(self._base, base if begun else clock)
        rows: dict[int, Bytes] = {}
        given: dict[int, Version] = {}
        for at, name in enumerate(self._computed):
            count, maker, check = versions[at].tolist()
            if not 0 < count <= clock or _check(Version(count, maker, 0), values[name]) != check:
                continue
            rows[at] = self._encode(values[name])
            given[at] = Version(count, maker, digest_of(count, maker, rows[at]))
        if self._computed:
            self._transport.publish(Publish(self._published, rows, clock, self._base, given))

    # -- What is asked for

    def _require(
        self, values: Mapping[str, torch.Tensor], forms: Mapping[str, _Form], *, all_of_them: bool
    ) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"values of {self._name!r} are a {type(values).__name__}; give {{name: tensor}}")
        odd = [name for name in values if name not in forms]
        if odd:
            raise ValueError(
                f"{self._name!r} has no tensor {odd[0]!r} of that kind; it has {list(forms)[:8]}"
            )
        missing = [name for name in forms if name not in values]
        if all_of_them and missing:
            raise ValueError(
                f"{missing[0]!r} of {self._name!r} is missing: a round has all {len(forms)} names; what goes "
                "at another pace belongs to another crew.tensors"
            )
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                found = value.layout if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                raise TypeError(
                    f"{name!r} of {self._name!r} is {found}; give a dense tensor of shape {forms[name].shape}"
                )
            if tuple(value.shape) != forms[name].shape or not value.is_floating_point():
                kind = f"{tuple(value.shape)} {value.dtype}"
                raise ValueError(
                    f"{name!r} of {self._name!r} is {kind}; give floats of shape {forms[name].shape}"
                )


@dataclass(frozen=True, slots=True)
class _Form:
    shape: tuple[int, ...]
    device: torch.device

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)


def _forms(shapes: Mapping[str, Shape]) -> dict[str, _Form]:
    if not isinstance(shapes, Mapping):
        raise TypeError(f"named tensors are a {type(shapes).__name__}; give {{name: shape}}")
    forms = {}
    for name, shape in shapes.items():
        if not isinstance(shape, torch.Tensor | Sequence):
            raise TypeError(
                f"{name!r} has as its shape a {type(shape).__name__}; give a tuple, or an example"
            )
        example = isinstance(shape, torch.Tensor)
        device = shape.device if isinstance(shape, torch.Tensor) else torch.device("cpu")
        sizes = tuple(shape.shape) if example else tuple(shape)  # type: ignore[union-attr]
        if not isinstance(name, str) or not name or len(name) > 512:
            raise ValueError(f"a tensor is named {name!r}; give 1 to 512 characters")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(f"{name!r} has shape {sizes}; give whole numbers above 0, or an example")
        forms[name] = _Form(sizes, device)
    return forms


def _require_forms(averaged: Mapping[str, _Form], computed: Mapping[str, _Form]) -> None:
    both = sorted(averaged.keys() & computed.keys())
    if both:
        raise ValueError(f"{both[0]!r} is averaged and computed; give what is computed a name of its own")
    if not averaged and not computed:
        raise ValueError("no named tensors: give averaged={name: shape} or computed={name: shape}")
    for what, forms in (("averaged", averaged), ("computed", computed)):
        if len(forms) > TENSORS_MAX:
            raise ValueError(f"{len(forms)} {what} tensors; at most {TENSORS_MAX} have one name")
    size = sum(4 * form.n_values for forms in (averaged, computed) for form in forms.values())
    if size > BYTES_MAX:
        raise ValueError(f"named tensors of {size:,} bytes; at most {BYTES_MAX:,} have one name")


def _averager(method: Averager | str | None) -> Averager:
    averager = averaging_of(method, None)[0] or RPS()
    if averager.kind != "at once" or averager.gathers:
        raise ValueError(f"named tensors are averaged by all at once; {averager!r} is not")
    return averager


def _specs(forms: Mapping[str, _Form]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, form.shape, "float32") for name, form in forms.items())


def _plain(value: torch.Tensor) -> Floats:
    """Its values, row by row, float32 ``[n]`` on the host."""
    flat: Floats = value.detach().to("cpu", torch.float32).reshape(-1).numpy()
    return flat


def _check(version: Version, value: torch.Tensor) -> int:
    """Whether a value is a version's can be told by this, whatever the codec."""
    return zlib.crc32(_plain(value).data, zlib.crc32(f"{version.clock}/{version.maker}".encode()))
