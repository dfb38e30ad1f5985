"""What each rank does in test_sparse_ranks: run by torchrun; writes what it saw to FOLDER/RANK.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ragtag

SIZES = {"bias": 10, "first": 3000, "second": 5000, "third": 2000}
STEPS = 6


class Linear(torch.nn.Module):
    """Its gradients are what it is given: sums of gradients can be checked."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        # backward comes to these in another order than DDP's first buckets have: they are dealt anew
        names = ("second", "bias", "third", "first")
        return torch.stack([(getattr(self, name) * gradients[name]).sum() for name in names]).sum()


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(size, generator=source) ** 3 for name, size in SIZES.items()}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name] for name in SIZES])


def wrapped(state: Any, model: torch.nn.Module, bucket_cap_mb: float = 0.02) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)  # several buckets
    ddp.register_comm_hook(state, ragtag.hooks.sparse)
    return ddp


def backward(ddp: DistributedDataParallel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The averaged gradient."""
    ddp.zero_grad()
    ddp(given).backward()
    return flat({name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()})


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def residual_of(state: Any) -> torch.Tensor:
    kept = state.state_dict()["residual"]
    return flat({name: kept.get(name, torch.zeros(size)) for name, size in SIZES.items()})


def same_everywhere(values: torch.Tensor) -> bool:
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return all(torch.equal(row, rows[0]) for row in rows)


def books(**options: Any) -> dict[str, Any]:
    """Whether mean gradients = averages + mean residuals, over steps in which buckets are dealt anew."""
    model = Linear()
    state = ragtag.hooks.SparseState(model=model, dense_below=100, **options)
    ddp = wrapped(state, model)
    given = torch.zeros(sum(SIZES.values()))
    taken, same, stats, layouts = given.clone(), True, [], set()
    for step in range(STEPS):
        mine = gradients(dist.get_rank(), step)
        average = backward(ddp, mine)
        same = same and same_everywhere(average)
        given += flat(mine)
        taken += average
        found = state.stats
        stats.append({name: getattr(found, name) for name in found.__slots__})
        layouts.add(tuple(state._plans))
    difference = mean_over_ranks(given - residual_of(state)) - taken
    return {
        "same": same,
        "off": float(difference.abs().max()),
        "scale": float(mean_over_ranks(given).abs().max()),
        "stats": stats,
        "layouts": len(layouts),
        "bias_off": float((taken - mean_over_ranks(given))[:10].abs().max()),
    }


def dense() -> dict[str, Any]:
    """All values, as they are: the average itself."""
    model = Linear()
    ddp = wrapped(ragtag.hooks.SparseState(ratio=1.0, values="fp32", selection="exact"), model)
    off = 0.0
    for step in range(3):
        mine = gradients(dist.get_rank(), step)
        off = max(off, float((backward(ddp, mine) - mean_over_ranks(flat(mine))).abs().max()))
    return {"off": off}


def not_finite(policy: str) -> dict[str, Any]:
    """Rank 1 has NaN in one tensor at step 2; then all goes on."""
    model = Linear()
    state = ragtag.hooks.SparseState(
        model=model,
        ratio=0.05,
        values="fp32",
        momentum=0.5,
        not_finite=policy,  # type: ignore[arg-type]
    )
    ddp = wrapped(state, model)
    said, nans = "", 0
    for step in range(5):
        mine = gradients(dist.get_rank(), step)
        if step == 2 and dist.get_rank() == 1:
            mine["third"][7] = float("nan")
        try:
            average = backward(ddp, mine)
        except ragtag.NotFinite as error:
            assert step == 2, error
            said = str(error)
            continue
        nans = max(nans, int(average.isnan().sum())) if step == 2 else nans
        if step != 2:
            assert bool(average.isfinite().all())
    left = residual_of(state)
    return {
        "said": said,
        "nans": nans,
        "finite": bool(left.isfinite().all()),
        "skipped": state.stats.skipped,
        "same": same_everywhere(average),
    }


def other_ratio() -> dict[str, Any]:
    model = Linear()
    ratio = 0.02 if dist.get_rank() == dist.get_world_size() - 1 else 0.01
    ddp = wrapped(ragtag.hooks.SparseState(ratio=ratio, model=model), model)
    try:
        backward(ddp, gradients(0, 0))
    except ValueError as error:
        return {"said": str(error)}
    return {"said": ""}


def resumed(folder: Path) -> dict[str, Any]:
    """A checkpoint after three steps goes on as the run that it was taken from."""

    def run(state: Any, steps: range) -> tuple[torch.Tensor, Any]:
        ddp = wrapped(
            state, Linear(), bucket_cap_mb=25
        )  # one bucket: another order in it, the same selection
        averages = [backward(ddp, gradients(dist.get_rank(), step)) for step in steps]
        return averages[-1], state

    def fresh() -> Any:
        return ragtag.hooks.SparseState(ratio=0.05, values="fp32", momentum=0.9, selection="exact")

    at = folder / f"state-{dist.get_rank()}.pt"
    straight, _ = run(fresh(), range(6))
    _, state = run(fresh(), range(3))
    torch.save(state.state_dict(), at)
    again = fresh()
    again.load_state_dict(torch.load(at, weights_only=True))
    late, _ = run(again, range(3, 6))
    one_behind = fresh()
    if dist.get_rank():
        one_behind.load_state_dict(torch.load(at, weights_only=True))
    try:
        run(one_behind, range(1))
        said = ""
    except ValueError as error:
        said = str(error)
    return {"off": float((straight - late).abs().max()), "scale": float(straight.abs().max()), "said": said}


def learning() -> dict[str, Any]:
    """A small network by 1 % of its gradients, with momentum in the hook and a warm-up."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 200), torch.nn.ReLU(), torch.nn.Linear(200, 200), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(200, 1))
    state = ragtag.hooks.SparseState(model=model, ratio=0.01, momentum=0.9, warm_up=10)
    ddp = wrapped(state, model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    source = torch.Generator().manual_seed(dist.get_rank())
    losses, densities = [], []
    for _ in range(120):
        inputs = torch.randn(32, 20, generator=source)
        loss = (ddp(inputs) - inputs[:, :5].sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        densities.append(state.stats.density)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "first": sum(losses[:10]) / 10,
        "last": sum(losses[-10:]) / 10,
        "same": same_everywhere(weights),
        "densities": densities,
        "saved": state.stats.saved,
    }


def main(folder: Path, chosen: list[str]) -> None:
    dist.init_process_group("gloo")
    scenes: dict[str, Callable[[], dict[str, Any]]] = {
        "dense": dense,
        "sampled": lambda: books(ratio=0.01),
        "chunked": lambda: books(ratio=0.02, values="bf16", selection="chunked"),
        "gaussian": lambda: books(ratio=0.002, selection="gaussian-k", values="fp32"),
        "random": lambda: books(ratio=0.02, selection="random", values="fp32"),
        "raise": lambda: not_finite("raise"),
        "skip": lambda: not_finite("skip"),
        "other ratio": other_ratio,
        "resumed": lambda: resumed(folder),
        "learning": learning,
    }
    found = {name: scenes[name]() for name in chosen or scenes}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
