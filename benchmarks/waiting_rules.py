"""What each rule of waiting is for: the crew without it, in storms and in the tests of the protocols.

    python benchmarks/waiting_rules.py --seeds 100 --out benchmarks/results/waiting_rules.json

A rule that can be left out, and nothing gets worse, is one too many. For each it prints how many storms fail
(``ragtag.simulation.trials.rounds``), what share of chunks is averaged in them, and which tests turn red.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ragtag.protocols.channel import at_once, presence
from ragtag.protocols.rounds import base, progress
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.trials.rounds import trial
from stored import how

ROOT = Path(__file__).resolve().parent.parent
AVERAGERS = "rps", "rps+repair", "allreduce"
TESTS = [
    *(
        f"tests/protocols/test_{what}.py"
        for what in ("reunite", "early", "asking", "outvoted", "quorum", "stragglers", "node", "gather")
    ),
    "tests/hooks/test_crew_away.py",
]


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def _no_outvoting() -> None:
    progress.Waiting.outvoted = _nothing  # type: ignore[assignment, method-assign]


def _one_witness() -> None:
    progress.WITNESSES = 1


def _no_elsewhere() -> None:
    progress.Waiting.elsewhere = _nothing  # type: ignore[assignment, method-assign]


def _no_asking() -> None:
    progress.Waiting.look_around = _nothing  # type: ignore[method-assign]


def _no_never() -> None:
    def answers(self: Any, run: Any) -> None:
        self.answered.add(run.peer)

    progress.Waiting.answers = answers  # type: ignore[method-assign]


def _no_never_by_question() -> None:
    progress.Waiting.asked_from_next = lambda self, peer: False  # type: ignore[method-assign]


def _believed_at_once() -> None:
    ask = progress.Waiting.asked_from_next

    def twice(self: Any, peer: int) -> bool:
        return ask(self, peer) or ask(self, peer)

    progress.Waiting.asked_from_next = twice  # type: ignore[method-assign]


def _no_grace() -> None:
    progress.Waiting.wants_more = lambda self, now_s: None  # type: ignore[method-assign]


def _no_enough() -> None:
    progress.Waiting.enough = _nothing  # type: ignore[assignment, method-assign]


def _silent_in_gather() -> None:
    progress.Waiting._is_silent = lambda self, peer: False  # type: ignore[method-assign]


def _no_patience() -> None:
    base.Patience.gave_up = _nothing  # type: ignore[assignment, method-assign]


def _no_leaving() -> None:
    at_once.Rounds._leaves_it = lambda self, number, ask: False  # type: ignore[method-assign]


def _no_tardiness() -> None:
    at_once.TARDY_MAX = 1 << 30


def _never_behind() -> None:
    end = at_once.Rounds._end

    def without(self: Any, outcome: Any, lesson: Any) -> None:
        end(self, outcome, lesson)
        self._behind = False

    at_once.Rounds._end = without  # type: ignore[method-assign]


def _withheld_awaited() -> None:
    end = at_once.Rounds._end

    def without(self: Any, outcome: Any, lesson: Any) -> None:
        end(self, outcome, lesson)
        self._withheld = frozenset()

    at_once.Rounds._end = without  # type: ignore[method-assign]


def _no_vouching() -> None:
    presence.Presence.vouched = _nothing  # type: ignore[method-assign]


def _never_early() -> None:
    presence.ALONE_MAX = 0


def _late_teaches_nothing() -> None:
    at_once.Budgets.late = _nothing  # type: ignore[assignment, method-assign]


def _all_or_none() -> None:
    """The rule for one that skipped many rounds: it takes before it gives."""
    at_once.CATCH_UP = 1 << 30


RULES: dict[str, tuple[str, Callable[[], None]]] = {
    "all": ("as it is", lambda: None),
    "outvoted": ("a peer that most owners' averages are without is not waited for", _no_outvoting),
    "witnesses": ("one owner's average is not enough for that", _one_witness),
    "elsewhere": (
        "an owner that hears another has its block does not wait for that one's share",
        _no_elsewhere,
    ),
    "asking": ("the few that are missing are asked whether they are there", _no_asking),
    "never": ("a peer that says that a share comes no more is believed", _no_never),
    "never by question": (
        "a peer that asks twice in the next round has left this one",
        _no_never_by_question,
    ),
    "twice": ("that is believed the second time only", _believed_at_once),
    "grace": ("where most are missing, the first deadline is doubled once", _no_grace),
    "enough": ("past a quorum a peer is waited for only while that pays", _no_enough),
    "silent": ("a peer of which nothing came is not waited for in the second stage", _silent_in_gather),
    "patience": ("answers that came too late lengthen the time for answers", _no_patience),
    "leaving": ("a peer that is behind begins the round after one that is over for others", _no_leaving),
    "tardy": ("so does one that began several in a row too late", _no_tardiness),
    "behind": (
        "a peer that is behind takes one round's difference as a sign that others are ahead",
        _never_behind,
    ),
    "withheld": (
        "copies that a peer did not give an owner it does not hear are not waited for",
        _withheld_awaited,
    ),
    "vouched": ("a peer that owns nothing hears of others from owners", _no_vouching),
    "early": (
        "a peer that hears less than half of the others is early, and they are not silent",
        _never_early,
    ),
    "late": ("what comes too late lengthens the next deadline", _late_teaches_nothing),
    "catch up": ("a peer that skipped many rounds takes before it gives", _all_or_none),
}


def _storm(rule: str, averager: str, seed: int) -> tuple[bool, float]:
    RULES[rule][1]()
    try:
        done = trial(seed, averager, 6)
    except InvariantBroken:
        return False, 0.0
    return True, done.averaged


def _tests(rule: str) -> list[str]:
    switch = f"import waiting_rules; waiting_rules.RULES[{rule!r}][1]()"
    code = f"import sys; sys.path.insert(0, 'benchmarks'); {switch}; import pytest"
    code += "; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow", "--maxfail=8"]
    command = [sys.executable, "-c", code, *options, *TESTS]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    failed = [line.split(" ")[1] for line in shown.stdout.splitlines() if line.startswith("FAILED ")]
    return sorted({name.removeprefix("tests/").split("[")[0] for name in failed})


def main() -> None:
    """Every rule, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made = how()
    rows = []
    for rule in args.rules:
        row: dict[str, Any] = {"rule": rule, "what": RULES[rule][0], "failed": {}, "averaged": {}}
        for averager in AVERAGERS:
            with ProcessPoolExecutor(os.cpu_count()) as pool:
                found = list(pool.map(partial(_storm, rule, averager), range(args.seeds), chunksize=5))
            row["failed"][averager] = [seed for seed, (whole, _) in enumerate(found) if not whole]
            row["averaged"][averager] = round(sum(share for _, share in found) / len(found), 4)
        row["red"] = _tests(rule)
        rows.append(row)
        lost = sum(map(len, row["failed"].values()))
        print(
            f"{rule:>18}: {lost} storms fail; averaged {row['averaged']}; {len(row['red'])} tests red",
            flush=True,
        )
        for name in row["red"]:
            print(f"{'':>20}{name}", flush=True)
    if args.out:
        kept = {**made, "world": "virtual time", "seeds": args.seeds}
        args.out.write_text(json.dumps(kept | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
