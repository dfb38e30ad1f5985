"""Reports of traces that are not what one would wish."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ragtag.app.report import build_report, report_json
from ragtag.app.report.summarise import summarise
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file, read_run
from ragtag.core import trace
from tests.app.report.page import Page, drawings
from tests.app.synthetic import Story, write_run


def test_a_run_that_goes_on_still(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=40, finished=False, killed=None))
    page = build_report(tmp_path, tmp_path / "elsewhere" / "now.html").read_text("utf-8")
    assert "has not ended" in page
    said = report_json(tmp_path)
    assert said["finished"] is False and said["lost"] == []
    assert {p["state"] for p in said["per_peer"]} == {"running"}


def test_charts_begin_with_training_where_that_takes_long_to_begin(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Run(t=0.0, world="live", name="x", seed=1, peers=1, method="rps"))
        writer.write(trace.Fault(t=2.0, name="loss", detail="loss=0.1"))
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        for k in range(11):
            writer.write(trace.Step(t=10.0 + k, peer=0, step=k + 1, samples=8, loss=1.0))
    summary = summarise(read_run(tmp_path))
    assert (summary.extent.t0, summary.extent.t1) == (pytest.approx(9.8), 20.0)
    page = build_report(tmp_path).read_text("utf-8")
    assert "the charts begin with training, after 9.8 s" in page
    for svg in drawings(page):
        left, right = map(float, (svg.get("data-x") or "").split(","))
        (line,) = [p for p in svg.iter("path") if p.get("data-name") == "peer 0"]
        first = float((line.get("d") or "M").split()[0].lstrip("M"))
        assert left < first < left + 0.05 * (right - left)
    write_run(tmp_path / "short", Story(rounds=100))  # training begins after a second
    assert summarise(read_run(tmp_path / "short")).extent.t0 == 0.0


def test_what_a_peer_says_twice_in_a_row_is_one_line(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        for t, what in (
            (1.0, "silent"),
            (1.1, "heard again"),
            (1.2, "silent"),
            (1.3, "left"),
            (1.31, "left"),
        ):
            writer.write(trace.Note(t=t, peer=0, what=what, other=1))
    with TraceWriter(tmp_path / peer_file(2)) as writer:
        writer.write(trace.Note(t=1.35, peer=2, what="left", other=1))
        writer.write(trace.Note(t=9.0, peer=2, what="left", other=1))
    items = summarise(read_run(tmp_path)).items
    assert [(item.what, item.by) for item in items] == [
        ("silent", {0}),
        ("heard again", {0}),
        ("silent", {0}),
        ("left", {0, 2}),
        ("left", {2}),
    ]


def test_a_peer_that_its_launcher_lost_is_named(tmp_path: Path) -> None:
    """The launcher's note is of the peer itself: the report said that the crew was lost."""
    write_run(tmp_path, Story(rounds=40))
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Note(t=3.0, peer=2, what="lost", detail="ended by SIGKILL"))
    assert [item.about for item in summarise(read_run(tmp_path)).items if item.what == "lost"] == [2]


def test_charts_end_with_the_peers_and_not_with_their_launcher(tmp_path: Path) -> None:
    story = Story(rounds=40)
    write_run(tmp_path, story)
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Leave(t=60.0))
    assert summarise(read_run(tmp_path)).extent.t1 == story.until_t
    assert report_json(tmp_path)["duration_s"] == 60.0
    assert "lasted 60 s" in Page(build_report(tmp_path).read_text("utf-8")).text


@pytest.mark.parametrize(
    ("largest_s", "said"), [(0.3, "3\N{MULTIPLICATION SIGN} median"), (21.0, "210\N{MULTIPLICATION SIGN}")]
)
def test_a_ratio_is_said_in_plain_digits(tmp_path: Path, largest_s: float, said: str) -> None:
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        for k, total_s in enumerate([0.1] * 30 + [largest_s]):
            round_ = trace.Round(
                t=float(k), peer=0, round=k, scatter_s=0.0, gather_s=0.0, total_s=total_s, arrived=1.0
            )
            writer.write(round_)
    assert said in Page(build_report(tmp_path).read_text("utf-8")).text


