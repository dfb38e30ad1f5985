"""Windows: they grow while nothing is lost, halve for our own losses, and stay open on a lossy path."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from ragtag.core.seed import generator
from ragtag.network.control import path as paths
from ragtag.network.control.bbr import Bbr
from ragtag.network.control.controller import WINDOW_FIRST, Delivery
from ragtag.network.control.path import TRAINS_MAX, Path
from ragtag.network.control.window import WINDOW_MIN, LossWindow
from tests.network import crew as crews
from tests.network.crew import Crew

RTT_S = 0.01
U16 = 1 << 16


def round_trips(path: Path, n: int, lost: Callable[[int], int], granted: int = 1 << 20) -> list[int]:
    """Send as much as may leave and answer it one round trip later, ``n`` times; the windows used.

    lost: how many of that many datagrams get lost.
    """
    used = []
    now_s, received = 1.0 + looked_s(path), path.received
    for _ in range(n):
        k = path.train(now_s)
        assert k == path.allowance, "this controller does not pace"
        path.send(now_s, k)
        now_s += 1.001 * RTT_S
        received += k - min(k, lost(k))
        path.on_ack(now_s, path.sent, received, granted)
        used.append(k)
    return used


def window_of(path: Path) -> LossWindow:
    assert isinstance(path.control, LossWindow)
    return path.control


def looked_s(path: Path) -> float:
    """When the window was last looked at."""
    return window_of(path)._looked_s


def no_loss(k: int) -> int:
    return 0


def test_the_first_window_is_small_and_doubles_each_round_trip() -> None:
    used = round_trips(Path(LossWindow()), 6, no_loss)
    assert used == [WINDOW_FIRST * 2**i for i in range(6)]


def test_a_first_window_is_shared_by_the_busy_paths_of_a_peer_until_it_was_used() -> None:
    path = Path()
    for busy, window in ((1, WINDOW_FIRST), (4, WINDOW_FIRST / 4), (1000, WINDOW_MIN), (4, WINDOW_FIRST / 4)):
        path.claim(0.0, busy, 1.0, False)
        assert path.control.window == window
    path.send(1.0, 3)
    path.claim(0.0, 2, 1.0, False)
    assert path.control.window == WINDOW_FIRST / 2
    path.send(1.0, path.allowance)
    path.claim(0.0, 15, 1.0, False)
    assert path.control.window == WINDOW_FIRST / 2


def test_a_window_is_looked_at_once_a_round_trip_however_often_it_is_answered() -> None:
    path, now_s = Path(LossWindow()), 1.0
    for i in range(4):
        assert path.allowance == WINDOW_FIRST * 2**i
        first = path.sent
        path.send(now_s, path.allowance)
        for part in range(1, 5):
            highest = first + (path.sent - first) * part // 4
            path.on_ack(now_s + RTT_S + 1e-4 * part, highest, highest, 1 << 20)
        now_s += 2 * RTT_S


def test_a_window_has_an_end() -> None:
    used = round_trips(Path(LossWindow()), 40, no_loss)
    assert used[-1] == used[-2] == U16


def test_the_receiver_has_the_last_word() -> None:
    path = Path(LossWindow())
    used = round_trips(path, 10, no_loss, granted=100)
    assert max(used) == 100
    path.on_ack(9.0, path.sent, path.received, 0)  # a window of nothing would never open again
    assert path.granted == 1
    path.on_ack(9.0, path.sent, path.received, 1 << 31)
    assert path.granted == U16


def test_what_is_under_way_counts_against_the_window() -> None:
    path = Path(LossWindow())
    path.send(0.0, 40 - path.sent)
    assert (path.in_flight, path.allowance) == (40, WINDOW_FIRST - 40)
    path.send(0.0, 100 - path.sent)
    assert path.allowance == 0
    path.on_ack(1.0, 70, 70, 1000)
    assert path.in_flight == 30


def test_an_answer_by_the_clock_of_the_turn_in_which_its_datagram_left_tells_of_no_round_trip() -> None:
    """Nothing may be divided by a round trip of no time."""
    path = Path(Bbr())
    path.send(1.0, 4)
    path.on_ack(1.0, path.sent, path.sent, 1000)
    assert (path.in_flight, path.srtt_s, path.min_rtt_s) == (0, 0.0, math.inf)
    path.send(1.1, 4)
    path.on_ack(1.1 + RTT_S, path.sent, path.sent, 1000)
    assert (path.srtt_s, path.min_rtt_s) == pytest.approx((RTT_S, RTT_S))


@pytest.mark.parametrize("p", [0.01, 0.02, 0.05, 0.1, 0.3])
def test_a_lossy_path_carries_what_it_can_where_tcp_would_creep(p: float) -> None:
    medians, firsts, paths = [], [], []
    for index in range(21):
        draws = generator(2, "loss", int(1000 * p), index)
        paths.append(path := Path(LossWindow()))
        used = round_trips(path, 60, lambda k, draws=draws: int(draws.binomial(k, p)))
        medians.append(np.median(used[-20:]))
        firsts.append(sum(used[:15]))
    tcp = 1.22 / p**0.5  # Mathis, Semke, Mahdavi, Ott, "The macroscopic behavior of TCP", 1997
    assert np.median(medians) == U16, "nothing but the receiver limits it"
    assert np.quantile(firsts, 0.1) >= 5 * 15 * tcp, "chance is seldom taken for a full queue"
    assert min(medians) >= 5 * tcp, "where chance looked like a full queue at first, it still grows"
    assert np.median([path.loss for path in paths]) == pytest.approx(p, abs=0.005)


@pytest.mark.parametrize("room", [100, 1000, 5000])
def test_a_full_queue_is_backed_off_from_however_slowly_it_fills(room: int) -> None:
    """A path that carries ``room`` datagrams a round trip and drops the rest: losses are ours."""
    used = round_trips(path := Path(LossWindow()), 600, lambda k: max(0, k - room))
    late = used[-300:]
    lost = sum(max(0, k - room) for k in late) / sum(late)
    assert lost < 0.02, "a window that creeps up must not take its own losses for the path's"
    assert max(late) <= 1.2 * room
    assert np.mean(np.minimum(late, room)) >= 0.6 * room, "and yet most of the path is used"
    assert window_of(path).ambient < 0.02


def messages(path: Path, n: int, size: int, lost: Callable[[int], int]) -> list[int]:
    """Send a message of ``size`` datagrams after the other, each when the last has been answered: by how
    many of it were lost.
    """
    now_s, counts = 1.0 + looked_s(path), []
    for _ in range(n):
        left, missing = size, 0
        while left:
            k = min(left, path.allowance)
            gone = min(k, lost(k))
            path.send(now_s, k)
            left, missing = left - k, missing + gone
            now_s += 1.001 * RTT_S
            path.on_ack(now_s, path.sent, path.received + k - gone, 1 << 20)
        counts.append(missing)
    return counts


def test_a_window_that_is_not_used_up_does_not_grow() -> None:
    messages(path := Path(LossWindow()), 50, 20, no_loss)
    assert window_of(path).window == WINDOW_FIRST
    messages(path, 50, 300, no_loss)
    assert 300 <= window_of(path).window <= 1200


def test_small_messages_that_lose_something_now_and_then_close_no_window() -> None:
    draws = generator(2, "small")
    path = Path(LossWindow(window=1024.0))
    messages(path, 3000, 12, lambda k: int(draws.binomial(k, 0.03)))
    assert window_of(path).window == 1024


@pytest.mark.parametrize("size", [150, 400, 1000])
def test_a_message_that_overflows_a_queue_is_sent_in_parts_however_large_the_window(size: int) -> None:
    path = Path(LossWindow(window=4096.0))
    late = messages(path, 300, size, lambda k: max(0, k - 100))[-200:]
    assert sum(late) / (200 * size) < 0.03
    assert window_of(path).ambient < 0.02 and window_of(path).window <= 120


@pytest.mark.parametrize("room", [100, 1000])
def test_a_full_queue_on_a_lossy_path(room: int) -> None:
    shares, ambients = [], []
    for index in range(7):
        draws = generator(2, "both", room, index)

        def lost(k: int, draws: np.random.Generator = draws) -> int:
            through = min(k, room)
            return k - through + int(draws.binomial(through, 0.1))

        late = round_trips(path := Path(LossWindow()), 600, lost)[-300:]
        assert sum(max(0, k - room) for k in late) / sum(late) < 0.04, "few losses are ours"
        shares.append(np.mean(np.minimum(late, room)) / room)
        ambients.append(window_of(path).ambient)
    assert np.mean(shares) >= 0.65
    assert np.mean(ambients) == pytest.approx(0.1, abs=0.03)


def test_windows_stay_open_whatever_is_lost() -> None:
    path = Path(LossWindow())
    used = round_trips(path, 50, lambda k: k)
    assert min(used) >= 8
    assert path.loss > 0.95


def test_what_was_sent_before_anybody_listened_is_no_loss() -> None:
    """Who starts first sends into the void; its window must not remember that for the rest of the run."""
    path = Path(LossWindow())
    path.send(1.0 - RTT_S, 50)
    path.on_ack(1.0, 50, 8, 1000)
    assert path.in_flight == 0
    assert (path.loss, path.copies) == (0.0, 1)
    used = round_trips(path, 4, no_loss)
    assert used == [2 * WINDOW_FIRST * 2**i for i in range(4)]
    path.send(8.0, 100)
    path.on_ack(9.0, path.sent, path.received - 42 + 90, 1000)
    assert path.acked - path.received == 10, "what is lost afterwards is counted"


def test_a_new_process_counts_anew() -> None:
    path = Path(LossWindow())
    round_trips(path, 5, no_loss)
    window, sent = window_of(path).window, path.sent
    path.send(8.0, 30)  # under way to a process that has ended
    path.restart()
    assert path.in_flight == 0
    assert path.loss == 0.0
    path.send(8.0, 20)
    path.on_ack(9.0, path.sent, 20, 1000)
    path.send(8.0, 40)
    path.on_ack(9.1, path.sent, 55, 1000)  # 5 lost
    assert path.acked == sent + 90
    assert path.acked - path.received == 5
    assert window_of(path).window >= window / 2


# -- Round-trip times


def test_round_trip_times_are_smoothed_as_rfc_6298_says() -> None:
    path = Path(LossWindow())
    samples = [0.1, 0.2, 0.15, 0.3]
    srtt = rttvar = 0.0
    for i, r in enumerate(samples):
        path.send(1.0 + i - r, 1)
        path.on_ack(1.0 + i, path.sent, path.sent, 100)
        if i == 0:
            srtt, rttvar = r, r / 2  # section 2.2
        else:
            rttvar = 0.75 * rttvar + 0.25 * abs(srtt - r)  # section 2.3
            srtt = 0.875 * srtt + 0.125 * r
        assert path.srtt_s == pytest.approx(srtt)
        assert path.rto_s == pytest.approx(srtt + 4 * rttvar)


def test_nothing_is_asked_for_again_at_once_while_nothing_is_known() -> None:
    assert Path(LossWindow()).rto_s == 0.1


def test_an_answer_is_overdue_after_a_millisecond_at_the_earliest() -> None:
    path = Path(LossWindow())
    path.srtt_s, path.rttvar_s = 1e-5, 1e-7
    assert path.rto_s == pytest.approx(1e-5 + 1e-3)


def test_answers_that_answer_nothing_change_nothing() -> None:
    """From another process with our address before us, or made up: beyond what was sent, or impossible."""
    path = Path(LossWindow())
    path.send(0.0, 50 - path.sent)
    path.on_ack(1.0, 20, 18, 100)
    before = repr(vars(path))
    for highest, received in ((51, 20), (1 << 31, 0), (30, 31), (-5, -10), (-(1 << 31), -(1 << 31) - 7)):
        path.on_ack(2.0, highest, received, 7)
        assert repr(vars(path)) == before, (highest, received)


def test_a_late_answer_measures_nothing() -> None:
    """Overtaken or repeated: the time it took is not the path's (and it may be a replay)."""
    path = Path(LossWindow())
    for at_s, k in ((0.5, 4), (1.0, 16), (1.5, 30)):
        path.send(at_s - RTT_S, k)
    path.on_ack(0.5, 4, 4, 100)
    path.on_ack(1.0, 20, 18, 100)
    for highest, received in ((10, 9), (20, 18)):
        path.on_ack(500.0, highest, received, 100)
    assert path.srtt_s == pytest.approx(RTT_S)
    assert (path.acked, path.received) == (20, 18)


