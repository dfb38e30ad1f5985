"""Selecting, coding and feeding back: how long each takes, beside one read of the vector and torch.topk.

    python benchmarks/topk.py                    # 1e6, 1e7 and 2.5e7 values at 0.1 %, best of 7
    python benchmarks/topk.py --sizes 1e6 --runs 3

The vectors are what error feedback makes of a training run: a perceptron of the size asked for is trained on
handwritten digits, its gradients go through exact top-k with error feedback, and u = gradient + residual of
the last step is what is selected from. Without numba its rows are missing.

Times are the best of the runs: methods take turns, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ragtag.codecs.sparse.density import Density, break_even_bytes_per_s
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.reused import add_select_clear
from ragtag.codecs.sparse.selection import Selection
from ragtag.codecs.sparse.threshold import dgc, gaussian_k, sidco
from ragtag.codecs.sparse.topk import chunked_top_k, random_k, sampled_top_k, top_k
from ragtag.codecs.sparse.topk_torch import sampled_top_k_tensor
from ragtag.codecs.sparse.wire import Format, decode, encode
from ragtag.core import fast
from ragtag.core.seed import generator
from ragtag.core.types import Floats
from stored import how

RESULTS = Path(__file__).parent / "results" / "topk.json"
Call = Callable[[], Any]


def trained_vectors(d: int, ratio: float, steps: int) -> tuple[Floats, Floats]:
    """u and the gradient of the last step, of about ``d`` values each (cut to ``d``)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images.reshape(-1, 64).astype(np.float32) / 16.0)
    y = torch.from_numpy(digits.target.astype(np.int64))
    width = int(np.ceil(np.sqrt(d)))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    draw = generator(0, "benchmark batches")
    feedback = ErrorFeedback(d, Options(Density(ratio), values="fp32"))
    for step in range(steps):
        at = draw.integers(0, len(y), 64)
        model.zero_grad()
        nn.functional.cross_entropy(model(x[at]), y[at]).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])[
            :d
        ].numpy()
        u = feedback.residual + gradient
        sent = feedback.prepare(gradient, step)
        feedback.commit(sent.ticket)
        got = decode(sent.chunks, feedback.form(step))
        update, start = torch.zeros(d), 0
        update[torch.from_numpy(got.indices)] = torch.from_numpy(got.values)
        with torch.no_grad():
            for p in model.parameters():
                part = update[start : start + p.numel()]
                p.view(-1)[: len(part)] -= 0.1 * part
                start += p.numel()
    return u, gradient


def best_s(calls: dict[str, Call], runs: int) -> dict[str, float]:
    """The shortest of ``runs`` runs of each call, after one that warms up; the calls take turns."""
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(runs):
        for name, call in calls.items():
            begin_s = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin_s)
    return best


def floors(u: Floats, runs: int) -> dict[str, float]:
    """One read (sum of magnitudes) and one read-modify-write (``r += g``), as fast as it goes."""
    if fast.available():
        import numba

        @numba.njit(fastmath=True)
        def read(values):  # type: ignore[no-untyped-def]
            total = np.float32(0)
            for i in range(values.size):
                total += abs(values[i])
            return total

        @numba.njit(fastmath=True)
        def write(values, more):  # type: ignore[no-untyped-def]
            for i in range(values.size):
                values[i] += more[i]

    else:
        ones = np.ones_like(u)

        def read(values: Floats) -> float:
            return float(values @ ones)

        def write(values: Floats, more: Floats) -> None:
            values += more

    into, zeros = u.copy(), np.zeros_like(u)
    return best_s({"one read": lambda: read(u), "one read-modify-write": lambda: write(into, zeros)}, runs)


def plainly(call: Call) -> Call:
    def run() -> Any:
        with fast.plain():
            return call()

    return run


