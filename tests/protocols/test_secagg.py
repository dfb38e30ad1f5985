"""Secure aggregation's machines: exact sums over dropouts, nothing below the threshold, forged input."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.errors import NotFinite
from ragtag.core.seed import generator
from ragtag.core.types import Arm, Expired, Floats, Left, Start
from ragtag.protocols import secagg
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.secagg import (
    CHECKS,
    PRIME,
    Download,
    NoSecureSum,
    Owns,
    Part,
    Random,
    SecureAggregator,
    SecureClient,
    SecureSetting,
    SecureStage,
    SecureWaits,
    Summed,
    Unmasked,
    Unsummed,
    Upload,
    add_masks,
    genuine_secret,
    ring_for,
    secret_of,
    shares_of,
)

N, LENGTH, DROPS, DEADLINE_S = 16, 40, 4, 5.0
BLOCKS = 5
UPLOADED = [SecureStage.KEYS, SecureStage.SHARES, SecureStage.MASKED, SecureStage.UNMASK]
Message = Upload | Download | Part | Unmasked


def stream(name: str, peer: int = 0) -> Random:
    return generator(7, name, peer).bytes


def setting_of(n: int = N, length: int = LENGTH, drops: int = DROPS, **others: Any) -> SecureSetting:
    degree, threshold = ring_for(n, drops)
    return SecureSetting(n, length, 2.0, degree, threshold, n - drops, seed=5, **{"blocks": BLOCKS} | others)


def vectors_of(setting: SecureSetting) -> list[Floats]:
    return [
        generator(1, "vector", peer).uniform(-2, 2, setting.length).astype(np.float32)
        for peer in range(setting.n)
    ]


def survivors(setting: SecureSetting, client: int, inside: Any, asked: int = 0) -> Download:
    """What the aggregator says of who is in the sum; ``asked``: and asks owners again."""
    owners = [*setting.owners_among(range(setting.n))]
    body = asked.to_bytes(2, "little") + secagg._who_owns(list(inside), owners, setting.n)
    return Download(client, SecureStage.MASKED, body, DEADLINE_S)


class Crew:
    """Clients and an aggregator whose messages come at once; a timer runs out where nothing else happens.

    drops: the stage from which on a client sends nothing, to nobody. change: what becomes of a message.
    told: a client that drops out is known to be gone. deaf: parts of the first never come to the second.
    waits: of the aggregator and of each client.
    """

    def __init__(
        self,
        setting: SecureSetting,
        drops: Mapping[int, SecureStage] | None = None,
        change: Callable[[Message], list[Message]] = lambda message: [message],
        told: bool = False,
        waits: list[SecureWaits] | None = None,
        deaf: Container[tuple[int, int]] = (),
    ) -> None:
        self.setting, self.drops, self.change, self.told = setting, drops or {}, change, told
        self.deaf = deaf
        self.vectors = vectors_of(setting)
        waits = waits or [SecureWaits(DEADLINE_S) for _ in range(setting.n + 1)]
        self.clients = [
            SecureClient(setting, peer, vector, stream("keys", peer), waits[peer])
            for peer, vector in enumerate(self.vectors)
        ]
        self.aggregator = SecureAggregator(setting, waits[-1])
        self.now_s = 0.0
        self.ends: dict[int, Summed | Unsummed] = {}
        self.end_s: dict[int, float] = {}
        self.seen: list[Upload] = []
        self.parts: dict[tuple[int, int], Part] = {}
        self.taken: dict[int, set[int]] = {peer: set() for peer in range(setting.n)}
        self.openers: list[tuple[int, int]] = []
        self.sent: Counter[str] = Counter()
        self.told_to: dict[int, list[Download]] = {peer: [] for peer in range(setting.n)}
        self._out: set[int] = set()
        self._timers: list[tuple[float, int, int, Arm]] = []
        self._queue: list[tuple[int, Any]] = [(-1, Start()), *((peer, Start()) for peer in range(setting.n))]
        while self._queue or self._timers:
            if not self._queue:
                self._timers.sort(key=lambda timer: timer[:3])
                self.now_s, _, who, arm = self._timers.pop(0)
                self._queue = [(who, Expired(arm.timer))]
            self._step(*self._queue.pop(0))

    def _step(self, who: int, event: Any) -> None:
        machine = self.aggregator if who < 0 else self.clients[who]
        stage = SecureStage.OVER if who < 0 else machine.stage
        for effect in machine.step(self.now_s, event):
            if isinstance(effect, Arm):
                self._timers.append((effect.at_s, len(self._timers), who, effect))
            elif isinstance(effect, Summed | Unsummed):
                self.ends[who] = effect
                self.end_s[who] = self.now_s
            elif who >= 0 and self._gone(who, max(stage, machine.stage)):
                continue
            elif isinstance(effect, Owns):
                self.taken[who].add(effect.block)
                held = [part for (_, block), part in self.parts.items() if block == effect.block]
                self._queue += [
                    (who, part)
                    for part in held
                    if part.client not in self._out and (part.client, who) not in self.deaf
                ]
            else:
                assert isinstance(effect, Message)
                for message in self.change(effect):
                    self._carry(message)

    def _gone(self, who: int, stage: SecureStage) -> bool:
        """Whether it has dropped out; where that is told, all hear it once."""
        gone = stage != SecureStage.OVER and stage >= self.drops.get(who, SecureStage.OVER)
        if gone and who not in self._out:
            self._out.add(who)
            if self.told:
                self._queue += [(other, Left(who)) for other in range(-1, self.setting.n) if other != who]
        return gone

    def _carry(self, message: Message) -> None:
        kind = "down" if isinstance(message, Download) else "up"
        self.sent[kind] += len(message.body)
        if isinstance(message, Upload):
            self.seen.append(message)
            self._queue.append((-1, message))
        elif isinstance(message, Download):
            self.told_to[message.client].append(message)
            self._queue.append((message.client, message))
        elif isinstance(message, Part):
            self.parts[message.client, message.block] = message
            self._queue += [
                (peer, message)
                for peer, blocks in self.taken.items()
                if message.block in blocks and (message.client, peer) not in self.deaf
            ]
        else:
            self.sent["up"] -= len(message.body)
            self.sent["down"] += self.setting.n * len(message.body)
            self.openers.append((message.client, message.block))
            self._queue += [(peer, message) for peer in range(-1, self.setting.n)]

    @property
    def sum(self) -> Summed:
        end = self.ends[-1]
        assert isinstance(end, Summed), end
        return end

    @property
    def error(self) -> NoSecureSum:
        end = self.ends[-1]
        assert isinstance(end, Unsummed), end
        return end.error

    def expected(self, clients: Any) -> Any:
        words = [self.setting.quantised(self.vectors[peer])[0].astype(object) for peer in clients]
        return self.setting.joined((sum(words) % 2**32).astype(np.uint32))


# -- Shares


@settings(max_examples=60, deadline=None)
@given(st.integers(0, PRIME - 1), st.integers(1, 8), st.integers(0, 6), st.randoms(use_true_random=False))
def test_any_threshold_of_shares_gives_the_secret(secret: int, t: int, more: int, draws: Any) -> None:
    shares = shares_of(secret, t, t + more, draws.randrange)
    chosen = draws.sample(range(1, t + more + 1), t)
    assert secret_of({x: shares[x - 1] for x in chosen}) == secret


@pytest.mark.parametrize(("prime", "t", "count"), [(5, 2, 4), (7, 3, 4), (5, 3, 3)])
def test_fewer_shares_say_nothing(prime: int, t: int, count: int) -> None:
    """Of all polynomials: what t - 1 shares show comes equally often, whatever the secret."""
    for where in itertools.combinations(range(count), t - 1):
        for secret in range(prime):
            seen: Counter[tuple[int, ...]] = Counter()
            for coefficients in itertools.product(range(prime), repeat=t - 1):
                left = iter(coefficients)
                shares = shares_of(secret, t, count, lambda _, left=left: next(left), prime)  # type: ignore[misc]
                seen[tuple(shares[x] for x in where)] += 1
            assert len(seen) == prime ** (t - 1) and set(seen.values()) == {1}


def test_the_field_is_a_prime_above_all_keys() -> None:
    assert PRIME > 1 << 256
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin's
        odd, twos = PRIME - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        powers = [pow(base, odd << k, PRIME) for k in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers


def test_forged_shares_are_found_and_named() -> None:
    shares = dict(enumerate(shares_of(12345, 3, 6, lambda prime: 77777), 1))
    forged = shares | {2: 1, 5: shares[5] + 1}
    assert genuine_secret(forged, 3, lambda secret: secret == 12345) == (12345, [2, 5])
    assert genuine_secret({x: forged[x] for x in (1, 2, 3)}, 3, lambda secret: secret == 12345) is None


def test_shares_that_cannot_be_are_refused() -> None:
    for secret, t, count, prime in ((7, 1, 2, 7), (1, 3, 2, 7), (1, 1, 7, 7), (1, 0, 2, 7), (-1, 1, 1, 7)):
        with pytest.raises(ValueError, match="suffice, in a field of 7"):
            shares_of(secret, t, count, lambda prime: 0, prime)


# -- Values and masks


@settings(max_examples=60, deadline=None)
@given(
    st.integers(3, 64),
    st.floats(1e-6, 1e6),
    st.lists(st.floats(-2e6, 2e6, width=32), min_size=3, max_size=3),
)
def test_quantised_values_are_as_near_as_is_said(n: int, clip: float, drawn: list[float]) -> None:
    setting = SecureSetting(n, 3, clip, n - 1, n - 1, 2)
    values = np.array(drawn, np.float32)
    words, beyond = setting.quantised(values)
    limit = np.float32(clip)
    clipped = np.clip(values, -limit, limit).astype(np.float64)
    assert beyond == np.count_nonzero(np.abs(values) > limit)
    back = words[:3].view(np.int32) / setting.scale
    assert np.abs(back - clipped).max() <= setting.error / n
    assert n * np.abs(words.view(np.int32).astype(np.int64)).max() < 2**31, "n of them do not overflow"
    assert not words[3:].any() and len(words) == 4 + CHECKS


def test_values_that_are_not_finite_are_not_sent() -> None:
    setting = setting_of(length=3)
    for odd in (np.nan, np.inf, -np.inf):
        with pytest.raises(NotFinite, match="value 1 of a vector"):
            setting.quantised(np.array([0, odd, 1], np.float32))
    with pytest.raises(ValueError, match=r"it takes float32 \[3\]"):
        setting.quantised(np.zeros(4, np.float32))


def test_masks_cancel_and_differ_by_key() -> None:
    keys = [stream("a")(32), stream("b")(32)]
    total = np.arange(200_000, dtype=np.uint32)
    add_masks(total, [(keys[0], 1), (keys[1], -1)])
    assert np.count_nonzero(total == np.arange(200_000)) < 5
    blocks = total[: 1 << 16] - total[1 << 16 : 1 << 17]
    assert len(np.unique(blocks)) > 60_000, "each block has its own part of the stream"
    add_masks(total, [(keys[1], 1), (keys[0], -1)])
    np.testing.assert_array_equal(total, np.arange(200_000))


@pytest.mark.parametrize("first", [0, 4, 1000, (1 << 16) + 8])
def test_a_part_of_a_mask_is_that_of_the_whole(first: int) -> None:
    """So no word of a mask is used twice, however a vector is cut."""
    masks = [(stream("a")(32), 1), (stream("b")(32), -1)]
    whole, part = np.zeros(200_000, np.uint32), np.zeros(1000, np.uint32)
    add_masks(whole, masks)
    add_masks(part, masks, first)
    np.testing.assert_array_equal(part, whole[first : first + 1000])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 16))
def test_a_vector_is_cut_into_blocks_with_zeros_behind_each(length: int, blocks: int) -> None:
    setting = setting_of(length=length, blocks=blocks)
    steps = np.arange(1, length + 1, dtype=np.int32)
    words = setting.blocked(steps)
    np.testing.assert_array_equal(setting.joined(words), steps.astype(np.uint32))
    rows = words.reshape(blocks, setting.stride)
    assert setting.stride % 4 == 0 and words.sum() == steps.sum()
    assert not rows[:, -CHECKS:].any() and not any(map(setting.masks_left, rows))
    rows[-1, -1] = 1
    assert setting.masks_left(rows[-1])


# -- Neighbours


@pytest.mark.parametrize("n", [3, 4, 9, 16, 33])
def test_neighbours_have_each_other(n: int) -> None:
    for degree in {2, min(6, 2 * ((n - 1) // 2)), n - 1}:
        setting = SecureSetting(n, 1, 1.0, degree, degree, 2, seed=n)
        near = [setting.neighbours(peer) for peer in range(n)]
        assert all(len(set(some)) == degree and peer not in some for peer, some in enumerate(near))
        assert all(peer in near[other] for peer in range(n) for other in near[peer])
        assert setting.hangs_together(range(n))


def test_a_ring_is_drawn_from_seed_and_round() -> None:
    rings = [
        tuple(map(tuple, map(SecureSetting(30, 1, 1.0, 4, 3, 2, seed, r).neighbours, range(30))))
        for seed, r in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert rings[0] == rings[1] and len(set(rings)) == 3


def test_a_ring_with_two_gaps_falls_apart() -> None:
    setting = SecureSetting(12, 1, 1.0, 4, 3, 2)
    ring = setting._ring
    assert setting.hangs_together(set(ring) - {ring[0], ring[1]})
    assert setting.hangs_together(set(ring) - {ring[0], ring[1], ring[6]})
    assert not setting.hangs_together(set(ring) - {ring[0], ring[1], ring[6], ring[7]})


def test_a_ring_grows_with_the_logarithm() -> None:
    sizes = [ring_for(n, n // 10, n // 10)[0] for n in (100, 400, 1600)]
    assert sizes == [32, 76, 102]
    for n, drops, colluders in ((16, 4, 1), (64, 16, 6), (1000, 100, 100)):
        degree, threshold = ring_for(n, drops, colluders)
        assert degree < 2 * threshold <= 2 * degree
    assert ring_for(16, 4) == (10, 6), "whichever 4 drop out, 6 of 10 are left"


@pytest.mark.parametrize(("n", "marked"), [(12, 2), (13, 3)])
def test_chances_are_bounds_of_what_all_sets_do(n: int, marked: int) -> None:
    """All sets of peers that drop out, or collude: how often some client has too few or too many near it."""
    for chance in (0.02, 0.2, 0.6):
        degree, threshold = ring_for(n, marked, marked, fails=chance, opens=chance)
        setting = SecureSetting(n, 1, 1.0, degree, threshold, 2, seed=3)
        sets = [set(some) for some in itertools.combinations(range(n), marked)]
        counts = [max(len(some.intersection(setting.neighbours(peer))) for peer in range(n)) for some in sets]
        lacking = sum(count > degree - threshold for count in counts)
        both = sum(2 * threshold - count <= degree for count in counts)
        apart = sum(not setting.hangs_together(set(range(n)) - some) for some in sets)
        assert max(lacking, both, apart) <= chance * len(sets)


def test_a_ring_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="allow fewer"):
        ring_for(16, 9)
    with pytest.raises(ValueError, match="takes 3 clients"):
        ring_for(2, 0)
    for odd in (
        {"degree": 5},
        {"threshold": 5},
        {"survivors_min": 1},
        {"clip": 0.0},
        {"length": 0},
        {"n": 2},
    ):
        with pytest.raises(ValueError, match=r"neighbours|clipped|sum of"):
            SecureSetting(
                **(
                    {"n": 16, "length": 3, "clip": 1.0, "degree": 10, "threshold": 6, "survivors_min": 12}
                    | odd
                )
            )  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", [2.0**-64, 2.0**64])
def test_values_may_be_clipped_to_any_size_that_there_is_room_for(clip: float) -> None:
    assert replace(setting_of(), clip=clip).clip == clip
    with pytest.raises(ValueError, match="clip"):
        replace(setting_of(), clip=clip / 2 if clip < 1 else 2 * clip)


def test_keys_are_of_one_round_and_one_pair() -> None:
    """A pair's masks are the same from both sides; what it seals has a key of its own for each direction."""
    one, other = (KeyPair(stream("pair", peer)(32)) for peer in range(2))
    now = setting_of()
    keys = [
        key
        for setting in (now, setting_of(round=1))
        for key in (
            *(setting.mask_key(one, other.public, 0, peer) for peer in (1, 2)),
            *(setting.sealing_key(one, other.public, *pair) for pair in ((0, 1), (1, 0), (0, 2))),
            setting.seed_key(bytes(32)),
        )
    ]
    assert len(set(keys)) == len(keys) == 12
    all_versions = "bec823abec6299ce341f9e017262e0cbdf05e10e360583e4f0be823cc47fba40"
    assert hashlib.sha256(b"".join(keys)).hexdigest() == all_versions
    assert now.mask_key(one, other.public, 0, 1) == now.mask_key(other, one.public, 1, 0)
    assert now.sealing_key(one, other.public, 0, 1) == now.sealing_key(other, one.public, 0, 1)


