"""Membership over real sockets: finding each other, deaths, leaves, and what strangers send."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from ragtag.core.seed import generator
from ragtag.network.link.streams import MAGIC, framed
from ragtag.network.link.udp import bound
from ragtag.network.membership.agent import READS_MAX, Agent
from ragtag.network.membership.datagrams import Datagrams
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.roster import Roster
from ragtag.protocols.membership.types import Address, Failed, Identity, Status, Transmit
from ragtag.protocols.membership.wire import DATAGRAM_BYTES_MAX, Introduce, Ping, Seal, record_of
from tests.network.agents import KEY, Agents
from tests.network.crew import PATIENCE_S, until

FLOOD = 600


@pytest.fixture
def three() -> Iterator[Agents]:
    with Agents(3) as agents:
        agents.until(agents.agree, "all found each other")
        yield agents


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


# -- Coming and going


def test_agents_find_each_other(three: Agents) -> None:
    three.until(lambda: all(agent.entered for agent in three.agents.values()), "all in")
    assert all(not agent.failure and not agent.over for agent in three.agents.values())
    assert all(three.agents[p].machine.members()["otter-2"].metadata for p in (0, 1))


def test_a_dead_one_is_declared(three: Agents) -> None:
    three.kill(1)
    three.until(three.agree, "the dead one declared by all")
    for peer in (0, 2):
        assert Status.DEAD in three.believed(peer, "otter-1")
        assert Status.LEFT not in three.believed(peer, "otter-1")


def test_a_leave_is_announced(three: Agents) -> None:
    leaving = three.agents[1]
    leaving.leave(leaving.now_s())
    three.until(lambda: leaving.over, "it had said good-bye")
    three.kill(1)
    three.until(three.agree, "all had heard it")
    assert all(Status.LEFT in three.believed(peer, "otter-1") for peer in (0, 2))
    assert all(Status.DEAD not in three.believed(peer, "otter-1") for peer in (0, 2))


def test_one_that_comes_late_is_let_in_by_anybody(three: Agents) -> None:
    three.start(3, [three.addresses[2]])
    three.until(three.agree, "all knew it")


def test_a_description_reaches_all(three: Agents) -> None:
    agent = three.agents[0]
    card = agent.roster.mine
    assert card is not None
    agent.describe(agent.now_s(), card)
    mine = agent.machine.me.metadata
    three.until(
        lambda: all(
            three.agents[peer].machine.members()["otter-0"].metadata == mine
            and three.agents[peer].machine.members()["otter-0"].incarnation > 0
            for peer in (1, 2)
        ),
        "both had heard it",
    )


def test_two_of_one_name_the_second_is_told(three: Agents) -> None:
    measured = three.agents.values()
    three.until(lambda: all(agent.machine.period_s < 1.0 for agent in measured), "round trips were known")
    second = three.start(7, [three.addresses[0]], name="otter-1")
    three.until(lambda: second.over, "the second was refused")
    host, port = three.addresses[1]
    assert second.failure == (
        f"two peers are called 'otter-1': the other one, at {host}:{port}, is alive; give this "
        "peer another name"
    )
    three.kill(7)
    assert Status.DEAD not in three.believed(0, "otter-1")
    three.until(three.agree, "the crew went on")


def test_another_crews_key_is_told_apart(three: Agents) -> None:
    with Agents(0, key=bytes(32)) as other:
        foreign = other.start(0, [three.addresses[0]])
        foreign.join(foreign.now_s(), [three.addresses[0]], 1.5)
        three.agents[99] = foreign
        three.told[99] = []
        three.until(lambda: foreign.over, "it gave up")
        del three.agents[99]
    assert "belongs to another crew (its key differs)" in foreign.failure
    assert three.agree()


# -- What strangers send


def garbage(seed: int, agents: Agents, count: int) -> list[bytes]:
    """Random bytes; sound datagrams with bits flipped, cut, or under another key."""
    draw = generator(seed, "garbage")
    epoch = agents.agents[0].machine.me.epoch
    made = []
    for i in range(count):
        seal = Seal(KEY if i % 3 else bytes(32), 1 + i)
        data = bytearray(seal.seal(Ping("otter-1", i, []), epoch))
        kind = i % 4
        if kind == 0:
            data = bytearray(draw.bytes(int(draw.integers(0, 1500))))
        elif kind == 1:
            data[int(draw.integers(0, len(data)))] ^= int(draw.integers(1, 256))
        elif kind == 2:
            data = data[: int(draw.integers(0, len(data)))]
        made.append(bytes(data))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_garbage_and_foreign_datagrams_change_nothing(
    three: Agents, stranger: socket.socket, seed: int
) -> None:
    before = {peer: len(told) for peer, told in three.told.items()}
    known = {peer: set(agent.machine.members()) for peer, agent in three.agents.items()}
    for data in garbage(seed, three, 400):
        for peer in three.agents:
            stranger.sendto(data, three.addresses[peer])
        three.turn(0.0)
    three.until(three.agree, "all agreed")
    for peer, agent in three.agents.items():
        assert set(agent.machine.members()) == known[peer]
        dead = [s for n in known[peer] for s in three.believed(peer, n)[before[peer] :] if s >= Status.DEAD]
        assert not dead
        assert sum(agent.machine.counts.values()) > 0 and not agent.failure


def test_one_turn_reads_no_more_than_its_share_of_a_flood(stranger: socket.socket) -> None:
    with Agents(1) as alone:
        agent = alone.agents[0]
        taken: list[bytes] = []
        step = agent.machine.step

        def count(now_s: float, event: object) -> list[object]:
            if hasattr(event, "data"):
                taken.append(event.data)
            return step(now_s, event)  # type: ignore[return-value,arg-type]

        agent.machine.step = count  # type: ignore[method-assign,assignment]
        for _ in range(3 * READS_MAX):
            stranger.sendto(b"otter", alone.addresses[0])
        turns = []
        while len(taken) < 2 * READS_MAX:
            had = len(taken)
            agent.turn(agent.now_s())
            turns.append(len(taken) - had)
        assert max(turns) == READS_MAX
        stranger.sendto(b"x" * 4000, alone.addresses[0])  # longer than any: read cut, and refused
        alone.until(lambda: any(len(data) > DATAGRAM_BYTES_MAX for data in taken), "read")
        assert max(map(len, taken)) == DATAGRAM_BYTES_MAX + 1


def test_a_flood_of_strangers_is_not_answered_without_limit(three: Agents, stranger: socket.socket) -> None:
    """What is sent in vain costs the flooder more than the crew, and takes nobody's life."""
    epoch = three.agents[0].machine.me.epoch
    began_s = time.monotonic()
    for i in range(FLOOD):
        stranger.sendto(Seal(KEY, 10_000 + i).seal(Ping("nobody", i, []), epoch), three.addresses[0])
        if i % 20 == 0:
            three.turn(0.0)
    three.until(three.agree, "all agreed")
    took_s = time.monotonic() - began_s
    stranger.setblocking(False)
    answers = 0
    while True:
        try:
            stranger.recv(2048)
        except BlockingIOError:
            break
        answers += 1
    allowed = three.agents[0].machine._core.limits.datagrams_per_s_max
    assert 0 < answers <= allowed * (1 + took_s) < allowed * 60
    assert set(three.agents[0].machine.members()) == {"otter-0", "otter-1", "otter-2"}