# -- Copies of what must not get lost


@pytest.mark.parametrize(("p", "copies"), [(0.0, 1), (0.0005, 1), (0.01, 2), (0.1, 3), (0.3, 6), (0.9, 8)])
def test_all_copies_are_lost_once_in_a_thousand_times(p: float, copies: int) -> None:
    path = Path(LossWindow())
    path.send(0.0, 10)
    path.on_ack(0.05, 10, 10, 1000)
    path.send(1.0, 100_000)
    path.on_ack(1.05, path.sent, path.received + round(100_000 * (1 - p)), 1000)
    assert path.copies == copies
    if 0.001 < p < 0.4:
        assert path.loss**path.copies <= 1.01e-3


def test_one_copy_until_something_is_known() -> None:
    assert Path(LossWindow()).copies == 1
    path = Path(LossWindow())
    path.send(0.0, 1)
    path.on_ack(0.05, 1, 1, 1000)
    path.send(1.0, 2)
    path.on_ack(1.05, 3, 1, 1000)
    assert path.copies == 1


def test_after_bad_seconds_copies_become_fewer_again() -> None:
    """They fill the window of a path that lost much: it would be slow for minutes after."""
    path, copies = Path(LossWindow()), []
    for i in range(100):
        path.send(float(i), 32)
        path.on_ack(i + 0.05, path.sent, path.received + (3 if 20 <= i < 60 else 32), 1000)
        copies.append(path.copies)
    assert copies[19] == 1
    assert copies[59] == 8
    assert copies[70] <= 5
    assert copies[99] <= 2


