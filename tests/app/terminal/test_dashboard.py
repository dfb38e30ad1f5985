"""The live view fits its screen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ragtag.app.report import build_report
from ragtag.app.terminal.dashboard import Dashboard
from ragtag.app.tracefile import TraceWriter
from ragtag.core import trace
from tests.app.synthetic import Story
from tests.app.terminal.watching import fed, shown, step

STORY = Story(rounds=100, round_s=0.5)


# -- The screen


@pytest.mark.parametrize("width", [80, 111, 112, 120])
def test_everything_fits(width: int) -> None:
    for until_t in (0.0, 5.0, 20.0, 35.0, math.inf):
        text = shown(fed(STORY, until_t), width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        table = [line for line in text.splitlines()[2:] if line[:4].strip(" #").isdigit()]
        assert len(table) >= 6 or until_t == 0.0
        assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(table)


def test_long_figures_fit_in_eighty_columns() -> None:
    dashboard = Dashboard(64, "x" * 200)
    for peer in (0, 63):
        dashboard.feed(step(1.0, peer, 123_456, loss=123.4567))
        dashboard.feed(trace.Eval(t=1.0, peer=peer, model="own", step=1, accuracy=1.0))
        round_ = trace.Round(
            t=7000.0,
            peer=peer,
            round=123_456,
            scatter_s=0.1,
            gather_s=0.1,
            total_s=0.0999,
            arrived=1.0,
            missed=[1 - peer % 2],
            bytes_sent=123_456_789_012,
        )
        for _ in range(1200):
            dashboard.feed(round_)
    lines = shown(dashboard, 80, 100).splitlines()
    row = next(line for line in lines if line.strip().startswith("63 "))
    assert len(row) <= 80
    for figure in ("123,456", "100.0%", "99.9 ms", "123 GB", "123.457"):
        assert figure in row


def test_of_a_crowd_those_in_trouble_are_shown() -> None:
    dashboard = Dashboard(64)
    for peer in range(64):
        dashboard.feed(step(1.0, peer))
    dashboard.feed(trace.Fault(t=2.0, peer=60, name="kill"))
    dashboard.feed(trace.Fault(t=2.0, peer=61, name="freeze", until_t=9.0))
    lines = shown(dashboard, 80, 24).splitlines()
    assert len(lines) <= 24
    assert any("60" in line and "gone" in line for line in lines)
    assert any("61" in line and "frozen" in line for line in lines)
    assert any("more" in line for line in lines)


def test_a_trace_does_not_steer_the_terminal_or_its_markup() -> None:
    dashboard = Dashboard(2)
    evil = "\x1b[2J\x07[bold red]boo[/]\r\n"
    dashboard.feed(trace.Run(t=0.0, world="live", name=evil, seed=0, peers=2, method=evil))
    dashboard.feed(trace.Error(t=1.0, peer=0, what=evil))
    dashboard.feed(trace.Note(t=1.0, peer=0, what=evil, detail=evil))
    text = shown(dashboard, 120)
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text
    assert "[bold red]boo[/]" in text


def test_a_loss_that_is_not_finite_is_seen() -> None:
    dashboard = Dashboard(1)
    dashboard.feed(trace.Step(t=0.0, peer=0, step=1, samples=8, loss=None))
    assert "nan" in shown(dashboard, 80)


def rounds_only(n: int) -> list[trace.Record]:
    """What peers write that use the optimizer alone: no loss, no accuracy."""
    took = {"scatter_s": 0.1, "gather_s": 0.1, "total_s": 0.2}
    records: list[trace.Record] = [trace.Join(t=0.0, peer=peer) for peer in range(n)]
    for number in range(3):
        t = 1.0 + number
        records += [trace.Round(t=t, peer=p, round=number, arrived=1.0, **took) for p in range(n)]
    return records


@pytest.mark.parametrize("width", [80, 120])
def test_columns_with_nothing_to_show_are_not_there(width: int) -> None:
    dashboard = Dashboard(2)
    for record in rounds_only(2):
        dashboard.feed(record)
    table = shown(dashboard, width)
    assert "Round" in table and "Loss" not in table and "Acc" not in table
    dashboard.feed(step(9.0, 0, loss=0.5))
    assert "Loss" in shown(dashboard, width) and "0.500" in shown(dashboard, width)


def test_one_peer_is_one_peer() -> None:
    assert "1 peer " in shown(Dashboard(1), 80) and "2 peers " in shown(Dashboard(2), 80)


def test_the_reports_table_leaves_out_columns_with_nothing_to_show(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "crew.jsonl") as writer:
        writer.write(trace.Run(t=0.0, world="live", name="x", seed=0, peers=2, method="rps"))
        for record in rounds_only(2):
            writer.write(record)
    page = build_report(tmp_path).read_text()
    table = page[page.index("<h2>Peers</h2>") :]
    table = table[: table.index("</table>")]
    assert "Rounds" in table and "Missed by others" in table
    assert not [name for name in ("Steps", "Samples", "Test loss", "Accuracy") if name in table]


# -- Columns and events


def everything(n: int) -> Dashboard:
    """A crew that shows all that a table can hold."""
    dashboard = Dashboard(n)
    for peer in range(n):
        dashboard.feed(step(1.0, peer, 1_040, loss=0.127))
        dashboard.feed(trace.Eval(t=1.0, peer=peer, model="own", step=1, accuracy=0.94))
        took = {"scatter_s": 0.01, "gather_s": 0.01, "total_s": 0.0426}
        sent = {"bytes_sent": 35_900_000, "bytes_received": 35_900_000}
        dashboard.feed(trace.Round(t=2.0, peer=peer, round=129, arrived=1.0, **took, **sent))
    return dashboard


@pytest.mark.parametrize("width", [60, 70, 80, 90, 100, 112, 120, 200])
@pytest.mark.parametrize("n", [6, 70])
def test_no_word_and_no_figure_is_cut_and_the_most_needed_columns_are_there(width: int, n: int) -> None:
    lines = shown(everything(n), width, 24).splitlines()
    head = next(line for line in lines if "State" in line).split()
    known = {"Peer", "#", "State", "Step", "Loss", "Accuracy", "Acc.", "Round", "time", "Median", "Time"}
    known |= {"Last", "one", "Arrived", "Arr.", "Missed", "Miss", "Sent", "Received", "Recv."}
    assert set(head) <= known
    row = next(line for line in lines if line.split()[:2] == ["0", "training"])
    for figure in ("1,040", "0.127", "94.0%", "129", "42.6 ms", "100.0%"):
        assert f" {figure}" in row
    assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines) and max(map(len, lines)) <= width


def test_heads_are_whole_words_where_there_is_room() -> None:
    assert "Peer" in shown(everything(6), 90) and "Arrived" in shown(everything(6), 90)
    no_accuracy = Dashboard(2)
    for record in rounds_only(2):
        no_accuracy.feed(record)
    no_accuracy.feed(step(9.0, 0, loss=0.5))
    assert {"Peer", "Arrived", "Missed"} <= set(shown(no_accuracy, 80).split())


def test_a_silence_that_is_over_takes_one_line() -> None:
    dashboard = Dashboard(2)
    for peer in range(2):
        dashboard.feed(trace.Join(t=0.0, peer=peer))
    dashboard.feed(trace.Note(t=4.0, peer=-1, what="lost", other=-1, detail="x"))
    dashboard.feed(trace.Note(t=5.0, peer=0, what="silent", other=1))
    assert "peer 1 does not answer" in shown(dashboard, 80)
    dashboard.feed(trace.Note(t=5.1, peer=0, what="heard again", other=1))
    text = shown(dashboard, 80)
    assert "peer 1 does not answer" not in text and "peer 1 did not answer for 100 ms, and is back" in text
    dashboard.feed(trace.Note(t=6.0, peer=0, what="silent", other=1))
    assert "peer 1 does not answer" in shown(dashboard, 80)


def test_rows_go_by_number_and_figures_of_those_that_left_count_in_the_line() -> None:
    dashboard = Dashboard(0)
    for peer in (2, 0, 1):
        dashboard.feed(step(1.0, peer, loss=0.5))
        dashboard.feed(trace.Note(t=2.0, peer=peer, what="left", other=peer))
        dashboard.feed(trace.Leave(t=2.1, peer=peer))
    rows = [line.split() for line in shown(dashboard, 80).splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["done"]] == ["0", "1", "2"]
    assert "loss 0.5" in dashboard.line()
