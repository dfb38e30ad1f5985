"""What averaging costs a model that lies on a GPU: copies, K-FAC's steps, selections, and whole steps.

    python benchmarks/gpu.py                                          # needs a CUDA device
    python benchmarks/gpu.py --parts copies kfac
    python benchmarks/gpu.py --device cpu --values 1e5 --nets 8x16 --steps 5 --out FILE   # to try it

- copies: a bucket's way to the host and back beside one copy of as many bytes from and to pinned memory (the
  physical limit), and beside tensor by tensor (what a script without a bucket does);
- kfac: K-FAC's step over that of SGD with momentum, in turns, as in ``kfac_step.py``, by the clock;
- selection: the sampled top-k beside ``torch.topk``, and beside one read of the vector;
- steps: a transformer's steps in two processes that share the GPU, over loopback: without averages, with
  gradients averaged before each step, with that average overlapped, and by DDP over gloo, which is what
  torch has for two processes on one GPU.

Each figure is a median, in seconds, between two points at which the device has done all work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from averaging import free_ports
from kfac_step import INTERVALS, Run
from ragtag.app.launch import launch
from ragtag.app.launch.events import Event, Printed
from ragtag.codecs.dense import fp32
from ragtag.codecs.sparse.topk_torch import sampled_top_k_tensor
from ragtag.training.tensors.bucket import Bucket
from ragtag.training.tensors.layout import Part
from stored import how

RESULTS = Path(__file__).parent / "results" / "gpu.json"
PARTS = ("copies", "kfac", "selection", "steps")
WAYS = ("alone", "averaged", "overlapped", "gloo")
WARM = 5
TENSORS = 160
"""As many as a ResNet-50 has parameters."""
SHARE = 0.001
WIDTH, LAYERS, WORDS, LENGTH = 512, 8, 8192, 256


def done(device: torch.device) -> float:
    """The time when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_s(run: Callable[[], object], device: torch.device, times: int = 15) -> float:
    """How long ``run`` usually takes; the first runs do not count."""
    took = []
    for _ in range(times + 3):
        began_s = done(device)
        run()
        took.append(done(device) - began_s)
    return statistics.median(took[3:])


