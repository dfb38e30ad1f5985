"""The runs of the top-k recipe."""

from __future__ import annotations

from dataclasses import dataclass

from ragtag.recipes.jobs import Job
from ragtag.recipes.topk.local import Local, Outer, methods, train_locally
from ragtag.recipes.topk.tasks import IMAGES, LSTM, Sources
from ragtag.recipes.topk.training import Setup, Trained, train

RATIOS = (0.001, 0.01)
LOSSES = (0.1, 0.3)
SELECTORS = ("top-k", "sampled top-k", "gaussian-k", "gaussian-k, strict", "random-k")


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of peers that train one task. lossy_seeds: seeds of the runs that lose messages."""

    task: str
    n: int
    steps: int
    seeds: int
    lossy_seeds: int

    def setups(self) -> list[Setup]:
        """All runs, one seed after the other."""
        found = []
        for seed in range(max(self.seeds, self.lossy_seeds)):

            def run(
                selector: str, ratio: float, loss: float = 0.0, tickets: bool = True, seed: int = seed
            ) -> Setup:
                return Setup(selector, ratio, loss, tickets, self.n, self.steps, seed, self.task)

            if seed < self.seeds:
                found.append(run("dense", RATIOS[-1]))
                found += [run(name, ratio) for ratio in RATIOS for name in SELECTORS]
            else:
                found.append(run("sampled top-k", RATIOS[-1]))
            if seed < self.lossy_seeds:
                for loss in LOSSES:
                    found += [run("sampled top-k", RATIOS[-1], loss, tickets) for tickets in (True, False)]
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make. parts: on gradients, at every step. local: with local steps between outer steps."""

    parts: tuple[Part, ...]
    local: tuple[Local, ...]

    @classmethod
    def of(cls, *, quick: bool, seeds: int) -> Plan:
        """The usual runs; quick: as many as two cores train in a minute or two."""
        if quick:
            small = Part(IMAGES, 8, 100, 1, 0), Part(LSTM, 16, 60, 1, 0)
            return cls(small, tuple(methods(8, 8)))
        parts = (
            Part(LSTM, 16, 600, 1, 0),
            Part(LSTM, 8, 600, 1, seeds),
            Part(IMAGES, 8, 800, seeds, seeds),
        )
        return cls(parts, tuple(methods(8, 40)))

    def jobs(self, sources: Sources) -> list[Job]:
        """One call per run, the longest first."""
        calls = [Job(name_of(s), train, (s, sources)) for part in self.parts for s in part.setups()]
        local = [Job(f"outer steps, {s.name}", train_locally, (s, sources)) for s in self.local]
        return [*local, *calls]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of the runs."""

    runs: tuple[Trained, ...]
    local: tuple[Outer, ...]

    @classmethod
    def of(cls, found: list[Trained | Outer]) -> Results:
        """Sorted by kind."""
        return cls(
            tuple(f for f in found if isinstance(f, Trained)), tuple(f for f in found if isinstance(f, Outer))
        )

    def of_part(self, part: Part) -> list[Trained]:
        """The runs of a part."""
        return [r for r in self.runs if (r.setup.task, r.setup.n) == (part.task, part.n)]


def name_of(s: Setup) -> str:
    """A run in words."""
    return f"{s.task}, {s.n} peers, {method_of(s)}, seed {s.seed}"


def method_of(s: Setup) -> str:
    """A run's method of selection, in words."""
    ratio = "" if s.selector == "dense" else f" {s.ratio:.1%}"
    lost = f", {s.loss:.0%} lost, {'tickets' if s.tickets else 'cleared'}" if s.loss else ""
    return f"{s.selector}{ratio}{lost}"


def select(
    runs: list[Trained], selector: str, ratio: float, loss: float = 0.0, tickets: bool = True
) -> list[Trained]:
    """The runs of one method, by seed."""
    wanted = (selector, ratio, loss, tickets)
    return [r for r in runs if (r.setup.selector, r.setup.ratio, r.setup.loss, r.setup.tickets) == wanted]
