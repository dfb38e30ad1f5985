"""Simulated runs: the theory's disagreement, determinism, faults, and the trace they leave."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ragtag.app.experiment import ExperimentError, ExperimentSetup, RoundFigures, simulate
from ragtag.app.report import build_report, report_json
from ragtag.app.terminal.simulate_view import _at_the_centre, _in_groups
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.core.faultspec import parse_faults
from ragtag.core.types import Effect, Outcome
from ragtag.protocols.groups.channel import GroupNode
from ragtag.simulation.check.rounds import InvariantBroken

SMALL = ExperimentSetup(peers=4, values=2_000, rounds=6, faults=parse_faults("loss=0.1,delay=0.005"))


def test_rps_at_ten_percent_loss_comes_to_the_steady_disagreement_of_theory() -> None:
    setup = ExperimentSetup(
        peers=8, values=100_000, rounds=16, faults=parse_faults("loss=0.1"), compute_sigma=0.0
    )
    result = simulate(setup)
    mine = 0.9  # of the chunks that a peer owns: each other's copy comes with this chance
    theirs = 0.9 * (1 + 6 * 0.9) / 7  # an owner's copy is never lost, its average and others' copies may be
    assert result.arrived == pytest.approx(mine / 8 + theirs * 7 / 8, abs=0.01)
    assert result.disagreement == pytest.approx(0.0857, rel=0.04)  # beta / (1 - beta), n = 8, p = .1


@pytest.mark.parametrize("method", ["rps", "rps+repair", "allreduce", "ring"])
def test_without_loss_no_disagreement_is_left(method: str) -> None:
    result = simulate(ExperimentSetup(peers=4, values=2_000, rounds=3, method=method, check=True))
    assert [figures.round for figures in result.rounds] == [0, 1, 2]
    assert all(figures.peers == 4 and figures.arrived == 1.0 for figures in result.rounds)
    assert all(figures.contributors == 4 for figures in result.rounds)
    assert result.disagreement < 1e-10
    assert result.healed_round is not None


def test_two_runs_of_one_seed_are_one_run() -> None:
    first, again = simulate(SMALL), simulate(SMALL)
    assert (first.digest, first.rounds) == (again.digest, again.rounds)
    other = simulate(ExperimentSetup(peers=4, values=2_000, rounds=6, faults=SMALL.faults, seed=1))
    assert other.digest != first.digest


def test_a_crash_and_a_freeze_leave_their_marks_in_figures_and_trace(tmp_path: Path) -> None:
    faults = parse_faults("loss=0.05,delay=0.005,kill=2@0.5,freeze=1@0.3+0.4,kill=3@99")
    told: list[RoundFigures] = []
    setup = ExperimentSetup(peers=4, values=2_000, rounds=12, faults=faults)
    result = simulate(setup, tmp_path / "run", on_round=told.append, command="ragtag simulate ...")
    assert result.live == (0, 1, 3)
    assert tuple(told) == result.rounds
    numbers = [figures.round for figures in told]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, 11)
    assert min(figures.peers for figures in told) < 4
    run = read_run(tmp_path / "run")
    assert run.run is not None
    assert (run.run.world, run.run.method, run.run.peers) == ("simulated", "rps", 4)
    records = list(run.records())
    assert not run.damage.messages()
    marks = [(r.name, r.peer, r.t) for r in records if isinstance(r, trace.Fault)]
    assert marks == [("loss", -1, 0.0), ("delay", -1, 0.0), ("freeze", 1, 0.3), ("kill", 2, 0.5)]
    rounds = [r for r in records if isinstance(r, trace.Round)]
    assert len({(r.peer, r.round) for r in rounds}) == len(rounds)
    assert max(r.t for r in rounds if r.peer == 2) < 0.5
    assert sorted(r.peer for r in records if isinstance(r, trace.Leave)) == [trace.CREW, 0, 1, 3]
    assert json.loads(json.dumps(result.to_json()))["setup"]["faults"].startswith("loss=0.05")


def test_faults_stand_in_the_trace_when_they_happen_and_in_the_report(tmp_path: Path) -> None:
    crew, late = tmp_path / "crew.jsonl", []

    def look(figures: RoundFigures) -> None:
        """What a view that follows the file knows by now."""
        decoder = trace.Decoder()
        records = [decoder.decode(line, n) for n, line in enumerate(crew.read_bytes().splitlines())]
        assert isinstance(records[0], trace.Run)
        assert [r.t for r in records] == sorted(r.t for r in records)
        known = {r.name for r in records if isinstance(r, trace.Fault)}
        begun = {"loss"} | {name for name, t in (("freeze", 0.3), ("kill", 0.5)) if t <= figures.ended_s}
        assert begun <= known
        late.append(figures.ended_s > 0.5)

    faults = parse_faults("loss=0.05,freeze=1@0.3+0.1,kill=2@0.5,kill=3@99")
    simulate(
        ExperimentSetup(peers=4, values=2_000, rounds=10, faults=faults, check=True), tmp_path, on_round=look
    )
    assert set(late) == {False, True}
    said = report_json(tmp_path)
    assert [(f["name"], f["peer"], f["from_s"]) for f in said["faults"]] == [
        ("loss", -1, 0.0),
        ("freeze", 1, 0.3),
        ("kill", 2, 0.5),
    ]
    page = build_report(tmp_path).read_text("utf-8")
    assert all(words in page for words in ("peer 1 frozen 100 ms", "peer 2 killed", "loss 5 %"))


def test_healing_leaves_no_records(tmp_path: Path) -> None:
    setup = ExperimentSetup(
        peers=4, values=2_000, rounds=6, faults=parse_faults("freeze=1@0.2+5"), check=True
    )
    result = simulate(setup, tmp_path)
    last = [{r.peer: r for r in read_run(tmp_path).records()}[peer] for peer in range(4)]
    left = [record for record in last if isinstance(record, trace.Leave)]
    assert len(left) == 4
    assert {record.t for record in left} == {result.virtual_s}
    assert sum(record.bytes_sent for record in left) == result.bytes_sent


def test_a_run_in_which_all_crash_ends(tmp_path: Path) -> None:
    result = simulate(
        ExperimentSetup(peers=2, values=10, rounds=5, faults=parse_faults("kill=0@0.01,kill=1@0.01"))
    )
    assert (result.live, result.rounds, result.arrived) == ((), (), 0.0)


def test_a_crew_of_one_averages_with_itself() -> None:
    result = simulate(ExperimentSetup(peers=1, values=10, rounds=3))
    assert [figures.contributors for figures in result.rounds] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "magic"}, "no method is called 'magic'; there are rps, rps"),
        ({"method": "ssp=3"}, "'ssp=3' says when a script averages, .* there are rps, rps"),
        ({"method": "softsync=x"}, "after softsync= stands a whole number"),
        ({"method": "softsync=0"}, "n is 0"),
        ({"method": "softsync=5", "peers": 4}, "n is 5, more than the 4 peers"),
        ({"method": "backup=4", "peers": 4}, "leaves none to wait for"),
        ({"method": "grouping=0"}, "groups_max is 0"),
        ({"method": "grouping", "check": True}, "leave it out"),
        ({"peers": 65}, "65 peers: rps averages 1 to 64"),
        ({"values": 0}, "values is 0; it must be 1 or more"),
        ({"rounds": -1}, "rounds is -1"),
        ({"compute_s": -1.0}, "compute takes -1.0 s"),
        ({"compute_s": float("nan")}, "compute takes nan s"),
        ({"faults": parse_faults("kill=16@1")}, "names peer 16"),
    ],
)
def test_what_cannot_be_simulated_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        ExperimentSetup(**change)  # type: ignore[arg-type]


def test_a_folder_with_a_trace_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "crew.jsonl").write_text("")
    with pytest.raises(ExperimentError, match="holds the trace of a run already"):
        simulate(SMALL, tmp_path)


# -- Schedules of a central state

STRAGGLER = parse_faults("delay=0.002,slow=3x12")


@pytest.mark.parametrize("method", ["asynchronous", "softsync=2", "backup=1", "grouping"])
def test_a_central_state_waits_for_no_straggler(method: str, tmp_path: Path) -> None:
    setup = ExperimentSetup(
        peers=4, values=2_000, rounds=30, method=method, faults=STRAGGLER, compute_sigma=0.02
    )
    result = simulate(setup, tmp_path)
    assert result.turns is not None
    assert min(result.turns[:3]) >= 28
    assert 1 <= result.turns[3] <= 4
    assert result.arrived == 1.0
    assert result.staleness is not None
    assert result.staleness.most >= 10
    assert result.virtual_s < 1.5 * 30 * 0.1 + 12 * 0.1
    assert result.groups == (((0, 1, 2), (3,)) if method == "grouping" else ())
    assert simulate(setup).digest == result.digest
    said = json.loads(json.dumps(result.to_json()))
    assert said["turns"] == list(result.turns)
    assert said["staleness"]["most"] == result.staleness.most
    assert "turns by peer" in " ".join(_at_the_centre(result))
    assert sum(isinstance(r, trace.Round) for r in read_run(tmp_path).records()) >= sum(result.turns)


def test_rounds_of_all_have_no_staleness() -> None:
    result = simulate(SMALL)
    assert (result.staleness, result.turns, result.groups) == (None, None, ())
    assert _at_the_centre(result) == []


@pytest.mark.parametrize("method", ["moshpit=4", "random-groups=4", "moshpit"])
@pytest.mark.parametrize("faults", ["", "kill=3@0.5,loss=0.02"])
def test_groups_average_without_delay_and_with_deaths(method: str, faults: str) -> None:
    """With no delay at all a repair was asked for and answered for ever at one virtual time."""
    setup = ExperimentSetup(peers=16, values=10_000, rounds=12, method=method, faults=parse_faults(faults))
    result = simulate(setup)
    assert result.rounds[-1].round >= 11  # a peer that is late may go on with a later one
    assert result.live == tuple(p for p in range(16) if not faults or p != 3)
    assert 1.5 < max(figures.contributors for figures in result.rounds) <= 8.0
    assert simulate(setup).digest == result.digest


def test_more_peers_than_average_directly_average_in_groups() -> None:
    result = simulate(ExperimentSetup(peers=100, values=100, rounds=3, method="moshpit=8"))
    assert len(result.live) == 100
    with pytest.raises(ExperimentError, match="100 peers: rps averages 1 to 64; more average in groups"):
        ExperimentSetup(peers=100)


@pytest.mark.parametrize("method", ["moshpit=3", "moshpit=4", "moshpit=8", "random-groups=4"])
@pytest.mark.parametrize("peers", [4, 9, 16, 32])
def test_peers_meet_from_the_first_round_on(method: str, peers: int) -> None:
    """They come as far apart as they compute; hosts waited for a round trip at first, and half were alone."""
    result = simulate(ExperimentSetup(peers=peers, values=100, rounds=20, method=method))
    assert result.alone is not None and result.alone < 0.25 and result.arrived > 0.75
    assert np.mean([figures.arrived for figures in result.rounds[:4]]) > 0.75
    said = " ".join(_in_groups(result))
    assert f"{result.alone:.1%} of rounds were spent alone" in said or "no round was spent alone" in said


@pytest.mark.parametrize(
    ("method", "peers"), [("moshpit=4", 16), ("moshpit=3", 4), ("random-groups=4", 9), ("moshpit=8", 80)]
)
def test_groups_are_checked_and_the_values_of_all_come_to_all(method: str, peers: int) -> None:
    faults = parse_faults("kill=3@0.5,loss=0.02")
    setup = ExperimentSetup(peers=peers, values=2_000, rounds=8, method=method, faults=faults, check=True)
    result = simulate(setup)
    assert result.healed_round is not None and result.healed_round >= 7
    assert len(result.live) == peers - 1


def test_a_mean_of_a_group_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GroupNode._finish

    def wrong(self: GroupNode, now_s: float, outcome: Outcome) -> list[Effect]:
        if len(outcome.members) > 1:
            outcome.mean[outcome.averaged] += 0.5
        return before(self, now_s, outcome)

    monkeypatch.setattr(GroupNode, "_finish", wrong)
    with pytest.raises(InvariantBroken, match="a mean that is not that of"):
        simulate(ExperimentSetup(peers=9, values=2_000, rounds=3, method="moshpit=3", check=True))


@pytest.mark.parametrize("method", ["moshpit=1", "moshpit=65", "random-groups=x", "moshpit="])
def test_groups_of_no_size_are_refused(method: str) -> None:
    with pytest.raises(
        ExperimentError, match=r"a group has 2 to 64 peers|a whole number, as (moshpit|random-groups)=2"
    ):
        ExperimentSetup(method=method)