# -- Rounds


def test_a_whole_crew_s_sum_is_exact_and_all_have_it() -> None:
    crew = Crew(setting_of())
    assert crew.sum.clients == tuple(range(N))
    np.testing.assert_array_equal(crew.sum.total, crew.expected(range(N)))
    for peer in range(N):
        end = crew.ends[peer]
        assert isinstance(end, Summed) and end.clients == crew.sum.clients
        np.testing.assert_array_equal(end.total, crew.sum.total)
    exact = np.sum(np.array(crew.vectors, np.float64), 0)
    assert np.abs(crew.setting.values(crew.sum.total) - exact).max() < crew.setting.error + 1e-5
    assert set(crew.end_s.values()) == {0.0} and crew.aggregator.refused == 0


def test_bytes_are_those_of_the_formula() -> None:
    crew = Crew(setting_of())
    assert crew.sent["up"] == crew.setting.upload_bytes()
    assert crew.sent["down"] == crew.setting.download_bytes()


@pytest.mark.parametrize("told", [False, True], ids=["silent", "known to be gone"])
@pytest.mark.parametrize("stage", UPLOADED)
def test_four_of_sixteen_may_drop_at_any_stage(stage: SecureStage, told: bool) -> None:
    for gone in ((0, 1, 2, 3), (3, 7, 11, 15)):
        crew = Crew(setting_of(), dict.fromkeys(gone, stage), told=told)
        inside = [peer for peer in range(N) if peer not in gone or stage == SecureStage.UNMASK]
        assert crew.sum.clients == tuple(inside)
        np.testing.assert_array_equal(crew.sum.total, crew.expected(inside))


