"""Which averager, schedule, outer step, compression, codec and alignment go together: one table.

``CLASHES`` names each pair that does not, says why, and says what to write in its place. A crew's optimizer
raises these words as its error, ``docs/combinations.md`` prints them, and a test builds every pair and sees
that it trains or is in this table. A new option is a ``Feature`` and its clashes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ragtag.codecs.base import Codec
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.central.channel import Sharing
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import ring
from ragtag.protocols.rounds.robust import RobustMean
from ragtag.schedules.base import Schedule
from ragtag.schedules.every import EveryStep, LocalSteps
from ragtag.schedules.target import TargetBatch
from ragtag.training.align.plan import Align
from ragtag.training.exchange.compress import TopK


@dataclass(frozen=True, slots=True)
class Asked:
    """What a crew's optimizer is asked for; options as they were given, averager and schedule as objects.

    schedule: ``None``: none was given.
    has_model: whether ``model=`` was given.
    has_buffers: whether buffers are averaged (``None``: not known yet).
    """

    inner: torch.optim.Optimizer
    averager: Averager
    average: str = "models"
    schedule: Schedule | None = None
    every: int | None = None
    outer: Nesterov | Streaming | None = None
    codec: Codec | str | None = None
    compress: TopK | None = None
    align: Align | bool = True
    overlap: bool = False
    target: TargetBatch | None = None
    guard: RobustMean | None = None
    has_model: bool = False
    has_buffers: bool | None = None

    @property
    def partial(self) -> bool:
        """Whether slow peers may miss rounds, by the schedule."""
        return bool(getattr(self.schedule, "partial", False))

    @property
    def between(self) -> int | None:
        """How many local steps lie between two averages (``None``: that is not fixed)."""
        if self.target is not None:
            return None
        if isinstance(self.schedule, LocalSteps):
            return self.schedule.k
        if isinstance(self.schedule, EveryStep) or (self.schedule is None and self.every is None):
            return 1
        return self.every

    @property
    def delay(self) -> int:
        """How many local steps an average may be under way while training goes on."""
        return self.outer.delay if isinstance(self.outer, Streaming) else int(self.overlap)

    def with_buffers(self, some: bool) -> Asked:
        """The same, now that it is known whether buffers are averaged."""
        return replace(self, has_buffers=some)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that may be asked for. written: as a script writes it."""

    written: str
    among: Callable[[Asked], bool]


def _corrects(asked: Asked) -> bool:
    central = asked.averager.open
    return isinstance(central, Sharing) and central.correction is not None


def _momentum(asked: Asked) -> bool:
    return any(group.get("momentum") for group in asked.inner.param_groups)


GROUPS = Feature(
    "averager=Moshpit() or RandomGroups()",
    lambda a: a.averager.kind == "in groups",
)
RING = Feature("averager=AllReduce(ring=True)", lambda a: a.averager.name == ring.name)
CENTRE = Feature("averager=Centre()", lambda a: a.averager.kind == "central")
COMPENSATE = Feature("averager=Centre(compensate=...)", _corrects)
MODELS = Feature('average="models"', lambda a: a.average == "models")
GRADIENTS = Feature('average="gradients"', lambda a: a.average == "gradients")
SCHEDULE = Feature("schedule=...", lambda a: a.schedule is not None)
PARTIAL = Feature("schedule=Partial(), SSP() or DSSP()", lambda a: a.partial)
EVERY = Feature("every=...", lambda a: a.every is not None)
UNSAID = Feature("neither every= nor schedule=", lambda a: a.every is None and a.schedule is None)
SELDOM = Feature(
    "averages after several local steps",
    lambda a: a.every not in (None, 1) or a.schedule not in (None, EveryStep()),
)
OUTER = Feature("outer=Outer()", lambda a: a.outer is not None)
STREAMING = Feature(
    "outer=Outer(fragments=..., delay=...)",
    lambda a: isinstance(a.outer, Streaming) and (a.outer.fragments > 1 or a.outer.delay > 0),
)
FRAGMENTS = Feature(
    "outer=Outer(fragments=...)", lambda a: isinstance(a.outer, Streaming) and a.outer.fragments > 1
)
LONG_DELAY = Feature(
    "outer=Outer(delay=...) longer than the steps between averages",
    lambda a: a.between is not None and a.delay > a.between,
)
COMPRESS = Feature("compress=TopK()", lambda a: a.compress is not None)
CORRECTION = Feature(
    "compress=TopK(momentum_correction=...)", lambda a: bool(a.compress and a.compress.momentum_correction)
)
DIFFERENCES = Feature(
    'compress=TopK() with average="models"', lambda a: a.compress is not None and a.average == "models"
)
CODEC = Feature("codec=...", lambda a: a.codec is not None)
ALIGN = Feature("align=Align(...)", lambda a: isinstance(a.align, Align))
TARGET = Feature("target_batch=...", lambda a: a.target is not None)
QUORUM = Feature("averager=RPS(quorum=...)", lambda a: a.averager.quorum > 0)
HADAMARD = Feature("averager=RPS(hadamard=...)", lambda a: a.averager.hadamard > 0)
FOLLOWING = Feature(
    "schedule=LocalSteps(..., least=...)", lambda a: bool(getattr(a.schedule, "follows", False))
)
SHARES = Feature('averager=RPS(shares="measured")', lambda a: a.averager.planned)
GUARD = Feature("guard=...", lambda a: a.guard is not None)
OVERLAP = Feature("overlap=True", lambda a: a.overlap)
NO_MODEL = Feature("no model=", lambda a: not a.has_model)
BUFFERS = Feature("a model with buffers that are averaged", lambda a: bool(a.has_buffers))
MOMENTUM = Feature("an optimizer with momentum", _momentum)
LBFGS = Feature("torch.optim.LBFGS", lambda a: isinstance(a.inner, torch.optim.LBFGS))


