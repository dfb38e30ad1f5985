"""Agents over real loopback sockets, all turned by the test's own thread, or two by one beside it."""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import msgspec

from ragtag.core.wire import VERSION
from ragtag.network.membership.agent import Agent, Told
from ragtag.network.membership.datagrams import Datagrams
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.passes import Passes, issued, proof_of, public_of
from ragtag.protocols.membership.roster import NO_SEAT, Card, Roster, encode_card
from ragtag.protocols.membership.types import Address, Changed, Identity, Limits, Status
from tests.network.crew import PATIENCE_S

KEY = bytes(range(32))


class Agents:
    """``n`` agents with seats that know each other's addresses; use it as a context manager.

    signing: of a crew that takes persons.
    persons: who a peer is in it, if not its holder.
    ends_unix_s: when such a one's pass ends, if not in an hour.
    told: what each of them told, in order.
    """

    def __init__(self, n: int, key: bytes = KEY, limits: Limits | None = None, signing: bytes = b"") -> None:
        self._key, self._limits, self._signing = key, limits, signing
        self.persons: dict[int, str] = {}
        self.ends_unix_s: dict[int, int] = {}
        self.agents: dict[int, Agent] = {}
        self.told: dict[int, list[Told]] = {}
        self.addresses: dict[int, Address] = {}
        self.founded = n
        entries: list[Address] = []
        for peer in range(n):
            self.start(peer, list(entries), peer)
            entries.append(self.addresses[peer])

    def start(
        self, peer: int, entries: list[Address], seat: int = NO_SEAT, name: str = "", port: int = 0
    ) -> Agent:
        """Start an agent that enters there, with a seat. port: where its peer takes data (0: nowhere)."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        address: Address = sock.getsockname()
        name = name or f"otter-{peer}"
        epoch = time.time_ns() >> 2
        card = Card(
            VERSION, seat, 0, 100 + peer, seat >= 0, "127.0.0.1", port or 20000 + peer, 0, self.founded, 5
        )
        passes = None
        if self._signing:
            seed, session, now_s = bytes([peer]) * 32, bytes([1]) * 33, time.time()
            person = self.persons.get(peer, "holder")
            ends_unix_s = self.ends_unix_s.get(peer, int(now_s) + 3600)
            shown = issued(self._signing, person, public_of(seed), now_s, ends_unix_s)
            passes = Passes(public_of(self._signing), shown)
            proof = proof_of(shown, seed, name, card.epoch, session)
            card = msgspec.structs.replace(card, key=session, proof=proof)
        identity = Identity(name, address, epoch, self._key, encode_card(card), seed=peer)
        agent = Agent(
            Membership(identity, self._limits, passes), Roster(name, epoch, bool(card.key)), Datagrams(sock)
        )
        agent.roster.claim(card)
        self.agents[peer], self.told[peer], self.addresses[peer] = agent, [], address
        agent.join(agent.now_s(), entries, PATIENCE_S)
        return agent

    def kill(self, peer: int) -> None:
        """It ends without a word."""
        self.agents.pop(peer).close()

    def turn(self, wait_s: float = 0.05) -> None:
        """Turn those that have something to do."""
        poll = select.poll()
        for agent in self.agents.values():
            poll.register(agent.fileno(), select.POLLIN)
        due_s = min(agent.due_s - agent.now_s() for agent in self.agents.values())
        poll.poll(1e3 * max(0.0, min(wait_s, due_s)))
        for peer, agent in self.agents.items():
            self.told[peer] += agent.turn(agent.now_s())
            assert agent.over or agent.due_s < math.inf, "nothing would wake it but another's datagram"

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Turn them until something is true; fail after ``PATIENCE_S``."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < give_up_s, f"not {what} within {PATIENCE_S} s"
            self.turn()

    def agree(self) -> bool:
        """Whether each holds exactly these for alive, and nobody for suspect."""
        names = tuple(sorted(agent.machine.me.name for agent in self.agents.values()))
        return all(agent.machine.live() == names for agent in self.agents.values())

    def believed(self, peer: int, name: str) -> list[Status]:
        """What one of them came to believe of a member, in order."""
        return [
            told.member.status
            for told in self.told[peer]
            if isinstance(told, Changed) and told.member.name == name
        ]

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for agent in self.agents.values():
            agent.close()


@contextmanager
def turned(signing: bytes) -> Iterator[Agents]:
    """Two members that a thread turns. signing: of a crew that takes persons; empty: of an open one."""
    with Agents(2, signing=signing) as agents:
        agents.until(agents.agree, "all found each other")
        over = threading.Event()

        def turn() -> None:
            while not over.is_set():
                agents.turn(0.02)

        thread = threading.Thread(target=turn)
        thread.start()
        try:
            yield agents
        finally:
            over.set()
            thread.join(PATIENCE_S)
