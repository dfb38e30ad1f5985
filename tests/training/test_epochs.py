"""All peers of a crew are in one epoch, whoever comes late, was away or goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ragtag.core.channels import topic_of
from ragtag.protocols.crew.board import BLOB_MAX
from ragtag.training.samples.claims import Section, encode
from ragtag.training.samples.epochs import _POST, TOPIC, Epochs
from ragtag.training.samples.portion import Portion
from ragtag.training.state.tree import copy_tree
from tests.training.test_split import Crew, Numbers, Stream, drawn, flat


@dataclass
class Peer:
    """One process of a peer. log: (epoch, sample) of all that it has drawn."""

    crew: Crew
    me: int
    size: int = 40
    batch: int = 2
    shards: list[list[int]] | None = None
    round: int = -1
    late: bool = False
    splits: dict[int, Portion] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    log: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peers = self.crew.as_seen_by(self.me)
        self.epochs = Epochs(self.peers, lambda: self.splits, lambda: self.round)

    def split(self, number: int = 0) -> Portion:
        if number not in self.splits:
            loader = DataLoader(Numbers(self.size), batch_size=self.batch, shuffle=True)
            more: dict[str, Any] = {"shards": self.shards, "ordinal": number, "epochs": self.epochs}
            more["late"] = self.late
            self.splits[number] = Portion(loader, self.me, self.peers, seed=7, **more)
            self.epochs.restore(number, self.splits[number])
        return self.splits[number]

    def train(self, n: int) -> Iterator[int]:
        """The README's loop; it stops after each batch, as a round does, and at the end of each epoch."""
        for epoch in self.epochs.count(n, self.late):
            self.seen.append(epoch)
            for batch in self.split():
                self.log += [(epoch, sample) for sample in flat(batch)]
                self.round += 1
                yield epoch
        yield n

    def saved(self) -> dict[str, Any]:
        state = copy_tree(self.epochs.state_dict(), "state")
        assert isinstance(state, dict)
        return state


def alone(**how: Any) -> Peer:
    return Peer(Crew.of(1), 0, **how)


def together(*trainings: Iterator[int]) -> None:
    """All go on by a batch in turn, to the end."""
    left = list(trainings)
    while left:
        left = [training for training in left if next(training, None) is not None]


def samples(epoch: int, *peers: Peer) -> list[int]:
    return sorted(sample for peer in peers for of, sample in peer.log if of == epoch)


def test_peers_count_together() -> None:
    crew = Crew.of(3)
    peers = [Peer(crew, me) for me in range(3)]
    together(*(peer.train(4) for peer in peers))
    assert [peer.seen for peer in peers] == [[0, 1, 2, 3]] * 3
    for epoch in range(4):
        assert samples(epoch, *peers) == list(range(40))


def advanced(crew: Crew, me: int, epoch: int, n: int) -> tuple[Peer, Iterator[int]]:
    """A peer that has just begun an epoch."""
    peer = Peer(crew, me)
    training = peer.train(n)
    while next(training) < epoch:
        pass
    return peer, training


def test_a_newcomer_begins_in_the_crews_epoch() -> None:
    crew = Crew.of(2)
    member, training = advanced(crew, 0, 3, 6)
    newcomer = Peer(crew, 1, late=True)
    together(training, newcomer.train(6))
    assert newcomer.seen == [3, 4, 5]
    assert newcomer.log
    for epoch in range(6):
        assert samples(epoch, member, newcomer) == list(range(40))


def test_newcomers_of_one_instant_begin_in_the_epoch_of_the_only_member() -> None:
    """What they tell themselves, before they know, is nothing to the others."""
    crew = Crew.of(3)
    member, training = advanced(crew, 0, 3, 6)
    member.epochs.before = 1_000
    member.peers.post(TOPIC, member.epochs._post())
    newcomers = [Peer(crew, me, late=True) for me in (1, 2)]
    together(training, *(newcomer.train(6) for newcomer in newcomers))
    assert [newcomer.seen for newcomer in newcomers] == [[3, 4, 5]] * 2
    assert [newcomer.epochs.before for newcomer in newcomers] == [1_000] * 2
    for epoch in range(6):
        assert samples(epoch, member, *newcomers) == list(range(40))


