"""What membership tells, applied to a driver's flows; and faults that hold for membership, too."""

from __future__ import annotations

import gc
import socket
import tracemalloc
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from ragtag.core.faults import Faults, Loss, Partition, Window
from ragtag.core.types import Joined, Left, MessageKey, Noted, Visits
from ragtag.core.wire import VERSION
from ragtag.network.driver.engine import APART_MAX, News, Reachability
from ragtag.network.link.flow import ENDINGS_APART_MAX, Flow
from ragtag.network.link.inject import Injector
from ragtag.network.membership.agent import Agent
from ragtag.network.membership.datagrams import Datagrams
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.roster import NO_SEAT, Card, Roster, decode_card, encode_card
from ragtag.protocols.membership.types import Changed, Failed, Identity, Member, PutOut, Remarked, Status
from tests.network.agents import KEY

MINE = Card(VERSION, 0, 0, 99, True, "127.0.0.1", 6000, 0, 3, 7)


@pytest.fixture
def agent() -> Iterator[Agent]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    made = Agent(Membership(Identity("me", sock.getsockname(), 50, KEY)), Roster("me", 50), Datagrams(sock))
    made.join(0.0, [], 1.0)
    made.describe(0.0, MINE)
    yield made
    made.close()


def people(
    agent: Agent, faults: Faults | None = None, inside: tuple[int, ...] = (1, 2)
) -> tuple[Reachability, dict[int, Flow]]:
    flows = {peer: Flow(peer, ("127.0.0.1", 6000 + peer)) for peer in (1, 2)}
    return Reachability(0, agent, flows, Injector(faults or Faults(), 1, 0), inside), flows


def member(
    seat: int,
    *,
    name: str = "",
    epoch: int = 100,
    averaging: bool = True,
    term: int = 0,
    host: str = "10.0.0.9",
) -> Member:
    card = replace(MINE, seat=seat, averaging=averaging, term=term, host=host, port=6000 + seat, epoch=epoch)
    return Member(name or f"p{seat}", ("127.0.0.1", 4000 + seat), epoch, 0, Status.ALIVE, encode_card(card))


def told(
    of: Reachability, who: Member, was: Status | None = None, status: Status = Status.ALIVE
) -> list[News]:
    from dataclasses import replace as with_status

    return list(of.take(1.0, Changed(with_status(who, status=status), was)))


def test_a_founder_is_reached_where_it_says_and_is_no_news(agent: Agent) -> None:
    here, flows = people(agent)
    before = flows[1]
    before.path.mtu.packets = 7
    assert told(here, member(1)) == []  # the node counts on it already
    assert flows[1] is before and flows[1].address == ("10.0.0.9", 6001) and flows[1].process == 100
    assert before.path.mtu.packets == 1, "the way to another address may take smaller datagrams"
    before.path.mtu.packets = 7
    assert told(here, member(1)) == []
    assert before.path.mtu.packets == 7


def test_a_newcomer_visits_then_joins(agent: Agent) -> None:
    here, flows = people(agent)
    assert told(here, member(3, averaging=False)) == [Noted("comes", 3, "p3"), Visits(3)]
    assert flows[3].address == ("10.0.0.9", 6003) and not flows[3].mute
    assert told(here, member(3)) == [Noted("takes part", 3, "p3"), Joined(3)]


def test_one_that_was_on_its_way_in_when_this_peer_came_is_told_of_when_it_takes_part(agent: Agent) -> None:
    """Several come at once: each knows the others before they average, and then has to wait for them."""
    agent.roster.changed(member(2, averaging=False), None)  # heard by whoever turned the agent before
    here, flows = people(agent, inside=(1,))
    assert told(here, member(2)) == [Noted("takes part", 2, "p2"), Joined(2)]
    assert not flows[2].mute


