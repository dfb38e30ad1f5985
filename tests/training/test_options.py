"""What a crew's optimizer can be asked for, and errors that say what to write in place of what it cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import ragtag
from ragtag.app.crew.crew import Crew
from ragtag.codecs.dense import DENSE
from ragtag.core.names import named
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.channel.averagers import AVERAGERS
from ragtag.schedules import (
    DSSP,
    SSP,
    Asynchronous,
    BackupWorkers,
    DropCompute,
    EveryStep,
    LocalSteps,
    Matched,
    Partial,
    ProgressiveGrouping,
    SoftSync,
)
from ragtag.schedules.names import SCHEDULES
from ragtag.training.exchange.asked import averaging_of
from ragtag.training.exchange.central import Centre, is_centred
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.simulated import TappedCrew

MODEL = nn.Linear(30, 30)


def asked(**options: Any) -> CrewOptimizer:
    """An optimizer of a crew of two that is given these options."""
    inner = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    return CrewOptimizer(inner, TappedCrew(2).transport(0), **{"model": MODEL, **options})


# -- By name


@pytest.mark.parametrize(
    ("name", "averager"),
    [
        ("rps", ragtag.RPS()),
        ("rps+repair", ragtag.RPS(repair=True)),
        ("allreduce", ragtag.AllReduce()),
        ("ring", ragtag.AllReduce(ring=True)),
        ("moshpit", ragtag.Moshpit()),
        ("moshpit=4", ragtag.Moshpit(group=4)),
        ("random-groups", ragtag.RandomGroups()),
        ("random-groups=16", ragtag.RandomGroups(group=16)),
    ],
)
def test_an_averager_may_be_named(name: str, averager: Averager) -> None:
    found, when = averaging_of(name, None)
    assert repr(found) == repr(averager)
    assert when is None
    assert repr(averager) in repr(asked(method=name)._averaged.asked.averager)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("partial", Partial()),
        ("partial=3", Partial(every=3)),
        ("matched", Matched()),
        ("matched=8", Matched(steps=8)),
        ("ssp=4", SSP(bound=4)),
        ("dssp=2/8", DSSP(low=2, high=8)),
        ("dropcompute=8/0.5", DropCompute(micro=8, threshold_s=0.5)),
        ("dropcompute=8/2", DropCompute(micro=8, threshold_s=2.0)),
        ("backup", BackupWorkers(1)),
        ("softsync=2", SoftSync(2)),
        ("asynchronous", Asynchronous()),
        ("asynchronous=9", Asynchronous(discard_from=9)),
        ("grouping", ProgressiveGrouping()),
    ],
)
def test_a_schedule_may_be_named(name: str, schedule: object) -> None:
    assert averaging_of(None, name) == (None, schedule)
    assert asked(schedule=name)._averaged.asked.averager.name


def test_every_name_has_been_tried() -> None:
    tried = " ".join(
        str(mark.args[1])
        for test in (test_an_averager_may_be_named, test_a_schedule_may_be_named)
        for mark in test.pytestmark
    )  # type: ignore[attr-defined]
    assert all(f"'{name}" in tried for name in (*AVERAGERS, *SCHEDULES))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "mean"}, "no averager is called 'mean'; there are rps, .*random-groups"),
        ({"schedule": "often"}, "no schedule is called 'often'; there are partial, .*grouping"),
        ({"method": "rps=3"}, "'rps=3': rps takes no number; write 'rps'"),
        ({"method": "moshpit=many"}, "after moshpit= stands a whole number, as moshpit=2"),
        ({"schedule": "ssp"}, "'ssp': after ssp= stands a whole number, as ssp=2"),
        ({"schedule": "partial=0"}, "every is 0"),
        ({"schedule": "partial=2/4"}, "after partial= stands a whole number, as partial=2$"),
        ({"schedule": "dssp=2"}, r"stands a whole number and a whole number \(low/high\), as dssp=2/4"),
        ({"schedule": "dssp=8/2"}, "high is 2"),
        (
            {"schedule": "dropcompute=8"},
            r"a whole number and a number of seconds \(micro/threshold_s\), as dropcompute=2/0\.5",
        ),
        ({"schedule": "dropcompute=8/inf"}, "a number of seconds"),
        ({"schedule": "dropcompute=8/0"}, "threshold_s is 0"),
    ],
)
def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        asked(**given)


# -- A central state, in either place


def test_a_centre_may_stand_as_averager_or_as_schedule() -> None:
    centre = Centre(SoftSync(2))
    for options in ({"method": centre}, {"schedule": centre}, {"schedule": centre, "every": 4}):
        optimizer = asked(**options)
        assert optimizer._averaged.asked.averager.name == centre.name
        assert is_centred(optimizer._averaged.asked.averager)
    with pytest.raises(
        ValueError, match=r"schedule=Centre\(.* is an averager, beside averager=RPS\(\): give one"
    ):
        asked(method=ragtag.RPS(), schedule=centre)


@pytest.mark.parametrize("rule", [BackupWorkers(1), SoftSync(2), Asynchronous(), ProgressiveGrouping()])
def test_a_centre_goes_by_the_schedule_it_was_given_and_says_which(rule: Any) -> None:
    """By name: peers with other schedules are refused, since what they agree on has it."""
    for options in ({"schedule": rule}, {"method": Centre(rule)}):
        assert repr(rule) in asked(**options)._averaged.asked.averager.name


# -- One in the place of another


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": ragtag.RPS}, r"averager is a function; call it: averager=RPS\(\)"),
        (
            {"method": Partial()},
            r"averager=Partial\(every=1\) is a schedule; write schedule=Partial\(every=1\)",
        ),
        ({"method": Partial}, r"averager=Partial\(\) is a schedule; write schedule=Partial\(\)"),
        ({"method": SoftSync(2)}, r"write schedule=SoftSync\(n=2"),
        ({"method": "partial"}, "write schedule='partial'"),
        (
            {"method": 5},
            r"averager is 5; write ragtag\.RPS\(\), ragtag\.Moshpit\(group=8\), or a name: 'rps'",
        ),
        ({"schedule": ragtag.AllReduce()}, r"is an averager; write averager=AllReduce\(\)"),
        ({"schedule": "rps"}, "write averager='rps'"),
        ({"schedule": "moshpit=4"}, "write averager='moshpit=4'"),
        ({"schedule": 5}, "schedule is 5; .* write every=5"),
        ({"schedule": Partial}, r"schedule is the class Partial; make one: schedule=Partial\(\)"),
        (
            {"schedule": SSP},
            r"BoundedStaleness or SSP; make one: schedule=BoundedStaleness\(bound=\.\.\.\)",
        ),
        ({"schedule": DSSP}, r"class DynamicBound or DSSP; .*=DynamicBound\(low=\.\.\., high=\.\.\.\)"),
        ({"schedule": DropCompute}, r"DropCompute; make one: schedule=DropCompute\(micro=\.\.\.\)"),
        ({"method": SSP}, r"write schedule=BoundedStaleness\(bound=\.\.\.\)"),
        ({"schedule": object()}, r"write every=10, one of ragtag\.schedules, as .*, or a name: 'partial'"),
        ({"model": MODEL.parameters()}, r"model is <generator .*; write model=your torch\.nn\.Module"),
        ({"outer": ragtag.Outer}, r"write outer=ragtag\.Outer\(\), with every=50"),
        ({"coherence": True}, r"coherence is True; write coherence=ragtag\.Coherence\(\)"),
        ({"compress": 0.01}, r"compress is 0\.01; write compress=ragtag\.TopK\(ratio=0\.001\)"),
        ({"guard": ragtag.TrimmedMean}, r"write guard=ragtag\.TrimmedMean\(liars=0\.2\)"),
        ({"guard": 0.2}, r"guard is 0\.2; write guard=ragtag\.TrimmedMean"),
        ({"codec": 8}, "codec is 8; it is one of fp32, bf16, int8"),
        ({"weight": [1]}, r'weight is \[1\]; it is a number, a function, or "samples"'),
    ],
)
def test_what_stands_in_the_wrong_place_is_a_type_error_that_says_what_to_write(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        asked(**given)


def test_a_schedule_of_a_scripts_own_will_do() -> None:
    class Mine:
        def decide(self, progress: object) -> ragtag.schedules.Average:
            return ragtag.schedules.Average()

    assert averaging_of(None, mine := Mine()) == (None, mine)


# -- What would be of no effect, or of a bad one


@pytest.mark.parametrize("codec", ["bf16", "fp32", DENSE["int8"]])
def test_a_codec_beside_compress_is_refused(codec: Any) -> None:
    with pytest.raises(ValueError, match=r"would be of no effect; leave it out, .*TopK\(values="):
        asked(average="gradients", compress=ragtag.TopK(0.1), codec=codec)
    asked(average="gradients", compress=ragtag.TopK(0.1))
    assert asked()._averaged.asked.codec is None


@pytest.mark.parametrize("outer", [ragtag.Outer(), ragtag.Outer(fragments=2)])
def test_outer_steps_need_a_word_on_how_many_local_steps_lie_between(outer: Any) -> None:
    with pytest.raises(ValueError, match="say how many, as every=50"):
        asked(outer=outer)
    for given in ({"every": 1}, {"every": 50}, {"schedule": EveryStep()}, {"schedule": Matched(5)}):
        asked(outer=outer, **given)


@pytest.mark.parametrize(
    ("given", "between"),
    [({"every": 3}, 3), ({"schedule": LocalSteps(3)}, 3), ({"schedule": EveryStep()}, 1)],
)
def test_a_delay_is_no_longer_than_the_steps_between_averages(given: dict[str, Any], between: int) -> None:
    with pytest.raises(ValueError, match=f"make delay {between} at most, or every={between + 1}"):
        asked(outer=ragtag.Outer(delay=between + 1), **given)
    asked(outer=ragtag.Outer(delay=between), **given)


@pytest.mark.parametrize("method", [ragtag.Moshpit(), ragtag.RandomGroups(4), "moshpit"])
@pytest.mark.parametrize("align", [True, False])
def test_gradients_are_not_averaged_in_groups(method: Any, align: bool) -> None:
    with pytest.raises(ValueError, match=r'averages in groups: .* models drift apart; use average="models"'):
        asked(method=method, average="gradients", align=align)
    asked(method=method, average="models")


# -- A target batch


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"target_batch": 0, "average": "gradients"}, "target_batch is 0; it is a number of samples above 0"),
        ({"target_batch": 64}, 'write average="gradients"'),
        ({"target_batch": 64, "average": "gradients", "every": 2}, r"leave out every=\.\.\."),
        ({"target_batch": 64, "average": "gradients", "schedule": "matched"}, r"leave out schedule=\.\.\."),
        (
            {"target_batch": 64, "average": "gradients", "compress": ragtag.TopK(0.1)},
            "which samples a step has",
        ),
        ({"target_batch": 64, "average": "gradients", "method": ragtag.Moshpit()}, "averages in groups"),
    ],
)
def test_a_target_batch_that_cannot_be_says_what_to_write(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        asked(**{"weight": 1, **given})


def test_without_samples_a_target_batch_says_where_they_come_from() -> None:
    optimizer = asked(target_batch=64, average="gradients", samples=lambda: 0)
    with pytest.raises(RuntimeError, match=r"crew.split\(loader\).*or give weight=32"):
        optimizer.step()


def test_the_names_of_schedules_that_the_docstring_gives_are_all_that_there_are_and_work() -> None:
    (listed,) = re.findall(
        r"schedule: or when one .*?; or a name: (.*?)\.\n", Crew.optimizer.__doc__ or "", re.DOTALL
    )
    given = re.findall(r'"([^"]+)"', listed)
    assert {name.partition("=")[0] for name in given} == SCHEDULES.keys()
    for name in given:
        named(name, SCHEDULES, "schedule")
