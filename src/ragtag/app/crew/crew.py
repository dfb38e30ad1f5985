"""A crew: what a training script sees of Ragtag."""

from __future__ import annotations

import atexit
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from ragtag.app.crew.peer import Peer
from ragtag.app.crew.transport import DriverTransport
from ragtag.app.invitation.token import encode
from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DenseName
from ragtag.core import trace
from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.optim.kfac.communicator import Needs
from ragtag.optim.kfac.layers import Scaling
from ragtag.optim.kfac.placement import DecompositionForm
from ragtag.optim.kfac.preconditioner import KFAC, ByStep, EveryByStep
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.robust import RobustMean
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Centre
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.training.align.plan import Align
from ragtag.training.coherence import Coherence
from ragtag.training.exchange.compress import TopK
from ragtag.training.kfac import (
    CrewCommunicator,
    CrewSteps,
    Placement,
    PlacementCost,
    require_gradients,
)
from ragtag.training.named import NamedTensors, Shape
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.samples.deal import Indices
from ragtag.training.samples.sizes import BatchSizes
from ragtag.training.samples.split import Split
from ragtag.training.state.capture import Stateful
from ragtag.training.state.checkpoint import Found
from ragtag.training.state.whole import Finished, digest_of
from ragtag.training.tensors.modules import parameters_of

if TYPE_CHECKING:
    from ragtag.privacy.dp import PrivacyLedger, PrivateTraining
    from ragtag.privacy.secagg import DistributedNoise, SecureAverage
    from ragtag.privacy.split import Cut, CutForm

_log = logging.getLogger("ragtag")
LEAVE_S = 5.0
"""How long leaving may take."""
PRIVATE = "ragtag.private"
"""Among the parts of a snapshot: what was spent of privacy."""


