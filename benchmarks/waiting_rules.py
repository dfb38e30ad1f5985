"""What each rule of waiting is for: the crew without it, in storms and in the tests of the protocols.

    python benchmarks/waiting_rules.py                                     # all rules; nothing is stored
    python benchmarks/waiting_rules.py --rules outvoted never --seeds 100

A rule that can be left out, and nothing gets worse, is one too many. For each it prints how many storms
(``ragtag.simulation.trials.rounds``) go otherwise without it, how many fail, what share of chunks is averaged
in them, how long their rounds take in virtual time, and which tests turn red. Tests that hold each effect
(golden transcripts) are not among these. Storms have no clients, no plans of shares and no lines of unlike
length: the rules for these show in tests alone.

The reasons of the rules are in docs/protocols.md. Of the ways in which waiting ends (``rounds.progress``)
IN and LATE stay: without them a round ends late, or never.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from inspect import getattr_static
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent))  # tests import this file, too

from ragtag.core.deadline import Deadline
from ragtag.protocols.channel import at_once, presence
from ragtag.protocols.channel.at_once import Rounds
from ragtag.protocols.channel.budgets import Budgets
from ragtag.protocols.channel.presence import Crew, Presence
from ragtag.protocols.rounds import layout, progress
from ragtag.protocols.rounds.base import Patience
from ragtag.protocols.rounds.progress import Waiting
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.trials.rounds import QUORUM, trial
from stored import how

ROOT = Path(__file__).resolve().parent.parent
METHODS = "rps", "rps+repair", "allreduce", QUORUM.name
ROUNDS = 6
"""So many a peer is asked for in its storm."""
NAMED = 20, 132, 1001
"""Storms that docs/protocols.md names, beside the first ones."""
LIMIT_S = 1800.0
"""The longest that one rule may take."""
RED_MAX = 8
"""After so many red tests no more are run."""
TESTS = [
    f"tests/protocols/test_{what}.py"
    for what in (
        *("reunite", "early", "asking", "cut_off", "outvoted", "quorum", "node", "gather", "progress"),
        *("allreduce", "clients", "layout", "shares"),
    )
]


@dataclass(frozen=True)
class Rule:
    """A rule of waiting, and how it is left out.

    what: the rule in words.
    where, name: the function, property or constant that has it: an attribute of a class or a module.
    without: what stands there instead, from what stands there.
    """

    what: str
    where: Any
    name: str
    without: Callable[[Any], Any]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave it out for a while."""
        with patch.object(self.where, self.name, self.without(getattr_static(self.where, self.name))):
            yield


def nothing(answer: Any) -> Callable[[Any], Any]:
    """In place of a function: one that does nothing. answer: makes what it returns."""
    return lambda _: lambda *_, **__: answer()


def constant(value: Any) -> Callable[[Any], Any]:
    """In place of a constant."""
    return lambda _: value


def reading(read: Callable[[Any], float]) -> Callable[[Any], Any]:
    """In place of a property."""
    return lambda _: property(read)


def _after_end(change: Callable[[Rounds], None]) -> Callable[[Any], Any]:
    """In place of ``Rounds._end``: the same, and then a change."""

    def without(end: Any) -> Any:
        def ended(self: Rounds, outcome: Any, lesson: Any) -> None:
            end(self, outcome, lesson)
            change(self)

        return ended

    return without


def _forget_behind(rounds: Rounds) -> None:
    rounds._behind = False


def _forget_withheld(rounds: Rounds) -> None:
    rounds._withheld = frozenset()


def _answers_here(_: Any) -> Any:
    def answers(self: Waiting, run: Any) -> None:
        self.answered.add(run.peer)

    return answers


def _unsaid(end: Any) -> Any:
    def ended(self: Rounds, outcome: Any, lesson: Any) -> None:
        self._outrun = False
        end(self, outcome, lesson)

    return ended


def _no_question(wants_more: Any) -> Any:
    def more(self: Waiting, now_s: float) -> Any:
        effects = wants_more(self, now_s)
        return effects and effects[:1]  # the deadline's timer

    return more