@dataclass(frozen=True, slots=True)
class Clash:
    """Two features that do not go together. why: and what to do; may name ``{averager}`` and other fields."""

    one: Feature
    other: Feature
    why: str

    def holds(self, asked: Asked) -> bool:
        """Whether both are asked for."""
        return self.one.among(asked) and self.other.among(asked)


CLASHES = (
    Clash(
        GROUPS,
        GRADIENTS,
        "{averager} averages in groups: each takes steps by gradients of its own, and models drift apart; "
        'use average="models", or RPS() or AllReduce()',
    ),
    Clash(
        CENTRE,
        GRADIENTS,
        'updates of a central state are what models were moved by; use average="models"',
    ),
    Clash(
        LBFGS,
        GRADIENTS,
        "LBFGS calls its closure a different number of times on each peer, so its gradients cannot be "
        'averaged; use average="models"',
    ),
    Clash(
        ALIGN,
        MODELS,
        'averages of models keep replicas together: leave out align, or average="gradients"',
    ),
    Clash(SCHEDULE, EVERY, "give either a schedule or every=..., not both"),
    Clash(
        TARGET,
        MODELS,
        "a target batch is one of gradients, which all peers add up before a step that is the same for all; "
        'write average="gradients"',
    ),
    Clash(TARGET, EVERY, "target_batch= says when to average: leave out every=..."),
    Clash(TARGET, SCHEDULE, "target_batch= says when to average: leave out schedule=..."),
    Clash(
        TARGET,
        COMPRESS,
        "compress= keeps a part of each gradient for later steps, so that nobody could say which samples a "
        'step has: leave it out; codec="bf16" halves the bytes',
    ),
    Clash(
        PARTIAL,
        GRADIENTS,
        "this schedule lets slow peers miss rounds, and a peer that misses gradients has another model from "
        'then on; use average="models"',
    ),
    Clash(
        PARTIAL,
        GROUPS,
        "this schedule lets slow peers miss rounds, which {name} cannot; use RPS() or AllReduce()",
    ),
    Clash(
        PARTIAL,
        RING,
        "this schedule lets slow peers miss rounds, which {name} cannot; use RPS() or AllReduce()",
    ),
    Clash(
        PARTIAL,
        CENTRE,
        "this schedule lets slow peers miss rounds, which {name} cannot; use RPS() or AllReduce()",
    ),
    Clash(
        FOLLOWING,
        GROUPS,
        "in groups a peer sees rounds of its own group only, and follows nobody else: leave out least=",
    ),
    Clash(
        FOLLOWING,
        CENTRE,
        "at a central state no peer waits for another, so none has to follow: leave out least=",
    ),
    Clash(
        CENTRE,
        OUTER,
        "a central state takes updates as they are: outer= needs an average of all; use RPS() or "
        "AllReduce(), or leave it out",
    ),
    Clash(
        CENTRE,
        COMPRESS,
        "a central state takes updates as they are: compress= needs an average of all; use RPS() or "
        "AllReduce(), or leave it out",
    ),
    Clash(
        OUTER,
        GRADIENTS,
        'outer momentum is on what models were moved by; use average="models"',
    ),
    Clash(
        OUTER,
        PARTIAL,
        "outer momentum needs all peers to take the same outer steps; a schedule that lets slow peers miss "
        "rounds cannot have it. Use every=..., or ragtag.schedules.Matched()",
    ),
    Clash(
        OUTER,
        UNSAID,
        "outer= steps by what a number of local steps have moved the model: say how many, as every=50 (after "
        "single steps its momentum comes on top of the optimizer's, and makes steps too long)",
    ),
    Clash(
        OUTER,
        LONG_DELAY,
        "Outer(delay={delay}) with an average every {between} local steps: one is used before the next "
        "begins; make delay {between} at most, or every={delay}",
    ),
    Clash(
        STREAMING,
        COMPRESS,
        "fragments and delays are of whole averages: give either them or compress=...",
    ),
    Clash(
        FRAGMENTS,
        GROUPS,
        "{name} averages in groups, each by rounds of its own, so peers would differ in which fragment is "
        "next; use RPS() or AllReduce()",
    ),
    Clash(
        COMPRESS,
        PARTIAL,
        "slow peers may miss rounds by this schedule, but need all selections; use every=...",
    ),
    Clash(
        COMPRESS,
        GROUPS,
        "{name} averages in groups, and selections go to all at once; use RPS() or AllReduce(), or leave out "
        "compress",
    ),
    Clash(
        COMPRESS,
        RING,
        "a ring passes sums on, and sums of selections do not stay small; use RPS() or AllReduce(), or leave "
        "out compress",
    ),
    Clash(
        OVERLAP,
        OUTER,
        "outer= says itself how long its averages may be under way: leave out overlap, and write "
        "outer=ragtag.Outer(delay=1)",
    ),
    Clash(
        OVERLAP,
        COMPRESS,
        "selections are of what changed since the last average, which overlap=True would not wait for: give "
        "one of them",
    ),
    Clash(
        OVERLAP,
        PARTIAL,
        "a schedule that lets slow peers miss rounds has their turns wait for the average; use every=..., or "
        "leave out overlap",
    ),
    Clash(
        OVERLAP,
        CENTRE,
        "a peer goes on from a central state when it has it: use RPS() or AllReduce(), or leave out overlap",
    ),
    Clash(
        GUARD,
        GROUPS,
        "a few liars may be most of a group: use RPS() or AllReduce(), where all average at once, or leave "
        "out guard",
    ),
    Clash(
        GUARD,
        RING,
        "a ring adds shares up on their way, so that no peer sees one alone to guard against; use RPS() or "
        "AllReduce()",
    ),
    Clash(
        GUARD,
        CENTRE,
        "a central state takes updates one by one, and has nothing to compare one with: use RPS() or "
        "AllReduce(), or leave out guard",
    ),
    Clash(
        GUARD,
        COMPRESS,
        "peers select different entries, so no entry has enough values to compare: leave out compress or "
        "guard",
    ),
    Clash(
        QUORUM,
        COMPRESS,
        "selections come to all peers as they are, and no owner makes an average of them: leave out quorum "
        "or compress",
    ),
    Clash(
        QUORUM,
        GRADIENTS,
        "peers that are fewer than the quorum go on by gradients of their own, and their models part; use "
        'average="models"',
    ),
    Clash(
        SHARES,
        COMPRESS,
        "rows of selections are few, and all peers own as many of them: leave out shares or compress",
    ),
    Clash(
        HADAMARD,
        COMPRESS,
        "a selection has no neighbours to be mixed with, and error feedback sends again what was lost: leave "
        "out hadamard or compress",
    ),
    Clash(
        HADAMARD,
        GUARD,
        "a guard compares peers value by value, and mixed values are of all the table: leave out hadamard or "
        "guard",
    ),
    Clash(
        HADAMARD,
        OUTER,
        "outer steps leave a chunk that was lost as it was, and mixed chunks are lost in part: leave out "
        "hadamard or outer",
    ),
    Clash(
        HADAMARD,
        TARGET,
        "what peers gave to an owner that died goes into the next mean, chunk by chunk, and mixed chunks "
        "lack a part each: leave out hadamard or target_batch",
    ),
    Clash(
        CORRECTION,
        MOMENTUM,
        "momentum correction is momentum already: set the optimizer's momentum to 0, or leave it out",
    ),
    Clash(
        DIFFERENCES,
        NO_MODEL,
        "differences are to the model before the first step: give model=...",
    ),
    Clash(
        COMPRESS,
        CODEC,
        "compress= sends selected values in a form of its own, so codec={codec!r} would be of no effect; "
        "leave it out, and say by ragtag.TopK(values=...) how they travel",
    ),
    Clash(
        COMPENSATE,
        SELDOM,
        "compensate= is of single gradients: average after every step, or leave it out",
    ),
    Clash(
        COMPENSATE,
        BUFFERS,
        "compensate= is of gradients, and this model's buffers have none: give buffers=False",
    ),
)
"""Pairs that do not go together; of several that hold, the first is raised."""


