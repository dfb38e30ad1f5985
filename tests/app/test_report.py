"""The report says what the trace says, in one page that needs nothing else and believes no text."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ragtag.app.report import axes, build_report, report_json
from ragtag.app.report.series import Bins, Dots, Sample
from ragtag.app.report.summarise import CHARTED_MAX, summarise
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file, read_run
from ragtag.core import trace
from tests.app.synthetic import Story, write_run

VOID = {"meta", "link", "br"}
CHARTS = {
    "Accuracy",
    "Training loss",
    "Arrival rate",
    "Round times",
    "Stages of a round",
    "Who was missed when",
}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "\n"


def drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r'<svg class="chart.*?</svg>', page, re.S)]


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("six"))


@pytest.fixture(scope="module")
def page(six: Path) -> str:
    return build_report(six).read_text(encoding="utf-8")


# -- Figures


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


def test_a_sample_is_exact_until_it_is_full_and_close_beyond() -> None:
    values = np.random.Generator(np.random.Philox(1)).exponential(size=50_000)
    exact, thin = Sample(), Sample(values_max=4096)
    for value in values:
        exact.add(float(value))
        thin.add(float(value))
    assert exact.quantile(0.95) == pytest.approx(np.quantile(values, 0.95), rel=1e-12)
    assert thin.stride > 1
    # Standard error of a quantile from k values: sqrt(q (1-q) / k) / density; 4 of them.
    k = 50_000 / thin.stride
    assert thin.quantile(0.95) == pytest.approx(
        np.quantile(values, 0.95), abs=4 * math.sqrt(0.0475 / k) / 0.05
    )
    assert thin.largest == values.max() and thin.mean() == pytest.approx(values.mean())


def test_bins_hold_means_and_times() -> None:
    bins = Bins([3], 10, 0.0, 100.0)
    for t, value in ((1.0, 2.0), (3.0, 4.0), (55.0, 7.0), (100.0, 9.0), (-5.0, 6.0)):
        bins.add(3, t, value)
    bins.add(99, 50.0, 1e9)  # a peer that is not drawn
    t, value = bins.points(3)
    assert t.tolist() == [pytest.approx(-1 / 3), 55.0, 100.0]
    assert value.tolist() == [4.0, 7.0, 9.0]


def test_dots_stand_within_one_percent_of_their_values() -> None:
    dots = Dots(100, 0.0, 10.0)
    values = np.geomspace(1e-4, 10, 400)
    for value in values:
        dots.add(5.0, float(value))
    drawn = np.array([value for _, value, _ in dots.points()])
    assert sum(n for _, _, n in dots.points()) == 400
    assert max(np.abs(drawn / v - 1).min() for v in values) < 0.0102


# -- The page


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
    assert "silent (seen by 5 peers)" in text  # one line, not five
    assert "virtual" not in text


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


# -- Traces that are not what one would wish


def test_a_run_that_goes_on_still(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=40, finished=False, killed=None))
    page = build_report(tmp_path, tmp_path / "elsewhere" / "now.html").read_text("utf-8")
    assert "has not ended" in page
    said = report_json(tmp_path)
    assert said["finished"] is False and said["lost"] == []
    assert {p["state"] for p in said["per_peer"]} == {"running"}


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


# -- Axes


def test_ticks_are_round_and_within() -> None:
    assert axes.ticks(0.0, 46.5, 10) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert axes.ticks(0.0, 0.0, 5) == [0.0]
    assert axes.log_ticks(0.1, 3.0) == pytest.approx([0.1, 0.2, 0.5, 1, 2])


@pytest.mark.parametrize("form", ["linear", "log", "error"])
def test_a_scale_keeps_its_order_and_its_ends(form: str) -> None:
    scale = axes.Scale(0.1, 0.99, 300.0, 20.0, form)
    assert scale(0.1) == pytest.approx(300.0) and scale(0.99) == pytest.approx(20.0)
    pixels = [scale(v) for v in np.linspace(0.0, 1.0, 50)]
    assert pixels == sorted(pixels, reverse=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (3e-6, "3 µs"), (0.0221, "22.1 ms"), (5.4, "5.4 s"), (125.0, "2:05"), (7265.0, "2:01:05")],
)
def test_durations_in_words(value: float, text: str) -> None:
    assert axes.seconds(value) == text


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (trace.Fault(t=0, name="loss", detail="loss=0.1"), "loss 10 %"),
        (trace.Fault(t=0, name="loss", detail="loss=odd"), "loss=odd"),
        (trace.Fault(t=0, name="slow", detail="slow=2x3"), "slow=2x3"),
        (trace.Fault(t=0, name="partition", detail="0 1 | 2 3"), "partition: 0 1 | 2 3"),
        (trace.Fault(t=0, name="partition"), "partition"),
    ],
)
def test_faults_in_words(fault: trace.Fault, text: str) -> None:
    assert axes.fault_text(fault) == text
