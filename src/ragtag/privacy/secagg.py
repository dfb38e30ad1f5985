"""Averages of a crew's tensors of which nobody sees the parts: secure aggregation over any transport.

secure = crew.secure_average({"w": (10, 4)}, clip=1.0, dropouts=2)  # on all peers alike
mean = secure.average({"w": update})
mean["w"], mean.clients

``ragtag.protocols.secagg`` has the machines, and says what is protected from whom, and what is not. Here they
stand on published values (``protocols.publish``): each message is one that its receivers take, so it travels
sealed as all else does, and rows that are lost are asked for again. One peer is the aggregator, and a client
as the others are. Since it knows its own vector, it counts as one that colludes. Vectors are cut into blocks,
which peers own as in a reduce-scatter, so no line carries much more than others. The parts of a block are
taken by its owner alone. A peer that takes over a block asks their makers for them.

**With noise** (``noise=DistributedNoise(multiplier, max_norm)``) the sum is differentially private, and no
peer is trusted with what it was before. Each vector is clipped to ``max_norm`` and rounded, and each client
adds discrete Gaussian noise: the distributed discrete Gaussian mechanism (Kairouz, Liu, Steinke, ICML 2021,
arXiv 2102.06387, theorem 1 and proposition 14). What of it is used, and what not:

- The noise suffices without that of the peers that may drop out and of those that may collude, since a sum
  is of at least n - dropouts clients: each adds 1 / sqrt(n - dropouts - colluders) of it. Where more peers
  stay there is more noise, and no credit for it.
- With 2^32 steps and a clip far above a step, no sum wraps; so vectors are not rotated first. They are
  rounded to the nearest, which adds sqrt(length) / 2 steps to their norm at most, all of which is counted.
- A sum of discrete Gaussians is not one. The theorem's price for that, tau, is below e^-2000 at 16 steps of
  noise in each, fewer than which are refused; so each round costs what the Gaussian mechanism costs:
  alpha Delta^2 / (2 sigma^2) at each Renyi order alpha, which ``epsilon`` adds up over rounds.
- What is protected is a peer's whole vector: neighbours differ in that one peer's vector is 0. Which peers
  take part, and how many values were beyond ``clip``, is not hidden. A round counts once it is begun,
  whether or not it comes to a sum.

A stage ends when all clients have answered, when those that have not are known to be gone, or when it takes
far longer than such stages took before (``protocols.secagg.SecureWaits``). A first stage, and one that would
leave too few for a sum, lasts up to ``deadline_s``, and so does the wait for peers that have not called yet.
A round that ends without a sum raises ``NoSecureSum`` on all peers that hear of it; calling
``average`` again is a new round. Rounds are counted by calls, which must be alike on all peers: a peer that
was too late for one raises, and is back in step with its next call.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.errors import NotFinite
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import PEERS_MAX, Arm, Expired, Floats, Left, PeerId, Publish, Start, Version
from ragtag.core.wire import CHUNK_BYTES
from ragtag.privacy.dp import PrivacyLedger
from ragtag.privacy.noise import KEY_BYTES, NoiseStream
from ragtag.protocols.publish.channel import TENSORS_MAX, WINDOW, Held, published
from ragtag.protocols.secagg import (
    ADVERT_BYTES,
    OPENING_BYTES,
    REASON_BYTES,
    REVEALED_BYTES,
    SEALED_BYTES,
    Download,
    NoSecureSum,
    Owns,
    Part,
    Random,
    SecureAggregator,
    SecureClient,
    SecureEffect,
    SecureSetting,
    SecureStage,
    SecureWaits,
    Summed,
    Unmasked,
    Unsummed,
    Upload,
    ring_for,
    sum_block,
)
from ragtag.schedules.base import is_number
from ragtag.training.named import Shape
from ragtag.training.transport import PublishingTransport

_HEAD = struct.Struct("<QQd")
"""Before each message: the round, how many bytes follow, and for how long (s) no more of the kind may."""
_FOR_ALL = ("down MASKED", "down UNMASK")
_EACH = 7
"""Messages of each peer beside parts and blocks."""
_LOOKS = 16
"""How often messages are looked for while the channel opened, or the shortest stage since went by."""
_LOOK_MIN_S = 1e-3


@dataclass(frozen=True, slots=True)
class DistributedNoise:
    """Noise that all clients of a secure average add together.

    multiplier: standard deviation of all that is counted on, over ``max_norm``.
    max_norm: Euclidean norm to which each peer's vector is clipped.

    Raises:
        TypeError: one is no number.
        ValueError: one is not above 0.
    """

    multiplier: float
    max_norm: float

    def __post_init__(self) -> None:
        for name, value in (("multiplier", self.multiplier), ("max_norm", self.max_norm)):
            if not is_number(value):
                raise TypeError(f"{name} is {value!r}; it is a number, as in DistributedNoise(1.1, 1.0)")
        if not (0 < self.multiplier < math.inf and 0 < self.max_norm < math.inf):
            raise ValueError(f"{self}: both must be above 0; without noise leave noise= out")


@dataclass(frozen=True, slots=True, eq=False)
class SecureMean:
    """An average: ``mean["w"]``, float32.

    clients: the peers whose values are in it, each counted alike.
    clipped: how many of this peer's own values were beyond the clip.
    round: its number, from 0.
    """

    tensors: Mapping[str, torch.Tensor]
    clients: tuple[PeerId, ...]
    clipped: int
    round: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass(slots=True)
class SecureTraffic:
    """Payload of this peer's messages, headers and padding left out: ``SecureSetting`` has the formulas.

    up_bytes: as a client, to the aggregator and to owners of blocks, itself included.
    down_bytes: as the aggregator and as an owner of blocks, to all clients, itself included.
    """

    up_bytes: int = 0
    down_bytes: int = 0


class SecureAverage:
    """Secure averages of some tensors of all peers that are in the crew now; made by ``crew.secure_average``.

    transport: the crew's.
    shapes: by name, or example tensors, on all peers the same.
    clip: values beyond it, or below -clip, count as it.
    dropouts: how many of the peers may drop out in a round; with more there is no sum.
    colluders: how many peers may tell each other all they know without seeing another's vector.
    aggregator: the peer that decides who is in a sum, and unmasks it.
    name: of these averages. deadline_s: for a stage, at most.
    noise: makes each sum differentially private; ``None``: sums are exact.
    ledger: what was spent of this peer's vectors; ``None``: since it was made.
    random: random bytes that nobody else can guess. on_publish: called after each message.

    Raises:
        ValueError: there is no such aggregator; peers, dropouts or colluders are too many; noise is too
            little to be counted in whole steps.
        ragtag.SchemaMismatch: another peer has other shapes or settings.
    """

    def __init__(
        self,
        transport: PublishingTransport,
        shapes: Mapping[str, Shape],
        *,
        clip: float,
        dropouts: int,
        colluders: int = 1,
        aggregator: PeerId = 0,
        name: str = "secure",
        seed: int = 0,
        deadline_s: float = 60.0,
        noise: DistributedNoise | None = None,
        ledger: PrivacyLedger | None = None,
        random: Random = secrets.token_bytes,
        on_publish: Callable[[], None] = lambda: None,
    ) -> None:
        n = transport.n
        if not 0 <= aggregator < n:
            raise ValueError(f"secure averages: aggregator {aggregator} of {n} peers")
        if n > PEERS_MAX:
            raise ValueError(f"secure averages: {n} peers; at most {PEERS_MAX} take part")
        if not deadline_s > 0:
            raise ValueError(f"secure averages: deadline_s is {deadline_s}; it must be above 0")
        self._shapes = {
            key: shape.shape if isinstance(shape, torch.Tensor) else torch.Size(shape)
            for key, shape in shapes.items()
        }
        length = sum(shape.numel() for shape in self._shapes.values())
        degree, threshold = ring_for(n, dropouts, colluders)
        self._counted_on = n - dropouts - colluders  # one at least: else no ring would do
        deviation = 0.0 if noise is None else noise.multiplier * noise.max_norm / math.sqrt(self._counted_on)
        self._setting = SecureSetting(
            n,
            length,
            clip,
            degree,
            threshold,
            n - dropouts,
            seed,
            deviation=deviation,
            blocks=_blocks(n, length),
            aggregator=aggregator,
        )
        self._noise, self._stream = noise, NoiseStream(random(KEY_BYTES))
        self.ledger = PrivacyLedger(f"peer {transport.me}'s vectors") if ledger is None else ledger
        self._transport, self._random, self._waits = transport, random, SecureWaits(deadline_s)
        self._aggregator, self._on_publish = aggregator, on_publish
        self._round = 0
        self.traffic = SecureTraffic()
        self._slots = _slots(self._setting)
        self._numbers = {slot: number for number, slot in enumerate(self._slots)}
        self._channel = channel_of(f"{name}/secure")
        by = published(self._slots.values(), pushed=True)
        specs = tuple(
            TensorSpec(f"{what}/{peer}", (rows * fp32.elements,), "float32")
            for (what, peer), rows in self._slots.items()
        )
        forms = ", ".join(f"{key} {tuple(shape)}" for key, shape in self._shapes.items())
        alike = f"{forms}; clip {clip:g}, {dropouts} dropouts, {colluders} collude, aggregator {aggregator}"
        if noise is not None:
            alike += f", noise {noise.multiplier:g} times {noise.max_norm:g}"
        alike += f", peers 0 to {n - 1} alone"  # one that comes later has no part, and is told so
        begin_s = transport.now_s()
        schema = Schema(specs, fp32.name, by.name, f"{name}: secure ({alike}, seed {seed})")
        transport.configure(self._channel, schema, by, fp32)
        self._look_s = max(_LOOK_MIN_S, (transport.now_s() - begin_s) / _LOOKS)
        self._taken: dict[tuple[str, PeerId], Version] = {}
        self._wanted = [slot for slot in self._slots if self._takes(slot)]
        self._fetched: set[int] = set()
        owners = self._setting.owners_among(range(n))
        self._fetch({block for block, owner in enumerate(owners) if owner == transport.me})

    @property
    def setting(self) -> SecureSetting:
        """Neighbours, thresholds, scale and error of the next round."""
        return replace(self._setting, round=self._round)

    @property
    def noise_multiplier(self) -> float:
        """What is counted on of a sum's noise, over the most that one peer's vector moves it; 0: none.

        A little off what was asked for: noise is whole steps, and rounding moves a vector, too.
        """
        setting = self._setting
        if self._noise is None:
            return 0.0
        moved = self._noise.max_norm * setting.scale + math.sqrt(setting.length) / 2
        return setting.deviation_steps * math.sqrt(self._counted_on) / moved

    def epsilon(self, delta: float) -> float:
        """What all rounds come to for one peer's vectors; infinite without noise.

        Raises ValueError: ``delta`` is not between 0 and 1; NoOpacus: its accountant is not installed.
        """
        return math.inf if self._noise is None else self.ledger.epsilon(delta)

    def _takes(self, slot: tuple[str, PeerId]) -> bool:
        what, peer = slot
        me = self._transport.me
        if what.startswith("part"):
            return False
        if what.startswith("block"):
            return True
        if what.startswith("sum"):
            return me == self._aggregator
        if what.startswith("up"):
            return me == self._aggregator and peer != me
        return me != self._aggregator and peer == (self._aggregator if what in _FOR_ALL else me)

    def _fetch(self, blocks: Collection[int]) -> None:
        """Take all peers' parts of these blocks, and of no others."""
        self._fetched = set(blocks)
        self._wanted = [slot for slot in self._wanted if not slot[0].startswith("part")]
        peers = set(range(self._transport.n)) - {self._transport.me}
        self._wanted += [(f"part {block}", peer) for block in sorted(blocks) for peer in sorted(peers)]
        wanted = frozenset(self._numbers[slot] for slot in self._wanted)
        self._transport.publish(Publish(self._channel, {}, wanted=wanted))

    def average(self, values: Mapping[str, torch.Tensor]) -> SecureMean:
        """A round; each of its stages takes as long as such ones took, with head-room, or ``deadline_s``.

        values: of each name, of its shape; floats.

        Raises:
            ValueError: names, shapes or types are others.
            ragtag.NotFinite: a value is NaN or infinite; nothing was sent.
            ragtag.privacy.NoSecureSum: there is no sum, since too many have dropped out, say.
        """
        flat = self._flat(values)
        number, setting = self._round, self.setting
        noise = None
        if self._noise is not None:
            flat = _within(flat, self._noise.max_norm)
            noise = self._stream.discrete_gaussians(setting.length, setting.deviation_steps)
        self._waits.floor_s = 2 * self._look_s
        client = SecureClient(setting, self._transport.me, flat, self._random, self._waits, noise)
        if self._noise is not None:
            self.ledger.spend(self.noise_multiplier, 1.0)
        self._round += 1
        begin_s = self._transport.now_s()
        end = _Turn(self, setting, client).run()
        if isinstance(end, Unsummed):
            raise end.error
        stage_s = (self._transport.now_s() - begin_s) / len(SecureStage)
        self._look_s = max(_LOOK_MIN_S, min(self._look_s, stage_s / _LOOKS))
        mean = setting.values(end.total) / np.float32(len(end.clients))
        tensors, first = {}, 0
        for name, shape in self._shapes.items():
            part = torch.from_numpy(mean[first : first + shape.numel()]).reshape(shape)
            tensors[name] = part.to(values[name].device)
            first += shape.numel()
        return SecureMean(tensors, end.clients, client.clipped, number)

    def _flat(self, values: Mapping[str, torch.Tensor]) -> Floats:
        if values.keys() != self._shapes.keys():
            missing, odd = self._shapes.keys() - values.keys(), values.keys() - self._shapes.keys()
            what = f"{min(odd)!r} is odd" if odd else f"{min(missing)!r} is missing"
            raise ValueError(f"secure averages are of {list(self._shapes)[:8]}; {what}")
        parts = []
        for name, shape in self._shapes.items():
            value = values[name]
            if value.shape != shape or not value.is_floating_point():
                raise ValueError(
                    f"{name!r} is {tuple(value.shape)} {value.dtype}; give floats {tuple(shape)}"
                )
            part = value.detach().to("cpu", torch.float32).reshape(-1)
            if not bool(part.isfinite().all()):
                raise NotFinite(f"{name!r} has values that are not finite; nothing was sent")
            parts.append(part.numpy())
        return np.concatenate(parts)

    # -- Messages

    def _send(
        self, what: str, peer: PeerId, number: int, body: bytes | memoryview, within_s: float = 0.0
    ) -> None:
        self._send_all({(what, peer): body}, number, within_s)

    def _send_all(
        self,
        bodies: Mapping[tuple[str, PeerId], bytes | memoryview],
        number: int,
        within_s: float = 0.0,
    ) -> None:
        """Messages that are announced together."""
        found = {}
        for slot, body in bodies.items():
            rows = np.empty((self._slots[slot], CHUNK_BYTES), np.uint8)
            flat = rows.reshape(-1)
            flat[: _HEAD.size] = np.frombuffer(_HEAD.pack(number, len(body), within_s), np.uint8)
            flat[_HEAD.size : _HEAD.size + len(body)] = np.frombuffer(body, np.uint8)
            flat[_HEAD.size + len(body) :] = 0
            found[self._numbers[slot]] = rows
        clock = self._transport.published(self._channel)[0].latest + 1
        self._transport.publish(Publish(self._channel, found, clock=clock))  # above another owner's before
        self._on_publish()

    def _news(self, current: int) -> list[_Message]:
        """Messages that have come since.

        Those of rounds after the current one will be news then, too.
        """
        held, news = self._transport.published(self._channel)[0].held, []
        for what, peer in self._wanted:
            found = held[self._numbers[what, peer]]
            if found is None or self._taken.get((what, peer)) == found.version:
                continue
            maker = found.version.maker
            if maker == self._transport.me or not self._speaks(what, peer, maker):
                continue
            number, body, within_s = _read(found)
            if number <= current:
                self._taken[what, peer] = found.version
            if body is not None:
                news.append(_Message(what, peer, maker, number, body, within_s))
        return news

    def _speaks(self, what: str, peer: PeerId, maker: PeerId) -> bool:
        """Whether a message may be of that maker. Which owner may tell of a block the machines know."""
        if what.startswith(("block", "sum")):
            return True
        return maker == (self._aggregator if what.startswith("down") else peer)