@dataclass(frozen=True, slots=True)
class Written:
    """A published recipe as a script writes it.

    paper: its number at arXiv.
    options: the arguments of ``crew.optimizer``.
    beside: what else belongs to it, or differs from the paper.
    """

    name: str
    paper: str
    options: str
    beside: str


PUBLISHED = (
    Written("DiLoCo", "2311.08105", "every=50, outer=ragtag.Outer()", "inner AdamW"),
    Written(
        "Streaming DiLoCo",
        "2501.18512",
        'every=10, outer=ragtag.Outer(fragments=5, delay=2), codec="int8"',
        "fragments are consecutive parts of all values; the paper sends 4 bits",
    ),
    Written(
        "SparseLoCo",
        "2508.15706",
        'every=30, outer=ragtag.Outer(lr=0.4, momentum=0.0), compress=ragtag.TopK(64 / 4096, "chunked", '
        '"2bit", decay=0.95, resync=10, bypass=False)',
        "blocks are of 4,096 consecutive values: 64 x 64 where a matrix is 64 wide. `resync`: every tenth "
        "average is of whole models, for peers that were away; with `resync=0` the paper's",
    ),
    Written(
        "NoLoCo",
        "2506.10911",
        "every=50, averager=ragtag.RandomGroups(group=2), outer=ragtag.Outer(lr=0.7, momentum=0.5, "
        "nesterov=False)",
        "the pull towards the partner has the weight of the learning rate, as in the authors' code: then one "
        "vector is exchanged, not two",
    ),
    Written(
        "Decoupled DiLoCo",
        "2604.21428",
        "schedule=ragtag.schedules.LocalSteps(10, least=5), averager=ragtag.RPS(quorum=5), "
        'outer=ragtag.Outer(fragments=3, delay=9), weight="samples"',
        "owners of blocks stand in the central syncer's place; `quorum`: more than half of the crew, and no "
        "step waits for an average; `least`: the first that is due begins one, others bring what they have. "
        "Batches of one size: then samples are the paper's weight",
    ),
    Written(
        "MuLoCo",
        "2505.23725",
        "every=30, outer=ragtag.Outer()",
        "`torch.optim.Muon` for the matrices of layers and AdamW for the rest, each in a `crew.optimizer` of "
        "its own",
    ),
)
"""As published recipes are written. A test trains each, and ``ragtag reproduce internet`` runs the newer."""


