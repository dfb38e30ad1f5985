"""The sparse hook in real ranks over gloo, started by torchrun: what all agree on, and its books."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("sparse_worker.py")
PATIENCE_S = 110.0


def torchrun(folder: Path, n: int, *scenes: str) -> list[dict[str, Any]]:
    """What each rank found, scene by scene."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    ended = subprocess.run(
        [*command, str(WORKER), str(folder), *scenes], env=env, capture_output=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 0, ended.stderr.decode()[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return torchrun(tmp_path_factory.mktemp("ranks"), 3)


@pytest.mark.slow
def test_all_values_as_they_are_give_the_average(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["dense"]["off"] < 1e-5 for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["sampled", "chunked", "gaussian", "random"])
def test_nothing_is_lost_though_buckets_are_dealt_anew(ranks: list[dict[str, Any]], scene: str) -> None:
    for rank in ranks:
        found = rank[scene]
        assert found["layouts"] == 2, "DDP has dealt its buckets anew, or the test shows nothing"
        assert found["same"], "all ranks have the same bits"
        assert found["off"] < 1e-5 * found["scale"]
        assert found["bias_off"] < 1e-5 * found["scale"], "small tensors are averaged whole"
        for stats in found["stats"]:
            assert stats["dense_values"] == 10
            assert stats["values"] == 10010
            assert stats["saved"] > 0.9
            assert 0 <= stats["captured"] <= 1
            assert stats["residual_norm"] > 0


@pytest.mark.slow
def test_top_k_says_what_it_sent(ranks: list[dict[str, Any]]) -> None:
    stats = ranks[0]["sampled"]["stats"]
    assert [step["entries"] for step in stats] == [100] * 6
    assert all(step["returned"] == 0 for step in stats)
    # at least an int8 and 7 bits for each of 100 entries, to two others; no more than dense
    assert all(2 * 100 * (8 + 7) / 8 < step["bytes_sent"] < 2000 for step in stats)
    random = ranks[0]["random"]["stats"]
    assert all(a["captured"] > 2 * b["captured"] for a, b in zip(stats, random, strict=True))


@pytest.mark.slow
def test_nan_on_one_rank_is_named_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["raise"]
        assert found["said"].startswith(
            "rank 1: the gradient of 'third' has 1 NaN and 0 infinite of 2000 values"
        )
        assert (found["finite"], found["same"], found["skipped"]) == (True, True, 1)


@pytest.mark.slow
def test_nan_can_be_left_to_a_gradient_scaler(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["skip"]
        assert found["nans"] >= 2000
        assert (found["said"], found["finite"], found["same"]) == ("", True, True)


@pytest.mark.slow
def test_another_ratio_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["other ratio"]["said"].startswith("rank 2 has ratio 0.02 where it is 0.01 elsewhere")


@pytest.mark.slow
def test_a_checkpoint_goes_on_as_the_run_it_was_taken_from(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed"]["off"] < 1e-6 * rank["resumed"]["scale"]
        assert "rank 0 has step -1 where it is 2 elsewhere" in rank["resumed"]["said"]


@pytest.mark.slow
def test_a_network_learns_by_a_hundredth_of_its_gradients(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["learning"]
        assert found["same"]
        assert found["last"] < 0.4 * found["first"]
        assert found["densities"][0] == pytest.approx(0.25, rel=0.01)
        assert found["densities"][-1] == pytest.approx(0.01, rel=0.01)
        assert found["saved"] > 0.95
