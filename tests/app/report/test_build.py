"""The report says what the trace says, in one page that needs nothing else and believes no text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ragtag.app.report import build_report, report_json
from ragtag.app.report.summarise import CHARTED_MAX, summarise
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file, read_run
from ragtag.core import trace
from tests.app.report.page import CHARTS, Page, drawings
from tests.app.synthetic import Story, write_run


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("six"))


@pytest.fixture(scope="module")
def page(six: Path) -> str:
    return build_report(six).read_text(encoding="utf-8")


def test_headline_figures_are_those_of_the_records(six: Path) -> None:
    records = list(read_run(six).records())
    rounds = [r for r in records if isinstance(r, trace.Round)]
    times = np.array([r.total_s for r in rounds])
    last = {r.peer: r for r in records if isinstance(r, trace.Eval) and r.model == "own"}
    survivors = [last[p].accuracy or 0.0 for p in range(6) if p != Story().killed]

    said = report_json(six)
    json.dumps(said, allow_nan=False)
    assert said["round_time_s"]["median"] == pytest.approx(np.median(times), rel=1e-12)
    assert said["round_time_s"]["p95"] == pytest.approx(np.quantile(times, 0.95), rel=1e-12)
    assert said["round_time_s"]["max"] == times.max()
    assert said["round_time_s"]["count"] == len(rounds)
    assert said["round_time_s"]["p95_over_median"] == pytest.approx(
        np.quantile(times, 0.95) / np.median(times)
    )
    assert said["arrival"]["mean"] == pytest.approx(np.mean([r.arrived for r in rounds]), rel=1e-9)
    assert said["accuracy"]["survivors_mean"] == pytest.approx(np.mean(survivors))
    assert said["accuracy"]["survivors_lowest"] == min(survivors)
    assert said["accuracy"]["own"] == {str(p): last[p].accuracy for p in range(6)}
    mean_evals = [r for r in records if isinstance(r, trace.Eval) and r.model == "mean"]
    assert said["accuracy"]["mean_model"] == mean_evals[-1].accuracy
    assert said["lost"] == [4] and [f["peer"] for f in said["frozen"]] == [2]
    assert said["finished"] is True and said["errors"] == 0 and said["damage"] == []
    missed = sum(2 in r.missed for r in rounds)
    assert said["per_peer"][2]["missed"] == missed > 0
    assert said["per_peer"][4]["state"] == "killed" and said["per_peer"][0]["state"] == "ended"


def test_the_page_needs_nothing_else(page: str) -> None:
    parsed = Page(page)
    assert [load for load in parsed.loads if load != "data:,"] == []
    assert "default-src 'none'" in page
    assert "http:" not in page and "https:" not in page and "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []


def test_every_chart_is_there_wide_and_narrow_with_the_faults_on_it(page: str) -> None:
    for side in ("wide", "narrow"):
        charts = [svg for svg in drawings(page) if side in (svg.get("class") or "")]
        assert {svg.get("aria-label") for svg in charts} == CHARTS
        for svg in charts:
            words = ["".join(text.itertext()) for text in svg.iter("text")]
            assert "peer 4 killed" in words
            assert any(word.startswith("peer 2 frozen 5.4 s") for word in words)
            assert any("10% of datagrams" in word for word in words)


def test_nothing_is_drawn_outside_of_its_chart(page: str) -> None:
    for svg in drawings(page):
        width, height = map(float, (svg.get("viewBox") or "").split()[2:])
        for path in svg.iter("path"):
            for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d") or ""):
                assert 0 <= float(x) <= width and 0 <= float(y) <= height
        for text in svg.iter("text"):
            assert 0 <= float(text.get("x") or -1) <= width and 0 <= float(text.get("y") or -1) <= height


def test_what_the_page_says(page: str) -> None:
    text = Page(page).text
    for words in ("ragtag demo --seed 7", "learning rate", "38,282 parameters", "pass", "FAIL", "killed"):
        assert words in text
    assert "does not answer (seen by peers 0, 1 and 3 to 5)" in text  # one line, not five
    assert "virtual" not in text
    lost = re.search(r'Peers lost</div><div class="v">([^<]*)</div><div class="d">([^<]*)</div>', page)
    assert lost and lost.groups() == ("1", "peer 4; frozen for a while: peer 2")
    times = re.search(r'Round time, median</div>.*?<div class="d">([^<]*)</div>', page)
    assert times and times.group(1).endswith("; with the rounds in which a peer was frozen")


def test_text_from_the_trace_is_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> {{css}} &amp;"
    write_run(tmp_path, Story(rounds=30, name=evil))
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Fault(t=1.0, peer=1, name=evil, detail=evil, until_t=2.0))
        writer.write(trace.Note(t=1.0, peer=1, what=evil, other=2, detail=evil))
        writer.write(trace.Error(t=1.5, peer=1, what=evil, detail=evil))
        writer.write(trace.Result(t=2.0, name=evil, value=1.0, unit=evil, detail=evil))
        run = trace.Run(
            t=0.0, world=evil, name=evil, seed=1, peers=6, method=evil, config={evil: evil}, command=evil
        )
        writer.write(run)
    page = build_report(tmp_path).read_text(encoding="utf-8")
    parsed = Page(page)
    assert parsed.tags.count("script") == 1 and "img" not in parsed.tags
    assert parsed.text.count(evil) >= 7
    assert "2 runs have written to this folder" in parsed.text
    drawings(page)  # well-formed


def test_six_peers_and_two_thousand_rounds_stay_small(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=2000, steps_per_round=1))
    assert build_report(tmp_path).stat().st_size < 600_000


def test_sixty_four_peers_stay_small(tmp_path: Path) -> None:
    write_run(tmp_path, Story(peers=64, rounds=60, steps_per_round=1))
    out = build_report(tmp_path)
    assert out.stat().st_size < 2_000_000
    strip = [
        svg for svg in drawings(out.read_text("utf-8")) if svg.get("aria-label") == "Who was missed when"
    ]
    labels = {"".join(text.itertext()) for text in strip[0].iter("text")}
    assert {"peer 0", "peer 63"} <= labels


def test_of_a_crowd_some_are_drawn_and_all_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, Story(peers=90, rounds=6, steps_per_round=1, frozen=71, killed=88))
    summary = summarise(read_run(tmp_path))
    assert len(summary.charted) == CHARTED_MAX and {71, 88} <= set(summary.charted)
    assert len(summary.peers) == 90
    assert "26 more are not drawn" in Page(build_report(tmp_path).read_text("utf-8")).text


def test_many_faults_are_numbered(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=60))
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        for k in range(30):
            writer.write(trace.Fault(t=1 + k / 4, peer=k % 6, name="freeze", until_t=1.1 + k / 4))
    page = build_report(tmp_path).read_text("utf-8")
    for svg in drawings(page):
        marks = ["".join(t.itertext()) for t in svg.iter("text") if "mark" in (t.get("class") or "")]
        assert marks and all(mark.isdigit() for mark in marks)
    assert "Numbers above the charts" in page


def test_a_bar_that_is_out_of_scale_is_cut_and_has_its_time_beside_it(tmp_path: Path) -> None:
    """Else a peer that slept through a round makes all other rounds look like nothing. Each bar is two."""
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Run(t=0.0, world="live", name="a nap", seed=0, peers=1, method="rps"))
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        for number in range(40):
            slept_s = 7.4 if number == 20 else 0.0
            writer.write(
                trace.Round(
                    t=float(number), peer=0, round=number, scatter_s=0.1 + slept_s, gather_s=0.02,
                    total_s=0.12 + slept_s, arrived=1.0,
                )
            )  # fmt: skip
    drawn = build_report(tmp_path).read_text("utf-8")
    chart = next(chart for chart in drawings(drawn) if chart.get("aria-label", "").startswith("Stages"))
    heights = [float(bar.get("height", "")) for bar in chart.iter() if bar.get("class") == "scatter"]
    assert max(heights) < 8 * np.median(heights)
    assert "3.82 s" in [text.text for text in chart.iter() if text.tag.endswith("text")]