def test_one_may_drop_at_each_stage() -> None:
    crew = Crew(
        setting_of(),
        {1: SecureStage.KEYS, 4: SecureStage.SHARES, 9: SecureStage.MASKED, 12: SecureStage.UNMASK},
    )
    inside = [peer for peer in range(N) if peer not in (1, 4, 9)]
    np.testing.assert_array_equal(crew.sum.total, crew.expected(inside))


@pytest.mark.parametrize("stage", UPLOADED)
def test_below_the_threshold_there_is_an_error_and_no_sum(stage: SecureStage) -> None:
    crew = Crew(setting_of(), dict.fromkeys(range(12) if stage == SecureStage.UNMASK else range(5), stage))
    assert crew.error.stage == stage
    assert ("stays masked" if stage == SecureStage.UNMASK else "11 of 16 clients are left") in str(crew.error)
    assert not any(isinstance(end, Summed) for end in crew.ends.values())
    alive = crew.ends[15]
    assert isinstance(alive, Unsummed) and "secure aggregation" in str(alive.error)


def test_too_few_shares_leave_the_sum_masked() -> None:
    crew = Crew(setting_of(), dict.fromkeys(range(12), SecureStage.UNMASK))
    sums = [crew.aggregator._sums[block][1] for block in range(BLOCKS)]
    shown = crew.setting.joined(np.concatenate(sums))
    assert shown.shape == crew.expected(range(N)).shape
    for size in range(1, N + 1):
        assert not np.array_equal(shown, crew.expected(range(size)))