class Crew:
    """The peers that train one model together, as one of them sees it.

    Made by ``ragtag.join``. Use it as a context manager, or call ``leave`` at the end; a script that ends
    without is taken to leave.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        this = weakref.ref(peer)

        def leave_at_exit() -> None:
            peer = this()
            if peer is None or peer.left:
                return
            error = getattr(sys, "last_value", None)  # what has ended the script
            if error is None:
                peer.leave(LEAVE_S, failed=False, over=True)  # too late to save another model
            else:
                _end(peer, error)

        atexit.register(leave_at_exit)

    def __repr__(self) -> str:
        where = "left" if self._peer.left else f"live: {sorted(self.live)}"
        return f"Crew({self._peer.place.crew!r}, peer {self.rank} of {self.size}, {where})"

    # -- Who is there

    @property
    def rank(self) -> PeerId:
        """This peer's number. One that was out of reach for so long that its place was given away gets a new
        one when it comes back.
        """
        return self._peer.rank

    @property
    def size(self) -> int:
        """How many peers the crew began with."""
        return self._peer.place.size

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers believed to take part now; always with this one."""
        return self._peer.transport.live

    @property
    def seed(self) -> int:
        """The crew's seed, the same on every peer."""
        return self._peer.place.seed

    @property
    def left(self) -> bool:
        """Whether this peer has left."""
        return self._peer.left

    def invitation(self, minutes: int | None = None) -> str:
        """A token for ``ragtag join``: through this peer, and up to seven others that live now.

        minutes: for how long it lets newcomers in (``None``: as long as one of these peers is there); the
        members hold to that, by their own clocks.

        Raises RuntimeError where nobody can join: the peer is alone, or was started without membership, or
        (HasLeft) has left.
        """
        self._peer.require_in("crew.invitation()")
        ends_unix_s = 0 if minutes is None else int(time.time()) + 60 * minutes
        return encode(self._peer.token().invitation(ends_unix_s))

    # -- Training

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        averager: Averager | str | None = None,
        *,
        model: torch.nn.Module | None = None,
        name: str | None = None,
        average: Literal["models", "gradients"] = "models",
        every: int | None = None,
        schedule: Schedule | Centre | ProgressiveGrouping | Averager | str | None = None,
        weight: float | Callable[[], float] | Literal["samples"] | None = None,
        target_batch: float | None = None,
        buffers: bool = True,
        codec: Codec | DenseName | None = None,
        compress: TopK | None = None,
        outer: Nesterov | Streaming | None = None,
        align: Align | bool = True,
        overlap: bool = False,
        guard: RobustMean | None = None,
        coherence: Coherence | None = None,
        deadline_s: float | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> CrewOptimizer:
        """Wrap an optimizer: it takes its local steps, and averages with the crew.

        averager: ``ragtag.RPS()`` (the default), ``AllReduce``, ``Moshpit``, ``RandomGroups``, ``Centre``; or
            a name: "rps", "rps+repair", "allreduce", "ring", "moshpit", "random-groups" ("moshpit=4").
        model: whose parameters these are; given, the crew compares models now, else when it averages. At
            the second step a warning names its parameters that need a gradient and are in no optimizer.
        name: of what it averages, the same on all peers; several optimizers are else told apart by the order
            in which they are made ("model", "model 2", ...).
        average: "models" after local steps, or "gradients" before them.
        every: average after so many local steps.
        schedule: or when one of ``ragtag.schedules`` says so; or a name: "partial", "matched", "ssp=4",
            "dssp=2/8", "dropcompute=8/0.5", "backup", "softsync", "asynchronous", "grouping".
        weight: how much this peer counts: a number, a function, or "samples" since the last average (the
            default with a target batch, else 1).
        target_batch: with average="gradients": all gather until they have so many samples together, and then
            take one step; ``optimizer.samples`` says what became of them. Several optimizers have one
            target, and step together.
        buffers: average the model's floating-point buffers, too.
        codec: how values travel: "fp32" (the default), "bf16" (half the bytes) or "int8" (a quarter).
        compress: ``ragtag.TopK(...)``: send the largest entries, the rest later.
        outer: ``ragtag.Outer(...)``: outer momentum on averages of models (DiLoCo).
        align: ``ragtag.Align(...)``, or False: how replicas that average gradients are kept alike.
        overlap: average while the next step is computed, and correct the model by it after that step.
        guard: ``ragtag.TrimmedMean(liars=.2)`` or ``ragtag.CentredClipping(liars=.2)``: averages that so many
            of the peers cannot spoil by what they send (an owner that lies about an average can).
        coherence: ``ragtag.Coherence()``: measure how far gradients agree with earlier ones.
        deadline_s: bounds each round; by default the bound comes from measurement.
        on_outcome: called with each round's outcome.

        More on each: ``ragtag.training.optimizer.optimizer.CrewOptimizer``. Raises SchemaMismatch where
        another peer has another model; TypeError or ValueError, saying what to write, for what cannot be.
        """
        peer = self._peer
        peer.require_in("crew.optimizer(...)")
        if PRIVATE in peer.keeper.extra:
            raise ValueError(
                "crew.optimizer: what it averages has no noise, beside crew.private: make it before "
                "that, which takes it as beside=[...] where nothing it learns comes from the private samples"
            )

        number = len(peer.models)

        def told(outcome: Outcome) -> None:
            peer.averaged(peer.models[number], outcome)  # the optimizer is the script's to let go of
            if on_outcome is not None:
                on_outcome(outcome)

        fine = isinstance(optimizer, torch.optim.Optimizer)  # else it is refused below
        parameters = parameters_of(optimizer.param_groups) if fine else []
        compared = isinstance(peer.transport, DriverTransport) and not any(map(is_lazy, parameters))
        initial = None if model is not None else digest_of(parameters) if compared else ""
        with peer.naming(name) as taken:
            made = CrewOptimizer(
                optimizer,
                peer.transport,
                method=averager,
                average=average,
                schedule=schedule,
                every=every,
                model=model,
                name=taken,
                buffers=buffers,
                weight=weight,
                target_batch=target_batch,
                samples=peer.log.samples_so_far,
                outer=outer,
                codec=codec,
                compress=compress,
                align=align,
                overlap=overlap,
                guard=guard,
                deadline_s=deadline_s,
                coherence=coherence,
                siblings=peer.siblings,
                on_outcome=told,
                on_ready=lambda ready: peer.begin(ready, initial),
                on_note=peer.log.note,
                on_step=partial(peer.stepped, number),
                seed=self.seed,
            )
        peer.models.append(made._averaged)
        return made

    def tensors(
        self,
        name: str,
        *,
        averaged: Mapping[str, Shape] | None = None,
        computed: Mapping[str, Shape] | None = None,
        averager: Averager | str | None = None,
        codec: Codec | DenseName | None = None,
    ) -> NamedTensors:
        """Tensors of a part of training's own, which it averages, or computes at one owner for all.

        name: of all of them together, the same on all peers.
        averaged, computed: names to shapes (or example tensors).
        averager: ``ragtag.RPS()`` (the default) or another that averages at once.
        codec: how they travel.

        Snapshots and checkpoints have the newest values. More: ``ragtag.training.named``.

        Raises SchemaMismatch where another peer has other names or shapes; ValueError, saying what to write,
        for what cannot be.
        """
        peer = self._peer
        peer.require_in("crew.tensors(...)")
        with peer.naming(name) as taken:
            made = NamedTensors(
                peer.transport,
                taken,
                averaged,
                computed,
                method=averager,
                codec=codec,
                seed=self.seed,
                founded=self.size,
                away=peer.on_its_way,
                require_in=peer.require_in,
                on_outcome=peer.record_round,
                on_publish=peer.took_part,
            )
        peer.names[made._channel] = taken
        peer.keeper.keep(**{f"ragtag.tensors/{taken}": made})
        return made

    def cut(
        self,
        form: CutForm,
        *,
        server: PeerId | Sequence[PeerId] = 0,
        standby: PeerId | Sequence[PeerId] | None = None,
        name: str = "split",
    ) -> Cut:
        """A cut between clients and a server, for ``ragtag.privacy.SplitClient`` and ``SplitServer``.

        form: what crosses, on all peers the same.
        server: the peer that trains the layers above the cut; or several, among which clients are dealt.
        standby: the peer that has a copy of these layers, and goes on where the server dies or freezes; or
            several, in the order in which they do. All others that are here now are clients.
        name: of this cut, on all peers the same.

        Raises SchemaMismatch where another peer has another form, server or standby; ValueError for what
        cannot be.
        """
        from ragtag.privacy.split import Cut

        peer = self._peer
        peer.require_in("crew.cut(...)")
        with peer.naming(name) as taken:
            return Cut(
                peer.transport,
                form,
                server=server,
                standby=standby,
                name=taken,
                on_publish=peer.took_part,
            )

    def secure_average(
        self,
        shapes: Mapping[str, Shape],
        *,
        clip: float,
        dropouts: int,
        colluders: int = 1,
        aggregator: PeerId = 0,
        name: str = "secure",
        deadline_s: float = 60.0,
        noise: DistributedNoise | None = None,
        ledger: PrivacyLedger | None = None,
    ) -> SecureAverage:
        """Averages of all peers' tensors of which nobody, the peer that adds up included, sees another's.

        shapes: names to shapes (or example tensors), on all peers the same; so is all else.
        clip: values beyond it, or below -clip, count as it.
        dropouts: peers that may drop out in a round; with more there is no average.
        colluders: peers, the aggregator among them, that may tell each other all without seeing another's.
        aggregator: the peer that decides who is in a sum, and unmasks it. Each peer adds up a part.
        name: of these averages.
        deadline_s: for a stage of the first round, for peers that have not called yet in the first four, and
            for a stage that would leave too few; a peer that takes longer has dropped out. Later stages take
            as long as such stages took, with head-room.
        noise: ``ragtag.privacy.DistributedNoise(multiplier=1.0, max_norm=1.0)``: peers add noise that
            makes each average differentially private.
        ledger: what was spent of this peer's vectors; ``None``: what this run spends.

        All peers that are here now take part. ``ragtag.privacy.secagg`` says what it does not protect from.

        Raises SchemaMismatch where another peer has other shapes or settings; ValueError for what cannot be.
        """
        from ragtag.privacy.secagg import SecureAverage

        peer = self._peer
        peer.require_in("crew.secure_average(...)")
        with peer.naming(name) as taken:
            return SecureAverage(
                peer.transport,
                shapes,
                clip=clip,
                dropouts=dropouts,
                colluders=colluders,
                aggregator=aggregator,
                name=taken,
                seed=self.seed,
                deadline_s=deadline_s,
                noise=noise,
                ledger=ledger,
                on_publish=peer.took_part,
            )

    def private(
        self,
        model: torch.nn.Module,
        optimizer: CrewOptimizer,
        loader: DataLoader[Any],
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        delta: float,
        ledger: PrivacyLedger,
        beside: Sequence[CrewOptimizer] = (),
        reduction: Literal["mean", "sum"] = "mean",
        seed: int | None = None,
    ) -> PrivateTraining:
        """Differentially private steps on samples that this peer alone has: what is averaged has noise.

        Iterate over it in place of a split; each batch is for one step.

        optimizer: the crew's, of all that the model learns.
        loader: of this peer's samples; its batch size is the expected one.
        noise_multiplier: the noise's standard deviation over ``max_grad_norm``.
        max_grad_norm: to which the gradient of each sample is clipped.
        delta: below 1 over the number of samples.
        ledger: ``ragtag.privacy.PrivacyLedger("hospital A", "privacy.json")``: what is spent of these
            samples, in a file that is written before each batch.
        beside: this peer's other optimizers, of which you know that nothing they learn comes from these
            samples (a generator that sees a private critic's gradients only): what they average has no noise.
        reduction: of the loss over a batch: the mean or sum of samples' own losses. NoPeek is none.
        seed: for simulations and tests: whoever knows it can take the noise off.

        Epsilon is in ``private.epsilon``, trace and report; snapshots and checkpoints have what was spent.
        ``ragtag.privacy.dp`` says what is protected, and what is not.

        Raises ValueError, saying what to do, for what cannot be private, before anything has left;
        ragtag.privacy.NoOpacus: it takes ``pip install ragtag[private]``.
        """
        from ragtag.privacy.dp import PrivateTraining

        peer = self._peer
        peer.require_in("crew.private(...)")
        if any(name.startswith("ragtag.kfac/") for name in peer.keeper.extra):
            raise ValueError(
                "crew.private: K-FAC averages factors of samples, which no noise hides: leave it out"
            )
        if PRIVATE in peer.keeper.extra:
            raise ValueError(
                "crew.private: this peer trains one model privately already: go on with what it returned, or "
                "leave and join again"
            )
        named = {id(other._averaged) for other in [optimizer, *beside] if isinstance(other, CrewOptimizer)}
        for averaged in peer.models:
            if id(averaged) not in named:
                raise ValueError(
                    f"crew.private: {averaged.name!r} is averaged, too, without noise: put its layers into "
                    "the private model; or, if nothing that it learns comes from these samples, give its "
                    "optimizer as beside=[...]"
                )
        made = PrivateTraining(
            model,
            optimizer,
            loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            delta=delta,
            ledger=ledger,
            reduction=reduction,
            seed=seed,
            on_spent=lambda: peer.log.record_privacy(made),
        )
        peer.keeper.keep(**{PRIVATE: made})
        return made

    def kfac(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str | None = None,
        lr: float | ByStep | None = None,
        damping: float | ByStep = 0.003,
        factor_decay: float | ByStep = 0.95,
        kl_clip: float | ByStep | None = 0.001,
        factor_every: int | EveryByStep = 1,
        inverse_every: int | EveryByStep = 10,
        images_every: int = 1,
        block_rows: int | None = None,
        form: DecompositionForm = "eigen",
        scaling: Scaling = "pytorch",
        factor_dtype: torch.dtype = torch.float32,
        grad_scale: float | Callable[[], float] = 1.0,
        background: bool = True,
        skip: Sequence[str] = (),
        placement: Placement = "communication",
        cost: PlacementCost = "compute",
        averager: Averager | str | None = None,
        codec: Codec | DenseName | None = None,
    ) -> KFAC:
        """K-FAC with the crew: call its ``step()`` before ``optimizer.step()``.

        Each layer's factors are averaged with all peers', and decomposed at one of them for all; a second one
        does it where that is silent. Nobody waits for a decomposition: a peer goes on with the newest that it
        has, whose age is in ``kfac.ages()``, ``kfac.age`` and the trace. Towards a target batch call it after
        each batch.

        optimizer: the crew's, or its inner one, or a plain one. Gradients that the crew averages are
            preconditioned after that.
        name: of what is averaged and computed, the same on all peers ("kfac", "kfac 2", ...).
        placement: "communication": all peers precondition all layers, and no gradient travels for it.
            "memory": one peer does each layer's, and it alone has the bases; in each step gradients travel.
            A number: that share of the peers does. Less than all needs an optimizer that averages gradients
            in each step.
        cost: of a decomposition, by which owners have even loads: "compute" (n^3), "memory" (n^2), or
            "measured": peers time their own, and one of them says what all place by from then on.
        averager: of factors, and of gradients that travel: ``ragtag.RPS()`` (the default), or another that
            averages at once (without ``hadamard`` where they travel).
        codec: how factors and bases travel: "fp32" or "bf16".
        The others: ``ragtag.KFAC``. All peers give the same.

        Raises SchemaMismatch where another peer has other layers or settings; TypeError or ValueError, saying
        what to write, for what cannot be.
        """
        peer = self._peer
        peer.require_in("crew.kfac(...)")
        inner = optimizer.inner if isinstance(optimizer, CrewOptimizer) else optimizer
        steps = CrewSteps(peer.models, inner, peer.transport.heard_of)

        def told(outcome: Outcome) -> None:
            peer.record_round(outcome)
            if here:
                peer.log.record_kfac(here[0], outcome)

        def noted(layer: str, what: str) -> None:
            _log.warning("K-FAC: %s: %s", layer, what)
            peer.log.note(Noted("kfac", self.rank, f"{layer}: {what}"))

        def joined(needs: Needs) -> CrewCommunicator:
            made = CrewCommunicator(
                peer.transport,
                taken,
                needs,
                placement=placement,
                cost=cost,
                steps=steps,
                averager=averager,
                codec=codec,
                seed=self.seed,
                founded=self.size,
                away=peer.on_its_way,
                require_in=peer.require_in,
                on_outcome=told,
                on_publish=peer.took_part,
            )
            crews.append(made)
            return made

        here: list[KFAC] = []
        crews: list[CrewCommunicator] = []
        require_gradients(placement, steps)
        if PRIVATE in peer.keeper.extra:
            raise ValueError(
                "crew.kfac: its factors are of samples, which no noise hides, beside crew.private"
            )
        with peer.naming(name, "kfac") as taken:
            kfac = KFAC(
                model,
                inner,
                lr=lr,
                damping=damping,
                factor_decay=factor_decay,
                kl_clip=kl_clip,
                factor_every=factor_every,
                inverse_every=inverse_every,
                images_every=images_every,
                block_rows=block_rows,
                form=form,
                scaling=scaling,
                factor_dtype=factor_dtype,
                grad_scale=grad_scale,
                background=background,
                skip=skip,
                communicator=joined,
                on_note=noted,
            )
        here.append(kfac)
        peer.names[crews[0].tensors._channel] = taken
        kept: dict[str, Stateful] = {
            f"ragtag.tensors/{taken}": crews[0].tensors,
            f"ragtag.kfac/{taken}": kfac,
        }
        peer.keeper.keep(**kept)
        return kfac

    def keep(self, **objects: Stateful) -> None:
        """More that belongs to the training than model and optimizer: schedulers, a GradScaler, a sampler.

        They go into checkpoints and to peers that come late. A peer that came late, or that resumed, loads
        here what was found of them. Each has state_dict and load_state_dict.
        """
        self._peer.keeper.keep(**objects)

    def save(self, folder: str | Path, keep: int = 3) -> Path:
        """Write a checkpoint of this peer: model, optimizer, what was given to ``keep``; returns its path.

        keep: how many of its own stay.

        It is on the disk, whole, when this returns. Any number of peers may save into one folder. Raises
        ValueError where the folder is '' or ``keep`` is below 1, and OSError where it could not be written;
        earlier ones are as they were.
        """
        return self._peer.keeper.save(_named(folder), keep)

    def resume(self, folder: str | Path) -> Found | None:
        """Load the newest whole checkpoint of any peer from a folder, to be called before the first step.

        ``None``: there is none, or this peer came late and has the crew's state already, which is newer.
        All peers call it. Where their folders differ those that find less take the state of one that found
        the newest: ``path`` is ``None`` there. Damaged checkpoints are named in the log, the trace and the
        result, and passed over.

        Raises:
            ValueError: it is of another model or optimizer, naming the first difference, or the folder is '';
                nothing has changed.
            ragtag.training.state.checkpoint.NoWholeCheckpoint: all are damaged.
            StateMissing: another peer's checkpoint is newer, and its state did not come.
            HasLeft: this peer has left.
        """
        self._peer.require_in("crew.resume(...)")
        return self._peer.resume(_named(folder))

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs of the crew, 0 to n - 1, until it has done them.

        A peer that comes late begins with the epoch that the crew is in, one that was away goes on with it,
        and a crew that resumes begins with its checkpoint's. All peers end when two have done the last epoch,
        of two peers one. In each epoch go through ``crew.split(loader)`` once. With no split, or with shards,
        the second of those that are ahead counts for all, as one may be wrong, of two peers the first. Make
        the optimizers before: a newcomer that averages gradients gets into step here. In a crew of more than
        64, every 64 peers count their own.

        Raises ValueError: n is no number of epochs; HasLeft: this peer has left.
        """
        self._peer.require_in("counting epochs")
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"epochs: {n!r}; give how many the crew does in all, 0 or more")
        kept = self._peer.keeper.first
        if self._peer.transport.late and kept is not None and kept.arrive is not None:
            kept.average()  # the others answer a peer that takes part
        return self._counted(n)

    def _counted(self, n: int) -> Iterator[int]:
        with closing(self._peer.data.count(n)) as counted:
            for epoch in counted:
                yield epoch
                self._peer.require_in("counting epochs")

    @property
    def step(self) -> int:
        """How many averages the crew has made in the whole training; a run that resumes counts on.

        The same on all peers after the same average, however many steps each has taken: bring schedulers that
        step with batches to it (``while scheduler.last_epoch < crew.step: scheduler.step()``). A peer that
        lacks averages has the count of its last one, until it averages with the others again. ``finish``
        brings all to the newest count that is no more than eight above the middle one: a peer beyond that, as
        one that went on alone for long, keeps its own, as what it says is its word alone. The averages are
        those of the first optimizer; with a central state they are this peer's own.
        """
        return self._peer.data.epochs.step

    def split(
        self,
        loader: DataLoader[Any],
        *,
        shards: Sequence[Sequence[int] | Indices] | None = None,
        seed: int | None = None,
        sizes: BatchSizes | None = None,
    ) -> Split:
        """Batches of a loader, drawn from one pool with the others; survivors use what dead peers do not.

        Peers make their splits in the same order. What an epoch came to is logged and traced. In a crew that
        began with more than 64 peers, every 64 of them have a pool of their own, with their part of the data.
        A crew's lowest peer warns once what the batches come to together (``training.samples.together``).
        The same loader gives the same split again, so that ``for batch in crew.split(loader)`` inside a loop
        over epochs goes through a new epoch each time. In ``crew.epochs`` a loader that is made anew in each
        epoch, in the same way, goes on with the split of the one before. For other loops make loaders once.

        shards: the indices of each peer, where the samples are not one pool (``ragtag.skewed_shards``).
        seed: of the order; by default the crew's.
        sizes: ``ragtag.BatchSizes()``: each peer's batches follow its speed, as its optimizer measures it.

        Raises ValueError where the loader is split already with other options, or cannot be split; TypeError
        for what is no DataLoader.
        """
        self._peer.require_in("crew.split(...)")
        return self._peer.data.split(loader, shards, seed, sizes)

    # -- What live view and report show

    def log(self, *, loss: Any = None, accuracy: float | None = None) -> None:
        """Tell the newest batch's loss, or how accurate this peer's model is, for live view and report.

        Both as a number or a tensor of one element. Steps and samples are counted by themselves, and so is a
        loss that a closure returns. At most two records a second are written, of the newest figures.
        Raises TypeError: a figure is something else. ValueError: an accuracy outside 0 to 1.
        """
        self._peer.log.log(loss=loss, accuracy=accuracy)

    def log_step(self, loss: float, samples: int, steps: int = 1) -> None:
        """Record local steps now: the last one's loss, how many samples they had, and how many they were.

        Where the crew's own optimizers and splits count steps and samples, these counts go into the record.
        """
        self._peer.log.log_step(loss, samples, steps)

    def log_eval(self, accuracy: float, loss: float | None = None, n: int = 0, model: str = "own") -> None:
        """Record how good a model is: this peer's own, or the mean of all."""
        self._peer.log.log_eval(accuracy, loss, n, model)

    # -- The end

    def finish(self, deadline_s: float | None = None) -> Finished:
        """The training is over: one last agreed average, and the same model on all peers, bit for bit.

        Call it before the model is saved or judged; ``leave`` does it where the script has not. Peers that
        pause are waited for, for ``deadline_s`` at most (by default as long as ``join`` waits); one that
        still trains, for a tenth of the time that was trained (4 s at least). Take no step afterwards.

        Raises ragtag.NotFinite where a value to be averaged is none; HasLeft: this peer has left.
        """
        self._peer.require_in("crew.finish()")
        return self._peer.finish(deadline_s)

    def leave(self, deadline_s: float = LEAVE_S, *, finish: bool = True) -> None:
        """Finish (see ``finish``), send what is still queued, tell the others, and end.

        deadline_s: for what is queued.
        finish: False: end with the model as it is, and wait for nobody.

        Calling it twice does no harm. From then on this crew's optimizers, splits, named tensors and K-FACs
        raise ``ragtag.HasLeft``; models, ``optimizer.inner`` and ``save`` work as before. K-FACs are closed:
        ``optimizer.inner`` takes the gradients as they are.
        """
        try:
            if finish and not self._peer.left:
                self.finish()
        finally:
            _leave(self._peer, deadline_s, failed=False, over=True)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            _end(self._peer, error)


def _end(peer: Peer, error: BaseException) -> None:
    """An error ends this peer, which waits for nobody."""
    failed = _is_failure(error)
    if failed and peer.place.ready_fd is None:  # else the launcher records it, with its traceback
        what = f"{type(error).__name__}: {error}"
        peer.log.record(trace.Error(t=peer.log.now_s(), peer=peer.rank, what=what))
    _leave(peer, LEAVE_S, failed, over=False)


def _leave(peer: Peer, deadline_s: float, failed: bool, over: bool) -> None:
    """Leave, and end the hooks and threads of what this peer has made."""
    try:
        peer.leave(deadline_s, failed, over)
    finally:
        for kept in peer.keeper.extra.values():
            if isinstance(kept, KFAC):
                kept.close()


def _is_failure(error: BaseException) -> bool:
    """Whether it ends a peer badly: being asked to stop does not, and no more does ``sys.exit(0)``."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return not isinstance(error, KeyboardInterrupt)


def _named(folder: str | Path) -> Path:
    """The folder of checkpoints. Without a name it would be the one that the script runs in.

    Raises ValueError: it is ''.
    """
    if folder == "":
        raise ValueError("the checkpoints' folder is ''; name one, or give '.' for the one of this process")
    return Path(folder)
