"""DDP with a process group of one, so that no other process can make it wait."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public all the same
from torch.nn.parallel import DistributedDataParallel

from ragtag.hooks.crew_hook import CrewLike, CrewState, average
from ragtag.training.exchange.asked import require_kinds


def ddp(model: torch.nn.Module, crew: CrewLike | CrewState, **options: Any) -> DistributedDataParallel:
    """Wrap a model in a DDP whose gradients are averaged with ``crew`` (of ``ragtag.join()``) alone.

    DDP gets a process group with this process as its only rank, so that whatever it does there (verifying
    shapes, broadcasting weights, buffers and rebuilt buckets) stays here. ``torch.distributed`` need not be
    initialised. Weights are those of the lowest peer; buffers are averaged with the models.

    model: the module to wrap.
    crew: of ``ragtag.join()``, or a ``CrewState`` for its options.
    options: DDP's own, but for ``process_group``, ``init_sync``, ``broadcast_buffers`` and
        ``forward_sync_buffers``, which are set here.

    Raises ValueError for these, TypeError for what is no model; what ``CrewState`` raises.
    """
    own = {"process_group", "device_mesh", "init_sync", "broadcast_buffers", "forward_sync_buffers"}
    if taken := own & set(options):
        raise ValueError(f"{', '.join(sorted(taken))}: ragtag.hooks.ddp sets what DDP's process group does")
    require_kinds(model=model)
    state = crew if isinstance(crew, CrewState) else CrewState(crew, model)
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    quiet: dict[str, Any] = {"process_group": alone(), "init_sync": False, buffers: False}
    wrapped = DistributedDataParallel(model, **options, **quiet)
    wrapped.register_comm_hook(state, average)
    return wrapped


def alone() -> dist.ProcessGroup:
    """A process group of one, over a store in this process's memory: nothing leaves the process.

    It is not the default group and not registered, so a ``DistributedSampler`` does not take it for the crew.
    CPU tensors only: DDP's own small collectives (which parameters were used) run on gloo.
    """
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=60))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name("ragtag-alone")  # type: ignore[arg-type]
    return group