@pytest.mark.parametrize("when", [0, 2])
def test_one_that_tells_a_far_epoch_ends_the_training_for_nobody(when: int) -> None:
    crew = Crew.of(4)
    peers = [Peer(crew, me) for me in range(2)]
    trainings = [peer.train(5) for peer in peers]
    while when and next(trainings[0]) < when:
        next(trainings[1])
    crew.as_seen_by(2).post(TOPIC, _POST.pack(1, 1 << 50, 1 << 50))
    newcomer = Peer(crew, 3, late=when > 0)
    together(*trainings, newcomer.train(5))
    assert [peer.seen for peer in peers] == [[0, 1, 2, 3, 4]] * 2
    assert newcomer.seen[-1] == 4 and max(peer.epochs.step for peer in (*peers, newcomer)) < 1000
    for epoch in range(5):
        assert samples(epoch, *peers, newcomer) == list(range(40))


@pytest.mark.parametrize("when", [0, 2])
def test_one_that_tells_that_far_epochs_are_over_takes_the_samples_from_nobody(when: int) -> None:
    crew = Crew.of(4)
    peers = [Peer(crew, me) for me in range(2)]
    trainings = [peer.train(5) for peer in peers]
    while when and next(trainings[0]) < when:
        next(trainings[1])
    far = 1 << 40
    made_up = Section(2, 1, 0, 0, far, far, far, 0, (), (), 0)
    identity = peers[0].split()._deck.identity
    crew.as_seen_by(2).post(topic_of("split 0"), encode(identity, [made_up], BLOB_MAX))
    newcomer = Peer(crew, 3, late=when > 0)
    together(*trainings, newcomer.train(5))
    assert [peer.seen for peer in peers] == [[0, 1, 2, 3, 4]] * 2
    assert newcomer.seen and newcomer.seen[-1] == 4
    for epoch in range(5):
        assert samples(epoch, *peers, newcomer) == list(range(40))


def test_a_newcomer_of_the_last_epoch_ends_with_the_crew() -> None:
    crew = Crew.of(2)
    member, training = advanced(crew, 0, 5, 6)
    newcomer = Peer(crew, 1, late=True)
    together(training, newcomer.train(6))
    assert newcomer.seen == [5]
    assert samples(5, member, newcomer) == list(range(40))


def test_a_newcomer_after_the_end_has_nothing_to_do() -> None:
    crew = Crew.of(2)
    member = Peer(crew, 0)
    together(member.train(6))
    newcomer = Peer(crew, 1, late=True)
    together(newcomer.train(6))
    assert newcomer.seen == []


def test_a_newcomer_that_finds_nobody_and_nothing_ends(caplog: pytest.LogCaptureFixture) -> None:
    newcomer = alone(late=True)
    together(newcomer.train(6))
    assert newcomer.seen == []
    assert "nobody is left of the crew" in caplog.text
    survivor = alone(late=True)
    survivor.epochs.load_state_dict({"epoch": 4, "before": 10, "step": 30, "splits": {}})
    together(survivor.train(6))
    assert survivor.seen == [4, 5], "it has the crew's state: it goes on"


def test_the_crew_goes_on_while_a_newcomer_is_on_its_way() -> None:
    """It is told of epoch 2, and the crew is in 3 when it draws: the last one is not begun twice."""
    crew = Crew.of(2)
    member, training = advanced(crew, 0, 2, 4)
    newcomer = Peer(crew, 1, late=True)
    epochs = newcomer.epochs.count(4, True)
    assert next(epochs) == 2
    while next(training) < 3:
        pass
    joined = [sample for batch in newcomer.split() for sample in flat(batch)]
    assert next(epochs, None) is None
    together(training)
    assert member.seen == [0, 1, 2, 3]
    assert sorted(joined + samples(3, member)) == list(range(40))


def test_a_peer_that_was_away_goes_on_where_the_crew_is() -> None:
    crew = Crew.of(2)
    peers = [Peer(crew, me) for me in range(2)]
    stays, away = (peer.train(8) for peer in peers)
    for _ in range(4):
        next(stays), next(away)
    while next(stays) < 5:  # claims of the other one keep its epochs open; nobody waits for it
        pass
    together(stays, away)
    assert peers[0].seen == list(range(8))
    assert peers[1].seen == [0, 5, 6, 7]


def test_without_splits_the_peer_that_is_ahead_counts_for_all() -> None:
    crew = Crew.of(2)
    fast, slow = (Peer(crew, me).epochs.count(4, False) for me in range(2))
    assert [next(slow), next(fast), next(fast), next(fast)] == [0, 0, 1, 2]
    assert next(slow) == 2
    assert list(fast) == [3]
    assert list(slow) == []


def test_an_empty_shard_ends_the_training_for_nobody() -> None:
    crew = Crew.of(3)
    shards = [list(range(20)), list(range(20, 40)), []]
    peers = [Peer(crew, me, shards=shards) for me in range(3)]
    together(*(peer.train(3) for peer in peers))
    assert peers[0].seen == peers[1].seen == [0, 1, 2]
    assert [len(peer.log) for peer in peers] == [60, 60, 0]