def test_who_is_dead_is_sent_nothing_more_and_heard_again_when_it_is_back(agent: Agent) -> None:
    here, flows = people(agent)
    told(here, member(1))
    flow, here.moved = flows[1], False
    assert told(here, member(1), Status.SUSPECT, Status.DEAD) == [Noted("declared dead", 1, "p1"), Left(1)]
    assert flow.mute and not flow.queue and not flow.endings
    assert here.moved, "its address may be another's by now"
    back = told(here, member(1), Status.DEAD)
    assert [type(news) for news in back] == [Noted, Joined]
    assert flows[1] is flow and not flow.mute  # the same process: what was measured holds


def test_from_one_that_was_put_out_nothing_is_taken_until_membership_believes_it_again(agent: Agent) -> None:
    here, flows = people(agent)
    told(here, member(1))
    gone = member(1)
    told(here, gone, status=Status.LEFT)
    assert list(here.take(1.0, PutOut(gone, "its token has ended"))) == [
        Noted("put out", 1, "p1: its token has ended")
    ]
    assert flows[1].barred and not flows[2].barred
    told(here, member(1))  # as where a clock was set
    assert not flows[1].barred
    told(here, gone, status=Status.LEFT)
    list(here.take(1.0, PutOut(gone, "")))
    told(here, member(1, name="heir", epoch=200, term=1))
    assert not flows[1].barred, "another process has its seat"


def test_another_process_in_a_seat_begins_anew(agent: Agent) -> None:
    here, flows = people(agent)
    told(here, member(1))
    flow = flows[1]
    told(here, member(1), Status.SUSPECT, Status.DEAD)
    heir = member(1, name="heir", epoch=200, averaging=False, term=1, host="10.0.0.8")
    assert told(here, heir)[-1] == Visits(1)
    assert flows[1] is not flow and flows[1].address == ("10.0.0.8", 6001) and flows[1].process == 200
    assert told(here, member(1, name="heir", epoch=200, term=1, host="10.0.0.8"))[-1] == Joined(1)


def test_a_process_that_comes_back_to_its_seat_goes_on_where_it_was(agent: Agent) -> None:
    """It was thought dead, a newcomer claimed the seat, and it refuted: new counts would deafen both ends."""
    here, flows = people(agent)
    told(here, member(1))
    flow = flows[1]
    flow.path.sent = flow.path.acked = flow.path.received = 4000
    flow.inbound.enter(100)
    flow.inbound.count(1.0, 1, 3000, 3000)
    told(here, member(1), Status.SUSPECT, Status.DEAD)
    heir = member(1, name="heir", epoch=200, averaging=False, term=1, host="10.0.0.8")
    assert told(here, heir)[-1] == Visits(1)
    assert flows[1].path.sent == 0 and flows[1].inbound.highest == 0
    back = told(here, member(1), Status.DEAD)  # who averages stays before who only comes
    assert back[-1] == Joined(1)
    assert flows[1] is flow and not flow.mute and flow.process == 100
    assert (flow.path.sent, flow.inbound.highest, flow.inbound.received) == (4000, 3000, 3000)


def test_of_processes_without_a_seat_no_more_are_kept_than_a_bound(agent: Agent) -> None:
    here, flows = people(agent)
    for term in range(1, APART_MAX + 20):
        told(here, member(1, name=f"p{term}", epoch=term, term=term))
        flows[1].inbound.enter(term)
    assert len(here._apart) == APART_MAX


def test_who_lost_its_seat_says_so_gives_it_up_and_stays_told(agent: Agent) -> None:
    here, flows = people(agent)
    heir = member(0, name="heir", epoch=200, term=1)
    assert told(here, heir) == [Noted("lost its seat", 0, "seat 0 is heir's")]
    assert here.lost_seat.startswith("seat 0 is heir's: ") and "start it again" in here.lost_seat
    said = decode_card(agent.machine.me.metadata)
    assert said is not None and said.seat == NO_SEAT and not said.averaging
    assert 0 not in flows
    assert told(here, member(0, name="heir", epoch=200, term=1)) == []
    told(here, heir, Status.SUSPECT, Status.DEAD)
    assert here.lost_seat