def test_an_aggregator_that_ends_leaves_nobody_waiting() -> None:
    crew = Crew(
        setting_of(),
        change=lambda m: [] if isinstance(m, Download) and m.stage == SecureStage.MASKED else [m],
    )
    for peer in range(N):
        end = crew.ends[peer]
        assert isinstance(end, Unsummed)


# -- Blocks


def lost(drop: Callable[[Message], bool]) -> Callable[[Message], list[Message]]:
    return lambda message: [] if drop(message) else [message]


@pytest.mark.parametrize("blocks", [1, 3, N])
@pytest.mark.parametrize("stage", [*UPLOADED, SecureStage.BLOCKS])
def test_owners_that_drop_out_cost_no_block(stage: SecureStage, blocks: int) -> None:
    gone = (1, 2, 9, 15)
    crew = Crew(setting_of(blocks=blocks), dict.fromkeys(gone, stage))
    inside = [peer for peer in range(N) if peer not in gone or stage >= SecureStage.UNMASK]
    assert crew.sum.clients == tuple(inside)
    np.testing.assert_array_equal(crew.sum.total, crew.expected(inside))
    alive = crew.ends[3]
    assert isinstance(alive, Summed)
    np.testing.assert_array_equal(alive.total, crew.sum.total)
    for owner, block in crew.openers:
        late = stage >= SecureStage.UNMASK and block in gone
        assert owner == (0 if late else crew.aggregator._owners[block])


def test_a_client_that_dies_while_it_sends_parts_is_in_no_block() -> None:
    """Its parts came to owners 0 to 8 only. Owner 2 is silent later, so the aggregator's sum is used."""
    setting = setting_of(blocks=N)
    change = lost(lambda m: isinstance(m, Part) and m.client == 13 and m.block > 8)
    crew = Crew(setting, {5: SecureStage.MASKED, 2: SecureStage.UNMASK}, change)
    inside = [peer for peer in range(N) if peer not in (5, 13)]
    assert crew.sum.clients == tuple(inside)
    np.testing.assert_array_equal(crew.sum.total, crew.expected(inside))


def test_an_owner_with_a_bad_line_loses_its_block_and_no_client_its_place() -> None:
    """Owner 6 gets nothing of clients 1 and 2; another one that fetches their parts does."""
    crew = Crew(setting_of(blocks=N), deaf=[(1, 6), (2, 6)])
    assert crew.sum.clients == tuple(range(N))
    np.testing.assert_array_equal(crew.sum.total, crew.expected(range(N)))
    assert crew.aggregator._owners[6] != 6


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whoever_drops_out_and_whichever_parts_are_lost_a_sum_is_exact(data: Any) -> None:
    """Up to two drop out, each at some stage, and some parts of two others reach no owner."""
    n, blocks = 9, data.draw(st.sampled_from([1, 2, 9]))
    setting = setting_of(n, 9, 3, blocks=blocks)
    stages = st.sampled_from([*UPLOADED, SecureStage.BLOCKS])
    drops = {peer: data.draw(stages) for peer in data.draw(st.sets(st.integers(1, n - 1), max_size=2))}
    missing = data.draw(
        st.sets(st.tuples(st.sampled_from([2, 5]), st.integers(0, blocks - 1)), max_size=blocks)
    )
    crew = Crew(
        setting,
        drops,
        lost(lambda m: isinstance(m, Part) and (m.client, m.block) in missing),
        told=data.draw(st.booleans()),
    )
    end = crew.ends[-1]
    if isinstance(end, Unsummed):
        assert len(drops.keys() | {client for client, _ in missing}) > 3, end
        return
    assert set(range(n)) - set(end.clients) <= drops.keys() | {client for client, _ in missing}
    np.testing.assert_array_equal(end.total, crew.expected(end.clients))
    for peer in range(n):
        one = crew.ends[peer]
        if isinstance(one, Summed):
            np.testing.assert_array_equal(one.total, end.total)