def test_nor_does_it_where_the_crew_has_made_many_rounds_before() -> None:
    crew = Crew.of(2)
    peers = [Peer(crew, me, shards=[list(range(20)), []]) for me in range(2)]
    for peer in peers:
        peer.epochs.before = 50
    training, idle = (peer.train(3) for peer in peers)
    together(training, idle)
    assert peers[0].seen == [0, 1, 2] and peers[1].epochs.epoch <= 3


def test_a_validation_split_goes_along() -> None:
    crew = Crew.of(2)
    peers = [Peer(crew, me) for me in range(2)]
    got: list[list[int]] = [[], []]

    def train(me: int) -> Iterator[int]:
        peer = peers[me]
        for batch in peer.split(1):  # a look before the first epoch, on the other split
            got[me] += flat(batch)
            yield -1
        for epoch in peer.epochs.count(3, False):
            peer.seen.append(epoch)
            for _ in peer.split(0):
                yield epoch
            for batch in peer.split(1):
                got[me] += flat(batch)
                yield epoch

    together(train(0), train(1))
    assert [peer.seen for peer in peers] == [[0, 1, 2]] * 2
    assert sorted(got[0] + got[1]) == sorted(4 * list(range(40)))


def test_a_second_pass_in_one_epoch_is_refused() -> None:
    peer = alone()
    for epoch in peer.epochs.count(2, False):
        assert len(drawn(peer.split())) == 40
        with pytest.raises(RuntimeError, match=f"gone through already in epoch {epoch}"):
            drawn(peer.split())
    assert len(drawn(peer.split())) == 40, "outside the loop it is as ever"


def test_epochs_are_counted_in_all() -> None:
    peer = alone()
    assert list(peer.epochs.count(2, False)) == [0, 1]
    assert list(peer.epochs.count(5, False)) == [2, 3, 4]
    assert list(peer.epochs.count(5, False)) == []