def test_a_path_that_begins_to_lose_gets_copies_soon() -> None:
    path = Path(LossWindow())
    for i in range(1000):
        path.send(float(i), 100)
        path.on_ack(i + 0.05, path.sent, path.received + (100 if i < 990 else 90), 1000)
    assert path.copies == 3


def answer(path: Path, rtt_s: float) -> None:
    """One datagram leaves, and is answered after so long."""
    path.send(99.0 - rtt_s, 1)
    path.on_ack(99.0, path.sent, path.received + 1, 1 << 20)


def test_one_answer_that_a_frozen_peer_kept_back_does_not_make_the_timeout_long() -> None:
    path = Path(LossWindow())
    round_trips(path, 40, no_loss)
    before_s = path.rto_s
    answer(path, 6.0)
    assert before_s < path.rto_s < 4 * before_s


def test_what_an_outage_kept_back_together_does_not_make_the_timeout_long() -> None:
    """A switch or a neighbour table holds some datagrams until a link is up again, and then lets all go."""
    path = Path(LossWindow())
    round_trips(path, 40, no_loss)
    before_s, came = path.rto_s, path.received
    for i in range(30):
        path.send(20.0 + i / 100, 1)
    for i in range(30):
        path.on_ack(22.0, path.sent - 29 + i, came + 1 + i, 1 << 20)
    assert before_s < path.rto_s < 4 * before_s