def test_a_block_is_taken_of_its_owner_alone() -> None:
    setting = setting_of()
    forged = np.zeros(setting.stride, np.uint32)
    sent: set[int] = set()

    def change(message: Message) -> list[Message]:
        if isinstance(message, Unmasked) and not sent:
            sent.add(1)
            return [Unmasked(11, message.block, forged.data.cast("B")), message]
        return [message]

    crew = Crew(setting, change=change)
    for end in crew.ends.values():
        assert isinstance(end, Summed)
        np.testing.assert_array_equal(end.total, crew.expected(range(N)))


@pytest.mark.parametrize(("stage", "block"), [(SecureStage.KEYS, 0), (SecureStage.BLOCKS, BLOCKS)])
def test_a_block_before_its_time_or_that_there_is_not_is_ignored(stage: SecureStage, block: int) -> None:
    setting, sent = setting_of(), set[int]()
    (sender, *_) = set(range(N)) - set(setting.owners_among(range(N)))

    def change(message: Message) -> list[Message]:
        early = isinstance(message, Upload if stage == SecureStage.KEYS else Unmasked)
        if early and not sent:
            sent.add(1)
            return [Unmasked(sender, block, bytes(4 * setting.stride)), message]
        return [message]

    crew = Crew(setting, change=change)
    assert sent
    for end in crew.ends.values():
        assert isinstance(end, Summed)
        np.testing.assert_array_equal(end.total, crew.expected(range(N)))


def test_an_owner_that_sums_other_clients_than_it_says_is_seen() -> None:
    """It leaves a client out, so the masks of that one's neighbours are left in its block."""
    setting = setting_of()

    def change(message: Message) -> list[Message]:
        if isinstance(message, Part) and (message.client, message.block) == (7, 2):
            return [Part(7, 2, bytes(4 * setting.stride))]
        return [message]

    crew = Crew(setting, change=change)
    assert "masks do not cancel" in str(crew.error)
    assert all(isinstance(end, Unsummed) for end in crew.ends.values())


# -- How long it waits


def taught(waits: SecureWaits, what: str, took_s: float = 0.02) -> None:
    for _ in range(secagg._FEW):
        waits.whole(what, took_s)


def test_a_later_round_waits_as_long_as_stages_took() -> None:
    """A round in which messages take .01 s each way teaches that; then 4 drop out, and cost little."""
    waits = [SecureWaits(DEADLINE_S) for _ in range(N + 1)]
    for one in waits:
        for stage in SecureStage:
            taught(one, stage.name)
        taught(one, "parts")
    for stage in UPLOADED:
        crew = Crew(setting_of(), dict.fromkeys((3, 7, 8, 12), stage), waits=waits)
        assert isinstance(crew.ends[-1], Summed)
        assert 0 < crew.end_s[-1] < 0.5, "far below the deadline of the first round"
    first = Crew(setting_of(), dict.fromkeys((3, 7, 8, 12), SecureStage.KEYS))
    assert first.end_s[-1] == DEADLINE_S


@pytest.mark.parametrize("stage", UPLOADED)
def test_where_too_few_are_left_it_waits_longer(stage: SecureStage) -> None:
    waits = [SecureWaits(DEADLINE_S) for _ in range(N + 1)]
    for one in waits:
        for name in (*(each.name for each in SecureStage), "parts"):
            taught(one, name)
    crew = Crew(setting_of(), dict.fromkeys(range(1, 6), stage), waits=waits)
    assert crew.end_s[-1] >= DEADLINE_S
    if stage != SecureStage.UNMASK:
        assert "11 of 16 clients are left" in str(crew.error)


ROUNDED_S = next(s for s in (k / 10 for k in range(1, 1000)) if (s + DEADLINE_S) - s < DEADLINE_S)
"""A time which, taken off its deadline, leaves less than was added."""


def test_a_stage_ends_at_its_deadline_however_times_are_rounded() -> None:
    aggregator = SecureAggregator(setting_of(), SecureWaits(DEADLINE_S))
    (armed,) = aggregator.step(ROUNDED_S, Start())
    assert isinstance(armed, Arm)
    *_, end = aggregator.step(armed.at_s, Expired(armed.timer))
    assert isinstance(end, Unsummed)


def test_an_owner_waits_no_longer_than_its_deadline_however_times_are_rounded() -> None:
    told, setting = Crew(setting_of()).told_to[0], setting_of()
    client = SecureClient(setting, 0, vectors_of(setting)[0], stream("keys"), SecureWaits(DEADLINE_S))
    armed = [
        effect
        for event in (Start(), *told[:2])
        for effect in client.step(ROUNDED_S, event)
        if isinstance(effect, Arm) and effect.timer == client._parts_timer()
    ]
    effects = client.step(armed[-1].at_s, Expired(armed[-1].timer))
    assert effects and all(isinstance(effect, Upload) for effect in effects)


def test_waits_follow_what_was_seen() -> None:
    waits = SecureWaits(10.0)
    assert waits.budget_s("KEYS") == 10.0
    waits.missed("KEYS")
    waits.late("KEYS", 3.0)
    assert waits.budget_s("KEYS") == 10.0, "there is no history"
    waits.whole("KEYS", 1.0)
    assert waits.budget_s("KEYS") == 10.0, "once says little of how far apart peers call"
    for budget_s in (8.0, 4.0):
        waits.whole("SHARES", 1.0)
        assert waits.budget_s("SHARES") == pytest.approx(budget_s), "twice says more than once"
    taught(waits, "KEYS", 1.0)
    once = waits.budget_s("KEYS")
    assert 1.0 < once < 3.0 and waits.budget_s("UNMASK") == 10.0
    waits.missed("KEYS")
    assert waits.budget_s("KEYS") > once
    waits.whole("KEYS", 100.0)
    assert waits.budget_s("KEYS") == 10.0, "never more than the most"
    waits = SecureWaits(10.0)
    taught(waits, "KEYS", 0.0)
    waits.floor_s = 0.25
    assert waits.budget_s("KEYS") >= 0.25