@dataclass(frozen=True, slots=True)
class _Message:
    """What has come. peer: of or for which it is; maker: the peer that sent it."""

    what: str
    peer: PeerId
    maker: PeerId
    number: int
    body: memoryview
    within_s: float


class _Turn:
    """One round on one peer: its client, and, on one peer, the aggregator."""

    def __init__(self, over: SecureAverage, setting: SecureSetting, client: SecureClient) -> None:
        self._over, self._setting, self._client = over, setting, client
        self._me, self._to = over._transport.me, over._aggregator
        here = self._me == self._to
        self._aggregator = SecureAggregator(setting, over._waits) if here else None
        self._end: Summed | Unsummed | None = None
        self._heard: set[PeerId] = set()
        self._newest = dict[PeerId, SecureStage]()
        self._arms: dict[tuple[bool, str], Arm] = {}
        self._told: set[tuple[SecureStage, bytes]] = set()
        self._fetching: set[int] = set()
        self._parts: Mapping[int, Part] = {}
        self._queue: deque[tuple[bool, Any]] = deque()

    def run(self) -> Summed | Unsummed:
        """Carry messages until there is a sum, or will be none."""
        transport, over = self._over._transport, self._over
        self._queue += [(here, Start()) for here in (True, False) if not here or self._aggregator is not None]
        gone: set[PeerId] = set()
        while True:
            self._drain()
            if self._aggregator is None and self._end is not None:
                over._send("up OVER", self._me, self._setting.round, b"")
                return self._end
            if self._aggregator is not None and self._aggregator.stage == SecureStage.OVER:
                assert self._end is not None
                self._linger()
                return self._end
            now_s, live = transport.now_s(), transport.live
            for key, arm in list(self._arms.items()):
                if arm.at_s <= now_s:
                    del self._arms[key]
                    self._queue.append((key[0], Expired(arm.timer)))
            left = {peer for peer in range(self._setting.n) if peer not in live} - gone
            gone |= left
            self._queue += [(False, Left(peer)) for peer in sorted(left)]
            if self._aggregator is not None:
                self._queue += [(True, Left(peer)) for peer in sorted(left)]
            elif self._to in gone:
                why = f"the aggregator, peer {self._to}, has left"
                return Unsummed(NoSecureSum(self._client.stage, why))
            self._take()
            if not self._queue:
                next_s = min((arm.at_s for arm in self._arms.values()), default=now_s + over._look_s)
                transport.pause(min(over._look_s, max(_LOOK_MIN_S, next_s - now_s)))

    def _take(self) -> None:
        for message in self._over._news(self._setting.round):
            kind, _, name = message.what.partition(" ")
            if message.number != self._setting.round:
                if kind == "down" and message.number > self._setting.round and self._end is None:
                    why = f"peer {self._me} was too late: the others have gone on to round {message.number}"
                    self._end = Unsummed(NoSecureSum(self._client.stage, why))
                continue
            if kind == "part":
                self._queue.append((False, Part(message.peer, int(name), message.body)))
            elif kind == "block":
                self._opened(Unmasked(message.maker, int(name), message.body))
            elif kind == "sum":
                self._queue.append((True, Upload(message.maker, SecureStage.MASKED, message.body)))
            elif kind == "down":
                stage = SecureStage[name]
                self._queue.append((False, Download(self._me, stage, message.body, message.within_s)))
            elif SecureStage[name] == SecureStage.OVER:
                self._heard.add(message.peer)
            else:
                self._newest[message.peer] = SecureStage[name]
                self._queue.append((True, Upload(message.peer, SecureStage[name], message.body)))

    def _opened(self, opened: Unmasked) -> None:
        self._queue.append((False, opened))
        if self._aggregator is not None:
            self._queue.append((True, opened))

    def _drain(self) -> None:
        """Give the machines what there is for them, and carry out what they want."""
        while self._queue:
            here, event = self._queue.popleft()
            machine = self._aggregator if here else self._client
            assert machine is not None
            effects = machine.step(self._over._transport.now_s(), event)
            if parts := {effect.block: effect for effect in effects if isinstance(effect, Part)}:
                self._give(parts)
            fetches = {effect.block for effect in effects if isinstance(effect, Owns)}
            if parts or fetches:
                self._fetch(fetches)
            for effect in effects:
                self._carry(here, effect)

    def _fetch(self, blocks: set[int]) -> None:
        self._fetching |= blocks
        if self._fetching != self._over._fetched:
            self._over._fetch(self._fetching)
        self._queue += [(False, self._parts[block]) for block in sorted(blocks)]

    def _give(self, parts: Mapping[int, Part]) -> None:
        """Parts are there for whoever owns their blocks."""
        self._parts = parts
        self._over.traffic.up_bytes += sum(len(part.body) for part in parts.values())
        bodies = {(f"part {block}", self._me): part.body for block, part in parts.items()}
        self._over._send_all(bodies, self._setting.round)

    def _carry(self, here: bool, effect: SecureEffect) -> None:
        over, number, traffic = self._over, self._setting.round, self._over.traffic
        if isinstance(effect, Arm):
            self._arms[here, effect.timer.name.split()[0]] = effect
        elif isinstance(effect, Upload):
            traffic.up_bytes += len(effect.body)
            if self._aggregator is not None:
                self._queue.append((True, effect))
            elif effect.stage == SecureStage.MASKED:
                over._send(f"sum {sum_block(effect.body)}", self._to, number, effect.body)
            else:
                over._send(f"up {effect.stage.name}", self._me, number, effect.body)
        elif isinstance(effect, Unmasked):
            traffic.down_bytes += self._setting.n * len(effect.body)
            over._send(f"block {effect.block}", self._to, number, effect.body)
            self._opened(effect)
        elif isinstance(effect, Download):
            self._answer(effect)
        elif not isinstance(effect, Part | Owns) and (not here or self._end is None):
            self._end = effect

    def _answer(self, download: Download) -> None:
        over, number, stage = self._over, self._setting.round, download.stage
        over.traffic.down_bytes += len(download.body)
        what, body = f"down {stage.name}", bytes(download.body)
        if download.client == self._me:
            self._queue.append((False, download))
        elif stage < SecureStage.MASKED:
            over._send(what, download.client, number, body, download.within_s)
        elif (stage, body) not in self._told:  # for all alike
            self._told.add((stage, body))
            over._send(what, self._to, number, body, download.within_s)

    def _linger(self) -> None:
        """Stay until those that were with it to the end have heard of it, are known to be gone, or for long.

        This peer may leave after that, and who still lacks a block has no sum.
        """
        last = max(self._newest.values(), default=SecureStage.KEYS)
        present = {peer for peer, stage in self._newest.items() if stage == last}
        transport, over = self._over._transport, self._over
        until_s = transport.now_s() + over._waits.most_s
        while transport.now_s() < until_s and not present & transport.live <= self._heard:
            transport.pause(over._look_s)
            self._take()