def require_together(asked: Asked) -> None:
    """Raise ValueError, saying what to write, where two of what is asked for do not go together."""
    for clash in CLASHES:
        if clash.holds(asked):
            raise ValueError(clash.why.format_map(_words(asked)))


def page() -> str:
    """``docs/combinations.md``: the table for readers."""
    lines = [
        "# What goes together",
        "",
        "`crew.optimizer(...)` takes its options in any combination but the following, which it refuses with",
        "the words on the right. This page is made from the table that it refuses by",
        "(`python -m ragtag.training.exchange.combine > docs/combinations.md`; a test compares them).",
        "",
        "| this | with this | why not, and what to write |",
        "|---|---|---|",
    ]
    named = {
        "averager": "Moshpit(group=8)",
        "name": "the averager",
        "codec": "bf16",
        "delay": 9,
        "between": 5,
    }
    for clash in CLASHES:
        why = clash.why.format_map(named).replace("|", "\\|")
        lines.append(f"| `{clash.one.written}` | `{clash.other.written}` | {why} |")
    lines += [
        "",
        "## Published recipes",
        "",
        "What to give `crew.optimizer(inner, model=model, ...)`; `ragtag reproduce internet` runs them.",
        "",
        "| recipe | arXiv | options | beside |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r.name} | {r.paper} | `{r.options}` | {r.beside} |" for r in PUBLISHED]
    return "\n".join(lines) + "\n"


def _words(asked: Asked) -> dict[str, Any]:
    return {
        "averager": repr(asked.averager),
        "name": asked.averager.name,
        "codec": getattr(asked.codec, "name", asked.codec),
        "delay": asked.delay,
        "between": asked.between,
    }


if __name__ == "__main__":
    print(page(), end="")
