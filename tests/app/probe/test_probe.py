"""``ragtag probe``: what it measures, where it takes gradients and rates from, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ragtag.app.probe import measure as probe
from ragtag.app.probe.source import (
    ProbeError,
    rate_of,
    rate_of_run,
    size_of_model,
    vectors_of_script,
)
from ragtag.app.probe.view import Probed, bits_text, count, show
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.codecs.sparse.advice import Cost
from ragtag.core import trace
from ragtag.core.errors import NotFinite
from tests.app.command import error_of, invoke

SCRIPT = """
import sys, torch
import ragtag
crew = ragtag.join()
torch.manual_seed(0)
model = torch.nn.Linear(30, 20)
other = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = crew.optimizer(other)
print("noise on stdout", sys.argv)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 30)).square().sum().backward()
    try:
        optimizer.step()
    except BaseException:
        pass
"""


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(probe, "RUNS_MIN", 1)
    monkeypatch.setattr(probe, "BUDGET_S", 0.0)


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


FOUND = Probed(
    size=1_000_000,
    origin="drawn",
    ratio=0.001,
    k=1000,
    peers=4,
    compiled=True,
    dense=Cost("fp32", 4_000_000, dense=True),
    costs=[Cost("int8", 1_000_000, 0.0, 0.001, 0.001, dense=True), Cost("top-k", 2_000, 0.01, 0.001, 0.001)],
)


def shown(found: Probed) -> str:
    out = StringIO()
    show(found, Console(file=out, width=80))
    return out.getvalue()


# -- Measuring


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("d", [1, 700, 60_000])
def test_every_codec_is_measured_whatever_the_size(d) -> None:
    told = []
    dense, costs = probe.measure(probe.synthetic(d, 0.01), 0.01, lambda *what: told.append(what))
    assert dense.dense and dense.message_bytes >= 4 * d
    assert [c.name for c in costs] == [what for _, _, what in told] and told[-1][:2] == (9, 9)
    for cost in costs:
        assert cost.message_bytes % 1088 == 0
        assert cost.dense or min(cost.select_s, cost.encode_s, cost.decode_s) > 0
    sent = {c.name: c.message_bytes for c in costs}
    if d == 60_000:
        assert sent["sampled top-k, int8"] == sent["exact top-k, int8"] < dense.message_bytes / 100
        assert sent["int8"] == pytest.approx(dense.message_bytes / 4, rel=0.05)


def test_a_call_is_timed_without_its_preparation(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    took = iter([9.0, 3.0, 1.0, 2.0])

    def call(given: int) -> None:
        assert given == 7
        now[0] += next(took)

    def prepare() -> int:
        now[0] += 100.0
        return 7

    assert probe.time_s(call, prepare) == 1.0


def test_gradients_that_cannot_be_probed() -> None:
    with pytest.raises(ValueError, match="no gradient"):
        probe.vectors_of([], 0.01, "")
    with pytest.raises(NotFinite):
        probe.vectors_of([np.full(3, np.nan, np.float32)], 0.01, "")
    with pytest.raises(ValueError, match="0 parameters"):
        probe.synthetic(0, 0.01)


# -- Where gradients come from


@pytest.mark.slow
def test_a_scripts_own_gradients_are_taken_and_then_it_ends(script) -> None:
    found = vectors_of_script(script, ["1000000"], 0.1, 3, 120.0)
    assert found.size == 620 and found.gradient.dtype == np.float32
    assert np.isfinite(found.gradient).all() and found.gradient.any() and found.residual.any()
    assert found.origin == "of train.py, after 3 steps"


@pytest.mark.parametrize(
    ("text", "arguments", "match"),
    [
        pytest.param(SCRIPT, ["1"], "without enough steps", marks=pytest.mark.slow),
        ("raise RuntimeError('no such data')", [], r"failed \(status 1\): RuntimeError: no such data"),
    ],
)
def test_scripts_that_do_not_train(tmp_path, text, arguments, match) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ProbeError, match=match):
        vectors_of_script(path, arguments, 0.1, 2, 120.0)


def test_a_script_that_hangs_is_ended(tmp_path) -> None:
    path = tmp_path / "hangs.py"
    path.write_text("import threading; threading.Event().wait()")
    with pytest.raises(ProbeError, match="--patience"):
        vectors_of_script(path, [], 0.1, 2, 1.0)
    with pytest.raises(FileNotFoundError, match="no script"):
        vectors_of_script(tmp_path / "none.py", [], 0.1, 2, 1.0)


def test_a_model_by_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probed_nets.py").write_text(
        "import torch\n"
        "def net():\n"
        "    made = torch.nn.Linear(3, 4)\n"
        "    made.bias.requires_grad_(False)\n"
        "    return made\n"
        "def wrong(): return 3\n"
        "def more(x): return x\n"
    )
    assert size_of_model("probed_nets:net") == size_of_model("probed_nets.py:net") == 12
    for name, match in (
        ("probed_nets", "write FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("no_such_module:net", "No module"),
        ("probed_nets:none", "probed_nets has no function 'none'"),
        ("probed_nets:wrong", "a int, not a torch.nn.Module"),
        ("probed_nets:more", "missing 1 required"),
    ):
        with pytest.raises(ProbeError, match=match):
            size_of_model(name)


# -- Where a rate comes from


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50Mbit", 6.25e6), ("1 Gbit/s", 1.25e8), ("6.25MB", 6.25e6), ("800bit", 100.0), ("3kB/s", 3000.0)],
)
def test_rates(text, rate) -> None:
    assert rate_of(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "50", "50M", "fast", "-1Mbit", "0Gbit", "1e9bit", "9" * 20 + "B"])
def test_rates_that_are_none(text) -> None:
    with pytest.raises(ProbeError, match="50Mbit"):
        rate_of(text)


def test_the_rate_of_a_run_is_its_slowest_peers(tmp_path) -> None:
    for peer, per_round in ((0, 3000), (1, 1000)):
        with TraceWriter(tmp_path / peer_file(peer)) as writer:
            for round_ in range(5):
                pace_s = 10.0 if round_ == 3 else 0.5
                writer.write(
                    trace.Round(
                        t=float(round_ + 1),
                        peer=peer,
                        round=round_,
                        scatter_s=0.1,
                        gather_s=0.1,
                        total_s=pace_s,
                        arrived=1.0,
                        bytes_sent=per_round * (round_ + 1),
                    )
                )
    rate, told = rate_of_run(tmp_path)
    assert rate == 2000.0 and "peer 1" in told


def test_a_run_that_sent_nothing(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no trace"):
        rate_of_run(tmp_path)
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        writer.write(trace.Join(t=0.0, peer=0))
    with pytest.raises(ProbeError, match="--rate"):
        rate_of_run(tmp_path)


# -- What it says


def test_the_table_fits_a_terminal_and_says_what_would_be_sent() -> None:
    slow = shown(replace(FOUND, rate_bytes_per_s=1e5, rate_from="as given"))
    assert max(map(len, slow.splitlines())) <= 80 and "…" not in slow
    assert "At 800 kbit/s: top-k, 74 ms a round instead of 60 s" in slow
    assert "fp32 adds to each step: every=1 60 s, every=10 6 s, every=50 1.2 s" in slow
    quick = shown(replace(FOUND, rate_bytes_per_s=1e12))
    assert "dense: nothing here is faster" in quick
    several = shown(FOUND)
    assert all(f"At {rate}:" in several for rate in ("50 Mbit/s", "1 Gbit/s", "10 Gbit/s"))
    assert "numba" not in several and "numba" in shown(replace(FOUND, compiled=False))


def test_the_table_fits_into_80_columns_with_the_longest_names_and_figures() -> None:
    costs = [Cost("reused threshold, int8", 1_090, 8.23e-6, 44.4e-6, 37.7e-6)]
    lines = shown(replace(FOUND, costs=costs, rate_bytes_per_s=3.95e6 / 8)).splitlines()
    head, row = (next(line for line in lines if at in line) for at in ("break-even", "reused"))
    assert head.split() == ["message", "select", "code", "break-even", "3.95", "Mbit/s"]
    assert "8.23 µs" in row and "…" not in "".join(lines)


def test_json_says_the_same() -> None:
    told = json.loads(json.dumps(replace(FOUND, rate_bytes_per_s=1e5).to_json(), allow_nan=False))
    assert told["sent_at_rate"] == "top-k" and told["dense_round_s"] == 60.0
    int8, top_k = told["codecs"]
    assert top_k["round_s"] == pytest.approx(0.074) and top_k["beats_dense"] and int8["beats_dense"]
    even = top_k["break_even_bytes_per_s"]
    assert even == pytest.approx((6_000_000 - 6_000) / 0.014)
    free = replace(FOUND, costs=[Cost("free", 10)]).to_json()
    assert free["codecs"][0]["break_even_bytes_per_s"] is None and free["sent_at_rate"] is None


def test_quantities_in_words() -> None:
    assert [count(n) for n in (7, 620, 25_000_000, 1_234_567)] == ["7", "620", "25M", "1.235M"]
    assert [bits_text(r) for r in (0.0, 10.0, 6.25e6, 1.2495e8, float("inf"))] == [
        "never",
        "80 bit/s",
        "50 Mbit/s",
        "1 Gbit/s",
        "any link",
    ]


@pytest.mark.usefixtures("quick")
def test_the_command() -> None:
    result = invoke("probe", "--parameters", "20k", "--ratio", "0.01", "--rate", "1Mbit", "--json")
    told = json.loads(result.out)
    assert result.code == 0 and told["parameters"] == 20_000 and told["k"] == 200
    assert told["rate_bytes_per_s"] == 125_000 and told["sent_at_rate"] != "fp32"
    table = invoke("probe", "--parameters", "20k", "--peers", "2")
    assert table.code == 0 and "20k parameters, 1 in 1000 sent, 2 peers" in table.out


@pytest.mark.usefixtures("quick")
def test_the_command_on_a_script(script) -> None:
    result = invoke("probe", "--steps", "2", "--json", script, "50")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["parameters"] == 620 and told["vector"] == "of train.py, after 2 steps"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((), "give one of"),
        (("--parameters", "1k", "--model", "a:b"), "give one of"),
        (("--parameters", "many"), "250000, 100k or 1M"),
        (("--parameters", "1k", "--ratio", "2"), "a ratio of 2.0"),
        (("--parameters", "1k", "--rate", "1M"), "50Mbit"),
        (("--parameters", "1k", "--rate", "1Mbit", "--run", "x"), "give one of --rate"),
        (("--parameters", "1k", "--steps", "8"), "--steps and --patience are of a SCRIPT"),
        (("--model", "a:b", "--patience", "1"), "--steps and --patience are of a SCRIPT"),
        (("none.py",), "no script none.py"),
    ],
)
def test_wrong_usage_is_one_line(arguments, match) -> None:
    result = invoke("probe", *arguments)
    assert result.code == 2 and match in error_of(result)
