"""What Ragtag costs a training loop: with its background thread idle, and with averaging every 10 steps.

    python benchmarks/training_loop.py                 # both, in less than a minute
    python benchmarks/training_loop.py --seconds 120   # more alternations

- idle: one peer of a crew of two trains, the crew never averages. Blocks of steps take turns within one
  process: *without* (no crew is joined, no driver's thread is there, a plain optimizer), and joined, where
  steps of the plain optimizer (*thread*) and of the crew's (*crew*, whose schedule says "not yet" after each
  step) take turns. Goal: *crew* at most 1 % slower than *without*, with a model of 1M parameters.
  A tiny model beside it shows what a step costs where there is hardly anything else in it.
- averaging: 2 and 4 processes average that model's parameters by RPS every 10 steps; blocks with and
  without averaging take turns. A block takes as long as its slowest process.

Each process computes on one thread. Model, optimizer and crew are made anew for each turn of the idle case,
so that no lucky place in memory stays with one side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ragtag
from ragtag.app.environment import VARIABLES, Place
from ragtag.core.types import Outcome
from stored import how

RESULTS = Path(__file__).parent / "results" / "training_loop.json"
DEADLINE_S = 60.0
GOAL = 1.01
EVERY = 10
NEVER = 10**9
SIZES = {"1M": (784, 800, 450, 10), "tiny": (8, 8, 2)}
BATCH, BATCHES = 32, 16
WARM_STEPS = 5
SETTLE_S = 0.1  # what peers still say to each other after joining is no idling
IDLE_STEPS = {"1M": 10, "tiny": 200}
LONG_STEPS = {"1M": 250, "tiny": 3000}
AVERAGING_STEPS = 3 * EVERY
KINDS = ("without", "thread", "crew")


@dataclass(frozen=True)
class Block:
    """How long the steps of one kind took in a block."""

    wall_s: float  # the mean
    steps_s: tuple[float, ...]  # each
    cpu_s: float  # of the process per step, with the driver's in it
    driver_share: float  # of the wall time that the driver's thread computed
    contributions: tuple[float, ...]  # per round: the share of all peers' chunks in this peer's average
    rounds_s: tuple[float, ...]


class Trainer:
    """What one process does when told to."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._crew: ragtag.Crew | None = None
        self._outcomes: list[Outcome] = []

    def bind(self) -> int:
        """A socket for the next crew; its port."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        return int(self._socket.getsockname()[1])

    def make(self, size: str) -> None:
        """A model, its data, and a plain optimizer."""
        torch.manual_seed(0)
        widths = SIZES[size]
        layers: list[torch.nn.Module] = []
        for a, b in pairwise(widths):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        self._model = torch.nn.Sequential(*layers[:-1])
        self._batches = [
            (torch.randn(BATCH, widths[0]), torch.randint(widths[-1], (BATCH,))) for _ in range(BATCHES)
        ]
        self._plain = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)

    def join(self, rank: int, ports: list[int], crew: str, every: int) -> None:
        """Join a crew with the model that was made last."""
        assert self._socket is not None
        peers = tuple(("127.0.0.1", port) for port in ports)
        place = Place(rank, len(ports), crew, peers=peers, socket_fd=self._socket.fileno())
        os.environ.update(place.variables())
        try:
            self._crew = ragtag.join(deadline_s=DEADLINE_S)
        finally:
            for name in VARIABLES:
                os.environ.pop(name, None)
        self._wrapped = self._crew.optimizer(
            self._plain, model=self._model, every=every, on_outcome=self._outcomes.append
        )

    def block(self, kinds: tuple[str, ...], steps: int) -> dict[str, Block]:
        """Time ``steps`` steps of each kind; where there are several, they take turns step by step."""
        optimizers: list[torch.optim.Optimizer] = [
            self._wrapped if kind == "crew" else self._plain for kind in kinds
        ]
        self._train([self._plain], WARM_STEPS)  # caches are warm, and the crew's schedule counts none of it
        self._outcomes.clear()
        driver_s, cpu_s = self._driver_cpu_s(), time.process_time()
        steps_s = self._train(optimizers, steps * len(kinds))
        cpu_s = time.process_time() - cpu_s
        driver_s = self._driver_cpu_s() - driver_s
        n = 1 if self._crew is None else self._crew.size
        shares = tuple(
            float(np.unpackbits(o.heard.view(np.uint8)).sum()) / (n * len(o.heard)) for o in self._outcomes
        )
        blocks = {}
        for i, kind in enumerate(kinds):
            own_s = steps_s[i :: len(kinds)]
            blocks[kind] = Block(
                wall_s=statistics.fmean(own_s),
                steps_s=own_s,
                cpu_s=cpu_s / len(steps_s),
                driver_share=driver_s / sum(steps_s),
                contributions=shares,
                rounds_s=tuple(o.total_s for o in self._outcomes),
            )
        return blocks

    def settle(self) -> None:
        """Train for a moment without timing it."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            self._train([self._plain], WARM_STEPS)

    def leave(self) -> None:
        """Leave the crew; its thread ends."""
        assert self._crew is not None and self._socket is not None
        self._crew.leave()
        self._socket.close()
        self._crew = self._socket = None
        del self._wrapped
        if any(thread.name.startswith("ragtag-") for thread in threading.enumerate()):
            raise RuntimeError("the driver's thread is still there: the next block would not be without it")

    def _train(self, optimizers: list[torch.optim.Optimizer], steps: int) -> tuple[float, ...]:
        times = [time.perf_counter()]
        for step in range(steps):
            optimizer = optimizers[step % len(optimizers)]
            inputs, labels = self._batches[step % BATCHES]
            torch.nn.functional.cross_entropy(self._model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
        return tuple(b - a for a, b in pairwise(times))

    def _driver_cpu_s(self) -> float:
        return sum(
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.name.startswith("ragtag-") and thread.ident is not None
        )


def serve(orders: Connection) -> None:
    """One process: obey until told to end."""
    torch.set_num_threads(1)
    trainer = Trainer()
    known: dict[str, Callable[..., Any]] = {
        "bind": trainer.bind,
        "make": trainer.make,
        "join": trainer.join,
        "block": trainer.block,
        "settle": trainer.settle,
        "leave": trainer.leave,
    }
    while True:
        order, *arguments = orders.recv()
        if order == "end":
            return
        orders.send(known[order](*arguments))


class Team:
    """The processes, as seen from the one that tells them what to do."""

    def __init__(self, n: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(n):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self._crews = 0

    def ask(self, orders: dict[int, tuple[Any, ...]]) -> list[Any]:
        """Give some processes an order each, and wait for all answers."""
        for i, order in orders.items():
            self._pipes[i].send(order)
        answers = []
        for i in orders:
            if not self._pipes[i].poll(DEADLINE_S):
                raise TimeoutError(f"process {i} did not answer {orders[i][0]!r} within {DEADLINE_S:g} s")
            try:
                answers.append(self._pipes[i].recv())
            except EOFError:
                raise RuntimeError(f"process {i} has failed at {orders[i][0]!r}; see its traceback") from None
        return answers

    def all(self, n: int, *order: Any) -> list[Any]:
        """Give the first ``n`` the same order."""
        return self.ask(dict.fromkeys(range(n), order))

    def join(self, n: int, every: int) -> None:
        """Make a crew of the first ``n``."""
        self._crews += 1
        ports = self.all(n, "bind")
        name = f"training-loop-{os.getpid()}-{self._crews}"
        self.ask({rank: ("join", rank, ports, name, every) for rank in range(n)})

    def end(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.send(("end",))
        for process in self._processes:
            process.join(DEADLINE_S)


def ratio(these: list[Any], those: list[Any]) -> dict[str, float]:
    """A ratio of medians, its 95 % interval (bootstrap over alternations), and quartiles of paired ratios.

    A figure per alternation, or several: then medians are of all of them together.
    """
    a, b = np.array(these), np.array(those)
    picks = np.random.default_rng(0).integers(len(a), size=(1000, len(a)))
    resampled = [float(np.median(a[pick]) / np.median(b[pick])) for pick in picks]
    low, high = np.quantile(resampled, (0.025, 0.975))
    pairs = np.median(a.reshape(len(a), -1), axis=1) / np.median(b.reshape(len(b), -1), axis=1)
    quartiles = np.quantile(pairs, (0.25, 0.5, 0.75))
    return {
        "of_medians": float(np.median(a) / np.median(b)),
        "low_95": float(low),
        "high_95": float(high),
        "paired_quartile_1": float(quartiles[0]),
        "paired_median": float(quartiles[1]),
        "paired_quartile_3": float(quartiles[2]),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    first, median, third = statistics.quantiles(values, n=4)
    return {"median": median, "quartile_1": first, "quartile_3": third}


def measure_idle(team: Team, size: str, seconds: float) -> dict[str, Any]:
    """A loop without Ragtag, beside one with its thread idle, and one with the crew's optimizer too."""
    steps = IDLE_STEPS[size]
    blocks: dict[str, list[Block]] = {kind: [] for kind in KINDS}

    def without() -> None:
        team.ask({0: ("make", size)})
        add(("without",))

    def add(kinds: tuple[str, ...]) -> None:
        team.ask({0: ("settle",)})
        (of,) = team.ask({0: ("block", kinds, steps)})
        for kind, block in of.items():
            blocks[kind].append(block)

    until_s = time.monotonic() + seconds
    turns = 0
    while turns < 4 or time.monotonic() < until_s:
        without_first = turns % 2 == 0
        if without_first:
            without()
        team.all(2, "make", size)
        team.join(2, NEVER)
        add(("thread", "crew") if turns % 4 < 2 else ("crew", "thread"))
        team.all(2, "leave")
        if not without_first:
            without()
        turns += 1
    team.all(2, "make", size)
    team.join(2, NEVER)
    team.ask({0: ("settle",)})
    (idling,) = team.ask({0: ("block", ("thread",), LONG_STEPS[size])})  # an idle driver wakes once a second
    team.all(2, "leave")
    wall = {kind: [block.wall_s for block in of] for kind, of in blocks.items()}
    single = {kind: [block.steps_s for block in of] for kind, of in blocks.items()}
    if any(block.rounds_s for block in blocks["crew"]):
        raise RuntimeError("the crew averaged within a block that was to be idle")
    return {
        "model": size,
        "alternations": turns,
        "steps_per_block": steps,
        "step_wall_s": {kind: summary(times) for kind, times in wall.items()},
        "single_step_s": {kind: summary([s for of in times for s in of]) for kind, times in single.items()},
        "step_ratio": {kind: ratio(single[kind], single["without"]) for kind in KINDS[1:]},
        "step_ratio_of_crew_to_thread": ratio(single["crew"], single["thread"]),
        "wall_ratio": {kind: ratio(wall[kind], wall["without"]) for kind in KINDS[1:]},
        "driver_share_of_wall": idling["thread"].driver_share,
        "goal_ratio": GOAL if size == "1M" else None,
    }


def measure_averaging(team: Team, n: int, seconds: float) -> dict[str, Any]:
    """What averaging the 1M model every 10 steps adds to a step."""
    team.all(n, "make", "1M")
    team.join(n, EVERY)
    team.all(n, "block", ("crew",), AVERAGING_STEPS)  # deadlines come from the first rounds
    plain: list[float] = []
    crew: list[float] = []
    cpu: dict[str, list[float]] = {"thread": [], "crew": []}
    contributions: list[float] = []
    rounds_s: list[float] = []
    until_s = time.monotonic() + seconds
    while len(crew) < 4 or time.monotonic() < until_s:
        for kind in ("thread", "crew") if len(crew) % 2 else ("crew", "thread"):
            answers = [of[kind] for of in team.all(n, "block", (kind,), AVERAGING_STEPS)]
            (crew if kind == "crew" else plain).append(max(block.wall_s for block in answers))
            cpu[kind].append(statistics.fmean(block.cpu_s for block in answers))
            contributions += [share for block in answers for share in block.contributions]
            rounds_s += [s for block in answers for s in block.rounds_s]
    team.all(n, "leave")
    if len(rounds_s) != n * len(crew) * AVERAGING_STEPS // EVERY:
        raise RuntimeError(f"{len(rounds_s)} rounds: not one every {EVERY} steps")
    without_s, with_s = statistics.median(plain), statistics.median(crew)
    return {
        "processes": n,
        "alternations": len(crew),
        "steps_per_block": AVERAGING_STEPS,
        "every": EVERY,
        "step_without_s": summary(plain),
        "step_with_s": summary(crew),
        "step_cpu_without_s": summary(cpu["thread"]),
        "step_cpu_with_s": summary(cpu["crew"]),
        "added_per_step_s": with_s - without_s,
        "added_per_round_s": (with_s - without_s) * EVERY,
        "share_of_step": 1 - without_s / with_s,
        "ratio": ratio(crew, plain),
        "round_s": summary(rounds_s),
        "contributions": statistics.fmean(contributions),
    }


def show_idle(result: dict[str, Any]) -> None:
    without = result["step_wall_s"]["without"]["median"]
    print(
        f"{result['model']} model, thread idle, {result['alternations']} alternations of "
        f"{result['steps_per_block']} steps; without Ragtag {without * 1e3:.3f} ms per step"
    )
    for kind, name in (("thread", "thread alone"), ("crew", "thread and crew's optimizer")):
        wall, step = result["wall_ratio"][kind], result["step_ratio"][kind]
        added_us = (result["step_wall_s"][kind]["median"] - without) * 1e6
        print(
            f"  {name:<28} {wall['of_medians']:.4f} x (95 %: {wall['low_95']:.4f} to {wall['high_95']:.4f}; "
            f"pairs' quartiles {wall['paired_quartile_1']:.4f} to {wall['paired_quartile_3']:.4f}), "
            f"{added_us:+.1f} us per step\n"
            f"  {'':<28} {step['of_medians']:.4f} x for the median of all single steps "
            f"(95 %: {step['low_95']:.4f} to {step['high_95']:.4f})"
        )
    own = result["step_ratio_of_crew_to_thread"]
    times = result["single_step_s"]
    print(
        f"  the crew's optimizer beside the plain one, step by step: {own['of_medians']:.4f} x (95 %: "
        f"{own['low_95']:.4f} to {own['high_95']:.4f}), "
        f"{(times['crew']['median'] - times['thread']['median']) * 1e6:+.1f} us per step"
    )
    goal = f"; goal: crew's at most {GOAL:g} x" if result["goal_ratio"] else ""
    print(f"  the idle thread itself computes {result['driver_share_of_wall']:.4%} of the time{goal}")


def show_averaging(result: dict[str, Any]) -> None:
    of = result["ratio"]
    print(
        f"1M model averaged every {EVERY} steps by {result['processes']} processes, "
        f"{result['alternations']} alternations of {result['steps_per_block']} steps:"
    )
    print(
        f"  {result['step_without_s']['median'] * 1e3:.3f} ms per step without averaging, "
        f"{result['step_with_s']['median'] * 1e3:.3f} with: {result['added_per_step_s'] * 1e3:+.3f} ms "
        f"per step ({result['added_per_round_s'] * 1e3:.1f} per round), {result['share_of_step']:.1%} of it; "
        f"{of['of_medians']:.3f} x (95 %: {of['low_95']:.3f} to {of['high_95']:.3f})"
    )
    print(
        f"  CPU {result['step_cpu_without_s']['median'] * 1e3:.3f} ms per step without, "
        f"{result['step_cpu_with_s']['median'] * 1e3:.3f} with; a round takes "
        f"{result['round_s']['median'] * 1e3:.1f} ms; {result['contributions']:.3%} of contributions arrived"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=32.0, help="of measuring, in all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they load torch
    made = how()
    team = Team(4)
    team.all(4, "make", "1M")  # torch is loaded
    idle, averaging = [], []
    for size, share in (("1M", 0.5), ("tiny", 0.08)):
        idle.append(measure_idle(team, size, share * arguments.seconds))
        show_idle(idle[-1])
    for n, share in ((2, 0.18), (4, 0.24)):
        averaging.append(measure_averaging(team, n, share * arguments.seconds))
        show_averaging(averaging[-1])
    team.end()
    layers = {name: list(widths) for name, widths in SIZES.items()}
    record = {
        **made,
        "layers": layers,
        "parameters": {k: sum(a * b + b for a, b in pairwise(w)) for k, w in SIZES.items()},
        "batch": BATCH,
        "idle": idle,
        "averaging": averaging,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