def copies(values: int, device: torch.device) -> dict[str, Any]:
    """A bucket's way to the host and back."""
    model = nn.ParameterList(
        nn.Parameter(torch.randn(values // TENSORS, device=device)) for _ in range(TENSORS)
    )
    plain = [parameter.detach().clone() for parameter in model]
    parts = [Part(f"{at}", "parameter", lambda p=p: p) for at, p in enumerate(model)]
    bucket = Bucket(parts, fp32.elements)
    averaged = np.ones(len(bucket.values), np.bool_)
    mean = bucket.flatten().copy()
    pinned = torch.empty(values, pin_memory=device.type == "cuda")
    there = torch.randn(values, device=device)
    host = np.empty_like(mean)

    def back() -> None:
        bucket.flatten()
        bucket.restore(mean, averaged)

    def one_by_one() -> None:
        for tensor, got in [(tensor, tensor.cpu()) for tensor in plain]:
            tensor.copy_(got)

    flatten_s = median_s(bucket.flatten, device)
    return {
        "values": values,
        "to_host_s": flatten_s,
        "to_host_limit_s": median_s(lambda: pinned.copy_(there), device),
        "both_s": median_s(back, device),
        "both_limit_s": median_s(lambda: there.copy_(pinned.copy_(there)), device),
        "host_copy_s": median_s(lambda: np.copyto(host, mean), device),
        "one_by_one_s": median_s(one_by_one, device),
    }


def kfac(depth: int, width: int, every: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """A whole cycle of K-FAC's steps, and as many of SGD's between them."""
    runs = {
        name: Run(depth, 128, given, device=device, width=width)
        for name, given in (("sgd", None), ("kfac", every))
    }
    took: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(WARM + every[1]):
        for name, run in runs.items():
            began_s = done(device)
            run.step()
            if step >= WARM:
                took[name].append(done(device) - began_s)
    sgd_s, kfac_s = statistics.median(took["sgd"]), statistics.fmean(took["kfac"])
    return {
        "depth": depth,
        "width": width,
        "factor_every": every[0],
        "inverse_every": every[1],
        "sgd_step_s": sgd_s,
        "kfac_step_s": kfac_s,
        "kfac_usual_step_s": statistics.median(took["kfac"]),
        "kfac_longest_step_s": max(took["kfac"]),
        "ratio": kfac_s / sgd_s,
    }


def net(text: str) -> tuple[int, int]:
    """A ResNet's depth and its first layers' channels, as "20x16"."""
    depth, width = text.split("x")
    return int(depth), int(width)


def selection(values: int, device: torch.device) -> dict[str, Any]:
    """A thousandth of a vector, as gradients are spread: most of it near zero."""
    u = torch.randn(values, device=device) ** 3
    k = int(values * SHARE)
    same = torch.equal(
        sampled_top_k_tensor(u, k, native=True)[0], torch.topk(u.abs(), k, sorted=False).indices.sort().values
    )
    return {
        "values": values,
        "k": k,
        "sampled_s": median_s(lambda: sampled_top_k_tensor(u, k, native=True), device),
        "torch_topk_s": median_s(lambda: torch.topk(u.abs(), k, sorted=False), device),
        "read_s": median_s(u.max, device),
        "same": same,
    }


class Net(nn.Module):
    """A small transformer that predicts the next word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.end = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        n = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=words.device)
        found = self.words(words) + self.places(torch.arange(n, device=words.device))
        return self.end(self.layers(found, mask=mask, is_causal=True))


def peer(asked: argparse.Namespace) -> None:
    """Train in one of the processes; prints how long a step takes."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ragtag

    way, port = asked.peer[0], int(asked.peer[1])
    device = torch.device(asked.device)
    torch.manual_seed(0)
    net: nn.Module = Net(asked.width).to(device)
    took = []
    with ragtag.join() as crew:
        parameters = sum(p.numel() for p in net.parameters())
        if way == "gloo":
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=crew.rank, world_size=2
            )
            net = DistributedDataParallel(net)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9)
        if way in ("averaged", "overlapped"):
            optimizer = crew.optimizer(optimizer, model=net, average="gradients", overlap=way == "overlapped")
        draw = torch.Generator().manual_seed(crew.rank)
        for _ in range(asked.steps + WARM):
            words = torch.randint(0, WORDS, (asked.batch, LENGTH + 1), generator=draw).to(device)
            began_s = done(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(net(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            took.append(done(device) - began_s)
        if way == "gloo":
            dist.destroy_process_group()
        crew.leave(finish=False)
    print(json.dumps({"took": took[WARM:], "parameters": parameters}), flush=True)


def steps(asked: argparse.Namespace) -> dict[str, Any]:
    """The median step of each way, one after the other."""
    found: dict[str, Any] = {"peers": 2}
    for way in WAYS:
        events: list[Event] = []
        given = ["--device", asked.device, "--steps", str(asked.steps), "--batch", str(asked.batch)]
        given += ["--width", str(asked.width), "--peer", way, str(free_ports(1)[0])]
        result = launch(2, [str(Path(__file__)), *given], on_event=events.append)
        printed = [event for event in events if isinstance(event, Printed)]
        said = [json.loads(e.text) for e in printed if not e.error and e.text.startswith('{"took"')]
        if len(said) < 2:
            sys.exit("\n".join(event.text for event in printed))
        if ends := [end.status for end in result.ends if end.status]:
            print(f"  {way}: processes ended with {ends} after they had measured", flush=True)
        found[f"{way}_s"] = statistics.median(took for one in said for took in one["took"])
        found["parameters"] = said[0]["parameters"]
        print(f"  {way:<12}{found[f'{way}_s'] * 1e3:8.1f} ms a step", flush=True)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--values", type=lambda text: int(float(text)), nargs="+", default=[25_000_000, 250_000_000]
    )
    parser.add_argument("--nets", type=net, nargs="+", default=[(8, 16), (20, 16), (20, 64)])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        return peer(asked)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu tries the benchmark itself")
    document: dict[str, Any] = how()
    document["machine"]["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if "copies" in asked.parts:
        document["copies"] = [copies(values, device) for values in asked.values]
        for row in document["copies"]:
            print(
                f"{row['values'] * 4 / 1e6:,.0f} MB: to the host {row['to_host_s'] * 1e3:.2f} ms, one copy "
                f"{row['to_host_limit_s'] * 1e3:.2f}; and back {row['both_s'] * 1e3:.2f}, two copies "
                f"{row['both_limit_s'] * 1e3:.2f} and one on the host {row['host_copy_s'] * 1e3:.2f}; "
                f"tensor by tensor {row['one_by_one_s'] * 1e3:.2f}",
                flush=True,
            )
    if "kfac" in asked.parts:
        document["kfac"] = [
            kfac(depth, width, every, device) for depth, width in asked.nets for every in INTERVALS
        ]
        for row in document["kfac"]:
            print(
                f"ResNet-{row['depth']} of {row['width']} channels, factors and bases every "
                f"{row['factor_every']}, {row['inverse_every']}: SGD {row['sgd_step_s'] * 1e3:.2f} ms, "
                f"K-FAC {row['kfac_step_s'] * 1e3:.2f} "
                f"({row['kfac_usual_step_s'] * 1e3:.2f} usually, {row['kfac_longest_step_s'] * 1e3:.0f} at "
                f"most), {row['ratio']:.2f} times",
                flush=True,
            )
    if "selection" in asked.parts:
        document["selection"] = [selection(values, device) for values in asked.values]
        for row in document["selection"]:
            print(
                f"{row['k']:,} of {row['values']:,}: sampled {row['sampled_s'] * 1e3:.2f} ms, torch.topk "
                f"{row['torch_topk_s'] * 1e3:.2f}, one read {row['read_s'] * 1e3:.2f}; same: {row['same']}",
                flush=True,
            )
    if "steps" in asked.parts:
        document["steps"] = steps(asked)
    asked.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return None


if __name__ == "__main__":
    main()