# -- Addresses


@pytest.fixture
def alone() -> Iterator[Agent]:
    with Agents(1) as agents:
        yield agents.agents[0]


@pytest.mark.parametrize(
    "dest",
    [
        ("otters.invalid", 4000), ("::1", 4000), ("a" * 255, 4000), ("a\0b", 4000), ("", 4000), (".", 1),
        ("1.2.3", 4000), ("\ud800", 4), ("127.0.0.1%x", 4000), ("255.255.255.255", 4000), ("224.0.0.1", 4000),
        ("0.0.0.0", 4000), ("127.0.0.1", 0), ("127.0.0.1", 65536),
    ],
)  # fmt: skip
def test_no_name_that_a_member_tells_is_looked_up(alone: Agent, dest: Address) -> None:
    asked: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *args, **more: asked.append(args))
        alone._send(Transmit(dest, b"otter"))
    assert not asked and not alone.failures.count


def test_one_whose_entries_are_all_silent_fails_by_its_deadline() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody, Agents(0) as agents:
        nobody.bind(("127.0.0.1", 0))
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        identity = Identity("late", sock.getsockname(), 7, KEY)
        agent = Agent(Membership(identity), Roster("late", 7), Datagrams(sock))
        agents.agents[0] = agent
        told: list[object] = []
        began_s = time.monotonic()
        agent.join(agent.now_s(), [nobody.getsockname()], 0.5)
        agent.run_until(lambda: agent.entered, 20.0, told.append)
        assert 0.5 <= time.monotonic() - began_s < 10.0
        assert [type(t) for t in told] == [Failed]
        assert agent.failure.startswith(f"no member answered at 127.0.0.1:{nobody.getsockname()[1]}")


def test_one_whose_pass_ends_by_the_wall_clock_leaves_and_says_why() -> None:
    with Agents(2, signing=bytes(range(32))) as agents:
        agents.persons[2], agents.ends_unix_s[2] = "alice", int(time.time()) + 2
        alice = agents.start(2, list(agents.addresses.values()))
        agents.until(agents.agree, "all found each other")
        agents.until(lambda: alice.over, "her pass ended")
        assert time.time() >= agents.ends_unix_s[2]
        failed = [told for told in agents.told[2] if isinstance(told, Failed)]
        assert [told.barred for told in failed] == [True] and "alice's token has ended" in failed[0].reason
        del agents.agents[2]
        agents.until(agents.agree, "the others went on")
        assert agents.believed(0, "otter-2")[-1] is Status.LEFT and not agents.agents[0].over
        alice.close()


def test_who_connects_is_a_stranger_until_something_of_the_crews_comes() -> None:
    identity = Identity("here", ("127.0.0.1", 1), 7, KEY)
    sock = Datagrams(bound(socket.SOCK_DGRAM, ("127.0.0.1", 0)), listens=True)
    agent = Agent(Membership(identity), Roster("here", 7), sock)
    try:
        agent.join(0.0, [], 1.0)
        with socket.create_connection(sock.address) as other:
            garbage = bytes(100)
            other.sendall(MAGIC + framed(garbage, 100).tobytes())

            def told(strange: bool) -> bool:
                agent.turn(agent.now_s())
                found = list(sock.streams._streams)
                return bool(found) and sock.streams.strange(found[0]) is strange

            until(lambda: told(True), "a connection")
            data = Seal(KEY, 9).seal(Introduce(record_of(agent.machine.me)), 0)
            other.sendall(framed(data, len(data)).tobytes())
            until(lambda: told(False), "a datagram of the crew's")
            assert agent.machine.counts["malformed"] == 1
            other.settimeout(PATIENCE_S)
            assert len(other.recv(2000)) <= len(data) + 2, "nobody is answered with more than came"
    finally:
        agent.close()