def test_an_upload_that_comes_late_lengthens_the_next_rounds_stage() -> None:
    setting, waits = setting_of(), SecureWaits(DEADLINE_S)
    taught(waits, "KEYS", 1.0)
    before = waits.budget_s("KEYS")
    aggregator = SecureAggregator(setting, waits)
    aggregator.step(0.0, Start())
    body = bytes(range(96))
    for peer in range(N - 1):
        aggregator.step(0.5, Upload(peer, SecureStage.KEYS, body))
    assert aggregator.step(before, Expired(aggregator._timer()))
    assert aggregator.stage == SecureStage.SHARES
    aggregator.step(2 * before, Upload(N - 1, SecureStage.KEYS, body))
    aggregator.step(2 * before, Upload(N - 1, SecureStage.KEYS, body))
    assert aggregator.refused == 2
    late = waits.budget_s("KEYS")
    again = SecureWaits(DEADLINE_S)
    taught(again, "KEYS", 1.0)
    again.missed("KEYS")
    assert late > again.budget_s("KEYS")


# -- What the aggregator sees


def test_what_the_aggregator_sees_of_a_vector_is_uniform() -> None:
    """Pearson's chi-square of bytes: what owners get of each client, and sums that the aggregator gets.

    256 classes: 255 with a deviation of 22.6.
    """
    setting = setting_of(length=20_000)
    crew = Crew(setting)
    sums = [m.body[-4 * setting.stride :] for m in crew.seen if m.stage == SecureStage.MASKED]
    assert len(sums) == BLOCKS and len(crew.parts) == N * BLOCKS
    for body in [*sums, *(part.body for part in crew.parts.values())]:
        counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256)
        chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)
    plain = setting.quantised(crew.vectors[0])[0]
    counts = np.bincount(plain.view(np.uint8), minlength=256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() > 1000, "the test would see it"


# -- Never both


def test_a_client_never_gives_both_secrets_of_a_neighbour() -> None:
    """An aggregator asks again with other survivors: the second question has no answer."""
    setting = setting_of()
    asked: list[Download] = []

    def change(message: Message) -> list[Message]:
        if isinstance(message, Download) and message.stage == SecureStage.MASKED:
            asked.append(message)
            others = [peer for peer in range(N) if peer == message.client or peer % 5]
            return [message, survivors(setting, message.client, others)]
        return [message]

    crew = Crew(setting, change=change)
    answers = Counter(m.client for m in crew.seen if m.stage == SecureStage.UNMASK)
    assert set(answers.values()) == {1} and len(answers) == N
    kinds = {
        m.body[at]
        for m in crew.seen
        if m.stage == SecureStage.UNMASK
        for at in range(0, len(m.body), secagg.REVEALED_BYTES)
    }
    assert kinds == {secagg._SEED}


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_whatever_the_aggregator_says_a_client_reveals_once(data: Any) -> None:
    """True answers, and questions about other survivors, in any order and number."""
    setting = setting_of(8, 5, 2)
    crew = Crew(setting)
    client = SecureClient(setting, 0, crew.vectors[0], stream("keys"), SecureWaits(DEADLINE_S))
    told = [message for message in crew.told_to[0] if message.stage != SecureStage.UNMASK]
    bits = data.draw(st.lists(st.integers(0, 255), max_size=6))
    inside = [[peer for peer in range(8) if some >> peer & 1 or not peer] for some in bits]
    asked = [survivors(setting, 0, some, again % 3) for again, some in enumerate(inside)]
    events: list[Any] = [
        Start(),
        *told[:2],
        *data.draw(st.lists(st.sampled_from([Start(), *told, *asked]), max_size=24)),
    ]
    effects = [effect for event in events for effect in client.step(0.0, event)]
    sent = [effect for effect in effects if isinstance(effect, Upload)]
    stages = [upload.stage for upload in sent if upload.stage != SecureStage.MASKED]
    assert stages == [stage for stage in UPLOADED if stage != SecureStage.MASKED][: len(stages)]
    parts = [effect.block for effect in effects if isinstance(effect, Part)]
    assert parts in ([], list(range(BLOCKS))), "a word is masked once"


def test_two_answers_are_too_few_for_both_secrets() -> None:
    """Half of the neighbours hear that a client is in, half that it is out: no secret of it has enough."""
    setting, victim = setting_of(), 3
    near = setting.neighbours(victim)

    def change(message: Message) -> list[Message]:
        if (
            isinstance(message, Download)
            and message.stage == SecureStage.MASKED
            and message.client in near[::2]
        ):
            return [survivors(setting, message.client, set(range(N)) - {victim})]
        return [message]

    crew = Crew(setting, change=change)
    kinds = Counter()  # type: ignore[var-annotated]
    for m in crew.seen:
        if m.stage == SecureStage.UNMASK and m.client in near:
            at = setting.neighbours(m.client).index(victim) * secagg.REVEALED_BYTES
            kinds[m.body[at]] += 1
    assert kinds[secagg._SEED] == kinds[secagg._KEY] == 5 < setting.threshold
    assert "stays masked" in str(crew.error)


class TwoFaced(Crew):
    """Its aggregator, peer 0, owns the only block, and keeps the shares that it holds as a client."""

    def _step(self, who: int, event: Any) -> None:
        if who == 0 and isinstance(event, Download) and event.stage == SecureStage.MASKED:
            self.held, self.key = dict(self.clients[0]._held), self.clients[0]._key
        super()._step(who, event)

    def secret(self, owner: int, kind: int) -> bytes:
        """A client's, by the shares of that kind that came, and by the aggregator's own."""
        near = self.setting.neighbours(owner)
        shares: dict[int, int] = {}
        if 0 in near:
            own = self.held[owner][secagg.SHARE_BYTES * (kind == secagg._KEY) :]
            shares[near.index(0) + 1] = int.from_bytes(own[: secagg.SHARE_BYTES], "little")
        for m in self.seen:
            if m.stage == SecureStage.UNMASK and m.client and m.client in near:
                place = self.setting.neighbours(m.client).index(owner) * secagg.REVEALED_BYTES
                given = bytes(m.body[place : place + secagg.REVEALED_BYTES])
                if given[0] == kind:
                    shares[near.index(m.client) + 1] = int.from_bytes(given[1:], "little")
        assert len(shares) >= self.setting.threshold
        return secret_of(shares).to_bytes(32, "little")


def test_an_aggregator_that_names_different_sets_reads_a_vector() -> None:
    """The limit that the module tells of: each set has ``survivors_min``, and nobody gives both secrets."""
    setting = SecureSetting(8, LENGTH, 2.0, 6, 4, 6, seed=5)
    victim = setting.neighbours(0)[0]
    near = [peer for peer in setting.neighbours(victim) if peer]
    unheard, masked = near[-2:], near[:-2]
    rest = [peer for peer in range(1, 8) if peer != victim and peer not in masked]
    out: dict[int, list[int]] = {0: [], victim: unheard}
    out |= {peer: [other for other in masked if other != peer] for peer in masked}
    out |= {peer: [masked[at % 3], masked[(at + 1) % 3]] for at, peer in enumerate(rest)}

    def lie(message: Message) -> list[Message]:
        if not isinstance(message, Download):
            return [message]
        if message.stage == SecureStage.SHARES and message.client == victim:
            body = bytearray(message.body)
            for peer in unheard:
                at = setting.neighbours(victim).index(peer) * secagg.SEALED_BYTES
                body[at : at + secagg.SEALED_BYTES] = bytes(secagg.SEALED_BYTES)
            return [Download(victim, message.stage, bytes(body), message.within_s)]
        if message.stage == SecureStage.MASKED:
            return [survivors(setting, message.client, set(range(8)).difference(out[message.client]))]
        return [message]

    crew = TwoFaced(setting, change=lie)
    assert len([m for m in crew.seen if m.stage == SecureStage.UNMASK]) == 8, "all gave shares"
    keys = {peer: crew.secret(peer, secagg._KEY) for peer in masked} | {0: crew.key}
    public = next(bytes(m.body[32:64]) for m in crew.seen if m.client == victim)
    masks = [(setting.seed_key(crew.secret(victim, secagg._SEED)), -1)]
    masks += [
        (setting.mask_key(KeyPair(key), public, peer, victim), -1 if victim < peer else 1)
        for peer, key in keys.items()
    ]
    words = np.frombuffer(crew.parts[victim, 0].body, np.uint32).copy()
    add_masks(words, masks)
    np.testing.assert_array_equal(setting.joined(words), crew.expected([victim]))


def test_an_aggregator_that_replaces_keys_reads_a_vector_though_all_hear_of_one_set() -> None:
    """The other limit: a client that takes its keys for neighbours' gives it all shares and masks."""
    setting = SecureSetting(8, LENGTH, 2.0, 6, 4, 6, seed=5)
    victim, own = setting.neighbours(0)[0], KeyPair(bytes(range(32)))
    near = setting.neighbours(victim)

    told = b""

    def lie(message: Message) -> list[Message]:
        nonlocal told
        if isinstance(message, Upload) and (message.client, message.stage) == (victim, SecureStage.KEYS):
            told = bytes(message.body)
        if not isinstance(message, Download) or message.client != victim:
            return [message]
        if message.stage == SecureStage.KEYS:
            body = len(near) * (own.public + own.public + bytes(secagg.DIGEST_BYTES))
        elif message.stage == SecureStage.SHARES:
            keys = [setting.sealing_key(own, told[:32], peer, victim) for peer in near]
            nothing = bytes(2 * secagg.SHARE_BYTES)
            body = b"".join(AESGCM(key).encrypt(bytes(12), nothing, None) for key in keys)
            body += bytes(message.body)[len(body) :]
        else:
            return [message]
        return [Download(victim, message.stage, body, message.within_s)]

    crew = Crew(setting, change=lie)
    sealed = next(m.body for m in crew.seen if (m.client, m.stage) == (victim, SecureStage.SHARES))
    shares: dict[int, int] = {}
    for at, peer in enumerate(near):
        box = bytes(sealed[at * secagg.SEALED_BYTES : (at + 1) * secagg.SEALED_BYTES])
        plain = AESGCM(setting.sealing_key(own, told[:32], victim, peer)).decrypt(bytes(12), box, None)
        shares[at + 1] = int.from_bytes(plain[: secagg.SHARE_BYTES], "little")
    masks = [(setting.seed_key(secret_of(shares).to_bytes(32, "little")), -1)]
    masks += [(setting.mask_key(own, told[32:64], peer, victim), -1 if victim < peer else 1) for peer in near]
    words = np.frombuffer(crew.parts[victim, 0].body, np.uint32).copy()
    add_masks(words, masks)
    np.testing.assert_array_equal(setting.joined(words), crew.expected([victim]))


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ([0, 2, 3, 4], "4 clients are left, a sum is of 12 at least"),
        ([0, *range(5, N)], None),
    ],
)
def test_a_client_judges_who_is_in_the_sum(inside: list[int], why: str | None) -> None:
    def change(message: Message) -> list[Message]:
        if isinstance(message, Download) and (message.client, message.stage) == (0, SecureStage.MASKED):
            return [survivors(setting_of(), 0, inside)]
        return [message]

    crew = Crew(setting_of(), change=change)
    assert any(m.client == 0 and m.stage == SecureStage.UNMASK for m in crew.seen) == (why is None)
    if why is not None:
        end = crew.ends[0]
        assert isinstance(end, Unsummed)
        assert why in str(end.error)


