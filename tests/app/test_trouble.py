"""Traces that are damaged, folders that may not be read, disks that are full: a clear message each."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ragtag.app.experiment import ExperimentSetup, simulate
from ragtag.app.launch import launch
from ragtag.app.launch.events import Event, Printed, Remark
from ragtag.app.tracefile import CREW_FILE, peer_file, read_run
from tests.app.command import AVERAGES, error_of, invoke
from tests.app.conftest import as_nobody
from tests.app.synthetic import Story, write_run

SHORT = Story(rounds=20, evals=4)
COMMANDS = (("report",), ("report", "--json"), ("watch",))


# -- Damage


@pytest.mark.parametrize("command", COMMANDS[:2])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no record in crew.jsonl of {folder}: empty. Was the disk full, or has the run only begun?"),
        (b"\x00" * 5000, "no record in crew.jsonl of {folder} (crew.jsonl: the last line is cut short"),
        (
            b"PK\x03\x04\n\n\xff\n{}\n[]\n",
            "no record in crew.jsonl of {folder} (crew.jsonl: 4 damaged line(s)",
        ),
    ],
)
def test_a_trace_without_a_record_is_no_report(
    tmp_path: Path, command: tuple[str, ...], content: bytes, said: str
) -> None:
    (tmp_path / CREW_FILE).write_bytes(content)
    result = invoke(*command, tmp_path)
    assert said.format(folder=tmp_path) in error_of(result)
    assert result.code == 2
    assert list(tmp_path.iterdir()) == [tmp_path / CREW_FILE]  # no page of nothing


def test_a_folder_without_a_trace_is_said(tmp_path: Path) -> None:
    (tmp_path / CREW_FILE).mkdir()  # no file
    for command in COMMANDS[:2]:
        assert "has neither crew.jsonl nor peer-*.jsonl" in error_of(invoke(*command, tmp_path))


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
def test_of_a_truncated_file_the_rest_is_reported(tmp_path: Path, keep: float) -> None:
    write_run(tmp_path, SHORT)
    path = tmp_path / peer_file(1)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    said = json.loads(invoke("report", tmp_path, "--json").out)
    assert said["damage"] == (
        ["peer-01.jsonl: the last line is cut short (the writer was ended)"] if keep else []
    )
    assert said["per_peer"][1]["state"] == ("lost" if keep else "no trace")
    assert said["per_peer"][0]["rounds"] == SHORT.rounds
    assert invoke("report", tmp_path).code == 0
    watched = invoke("watch", tmp_path)
    assert watched.code == 1
    assert "peer 1 had not ended; was it killed?" in " ".join(watched.out.split())


def test_a_file_with_a_hole_is_reported_with_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path, SHORT)
    path = tmp_path / peer_file(1)
    data = path.read_bytes()
    path.write_bytes(data[:3000] + b"\x00" * 4096 + data[3000 + 4096 :])  # a block that was never written
    said = json.loads(invoke("report", tmp_path, "--json").out)
    assert said["damage"][0] == "peer-01.jsonl: 1 damaged line(s) left out"
    assert said["per_peer"][1]["state"] == "ended"
    page = invoke("report", tmp_path)
    assert page.code == 0
    assert "1 damaged line(s) left out" in (tmp_path / "report.html").read_text("utf-8")


# -- Permission


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_may_not_be_read_is_named(open_folder: Path, command: tuple[str, ...]) -> None:
    run = write_run(open_folder / "run", SHORT)
    run.chmod(0)
    with as_nobody():
        said = error_of(invoke(*command, run))
    assert said == f"error: {run}: no permission: ask its owner, or choose another folder"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_may_not_be_read_is_named(open_folder: Path, command: tuple[str, ...]) -> None:
    run = write_run(open_folder / "run", SHORT)
    (run / peer_file(2)).chmod(0)
    with as_nobody():
        said = error_of(invoke(*command, run))
    assert said.startswith(f"error: {run / peer_file(2)}: no permission")


def test_a_report_that_may_not_be_written_there_can_be_written_elsewhere(open_folder: Path) -> None:
    run, out = write_run(open_folder / "run", SHORT), open_folder / "out"
    out.mkdir()
    run.chmod(0o555)
    out.chmod(0o777)
    with as_nobody():
        said = error_of(invoke("report", run))
        elsewhere = invoke("report", run, "--out", out / "page.html")
    assert said.startswith(f"error: {run / 'report.html'}: no permission")
    assert (elsewhere.code, [path.name for path in out.iterdir()]) == (0, ["page.html"])


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_a_run_that_may_not_be_traced_does_not_begin(open_folder: Path, command: str) -> None:
    script = open_folder / "script.py"
    script.write_text(AVERAGES)
    arguments = [script] if command == "run" else ["-n", "2", "--size", "10", "--rounds", "1"]
    before = invoke(command, "--run-folder", open_folder / "before", *arguments)
    assert before.code == 0  # and nobody, who may not read Python's own files, need import anything
    open_folder.chmod(0o555)
    with as_nobody():
        said = error_of(invoke(command, "--run-folder", open_folder / "new", *arguments))
    assert said == f"error: {open_folder / 'new'}: no permission: ask its owner, or choose another folder"


# -- Full disks


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_report_on_a_full_disk_leaves_the_page_of_before(small_disk: Path, tmp_path: Path) -> None:
    write_run(tmp_path, SHORT)
    page = small_disk / "page.html"
    page.write_text("of before")
    fill(small_disk)
    result = invoke("report", tmp_path, "--out", page)
    assert error_of(result) == f"error: {page}: the disk is full: make room, or put it on another disk"
    assert result.code == 2
    assert page.read_text() == "of before"
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "page.html"]


def test_dev_full_is_no_place_for_a_report(tmp_path: Path) -> None:
    write_run(tmp_path, SHORT)
    (tmp_path / "page.html.part").symlink_to("/dev/full")
    said = error_of(invoke("report", tmp_path, "--out", tmp_path / "page.html"))
    assert said.startswith(f"error: {tmp_path / 'page.html'}: the disk is full")


def test_a_simulated_run_on_a_full_disk_ends_and_says_so_once(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = ExperimentSetup(peers=4, values=100, rounds=150)
    with caplog.at_level(logging.WARNING, "ragtag.trace"):
        result = simulate(setup, small_disk / "run")
    assert result.rounds == simulate(setup).rounds
    (said,) = caplog.messages
    assert "has stopped: the disk is full: make room, or put the run's folder on another disk" in said
    (small_disk / "run" / peer_file(0)).unlink()  # room
    run = read_run(small_disk / "run")
    assert run.run is not None
    assert len(list(run.records())) > 100
    assert not run.damage.messages()


def test_a_run_of_processes_on_a_full_disk_goes_on_and_says_so(small_disk: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('it runs')")
    fill(small_disk)
    events: list[Event] = []
    result = launch(2, [str(script)], run_folder=small_disk / "run", on_event=events.append)
    assert result.failed == ()
    assert [e.text for e in events if isinstance(e, Printed)] == ["it runs"] * 2
    (said,) = [e.text for e in events if isinstance(e, Remark) and "tracing" in e.text]
    assert said.startswith(f"tracing to {small_disk / 'run' / CREW_FILE} has stopped: the disk is full")
    assert said.endswith("The run goes on; what is missed is counted.")