def test_a_path_that_has_become_slower_is_known_within_some_tens_of_answers() -> None:
    path = Path(LossWindow())
    round_trips(path, 40, no_loss)
    for i in range(40):
        path.send(100.0 + i, 1)
        path.on_ack(101.0 + i, path.sent, path.received + 1, 1 << 20)
    assert 0.9 < path.srtt_s < 1.1
    assert path.rto_s >= 1.0


def test_a_path_that_has_become_slower_is_known_where_many_are_under_way() -> None:
    """Answers to what left in the last round trip follow each other: the timeout doubles once in each."""
    path = Path(LossWindow())
    round_trips(path, 40, no_loss)
    for i in range(500):
        path.send(100.0 + i / 50, 1)
        if i >= 50:
            path.on_ack(100.0 + i / 50, path.acked + 1, path.received + 1, 1 << 20)
    assert 0.9 < path.srtt_s < 1.1
    assert path.rto_s >= 1.0


# -- What a controller is told, and what it decides


class Paced:
    """A controller that says what a test wants, and keeps what it is told."""

    def __init__(self, window: float = 1000.0, rate: float = np.inf) -> None:
        self.window, self.rate = window, rate
        self.fair, self.bandwidth, self.busy, self.train_s = 0.0, 0.0, 1, 1e-3
        self.part, self.makeup_s = 1.0, np.inf
        self.found = False
        self.left: list[tuple[float, int, int]] = []
        self.samples: list[Delivery] = []

    def sent(self, now_s: float, count: int, in_flight: int) -> None:
        self.left.append((now_s, count, in_flight))

    def acknowledged(self, sample: Delivery) -> None:
        self.samples.append(sample)