def _none_if_all_withheld(begin: Any) -> Any:
    def began(self: Waiting, now_s: float, ask: Any) -> Any:
        giving = begin(self, now_s, ask)
        return [] if ask.withheld.issuperset(self.waited_for) else giving

    return began


def _question_tells_no_round(asked: Any) -> Any:
    def without(self: Rounds, now_s: float, run: Any) -> Any:
        highest = self.highest
        effects = asked(self, now_s, run)
        self.highest = highest
        return effects

    return without


def _ahead_by_values(asked_from: Any) -> Any:
    def without(self: Rounds, now_s: float, number: int, peer: int) -> Any:
        is_next = number - 1 == self.active and not self._behind
        return asked_from(self, now_s, number, peer) if is_next else []

    return without


def _believed_at_once(asked_from_next: Any) -> Any:
    def twice(self: Waiting, peer: int) -> bool:
        return asked_from_next(self, peer) or asked_from_next(self, peer)

    return twice


def _few_alone(count: Any) -> Any:
    def counted(self: Waiting, now_s: float) -> Any:
        effects = count(self, now_s)
        return effects if self._few < 0 else []

    return counted


def _of_what_is_owed(count: Any) -> Any:
    def counted(self: Waiting, now_s: float) -> Any:
        self._of = Counter(peer for peer, _, _ in self.owed)
        return count(self, now_s)

    return counted


def _as_if_all_asked_at_once(turn_over: Any) -> Any:
    def turned(self: Waiting, now_s: float) -> None:
        with patch.object(self, "silent", set[int]()):
            turn_over(self, now_s)

    return turned


def _old_is_silence(_: Any) -> Any:
    def shows(self: Rounds, now_s: float, peer: int, number: int) -> bool:
        return number >= self.done

    return shows


