"""Crews of membership machines in storms: no invariant breaks, and all agree after healing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ragtag.core.faults import Faults, Freeze
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.types import Member, Status
from ragtag.protocols.membership.view import View
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.trials import membership as trials
from ragtag.simulation.trials.membership import Watch, member_trial
from ragtag.simulation.worlds.members import MemberWorld

REGRESSIONS = [207, 634, 967, 112]
"""Found once: a wake rounded down, a round trip slept on, a late start, periods that stayed long."""


@pytest.mark.parametrize("seed", [*range(16), *REGRESSIONS])
def test_a_storm(seed: int) -> None:
    member_trial(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(3))
def test_many_storms(hundred: int) -> None:
    for seed in range(5000 + 60 * hundred, 5060 + 60 * hundred):
        member_trial(seed)


def test_a_trial_is_one_history() -> None:
    assert member_trial(3) == member_trial(3)


def test_storms_bring_deaths_healing_and_refutation() -> None:
    seen = [member_trial(seed) for seed in range(6)]
    assert sum(t.deaths for t in seen) > 5 and sum(t.healed for t in seen) > 3
    assert sum(t.refuted for t in seen) > 10 and any(t.lives > t.running for t in seen)


# -- Machines with a fault are found out, and the message says how to see it again


def _no_refuting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(View, "_about_me", lambda self, record: None)


def _no_incarnation(patch: pytest.MonkeyPatch) -> None:
    renew = View.renew

    def keep(self: View, **changes: object) -> None:
        renew(self, **{**changes, "incarnation": self.mine.incarnation})  # type: ignore[arg-type]

    patch.setattr(View, "renew", keep)


def _raises(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "rtt_s", None)
    patch.setattr(View, "judge", lambda self, period_s: 1 / 0)


def _forgets_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ragtag.protocols.membership.probe.Prober.knock", lambda self: None)
    patch.setattr("ragtag.protocols.membership.entry.Admission.ask_missing", lambda self: None)


def _never_judges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(View, "judge", lambda self, period_s: None)


@pytest.mark.parametrize(
    ("break_it", "likely"),
    [(_no_refuting, 0), (_no_incarnation, 0), (_raises, 0), (_forgets_the_dead, 36), (_never_judges, 5)],
)
def test_broken_machines_are_found_out(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], likely: int
) -> None:
    break_it(monkeypatch)
    with pytest.raises(InvariantBroken) as caught:
        for seed in range(likely, likely + 40):
            member_trial(seed)
    assert f"python -m ragtag.simulation.trials.membership {caught.value.seed}" in str(caught.value)


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (Member("a", ("h", 1), 7, 3), "never had incarnation 3"),
        (Member("a", ("h", 1), 7, 1, Status.LEFT), "did not"),
        (Member("a", ("h", 1), 7, 0), "went back"),
    ],
)
def test_the_watch_knows_its_rules(member: Member, says: str) -> None:
    world = MemberWorld(Faults(), 1, replay="again")
    watch = Watch(world)
    watch._own[7] = 1
    watch._belief_of(1, trials.Changed(replace(member, incarnation=1, status=Status.SUSPECT), None))
    with pytest.raises(InvariantBroken, match=says):
        watch._belief_of(1, trials.Changed(member, None))


def test_a_frozen_peer_does_nothing_and_then_all_that_waited() -> None:
    world = MemberWorld(Faults(latency_s=0.01, freezes=(Freeze(1, 2.0, 3.0),)), 1)
    steps: list[float] = []
    world.on_step = lambda life, event, effects: steps.append(world.now_s) if life.peer == 1 else None
    world.start(0, ())
    world.start(1, (0,))
    world.run(8.0)
    assert not [at_s for at_s in steps if 2.0 <= at_s < 5.0]
    assert steps.count(5.0) > 3
