"""Faults as text: what is written is read back as the same value, and errors name their part."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.faults import BurstLoss, Crash, Faults, Freeze, Loss, OneWay, Partition, Slow, Window
from ragtag.core.faultspec import (
    SYNTAX,
    FaultSyntaxError,
    check_peers,
    check_sides,
    format_faults,
    parse_faults,
)
from ragtag.core.types import SEATS_MAX

probabilities = st.floats(0, 1)
times_s = st.floats(0, 1e9)
peers = st.integers(0, SEATS_MAX - 1)
above = st.floats(1e-9, 1e18)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    from_s = draw(times_s)
    until_s = draw(st.one_of(st.just(math.inf), st.floats(from_s, 1e10, exclude_min=True)))
    return Window(from_s, until_s)


bursts = st.builds(BurstLoss, st.floats(1e-6, 1), probabilities, probabilities, probabilities)
one_ways = st.builds(OneWay, peers, peers, windows()).filter(lambda way: way.source != way.dest)
all_faults = st.builds(
    Faults,
    loss=st.one_of(st.none(), st.builds(Loss, probabilities), bursts),
    latency_s=times_s,
    jitter_s=times_s,
    rate_bytes_per_s=st.one_of(st.just(math.inf), above),
    queue_bytes=st.one_of(st.just(math.inf), above),
    duplicate=probabilities,
    reorder=probabilities,
    reorder_s=times_s,
    one_way=st.lists(one_ways, max_size=3).map(tuple),
    partitions=st.lists(st.builds(Partition, st.frozensets(peers, min_size=1), windows()), max_size=3).map(
        tuple
    ),
    crashes=st.lists(st.builds(Crash, peers, times_s), max_size=3).map(tuple),
    freezes=st.lists(st.builds(Freeze, peers, times_s, times_s), max_size=3).map(tuple),
    slow=st.lists(st.builds(Slow, peers, st.floats(1, 1e6), windows()), max_size=3).map(tuple),
)


@given(all_faults)
def test_what_is_written_reads_back_as_the_same_value(faults: Faults) -> None:
    assert parse_faults(format_faults(faults)) == faults


def test_every_kind_of_fault_reads_as_documented() -> None:
    text = (
        "loss=0.1,freeze=3@10+4,kill=5@20,delay=0.05,jitter=.01,oneway=1>2@5+3,partition=0-2/5@5..8,"
        "slow=4x3@0+10,slow=1x2,duplicate=0.01,reorder=0.01/0.05,rate=5e6,queue=1e+6"
    )
    assert parse_faults(text) == Faults(
        loss=Loss(0.1),
        latency_s=0.05,
        jitter_s=0.01,
        rate_bytes_per_s=5e6,
        queue_bytes=1e6,
        duplicate=0.01,
        reorder=0.01,
        reorder_s=0.05,
        one_way=(OneWay(1, 2, Window(5, 8)),),
        partitions=(Partition(frozenset({0, 1, 2, 5}), Window(5, 8)),),
        crashes=(Crash(5, 20),),
        freezes=(Freeze(3, 10, 4),),
        slow=(Slow(4, 3, Window(0, 10)), Slow(1, 2)),
    )
    assert parse_faults("burst=0.01/0.3").loss == BurstLoss(0.01, 0.3)
    assert parse_faults("oneway=0>1@5").one_way == (OneWay(0, 1, Window(5, math.inf)),)
    assert parse_faults(" ") == Faults()


@pytest.mark.parametrize(
    "text",
    [
        "loss=1.5",
        "loss=nan",
        "loss=-0.1",
        "loss=0.1/0.2",
        "loss",
        "burst=0.1",
        "burst=0/0",
        "delay=soon",
        "delay=inf",
        "kill=5@1e999",
        "rate=0",
        "duplicate=2",
        "reorder=2/1",
        "oneway=1>1",
        "oneway=1-2",
        "partition=5-3@1+1",
        "partition=@1+1",
        "kill=5",
        "kill=1024@1",
        "kill=" + "9" * 5000 + "@1",
        "freeze=3@10",
        "freeze=-3@10+1",
        "slow=4x0.5",
        "slow=4x2@5+0",
        "slow=4x2@5..4",
    ],
)
def test_an_error_names_the_part_and_shows_how_it_is_written(text: str) -> None:
    with pytest.raises(FaultSyntaxError) as caught:
        parse_faults(f"jitter=0.1,{text}")
    message = str(caught.value)
    assert repr(text) in message
    assert SYNTAX[text.partition("=")[0]] in message


@pytest.mark.parametrize("text", ["loss=0.1,loss=0.2", "loss=0.1,burst=0.1/0.2", "delay=1,delay=1"])
def test_what_can_be_only_once_is_refused_twice(text: str) -> None:
    with pytest.raises(FaultSyntaxError, match="more than once"):
        parse_faults(text)


def test_an_unknown_fault_is_named_with_those_that_there_are() -> None:
    with pytest.raises(FaultSyntaxError, match=r"'losss' \(in 'losss=0.1'\); there are loss, burst"):
        parse_faults("losss=0.1")
    with pytest.raises(FaultSyntaxError, match="empty part"):
        parse_faults("loss=0.1,,delay=1")


def test_faults_of_a_peer_outside_the_crew_are_refused() -> None:
    check_peers(parse_faults("kill=3@1,partition=0-3@1+1"), 4)
    for text in ("kill=4@1", "freeze=4@1+1", "oneway=0>4", "partition=2-4", "slow=4x2"):
        with pytest.raises(ValueError, match="names peer 4, but the 4 peers are numbered 0 to 3"):
            check_peers(parse_faults(text), 4)


def test_a_partition_with_all_peers_on_one_side_is_refused() -> None:
    check_sides(parse_faults("partition=0-1@1+1,partition=3"), 4)
    with pytest.raises(ValueError, match="'partition=0-3' has all 4 peers on one side, and parts nobody"):
        check_sides(parse_faults("partition=1@1+1,partition=0-1/2-3@3"), 4)


@given(st.text(alphabet="lossburkifez=@+.,/>-x0123456789e ", max_size=40))
def test_any_text_is_read_or_refused_by_the_same_error(text: str) -> None:
    try:
        faults = parse_faults(text)
    except FaultSyntaxError:
        return
    assert parse_faults(format_faults(faults)) == faults
