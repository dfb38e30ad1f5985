"""What paths of one peer claim together."""

from __future__ import annotations

import math

import pytest

from ragtag.network.control.bbr import Bbr
from ragtag.network.control.controller import Delivery
from ragtag.network.control.path import Path, Uplink


def paths_of(*rates: float, found: bool = True, overflown: bool = True) -> list[Path]:
    """Paths that have found these rates, and overflown a queue, and measured round trips of 10 ms."""
    paths = [Path(Bbr(bandwidth=rate, _filled=found)) for rate in rates]
    for path in paths:
        path.srtt_s, path.control.makeup_s = 0.01, 0.01 if overflown else math.inf
    return paths


def deliver(uplink: Uplink, paths: list[Path], rate: float, from_s: float, spans: int) -> float:
    """All of them are busy for so many spans of .1 s, and deliver so much together; when that is over."""
    uplink.claim(from_s, paths, paths)
    for i in range(spans):
        paths[0].received += round(0.1 * rate)
        uplink.claim(from_s + 0.1 * (i + 1), paths, paths)
    return from_s + 0.1 * spans


def test_busy_paths_claim_no_more_together_than_was_seen_to_go_through_and_a_probe() -> None:
    uplink, paths = Uplink(), paths_of(8000.0, 9000.0, 7000.0)
    uplink.claim(1.0, paths, paths)
    assert [path.control.part for path in paths] == [1.0] * 3, "nothing was seen yet"
    deliver(uplink, paths, 9600.0, 2.0, 5)
    assert uplink.rate == pytest.approx(9600.0)
    assert all(path.control.part == pytest.approx(1.25 * 9600 / 25_000) for path in paths[:1])
    assert all(path.control.fair == 8000.0 and path.control.busy == 3 for path in paths)


def test_while_nothing_overflows_each_claims_what_it_has_found() -> None:
    uplink, paths = Uplink(), paths_of(8000.0, 9000.0, overflown=False)
    deliver(uplink, paths, 4000.0, 2.0, 5)
    assert [path.control.part for path in paths] == [1.0, 1.0]
    paths[1].control.makeup_s = 0.004
    uplink.claim(3.0, paths, paths)
    assert [path.control.part for path in paths] == [pytest.approx(5000 / 17_000, rel=0.1)] * 2


def test_paths_that_claim_more_than_was_seen_to_go_through_are_crowded() -> None:
    """What stands in a queue then is their own. Until it was seen nobody knows."""
    uplink, paths = Uplink(), paths_of(4000.0, 4000.0, overflown=False)
    uplink.claim(1.0, paths, paths)
    assert all(path.control.crowded for path in paths), "nothing was seen yet"
    deliver(uplink, paths, 7000.0, 2.0, 5)
    assert not any(path.control.crowded for path in paths)
    deliver(uplink, paths, 6000.0, 3.0, 40)
    assert all(path.control.crowded for path in paths)
    uplink.claim(9.0, paths[:1], paths)
    assert not paths[0].control.crowded, "alone it drains its own in each cycle"
    paths += paths_of(10.0, found=False)
    deliver(uplink, paths, 9000.0, 9.0, 5)
    assert all(path.control.crowded for path in paths), "one of them still looks for its rate"


def test_of_unlike_paths_each_counts_as_much_as_it_may_send() -> None:
    uplink, paths = Uplink(), paths_of(9000.0, 1000.0)
    deliver(uplink, paths, 6000.0, 2.0, 5)
    assert paths[1].control.part == pytest.approx(1.25 * 6000 / (9000 + 5000))


def test_what_all_take_at_once_is_seen_to_become_more_at_once_and_less_after_a_while() -> None:
    uplink, paths = Uplink(), paths_of(8000.0, 8000.0)
    over_s = deliver(uplink, paths, 5000.0, 1.0, 5)
    over_s = deliver(uplink, paths, 8000.0, over_s, 2)
    assert uplink.rate == pytest.approx(8000.0, rel=0.01)
    deliver(uplink, paths, 5000.0, over_s, 40)
    assert uplink.rate == pytest.approx(5000.0, rel=0.01)


def test_one_path_alone_and_paths_that_still_find_their_rate_may_send_what_they_would() -> None:
    uplink, paths = Uplink(), paths_of(8000.0, 8000.0)
    deliver(uplink, paths, 2000.0, 1.0, 5)
    assert paths[0].control.part < 0.2
    deliver(uplink, paths[:1], 100.0, 1.6, 50)
    assert paths[0].control.part == 1.0 and uplink.rate == pytest.approx(2000.0)
    new = paths_of(8000.0, found=False)
    uplink.claim(9.0, paths + new, paths + new)
    assert [path.control.part for path in paths + new] == [1.0] * 3


def test_what_comes_through_between_two_messages_is_no_rate() -> None:
    """One path was busy alone, and then none: what was delivered meanwhile took longer, or a part of it."""
    uplink, paths = Uplink(), paths_of(8000.0, 8000.0)
    uplink.claim(1.0, paths, paths)
    paths[0].received += 100
    uplink.claim(1.01, paths[:1], paths)
    uplink.claim(1.02, [], paths)
    uplink.claim(2.0, paths, paths)
    uplink.claim(2.02, paths, paths)
    assert uplink.rate == float("inf")
    deliver(uplink, paths, 9000.0, 2.05, 1)
    assert uplink.rate > 5000.0


def test_while_nothing_comes_through_or_another_process_takes_a_seat_nothing_is_forgotten() -> None:
    uplink, paths = Uplink(), paths_of(8000.0, 8000.0)
    uplink.claim(1.0, paths, paths)
    paths[0] = paths_of(8000.0)[0]
    paths[1].received -= 500  # as the counts of a new process begin
    uplink.claim(1.1, paths, paths)
    assert uplink.rate == float("inf")
    over_s = deliver(uplink, paths, 9000.0, 1.1, 2)
    deliver(uplink, paths, 0.0, over_s, 50)
    assert uplink.rate == pytest.approx(9000.0)


@pytest.mark.parametrize("rtt_s", [0.1, 1e-3])  # its product, or trains, decide on the window
def test_a_part_bounds_rate_and_window(rtt_s: float) -> None:
    whole, half = (Bbr(bandwidth=1e4, min_rtt_s=rtt_s, window=5000.0, _filled=True) for _ in range(2))
    for path, part in ((whole, 1.0), (half, 0.5)):
        path.part = part
        path._set(Delivery(1.0, 8, 8, 32, 4096, rtt_s, rtt_s, rtt_s, None, False))
    assert half.rate == pytest.approx(whole.rate / 2) and half.window == pytest.approx(whole.window / 2)