def _within(flat: Floats, norm: float) -> Floats:
    """A vector whose norm is no more than that. Values that are not finite stay so, and are refused later."""
    length = float(np.linalg.norm(flat.astype(np.float64)))
    if not norm < length < math.inf:
        return flat
    return np.asarray(flat * np.float64(norm / length * (1 - 2.0**-20)), np.float32)


def _read(held: Held) -> tuple[int, memoryview | None, float]:
    """A message's round, body and time; no body: it says that it is longer than it can be."""
    flat = np.ascontiguousarray(held.rows).reshape(-1)
    number, size, within_s = _HEAD.unpack_from(flat.data)
    if size > len(flat) - _HEAD.size or not 0 <= within_s < math.inf:
        return number, None, 0.0
    return number, flat[_HEAD.size : _HEAD.size + size].data, within_s


def _blocks(n: int, length: int) -> int:
    """How many blocks: one for each peer, as far as so many messages have names and blocks fill a window."""
    named = (TENSORS_MAX - _EACH * n) // (n + 2)
    full = -(-4 * length // (WINDOW * CHUNK_BYTES))
    return max(1, min(n, named, full))


def _slots(setting: SecureSetting) -> dict[tuple[str, PeerId], int]:
    """All messages of a round, by what they are and whose, with their rows; what goes to all is one."""
    to = setting.aggregator
    owners = setting.who_bytes + 2 * setting.blocks
    each = {
        "up KEYS": ADVERT_BYTES,
        "up SHARES": setting.degree * SEALED_BYTES,
        "up UNMASK": setting.degree * REVEALED_BYTES,
        "up OVER": 0,
        "down KEYS": setting.degree * ADVERT_BYTES,
        "down SHARES": setting.degree * SEALED_BYTES + owners,
    }
    sizes = {(what, peer): size for what, size in each.items() for peer in range(setting.n)}
    sizes["down MASKED", to] = 2 + owners
    sizes["down UNMASK", to] = max(REASON_BYTES, 1 + owners + setting.openings_max * OPENING_BYTES)
    for block in range(setting.blocks):
        sizes[f"sum {block}", to] = setting.sum_bytes
        sizes[f"block {block}", to] = 4 * setting.stride
    for peer in range(setting.n):  # one peer's together: they are announced by few messages
        for block in range(setting.blocks):
            sizes[f"part {block}", peer] = 4 * setting.stride
    return {slot: -(-(_HEAD.size + size) // CHUNK_BYTES) for slot, size in sizes.items()}