def test_a_controller_is_told_of_all_that_left_and_of_what_came_of_it() -> None:
    path = Path(control := Paced())
    path.send(1.0, 20)
    path.send(1.1, 10)
    path.on_ack(1.25, 24, 24, 500, since_s=0.0)
    path.on_ack(1.35, 30, 27, 400, since_s=0.0)  # 3 of the last 6 were lost
    assert control.left == [(1.0, 20, 20), (1.1, 10, 30)]
    first, second = control.samples
    assert (first.passed, first.delivered, first.in_flight, first.granted) == (24, 24, 30, 500)
    assert first.rtt_s == pytest.approx(0.15), "the 24th left in the second train"
    assert (second.passed, second.delivered, second.in_flight, second.granted) == (6, 3, 6, 400)
    assert second.rtt_s == pytest.approx(0.25) and second.min_rtt_s == pytest.approx(0.15)
    assert first.tx_span_s == pytest.approx(0.1) and first.tx_first == 20
    assert second.tx_span_s == 0.0 and second.tx_first == 30


def test_a_late_driver_makes_up_for_no_more_than_its_controller_says() -> None:
    path = Path(control := Paced(rate=1000.0))
    for i in range(20):  # trains of a millisecond, each ten late
        path.send(1.0 + 0.02 * i, min(1, path.train(1.0 + 0.02 * i)))
    assert path.train(2.0) > 20
    control.makeup_s = 4e-3
    assert path.train(2.0) == 5


@pytest.mark.parametrize("rate", [100.0, 4000.0])
def test_the_rate_at_which_a_path_delivers_is_measured(rate: float) -> None:
    """A line of so many datagrams a second and 50 ms, always busy: its rate, however much is under way."""
    path, free_s, queue = Path(control := Paced(window=0.3 * rate + 4)), 0.0, list[tuple[float, int]]()
    now_s = 0.0
    for _ in range(2000):
        if k := min(10, path.train(now_s)):
            path.send(now_s, k)
            free_s = max(free_s, now_s) + k / rate
            queue.append((free_s + 0.05, path.sent))
        now_s, highest = (queue[0][0], queue.pop(0)[1]) if path.allowance == 0 else (now_s, 0)
        if highest:
            path.on_ack(now_s, highest, highest, 1 << 20)
    rates = [sample.rate for sample in control.samples[200:] if sample.rate is not None]
    assert len(rates) > 500 and np.median(rates) == pytest.approx(rate, rel=0.02)
    assert max(rates) < 1.3 * rate, "what was acknowledged together did not come faster"
    assert not any(sample.app_limited for sample in control.samples)


def test_answers_that_were_held_up_together_are_no_faster_path() -> None:
    path, times = Path(control := Paced()), np.arange(15) * 0.05
    for i, at_s in enumerate(times[:10]):
        path.send(float(at_s), 1)
        path.on_ack(float(at_s) + 0.04, i + 1, i + 1, 500)
    for at_s in times[10:]:
        path.send(float(at_s), 1)
    for i in range(10, 15):
        path.on_ack(0.71 + 1e-3 * i, i + 1, i + 1, 500)
    assert max(sample.rate for sample in control.samples[10:] if sample.rate is not None) < 26.0


def test_of_a_message_that_is_over_soon_the_least_rate_is_known() -> None:
    """It is there after less time than rates are measured over. Else a wrong rate would stay for ever."""
    path = Path(control := Paced())
    path.send(0.0, 30)
    path.idle()
    path.on_ack(0.001, 10, 10, 500)
    path.on_ack(0.002, 30, 30, 500)
    path.send(1.0, 30)  # there is more to send
    path.on_ack(1.002, 60, 60, 500)
    assert [(sample.rate, sample.at_least) for sample in control.samples] == [
        (None, 0.0),
        (None, pytest.approx(30 / 0.005)),
        (None, 0.0),
    ]


def test_over_a_silence_no_rate_is_measured() -> None:
    """What left while a link was down, and what had left before, says nothing; what leaves later does."""
    path = Path(control := Paced())
    for at_s in (0.0, 0.1, 0.2):
        path.send(at_s, 10)
        path.on_ack(at_s + 0.05, path.sent, path.sent, 500)
    before = len(control.samples)
    for at_s in (0.3, 0.35, 2.29):
        path.send(at_s, 1)
    for i in (2, 1, 0):
        path.on_ack(2.3, path.sent - i, path.sent - i, 500)
    assert [sample.rate for sample in control.samples[before:]] == [None] * 3
    for at_s in (2.4, 2.5):
        path.send(at_s, 10)
        path.on_ack(at_s + 0.05, path.sent, path.sent, 500)
    assert control.samples[-1].rate == pytest.approx(10 / 0.05)


