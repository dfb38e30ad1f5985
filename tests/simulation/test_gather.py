"""Gathering rows in a simulated world that checks: loss, copies, disorder, peers that die or stand still."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.seed import generator
from ragtag.core.types import Bytes, Gathered, Offer, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.gather import gather
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.check.rows import RowChecker
from ragtag.simulation.worlds.rounds import World

N, MOST, ROUNDS = 5, 8, 12


def rows_of(peer: int, round_: int) -> Bytes:
    draws = generator(5, "rows", peer, round_)
    return draws.integers(0, 256, (int(draws.integers(0, MOST + 1)), CHUNK_BYTES), np.uint8)


def simulated(faults: Faults, seed: int) -> tuple[World, list[list[Outcome]]]:
    nodes = [Node(peer, N, seed) for peer in range(N)]
    for node in nodes:
        node.configure(0, Channel(gather, fp32, MOST, 0.05, 0.01, floor_s=0.005))
    outcomes: list[list[Outcome]] = [[] for _ in range(N)]

    def done(peer: int, now_s: float, outcome: Outcome) -> None:
        outcomes[peer].append(outcome)
        if len(outcomes[peer]) < ROUNDS:
            world.at(now_s + 0.002, peer, Offer(0, rows_of(peer, len(outcomes[peer])), 1.0))

    world = World(nodes, faults, seed, check=True, on_done=done)
    for peer in range(N):
        world.at(0.0, peer, Offer(0, rows_of(peer, 0), 1.0))
    world.run()
    return world, outcomes


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "faults",
    [
        Faults(latency_s=0.002, loss=Loss(0.1), duplicate=0.1, reorder=0.1, jitter_s=0.001),
        Faults(latency_s=0.002, loss=Loss(0.3)),
        Faults(latency_s=0.002, loss=Loss(0.05), crashes=(Crash(2, 0.04),)),
        Faults(latency_s=0.002, freezes=(Freeze(1, 0.03, 0.4),)),
        Faults(latency_s=0.002, rate_bytes_per_s=1e6),
    ],
    ids=["disorder", "loss", "crash", "freeze", "narrow"],
)
def test_no_invariant_breaks_and_all_that_live_go_on(faults: Faults, seed: int) -> None:
    world, outcomes = simulated(faults, seed)
    dead = {crash.peer for crash in faults.crashes}
    for peer in set(range(N)) - dead:
        assert len(outcomes[peer]) == ROUNDS
        assert sum(len(o.gathered.rows) for o in outcomes[peer] if o.gathered is not None) > 0
    again, _ = simulated(faults, seed)
    assert world.digest() == again.digest()


def outcome_of(rows: Bytes, factor: float) -> Outcome:
    k = len(rows)
    part = Gathered(
        rows,
        np.full(k, factor, np.float32),
        np.zeros(k, np.int64),
        np.ones(1, np.bool_),
        np.zeros(1, np.bool_),
    )
    none = np.zeros(1, np.float32)
    return Outcome(
        0, 0, none[:0, None], none, np.zeros(1, np.uint64), part.whole, (), (), 0.0, 0.0, 0.0, 0.0, False,
        gathered=part,
    )  # fmt: skip


def test_the_checker_sees_rows_made_up_doubled_or_counted_otherwise() -> None:
    rows = np.arange(3 * CHUNK_BYTES, dtype=np.int64).reshape(3, -1).astype(np.uint8)
    rows[:, 0] = [1, 2, 3]
    checker = RowChecker()
    checker.offers(0, 0, Offer(0, rows[:2], 1.0))
    assert checker.ends(0, outcome_of(rows[:2], 0.5)) == ""
    assert "came before" in checker.ends(0, outcome_of(rows[:1], 0.5))
    assert "counts" in checker.ends(1, outcome_of(rows[:1], 0.25))
    assert "nobody has offered" in checker.ends(2, outcome_of(rows[2:], 0.5))


def test_a_machine_that_changes_a_row_is_caught() -> None:
    class Liar(Node):
        def step(self, now_s, event):  # type: ignore[no-untyped-def]
            effects = super().step(now_s, event)
            for effect in effects:
                run = getattr(effect, "run", None)
                if isinstance(run, Run) and run.key.stage == 1 and self.me == 1:
                    run.payload = run.payload ^ 1
            return effects

    nodes = [Liar(peer, 3, 1) for peer in range(3)]
    for node in nodes:
        node.configure(0, Channel(gather, fp32, MOST, 0.05, 0.01))
    world = World(nodes, Faults(latency_s=0.001), 1, check=True)
    for peer in range(3):
        world.at(0.0, peer, Offer(0, rows_of(peer, 3)[:5], 1.0))
    with pytest.raises(InvariantBroken, match="nobody has offered"):
        world.run()
