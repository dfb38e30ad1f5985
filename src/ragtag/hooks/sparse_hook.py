"""A communication hook that sends the largest entries of each bucket, with error feedback.

Top-k sparsification as in Shi, Chu, Cheung, See 2019 (arXiv 1911.08772), over DDP's own process group: one
all-gather per bucket, and one all-reduce of what is too small for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public all the same
from torch.futures import Future

from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.pack import Values
from ragtag.codecs.sparse.selection import Selector
from ragtag.codecs.sparse.selectors import selector_named
from ragtag.codecs.sparse.wire import decode
from ragtag.core.errors import NotFinite
from ragtag.core.types import Bytes, Floats
from ragtag.hooks import checkpoint
from ragtag.hooks import message as wire
from ragtag.hooks.agree import require_agreement
from ragtag.hooks.backward import Names, after_backward
from ragtag.hooks.message import complaint
from ragtag.hooks.plan import Last, Memory, Plan, UnderWay
from ragtag.hooks.stats import Stats, stats_of
from ragtag.training.exchange.asked import require_kinds

DENSE_BELOW = 1024


class SparseState:
    """What ``sparse`` remembers on one rank: residuals by parameter, and what every rank does the same.

    ratio: the share of values that is sent, above 0 and at most 1; at least one of each bucket.
    selection: "sampled" (exact top-k, fast), "exact", "random", "chunked", "gaussian-k", "gaussian-k-strict",
        "dgc", "sidco", "reused", or a selector of ``ragtag.codecs``.
    values: how they travel: "int8" (a scale for each 256), "2bit" (a sign and one of two magnitudes for each
        256), "bf16" or "fp32"; rounding is fed back too.
    momentum: above 0, the hook sums velocities (momentum correction, Lin et al. 2018): none in the optimizer.
    warm_up: steps in which the share falls from 25 % (or ``ratio``) to ``ratio``.
    dense_below: tensors of fewer values (biases, norms) are averaged whole.
    decay: what is left of the residual from step to step.
    not_finite: "raise": NaN or infinity on any rank ends ``backward()`` with NotFinite on all; "skip": every
        rank's bucket becomes NaN, as with a dense all-reduce, so that ``GradScaler`` skips the step.
    model: for names in messages and checkpoints.
    process_group: DDP's, where it is not the default one.

    Raises ValueError for what cannot be.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ratio: float = 0.001,
        selection: str | Selector = "sampled",
        values: Values = "int8",
        momentum: float = 0.0,
        warm_up: int = 0,
        dense_below: int = DENSE_BELOW,
        decay: float = 1.0,
        not_finite: Literal["raise", "skip"] = "raise",
        model: torch.nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        require_kinds(model=model)
        if dense_below < 0:
            raise ValueError(f"dense_below is {dense_below}: give a number of values, 0 or more")
        if not_finite not in ("raise", "skip"):
            raise ValueError(f'not_finite is {not_finite!r}: give "raise" or "skip"')
        selector = selector_named(selection) if isinstance(selection, str) else selection
        density = Density(ratio, warm_up_rounds=warm_up, start=max(0.25, ratio if 0 < ratio <= 1 else 0.25))
        self._options = Options(density, selector, values, momentum=momentum, decay=decay)
        self._not_finite, self._dense_below, self._seed = not_finite, dense_below, seed
        self._group = process_group
        self._names = Names(model)
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._kept: dict[int, Memory] = {}  # of parameters that no plan has
        self._loaded: dict[str, Memory] = {}
        self._step, self._skipped = -1, 0
        self._agreed = False
        self._faults: list[tuple[int, wire.Head]] = []
        self._under_way: list[UnderWay] = []

    # -- What DDP calls

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Send one bucket; the future holds its average. See ``sparse``."""
        group = self._group if self._group is not None else dist.distributed_c10d._get_default_group()
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin(group, buffer.device)
        plan = self._plan(bucket, group.rank())
        head, payload, dense = self._offer(plan, buffer.detach().to("cpu", torch.float32).numpy())
        message = torch.from_numpy(wire.pack(head, payload, plan.room)).to(buffer.device)
        dense_sum = torch.from_numpy(dense).to(buffer.device)
        reduced = dist.all_reduce(dense_sum, group=group, async_op=True) if plan.n_dense else None
        table = torch.empty((group.size(), len(message)), dtype=torch.uint8, device=buffer.device)
        gathered = dist.all_gather(list(table), message, group=group, async_op=True)

        waits = [gathered] if reduced is None else [gathered, reduced]
        future: Future[Tensor] = Future()
        self._under_way.append(UnderWay(plan, waits, table, dense_sum, buffer, future))
        if bucket.is_last():
            self._receive()
            after_backward(self._finish)
        return future

    def _receive(self) -> None:
        """Take all buckets' messages, in the last one's hook: others have travelled during the backward pass.

        Not in callbacks of the futures: these run in the process group's threads, where Python code may still
        run while the interpreter shuts down.
        """
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            for work in one.waits:
                work.wait()
            self._take(one.plan, self._step, one.table.cpu().numpy(), one.dense.cpu().numpy(), one.buffer)
            one.future.set_result(one.buffer)

    def _begin(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if not self._agreed:
            require_agreement(self._description(), group, device)
            self._agreed = True
        for plan in self._plans.values():
            plan.settle(delivered=False)  # a step that came to no end
        self._faults.clear()
        self._under_way.clear()
        self._step += 1

    def _offer(self, plan: Plan, flat: Floats) -> tuple[wire.Head, Bytes, Floats]:
        """What this rank sends: a head, its fragments, and the small tensors."""
        nothing = np.zeros(0, np.uint8), np.zeros(plan.n_dense, np.float32)
        plan.room = plan.room or plan.first_room(self._step)
        fault = plan.fault_of(flat, self._step)
        if fault is not None:
            return fault, *nothing
        try:
            fitted = plan.prepare(flat, self._step)
        except NotFinite:  # gradient plus residual, each of them finite
            return wire.Head(self._step, fault=wire.SUM, number=plan.numbers[0]), *nothing
        head = wire.Head(self._step, fitted.wanted, len(fitted.payload))
        dense = plan.gather(flat, sparse=False)
        return head, fitted.payload, dense.copy()  # the bucket's own memory is not reduced in place

    def _take(self, plan: Plan, step: int, table: Bytes, dense: Floats, buffer: Tensor) -> None:
        """Add up all ranks' messages, and write the average into the bucket."""
        messages = [wire.unpack(row) for row in table]
        for rank, (head, _) in enumerate(messages):
            if head.step != step:
                raise RuntimeError(
                    f"rank {rank} is at step {head.step} of its sparse hook, this one at {step}: load every "
                    "rank's state_dict of the same step, or none's"
                )
        faults = [(rank, head) for rank, (head, _) in enumerate(messages) if head.fault != wire.FINE]
        if faults:
            self._faults += faults
            if self._not_finite == "skip":
                buffer.fill_(torch.nan)
            return
        total = np.zeros(plan.n_sparse, np.float32)
        plan.last = Last(returned=plan.returned, message_bytes=table.shape[1])
        for rank, (_, chunks) in enumerate(messages):
            if not len(chunks):
                continue
            got = decode(chunks, plan.feedback.form(step), round_=step, sender=rank & 0xFFFF)
            if got.refused:
                raise RuntimeError(f"rank {rank}, fragment {got.refused[0][0]}: {got.refused[0][1]}")
            total[got.indices] += got.values  # each index at most once
            if rank == plan.rank:
                plan.last.entries = len(got.values)
                plan.last.energy = float(np.dot(got.values.astype(np.float64), got.values))
        share = np.float32(1 / len(messages))
        mean = plan.scatter(total * share, plan.dense_average(dense * share))
        buffer.copy_(torch.from_numpy(mean).view_as(buffer))
        plan.room = plan.next_room([head for head, _ in messages], step)

    def _finish(self) -> None:
        """All buckets are here: the step counts on every rank, or on none."""
        for plan in self._plans.values():
            plan.settle(delivered=not self._faults)
        if not self._faults:
            return
        self._skipped += 1
        if self._not_finite == "raise":
            raise NotFinite(complaint(self._faults, self._names))

    # -- Plans

    def _plan(self, bucket: GradBucket, rank: int) -> Plan:
        """This bucket's plan; DDP deals its buckets anew after the first iteration."""
        parameters = bucket.parameters()
        numbers = self._names.numbers(parameters)
        plan = self._plans.get(numbers)
        if plan is not None:
            return plan
        sizes = [parameter.numel() for parameter in parameters]
        if sum(sizes) != bucket.buffer().numel():
            raise RuntimeError(f"a bucket of {bucket.buffer().numel()} values for {sum(sizes)} of parameters")
        self._dissolve(set(numbers))
        for number, size in zip(numbers, sizes, strict=True):
            self._recall(number, size)
        plan = self._plans[numbers] = Plan(
            numbers,
            sizes,
            self._options,
            dense_below=self._dense_below,
            rank=rank,
            seed=self._seed,
            memories=self._kept,
        )
        return plan

    def _dissolve(self, numbers: set[int]) -> None:
        """Keep what plans with one of these parameters remember, and drop the plans."""
        for key in [key for key in self._plans if not numbers.isdisjoint(key)]:
            self._kept |= self._plans.pop(key).memories()

    def _recall(self, number: int, size: int) -> None:
        memory = self._loaded.pop(self._names.names[number], None)
        if memory is not None:
            checkpoint.require_size(memory, self._names.described(number), size)
            self._kept[number] = memory

    def _description(self) -> dict[str, object]:
        options = self._options
        return {
            "ratio": options.density.ratio,
            "selection": options.selector.name,
            "values": options.values,
            "momentum": options.momentum,
            "warm_up": options.density.warm_up_rounds,
            "decay": options.decay,
            "dense_below": self._dense_below,
            "not_finite": self._not_finite,
            "seed": self._seed,
            "step": self._step,
        }

    # -- What users read

    @property
    def stats(self) -> Stats:
        """Figures of the last step (reads the residual once)."""
        group = self._group if self._group is not None else dist.distributed_c10d._get_default_group()
        return stats_of(self._plans.values(), self._step + 1, self._skipped, group.size())

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and velocities by parameter, as tensors: every rank saves its own.

        What is under way counts as not sent.
        """
        memories = dict(self._kept)
        for plan in self._plans.values():
            memories |= plan.memories()
        named = {self._names.names[number]: memory for number, memory in memories.items()}
        return checkpoint.save(self._step, self._skipped, self._loaded | named)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what this rank's ``state_dict`` gave; another ratio or selection may go on with it.

        Raises ValueError naming what does not fit (a parameter's size is looked at when its bucket comes).
        """
        self._step, self._skipped, self._loaded = checkpoint.load(state)
        self._plans.clear()
        self._kept.clear()
        self._agreed = False


def sparse(state: SparseState, bucket: GradBucket) -> Future[Tensor]:
    """Average a DDP bucket's largest entries.

    ``model.register_comm_hook(ragtag.hooks.SparseState(ratio=0.001), ragtag.hooks.sparse)``

    Each rank adds the gradient to its residual, takes out what ``selection`` chooses, and all ranks add up
    what all have chosen, divided by the number of ranks; small tensors are averaged whole. Every rank gets
    the same bits. Over gloo on CPUs; buckets on a GPU are copied to the host and back.

    Raises:
        ValueError: at the first step, on all ranks, where one has other options; it is named.
        NotFinite: from ``backward()``, on all ranks, naming rank and parameter, where a gradient is not
            finite (see ``not_finite``). Training can go on with the next batch.
    """
    return state._exchange(bucket)


# DDP compares the annotations themselves, not their texts
sparse.__annotations__ = {"state": SparseState, "bucket": GradBucket, "return": Future[Tensor]}
