"""Each removal of ``benchmarks/waiting_rules.py`` applies: without it a storm or a test ends otherwise."""

from __future__ import annotations

import multiprocessing
from functools import cache

import pytest

from benchmarks.waiting_rules import RULES, TESTS, measure, row, storm

ROUNDS = 3
STORMS = {
    "outvoted": ("rps", 0),
    "grace": ("rps", 0),
    "step": ("rps", 0),
    "early": ("rps", 0),
    "asking": ("rps", 0),
    "again": ("rps", 0),
    "round trips": ("rps", 0),
    "patience": ("rps", 0),
    "never": ("rps+repair", 0),
    "enough": ("rps, quorum 2", 0),
    "silent": ("rps", 0),
    "gone": ("rps", 1),
    "heirs": ("allreduce", 1),
    "back-off": ("rps", 0),
    "late": ("rps", 0),
    "compute apart": ("rps", 0),
}
"""By rule: one that goes otherwise without it."""
ASKING, CUT_OFF, NODE, PROGRESS, REUNITE = (
    f"tests/protocols/test_{name}.py::test_" for name in ("asking", "cut_off", "node", "progress", "reunite")
)
RED = {
    "passed": f"{PROGRESS}a_peer_that_is_past_the_round_owes_nothing_of_it_and_is_not_missed",
    "elsewhere": f"{PROGRESS}a_share_that_goes_to_another_owner_is_not_waited_for",
    "witnesses": f"{PROGRESS}most_of_the_others_must_have_gone_on_without_a_peer",
    "asked while early": "tests/protocols/test_early.py::"
    "test_who_is_far_too_early_is_with_the_others_again_in_the_next_round",
    "never by question": f"{ASKING}who_lacks_all_averages_asks_once_it_sees_others_in_the_next_round",
    "twice": f"{ASKING}what_comes_after_the_first_question_counts",
    "middle": f"{CUT_OFF}however_often_lines_fail_nobody_waits_for_most_of_a_step",
    "of all": f"{CUT_OFF}who_is_usually_early_and_begins_last_for_once_asks_at_once_the_two_that_it_lacks",
    "asking all": f"{CUT_OFF}who_is_cut_off_finds_out_in_a_part_of_a_step_and_is_in_the_next_round",
    "part of a step": f"{CUT_OFF}however_often_lines_fail_nobody_waits_for_most_of_a_step",
    "at other times": f"{NODE}who_freezes_before_it_has_given_anything_costs_no_scatter_deadline",
    "which round": f"{ASKING}a_question_tells_which_round_the_others_are_in_but_for_one_that_is_made_up",
    "asks later": f"{NODE}a_peer_that_asks_in_a_later_round_has_left_this_one",
    "outrun": f"{NODE}who_was_told_that_a_message_comes_no_more_waits_for_nobody_that_is_a_round_ahead",
    "apart": "tests/protocols/test_clients.py::"
    "test_a_peer_that_has_not_heard_of_a_client_is_missed_at_once_and_mixes_nothing",
    "old messages": f"{REUNITE}who_is_later_than_its_line_is_long_owns_nothing_and_holds_nobody_up",
    "late signs": f"{REUNITE}who_was_alone_waits_for_those_that_come_after_it_in_vain",
    "vouched": f"{REUNITE}peers_that_were_cut_off_are_all_in_all_rounds_again[3-1-allreduce]",
    "withheld": f"{NODE}a_line_cut_one_way_costs_no_deadline_in_every_round",
    "all withheld": f"{PROGRESS}copies_that_were_withheld_are_not_waited_for_but_where_all_were",
    "leaving": f"{NODE}who_is_behind_begins_the_round_after_the_one_that_is_over_unless_it_only_takes",
    "tardy": f"{NODE}who_begins_too_late_again_and_again_leaves_a_round_out",
    "behind": f"{NODE}a_line_cut_one_way_costs_no_deadline_in_every_round",
    "catch up": f"{NODE}after_a_long_absence_its_first_values_weigh_nothing",
    "leap": f"{NODE}peers_that_wait_for_each_other_teach_no_more_than_peers_of_one_round_are_apart",
    "farthest": f"{REUNITE}sites_meet_again_though_each_is_faster_than_the_line_between_them",
}
"""By rule: a test that turns red without it, where a storm of three rounds shows nothing, or nothing bad."""


@cache
def as_it_is(method: str, seed: int) -> str:
    return storm(method, seed, ROUNDS)[0]


def test_each_rule_is_shown_once() -> None:
    assert sorted([*STORMS, *RED]) == sorted(RULES)


@pytest.mark.parametrize("rule", STORMS)
def test_a_storm_goes_otherwise_without(rule: str) -> None:
    with RULES[rule].left_out():
        without, _, _ = storm(*STORMS[rule], ROUNDS)
    assert as_it_is(*STORMS[rule]) and without != as_it_is(*STORMS[rule])


@pytest.mark.parametrize("rule", RED)
def test_a_test_turns_red_without(rule: str) -> None:
    test = RED[rule]
    assert test.partition("::")[0] in TESTS
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        _, red = pool.apply_async(measure, (rule, [], [test])).get(100.0)
    assert red == [test.removeprefix("tests/").partition("[")[0]]


def test_figures_are_of_storms_that_fail_neither_with_all_rules_nor_without_one() -> None:
    as_it_was = {("rps", 0): ("a", 0.9, 1.0), ("rps", 1): ("b", 0.8, 2.0), ("rps", 2): ("", 0.0, 0.0)}
    without = {("rps", 0): ("a", 0.9, 1.0), ("rps", 1): ("c", 0.6, 5.0), ("rps", 2): ("d", 1.0, 9.0)}
    found = row("never", without, as_it_was, ["x"])
    assert (found["otherwise"], found["failed"], found["which"], found["red"]) == (2, 0, [], 1)
    assert (found["averaged"], found["averaged_less"], found["longer"]) == (0.75, 0.1, 1.0)
    lost = row(
        "never", dict.fromkeys(as_it_was, ("", 0.0, 0.0)) | {("rps", 0): ("a", 0.9, 1.0)}, as_it_was, []
    )
    assert (lost["failed"], lost["which"], lost["longer"]) == (2, ["rps, 1", "rps, 2"], 0.0)
