"""Larger models and crews than the tests have: real processes on one machine, beside DDP over gloo.

    python benchmarks/larger.py                                # the transformer, and sixteen processes
    python benchmarks/larger.py --data shared/data             # ResNet-18 on CIFAR-10 as well
    python benchmarks/larger.py --parts transformer --steps 8  # in small

- transformer: 4 processes train 54 million parameters on bytes of text, by AdamW, for so many steps each:
  DDP, gradients averaged by RPS at every step, and models averaged by RPS at every tenth.
- resnet: 4 processes train ResNet-18 (11 million parameters) on CIFAR-10 for so many seconds each.
- many: 16 processes train the demo's net on digits for so many seconds, on as many cores as there are.

Each process computes on one thread; torchrun starts them. Steps are timed after the first ones. What the
loopback carried counts both ways' headers and answers, and is divided by processes and steps. Memory is the
most that a process has had resident, the mean of all; a process that only imports torch has about 200 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ragtag
from ragtag.app.demo.task import LEARNING_RATE, load_digits, make_model
from ragtag.core.seed import generator
from ragtag.recipes.tasks.cifar import unpacked
from ragtag.recipes.tasks.images import cifar
from ragtag.recipes.tasks.sources import sources
from ragtag.recipes.tasks.texts import SYMBOLS, batches, load_text, split_text
from stored import how

RESULTS = Path(__file__).parent / "results" / "larger.json"
WARM_STEPS = 3
WAYS = {
    "transformer": ("ddp", "gradients", "models"),
    "resnet": ("ddp", "gradients", "models"),
    "many": ("ddp", "models"),
}
PROCESSES = {"transformer": 4, "resnet": 4, "many": 16}
EVERY = 10
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 640, 11, 8, 64, 2
IMAGES, DIGITS = 16, 16
_LIMIT_S = 3600.0


class Transformer(nn.Module):
    """A decoder of bytes: pre-norm layers, four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, 256, length]`` of the bytes that follow x, int64 ``[batch, length]``."""
        hidden = self.layers(self.symbols(x) + self.places, mask=self.mask, is_causal=True)
        logits: Tensor = self.out(hidden).transpose(1, 2)
        return logits


class Residual(nn.Module):
    """Two convolutions with a shortcut (He et al., CVPR 2016), normalised by groups."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, out) for _ in range(2))
        self.short = nn.Identity() if into == out else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As the paper's basic block."""
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inner + self.short(x))


def resnet18() -> nn.Module:
    """ResNet-18 with the first layer that suits images of 32 x 32."""
    widths, blocks = (64, 64, 128, 256, 512), []
    for level in range(4):
        blocks.append(Residual(widths[level], widths[level + 1], 1 if level == 0 else 2))
        blocks.append(Residual(widths[level + 1], widths[level + 1], 1))
    first = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU())
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


@dataclass(frozen=True)
class Work:
    """What one process trains. held: samples held out, or none."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    held: tuple[Tensor, Tensor] | None


def drawn(x: Tensor, y: Tensor, batch: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of any samples, by chance."""
    draws = generator(0, "larger", rank)
    while True:
        at = torch.from_numpy(draws.integers(0, len(x), batch))
        yield x[at], y[at]


def work_of(part: str, rank: int, size: int, data: Path | None) -> Work:
    """A part's model, optimizer and samples, of one process."""
    torch.manual_seed(0)
    if part == "transformer":
        net: nn.Module = Transformer()
        text, _ = split_text(load_text(None))
        given = batches(text, batch=BATCH, length=LENGTH, seed=0, peer=rank, peers=size)
        return Work(net, torch.optim.AdamW(net.parameters(), 3e-4), given, None)
    if part == "resnet":
        assert data is not None
        task = cifar(data)
        net = resnet18()
        sgd = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
        mine = slice(rank, None, size)

        def floats() -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in drawn(task.train_x[mine], task.train_y[mine], IMAGES, rank):
                yield x / 255.0 - 0.5, y

        return Work(net, sgd, floats(), (task.test_x[:1000] / 255.0 - 0.5, task.test_y[:1000]))
    digits = load_digits(0)
    net = make_model(0)
    mine = slice(rank, None, size)
    given = drawn(digits.train_images[mine], digits.train_labels[mine], DIGITS, rank)
    held = digits.test_images, digits.test_labels
    return Work(net, torch.optim.SGD(net.parameters(), LEARNING_RATE), given, held)


