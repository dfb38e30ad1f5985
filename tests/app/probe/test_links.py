"""A crew's links: how they are measured, kept and read, and what averages over them are said to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ragtag.app.probe import crew as probing
from ragtag.app.probe import estimate as estimating
from ragtag.app.probe.crew import Coming, Glimpse, Slots, links_of, look, slots
from ragtag.app.probe.links import Links, LinksError, LinkWay, Tried, read_links, write_links
from ragtag.codecs.sparse.advice import Cost
from ragtag.core.faults import Loss
from ragtag.core.types import Average, Run
from ragtag.network.driver.driver import Direction
from ragtag.protocols.node import Channel
from tests.app.command import error_of, invoke
from tests.protocols.harness import TINY, World, members

MBIT = 1e6 / 8


def links(n: int = 3, rate: float = 10 * MBIT, loss: float = 0.0, **slow: float) -> Links:
    """All ways alike, but for those named: ``out1=...`` of peer 1, ``way01=...`` from peer 0 to 1."""

    def rate_of(a: int, b: int) -> float:
        return min(rate, slow.get(f"out{a}", rate), slow.get(f"into{b}", rate), slow.get(f"way{a}{b}", rate))

    ways = [LinkWay(a, b, rate_of(a, b), 0.001, 0.002, loss) for a in range(n) for b in range(n) if a != b]
    return Links(tuple(range(n)), tuple(ways))


# -- Slots


def test_in_each_slot_a_peer_sends_to_one_and_gets_from_one_and_each_way_has_its_slot() -> None:
    n, sent = 4, list[tuple[int, int, int]]()
    world = World(n, slots, 1)
    for node in world.nodes:
        node.configure(0, Channel(slots, TINY._replace(elements=272), 1, 0.05, 0.005))

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        sent.append((run.key.round, source, run.peer))
        pieces = np.array_split(np.arange(40), 8)
        return [(0.1 * at, piece_of(run, piece)) for at, piece in enumerate(pieces)]

    world.carry = carry
    for _ in range(n - 1):
        for peer in range(n):
            world.push(world.now_s, peer, Average(0, np.zeros((1, 272), np.float32), 1.0, 1.0))
        world.run()
    assert sorted((a, b) for _, a, b in sent) == [(a, b) for a in range(n) for b in range(n) if a != b]
    for slot in range(n - 1):
        assert (
            sorted(a for r, a, _ in sent if r == slot)
            == sorted(b for r, _, b in sent if r == slot)
            == [0, 1, 2, 3]
        )
    for peer, outcomes in enumerate(world.outcomes):
        assert [o.round for o in outcomes] == [0, 1, 2]
        for outcome in outcomes:
            (source,) = members(int(outcome.heard[0]))
            assert (outcome.round, source, peer) in sent
            assert outcome.mean[0, source] == pytest.approx(50.0), "5 chunks in .1 s"
            assert np.count_nonzero(outcome.mean) == 1


def piece_of(run: Run, piece: Any) -> Run:
    a, b = int(piece[0]), int(piece[-1]) + 1
    return Run(
        run.peer, run.key, a, run.total, run.payload[a:b], run.weight[a:b], run.heard[a:b], None, False
    )


def test_what_comes_is_counted_without_its_beginning_and_in_little_memory() -> None:
    coming = Coming()
    for at in range(4000):
        coming.add(0.001 * at, 1 if at < 1000 else 8)  # rate control finds the rate in the first quarter
    assert len(coming.marks) <= probing.MARKS
    assert coming.rate() == pytest.approx(8000, rel=0.02)
    few = Coming()
    few.add(0.0, 5)
    few.add(1.0, 5)
    assert few.rate() == 0.0


def test_slots_of_a_peer_that_is_far_ahead_are_not_kept() -> None:
    world = World(2, slots, 1)
    for node in world.nodes:
        node.configure(0, Channel(slots, TINY._replace(elements=272), 1, 0.05, 0.005))
    world.carry = lambda source, run: [
        (0.0, piece_of(replace(run, key=run.key._replace(round=r)), range(1))) for r in range(99)
    ]
    world.push(0.0, 0, Average(0, np.zeros((1, 272), np.float32), 1.0, 1.0))
    world.run()
    machine = world.nodes[1].channels[0]
    assert isinstance(machine, Slots)
    assert len(machine._coming) <= 3
    assert machine.newer()


def direction(peer: int, came: int, lost: int, rate: float = 5 * MBIT) -> Direction:
    return Direction(peer, came + lost, came, lost, 0, rate, 0.004, 0.001, {}, 1152)


def test_a_peer_looks_at_the_way_that_was_used() -> None:
    found = {1: Glimpse(), 2: Glimpse()}
    came = np.zeros(272, np.float32)
    came[2] = 1000.0
    before = [direction(1, 10, 0), direction(2, 10, 0)]
    look(found, came, before, [direction(1, 1490, 100), direction(2, 14, 0), direction(7, 9999, 0)])
    assert found == {1: Glimpse(0.0, 5 * MBIT, 0.001, 0.004), 2: Glimpse(1000.0 * 1152, 0.0, 0.001)}


def test_a_trickle_tells_what_share_came() -> None:
    world, n = World(3, slots, 1), 3
    for node in world.nodes:
        node.configure(0, Channel(slots, TINY._replace(elements=272), 1, 0.05, 0.005))
    lost, times = dict[tuple[int, int], int](), list[float]()

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        gone = source == 1 and run.first % 4 == 0
        lost[source, run.peer] = lost.get((source, run.peer), 0) + gone
        times.append(world.now_s)
        return [] if gone else [(0.0, run)]

    world.carry = carry
    for peer in range(n):
        world.push(0.0, peer, Average(0, np.full((1, 272), 100, np.float32), 0.0, 1.0))
    world.run()
    for peer, (outcome,) in enumerate(world.outcomes):
        for other in {0, 1, 2} - {peer}:
            assert outcome.mean[0, other] == pytest.approx(0.75 if other == 1 else 1.0)
    assert lost[1, 0] == lost[1, 2] == 25
    assert max(times) == pytest.approx(0.75 * 0.99, abs=0.01), "evenly, and the last have time to come"


def told(n: int = 3) -> dict[int, list[float]]:
    return {
        me: [
            float(f) for other in range(n) if other != me for f in (other, 1e6, 9e5 + me, 0.001, 0.002, 0.01)
        ]
        for me in range(n)
    }


def test_a_ways_rate_is_what_its_receiver_counted_or_its_sender_found() -> None:
    rows = told()
    rows[1][1] = 0.0  # nothing was counted at 1 of what 0 sent
    found = links_of(rows)
    assert found.peers == (0, 1, 2)
    rates = {(way.source, way.dest): way.rate_bytes_per_s for way in found.ways}
    assert rates[0, 1] == 9e5
    assert rates[1, 0] == 1e6
    assert all((way.rtt_s, way.busy_rtt_s, way.loss) == (0.001, 0.002, 0.01) for way in found.ways)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda rows: rows[0].pop(), "no whole number"),
        (
            lambda rows: rows.update({0: rows[0][:6]}),
            "nothing that could be measured came from peer 0 to peer 2",
        ),
        (lambda rows: rows[1].__setitem__(5, -0.5), "told what cannot be"),
        (lambda rows: rows[1].__setitem__(3, float("nan")), "told what cannot be"),
        (lambda rows: [row.clear() for row in rows.values()], "nothing that could be measured"),
    ],
)
def test_what_peers_tell_that_is_no_table(spoil: Any, match: str) -> None:
    rows = told()
    spoil(rows)
    with pytest.raises(LinksError, match=match):
        links_of(rows)


# -- Lines and files


def test_a_line_is_its_slower_direction_and_a_very_slow_way_decides() -> None:
    assert links().rate(0) == 10 * MBIT
    one_slow = links(4, out1=2 * MBIT)
    assert [one_slow.rate(p) for p in range(4)] == [6 * MBIT, 2 * MBIT, 6 * MBIT, 6 * MBIT]
    assert links(4, into2=4 * MBIT).rate(2) == 4 * MBIT
    assert links(4, way01=5 * MBIT).rate(0) == 10 * MBIT, "a third of the line goes that way"
    assert links(4, way01=1 * MBIT).rate(0) == 3 * MBIT


def test_the_simulator_has_them_as_lines() -> None:
    faults = links(loss=0.02).faults()
    assert faults.latency_s == 0.001
    assert isinstance(faults.loss, Loss)
    assert faults.loss.p == pytest.approx(0.02)
    assert [line.rate_bytes_per_s for line in faults.lines] == [10 * MBIT] * 3
    assert links().faults().loss is None


def test_they_are_kept_and_read_again(tmp_path: Path) -> None:
    assert read_links(tmp_path) is None
    kept = msgspec.structs.replace(links(), tried=Tried("rps+repair", 1000, 0.5))
    write_links(kept, tmp_path)
    assert read_links(tmp_path) == kept


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda table: table["ways"].pop(), "from peer 2 to peer 1 is missing"),
        (lambda table: table["ways"].append(table["ways"][0]), "twice"),
        (lambda table: table["ways"][0].update(rate_bytes_per_s=0.0), "rate_bytes_per_s"),
        (lambda table: table["ways"][0].update(loss=1.0), "loss"),
        (lambda table: table["ways"][0].update(note="x"), "note"),
        (lambda table: table.update(peers=[0], ways=[]), "one peer alone"),
        (lambda table: table.clear(), "peers"),
    ],
)
def test_a_file_that_is_no_table_says_what_to_do(tmp_path: Path, change: Any, match: str) -> None:
    table = json.loads(msgspec.json.encode(links()))
    change(table)
    (tmp_path / "links.json").write_text(json.dumps(table))
    with pytest.raises(LinksError, match=match) as caught:
        read_links(tmp_path)
    assert "measure again: ragtag run" in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b"{" * 1000])
def test_garbage_is_no_table(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "links.json").write_bytes(text)
    with pytest.raises(LinksError, match="is no table of links"):
        read_links(tmp_path)


# -- Estimates


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "ROUNDS", 4)
    monkeypatch.setattr(estimating, "VALUES", 1 << 15)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("method", ["rps", "allreduce", "ring"])
def test_without_loss_an_average_takes_what_the_line_does(method: str) -> None:
    """4 peers, both stages: 1.5 times the vector, and headers, over a line of 10 Mbit/s. A ring stands still
    for a round trip in each of its 6 steps; where few values stand for many, that is longer.
    """
    size = 40_000_000
    seconds, came = estimating.estimate(links(4), method, size)
    least_s = 1.5 * size * 1200 / 1088 / (10 * MBIT)
    assert least_s * 0.99 < seconds < least_s * (1.3 if method == "ring" else 1.12)
    assert came == 1.0
    assert estimating.estimate(links(4), method, size // 10)[0] == pytest.approx(seconds / 10, rel=0.15)
    assert estimating.estimate(links(4), method, size, 5.0)[0] == pytest.approx(seconds + 5.0)


@pytest.mark.usefixtures("brief")
def test_with_loss_rps_leaves_out_what_repair_brings() -> None:
    rps, repaired = (
        estimating.estimate(links(4, loss=0.05), method, 4_000_000) for method in ("rps", "rps+repair")
    )
    assert 0.85 < rps[1] < 0.96
    assert repaired[1] > 0.99
    assert rps[0] < repaired[0] < 4 * rps[0]


def test_the_best_is_the_fastest_that_averages_all() -> None:
    def one(name: str, seconds: float, averaged: float, of_all: bool = True) -> estimating.Foreseen:
        return estimating.Foreseen(name, "fp32", seconds, 0.0, averaged, of_all)

    whole = [
        one("lossy", 1.0, 0.9),
        one("slow", 3.0, 1.0),
        one("good", 2.0, 0.9995),
        one("pairs", 0.5, 1.0, False),
    ]
    assert estimating.best_of(whole).averager == "good"
    assert estimating.best_of(whole[:1] + whole[3:]).averager == "lossy"


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_the_command_takes_links_that_a_run_left(tmp_path: Path) -> None:
    write_links(msgspec.structs.replace(links(loss=0.01), tried=Tried("rps+repair", 3000, 0.1)), tmp_path)
    result = invoke("probe", "--parameters", "20k", "--run", tmp_path, "--json")
    assert result.code == 0
    told = json.loads(result.out)
    assert told["peers"] == 3
    assert told["rate_bytes_per_s"] == 10 * MBIT
    crew = told["crew"]
    assert len(crew["links"]) == 6
    assert {(one["averager"], one["codec"]) for one in crew["averages"]} >= {
        ("RPS()", "fp32"), ("RPS(repair=True)", "int8"), ("AllReduce(ring=True)", "bf16")
    }  # fmt: skip
    by = {(one["averager"], one["codec"]): one["seconds"] for one in crew["averages"]}
    assert by["AllReduce()", "fp32"] > by["AllReduce()", "int8"]
    assert crew["best"] in crew["averages"]
    assert crew["tried"]["measured_s"] == 0.1


@pytest.mark.usefixtures("brief")
def test_the_table_says_how_far_an_estimate_was_off(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    tried = msgspec.structs.replace(links(), tried=Tried("rps+repair", 30_000, 10.0))
    found = estimating.estimates(tried, Cost("fp32", 400_000, dense=True), [])
    estimating.show(tried, found, Console(width=100))
    said = " ".join(capsys.readouterr().out.split())
    assert "10 s measured" in said
    assert "take the table with this factor" in said
    assert "Best: averager=ragtag." in said
    assert "Moshpit(" not in said, "three peers make no pairs"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--crew", "x", "--rate", "1Mbit"), "give one of --rate, --run and --crew"),
        (("--crew", "no-token"), "'no-token' is no file, and is no token"),
        (("--crew", "train.py"), "what is in train.py is no token"),
        (("--crew", ""), "give TOKEN"),
    ],
)
def test_wrong_usage_is_one_line_and_joins_no_crew(
    arguments: tuple[str, ...], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", lambda *args, **options: pytest.fail("a process was started"))
    Path("train.py").write_text("print(1)")
    result = invoke("probe", "--parameters", "1k", *arguments)
    assert result.code == 2
    assert match in " ".join(result.err.split())


def test_a_broken_table_ends_the_command_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text("{}")
    assert "is no table of links" in error_of(invoke("probe", "--parameters", "1k", "--run", tmp_path))
