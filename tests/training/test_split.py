"""Each sample once an epoch while all is calm, and dead peers' shares in other hands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ragtag.training.deal import shuffled, skewed_shards, take_turns
from ragtag.training.split import Split


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@dataclass
class Crew:
    n: int
    live: frozenset[int]
    me: int = 0

    @classmethod
    def of(cls, n: int) -> Crew:
        return cls(n, frozenset(range(n)))


def splits(n: int, loader: DataLoader[int], crew: Crew | None = None, **how: object) -> list[Split]:
    return [Split(loader, me, crew or Crew.of(n), seed=7, **how) for me in range(n)]


def drawn(split: Split) -> list[int]:
    return [int(i) for batch in split for i in batch]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_each_sample_once_an_epoch(size: int, n: int, batch: int, shuffle: bool) -> None:
    peers = splits(n, DataLoader(Numbers(size), batch_size=batch, shuffle=shuffle))
    for _ in range(2):
        assert sorted(i for peer in peers for i in drawn(peer)) == list(range(size))
    for peer in peers:
        assert peer.epoch == 2
        assert len(peer) == len(list(peer))


def test_epochs_are_shuffled_apart_and_alike_on_all_peers() -> None:
    loader = DataLoader(Numbers(50), batch_size=5, shuffle=True)
    first, again = (Split(loader, 1, Crew.of(3), seed=7) for _ in range(2))
    epochs = [drawn(first) for _ in range(3)]
    assert epochs[0] != epochs[1]
    again.epoch = 2
    assert drawn(again) == epochs[2]
    assert drawn(Split(loader, 1, Crew.of(3), seed=8)) != epochs[0]


def test_without_shuffling_the_order_stays() -> None:
    assert drawn(splits(3, DataLoader(Numbers(10), batch_size=2))[1]) == [1, 4, 7]


def test_the_loader_stays_as_it_is() -> None:
    loader = DataLoader(Numbers(23), batch_size=4, drop_last=True, collate_fn=tuple, shuffle=True)
    peers = splits(2, loader)
    batches = list(peers[1])  # of its 11 samples
    assert [len(batch) for batch in batches] == [4, 4]
    assert all(isinstance(batch, tuple) for batch in batches)
    assert [len(peer) for peer in peers] == [3, 2]
    assert peers[0].batch_size == 4
    assert peers[0].dataset is loader.dataset


def test_single_samples_where_the_loader_makes_no_batches() -> None:
    peers = splits(3, DataLoader(Numbers(10), batch_size=None))
    assert [sorted(int(i) for i in peer) for peer in peers] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert len(peers[0]) == 4


def test_workers_draw_the_same() -> None:
    loader = DataLoader(
        Numbers(20), batch_size=3, shuffle=True, num_workers=1, multiprocessing_context="fork", timeout=30
    )
    with_workers, without = (
        Split(the, 0, Crew.of(2), seed=7) for the in (loader, DataLoader(Numbers(20), 3, shuffle=True))
    )
    assert drawn(with_workers) == drawn(without)


def test_a_subset_is_dealt_once() -> None:
    loader = DataLoader(Numbers(100), batch_size=4, sampler=SubsetRandomSampler(range(50, 70)))
    peers = splits(3, loader)
    assert sorted(i for peer in peers for i in drawn(peer)) == list(range(50, 70))


def test_survivors_take_over_from_the_moment_a_death_is_known() -> None:
    crew = Crew.of(4)
    peers = splits(4, DataLoader(Numbers(400), batch_size=1, shuffle=True), crew)
    streams = [iter(peer) for peer in peers]
    counts: Counter[int] = Counter()
    for _ in range(30):
        for stream in streams:
            counts.update(int(i) for i in next(stream))
    crew.live = frozenset({0, 1, 3})
    counts.update(int(i) for me in (0, 1, 3) for batch in streams[me] for i in batch)
    assert counts == Counter(range(400))
    lengths = [len(drawn(peers[me])) for me in (0, 1, 3)]  # the next epoch, with the peer dead all along
    assert sorted(lengths) == [133, 133, 134]


def test_a_peer_that_returns_draws_its_own_again() -> None:
    crew = Crew.of(2)
    peers = splits(2, DataLoader(Numbers(200), batch_size=1), crew)
    streams = [iter(peer) for peer in peers]
    mine: list[int] = []
    for step in range(100):
        crew.live = frozenset({0}) if 20 <= step < 40 else frozenset({0, 1})
        mine += [int(i) for i in next(streams[0])]
    assert mine[:20] == list(range(0, 40, 2))
    assert [i for i in mine if i % 2] == list(range(41, 61, 2))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.sets(st.integers(0, 4)), st.integers(0, 14))
def test_turns_cover_everything_whoever_is_dead_and_whenever(
    lengths: list[int], dying: set[int], at: int
) -> None:
    n = len(lengths)
    survivors = frozenset(range(n)) - dying or frozenset({0})
    asked = [0] * n
    counts: Counter[tuple[int, int]] = Counter()
    for me in survivors:

        def live(me: int = me) -> frozenset[int]:
            asked[me] += 1
            return survivors if asked[me] > at else frozenset(range(n))

        counts.update(take_turns(me, lengths, live))
    for peer in set(range(n)) - survivors:  # up to the moment of death it drew its own
        counts.update((peer, j) for j in range(min(at, lengths[peer])))
    shortest = min(lengths[me] for me in survivors)
    for peer, length in enumerate(lengths):
        for j in range(length):
            if peer in survivors or at <= shortest:
                assert counts[peer, j] == 1


def test_two_dead_peers_burden_all_survivors_alike_at_every_position() -> None:
    shares = [list(take_turns(me, [10] * 4, lambda: frozenset({1, 2}))) for me in (1, 2)]
    for at in range(10):
        assert [sum(j == at for _, j in share) for share in shares] == [2, 2]


def test_shards_stay_with_their_peers_and_go_around_when_one_dies() -> None:
    crew = Crew.of(3)
    shards = [list(range(5)), list(range(5, 17)), list(range(17, 20))]
    loader = DataLoader(Numbers(20), batch_size=2, shuffle=True)
    peers = splits(3, loader, crew, shards=shards)
    assert [sorted(drawn(peer)) for peer in peers] == shards
    assert drawn(peers[1]) != drawn(peers[1])
    assert [len(peer) for peer in peers] == [3, 6, 2]
    crew.live = frozenset({0, 2})
    after = [drawn(peers[me]) for me in (0, 2)]
    assert sorted(after[0] + after[1]) == list(range(20))
    assert [sum(5 <= i < 17 for i in part) for part in after] == [6, 6]
    assert len(peers[0]) == 6


def test_every_nth_batch_of_a_stream_and_of_a_sampler_of_its_own() -> None:
    crew = Crew.of(2)
    peers = splits(2, DataLoader(Stream(10), batch_size=2), crew)
    assert [drawn(peer) for peer in peers] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    crew.live = frozenset({1})
    assert drawn(peers[1]) == list(range(10))
    assert peers[1].epoch == 2

    crew.live = frozenset({0, 1})
    batches = BatchSampler(SequentialSampler(Numbers(10)), 3, False)
    peers = splits(2, DataLoader(Numbers(10), batch_sampler=BatchesOf(batches)), crew)
    assert [drawn(peer) for peer in peers] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9]]
    assert len(peers[0]) == 2

    weighted = WeightedRandomSampler([0.0, 1.0], 12)
    peers = splits(2, DataLoader(Numbers(2), batch_size=2, sampler=weighted), crew)
    assert [drawn(peer) for peer in peers] == [[1] * 6] * 2


class BatchesOf(BatchSampler):
    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_what_does_not_fit_is_refused() -> None:
    loader = DataLoader(Numbers(10), batch_size=2)
    crew = Crew.of(2)
    with pytest.raises(ValueError, match="peer 2 of 2"):
        Split(loader, 2, crew)
    with pytest.raises(ValueError, match="3 shards for 2 peers"):
        Split(loader, 0, crew, shards=[[0], [1], [2]])
    with pytest.raises(ValueError, match="shard 1 has index 10; the data set has 10 samples"):
        Split(loader, 0, crew, shards=[[0], [10]])
    with pytest.raises(ValueError, match="all shards are empty"):
        Split(loader, 0, crew, shards=[[], []])
    with pytest.raises(ValueError, match="without one of its own"):
        Split(DataLoader(Stream(3)), 0, crew, shards=[[0], [1]])
    split = DistributedSampler(Numbers(10), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="split already"):
        Split(DataLoader(Numbers(10), sampler=split), 0, crew)


# -- Shards skewed by label


def test_skewed_shards_have_few_classes_and_all_samples() -> None:
    labels = np.random.Generator(np.random.Philox(3)).integers(0, 10, 1000)
    shards = skewed_shards(labels, 5, classes_per_peer=2, seed=1)
    assert sorted(np.concatenate(shards).tolist()) == list(range(1000))
    assert [len(shard) for shard in shards] == [200] * 5
    for shard in shards:
        largest = sorted(Counter(labels[shard].tolist()).values(), reverse=True)
        assert sum(largest[:2]) >= 120
        assert len(largest) <= 4
    assert [s.tolist() for s in shards] == [s.tolist() for s in skewed_shards(labels, 5, 2, 1)]
    assert [s.tolist() for s in shards] != [s.tolist() for s in skewed_shards(labels, 5, 2, 2)]


def test_skewed_shards_take_torch_labels_and_refuse_too_few() -> None:
    labels = torch.tensor([3, 3, -1, -1])
    assert sorted(sorted(s.tolist()) for s in skewed_shards(labels, 2, 1)) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="at least as many samples as pieces"):
        skewed_shards(labels, 3, 2)


def test_the_deal_does_not_change_between_versions() -> None:
    assert shuffled(np.arange(8), 7, "split", 0).tolist() == [1, 6, 4, 0, 2, 5, 3, 7]


def test_it_feeds_a_loop() -> None:
    inputs, targets = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    split = Split(DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True), 1, Crew.of(2))
    seen = [(x, y) for x, y in split]
    assert [len(y) for _, y in seen] == [2, 1]
    for x, y in seen:
        assert torch.equal(x[:, 0], 2.0 * y)
