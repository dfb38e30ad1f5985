"""Windows: they grow while nothing is lost, halve for our own losses, and stay open on a lossy path."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ragtag.core.seed import generator
from ragtag.network.control.window import WINDOW_FIRST, Pacer

RTT_S = 0.01
U16 = 1 << 16


def round_trips(pacer: Pacer, n: int, lost: Callable[[int], int], granted: int = 1 << 20) -> list[int]:
    """Send as much as may leave and answer it one round trip later, ``n`` times; the windows used.

    lost: how many of that many datagrams get lost.
    """
    used = []
    now_s, received = 1.0 + pacer._mark_s, pacer.received
    for _ in range(n):
        k = pacer.allowance
        pacer.sent += k
        now_s += 1.001 * RTT_S
        received += k - min(k, lost(k))
        pacer.on_ack(now_s, pacer.sent, received, granted, RTT_S)
        used.append(k)
    return used


def no_loss(k: int) -> int:
    return 0


def test_the_first_window_is_small_and_doubles_each_round_trip() -> None:
    used = round_trips(Pacer(), 6, no_loss)
    assert used == [WINDOW_FIRST * 2**i for i in range(6)]


def test_a_window_has_an_end() -> None:
    used = round_trips(Pacer(), 40, no_loss)
    assert used[-1] == used[-2] == U16


def test_the_receiver_has_the_last_word() -> None:
    pacer = Pacer()
    used = round_trips(pacer, 10, no_loss, granted=100)
    assert max(used) == 100
    pacer.on_ack(9.0, pacer.sent, pacer.received, 0, RTT_S)  # a window of nothing would never open again
    assert pacer.granted == 1
    pacer.on_ack(9.0, pacer.sent, pacer.received, 1 << 31, RTT_S)
    assert pacer.granted == U16


def test_what_is_under_way_counts_against_the_window() -> None:
    pacer = Pacer()
    pacer.sent = 40
    assert (pacer.in_flight, pacer.allowance) == (40, WINDOW_FIRST - 40)
    pacer.sent = 100
    assert pacer.allowance == 0
    pacer.on_ack(1.0, 70, 70, 1000, RTT_S)
    assert pacer.in_flight == 30


@pytest.mark.parametrize("p", [0.01, 0.02, 0.05, 0.1, 0.3])
def test_a_lossy_path_carries_what_it_can_where_tcp_would_creep(p: float) -> None:
    medians, firsts, pacers = [], [], []
    for index in range(21):
        draws = generator(2, "loss", int(1000 * p), index)
        pacers.append(pacer := Pacer())
        used = round_trips(pacer, 60, lambda k, draws=draws: int(draws.binomial(k, p)))
        medians.append(np.median(used[-20:]))
        firsts.append(sum(used[:15]))
    tcp = 1.22 / p**0.5  # Mathis, Semke, Mahdavi, Ott, "The macroscopic behavior of TCP", 1997
    assert np.median(medians) == U16, "nothing but the receiver limits it"
    assert np.quantile(firsts, 0.1) >= 5 * 15 * tcp, "chance is seldom taken for a full queue"
    assert min(medians) >= 5 * tcp, "where chance looked like a full queue at first, it still grows"
    assert np.median([pacer.loss for pacer in pacers]) == pytest.approx(p, abs=0.005)


@pytest.mark.parametrize("room", [100, 1000, 5000])
def test_a_full_queue_is_backed_off_from_however_slowly_it_fills(room: int) -> None:
    """A path that carries ``room`` datagrams a round trip and drops the rest: losses are ours."""
    used = round_trips(pacer := Pacer(), 600, lambda k: max(0, k - room))
    late = used[-300:]
    lost = sum(max(0, k - room) for k in late) / sum(late)
    assert lost < 0.02, "a window that creeps up must not take its own losses for the path's"
    assert max(late) <= 1.2 * room
    assert np.mean(np.minimum(late, room)) >= 0.6 * room, "and yet most of the path is used"
    assert pacer.ambient < 0.02


def messages(pacer: Pacer, n: int, size: int, lost: Callable[[int], int]) -> list[int]:
    """Send a message of ``size`` datagrams after the other, each when the last has been answered: by how
    many of it were lost.
    """
    now_s, counts = 1.0 + pacer._mark_s, []
    for _ in range(n):
        left, missing = size, 0
        while left:
            k = min(left, pacer.allowance)
            gone = min(k, lost(k))
            pacer.sent, left, missing = pacer.sent + k, left - k, missing + gone
            now_s += 1.001 * RTT_S
            pacer.on_ack(now_s, pacer.sent, pacer.received + k - gone, 1 << 20, RTT_S)
        counts.append(missing)
    return counts


def test_a_window_that_is_not_used_up_does_not_grow() -> None:
    messages(pacer := Pacer(), 50, 20, no_loss)
    assert pacer.window == WINDOW_FIRST
    messages(pacer, 50, 300, no_loss)
    assert 300 <= pacer.window <= 1200


def test_small_messages_that_lose_something_now_and_then_close_no_window() -> None:
    draws = generator(2, "small")
    pacer = Pacer(window=1024.0)
    messages(pacer, 3000, 12, lambda k: int(draws.binomial(k, 0.03)))
    assert pacer.window == 1024


@pytest.mark.parametrize("size", [150, 400, 1000])
def test_a_message_that_overflows_a_queue_is_sent_in_parts_however_large_the_window(size: int) -> None:
    pacer = Pacer(window=4096.0)
    late = messages(pacer, 300, size, lambda k: max(0, k - 100))[-200:]
    assert sum(late) / (200 * size) < 0.03
    assert pacer.ambient < 0.02 and pacer.window <= 120


@pytest.mark.parametrize("room", [100, 1000])
def test_a_full_queue_on_a_lossy_path(room: int) -> None:
    shares, ambients = [], []
    for index in range(7):
        draws = generator(2, "both", room, index)

        def lost(k: int, draws: np.random.Generator = draws) -> int:
            through = min(k, room)
            return k - through + int(draws.binomial(through, 0.1))

        late = round_trips(pacer := Pacer(), 600, lost)[-300:]
        assert sum(max(0, k - room) for k in late) / sum(late) < 0.04, "few losses are ours"
        shares.append(np.mean(np.minimum(late, room)) / room)
        ambients.append(pacer.ambient)
    assert np.mean(shares) >= 0.65
    assert np.mean(ambients) == pytest.approx(0.1, abs=0.03)


def test_windows_stay_open_whatever_is_lost() -> None:
    pacer = Pacer()
    used = round_trips(pacer, 50, lambda k: k)
    assert min(used) >= 8
    assert pacer.loss > 0.95


def test_what_was_sent_before_anybody_listened_is_no_loss() -> None:
    """Who starts first sends into the void; its window must not remember that for the rest of the run."""
    pacer = Pacer(sent=50)
    pacer.on_ack(1.0, 50, 8, 1000, RTT_S)
    assert pacer.in_flight == 0
    assert (pacer.loss, pacer.copies) == (0.0, 1)
    used = round_trips(pacer, 4, no_loss)
    assert used == [2 * WINDOW_FIRST * 2**i for i in range(4)]
    pacer.sent += 100
    pacer.on_ack(9.0, pacer.sent, pacer.received - 42 + 90, 1000, RTT_S)
    assert pacer.acked - pacer.received == 10, "what is lost afterwards is counted"


def test_a_new_process_counts_anew() -> None:
    pacer = Pacer()
    round_trips(pacer, 5, no_loss)
    window, sent = pacer.window, pacer.sent
    pacer.sent += 30  # under way to a process that has ended
    pacer.restart()
    assert pacer.in_flight == 0
    assert pacer.loss == 0.0
    pacer.sent += 20
    pacer.on_ack(9.0, pacer.sent, 20, 1000, RTT_S)
    pacer.sent += 40
    pacer.on_ack(9.1, pacer.sent, 55, 1000, RTT_S)  # 5 lost
    assert pacer.acked == sent + 90
    assert pacer.acked - pacer.received == 5
    assert pacer.window >= window / 2


# -- Round-trip times


def test_round_trip_times_are_smoothed_as_rfc_6298_says() -> None:
    pacer = Pacer()
    samples = [0.1, 0.2, 0.15, 0.3]
    srtt = rttvar = 0.0
    for i, r in enumerate(samples):
        pacer.sent += 1
        pacer.on_ack(1.0 + i, pacer.sent, pacer.sent, 100, r)
        if i == 0:
            srtt, rttvar = r, r / 2  # section 2.2
        else:
            rttvar = 0.75 * rttvar + 0.25 * abs(srtt - r)  # section 2.3
            srtt = 0.875 * srtt + 0.125 * r
        assert pacer.srtt_s == pytest.approx(srtt)
        assert pacer.rto_s == pytest.approx(srtt + 4 * rttvar)


def test_nothing_is_asked_for_again_at_once_while_nothing_is_known() -> None:
    assert Pacer().rto_s == 0.1


def test_an_answer_is_overdue_after_a_millisecond_at_the_earliest() -> None:
    pacer = Pacer(srtt_s=1e-5, rttvar_s=1e-7)
    assert pacer.rto_s == pytest.approx(1e-5 + 1e-3)


def test_answers_that_answer_nothing_change_nothing() -> None:
    """From another process with our address before us, or made up: beyond what was sent, or impossible."""
    pacer = Pacer()
    pacer.sent = 50
    pacer.on_ack(1.0, 20, 18, 100, RTT_S)
    before = repr(pacer)
    for highest, received in ((51, 20), (1 << 31, 0), (30, 31), (-5, -10), (-(1 << 31), -(1 << 31) - 7)):
        pacer.on_ack(2.0, highest, received, 7, 4000.0)
        assert repr(pacer) == before, (highest, received)


def test_a_late_answer_measures_nothing() -> None:
    """Overtaken or repeated: the time it took is not the path's (and it may be a replay)."""
    pacer = Pacer()
    pacer.sent = 50
    pacer.on_ack(0.5, 4, 4, 100, RTT_S)
    pacer.on_ack(1.0, 20, 18, 100, RTT_S)
    for highest, received in ((10, 9), (20, 18)):
        pacer.on_ack(500.0, highest, received, 100, 499.0)
    assert pacer.srtt_s == pytest.approx(RTT_S)
    assert (pacer.acked, pacer.received) == (20, 18)


