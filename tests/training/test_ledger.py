"""Which of two claims on a block wins, and that a claim is looked at once more before it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragtag.training.samples.claims import Section, Span
from ragtag.training.samples.lease import Lease
from ragtag.training.samples.ledger import TOLD_MAX, Ledger, Process

ME: Process = (1, 0)


def claims(peer: int, number: int, *, firm: tuple[Span, ...] = (), pending: tuple[Span, ...] = ()) -> Section:
    """A peer's section whose pending claims are of post ``number``."""
    return Section(
        peer, 0, number, entered=0, closed=0, ready=0, epoch=0, used=0, firm=firm, pending=pending,
        pending_number=number,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "number", "lost"),
    [
        (0, 4, True),  # claimed sooner
        (2, 4, True),
        (0, 5, True),  # at once: the lower peer wins
        (2, 5, False),
        (0, 6, False),  # claimed later
        (2, 6, False),
    ],
)
def test_the_sooner_claim_wins_and_of_two_at_once_the_lower_peers(peer: int, number: int, lost: bool) -> None:
    ledger = Ledger([2] * 10)
    ledger.learn([claims(peer, number, pending=((3, 7),))])
    assert ledger.lost([(0, 5)], 5, ME) == ([(3, 5)] if lost else [])


def test_exactly_one_of_two_that_claim_a_block_at_once_gives_it_up() -> None:
    """Each sees the other's claim; both giving it up would leave the block, neither would use it twice."""
    first, second = Ledger([2] * 10), Ledger([2] * 10)
    first.learn([claims(2, 5, pending=((3, 7),))])
    second.learn([claims(1, 5, pending=((3, 7),))])
    assert [first.lost([(3, 7)], 5, ME), second.lost([(3, 7)], 5, (2, 0))] == [[], [(3, 7)]]


def test_a_report_counts_samples_by_peer_and_nothing_for_a_process_that_has_posted_nothing() -> None:
    ledger = Ledger([2] * 10)
    used = Section(
        2, 0, 3, entered=0, closed=0, ready=0, epoch=0, used=4, firm=((3, 7),), pending=(), pending_number=0
    )
    ledger.learn([used])
    report = ledger.report(0, ME)
    assert (report.used_by_me, report.missed, report.twice, report.by_peer) == (0, 12, 0, {2: 8})
    assert ledger.report(0, (2, 0)).used_by_me == 8


def test_what_is_firm_is_anothers_however_late_its_post() -> None:
    ledger = Ledger([2] * 10)
    ledger.learn([claims(2, 9, firm=((3, 7),))])
    assert ledger.lost([(0, 5)], 5, ME) == [(3, 5)]
    assert ledger.lost([(0, 5)], 5, (2, 0)) == []  # its own claims take nothing from a process


def test_a_claim_that_was_declared_firm_is_given_up_where_an_older_one_had_come_before() -> None:
    ledger = Ledger([2] * 10)
    lease = Lease(ME, pending=[(0, 5)], number=5)
    lease.declare()
    assert lease.unused() == []  # not before the second look
    ledger.learn([claims(2, 4, pending=((3, 7),))])
    lease.look_again(ledger)
    assert (lease.firm, lease.fresh) == ([(0, 3)], [])
    assert [lease.use() for _ in range(3)] == [0, 1, 2]
    assert lease.unused() == []


# -- What a peer tells of others


def test_a_peer_that_tells_of_many_processes_has_room_for_some_and_keeps_out_nobody() -> None:
    ledger = Ledger([2] * 10)
    for number in range(2, 40):
        made_up = [replace(claims(9, 1, firm=((0, 9),)), process=100 * number + i) for i in range(20)]
        ledger.learn([replace(claims(2, number), process=number), *made_up])
    assert len(ledger.sections) == TOLD_MAX
    ledger.learn([claims(3, 40), claims(4, 30, firm=((3, 7),))])
    assert ledger.sections[4, 0].firm == ((3, 7),)
    assert (3, 0) in ledger.sections


def test_a_peer_that_comes_again_and_again_has_room_for_its_newest_processes() -> None:
    ledger = Ledger([2] * 10)
    for process in range(3 * TOLD_MAX):
        ledger.learn([replace(claims(2, process + 1), process=process)])
    assert sorted(ledger.sections) == [(2, process) for process in range(2 * TOLD_MAX, 3 * TOLD_MAX)]


def test_of_a_peer_that_speaks_for_itself_no_later_process_is_believed() -> None:
    ledger = Ledger([2] * 10)
    ledger.learn([claims(2, 5), replace(claims(3, 4, firm=((0, 9),)), process=1 << 40)])
    assert ledger.newest_process(3) == 1 << 40
    ledger.learn([claims(3, 6, firm=((3, 7),))])
    assert ledger.newest_process(3) == 0
    assert ledger.claimed(0).tolist() == [3 <= block < 7 for block in range(10)]


def test_nobody_tells_of_a_post_as_late_as_its_own() -> None:
    """Posts are numbered as they are heard of: what is said later by a peer itself has a higher number."""
    ledger = Ledger([2] * 10)
    ledger.learn([claims(2, 5), claims(3, 5, firm=((0, 9),)), claims(4, 1 << 40), claims(6, 4)])
    assert sorted(ledger.sections) == [(2, 0), (6, 0)]