@pytest.mark.parametrize("told", [False, True], ids=["silent", "known to be gone"])
def test_a_client_whose_parts_came_late_gives_no_shares_and_takes_the_sum(told: bool) -> None:
    """Who is in the sum is published to all; peer 5 drops out as well."""

    def change(message: Message) -> list[Message]:
        if isinstance(message, Part) and message.client == 3:
            return []
        if isinstance(message, Download) and (message.client, message.stage) == (4, SecureStage.MASKED):
            return [message, Download(3, message.stage, message.body, message.within_s)]
        return [message]

    crew = Crew(setting_of(), {5: SecureStage.MASKED}, change, told)
    inside = [peer for peer in range(N) if peer not in (3, 5)]
    assert not any(m.client == 3 and m.stage == SecureStage.UNMASK for m in crew.seen)
    for peer in (-1, *inside, 3):
        end = crew.ends[peer]
        assert isinstance(end, Summed) and end.clients == tuple(inside)
        np.testing.assert_array_equal(end.total, crew.expected(inside))


def test_parts_that_have_no_neighbour_between_them_get_no_shares() -> None:
    setting = SecureSetting(12, 4, 1.0, 4, 3, 4, seed=2)
    ring = setting._ring
    out = {ring[0], ring[1], ring[6], ring[7]}
    crew = Crew(setting, dict.fromkeys(out, SecureStage.MASKED))
    assert not any(m.stage == SecureStage.UNMASK for m in crew.seen)
    end = crew.ends[ring[3]]
    assert isinstance(end, Unsummed)
    assert "fall into parts" in str(end.error)


