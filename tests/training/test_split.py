"""Each sample once an epoch while all is calm, and dead peers' shares in other hands."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

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
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import ragtag
from ragtag.protocols.crew.board import BLOB_MAX, Notices
from ragtag.training.samples.deal import BLOCKS_MAX, cut, shuffled
from ragtag.training.samples.ledger import EpochReport
from ragtag.training.samples.loader import Order, rebuilt
from ragtag.training.samples.portion import Portion
from ragtag.training.samples.shards import skewed_shards
from ragtag.training.samples.split import Split
from ragtag.training.samples.together import together as together_text
from tests.protocols.hall import Hall


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


LOOK_S = 1e-5
"""What a look at the clock takes: a test that goes by real time goes otherwise on a busy machine."""


@dataclass
class Crew:
    """Who is alive, a notice board that takes no time, and a clock that goes on as it is looked at."""

    n: int
    live: frozenset[int]
    me: int = 0
    hall: Hall | None = None
    at_s: float = 0.0

    @classmethod
    def of(cls, n: int) -> Crew:
        return cls(n, frozenset(range(n)), hall=Hall(n, latency_s=0.0))

    def as_seen_by(self, me: int) -> Seat:
        return Seat(self, me)


@dataclass
class Seat:
    """A crew as one of its peers sees it."""

    crew: Crew
    me: int

    @property
    def n(self) -> int:
        return self.crew.n

    @property
    def live(self) -> frozenset[int]:
        return self.crew.live

    def post(self, topic: int, blob: bytes) -> int:
        assert self.crew.hall is not None
        number = self.crew.hall.post(self.me, topic, blob)
        for peer in set(range(self.n)) - self.live - self.crew.hall.dead:
            self.crew.hall.leave(peer)
        self.crew.hall.run(self.crew.hall.now_s)
        return number

    def post_soon(self, topic: int, blob: bytes) -> None:
        self.post(topic, blob)

    def posts(self, topic: int) -> dict[int, bytes]:
        return {peer: posted.blob for peer, posted in self.notices(topic).posts.items()}

    may_grow = late = False

    def now_s(self) -> float:
        self.crew.at_s += LOOK_S
        return self.crew.at_s

    def pause(self, for_s: float) -> None:
        self.crew.at_s += for_s

    def notices(self, topic: int) -> Notices:
        assert self.crew.hall is not None
        return self.crew.hall.boards[self.me].notices(topic)


def splits(n: int, loader: DataLoader[int], crew: Crew | None = None, **how: object) -> list[Portion]:
    crew = crew or Crew.of(n)
    return [Portion(loader, me, crew.as_seen_by(me), seed=7, **how) for me in range(n)]  # type: ignore[arg-type]


def alone(loader: DataLoader[int], me: int = 0, n: int = 1, **how: object) -> Portion:
    return Portion(loader, me, Crew.of(n).as_seen_by(me), **how)  # type: ignore[arg-type]


def flat(batch: object) -> list[int]:
    return [int(i) for i in batch] if isinstance(batch, Iterable) else [int(batch)]  # type: ignore[call-overload]


def drawn(split: Portion) -> list[int]:
    return [i for batch in split for i in flat(batch)]


def batches_together(streams: Iterable[Iterable[object]]) -> list[list[object]]:
    """What each draws to the end of its epoch when all are equally fast; who has no more drops out."""
    left = {at: iter(stream) for at, stream in enumerate(streams)}
    got: list[list[object]] = [[] for _ in left]
    while left:
        for at, stream in list(left.items()):
            batch = next(stream, None)
            if batch is None:
                del left[at]
            else:
                got[at].append(batch)
    return got


def batches_of(peers: Iterable[Portion]) -> set[tuple[int, ...]]:
    """The batches of an epoch, whoever draws them."""
    return {tuple(flat(batch)) for part in batches_together(peers) for batch in part}


def together(streams: Iterable[Iterable[object]]) -> list[list[int]]:
    """The same, as samples."""
    return [[i for batch in part for i in flat(batch)] for part in batches_together(streams)]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_each_sample_once_an_epoch(size: int, n: int, batch: int, shuffle: bool) -> None:
    peers = splits(n, DataLoader(Numbers(size), batch_size=batch, shuffle=shuffle))
    for epoch in range(2):
        got = together(peers)
        assert sorted(i for part in got for i in part) == list(range(size))
        assert {len(peer) for peer in peers} == {ceil(ceil(size / batch) / n)}
        assert all(peer.epoch == epoch + 1 for peer in peers)
    for peer in peers:
        peer.close(0.0)
        assert peer.report is not None
        assert (peer.report.epoch, peer.report.samples, peer.report.missed, peer.report.twice) == (
            1,
            size,
            0,
            0,
        )


def test_epochs_are_shuffled_apart_and_alike_on_all_peers() -> None:
    loader = DataLoader(Numbers(50), batch_size=5, shuffle=True)
    first, again = splits(3, loader), splits(3, loader)
    epochs = [batches_of(first) for _ in range(3)]
    assert epochs[0] != epochs[1]
    for peer in again:
        peer.epoch = 2
    assert batches_of(again) == epochs[2]
    assert drawn(alone(loader, seed=8)) != drawn(alone(loader, seed=7))


def test_the_seed_decides_the_order_of_a_shard_too() -> None:
    loader, shards = DataLoader(Numbers(50), batch_size=5, shuffle=True), [list(range(10, 50))]
    one, same, other = (drawn(alone(loader, seed=seed, shards=shards)) for seed in (7, 7, 8))
    assert one == same != other
    assert sorted(one) == sorted(other) == shards[0]


def test_peers_that_split_other_data_are_told_who_they_are(caplog: pytest.LogCaptureFixture) -> None:
    crew = Crew.of(2)
    loaders = [DataLoader(Numbers(size), batch_size=2) for size in (10, 12)]
    peers = [Portion(loader, me, crew.as_seen_by(me), seed=7) for me, loader in enumerate(loaders)]
    assert [sorted(part) for part in together(peers)] == [list(range(10)), list(range(12))]
    for me in range(2):
        says = f"peer {1 - me} splits other data than peer {me} does"
        assert sum(says in record.getMessage() for record in caplog.records) == 1


def test_without_shuffling_the_order_stays() -> None:
    assert drawn(alone(DataLoader(Numbers(10), batch_size=2))) == list(range(10))
    assert batches_of(splits(2, DataLoader(Numbers(8), batch_size=2))) == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_the_loader_stays_as_it_is() -> None:
    loader = DataLoader(Numbers(23), batch_size=4, drop_last=True, collate_fn=tuple, shuffle=True)
    peers = splits(2, loader)
    batches = [batch for part in batches_together(peers) for batch in part]
    assert [len(batch) for batch in batches] == [4] * 5
    assert all(isinstance(batch, tuple) for batch in batches)
    assert [len(peer) for peer in peers] == [3, 3]
    assert peers[0].batch_size == 4
    assert peers[0].dataset is loader.dataset


def test_workers_are_kept_as_the_loader_keeps_its_own() -> None:
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=1, persistent_workers=True, prefetch_factor=3)
    rebuild = rebuilt(loader, Order(lambda _: iter([[0, 1]])))
    assert rebuild.persistent_workers and rebuild.prefetch_factor == 3 and rebuild.num_workers == 1


def test_a_script_goes_through_a_split() -> None:
    loader = DataLoader(Numbers(8), batch_size=2)
    split = Split(alone(loader))
    assert sorted(i for batch in split for i in flat(batch)) == list(range(8))
    assert split.samples == 8 and split.epoch == 1


def test_single_samples_where_the_loader_makes_no_batches() -> None:
    peers = splits(3, DataLoader(Numbers(10), batch_size=None))
    got = together(peers)
    assert sorted(i for part in got for i in part) == list(range(10))
    assert len(peers[0]) == 4


def test_workers_draw_the_same() -> None:
    loader = DataLoader(
        Numbers(20), batch_size=3, shuffle=True, num_workers=1, multiprocessing_context="fork", timeout=30
    )
    with_workers, without = (
        alone(the, n=2, seed=7) for the in (loader, DataLoader(Numbers(20), 3, shuffle=True))
    )
    got = drawn(with_workers)  # its order when the other one, who is there, draws nothing
    assert got == drawn(without)
    assert sorted(got) == list(range(20))


def test_a_subset_is_dealt_once() -> None:
    loader = DataLoader(Numbers(100), batch_size=4, sampler=SubsetRandomSampler(range(50, 70)))
    peers = splits(3, loader)
    assert sorted(i for part in together(peers) for i in part) == list(range(50, 70))


def test_survivors_take_over_what_a_dead_peer_had_not_claimed(caplog: pytest.LogCaptureFixture) -> None:
    crew = Crew.of(4)
    reports: dict[int, list[EpochReport]] = {me: [] for me in range(4)}
    loader = DataLoader(Numbers(400), batch_size=1, shuffle=True)
    peers = [Portion(loader, me, crew.as_seen_by(me), seed=7, on_epoch=reports[me].append) for me in range(4)]
    streams = [iter(peer) for peer in peers]
    counts: Counter[int] = Counter()
    for _ in range(30):
        for stream in streams:
            counts.update(flat(next(stream)))
    crew.live = frozenset({0, 1, 3})
    survivors = [peers[me] for me in sorted(crew.live)]
    rest = together(streams[me] for me in sorted(crew.live))
    counts.update(i for part in rest for i in part)
    assert max(counts.values()) == 1
    assert min(map(len, rest)) > 0
    together(survivors)  # the next epoch: in it they agree on what the first came to
    for peer in survivors:
        peer.close(0.0)
    first = [epoch[0] for epoch in reports.values() if epoch]
    assert len(first) == 3
    for report in first:
        assert (report.epoch, report.samples, report.twice) == (0, 400, 0)
        assert report.missed >= 400 - len(counts) > 0  # what it had claimed ahead
        assert report.missed == first[0].missed
    warned = [record for record in caplog.records if "of them drawn here" in record.getMessage()]
    assert len(warned) >= 3 and {record.levelname for record in warned} == {"WARNING"}, "it is told as a loss"


def test_newcomers_one_after_the_other_begin_in_the_epoch_of_the_only_member() -> None:
    """The first one has entered, and reported nothing, when the second looks for an epoch that has work."""
    crew, loader = Crew.of(3), DataLoader(Numbers(40), batch_size=2, shuffle=True)
    member = Portion(loader, 0, crew.as_seen_by(0), seed=7)
    for _ in range(3):
        drawn(member)
    passes = [iter(member)]
    begun = flat(next(passes[0]))
    newcomers = [Portion(loader, me, crew.as_seen_by(me), seed=7, late=True) for me in (1, 2)]
    rest = together([*passes, *(iter(peer) for peer in newcomers)])
    assert sorted([*begun, *(i for part in rest for i in part)]) == list(range(40))
    assert [peer.epoch for peer in (member, *newcomers)] == [4, 4, 4]


def test_shards_stay_with_their_peers_and_go_around_when_one_dies() -> None:
    crew = Crew.of(3)
    shards = [list(range(5)), list(range(5, 17)), list(range(17, 20))]
    loader = DataLoader(Numbers(20), batch_size=2, shuffle=True)
    peers = splits(3, loader, crew, shards=shards)
    first = together(peers)
    assert [sorted(part) for part in first] == shards
    assert together(peers)[1] != first[1]
    assert [len(peer) for peer in peers] == [3, 6, 2]
    crew.live = frozenset({0, 2})
    assert len(peers[0]) == 6
    together([peers[0], peers[2]])  # in this one, what the dead peer had claimed ahead is missed
    after = together([peers[0], peers[2]])
    assert sorted(after[0] + after[1]) == list(range(20))


@pytest.mark.slow
def test_a_large_crew_has_a_pool_for_every_64_peers_and_draws_each_sample_once() -> None:
    n, size = 70, 720
    crew = Crew.of(n)
    reports: dict[int, list[EpochReport]] = {me: [] for me in range(n)}
    loader = DataLoader(Numbers(size), batch_size=2, shuffle=True)
    peers = [
        Portion(loader, me, crew.as_seen_by(me), seed=7, founded=n, on_epoch=reports[me].append)  # type: ignore[arg-type]
        for me in range(n)
    ]
    first, second = together(peers), together(peers)
    for parts in (first, second):
        assert Counter(i for part in parts for i in part) == Counter(range(size))
        far = sorted(i for part in parts[64:] for i in part)
        assert len(far) == size - size * 64 // n  # six seats of seventy draw as much of it
        assert all(parts[64:])
    assert sorted(i for p in first[64:] for i in p) != sorted(i for p in second[64:] for i in p)
    for peer in peers:
        peer.close(0.0)
    for me in range(n):
        here = size * 64 // n if me < 64 else size - size * 64 // n
        assert [(r.samples, r.missed, r.twice) for r in reports[me]][:1] == [(here, 0, 0)]
    assert 5 <= len(peers[0]) <= 6 and 5 <= len(peers[69]) <= 7


def test_seats_beyond_the_first_64_share_a_pool_of_their_own() -> None:
    n, size = 66, 330
    crew = Crew(n, frozenset({64, 65}), hall=Hall(n, latency_s=0.0))
    loader = DataLoader(Numbers(size), batch_size=2, shuffle=True)
    peers = [Portion(loader, me, crew.as_seen_by(me), seed=7, founded=n) for me in (64, 65)]
    far = sorted(i for part in together(peers) for i in part)
    assert len(far) == len(set(far)) == size - size * 64 // n


@pytest.mark.slow
def test_in_a_large_crew_shards_stay_with_their_peers_too() -> None:
    n = 66
    crew = Crew.of(n)
    shards = [[2 * peer, 2 * peer + 1] for peer in range(n)]
    loader = DataLoader(Numbers(2 * n), batch_size=1, shuffle=True)
    peers = [
        Portion(loader, me, crew.as_seen_by(me), seed=7, founded=n, shards=shards)  # type: ignore[arg-type]
        for me in range(n)
    ]
    assert [sorted(part) for part in together(peers)] == shards
    crew.live = frozenset(range(n)) - {65}
    together(peers[:65])
    after = together(peers[:65])
    assert sorted(after[64]) == [128, 129, 130, 131]  # what is the dead one's is for its own district
    assert [sorted(part) for part in after[:64]] == shards[:64]


def test_who_comes_beyond_the_founders_districts_draws_what_others_draw_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crew = Crew.of(65)
    loader = DataLoader(Numbers(10), batch_size=2)
    late = Portion(loader, 64, crew.as_seen_by(64), seed=7, founded=3)  # type: ignore[arg-type]
    assert "grown beyond the seats whose pools it began with" in caplog.text
    assert sorted(drawn(late)) == list(range(10))


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


class Shuffled(Sampler[list[int]]):
    """Batches that a script shuffles by itself; it has no length."""

    def __init__(self, size: int, by: str) -> None:
        self.size, self.by = size, by

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.size))
        if self.by == "python":
            random.shuffle(order)
        else:
            order = np.random.permutation(order).tolist()  # noqa: NPY002 - as scripts do
        yield from (order[at : at + 3] for at in range(0, self.size, 3))


class Buffered(Stream):
    """A stream that shuffles as it goes."""

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        for number in range(self.n):
            held.append(number)
            if len(held) > 16:
                yield held.pop(int(torch.randint(len(held), (1,))))
        yield from held


def numbers(sampler: Sampler[int]) -> DataLoader[int]:
    return DataLoader(Numbers(100), batch_size=4, sampler=sampler)


OF_ITS_OWN: dict[str, tuple[int, Callable[[torch.Generator | None], DataLoader[int]]]] = {
    "fewer": (90, lambda draw: numbers(RandomSampler(Numbers(100), num_samples=90, generator=draw))),
    "weighted": (
        80,
        lambda draw: numbers(WeightedRandomSampler([1.0] * 100, 80, replacement=False, generator=draw)),
    ),
    "batches": (99, lambda draw: DataLoader(Numbers(100), batch_sampler=Shuffled(99, "python"))),
    "batches, numpy": (99, lambda draw: DataLoader(Numbers(100), batch_sampler=Shuffled(99, "numpy"))),
    "batches of a sampler": (
        100,
        lambda draw: DataLoader(
            Numbers(100), batch_sampler=Pairs(RandomSampler(Numbers(100), generator=draw), 2, False)
        ),
    ),
    "stream": (100, lambda draw: DataLoader(Buffered(100), batch_size=4)),
    "stream, worker": (
        100,
        lambda draw: DataLoader(
            Buffered(100), 4, num_workers=1, multiprocessing_context="fork", timeout=30, generator=draw
        ),
    ),
    "one by one": (
        500,
        lambda draw: DataLoader(
            Numbers(600), batch_size=None, sampler=RandomSampler(Numbers(600), num_samples=500)
        ),
    ),
}


def draws_here() -> tuple[float, float, list[float]]:
    """What the script would draw next, of each kind; of torch several."""
    return random.random(), np.random.random(), torch.rand(3).tolist()  # noqa: NPY002 - as scripts do


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as scripts do
    torch.manual_seed(seed)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", OF_ITS_OWN)
def test_what_a_sampler_of_its_own_draws_at_random_is_dealt_once(kind: str, own: bool) -> None:
    """Each peer draws the order by itself; scripts seed their processes as they like."""
    size, make = OF_ITS_OWN[kind]
    crew, epochs = Crew.of(2), []
    generators = [torch.Generator().manual_seed(me) if own else None for me in range(2)]
    peers = [Portion(make(generators[me]), me, crew.as_seen_by(me), seed=7) for me in range(2)]
    for _ in range(2):
        parts = []
        for me, peer in enumerate(peers):
            seed_all(me)
            expected = draws_here()
            seed_all(me)
            parts.append(drawn(peer))
            here = draws_here()
            assert here[:2] == expected[:2], "it has drawn nothing of the script's"
            assert here[2][0] in expected[2], "but, as any loader, a seed for workers"
        assert all(parts)
        assert len(set(parts[0] + parts[1])) == len(parts[0] + parts[1]) == size
        epochs.append(parts)
    assert epochs[0] != epochs[1]
    for me, generator in enumerate(generators):
        if generator is not None:
            assert torch.equal(generator.get_state(), torch.Generator().manual_seed(me).get_state())


def test_a_sampler_without_an_end_is_drawn_as_far_as_it_is_asked() -> None:
    class Endless(Sampler[int]):
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            while True:
                yield int(torch.randint(10, (1,)))

    split = iter(alone(DataLoader(Numbers(10), batch_size=2, sampler=Endless())))
    assert len([next(split) for _ in range(200)]) == 200


class Pairs(BatchSampler):
    """A batch sampler of a kind of its own."""


class BatchesOf(BatchSampler):
    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_what_does_not_fit_is_refused() -> None:
    loader = DataLoader(Numbers(10), batch_size=2)
    crew = Crew.of(2).as_seen_by(0)
    with pytest.raises(ValueError, match="peer 2 of 2"):
        Portion(loader, 2, crew)
    with pytest.raises(ValueError, match="0 shards for 2 peers"):
        Portion(loader, 0, crew, shards=[])
    with pytest.raises(ValueError, match="3 shards for 2 peers"):
        Portion(loader, 0, crew, shards=[[0], [1], [2]])
    with pytest.raises(ValueError, match="shard 1 has index 10; the data set has 10 samples"):
        Portion(loader, 0, crew, shards=[[0], [10]])
    with pytest.raises(ValueError, match="all shards are empty"):
        Portion(loader, 0, crew, shards=[[], []])
    with pytest.raises(ValueError, match="without one of its own"):
        Portion(DataLoader(Stream(3)), 0, crew, shards=[[0], [1]])
    split = DistributedSampler(Numbers(10), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="split already"):
        Portion(DataLoader(Numbers(10), sampler=split), 0, crew)


def test_a_plain_batch_sampler_is_what_a_loader_makes_itself() -> None:
    data = Numbers(30)
    for sampler, drawn_anew in ((RandomSampler(data), True), (SequentialSampler(data), False)):
        made = DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=True))
        peers = splits(2, made)
        own = splits(2, DataLoader(data, batch_size=4, shuffle=drawn_anew, drop_last=True))
        assert [len(split) for split in peers] == [len(split) for split in own]
        batches = batches_together(peers)
        assert all(len(flat(batch)) == 4 for part in batches for batch in part)
        assert batches_of(own) == {tuple(flat(batch)) for part in batches for batch in part}
        assert sum(split.samples for split in peers) == 28


def test_samples_of_a_batch_sampler_of_ones_own_are_counted() -> None:
    split = alone(DataLoader(Numbers(6), batch_sampler=[[0, 1], [2], [3, 4, 5]]))
    assert drawn(split) == [0, 1, 2, 3, 4, 5]
    assert split.samples == 6


@pytest.mark.parametrize("data", [[1, 2, 3], Numbers(3), torch.ones(3), "text"])
def test_what_is_no_loader_is_refused_with_what_to_write(data: object) -> None:
    for split in (alone, ragtag.join().split):
        with pytest.raises(
            TypeError, match=r"this is a \w+: wrap it, as crew\.split\(DataLoader\(data, batch_size="
        ):
            split(data)
    with pytest.raises(TypeError, match=r"this is a generator: give the loader itself"):
        alone(iter_ for iter_ in range(3))


def test_options_of_other_kinds_are_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"sizes is 4; write sizes=ragtag\.BatchSizes\(\)"):
        alone(DataLoader(Numbers(3)), sizes=4)
    with pytest.raises(TypeError, match="shards is a int; it is a list of each peer's list of indices"):
        alone(DataLoader(Numbers(3)), shards=4)


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
    default, first = skewed_shards(labels, 5), skewed_shards(labels, 5, 2, 0)
    assert [s.tolist() for s in default] == [s.tolist() for s in first], "the same in each version"


def test_skewed_shards_take_torch_labels_and_refuse_too_few() -> None:
    labels = torch.tensor([3, 3, -1, -1])
    assert sorted(sorted(s.tolist()) for s in skewed_shards(labels, 2, 1)) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="at least as many samples as pieces"):
        skewed_shards(labels, 3, 2)


def test_the_deal_does_not_change_between_versions() -> None:
    assert shuffled(np.arange(8), 7, "split", 0).tolist() == [1, 6, 4, 0, 2, 5, 3, 7]


def test_it_feeds_a_loop() -> None:
    inputs, targets = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    split = alone(DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    seen = [(x, y) for x, y in split]
    assert [len(y) for _, y in seen] == [2, 2, 2]
    for x, y in seen:
        assert torch.equal(x[:, 0], 2.0 * y)


# -- The cut


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 7), st.booleans(), st.booleans())
def test_the_cut_has_each_sample_once_and_whole_batches(
    lengths: list[int], batch: int, drop_last: bool, exclusive: bool
) -> None:
    n = len(lengths)
    parts = lengths if exclusive else [sum(lengths)]
    deck, starts = cut(parts, n, batch, drop_last, exclusive, name="this")
    covered = [i for start, size in zip(starts, deck.sizes, strict=True) for i in range(start, start + size)]
    assert len(covered) == sum(part // batch * batch if drop_last else part for part in parts)
    assert len(set(covered)) == len(covered)
    assert deck.arcs[0][0] == 0
    assert deck.arcs[-1][1] == len(starts)
    assert all(before[1] == after[0] for before, after in pairwise(deck.arcs))
    other, _ = cut(parts, n, batch, drop_last, exclusive, name="another")
    assert other.identity != deck.identity


def test_a_large_epoch_has_few_blocks() -> None:
    deck, _ = cut([10_000_000], 4, 3, False, False, name="")
    assert BLOCKS_MAX // 2 < len(deck.sizes) <= BLOCKS_MAX
    assert all(size % 3 == 0 for size in deck.sizes[:-1])
    assert BLOB_MAX >= 1024


# -- What batches come to together


def test_a_crew_is_told_what_its_batches_come_to_together() -> None:
    loader = DataLoader(Numbers(960), batch_size=32)
    said = together_text(splits(3, loader)[0], 3)
    assert said.startswith(
        "3 peers with batches of 32: 96 samples in a step of all; an epoch is 10 steps of each peer, where "
        "one alone takes about 30. "
    )
    assert "raise the learning rate (as for a batch 3 times as large) or train for more epochs" in said
    stream = together_text(splits(2, DataLoader(Stream(10), batch_size=4))[0], 2)
    assert "8 samples in a step of all; each peer takes a part of the steps" in stream
    of_its_own = together_text(splits(2, DataLoader(Numbers(4), batch_sampler=[[0, 1, 2], [3]]))[0], 2)
    assert of_its_own.startswith("2 peers; an epoch is 1 steps of each peer")