RULES: dict[str, Rule] = {
    "passed": Rule(
        "a peer that is heard in a later round, or has left, is waited for no longer",
        *(Waiting, "passed", nothing(lambda: None)),
    ),
    "elsewhere": Rule(
        "an owner that hears that another has its block does not wait for that one's share",
        *(Waiting, "elsewhere", nothing(lambda: None)),
    ),
    "outvoted": Rule(
        "a peer that most owners' averages are without is not waited for",
        *(Waiting, "outvoted", nothing(lambda: None)),
    ),
    "witnesses": Rule("one owner's average is not enough for that", progress, "WITNESSES", constant(1)),
    "grace": Rule(
        "where most are missing at the first deadline, it is doubled once",
        *(Waiting, "wants_more", nothing(lambda: None)),
    ),
    "step": Rule(
        "what a step takes counts, too: in that wait, and until when a peer is only late",
        *(Crew, "step_s", reading(lambda self: 0.0)),
    ),
    "asked while early": Rule(
        "they are asked meanwhile whether they are there",
        *(Waiting, "wants_more", _no_question),
    ),
    "early": Rule(
        "a peer that hears less than half of the others is early, and they are not silent",
        *(presence, "ALONE_MAX", constant(0)),
    ),
    "asking": Rule(
        "the few that are missing are asked whether they are there",
        *(Waiting, "look_around", nothing(list)),
    ),
    "asking all": Rule(
        "where most are missing, all of them are asked later",
        *(Waiting, "count", _few_alone),
    ),
    "part of a step": Rule(
        "that is a quarter of a step at most after the beginning",
        *(Budgets, "usual_scatter_s", reading(lambda self: self.scatter.middle_s())),
    ),
    "of all": Rule(
        "few are half of all that a stage waits for, and not of those that are missing when it begins",
        *(Waiting, "count", _of_what_is_owed),
    ),
    "at other times": Rule(
        "where a peer is silent, others' averages have a question and its answer longer",
        *(Waiting, "turn_over", _as_if_all_asked_at_once),
    ),
    "again": Rule(
        "those that answered, and still owe something, are asked once more",
        *(Waiting, "ask_again", nothing(list)),
    ),
    "middle": Rule(
        "they are asked after half of the second stages' time, not after a whole deadline",
        *(Budgets, "usual_gather_s", reading(lambda self: self.gather.budget_s())),
    ),
    "round trips": Rule(
        "an answer has two retransmission timeouts at least",
        *(Waiting, "_answer_s", reading(lambda self: self._usual_s)),
    ),
    "patience": Rule(
        "answers that came too late lengthen the time for answers",
        *(Patience, "gave_up", nothing(lambda: None)),
    ),
    "which round": Rule(
        "a question tells which round its sender is in",
        *(Rounds, "_asked", _question_tells_no_round),
    ),
    "asks later": Rule(
        "a peer that asks in a later round is ahead",
        *(Rounds, "_asked_from", _ahead_by_values),
    ),
    "never": Rule(
        "a peer that says that a share comes no more is believed", Waiting, "answers", _answers_here
    ),
    "never by question": Rule(
        "a peer that asks twice in the next round has left this one",
        *(Waiting, "asked_from_next", nothing(bool)),
    ),
    "twice": Rule("that is believed the second time only", Waiting, "asked_from_next", _believed_at_once),
    "outrun": Rule(
        "a peer that was told so takes itself for behind in its next round",
        *(Rounds, "_end", _unsaid),
    ),
    "apart": Rule(
        "a peer that cuts the vector by other shares is not waited for",
        *(Waiting, "cuts_apart", nothing(lambda: None)),
    ),
    "enough": Rule(
        "past a quorum a peer is waited for only while that pays",
        *(Waiting, "enough", nothing(list)),
    ),
    "silent": Rule(
        "a peer of which nothing came is not waited for in the second stage",
        *(Waiting, "_is_silent", nothing(bool)),
    ),
    "gone": Rule(
        "after two silent rounds a peer's blocks go to other owners",
        *(presence, "GONE_AFTER", constant(1 << 30)),
    ),
    "heirs": Rule(
        "each block of a dead owner has an order of heirs of its own",
        *(layout, "_heirs", lambda _: layout._next_of),
    ),
    "old messages": Rule(
        "messages of rounds long done do not show that a peer takes part",
        *(Rounds, "shows", nothing(lambda: True)),
    ),
    "late signs": Rule(
        "they do where this peer is alone, or the sender is no later than its line and a step",
        *(Rounds, "shows", _old_is_silence),
    ),
    "vouched": Rule(
        "a peer that owns nothing hears of others from owners",
        *(Presence, "vouched", nothing(list)),
    ),
    "withheld": Rule(
        "copies that a peer did not give an owner it does not hear are not waited for",
        *(Rounds, "_end", _after_end(_forget_withheld)),
    ),
    "all withheld": Rule(
        "an owner that got none at all waits for all again",
        *(Waiting, "begin", _none_if_all_withheld),
    ),
    "leaving": Rule(
        "a peer that is behind begins the round after one that is over for others",
        *(Rounds, "_leaves_it", nothing(bool)),
    ),
    "tardy": Rule(
        "so does one that began several in a row too late", at_once, "TARDY_MAX", constant(1 << 30)
    ),
    "behind": Rule(
        "a peer that is behind takes one round's difference as a sign that others are ahead",
        *(Rounds, "_end", _after_end(_forget_behind)),
    ),
    "catch up": Rule(
        "a peer that skipped many rounds takes before it gives",
        *(at_once, "CATCH_UP", constant(1 << 30)),
    ),
    "back-off": Rule("a miss lengthens the next deadline", Deadline, "missed", nothing(lambda: None)),
    "late": Rule("what comes too late lengthens the next deadline", Budgets, "late", nothing(lambda: None)),
    "compute apart": Rule(
        "one round may teach a deadline a quarter of what a peer computes",
        *(Budgets, "_apart_s", nothing(float)),
    ),
    "leap": Rule(
        "one round teaches no more than what shares take of peers in one round",
        *(Budgets, "_most_s", nothing(lambda: float("inf"))),
    ),
    "farthest": Rule(
        "no stage is shorter than the way to the farthest peer and back",
        *(Crew, "trip_s", reading(lambda self: 0.0)),
    ),
}


