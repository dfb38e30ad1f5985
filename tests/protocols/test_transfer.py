"""The newcomer's machine: any interleaving ends, counts each chunk once, and asks nobody for too much."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.transfer.machine import Transfer
from ragtag.protocols.transfer.types import (
    BLOB_BYTES_MAX,
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    OUTSTANDING_MAX,
    Arm,
    Ask,
    Came,
    Connect,
    Drop,
    Expired,
    Fetch,
    Fetched,
    Finished,
    GaveUp,
    Lost,
    Need,
    Offer,
    Offered,
    Refused,
    Start,
    Told,
    TransferEffect,
    TransferEvent,
    chunk_bytes_for,
)
from ragtag.simulation.worlds.transfer import SimulatedDonor, TransferWorld

NAMES = ("ann", "bob", "cleo")
CHUNK = 1000
OFFER = Offer(7, 70, 1, 1, 10 * CHUNK - 1, CHUNK)


def world(givers: dict[str, SimulatedDonor], **options: object) -> TransferWorld:
    return TransferWorld(givers, total_bytes=4_000_000, chunk_bytes=65_536, **options)  # type: ignore[arg-type]


def finished(ended: Finished | GaveUp) -> Finished:
    assert isinstance(ended, Finished), ended
    return ended


# -- Any interleaving

donors = st.sampled_from(NAMES)
indices = st.integers(0, 12)
offers = st.builds(
    Offer,
    st.integers(5, 9),
    st.integers(0, 99),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([10 * CHUNK - 1, 10 * CHUNK - 1, 1, BLOB_BYTES_MAX]),
    st.sampled_from([CHUNK, CHUNK, 1]),
)
events = st.one_of(
    st.builds(Told, donors, st.integers(-1, 9), st.sampled_from([0.0, 1e-9, 0.1, 50.0])),
    st.builds(Offered, donors, st.one_of(st.just(OFFER), offers)),
    st.builds(Came, donors, indices, st.just(CHUNK), st.sampled_from([True, True, True, False])),
    st.builds(Lost, donors, st.just("lost")),
    st.builds(Refused, donors, st.just("refused")),
    st.just(Expired()),
)


class Checked:
    """Holds the machine to its rules, whatever it is told."""

    def __init__(self, deadline_s: float) -> None:
        self.machine = Transfer(NAMES, Need(1))
        self.deadline_s = deadline_s
        self.open: set[str] = set()
        self.outstanding: dict[str, list[int]] = {name: [] for name in NAMES}
        self.intact: set[int] = set()
        self.wasted_bytes = 0
        self.ended: Finished | GaveUp | None = None
        self.wakes_s: list[float] = []

    def step(self, now_s: float, event: TransferEvent) -> None:
        was_over = self.ended is not None
        if isinstance(event, Lost | Refused):
            self.open.discard(event.donor)
            self.outstanding[event.donor] = []
        elif isinstance(event, Came) and event.index in self.outstanding[event.donor]:
            self.outstanding[event.donor].remove(event.index)
            wasted = self.ended is None and (not event.intact or event.index in self.intact)
            self.wasted_bytes += event.n_bytes if wasted else 0
            if event.intact:
                self.intact.add(event.index)
        elif isinstance(event, Expired):
            self.wakes_s = [at_s for at_s in self.wakes_s if at_s > now_s]
        effects = self.machine.step(now_s, event)
        assert not (was_over and effects)
        for effect in effects:
            self._check(effect)

    def _check(self, effect: TransferEffect) -> None:
        assert self.ended is None, "something follows the end"
        if isinstance(effect, Finished | GaveUp):
            self.ended = effect
        elif isinstance(effect, Arm):
            self.wakes_s.append(effect.at_s)
        elif isinstance(effect, Connect):
            assert effect.donor not in self.open
            self.open.add(effect.donor)
        else:
            assert effect.donor in self.open
            if isinstance(effect, Drop):
                self.open.remove(effect.donor)
                self.outstanding[effect.donor] = []
            elif isinstance(effect, Fetch):
                asked = self.outstanding[effect.donor]
                assert effect.index not in asked, "asked of one donor twice"
                assert effect.index not in self.intact, "asked for what is there"
                asked.append(effect.index)
                assert len(asked) <= OUTSTANDING_MAX
                holders = sum(effect.index in theirs for theirs in self.outstanding.values())
                assert holders <= 2, "asked of too many"
            else:
                assert isinstance(effect, Ask)


@given(st.lists(st.tuples(st.floats(0, 0.3), events), max_size=80))
def test_any_interleaving_ends_by_the_deadline(played: list[tuple[float, TransferEvent]]) -> None:
    checked = Checked(10.0)
    now_s = 0.0
    checked.step(now_s, Start(10.0))
    for pause_s, event in played:
        now_s += pause_s
        if isinstance(event, Expired):
            now_s = min([now_s + 1.0, *checked.wakes_s])
        checked.step(now_s, event)
    assert checked.ended is not None or checked.wakes_s, "nothing would wake it"
    checked.step(max(now_s, 10.0), Expired())
    assert checked.ended is not None
    outcome = checked.ended.outcome
    assert outcome.came == sum(outcome.rounds.values()) <= len(checked.intact)
    assert outcome.wasted_bytes == checked.wasted_bytes
    if isinstance(checked.ended, Finished):
        assert outcome.offer is not None
        assert checked.intact >= set(range(outcome.offer.n_chunks))


givers = st.builds(
    SimulatedDonor,
    rate_bytes_per_s=st.sampled_from([1e5, 1e6, 1e7, 1e9]),
    rtt_s=st.sampled_from([1e-4, 0.01, 0.3]),
    round=st.integers(0, 3),
    round_s=st.sampled_from([0.002, 0.1, 1.0]),
    dies_s=st.one_of(st.just(math.inf), st.floats(0, 3)),
    returns_s=st.one_of(st.just(math.inf), st.floats(3, 5)),
    stalls_s=st.one_of(st.just(math.inf), st.floats(0, 3)),
    damages=st.one_of(st.just(math.inf), st.integers(0, 9)),
    silent=st.sampled_from([False, False, False, True]),
)


@given(st.lists(givers, min_size=0, max_size=4))
def test_with_one_good_donor_it_completes(others: list[SimulatedDonor]) -> None:
    crew = {"good": SimulatedDonor(rate_bytes_per_s=1e6)} | {
        f"other {i}": giver for i, giver in enumerate(others)
    }
    outcome = finished(world(crew).run(120.0)).outcome
    assert sum(outcome.given.values()) == 4_000_000
    for i, giver in enumerate(others):
        if giver.damages == 0:
            assert f"other {i}" not in outcome.given


@given(st.lists(givers, min_size=1, max_size=4))
def test_whatever_donors_do_it_ends_by_its_deadline(crew: list[SimulatedDonor]) -> None:
    ended = world({f"peer {i}": giver for i, giver in enumerate(crew)}).run(20.0)
    assert ended.outcome.took_s <= 20.0
    if isinstance(ended, GaveUp):
        assert all(f"peer {i}" in ended.reason for i in range(len(crew)))


# -- What it is made of


def test_each_donor_gives_according_to_its_speed() -> None:
    crew = {"fast": SimulatedDonor(4e6), "slow": SimulatedDonor(1e6)}
    outcome = finished(world(crew).run(60.0)).outcome
    assert 3.2 < outcome.given["fast"] / outcome.given["slow"] < 4.8
    assert outcome.took_s < 1.25 * (4e6 / 5e6 + 0.3)


def test_one_that_becomes_a_hundred_times_slower_does_not_hold_the_end_back() -> None:
    crew = {"fast": SimulatedDonor(4e6), "slow": SimulatedDonor(4e4)}
    outcome = finished(world(crew).run(600.0)).outcome
    assert outcome.took_s < 1.25 * (4e6 / 4e6 + 0.3)
    assert outcome.wasted_bytes <= OUTSTANDING_MAX * 65_536


def test_a_donor_that_stalls_is_named() -> None:
    crew = {"good": SimulatedDonor(1e6), "bad": SimulatedDonor(1e6, stalls_s=0.6)}
    outcome = finished(world(crew).run(30.0)).outcome
    assert outcome.dropped["bad"].startswith("stalled: no chunk came for")
    assert outcome.took_s < 8.0


def test_one_whose_connection_broke_is_connected_to_again_and_goes_on() -> None:
    crew = {"only": SimulatedDonor(1e6, dies_s=1.0, returns_s=1.001)}
    seen = world(crew)
    connections = []
    seen.on_step = lambda now_s, event, effects: connections.extend(
        effect for effect in effects if isinstance(effect, Connect)
    )
    outcome = finished(seen.run(60.0)).outcome
    assert len(connections) == 2
    assert outcome.given == {"only": 4_000_000}
    assert outcome.wasted_bytes == 0


def test_donors_of_the_agreed_round_suffice_others_are_not_used() -> None:
    far = SimulatedDonor(1e9, rtt_s=0.3, round_s=0.01)
    crew = {"ann": SimulatedDonor(1e6, round_s=0.01), "bob": SimulatedDonor(1e6, round_s=0.01), "far": far}
    outcome = finished(world(crew).run(60.0)).outcome
    assert len(outcome.rounds) == 1
    assert "far" not in outcome.given
    eager = finished(world(crew, need=Need(1, agreed_min=3)).run(60.0)).outcome
    assert len(eager.rounds) == 2
    assert eager.given["far"] > 0


def test_where_they_are_too_few_others_are_used_and_the_result_says_so() -> None:
    far = SimulatedDonor(1e6, rtt_s=0.3, round_s=0.01)
    crew = {
        "ann": SimulatedDonor(1e6, round_s=0.01, dies_s=1.0),
        "bob": SimulatedDonor(1e6, round_s=0.01, dies_s=1.1),
        "far": far,
    }
    outcome = finished(world(crew).run(60.0)).outcome
    assert outcome.offer is not None
    assert len(outcome.rounds) == 2
    assert sum(outcome.rounds.values()) == outcome.offer.n_chunks


def test_where_replicas_are_apart_the_one_that_most_have_is_taken() -> None:
    """Also where another one is the quickest, and where each of two has one of its own."""
    quick = SimulatedDonor(1e8, rtt_s=0.001, replica=7)
    crew = {"odd": quick, "ann": SimulatedDonor(1e6, replica=5), "bob": SimulatedDonor(1e6, replica=5)}
    outcome = finished(world(crew | {"own": SimulatedDonor(1e6, replica=6)}).run(60.0)).outcome
    assert set(outcome.given) == {"ann", "bob"} and not outcome.mixed
    assert outcome.offer is not None and outcome.offer.replica == 5


def test_chunks_of_two_replicas_are_told() -> None:
    crew = {
        "ann": SimulatedDonor(1e6, replica=5, dies_s=1.0),
        "bob": SimulatedDonor(1e6, replica=5, dies_s=1.1),
        "odd": SimulatedDonor(1e6, replica=7),
    }
    outcome = finished(world(crew).run(60.0)).outcome
    assert outcome.mixed and len(outcome.rounds) == 1 and set(outcome.given) == set(crew)


LIAR_S = 1e-3
"""How soon a donor answers that says what it likes."""


def asked_of(n_true: int, pace_s: float) -> tuple[Transfer, set[int]]:
    """A fetch of 60 s from donors of round 10 and one that tells 2**40; and the rounds asked for."""
    names = [f"true {i}" for i in range(n_true)]
    machine = Transfer([*names, "liar"], Need(1))
    machine.step(0.0, Start(60.0))
    machine.step(LIAR_S, Told("liar", 1 << 40, 1e-9))
    effects = [effect for name in names for effect in machine.step(0.01, Told(name, 10, pace_s))]
    return machine, {effect.round for effect in effects if isinstance(effect, Ask)}


@pytest.mark.parametrize("n_true", [1, 2, 3])
def test_one_that_tells_a_far_round_does_not_decide_which_is_asked_for(n_true: int) -> None:
    assert asked_of(n_true, 1.0)[1] == {11}


def fetches_from(machine: Transfer, at_s: list[float]) -> list[tuple[float, str]]:
    """When it begins to ask for chunks, and of whom, as time passes."""
    return [
        (now_s, effect.donor)
        for now_s in at_s
        for effect in machine.step(now_s, Expired())
        if isinstance(effect, Fetch)
    ]


@pytest.mark.parametrize(("pace_s", "until_s"), [(1.0, 8.02), (0.0, 30.0), (50.0, 30.0)])
def test_one_offer_waits_for_most_donors_as_long_as_their_pace_explains(
    pace_s: float, until_s: float
) -> None:
    far = Offer(1 << 40, 70, 1, 1, 10 * CHUNK, CHUNK)
    machine, _ = asked_of(3, pace_s)
    machine.step(0.02, Offered("liar", far))
    assert not fetches_from(machine, [0.1, 1.0, until_s - 0.1])
    assert fetches_from(machine, [until_s])[0] == (until_s, "liar"), "better than none"

    machine, (asked,) = asked_of(3, pace_s)
    machine.step(0.02, Offered("liar", far))
    true = Offer(asked, 70, 1, 1, 10 * CHUNK, CHUNK)
    effects = machine.step(1.0, Offered("true 0", true)) + machine.step(1.1, Offered("true 1", true))
    assert {effect.donor for effect in effects if isinstance(effect, Fetch)} == {"true 0", "true 1"}


def test_the_state_of_another_layout_is_not_mixed_in() -> None:
    crew = {"ann": SimulatedDonor(1e6), "bob": SimulatedDonor(1e6), "odd": SimulatedDonor(1e6, layout_hash=2)}
    outcome = finished(world(crew).run(60.0)).outcome
    assert set(outcome.given) == {"ann", "bob"}
    assert "another layout" in outcome.dropped["odd"]


def test_what_a_transfer_came_to_is_told_whole() -> None:
    donors = {name: SimulatedDonor(rate_bytes_per_s=1e6) for name in ("ann", "bob")}
    donors["cleo"] = SimulatedDonor(damages=0)
    outcome = finished(world(donors).run(30.0)).outcome
    assert outcome.wasted_bytes > 0
    fetched, offer = Fetched.of(outcome, bytearray(b"state")), outcome.offer
    assert offer is not None
    assert fetched == Fetched(
        bytearray(b"state"), offer.round, offer.step, outcome.rounds, outcome.mixed, outcome.given,
        outcome.dropped, outcome.wasted_bytes, outcome.took_s,
    )  # fmt: skip
    assert (sum(fetched.given.values()), fetched.rounds) == (4_000_000, {offer.round: offer.n_chunks})


def test_a_chunk_that_comes_twice_is_wasted_once() -> None:
    """Bob is slow, so Ann is asked for his chunks, too; his own come all the same."""
    machine = Transfer(("ann", "bob"), Need(1))
    asked: dict[str, list[int]] = {"ann": [], "bob": []}
    ended: list[Finished] = []

    def step(now_s: float, event: TransferEvent) -> None:
        for effect in machine.step(now_s, event):
            if isinstance(effect, Fetch):
                asked[effect.donor].append(effect.index)
            elif isinstance(effect, Finished):
                ended.append(effect)

    step(0.0, Start(100.0))
    for donor in asked:
        step(0.01, Told(donor, 7, 0.1))
    for donor in asked:
        step(0.5, Offered(donor, OFFER))
    step(0.6, Came("bob", asked["bob"][0], CHUNK, True))  # so his pace is known
    slow = asked["bob"][1:]
    now_s = 0.6
    while not set(asked["ann"]) & set(slow):
        now_s += 0.01
        step(now_s, Came("ann", asked["ann"].pop(0), CHUNK, True))
    twice = (set(asked["ann"]) & set(slow)).pop()
    for donor in ("ann", "bob"):
        step(now_s + 0.01, Came(donor, twice, CHUNK, True))
    for index in [index for donor in asked for index in asked[donor] if index != twice]:
        step(now_s + 0.02, Came("ann" if index in asked["ann"] else "bob", index, CHUNK, True))
    assert [(end.outcome.came, end.outcome.wasted_bytes) for end in ended] == [(10, CHUNK)]


def test_a_donor_s_answer_is_timed_from_when_it_was_connected_to() -> None:
    machine = Transfer(NAMES, Need(1))
    machine.step(0.0, Start(10.0))
    machine.step(1.0, Lost("ann", "lost"))
    connects = [at_s for at_s in (2.0, 3.0, 4.0) if Connect("ann") in machine.step(at_s, Expired())]
    machine.step(connects[0] + 0.25, Told("ann", 5, 0.1))
    assert machine._donors["ann"].answer_s == pytest.approx(0.25)


def test_a_transfer_is_timed_from_its_start() -> None:
    machine = Transfer(NAMES, Need(1))
    machine.step(5.0, Start(10.0))
    (ended,) = [effect for effect in machine.step(10.0, Expired()) if isinstance(effect, GaveUp)]
    assert ended.outcome.took_s == 5.0


def test_a_standstill_is_told() -> None:
    ended = world({"ann": SimulatedDonor(round_s=1e6)}).run(5.0)
    assert isinstance(ended, GaveUp)
    assert "is it still training?" in ended.reason


def test_a_state_that_is_too_large_is_refused() -> None:
    ended = world({"ann": SimulatedDonor()}, need=Need(1, blob_bytes_max=1_000_000)).run(5.0)
    assert isinstance(ended, GaveUp)
    assert "at most 1000000 are taken" in ended.reason


@pytest.mark.parametrize("names", [(), ("ann", "ann")])
def test_donors_are_named_once(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="name each once"):
        Transfer(names, Need(1))


@given(st.integers(1, BLOB_BYTES_MAX))
def test_any_blob_is_cut_into_chunks_within_the_limits(total_bytes: int) -> None:
    chunk_bytes = chunk_bytes_for(total_bytes)
    offer = Offer(0, 0, 0, 0, total_bytes, chunk_bytes)
    assert chunk_bytes <= CHUNK_BYTES_MAX
    assert offer.n_chunks <= CHUNKS_MAX
    assert offer.span(0)[0] == 0
    assert offer.span(offer.n_chunks - 1)[1] == total_bytes
