"""The command: help, JSON alone on standard output, one line for an error, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from ragtag import __version__
from ragtag.app.cli.common import new_run_folder
from ragtag.app.cli.main import app
from ragtag.app.terminal.simulate_view import VALUES_MAX, count
from ragtag.app.tracefile import read_run
from ragtag.protocols.channel.averagers import AVERAGERS
from ragtag.recipes import RECIPES
from ragtag.recipes.base import Report, row
from ragtag.schedules.names import CENTRES
from tests.app.command import AVERAGES, error_of, invoke, runner

SRC = Path(__file__).parents[3] / "src"
COMMANDS = ("demo", "run", "simulate", "reproduce", "probe", "leak", "report", "watch")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- Help


def test_the_version() -> None:
    assert invoke("--version").out == f"ragtag {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_exit_codes(command: str) -> None:
    for option in ("--help", "-h"):
        shown = invoke(command, option)
        assert shown.code == 0
        assert f"$ ragtag {command}" in shown.out
        assert "Exit codes" in shown.out


def test_the_help_names_every_command() -> None:
    for args in ((), ("--help",)):
        shown = invoke(*args)
        assert all(re.search(rf"\b{command}\b", shown.out + shown.err) for command in COMMANDS)


def test_a_help_fills_lines_of_80_columns_and_breaks_no_word() -> None:
    """What stands behind a line break in the text begins a line; so no line of it may be too long."""
    for command in app.registered_commands:
        assert command.callback is not None
        _, _, text = (command.help or command.callback.__doc__ or "").partition("\n\n")
        lines = [re.sub(r"\[/?bold\]", "", line).strip() for line in text.splitlines()]
        name = command.name or command.callback.__name__
        assert name != "reproduce" or RECIPES.keys() == {line.split()[0] for line in lines}
        assert [line for line in lines if len(line) > 78] == []
        shown = invoke(name, "--help", width=80).out
        assert all(line in shown for line in lines)
        assert not re.search(r"<[a-z|]+\s", shown)  # choices


def test_python_m_ragtag_is_the_command() -> None:
    env = dict(os.environ) | {"PYTHONPATH": str(SRC)}
    asked = [sys.executable, "-m", "ragtag", "--version"]
    shown = subprocess.run(asked, env=env, capture_output=True, timeout=60, check=True)
    assert shown.stdout.decode() == f"ragtag {__version__}\n"


def test_the_command_starts_without_what_is_heavy() -> None:
    code = (
        "import sys, ragtag.app.cli.main; "
        "print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    env = dict(os.environ) | {"PYTHONPATH": str(SRC)}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=True)
    assert shown.stdout == b"[]\n"


def test_faults_are_listed_on_demand() -> None:
    shown = invoke("simulate", "--faults", "help")
    assert (shown.code, "freeze=PEER@AT_S+FOR_S" in shown.out) == (0, True)


def test_methods_are_listed_on_demand() -> None:
    shown = invoke("simulate", "--method", "help")
    assert shown.code == 0
    assert all(f"  {name}" in shown.out for name in (*AVERAGERS, *CENTRES))
    assert "moshpit=N: group" in shown.out


# -- Errors


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "nowhere.py"], "there is no script nowhere.py"),
        (["run", "--faults", "los=1", "x.py"], "no fault is called 'los'"),
        (["run", "-n", "2", "--faults", "kill=2@1", "__file__"], "names peer 2, but the 2 peers"),
        (["run", "-n", "5", "--faults", "partition=0-1/2-4@3+4", "__file__"], "all 5 peers on one side"),
        (["simulate", "-n", "5", "--faults", "partition=0-4"], "'partition=0-4' has all 5 peers on one side"),
        (["simulate", "--method", "magic"], "no method is called 'magic'"),
        (["simulate", "--size", "big"], "a size of 'big'; write how many values"),
        (["simulate", "--loss", "2"], "loss is 2.0; a probability lies between 0 and 1"),
        (["simulate", "--loss", "0.1", "--faults", "loss=0.2"], "more than once"),
        (["reproduce", "cold-fusion"], "no recipe is called 'cold-fusion'; there are: "),
        (["reproduce", "rps", "--data", "nowhere.tar"], "there is no archive nowhere.tar"),
        (["report", "nowhere"], "no trace to read: nowhere is not a folder"),
        (["report", "nowhere", "--json"], "no trace to read: nowhere is not a folder"),
        (
            ["report", "x", "--json", "--out", "y"],
            "--json prints the figures and makes no page: give it, or ",
        ),
        (["report", "x", "--json", "--open"], "--json prints the figures and makes no page: give it, or "),
        (["watch", "nowhere"], "nowhere is not a folder"),
        (["simulate", "-o", "/dev/null/x"], "/dev/null/x: Not a directory"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(here: Path, args: list[str], said: str) -> None:
    result = invoke(*[__file__ if arg == "__file__" else arg for arg in args])
    assert said in error_of(result)
    assert result.code == 2
    assert not (here / "runs").exists()  # no empty folder is left


def test_an_error_in_a_terminal_is_broken_between_words(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = re.sub("\x1b\\[[0-9;]*m", "", invoke("reproduce", "cold-fusion", width=60).err)
    first, second = said.splitlines()[:2]
    assert first.startswith("error: no recipe") and len(first) <= 60 and first.endswith(",")
    assert second.split(",")[0] in RECIPES


@pytest.mark.parametrize("args", [["run"], ["run", "-n", "0", "x.py"], ["simulate", "-n", "1025"], ["fly"]])
def test_wrong_usage_is_explained(args: list[str]) -> None:
    result = invoke(*args)
    assert (result.code, result.out) == (2, "")
    assert "Usage: ragtag" in result.err


@pytest.mark.parametrize("name", [*COMMANDS, "join", "invite", "revoke"])
def test_what_is_empty_is_refused(here: Path, name: str) -> None:
    """As an option of an unset variable is, in a shell: an empty folder would be the current one."""
    command: Any = typer.main.get_command(app)
    command = command.commands[name]
    params = command.get_params(typer.Context(command))
    needed = {param.name: "x" for param in params if param.required}
    for param in params:
        flag = getattr(param, "is_flag", False) or param.nargs != 1
        if flag or param.default == "":  # no faults are faults, too
            continue
        given = needed | ({param.name: ""} if param.param_type_name == "argument" else {})
        option = [] if param.param_type_name == "argument" else [param.opts[0], ""]
        result = invoke(name, *option, *given.values(), width=200)
        said = " ".join(result.err.split())
        assert result.code == 2
        shown = option[0] if option else param.metavar
        assert re.search(rf"Invalid value for '{shown}'.*: it is empty: give ", said), said
    assert list(here.iterdir()) == []


def test_no_faults_may_be_given() -> None:
    assert "there is no script nowhere.py" in error_of(invoke("run", "--faults", "", "nowhere.py", ""))


def test_debug_shows_where_an_error_comes_from() -> None:
    result = runner.invoke(app, ["--debug", "report", "nowhere"])
    assert isinstance(result.exception, FileNotFoundError)
    assert "no trace" in error_of(invoke("report", "nowhere"))  # not kept from one call to the next


def test_an_unexpected_error_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr("ragtag.app.terminal.simulate_view.run", broken)
    result = invoke("simulate")
    assert error_of(result) == "error: oh no (ZeroDivisionError; ragtag --debug shows where)"
    assert result.code == 1


# -- Run


def test_run_starts_peers_and_prefixes_their_lines(here: Path) -> None:
    script = here / "hello.py"
    script.write_text(AVERAGES + "print('hello', os.environ['RAGTAG_RANK'], sys.argv[1:])")
    result = invoke("run", "-n", "2", script, "--lr", "0.1", "--json", "-n", "9")
    assert result.code == 0
    assert "2 finished" in result.err
    args = "['--lr', '0.1', '--json', '-n', '9']"  # what follows the script is the script's
    assert sorted(result.out.splitlines()) == [f"[{peer}] hello {peer} {args}" for peer in (0, 1)]
    (folder,) = (here / "runs").iterdir()
    assert f"ragtag report runs/{folder.name}" in result.err
    assert read_run(folder).run is not None


def test_run_prints_json_alone_on_standard_output(here: Path) -> None:
    script = here / "fails.py"
    script.write_text(
        "import os\nprint('noise')\nif os.environ['RAGTAG_RANK'] == '1': raise ValueError('no')"
    )
    result = invoke("run", "-n", "2", "--json", "--run-folder", here / "out", script)
    told = json.loads(result.out)
    assert (result.code, told["exit_code"], told["run_folder"]) == (1, 1, str(here / "out"))
    assert [(p["peer"], p["status"], p["failed"]) for p in told["peers"]] == [(0, 0, False), (1, 1, True)]
    assert told["peers"][1]["error"].endswith("ValueError: no")
    assert "[0] noise" in result.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "peers 0 to 2 never called ragtag.join()"),
        (
            "import os; os.write(int(os.environ['RAGTAG_READY_FD']), b'%s joined 0\\n' % "
            "os.environ['RAGTAG_RANK'].encode())",
            "peers 0 to 2 joined and never averaged a round: call optimizer.step() of crew.optimizer(...)",
        ),
    ],
)
def test_run_says_what_peers_that_averaged_nothing_did_not_do(here: Path, text: str, said: str) -> None:
    script = here / "idle.py"
    script.write_text(text)
    result = invoke("run", "-n", "3", script)
    assert result.code == 1
    assert "3 averaged nothing" in result.err and said in result.err
    assert "no peer finished, and one must" in result.err


def test_run_says_who_was_lost_and_ends_well_with_the_others(here: Path) -> None:
    script = here / "dies.py"
    script.write_text(AVERAGES + "if os.environ['RAGTAG_RANK'] == '1': os.kill(os.getpid(), 11)")
    result = invoke("run", "-n", "3", script)
    assert result.code == 0
    assert "2 finished, 1 lost" in result.err and "peer 1 was lost: ended by SIGSEGV" in result.err
    result = invoke("run", "-n", "3", "--min-peers", "3", script)
    assert result.code == 1
    assert "2 peers finished, and 3 must (--min-peers)" in result.err


def test_run_shows_a_shared_error_once(here: Path) -> None:
    script = here / "fails.py"
    script.write_text("raise ValueError('the same for all')")
    result = invoke("run", "-n", "3", script)
    assert result.code == 1
    assert result.err.count("ValueError: the same for all") == 1
    assert result.err.count("failed with the same error as peer") == 2
    assert "3 failed" in result.err


def test_run_stops_the_others_when_asked(here: Path) -> None:
    script = here / "fails.py"
    script.write_text(
        "import os, time\nif os.environ['RAGTAG_RANK'] == '0': raise ValueError('no')\ntime.sleep(60)"
    )
    result = invoke("run", "-n", "2", "--on-error", "stop", script)
    assert result.code == 1
    assert "1 ended early, 1 failed" in result.err


def test_run_watches_while_peers_run(here: Path) -> None:
    script = here / "hello.py"
    script.write_text(AVERAGES)
    result = invoke("run", "-n", "2", "--watch", script)
    assert result.code == 0
    assert "2 waiting" in result.out  # without a terminal the table is a line


# -- Simulate, report, watch


SIMULATE = ["simulate", "-n", "4", "--size", "2k", "--rounds", "4", "--loss", "0.1", "--latency", "0.005"]


def test_simulate_prints_rounds_and_leaves_a_trace_that_can_be_reported_and_watched(here: Path) -> None:
    result = invoke(*SIMULATE, "--run-folder", "out", "--check", "--seed", "3")
    assert result.code == 0
    assert "rps, 4 peers, 2,000 values, loss=0.1,delay=0.005" in result.out
    assert re.search(r"^ +3 +4 +\d+\.\d%", result.out, re.MULTILINE)
    assert "invariants held" in result.out
    run = read_run(here / "out").run
    assert run is not None
    again = invoke(*run.command.split()[1:], "--run-folder", "again", "--json")
    assert json.loads(again.out)["digest"].startswith(re.findall(r"digest (\w+)", result.out)[0])
    page = invoke("report", "out")
    assert (page.code, page.out) == (0, "out/report.html\n")
    assert "<html" in (here / "out" / "report.html").read_text()
    figures = json.loads(invoke("report", "out", "--json").out)
    assert (figures["world"], figures["peers"]) == ("simulated", 4)
    watched = invoke("watch", "out")
    assert (watched.code, "4 done" in watched.out) == (0, True)


def test_simulate_prints_json_alone_on_standard_output(here: Path) -> None:
    told = json.loads(invoke(*SIMULATE, "--json").out)
    assert len(told["rounds"]) == 4
    assert told["setup"]["faults"] == "loss=0.1,delay=0.005"


def test_simulate_shows_the_ends_of_a_long_run(here: Path) -> None:
    result = invoke("simulate", "-n", "2", "--size", "10", "--rounds", "50")
    assert "..." in result.out
    assert re.search(r"^ +49 +2 ", result.out, re.MULTILINE)
    assert not re.search(r"^ +25 +2 ", result.out, re.MULTILINE)


@pytest.mark.parametrize("method", ["rps", "ring", "moshpit=3", "random-groups=2", "softsync=2", "grouping"])
@pytest.mark.parametrize("width", [80, 60])
def test_simulate_cuts_no_word(here: Path, method: str, width: int) -> None:
    result = invoke("simulate", "-n", "5", "--size", "10", "--rounds", "3", "--method", method, width=width)
    assert result.code == 0 and "\N{HORIZONTAL ELLIPSIS}" not in result.out
    lines = result.out.splitlines()
    head = "round peers arrived contributors disagreement median ms slowest ms at s"
    assert sum(" ".join(line.split()) == head for line in lines) == 1
    if width == 80:
        assert max(len(line.rstrip()) for line in lines if "trace in" not in line) <= 80


def test_simulate_does_not_write_over_a_run(here: Path) -> None:
    invoke(*SIMULATE, "--run-folder", "out")
    result = invoke(*SIMULATE, "--run-folder", "out")
    assert (result.code, "holds the trace of a run already" in error_of(result)) == (2, True)


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("100k", 100_000), ("1.5M", 1_500_000), ("1g", 10**9)]
)
def test_sizes(text: str, expected: int) -> None:
    assert count(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e6", "k", "1T", "99g", str(VALUES_MAX + 1)])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write how many values"):
        count(text)


# -- Reproduce


class Recipe:
    """Stands in for a recipe, which takes minutes."""

    def __init__(self, measured: float) -> None:
        self.measured = measured
        self.options: dict[str, object] = {}

    def reproduce(self, **options: object) -> Report:
        self.options = options
        options["progress"](1, 1, "a part")  # type: ignore[operator]
        report = Report("rps", "A title", {"seeds": options["seeds"]})
        report.rows.append(row("alpha", self.measured, 1.0, 0.1, "the paper"))
        return report


@pytest.mark.parametrize(("measured", "code"), [(1.05, 0), (2.0, 1)])
def test_reproduce_says_pass_or_fail(
    here: Path, monkeypatch: pytest.MonkeyPatch, measured: float, code: int
) -> None:
    recipe = Recipe(measured)
    monkeypatch.setitem(sys.modules, "ragtag.recipes.rps.recipe", recipe)  # type: ignore[arg-type]
    result = invoke("reproduce", "rps", "--quick", "--seeds", "2", "--out", "out")
    assert result.code == code
    assert ("all pass" if code == 0 else "1 fail") in result.out
    assert (recipe.options["quick"], recipe.options["seeds"], recipe.options["out"]) == (True, 2, Path("out"))
    told = invoke("reproduce", "rps", "--json")
    assert (told.code, json.loads(told.out)["ok"]) == (code, code == 0)


# -- Folders


def test_every_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = {new_run_folder("a name/with: odd signs", tmp_path) for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() and folder.parent == tmp_path for folder in folders)
    assert all(folder.name.startswith("a-name-with-odd-signs-") for folder in folders)


@pytest.mark.parametrize(
    "command", ["run", "join", "probe", "invite", "report", "watch", "reproduce", "leak"]
)
def test_a_usage_has_no_bracket_twice(command: str) -> None:
    usage = next(line for line in invoke(command, "--help", width=80).out.splitlines() if "Usage:" in line)
    assert "[[" not in usage and "]]" not in usage and len(usage.rstrip()) <= 80