def selections(u: Floats, k: int) -> dict[str, Call]:
    """Ways to select, by name."""
    tensor = torch.from_numpy(u)
    calls: dict[str, Call] = {
        "torch.topk(abs)": lambda: torch.topk(tensor.abs(), k, sorted=False).indices,
        "numpy argpartition": lambda: np.argpartition(np.abs(u), len(u) - k)[len(u) - k :],
        "top-k": plainly(lambda: top_k(u, k)),
        "GaussianK": plainly(lambda: gaussian_k(u, k)),
        "DGC 1 %": plainly(lambda: dgc(u, k, 1)),
        "SIDCo, 3 stages": plainly(lambda: sidco(u, k, 3)),
        "random-k": plainly(lambda: random_k(u, k, 1)),
        "chunked top-k": plainly(lambda: chunked_top_k(u, k)),
        "SampledTopK, torch's operations": lambda: sampled_top_k_tensor(tensor, k, native=True),
        "SampledTopK, plain": plainly(lambda: sampled_top_k(u, k)),
    }
    if fast.available():
        calls["SampledTopK, numba"] = lambda: sampled_top_k(u, k)
    return calls


def quality(u: Floats, k: int, call: Call) -> tuple[float, float]:
    """Entries selected over k, and energy captured over that of exact top-k."""
    found = call()
    if isinstance(found, Selection):
        at = found.indices
    else:
        at = found[0].numpy() if isinstance(found, tuple) else np.asarray(found)
    exact = top_k(u, k).values.astype(np.float64)
    chosen = u[at].astype(np.float64)
    return len(at) / k, float((chosen @ chosen) / (exact @ exact))


def fused(u: Floats, gradient: Floats, k: int, runs: int) -> dict[str, float]:
    """Add, select and clear with a threshold that serves; and the same as torch's own operations."""
    least = float(np.abs(top_k(u, k).values).min())
    residual = u - gradient
    times: dict[str, float] = {}
    paths = {"plain": plainly} | ({"numba": lambda call: call} if fast.available() else {})
    for name, on in paths.items():
        best = float("inf")
        for _ in range(runs + 1):
            r, state = residual.copy(), np.array([least, 1.0])
            begin_s = time.perf_counter()
            on(lambda r=r, state=state: add_select_clear(r, gradient, k, state))()
            best = min(best, time.perf_counter() - begin_s)
            if state[1] != 2:
                raise RuntimeError("the threshold did not serve: this is not what was to be timed")
        times[f"fused, {name}"] = best
    g, best = torch.from_numpy(gradient), float("inf")
    for _ in range(min(3, runs)):
        r_t = torch.from_numpy(residual.copy())
        begin_s = time.perf_counter()
        r_t += g
        at = torch.topk(r_t.abs(), k, sorted=False).indices
        values = r_t[at]
        r_t[at] = 0.0
        best = min(best, time.perf_counter() - begin_s)
    return times | {"torch pipeline": best} if len(values) else times


def coding(u: Floats, k: int, runs: int) -> dict[str, Any]:
    """Entries coded per second, and bits for each, full datagrams and headers counted."""
    chosen, found = top_k(u, k), {}
    for indices in ("rice", "blocks"):
        form = Format(len(u), k, "int8", indices)  # type: ignore[arg-type]
        sent = encode(chosen, form, 0, 0)
        calls: dict[str, Call] = {
            "encode, plain": plainly(lambda form=form: encode(chosen, form, 0, 0)),
            "decode, plain": plainly(lambda form=form, sent=sent: decode(sent.chunks, form)),
        }
        if fast.available() and indices == "rice":
            calls["encode, numba"] = lambda form=form: encode(chosen, form, 0, 0)
            calls["decode, numba"] = lambda form=form, sent=sent: decode(sent.chunks, form)
        rates = {name: k / t for name, t in best_s(calls, runs).items()}
        off = decode(sent.chunks, form).values - chosen.values
        full = int(sent.starts[-2])
        found[indices] = {
            "entries_per_s": rates,
            "bits_per_entry": sent.chunks.size * 8 / k,
            "bits_per_entry_full_datagrams": (len(sent.chunks) - 1) * sent.chunks.shape[1] * 8 / full
            if full
            else None,
            "bytes": sent.chunks.size,
            "relative_squared_error": float((off.astype(np.float64) ** 2).sum() / (chosen.values**2).sum()),
        }
    return found