# -- From a checkpoint


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_checkpoint_within_an_epoch_goes_on_with_the_rest_of_it(n: int, others: int) -> None:
    crew = Crew.of(n)
    peers = [Peer(crew, me) for me in range(n)]
    trainings = [peer.train(5) for peer in peers]
    for _ in range((20 + 20 + 7) // n):
        for training in trainings:
            next(training)
    state = peers[0].saved()
    assert state["epoch"] == peers[0].seen[-1] == 2
    known = samples(2, *peers)
    crew = Crew.of(others)
    again = [Peer(crew, me) for me in range(others)]
    for peer in again:
        peer.epochs.load_state_dict(state, resumed=True)
    together(*(peer.train(5) for peer in again))
    assert [peer.seen for peer in again] == [[2, 3, 4]] * others
    rest = samples(2, *again)
    assert len(set(rest)) == len(rest)
    assert set(rest) | set(known) == set(range(40))
    assert set(rest) >= set(range(40)) - set(known)
    assert len(set(rest) & set(known)) <= (0 if n == 1 else 10), "only what one had drawn and not told"
    for epoch in (3, 4):
        assert samples(epoch, *again) == list(range(40)), "in an order that goes on"


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    peer = alone()
    for epoch in peer.epochs.count(4, False):
        assert len(drawn(peer.split())) == 40
        if epoch == 1:
            state = peer.saved()
    assert state["epoch"] == 2
    again = alone()
    again.epochs.load_state_dict(state, resumed=True)
    together(again.train(4))
    assert again.seen == [2, 3]
    assert samples(2, again) == list(range(40))
    assert peer.saved()["epoch"] == 4


def test_after_the_last_epoch_there_is_nothing_to_go_on_with() -> None:
    peer, again = alone(), alone()
    together(peer.train(2))
    again.epochs.load_state_dict(peer.saved(), resumed=True)
    together(again.train(2))
    assert again.seen == []


def test_an_epoch_that_is_broken_off_is_over() -> None:
    peer = alone()
    for epoch in peer.epochs.count(4, False):
        for _ in peer.split():
            break
        assert peer.saved()["epoch"] == epoch + 1
        if epoch == 1:
            break
    assert peer.saved()["epoch"] == 2
    assert list(peer.epochs.count(4, False)) == [2, 3]


def test_an_epoch_without_a_split_begins_anew() -> None:
    peer = alone()
    for epoch in peer.epochs.count(2, False):
        assert peer.saved()["epoch"] == epoch


def test_with_other_batches_the_epoch_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    peer = alone()
    training = peer.train(3)
    for _ in range(25):
        next(training)
    again = alone(batch=4)
    again.epochs.load_state_dict(peer.saved(), resumed=True)
    together(again.train(3))
    assert samples(1, again) == list(range(40))
    assert "epoch 1 begins anew: the samples, batch size or seed are others" in caplog.text


def test_of_a_stream_a_slow_peers_part_of_what_it_skips_is_drawn_by_nobody() -> None:
    """As ``Split`` says: it takes a third as many batches, and ends once it is through the epoch it is in."""
    crew = Crew.of(2)
    loader, peers = DataLoader(Stream(40), batch_size=2), [Peer(crew, me) for me in range(2)]
    for peer in peers:
        peer.splits[0] = Portion(loader, peer.me, peer.peers, seed=7, epochs=peer.epochs)
    fast, slow = (peer.train(3) for peer in peers)
    for _ in range(7):
        for _ in range(5):
            next(fast, None)
        next(slow, None)
    together(fast, slow)
    assert [peer.seen for peer in peers] == [[0, 1, 2], [0]]
    assert samples(0, *peers) == list(range(40))
    assert len(samples(1, *peers)) == len(samples(2, *peers)) == 20


def test_a_stream_goes_on_with_its_epoch() -> None:
    split = Portion(DataLoader(Stream(6), batch_size=2), 0, Crew.of(1).as_seen_by(0))
    assert drawn(split) == list(range(6))
    again = Portion(DataLoader(Stream(6), batch_size=2), 0, Crew.of(1).as_seen_by(0))
    again.load_state_dict(split.state_dict())
    assert again.epoch == 1


def test_a_state_lies_in_memory_whatever_device_the_script_uses() -> None:
    for data in (Stream(6), Numbers(6)):
        split = Portion(DataLoader(data, batch_size=2), 0, Crew.of(1).as_seen_by(0))
        with torch.device("meta"):
            assert split.state_dict()["used"].device.type == "cpu"


def test_a_newcomer_knows_what_was_used_before_the_crew_resumed() -> None:
    """Nobody posts it: it is in the state that a member gives."""
    first = alone()
    training = first.train(3)
    for _ in range(7):
        next(training)
    crew = Crew.of(2)
    member = Peer(crew, 0)
    member.epochs.load_state_dict(first.saved(), resumed=True)
    training = member.train(3)
    next(training), next(training)
    newcomer = Peer(crew, 1, late=True)
    newcomer.epochs.load_state_dict(member.saved())
    together(training, newcomer.train(3))
    assert samples(0, first, member, newcomer) == list(range(40))


def test_a_state_that_is_given_before_the_first_split_tells_what_was_used() -> None:
    """Scripts make their splits in the epoch that they have resumed: peers whose folders differ, and those
    that save or join before, have the donor's state by then.
    """
    first = alone()
    training = first.train(3)
    for _ in range(27):
        next(training)
    crew = Crew.of(2)
    resumed, taking = Peer(crew, 0), Peer(crew, 1)
    taking.epochs.load_state_dict({"epoch": 0, "before": 0, "step": 4, "splits": {}}, resumed=True)
    resumed.epochs.load_state_dict(first.saved(), resumed=True)
    taking.epochs.load_state_dict(resumed.saved())
    together(resumed.train(3), taking.train(3))
    assert samples(1, first, resumed, taking) == list(range(40))
    assert resumed.seen == taking.seen == [1, 2]


# -- The crew's step


def test_steps_are_the_crews_rounds_and_go_on_in_a_new_run() -> None:
    peer = alone()
    assert peer.epochs.step == 0
    training = peer.train(3)
    for _ in range(25):
        next(training)
    assert peer.epochs.step == 25
    again = alone()
    again.epochs.load_state_dict(peer.saved(), resumed=True)
    assert again.epochs.step == 25
    next(again.train(3))
    assert again.epochs.step == 26


def test_a_newcomer_has_the_crews_step() -> None:
    crew = Crew.of(2)
    member = Peer(crew, 0)
    member.epochs.load_state_dict({"epoch": 0, "before": 3, "step": 1_000, "splits": {}}, resumed=True)
    training = member.train(3)
    for _ in range(9):
        next(training)
    by_state, by_post = Peer(crew, 1, late=True, round=member.round), Peer(crew, 1, late=True)
    by_state.epochs.load_state_dict(member.saved())
    assert by_state.epochs.step == member.epochs.step == 1_009
    assert next(by_post.epochs.count(3, True)) == 0
    by_post.round = member.round
    assert by_post.epochs.step == 1_009, "where no state came"
