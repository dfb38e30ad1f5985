"""README's and docs' tables of figures are made from stored results, and a changed number is seen."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import stored

ROOT = Path(__file__).parents[1]
SAYS = "{speed.ratio:.1f} times {speed.ratio <= 1.4}"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["figures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def house(figures: ModuleType, root: Path, says: str = SAYS, more: str = "", **result: Any) -> Any:
    """A repository of one page with one row, and one result."""
    (root / "tools").mkdir(exist_ok=True)
    (root / "src").mkdir(exist_ok=True)
    (root / "benchmarks" / "results").mkdir(parents=True, exist_ok=True)
    (root / "src" / "code.py").write_text("pass\n")
    (root / "benchmarks" / "results" / "speed.json").write_text(
        json.dumps({"commit": "1a2b3c4d5e6f", "ratio": 1.25, **result})
    )
    (root / "tools" / "figures.toml").write_text(
        f'[results.speed]\ncode = ["src/code.py"]\nmeasure = ["python benchmarks/speed.py 1.5"]\n'
        f'[[block]]\nname = "one"\nfile = "PAGE.md"\n'
        f"[[block.row]]\nwhat = \"a run\"\nsays = '''{says}'''\n{more}\n"
    )
    begin, end = figures.marks("one")
    if not (root / "PAGE.md").exists():
        (root / "PAGE.md").write_text(f"before\n{begin}\n\n{end}\nbehind\n")
    return figures.Figures(root)


def row(root: Path) -> str:
    """What the page says of the run."""
    (line,) = [one for one in (root / "PAGE.md").read_text().splitlines() if one.startswith("| a run |")]
    return line.split("|")[2].strip()


def test_pages_are_as_the_stored_results_say(figures: ModuleType) -> None:
    assert figures.Figures().check() == []


def test_a_changed_number_is_seen(figures: ModuleType, tmp_path: Path) -> None:
    """Here, in a copy: in a result, and in README."""
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    for name in (
        "README.md",
        "docs/figures.md",
        "docs/links.md",
        "docs/evidence.md",
        "docs/gpu.md",
        "docs/kfac.md",
        "docs/protocols.md",
        "tools/figures.toml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("src", "benchmarks/lab", "benchmarks/churn_peer.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert figures.Figures(tmp_path).check() == []
    page = tmp_path / "README.md"
    page.write_text(re.sub(r"[\d.]+ times gloo's time", "9.9 times gloo's time", page.read_text()))
    told = figures.Figures(tmp_path).check()
    assert [line.split(":")[0] for line in told] == [
        "README.md has, and no result gives",
        "README.md lacks",
    ]
    assert figures.Figures(tmp_path).write() == ["README.md"] and figures.Figures(tmp_path).check() == []
    result = tmp_path / "benchmarks" / "results" / "averaging.json"
    result.write_text(re.sub(r'"sealed_to_clear": [\d.]+', '"sealed_to_clear": 1.3', result.read_text()))
    told = figures.Figures(tmp_path).check()
    assert len(told) == 2 and "sealed 1.3 times as long as in clear (goal 1.4) (" in told[1]


def test_a_goal_is_missed_by_comparison(figures: ModuleType, tmp_path: Path) -> None:
    made = house(figures, tmp_path)
    assert made.check() and made.write() == ["PAGE.md"] and made.check() == []
    assert row(tmp_path) == "1.2 times (goal 1.4) (`benchmarks/speed.py`, at 1a2b3c4)"
    house(figures, tmp_path, ratio=1.55).write()
    assert row(tmp_path) == "1.6 times (goal 1.4, missed) (`benchmarks/speed.py`, at 1a2b3c4)"
    house(
        figures,
        tmp_path,
        "{0.5 <= speed.rows.share <= 0.9:half to most}",
        rows=[{"share": s} for s in (0.6, 1)],
    ).write()
    assert row(tmp_path).startswith("(goal half to most, missed)")


@pytest.mark.parametrize(
    ("says", "shown"),
    [
        ("{speed.rows(kind='a').s:.2f} s", "0.50 s"),
        ("{speed.rows(kind=not 'a').s:.0f} s", "2 and 4 s"),
        ("{span(speed.rows.s):.0%}", "50 to 400 %"),
        ("{1000 * speed.rows[0].s - 1:.0f} ms", "499 ms"),
        ("{speed.tiny:.1e}", "1.6e-6"),
        ("{min(where(speed.by, 'x/')):,.0f}", "1,000"),
        ("{cell(speed, 'Lines', 'slow', 'rounds'):.1%} in {'3 runs'}", "25.0 % in 3 runs"),
        ("{column(speed, 'Lines', 'rounds')[1]:.2f}", "0.25"),
        ("{judged(speed)}", "5 numbers compared, 4 within their tolerance"),
        ("{speed.tiny:.0e}, {unstored('8 s')}", "2e-6, 8 s (not stored)"),
        ("{speed.rows(kind=which).s:.1f}", "0.5"),
        ("{span(others.s):.0f}", "2 to 4"),
        ("{[speed, speed].by['y/1']:.0f}", "5 and 5"),
    ],
)
def test_placeholders(figures: ModuleType, tmp_path: Path, says: str, shown: str) -> None:
    rows = [{"kind": "a", "s": 0.5}, {"kind": "b", "s": 2}, {"kind": "c", "s": 4}]
    tables = [
        {
            "title": "Lines of a kind",
            "columns": ["", "rounds"],
            "rows": [["fast", "1.5"], ["slow", "0.25 (0.1 to 2)"]],
        }
    ]
    by = {"x/1": 1000, "x/2": 2000, "y/1": 5}
    made = house(
        figures, tmp_path, says, 'which = "a"\nlet.others = "speed.rows(kind=not which)"',
        rows=rows, tables=tables, by=by, tiny=1.6e-6, passed=4, failed=1,
    )  # fmt: skip
    made.write()
    assert row(tmp_path).startswith(shown + " (`benchmarks/speed.py`")


@pytest.mark.parametrize(
    ("says", "more", "wrong"),
    [
        ("1.3 times", "", "'1.3' comes from no result"),
        ("{speed.ratio} times", "", "needs a format"),
        ("{speed.rate:.1f}", "", "there is no 'rate'"),
        ("{speeds.ratio:.1f}", "", "there is no benchmarks/results/speeds.json"),
        ("{speed.rows(s=1).t:.1f}", "", "no row has s=1"),
        ("{__import__('os').getcwd()}", "", "not understood"),
        ("{speed.ratio.__class__}", "", "there is no '__class__'"),
        ("{sum(x for x in speed.rows.s):.1f}", "", "not understood"),
        ("{speed.ratio:.1f", "", "not closed"),
        ("as fast", "", "it reads no result"),
        (SAYS, 'holds = ["speed.ratio > 2"]', "its words are true no more"),
        (SAYS, 'holds = ["speed.rows.s == 2"]', "its words are true no more"),
        (SAYS, 'holds = ["speed.ratio"]', "no comparison"),
        (SAYS, 'holds = ["where(speed.rows) == 1"]', "'list' object has no attribute 'items'"),
    ],
)
def test_what_no_result_gives_is_refused(
    figures: ModuleType, tmp_path: Path, says: str, more: str, wrong: str
) -> None:
    made = house(figures, tmp_path, says, more, rows=[{"s": 2, "t": 3}, {"s": 3, "t": 3}])
    (told,) = made.check()
    assert wrong in told and told.startswith("one, 'a run': ")
    with pytest.raises(figures.Wrong):
        made.write()


def test_what_is_not_stored_is_said(figures: ModuleType, tmp_path: Path) -> None:
    house(figures, tmp_path, "8 s", 'unstored = "by hand"').write()
    assert row(tmp_path) == "8 s (not stored: by hand)"


def test_a_row_without_an_entry_is_not_lost(figures: ModuleType, tmp_path: Path) -> None:
    made = house(figures, tmp_path)
    made.write()
    page = tmp_path / "PAGE.md"
    page.write_text(page.read_text().replace("| a run |", "| another | 9 s |\n| a run |"))
    assert made.check() == ["PAGE.md has, and no result gives: | another | 9 s |"]
    with pytest.raises(figures.Wrong, match=r"a row has no entry in .*: another"):
        made.write()
    assert "another" in page.read_text()


def test_each_result_names_its_commit_and_its_code(figures: ModuleType, tmp_path: Path) -> None:
    made = house(figures, tmp_path)
    made.write()
    result = tmp_path / "benchmarks" / "results" / "speed.json"
    result.write_text('{"ratio": 1.25}')
    assert "names no commit: run it anew, or give stored_at" in figures.Figures(tmp_path).check()[0]
    table = tmp_path / "tools" / "figures.toml"
    table.write_text(table.read_text().replace("code = [", 'stored_at = "abcdef0"\ncode = ['))
    figures.Figures(tmp_path).write()
    assert row(tmp_path).endswith("(`benchmarks/speed.py`, stored at abcdef0)")
    result.write_text('{"commit": "1a2b3c4", "ratio": 1.25}')
    assert "the file names its commit; take stored_at away" in figures.Figures(tmp_path).check()[0]
    table.write_text(table.read_text().replace("src/code.py", "src/gone.py"))
    (tmp_path / "benchmarks" / "results" / "other.json").write_text('{"commit": "1a2b3c4"}')
    told = figures.Figures(tmp_path).check()
    assert any("its code src/gone.py does not exist" in line for line in told)
    assert any(line.startswith("other.json: name its code") for line in told)


def test_a_result_to_come_is_said_until_it_is_there(figures: ModuleType, tmp_path: Path) -> None:
    result = tmp_path / "benchmarks" / "results" / "speed.json"
    made, table = house(figures, tmp_path), tmp_path / "tools" / "figures.toml"
    stored = result.read_text()
    result.unlink()
    assert "there is no benchmarks/results/speed.json" in figures.Figures(tmp_path).check()[0]
    text = table.read_text().replace("code = [", "to_come = true\ncode = [")
    table.write_text(text.replace('file = "PAGE.md"', 'file = "PAGE.md"\nresult = "speed"'))
    assert figures.Figures(tmp_path).write() == ["PAGE.md"]
    assert "Not measured yet: `python tools/measure.py speed`." in (tmp_path / "PAGE.md").read_text()
    assert figures.Figures(tmp_path).check() == []
    result.write_text(stored)
    made = figures.Figures(tmp_path)
    assert made.write() == ["PAGE.md"] and row(tmp_path).startswith("1.2 times (goal 1.4)")
    assert made.check() == [
        "[results.speed]: benchmarks/results/speed.json is there; take to_come away",
    ]


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", *who, *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=30.0)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_results_older_than_their_code_are_listed(figures: ModuleType, tmp_path: Path) -> None:
    house(figures, tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "code")
    at = git(tmp_path, "rev-parse", "--short=7", "HEAD")
    assert stored.commit(tmp_path) == at
    made = house(figures, tmp_path, commit=at)
    assert made.age() == ([], [f"speed, at {at}"])
    assert stored.commit(tmp_path) == at  # a stored result is no change of code
    git(tmp_path, "commit", "-qam", "result")
    at_result = git(tmp_path, "rev-parse", "--short=7", "HEAD")
    code = tmp_path / "src" / "code.py"
    code.write_text('"""What it is."""\n' + code.read_text().replace("\n", "  # why\n"))
    assert "# why" in code.read_text()
    assert made.age() == ([], [f"speed, at {at}"])  # nothing that Python runs is another
    code.write_text("fast = True\n")
    assert stored.commit(tmp_path) == f"{at_result}-dirty"
    old = [f"speed, at {at}: 1 files of its code have changed since (1 in src/code.py)"]
    assert made.age() == (old, [])
    git(tmp_path, "commit", "-qam", "faster")
    assert made.age() == (old, [])
    table = tmp_path / "tools" / "figures.toml"
    table.write_text(table.read_text().replace('["src/code.py"]', '["src"]\nwithout = ["src/code.py"]'))
    assert figures.Figures(tmp_path).age() == ([], [f"speed, at {at}"])  # it does not run in this one
    (tmp_path / "src" / "more.py").write_text("pass\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "more")
    old = [f"speed, at {at}: 1 files of its code have changed since (1 in src)"]
    assert figures.Figures(tmp_path).age() == (old, [])
    table.write_text(table.read_text().replace('["src/code.py"]', '["srcs/code.py"]'))
    says = "[results.speed]: srcs/code.py, which it is without, is not in its code"
    assert says in figures.Figures(tmp_path).check()
    table.write_text(table.read_text().replace('["src"]\nwithout = ["srcs/code.py"]', '["src/code.py"]'))
    (told,), _ = house(figures, tmp_path, commit="0000000").age()
    assert told.startswith("speed, at 0000000: git cannot compare: ")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_that_stored_a_result_is_held_against_history(figures: ModuleType, tmp_path: Path) -> None:
    house(figures, tmp_path, ratio=1.0)
    result, table = tmp_path / "benchmarks/results/speed.json", tmp_path / "tools/figures.toml"
    git(tmp_path, "init", "-q")
    at = []
    for ratio in (1.0, 1.25, 1.25):
        result.write_text(json.dumps({"ratio": ratio}, indent=len(at) or None))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "result")
        at.append(git(tmp_path, "rev-parse", "--short=7", "HEAD"))
    lines, told = table.read_text(), []
    for commit in at:
        table.write_text(lines.replace("code = [", f'stored_at = "{commit}"\ncode = ['))
        told.append(figures.Figures(tmp_path).age())
    assert "does not have these figures there" in told[0][0][0]
    assert told[1] == ([], [f"speed, stored at {at[1]}"])
    assert "had these figures before" in told[2][0][0]


def test_what_benchmarks_store_of_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/topk.py", "--runs", "3"])
    found = stored.how()
    assert found["command"] == "python benchmarks/topk.py --runs 3"
    assert found["commit"] == stored.commit()
    assert {"cores", "kernel", "python", "torch", "numpy", "load_average_1min"} <= found["machine"].keys()
    assert found["machine"]["million_additions_ms"] > 0
    assert stored.commit(tmp_path) == "unknown"  # no checkout


@pytest.fixture
def measure(figures: ModuleType, tmp_path: Path) -> ModuleType:
    """The tool, and a repository whose benchmark stores the number that it is given."""
    spec = importlib.util.spec_from_file_location("measure", ROOT / "tools" / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure"] = module
    spec.loader.exec_module(module)
    house(figures, tmp_path)
    (tmp_path / "benchmarks" / "speed.py").write_text(
        "import json, sys\n"
        "if sys.argv[1] != 'nothing':\n"
        "    found = json.dumps({'commit': '1a2b3c4d5e6f', 'ratio': float(sys.argv[1])})\n"
        "    open('benchmarks/results/speed.json', 'w').write(found)\n"
    )
    (tmp_path / "benchmarks" / "results" / "speed.json").write_text(
        '{"commit": "1a2b3c4d5e6f", "ratio": 1.25}'
    )
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *IDENTITY, *words], cwd=tmp_path, check=True)
    return module


IDENTITY = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]


def test_what_is_measured_again_is_stored_and_written(measure: ModuleType, tmp_path: Path) -> None:
    assert measure.main(["speed"], tmp_path) == 0
    assert row(tmp_path).startswith("1.5 times (goal 1.4, missed)")


def test_without_names_what_is_older_than_its_code_is_measured(
    measure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (tmp_path / "benchmarks" / "results" / "speed.json").write_text(
        json.dumps({"commit": at.stdout.strip(), "ratio": 1.25})
    )
    assert measure.main(["--list"], tmp_path) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "src" / "code.py").write_text("other\n")
    assert measure.main(["--list"], tmp_path) == 0
    assert capsys.readouterr().out == "speed\n    python benchmarks/speed.py 1.5\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("speed.py nothing", "speed: python benchmarks/speed.py nothing ended with 0 and stored nothing"),
        ("speed.py {rate}", "speed: it needs --with rate=..."),
        ("", "give its command as measure"),
    ],
)
def test_what_is_not_measured_is_said(
    measure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    table = tmp_path / "tools" / "figures.toml"
    command = f'measure = ["python benchmarks/{change}"]\n' if change else ""
    needs = 'needs = ["rate"]\n' if "rate" in change else ""
    table.write_text(
        table.read_text().replace('measure = ["python benchmarks/speed.py 1.5"]\n', command + needs)
    )
    assert measure.main(["speed"], tmp_path) == 1
    told = capsys.readouterr()
    assert said in told.out + told.err
    if needs:
        assert measure.main(["speed", "--with", "rate=1.375"], tmp_path) == 0
        assert json.loads((tmp_path / "benchmarks" / "results" / "speed.json").read_text())["ratio"] == 1.375


def test_a_command_that_takes_too_long_ends_with_all_that_it_has_started(
    measure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What goes on would take the processor from the next one. Interrupted, it cleans up."""
    (tmp_path / "benchmarks" / "speed.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "held = pathlib.Path('held')\n"
        "if sys.argv[1] == 'child':\n"
        "    import fcntl\n"
        "    locked = open('lock', 'w')\n"
        "    fcntl.flock(locked, fcntl.LOCK_EX)\n"
        "    held.touch()\n"
        "    time.sleep(600)\n"
        "subprocess.Popen([sys.executable, sys.argv[0], 'child'])\n"
        "try:\n"
        "    time.sleep(600)\n"
        "finally:\n"
        "    held.unlink()\n"
    )
    subprocess.run(["git", *IDENTITY, "commit", "-qam", "slow"], cwd=tmp_path, check=True)
    assert measure.main(["speed", "--limit-min", "0.05"], tmp_path) == 1
    assert "took longer than 0.05 minutes" in "".join(capsys.readouterr())
    assert not (tmp_path / "held").exists()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_tree_with_changes_is_not_measured(
    measure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src" / "code.py").write_text("other\n")
    assert measure.main(["speed"], tmp_path) == 1
    assert "commit them first" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measure.main(["weight"], tmp_path)
    assert "there is no result weight; there are speed" in capsys.readouterr().err


def test_the_tool_runs_as_a_script_where_another_package_of_benchmarks_is_installed(tmp_path: Path) -> None:
    """Opacus brings one; `make measure` sets no PYTHONPATH."""
    other = tmp_path / "benchmarks"
    other.mkdir()
    (other / "__init__.py").write_text("")
    command = [sys.executable, str(ROOT / "tools" / "measure.py"), "--list", "averaging"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("averaging")


def test_a_run_takes_the_place_of_the_one_by_the_same_command(tmp_path: Path) -> None:
    """Pages show the first of a command's runs: a newer one behind it would never be seen."""
    file = tmp_path / "lines.json"
    for command, found in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        stored.keep_run(file, {"command": command, "found": found})
    runs = json.loads(file.read_text())["runs"]
    assert [(run["command"], run["found"]) for run in runs] == [("a", 3), ("b", 2), ("c", 4)]