def measure(d: int, ratio: float, runs: int, steps: int) -> dict[str, Any]:
    u, gradient = trained_vectors(d, ratio, steps)
    k = Density(ratio).k(d, 0)
    calls = selections(u, k)
    slow = {name: calls.pop(name) for name in ("torch.topk(abs)", "numpy argpartition", "SIDCo, 3 stages")}
    times = floors(u, runs) | best_s(slow, min(3, runs)) | best_s(calls, runs)
    times |= fused(u, gradient, k, runs)
    found = {name: quality(u, k, call) for name, call in (slow | calls).items()}
    return {
        "d": d,
        "k": k,
        "steps": steps,
        "best_s": times,
        "selected_over_k": {name: q[0] for name, q in found.items()},
        "energy_over_top_k": {name: q[1] for name, q in found.items()},
        "coding": coding(u, k, runs),
    }


def goals(result: dict[str, Any]) -> list[tuple[str, float, str, float]]:
    """Quantity, measured, relation, goal: the table that was asked for."""
    t, rice = result["best_s"], result["coding"]["rice"]
    name = "numba" if fast.available() else "plain"
    sampled_s = t[f"SampledTopK, {name}"]
    rows = [
        (f"torch.topk / SampledTopK, {name}", t["torch.topk(abs)"] / sampled_s, ">=", 40.0),
        ("torch.topk / SampledTopK, plain", t["torch.topk(abs)"] / t["SampledTopK, plain"], ">=", 12.0),
        (f"SampledTopK, {name} / one read", sampled_s / t["one read"], "<=", 2.2),
        (
            f"fused, {name} / one read-modify-write",
            t[f"fused, {name}"] / t["one read-modify-write"],
            "<=",
            1.5,
        ),
        ("energy captured / exact top-k", result["energy_over_top_k"][f"SampledTopK, {name}"], ">=", 1.0),
        ("bits per entry, full datagrams", rice["bits_per_entry_full_datagrams"] or 0.0, "<=", 20.0),
        (f"encode, {name}, M entries/s", rice["entries_per_s"][f"encode, {name}"] / 1e6, ">=", 50.0),
        (f"decode, {name}, M entries/s", rice["entries_per_s"][f"decode, {name}"] / 1e6, ">=", 50.0),
    ]
    code_s = result["k"] * sum(1 / rice["entries_per_s"][f"{way}, {name}"] for way in ("encode", "decode"))
    rate = break_even_bytes_per_s(4 * result["d"], rice["bytes"], sampled_s, code_s)
    return [*rows, ("break-even link, Gbit/s", rate * 8 / 1e9, "", float("nan"))]


def show(result: dict[str, Any]) -> None:
    print(f"\nd = {result['d']:,}, k = {result['k']:,}")
    for name, seconds in result["best_s"].items():
        selected = result["selected_over_k"].get(name)
        energy = result["energy_over_top_k"].get(name)
        more = f"   selected/k {selected:7.3f}   energy {energy:.4f}" if selected is not None else ""
        print(f"  {name:34s}{1e3 * seconds:9.2f} ms{more}")
    for name, c in result["coding"].items():
        rates = ", ".join(f"{way} {rate / 1e6:.1f}M/s" for way, rate in c["entries_per_s"].items())
        print(f"  {name}: {c['bits_per_entry']:.2f} bits/entry, {c['bytes']:,} bytes; {rates}")
    for quantity, value, relation, goal in goals(result):
        beside = f"   goal {relation} {goal:g}" if relation else ""
        print(f"  {quantity:42s}{value:10.3f}{beside}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 2.5e7], help="vector sizes")
    parser.add_argument("--ratio", type=float, default=0.001, help="share of entries selected")
    parser.add_argument("--runs", type=int, default=7, help="runs of each (the best counts)")
    parser.add_argument("--steps", type=int, default=12, help="training steps that make the vectors")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    results = []
    for d in arguments.sizes:
        results.append(measure(int(d), arguments.ratio, arguments.runs, arguments.steps))
        show(results[-1])
    record = {
        **made,
        "numba": fast.available(),
        "torch_threads": torch.get_num_threads(),
        "ratio": arguments.ratio,
        "results": results,
        "goals": [[list(row) for row in goals(result)[:-1]] for result in results],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