def test_a_pause_is_no_silence() -> None:
    """Nothing was under way that could have been answered. Else each message's first window would teach no
    rate.
    """
    path = Path(control := Paced())
    for at_s in (0.0, 0.05, 10.0, 10.05, 10.1):
        path.send(at_s, 10)
        path.on_ack(at_s + 0.05, path.sent, path.sent, 500)
    assert [sample.rate for sample in control.samples] == [pytest.approx(10 / 0.05)] * 5


def test_what_left_while_there_was_no_more_to_send_says_so() -> None:
    path = Path(control := Paced())
    path.send(1.0, 5)
    path.idle()
    path.on_ack(1.1, 5, 5, 500)
    path.send(2.0, 5)  # until one of these is answered nothing says that there is more (the draft, 4.1.1.3)
    path.on_ack(2.1, 10, 10, 500)
    path.send(2.1, 5)
    path.send(2.11, 5)
    path.on_ack(2.2, 20, 20, 500)
    assert [sample.app_limited for sample in control.samples] == [False, True, False]
    path.send(3.0, 10)
    path.idle()
    path.send(3.01, 10)
    path.on_ack(3.1, 40, 40, 500)
    assert control.samples[-1].app_limited
    path.control.window = 10.0
    path.send(4.0, 10)
    path.idle()  # the window is used up: it is the window that limits
    path.on_ack(4.1, 45, 45, 500)
    path.send(4.2, 5)
    path.on_ack(4.3, 55, 55, 500)
    assert not control.samples[-1].app_limited


def test_a_paced_path_spreads_what_its_window_lets_leave() -> None:
    path = Path(Paced(window=500.0, rate=10_000.0))
    path.granted = 1 << 16
    now_s, left = 0.0, []
    while path.allowance:
        k = path.train(now_s)
        assert k == 10, "a millisecond's worth"
        path.send(now_s, k)
        left.append(k)
        assert path.train(now_s) == 0 and path.next_s == pytest.approx(now_s + 1e-3)
        now_s = path.next_s
    assert sum(left) == 500 and now_s == pytest.approx(0.05)
    slow = Path(Paced(rate=5.0))
    assert slow.train(0.0) == 1
    slow.send(0.0, 1)
    assert slow.train(0.1) == 0 and slow.train(0.2) == 1


def test_one_more_controller_is_a_class_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real drivers, paced: a round takes as long as its datagrams do at that rate."""
    monkeypatch.setattr(paths, "CONTROLLERS", {"paced": lambda: Paced(window=256.0, rate=10_000.0)})
    monkeypatch.setattr(paths, "CONTROLLER", "paced")
    monkeypatch.setattr(crews, "LINK", "memory")
    with Crew(2, 1200) as crew:
        crew.meet()
        sent = crew.drivers[0].traffic().datagrams_sent
        began_s = time.monotonic()
        for outcome in crew.average().values():
            assert (outcome.heard == 0b11).all() and not outcome.expired
        took_s, sent = time.monotonic() - began_s, crew.drivers[0].traffic().datagrams_sent - sent
        assert sent >= 1200 and took_s >= 0.95 * 1200 / 10_000
        control = crew.drivers[0].engine.flows[1].path.control
        assert isinstance(control, Paced) and sum(sample.passed for sample in control.samples) > 1000


def test_of_departures_that_were_forgotten_no_round_trip_is_measured() -> None:
    path = Path(control := Paced(window=1e6))
    for i in range(TRAINS_MAX + 100):
        path.send(1e-3 * i, 1)
    assert len(path._departures) == TRAINS_MAX
    path.on_ack(10.0, 50, 50, 500)
    assert control.samples[-1].rtt_s is None and path.srtt_s == 0.0
    path.on_ack(10.0, 101, 101, 500)
    assert control.samples[-1].rtt_s == pytest.approx(10.0 - 0.1)


def test_over_tcp_there_is_no_pace_and_no_window_but_what_is_granted() -> None:
    path = Path()
    path.moved(streamed=True)
    assert path.streamed and path.control.rate == math.inf and path.limit <= WINDOW_FIRST
    path.send(0.0, 10)
    path.on_ack(0.02, 10, 10, 700)
    assert path.train(0.02) == path.allowance == 700
    for at in range(1, 20):  # what was lost where UDP was shut off is no reason for less
        path.send(0.1 * at, 100)
        path.on_ack(0.1 * at + 0.05, 10 + 100 * at, 10 + 50 * at, 700)
    assert path.train(3.0) == 700 and path.control.bandwidth > 0
    path.moved()
    assert not path.streamed and type(path.control) is type(Path().control)
