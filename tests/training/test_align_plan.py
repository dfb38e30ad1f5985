"""Who is to give what, by a view alone; and what can be asked of an alignment."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ragtag
from ragtag.app.crew.transport import SoloTransport
from ragtag.core.channels import channel_of
from ragtag.core.schema import SchemaMismatch
from ragtag.protocols.channel.far_rounds import CATCH_UP
from ragtag.protocols.groups.channel import Moshpit
from ragtag.schedules import BackupWorkers
from ragtag.training.align.aligner import Aligner
from ragtag.training.align.plan import Align, Pace, judge
from ragtag.training.align.rows import View
from ragtag.training.exchange.aligned import Aligning
from ragtag.training.exchange.base import layer
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.simulated import TappedCrew, run_peers

# -- Judging

VIEWS = st.integers(1, 9).flatmap(
    lambda n: st.dictionaries(
        st.integers(0, 63), st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=1, max_size=8
    )
)


@given(VIEWS, st.integers(0, 300), st.integers(0, 1000), st.sets(st.integers(0, 63)))
def test_what_most_have_counts_and_one_of_these_gives_it(
    lists: dict[int, list[int]], first: int, number: int, mute: set[int]
) -> None:
    digests = {peer: np.array(of, np.uint32) for peer, of in lists.items()}
    voters = frozenset(lists.keys() - mute)
    wanted, counts = judge(View(digests, voters), first, number)
    again = judge(View(dict(reversed(digests.items())), voters), first, number)
    assert again == (wanted, counts), "who has the same view agrees"
    for at in range(len(next(iter(lists.values())))):
        votes = Counter(of[at] for peer, of in lists.items() if peer in voters or not voters)
        if len({of[at] for of in lists.values()}) == 1:
            assert first + at not in wanted and first + at not in counts
            continue
        chosen = wanted[first + at]
        assert votes[counts[first + at]] == max(votes.values()) == chosen.votes
        assert lists[chosen.giver][at] == counts[first + at]
        assert chosen.giver in (voters or lists)


def test_of_nothing_nothing_follows() -> None:
    assert judge(View({}, frozenset()), 0, 0) == ({}, {})


def test_givers_take_turns() -> None:
    """Of four, one has something else: the others give a third each, or half as much more."""
    view = View({peer: np.full(264, peer == 2, np.uint32) for peer in range(4)}, frozenset(range(4)))
    for number in range(5):
        given_by = Counter(of.giver for of in judge(view, 0, number)[0].values())
        assert set(given_by) == {0, 1, 3} and max(given_by.values()) <= 264 / 2


def test_how_much_is_given_at_once_follows_what_arrives() -> None:
    outcome = SoloTransport(0)
    model = nn.Linear(2, 2)
    crew = CrewOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), outcome, model=model)
    whole = crew.average()
    late = type(whole)(**{name: getattr(whole, name) for name in whole.__slots__} | {"expired": True})
    came = type(whole)(
        **{name: getattr(whole, name) for name in whole.__slots__} | {"averaged": np.ones(3, np.bool_)}
    )
    pace = Pace(1000)
    seen = [pace.now]
    for rows, what in ((10, came), (256, came), (512, came), (1000, came), (900, late), (1, late)):
        pace.learn(rows, what)
        seen.append(pace.now)
    assert seen == [256, 256, 512, 1000, 1000, 500, 250]
    assert Pace(7).now == 7


# -- What can be asked for


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"align": 7}, TypeError, r"ragtag\.Align\(every=\.\.\.\), or False"),
        ({"align": None}, TypeError, "align is None"),
        ({"align": Align(), "average": "models"}, ValueError, "keep replicas together"),
        ({"align": Align(), "method": Moshpit(2)}, ValueError, "Moshpit.* averages in groups"),
        ({"name": ""}, ValueError, "name is ''; give 1 to 64 printable characters without a slash"),
        ({"name": "model/replicas"}, ValueError, "name is 'model/replicas'; give 1 to 64"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=says):
        CrewOptimizer(sgd, TappedCrew(2).transport(0), model=model, **{"average": "gradients", **options})


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"every": 0}, "align: every is 0; it must be a whole number of rounds, 1 or more"),
        ({"every": 2.5}, "align: every is 2.5"),
        ({"every": True}, "align: every is True"),
        ({"share": 0.0}, "align: share is 0.0; it is a share of the bytes, above 0, at most 1"),
        ({"share": 1.5}, "align: share is 1.5"),
        ({"share": float("nan")}, "align: share is nan"),
        ({"share": "a"}, "align: share is 'a'"),
    ],
)
def test_nonsense_is_refused(given_: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ragtag.Align(**given_)


@pytest.mark.parametrize("align", [False, Align(every=5)])
def test_peers_that_want_something_else_refuse_each_other(align: Any) -> None:
    crew = TappedCrew(2)
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    sgd = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    CrewOptimizer(sgd[0], crew.transport(0), average="gradients", model=models[0])
    with pytest.raises(SchemaMismatch, match=r"averages gradients, (never aligned|aligned every 5)"):
        CrewOptimizer(sgd[1], crew.transport(1), average="gradients", model=models[1], align=align)


def test_where_it_is_of_no_use_there_is_none() -> None:
    model = nn.Linear(2, 2)
    for options in ({}, {"method": Moshpit(2)}, {"schedule": BackupWorkers(0)}):
        crew = TappedCrew(2)
        CrewOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), crew.transport(0), model=model, **options)  # type: ignore[arg-type]
        assert set(crew.schemas) == {channel_of("model")}


def test_alone_nothing_is_compared() -> None:
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = CrewOptimizer(inner, SoloTransport(0), average="gradients", model=model, align=Align(every=1))
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert optimizer._averaged.aligned is not None
    assert (optimizer._averaged.aligned.peers, optimizer._averaged.aligned.apart) == (0, 0)


def _never(aligner: Aligner, round_: int) -> bool:
    return False


def _always(aligner: Aligner, round_: int) -> bool:
    return True


@pytest.mark.parametrize("every", [1, 2, 7, 8, 9, 15, 17, 32, 100])
def test_the_number_of_a_comparison_follows_from_the_round(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do not know of a spoilt round have the same numbers for those comparisons that they are in;
    and no number is so far ahead of the one before that it would not be believed.
    """
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = CrewOptimizer(inner, SoloTransport(0), average="gradients", model=model, align=Align(every))
    optimizer.step()
    aligning = layer(optimizer._averaged._exchange, Aligning)
    assert aligning is not None
    aligner = aligning.aligner
    calm: dict[int, int] = {}
    spoilt: dict[int, int] = {}
    for found, is_spoilt in ((calm, _never), (spoilt, _always)):
        monkeypatch.setattr(Aligner, "_is_spoilt", is_spoilt)
        found.update({r: n for r in range(8 * every) if (n := aligner._number(r)) is not None})
    assert list(calm) == [every * i - 1 for i in range(1, 9)]
    assert calm.items() <= spoilt.items()
    assert list(spoilt.values()) == list(range(1, len(spoilt) + 1)), (
        "none is left out, and none is given twice"
    )
    assert all(later - number <= CATCH_UP for number, later in itertools.pairwise(calm.values()))
    monkeypatch.setattr(aligner, "_turns", 4)
    turns = [aligner._turn(number) for number in calm.values()]
    assert sorted(turns) == [0, 0, 1, 1, 2, 2, 3, 3], "each part of a large model, in calm rounds, too"


def test_what_was_found_before_another_state_was_restored_is_forgotten() -> None:
    """Or a peer would give what it has restored for what most have."""
    crew = TappedCrew(3)

    def train(transport: Any) -> int:
        torch.manual_seed(0)
        model = nn.Linear(30, 30)
        if transport.me == 2:
            with torch.no_grad():
                model.weight.add_(1.0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = CrewOptimizer(sgd, transport, average="gradients", model=model, align=Align(every=2))
        for step in range(4):
            model(torch.full((2, 30), 0.1)).sum().backward()
            optimizer.step()
            if step == 2:
                optimizer._averaged.resume_at(3, 0)
        assert optimizer._averaged.aligned is not None
        return optimizer._averaged.aligned.given

    assert run_peers(crew, train) == [0, 0, 0]