def carried() -> int:
    """Bytes that the loopback has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def train(arguments: argparse.Namespace) -> None:
    """One process: train, and leave figures in the folder ``--out``."""
    torch.set_num_threads(1)
    rank, size, way = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.way
    work = work_of(arguments.part, rank, size, arguments.data)
    step, optimizer = work.model, work.optimizer
    crew = None
    if way == "ddp":
        dist.init_process_group("gloo")
        step = DistributedDataParallel(work.model)
    else:
        crew = ragtag.join()
        every: dict[str, Any] = {"every": EVERY} if way == "models" else {}
        optimizer = crew.optimizer(optimizer, averager="rps", model=work.model, average=way, **every)
    losses, ends = list[float](), list[float]()
    until_s, began_bytes, over = 0.0, 0, False
    with crew or nullcontext():
        for x, y in work.batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(step(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            ends.append(time.monotonic())
            if len(ends) == WARM_STEPS:
                until_s, began_bytes = ends[-1] + arguments.seconds, carried()
            if len(ends) >= WARM_STEPS:
                over = len(ends) - WARM_STEPS == (arguments.steps or math.inf) or ends[-1] >= until_s
            if way == "ddp":  # all must take as many steps as each other
                told = torch.tensor(float(over))
                if arguments.steps == 0:
                    dist.all_reduce(told, dist.ReduceOp.MAX)
                over = bool(told)
            if over:
                break
        moved = carried() - began_bytes
        if crew is not None:
            crew.finish()
        accuracy = None
        if work.held is not None:
            with torch.no_grad():
                said = torch.cat([work.model(x) for x in work.held[0].split(100)]).argmax(1)
            accuracy = float((said == work.held[1]).float().mean())
    if way == "ddp":
        dist.destroy_process_group()
    took = [b - a for a, b in zip(ends[WARM_STEPS - 1 :], ends[WARM_STEPS:], strict=False)]
    figures = {
        "steps": len(took),
        "step_s": statistics.fmean(took),
        "longest_step_s": max(took),
        "loss": statistics.fmean(losses[-5:]),
        "accuracy": accuracy,
        "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "loopback_bytes": moved,
        "parameters": sum(p.numel() for p in work.model.parameters()),
    }
    (arguments.out / f"{rank}.json").write_text(json.dumps(figures))


def measure(part: str, way: str, arguments: argparse.Namespace, data: Path | None) -> dict[str, Any]:
    """All processes of one way."""
    n = PROCESSES[part]
    with tempfile.TemporaryDirectory() as folder:
        steps, seconds = (arguments.steps, _LIMIT_S) if part == "transformer" else (0, arguments.seconds)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n),
            __file__, "--parts", part, "--way", way, "--out", folder, "--steps", str(steps),
            "--seconds", str(seconds), *(["--data", str(data)] if data is not None else []),
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAGTAG_RUN": str(Path(folder) / "run")}
        subprocess.run(command, check=True, timeout=_LIMIT_S, env=environment)
        peers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(n)]
    steps_in_all = sum(peer["steps"] for peer in peers)
    accuracies = [peer["accuracy"] for peer in peers if peer["accuracy"] is not None]
    return {
        "part": part,
        "way": way,
        "processes": n,
        "parameters": peers[0]["parameters"],
        "steps": steps_in_all / n,
        "step_s": statistics.fmean(peer["step_s"] for peer in peers),
        "longest_step_s": max(peer["longest_step_s"] for peer in peers),
        "loss": statistics.fmean(peer["loss"] for peer in peers),
        "accuracy": statistics.fmean(accuracies) if accuracies else None,
        "resident_mb": statistics.fmean(peer["resident_mb"] for peer in peers),
        "bytes_per_step": peers[0]["loopback_bytes"] / steps_in_all,
    }


def main() -> None:
    """Measure all ways of the parts, and store the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=WAYS, help="default: those whose data is there")
    parser.add_argument("--steps", type=int, default=40, help="of the transformer, after the first few")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the other parts' training")
    parser.add_argument("--data", type=Path, help="a folder with CIFAR-10's archive, or that archive")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        (arguments.part,) = arguments.parts
        train(arguments)
        return
    archive = None if arguments.data is None else sources(arguments.data)[0]
    parts = arguments.parts or [part for part in WAYS if part != "resnet" or archive is not None]
    if "resnet" in parts and archive is None:
        raise SystemExit("ResNet-18 trains on CIFAR-10: give its archive by --data")
    figures: dict[str, Any] = {**how(), "every": EVERY, "rows": []}
    with tempfile.TemporaryDirectory() as folder, unpacked(archive, Path(folder)) as arrays:
        for part in parts:
            for way in WAYS[part]:
                row = measure(part, way, arguments, arrays if part == "resnet" else None)
                figures["rows"].append(row)
                seconds, longest, megabytes = (
                    row["step_s"],
                    row["longest_step_s"],
                    row["bytes_per_step"] / 1e6,
                )
                print(
                    f"{part:<12} {way:<10} {seconds:7.3f} s a step (longest {longest:.3f}), {megabytes:8.2f} "
                    f"MB a process and step, {row['resident_mb']:6.0f} MB, loss {row['loss']:.3f}, "
                    f"accuracy {row['accuracy']}",
                    flush=True,
                )
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