def storm(method: str, seed: int, rounds: int = ROUNDS) -> tuple[str, float, float]:
    """A storm's digest, share of chunks averaged and length of its rounds in seconds; no digest: it fails."""
    try:
        done = trial(seed, method, rounds)
    except InvariantBroken:
        return "", 0.0, 0.0
    return done.digest, done.averaged, done.round_s


class Red:
    """Names of tests that fail, as a plugin of pytest."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One step of a test is over."""
        if report.failed:
            self.names.add(report.nodeid.removeprefix("tests/").split("[")[0])


def red(tests: list[str]) -> list[str]:
    """Which tests fail in this process."""
    import pytest

    found, options = Red(), ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow"]
    options += [f"--maxfail={RED_MAX}", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    with redirect_stdout(io.StringIO()) as said:
        status = pytest.main([*options, *(str(ROOT / name) for name in tests)], [found])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}:\n{said.getvalue()}")
    return sorted(found.names)


def measure(
    name: str, seeds: list[int], tests: list[str]
) -> tuple[dict[tuple[str, int], tuple[str, float, float]], list[str]]:
    """The storms by method and seed, and the red tests, without a rule; ``""``: with all of them."""
    with RULES[name].left_out() if name else nullcontext():
        storms = {(method, seed): storm(method, seed) for method in METHODS for seed in seeds}
        return storms, red(tests)


def row(name: str, storms: dict[Any, Any], as_it_is: dict[Any, Any], reds: list[str]) -> dict[str, Any]:
    """A rule's figures. Shares and lengths are of storms that fail neither with all rules nor without it."""
    both = [key for key in storms if storms[key][0] and as_it_is[key][0]]
    shares, shares_as_is, long_s, as_long_s = (
        sum(found[key][at] for key in both) for at in (1, 2) for found in (storms, as_it_is)
    )
    n = max(1, len(both))
    return {
        "rule": name,
        "what": RULES[name].what,
        "otherwise": sum(storms[key][0] != as_it_is[key][0] for key in storms),
        "failed": sum(not digest for digest, _, _ in storms.values()),
        "which": [f"{method}, {seed}" for (method, seed), (digest, _, _) in storms.items() if not digest],
        "averaged": round(shares / n, 4),
        "averaged_less": round((shares_as_is - shares) / n, 4),
        "longer": round(long_s / as_long_s - 1.0, 4) if both else 0.0,
        "red": len(reds),
        "tests": reds,
    }


def main() -> None:
    """Every rule in a process of its own; with ``--out``, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="storms of each method, beside those with names")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made, rows = how(), []
    seeds = sorted({*range(args.seeds), *NAMED})
    with multiprocessing.get_context("fork").Pool(args.processes, maxtasksperchild=1) as pool:
        found = {name: pool.apply_async(measure, (name, seeds, TESTS)) for name in ("", *args.rules)}
        as_it_is, reds = found.pop("").get(LIMIT_S)
        if reds:
            raise SystemExit(f"these tests fail with all rules: {', '.join(reds)}")
        for name, one in found.items():
            storms, reds = one.get(LIMIT_S)
            rows.append(row(name, storms, as_it_is, reds))
            print(
                "{rule:>18}: {otherwise} storms go otherwise, {failed} fail, "
                "{averaged_less:+.2%} less averaged, rounds {longer:+.1%}; {red} tests red".format(
                    **rows[-1]
                ),
                *(f"\n{'':>20}{test}" for test in reds),
                sep="",
                flush=True,
            )
    if args.out:
        kept = {
            **made,
            "world": "virtual time",
            "methods": METHODS,
            "storms": len(as_it_is),
            "failed": sum(not digest for digest, _, _ in as_it_is.values()),
            "red_max": RED_MAX,
            "rows": rows,
        }
        args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