def test_only_a_run_record(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Run(t=0.0, world="simulated", name="nothing yet", seed=1, peers=3, method="rps"))
    text = Page(build_report(tmp_path).read_text("utf-8")).text
    assert "nothing yet" in text and "virtual time" in text
    said = report_json(tmp_path)
    assert said["round_time_s"]["median"] is None and said["arrival"]["mean"] is None
    json.dumps(said, allow_nan=False)


def test_no_run_record_and_one_of_everything(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        writer.write(trace.Step(t=0.0, peer=0, step=1, samples=8, loss=0.0))
        writer.write(trace.Eval(t=0.0, peer=0, model="own", step=1, accuracy=1.0))
        writer.write(
            trace.Round(t=0.0, peer=0, round=0, scatter_s=0.0, gather_s=0.0, total_s=0.0, arrived=0.0)
        )
    page = build_report(tmp_path).read_text("utf-8")
    drawings(page)
    assert "nan" not in page.lower().replace("finance", "")
    assert report_json(tmp_path)["per_peer"][0]["accuracy"] == 1.0


def test_damage_and_bad_losses_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=30))
    with TraceWriter(tmp_path / peer_file(1)) as writer:
        for k in range(4):
            writer.write(trace.Step(t=2.0 + k, peer=1, step=100 + k, samples=800, loss=math.nan))
    with (tmp_path / peer_file(3)).open("ab") as file:
        file.write(b"\x00\x01\n")
    text = Page(build_report(tmp_path).read_text("utf-8")).text
    assert "4 training losses were not finite" in text
    assert "peer-03.jsonl: 1 damaged line(s) left out" in text
    said = report_json(tmp_path)
    assert said["per_peer"][1]["losses_not_finite"] == 4 and len(said["damage"]) == 2


def test_an_error_told_by_the_peer_and_by_its_launcher_is_one(tmp_path: Path) -> None:
    story = Story(rounds=20, killed=None)
    write_run(tmp_path, story)
    end = story.until_t
    with TraceWriter(tmp_path / peer_file(5)) as writer:
        writer.write(trace.Error(t=end, peer=5, what="ValueError: no such shape"))
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(
            trace.Error(t=end + 0.2, peer=5, what="ValueError: no such shape", detail="Traceback ...")
        )
    said = report_json(tmp_path)
    assert said["errors"] == 1 and said["lost"] == [5]
    assert said["per_peer"][5]["state"] == "failed"
    assert "Traceback ..." in Page(build_report(tmp_path).read_text("utf-8")).text


def test_a_peer_that_left_with_an_error_has_failed(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        writer.write(trace.Join(t=0.0, peer=0))
        writer.write(trace.Leave(t=5.0, peer=0, failed=True))
    said = report_json(tmp_path)
    assert (said["per_peer"][0]["state"], said["lost"], said["finished"]) == ("failed", [0], False)


def test_a_peer_without_a_word_is_lost(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=20, killed=None))
    path = tmp_path / peer_file(1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:20]))
    (tmp_path / peer_file(3)).unlink()
    said = report_json(tmp_path)
    assert said["per_peer"][1]["state"] == "lost" and said["per_peer"][3]["state"] == "no trace"
    assert said["lost"] == [1]


def test_faults_written_at_the_end_of_a_simulated_run_count_from_their_time(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        for k in range(200):  # far more than the reader puts in order
            for peer, accuracy in ((0, 0.9), (1, 0.1)):
                if peer == 0 or k < 100:
                    writer.write(trace.Eval(t=float(k), peer=peer, model="own", step=k, accuracy=accuracy))
        writer.write(trace.Fault(t=100.0, peer=1, name="kill"))
    t, mean = summarise(read_run(tmp_path)).own_mean.points(-2)
    assert mean[t < 99][-1] == pytest.approx(0.5) and mean[t > 102][0] == pytest.approx(0.9)
