"""Trials of membership: peers join, leave, crash and come back in a storm. Then all that run must be one
crew.

python -m ragtag.simulation.trials.membership SEED      # one trial, as the message of a failed one says
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from ragtag.core import seed as random
from ragtag.protocols.membership.types import Address, Changed, MemberEffect, MemberEvent, Status
from ragtag.simulation.trials.rounds import storm
from ragtag.simulation.worlds.members import Jump, Life, MemberWorld, changes, remarks

STORM_S = 40.0
SETTLE_S = 60.0
"""How long after the storm all must agree at the latest. They must then agree for ``STEADY_S`` more."""
STEADY_S = 10.0


@dataclass(frozen=True, slots=True)
class MemberTrial:
    """The figures of a trial.

    lives: processes in all.
    running: processes at its end.
    agreed_after_s: how long after healing all agreed.
    deaths, healed, refuted: how often a member was declared dead, came back, and refuted an accusation.
    events: in virtual time.
    """

    lives: int
    running: int
    agreed_after_s: float
    deaths: int
    healed: int
    refuted: int
    events: int


class Watch:
    """Checks every step of every machine, from outside: incarnations, beliefs, and departures."""

    def __init__(self, world: MemberWorld) -> None:
        self.world = world
        self._own: dict[int, int] = {}
        self._left: set[int] = set()
        self._belief: dict[tuple[int, str], tuple[int, Address, int, int]] = {}

    def step(self, life: Life, event: MemberEvent, effects: list[MemberEffect]) -> None:
        """Check one step.

        Raises:
            InvariantBroken: it names the rule.
        """
        machine, broken = life.machine, self.world.broken
        me = machine.me
        if me.incarnation < self._own.get(me.epoch, 0):
            broken(f"{me.name} goes back to incarnation {me.incarnation}")
        self._own[me.epoch] = me.incarnation
        if life.leaving:
            self._left.add(me.epoch)
        if me.status is not (Status.LEFT if life.leaving else Status.ALIVE) and not life.leaving:
            broken(f"{me.name} believes itself {me.status.name}")
        for effect in effects:
            if isinstance(effect, Changed):
                self._belief_of(me.epoch, effect)

    def _belief_of(self, observer: int, change: Changed) -> None:
        member, broken = change.member, self.world.broken
        if member.incarnation > self._own.get(member.epoch, -1):
            broken(f"{member.name} has never had incarnation {member.incarnation}")
        if member.status is Status.LEFT and member.epoch not in self._left:
            broken(f"{member.name} is said to have left, and did not")
        last = self._belief.get((observer, member.name))
        if last is not None and member.version <= last:
            broken(f"a belief about {member.name} went back from {last} to {member.version}")
        self._belief[observer, member.name] = member.version


def member_trial(seed: int, storm_s: float = STORM_S) -> MemberTrial:
    """Run one seed's storm over a crew of 3 to 10, and heal. All running processes must then agree which run.

    Raises:
        InvariantBroken: it has the command that runs the trial again.
    """
    draw = random.generator(seed, "member trial")
    n = int(draw.integers(3, 11))
    faults = storm(seed, n, storm_s, 1e6, scarce=False)
    jumps = tuple(
        Jump(int(draw.integers(0, n)), float(draw.uniform(0, storm_s)), float(draw.exponential(10.0)))
        for _ in range(int(draw.integers(0, 3)))
    )
    command = f"python -m ragtag.simulation.trials.membership {seed}"
    world = MemberWorld(faults, seed, jumps=jumps, replay=command)
    world.on_step = Watch(world).step
    everyone = tuple(range(n))

    def starting(peer: int, entries: tuple[int, ...]) -> Callable[[], None]:
        return lambda: None if world.is_running(peer) else void(world.start(peer, entries))

    for peer in everyone:
        others = tuple(other for other in everyone if other != peer)
        begins_s = 0.0 if peer == 0 or draw.random() < 0.6 else float(draw.uniform(0, storm_s))
        world.at(begins_s, starting(peer, () if peer == 0 else others))
        if draw.random() < 0.4:  # after a crash it is started again, sooner or later
            for crash in faults.crashes:
                if crash.peer == peer:
                    again_s = min(storm_s, crash.at_s + float(draw.exponential(storm_s / 8)))
                    world.at(again_s, starting(peer, others))
        elif draw.random() < 0.15 and peer > 0:
            world.at(float(draw.uniform(0, storm_s)), lambda peer=peer: world.leave(peer))  # type: ignore[misc]
    world.run(storm_s)
    world.heal()
    healed_s, limit_s = world.now_s, world.now_s + SETTLE_S
    while not world.agreed():
        if world.now_s >= limit_s:
            views = {life.machine.me.name: life.machine.live() for life in world.running()}
            world.broken(f"{SETTLE_S:g} s after the storm they disagree: {views}")
        world.run(world.now_s + 0.5)
    for life in world.lives:
        if life.failed is not None:
            world.broken(f"{life.machine.me.name} gave up: {life.failed}")
    agreed_s = world.now_s
    for _ in range(int(STEADY_S)):
        world.run(world.now_s + 1.0)
        if not world.agreed():
            world.broken("they agreed, and then no more, with nothing going wrong")
    dead = sum(change.member.status is Status.DEAD for _, change in changes(world))
    return MemberTrial(
        len(world.lives),
        len(world.running()),
        agreed_s - healed_s,
        dead,
        len(remarks(world, "healed")),
        len(remarks(world, "refuted")),
        world.loop.events,
    )


def void(_: object) -> None:
    """Drop a value."""


def main() -> int:
    """Run the trials of the seeds that the command line names."""
    for text in sys.argv[1:]:
        print(f"seed {text}: {member_trial(int(text))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