# -- Bad input


def changed(client: int, stage: SecureStage, make: Callable[[bytes], list[bytes]]) -> Callable[..., Any]:
    def change(message: Message) -> list[Message]:
        if isinstance(message, Upload) and (message.client, message.stage) == (client, stage):
            return [Upload(client, stage, body) for body in make(bytes(message.body))]
        return [message]

    return change


@pytest.mark.parametrize("stage", UPLOADED)
def test_an_upload_counts_once(stage: SecureStage) -> None:
    crew = Crew(setting_of(), change=changed(3, stage, lambda body: [body, body, body[::-1]]))
    np.testing.assert_array_equal(crew.sum.total, crew.expected(range(N)))
    assert crew.aggregator.refused == 2


@pytest.mark.parametrize("stage", UPLOADED)
def test_an_upload_of_another_length_is_a_dropout(stage: SecureStage) -> None:
    crew = Crew(setting_of(), change=changed(3, stage, lambda body: [body[:-1]]))
    inside = [peer for peer in range(N) if peer != 3 or stage == SecureStage.UNMASK]
    np.testing.assert_array_equal(crew.sum.total, crew.expected(inside))
    assert crew.aggregator.refused == 1


def test_a_forged_share_is_named_and_does_no_harm() -> None:
    def forge(body: bytes) -> list[bytes]:
        size = secagg.REVEALED_BYTES
        return [b"".join(body[at : at + 1] + b"\5" * (size - 1) for at in range(0, len(body), size))]

    crew = Crew(setting_of(), {8: SecureStage.MASKED}, changed(0, SecureStage.UNMASK, forge))
    np.testing.assert_array_equal(crew.sum.total, crew.expected(peer for peer in range(N) if peer != 8))
    assert crew.aggregator.forgers == {0}


def test_a_share_of_the_wrong_secret_is_no_share() -> None:
    def swap(body: bytes) -> list[bytes]:
        size = secagg.REVEALED_BYTES
        return [
            b"".join(bytes([3 - body[at]]) + body[at + 1 : at + size] for at in range(0, len(body), size))
        ]

    crew = Crew(setting_of(), change=changed(5, SecureStage.UNMASK, swap))
    np.testing.assert_array_equal(crew.sum.total, crew.expected(range(N)))
    assert crew.aggregator.forgers == {5}


def test_too_many_forged_shares_end_the_round() -> None:
    def forge(message: Message) -> list[Message]:
        if isinstance(message, Upload) and message.stage == SecureStage.UNMASK and message.client < 12:
            raw = bytearray(message.body)
            raw[1 :: secagg.REVEALED_BYTES] = b"\1" * (len(raw) // secagg.REVEALED_BYTES)
            raw[2 :: secagg.REVEALED_BYTES] = b"\2" * (len(raw) // secagg.REVEALED_BYTES)
            return [Upload(message.client, message.stage, bytes(raw))]
        return [message]

    crew = Crew(setting_of(), change=forge)
    assert "forged, or dealt wrongly" in str(crew.error)


def other_key(body: bytes) -> list[bytes]:
    return [body[:32] + KeyPair(b"7" * 32).public + body[64:]]


def test_masks_that_do_not_cancel_are_seen() -> None:
    """A client masks with another key than it tells."""
    crew = Crew(setting_of(), change=changed(6, SecureStage.KEYS, other_key))
    assert "masks do not cancel" in str(crew.error)


def test_a_key_that_is_not_the_one_that_was_told_is_seen() -> None:
    crew = Crew(setting_of(), {6: SecureStage.MASKED}, changed(6, SecureStage.KEYS, other_key))
    assert "shares of peer 6 do not give its key: forged, or dealt wrongly" in str(crew.error)


def test_a_key_that_gives_all_the_same_secret_is_refused() -> None:
    crew = Crew(
        setting_of(), change=changed(6, SecureStage.KEYS, lambda body: [bytes(31) + b"\1" + body[32:]])
    )
    near = crew.setting.neighbours(6)
    end = crew.ends[near[0]]
    assert isinstance(end, Unsummed)
    assert not isinstance(crew.ends[-1], Summed)


def test_shares_that_were_forged_on_their_way_are_not_used() -> None:
    """A damaged ciphertext: the neighbour it is for drops out, and the others have their sum."""
    setting = setting_of()
    to = setting.neighbours(6)[0]
    crew = Crew(
        setting, change=changed(6, SecureStage.SHARES, lambda body: [bytes([body[0] ^ 1]) + body[1:]])
    )
    end = crew.ends[to]
    assert isinstance(end, Unsummed)
    assert "peer 6's shares were forged" in str(end.error)
    np.testing.assert_array_equal(crew.sum.total, crew.expected(peer for peer in range(N) if peer != to))


@pytest.mark.parametrize("stage", UPLOADED)
@pytest.mark.parametrize("body", [b"", b"\0", b"\xff" * 2, b"\xff" * 960, b"\xff" * 820])
def test_nonsense_from_the_aggregator_ends_a_client(stage: SecureStage, body: bytes) -> None:
    def change(message: Message) -> list[Message]:
        if isinstance(message, Download) and (message.client, message.stage) == (2, stage):
            return [Download(2, stage, body, DEADLINE_S)]
        return [message]

    crew = Crew(setting_of(), change=change)
    end = crew.ends[2]
    assert isinstance(end, Unsummed)