# -- Copies of what must not get lost


@pytest.mark.parametrize(("p", "copies"), [(0.0, 1), (0.0005, 1), (0.01, 2), (0.1, 3), (0.3, 6), (0.9, 8)])
def test_all_copies_are_lost_once_in_a_thousand_times(p: float, copies: int) -> None:
    pacer = Pacer(acked=100_000, received=round(100_000 * (1 - p)))
    assert pacer.copies == copies
    if 0.001 < p < 0.4:
        assert pacer.loss**pacer.copies <= 1.01e-3


def test_one_copy_until_something_is_known() -> None:
    assert Pacer().copies == 1
    assert Pacer(acked=4, received=1).copies == 1


def answer(pacer: Pacer, rtt_s: float) -> None:
    """One datagram leaves, and is answered after so long."""
    pacer.sent += 1
    pacer.on_ack(99.0, pacer.sent, pacer.received + 1, 1 << 20, rtt_s)


def test_one_answer_that_a_frozen_peer_kept_back_does_not_make_the_timeout_long() -> None:
    pacer = Pacer()
    round_trips(pacer, 40, no_loss)
    before_s = pacer.rto_s
    answer(pacer, 6.0)
    assert before_s < pacer.rto_s < 4 * before_s


def test_a_path_that_has_become_slower_is_known_within_some_tens_of_answers() -> None:
    pacer = Pacer()
    round_trips(pacer, 40, no_loss)
    for _ in range(40):
        answer(pacer, 1.0)
    assert 0.9 < pacer.srtt_s < 1.1
    assert pacer.rto_s >= 1.0
