"""Peers on a real Ray cluster of several raylets: actors die, a raylet goes, one comes late."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragtag.app.launch import LaunchError
from ragtag.app.tracefile import trace_files
from tests.app.on_ray.cluster import TRAINING, Raylets, Watched, parent, raylets, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(3) as made:
        yield made


def test_training_goes_on_when_an_actor_is_killed_and_when_a_raylet_goes(
    cluster: Raylets, tmp_path: Path
) -> None:
    import ray

    stop, n = tmp_path / "stop", 4
    stages: list[str] = []
    before: dict[int, int] = {}

    def act(watched: Watched) -> None:
        if not watched.all_live(n):
            return
        if not stages:
            stages.append("killed")
            assert len({parent(pid) for pid in watched.actors.values()}) == 3  # SPREAD
            names = [name for name in ray.util.list_named_actors() if name.startswith("ragtag-peer-1-")]
            assert len(names) == 1
            before.update(watched.steps)
            watched.lose({1})
            ray.kill(ray.get_actor(names[0]), no_restart=False)
        elif stages == ["killed"]:
            stages.append("removed")
            assert watched.joins == {0: 1, 1: 2, 2: 1, 3: 1}
            assert all(watched.steps[peer] > before[peer] for peer in (0, 2, 3))
            on = {peer: parent(pid) for peer, pid in watched.actors.items()}
            raylet = on[2]
            lost = {peer for peer in on if on[peer] == raylet}
            assert len(lost) < n
            stages.extend(f"lost {peer}" for peer in sorted(lost))
            watched.lose(lost)
            cluster.remove(raylet)
        else:
            stop.touch()

    watched = Watched(act)
    result = run(watched, n, [str(TRAINING), str(stop)], tmp_path / "run")
    assert stop.exists(), watched.text()
    assert result.exit_code == 0, watched.text()
    assert [end.status for end in result.ends] == [0] * n
    lost = {int(stage[5:]) for stage in stages if stage.startswith("lost")}
    assert 2 in lost
    assert watched.joins == {peer: 1 + (peer == 1) + (peer in lost) for peer in range(n)}
    assert len(watched.said("has joined again")) == 1 + len(lost)
    names = {path.name for path in trace_files(tmp_path / "run")}
    assert {"crew.jsonl", "peer-00.jsonl", "peer-03.jsonl"} <= names
    cluster.add()


def test_a_peer_that_the_cluster_has_no_room_for_joins_when_it_has(cluster: Raylets, tmp_path: Path) -> None:
    stop, n = tmp_path / "stop", len(cluster.nodes) + 1
    added: list[bool] = []

    def act(watched: Watched) -> None:
        if not added and watched.all_live(n - 1):
            added.append(True)
            cluster.add()
        elif watched.all_live(n):
            stop.touch()

    watched = Watched(act)
    result = run(watched, n, [str(TRAINING), str(stop)], None, cpus_per_peer=1.0, placed_s=5.0)
    assert result.exit_code == 0, watched.text()
    assert stop.exists(), watched.text()
    assert watched.said(f"{n - 1} peers begin; the others join when the cluster has room")
    assert [end.status for end in result.ends] == [0] * n


def test_an_interrupt_ends_all_peers(cluster: Raylets, tmp_path: Path) -> None:
    def act(watched: Watched) -> None:
        if watched.ready() and not watched.said("SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)

    watched = Watched(act)
    result = run(watched, 2, [str(TRAINING), str(tmp_path / "never")], None)
    assert result.signal == signal.SIGINT
    assert result.exit_code == 130
    assert [end.by for end in result.ends] == ["launcher"] * 2, watched.text()


def test_an_error_in_the_script_is_shown_once_and_is_no_reason_to_start_again(
    cluster: Raylets, tmp_path: Path
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import os\nprint('peer', os.environ['RAGTAG_RANK'])\nraise ValueError('no such thing')\n"
    )
    watched = Watched()
    result = run(watched, 2, [str(script)], None)
    assert result.exit_code == 1
    assert [end.status for end in result.ends] == [1, 1]
    assert all("ValueError: no such thing" in end.error for end in result.ends)
    assert sorted(end.same_as is None for end in result.ends) == [False, True]
    assert sorted(e.text for e in watched.events if hasattr(e, "error") and hasattr(e, "text")) == [
        "peer 0",
        "peer 1",
    ]


def test_a_cluster_without_room_says_so(cluster: Raylets) -> None:
    with pytest.raises(LaunchError, match=r"room for no peer within 2 s; it has .* CPUs and 0 GPUs"):
        run(Watched(), 2, [str(TRAINING), "x"], None, gpus_per_peer=1.0, placed_s=2.0)