def test_who_is_no_member_any_more_averages_no_more(agent: Agent) -> None:
    here, _ = people(agent)
    assert list(here.take(1.0, Failed("another peer is called 'me'"))) == [
        Noted("no member any more", 0, "another peer is called 'me'")
    ]
    assert here.lost_seat == "another peer is called 'me'"


def test_who_never_came_is_left_out_in_the_end_and_let_in_when_it_comes(agent: Agent) -> None:
    flows = {peer: Flow(peer, ("127.0.0.1", 6000 + peer)) for peer in (1, 2, 3)}
    agent.roster.changed(member(1), None)  # heard of before there was a driver
    here = Reachability(0, agent, flows, Injector(Faults(), 1, 0), (1, 2, 3), expected_until_s=5.0)
    assert told(here, member(2), status=Status.DEAD) == []  # nothing was known of it, so nothing is lost
    assert list(here.turn(4.9)) == []
    news = list(here.turn(5.0))
    assert [(n.what, n.peer) if isinstance(n, Noted) else n for n in news] == [
        ("never came", 2), Left(2), ("never came", 3), Left(3),
    ]  # fmt: skip
    assert flows[3].mute and not flows[1].mute
    assert list(here.turn(60.0)) == []
    assert told(here, member(3)) == [Noted("takes part", 3, "p3"), Joined(3)]
    assert not flows[3].mute


def test_remarks_are_noted_with_the_seat(agent: Agent) -> None:
    here, _ = people(agent)
    told(here, member(2))
    assert list(here.take(1.0, Remarked("healed", "p2", "for 3 s"))) == [Noted("healed", 2, "p2 for 3 s")]
    assert list(here.take(1.0, Remarked("flooding", "", "strangers"))) == [Noted("flooding", -1, "strangers")]
    assert list(here.take(1.0, Remarked("refuted", "me", "x"))) == [Noted("refuted", 0, "me x")]


def test_injected_faults_hold_for_membership(agent: Agent) -> None:
    def known(faults: Faults) -> Reachability:
        here, _ = people(agent, faults)
        return here

    cut = known(Faults(partitions=(Partition(frozenset({0}), Window(5.0, 9.0)),)))
    patch = {"p1": member(1)}
    with pytest.MonkeyPatch.context() as hold:
        hold.setattr(agent.machine, "members", lambda: patch)
        told(cut, member(1))
        address = member(1).address
        assert [agent.lost(address, t) for t in (1.0, 6.0, 9.5)] == [False, True, False]
        assert not agent.lost(("127.0.0.1", 1), 6.0)  # nobody's
        lossy = known(Faults(loss=Loss(0.3)))
        told(lossy, member(1))
        lost = sum(agent.lost(address, 1.0) for _ in range(2000))
        assert 520 < lost < 680  # 0.3 of 2000, within 4 standard deviations
        known(Faults())
        assert not any(agent.lost(address, 1.0) for _ in range(100))


@pytest.mark.slow
def test_churn_fills_no_memory(agent: Agent) -> None:
    """Process after process has a seat, averages for long, dies, and another one comes: it levels off."""
    of, flows = people(agent, inside=())

    def churn(processes: range) -> int:
        for epoch in processes:
            who = member(1, name=f"p{epoch}", epoch=epoch)
            told(of, who)
            flows[1].inbound.enter(epoch)
            for number in range(8 * ENDINGS_APART_MAX):
                flows[1].inbound.new_ending(MessageKey(0, epoch, 0, number), number)
            told(of, who, Status.ALIVE, Status.DEAD)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = churn(range(1000, 1000 + 20))
        full = churn(range(2000, 2000 + APART_MAX))
        after = churn(range(3000, 3000 + APART_MAX))
    finally:
        tracemalloc.stop()
    assert full - before < APART_MAX * ENDINGS_APART_MAX * 600
    assert after - full < 1 << 20, "there it levels off"
    assert len(of._apart) <= APART_MAX
    assert all(len(flow.inbound.endings) <= ENDINGS_APART_MAX for flow in of._apart.values())
    roster = agent.roster
    assert len(roster.seats) <= 2 and not roster._claims
    assert len(flows) == 2
