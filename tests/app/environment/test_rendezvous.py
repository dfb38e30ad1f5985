"""Peers tell each other where they are, and their launcher that they are ready."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from ragtag.app.environment import (
    Announcement,
    Announcer,
    Place,
    Reached,
    Rendezvous,
    exchange_addresses,
    place_from_environment,
    reachable_host,
    read_announcements,
)
from ragtag.app.environment.rendezvous import Known

SRC = Path(__file__).parents[3] / "src"
KNOWN = Place(1, 2, "brave-otter", peers=(("::1", 4000), ("::1", 4001)))


def test_addresses_that_are_known_are_not_asked_for() -> None:
    assert exchange_addresses(KNOWN, ("127.0.0.1", 9), deadline_s=1).addresses == list(KNOWN.peers or ())
    alone = Place(0, 1, "alone")
    assert exchange_addresses(alone, ("127.0.0.1", 9), deadline_s=1).addresses == [("127.0.0.1", 9)]
    assert reachable_host(alone) == "127.0.0.1"


def test_on_several_machines_a_peer_is_reached_at_the_interface_that_leads_to_the_store() -> None:
    place = Place(0, 2, "c", rendezvous=Rendezvous("127.0.0.1", 29500, False, "p"), one_machine=False)
    assert reachable_host(place) == "127.0.0.1"  # the way to loopback is loopback


def test_a_peer_is_reached_where_its_launcher_has_told_the_others() -> None:
    elsewhere = Place(1, 2, "c", peers=(("192.0.2.7", 4000), ("192.0.2.8", 4001)), one_machine=False)
    assert reachable_host(elsewhere) == "192.0.2.8"
    assert reachable_host(KNOWN) == "::1"


def test_the_launcher_is_told_how_far_a_peer_is() -> None:
    read, write = os.pipe()
    try:
        announcer = Announcer(3, write)
        announcer.tell(Reached.JOINED, 5)
        announcer.tell(Reached.READY, "rps+repair")
        announcer.tell(Reached.READY)
        Announcer(0, write).tell(Reached.AVERAGED)
        assert read_announcements(os.read(read, 200)) == [
            Announcement(3, Reached.JOINED, "5"),
            Announcement(3, Reached.READY, "rps+repair"),
            Announcement(3, Reached.READY),
            Announcement(0, Reached.AVERAGED),
        ]
    finally:
        os.close(read)
        os.close(write)
    Announcer(0, None).tell(Reached.READY)  # no launcher: nothing to tell


@pytest.mark.parametrize(
    "data",
    [b"", b"\n\n", b"x\n", b"7\n", b"-1 ready\n", b"12345 ready\n", b"1 ready \x1b[2J\n", b"1 asleep\n"],
)
def test_what_is_no_announcement_is_left_out(data: bytes) -> None:
    assert read_announcements(data + b"7 ready\n") == [Announcement(7, Reached.READY)]


@given(st.binary(max_size=200))
def test_any_bytes_are_announcements_or_left_out(data: bytes) -> None:
    for told in read_announcements(data):
        assert 0 <= told.number < 10_000
        assert len(told.detail) <= 40


EXCHANGE = """
import sys
from dataclasses import replace
from ragtag.app.environment import exchange_addresses, place_from_environment
place = place_from_environment()
addresses = exchange_addresses(place, ("127.0.0.1", 5000 + place.rank), 60.0).addresses
sys.stdout.write(f"{place.rank} {addresses}" + chr(10))  # one write: the others write to the same pipe
"""
ALL_THREE = [("127.0.0.1", 5000), ("127.0.0.1", 5001), ("127.0.0.1", 5002)]


def _env(**more: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("RAGTAG_", "TORCHELASTIC"))}
    return keep | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"} | more


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_peers_without_an_agent_exchange_addresses_through_rank_0s_store() -> None:
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}

    def peer(rank: int) -> Known:
        place = place_from_environment(env | {"RANK": str(rank)})
        assert place is not None
        data, member = ("127.0.0.1", 5000 + rank), ("127.0.0.1", 6000 + rank)
        return exchange_addresses(place, data, deadline_s=20.0, my_member=member)

    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(peer, range(3), timeout=30))
    assert [known.addresses for known in told] == [ALL_THREE] * 3
    members = tuple(("127.0.0.1", 6000 + rank) for rank in range(3))
    assert [known.members for known in told] == [members] * 3
    assert len({known.key for known in told}) == 1
    assert told[0].key is not None
    assert len(told[0].key) == 32


def test_peers_that_do_not_come_are_named() -> None:
    place = Place(0, 3, "c", rendezvous=Rendezvous("127.0.0.1", _free_port(), True, "ragtag/c"))
    with pytest.raises(TimeoutError, match=r"no address from peer 1, 2 of 3 within 0.2 s"):
        exchange_addresses(place, ("127.0.0.1", 5), deadline_s=0.2)


def test_a_store_that_does_not_answer_is_named() -> None:
    place = Place(1, 2, "c", rendezvous=Rendezvous("127.0.0.1", port := _free_port(), False, "ragtag/c"))
    with pytest.raises(TimeoutError, match=f"torchrun's store at 127.0.0.1:{port} did not answer"):
        exchange_addresses(place, ("127.0.0.1", 5), deadline_s=0.5)


def test_peers_that_were_told_of_other_numbers_of_peers_say_so() -> None:
    """Each waits for a peer that never comes; none takes an address of the other crew."""
    port = _free_port()

    def peer(rank: int) -> None:
        way = Rendezvous("127.0.0.1", port, rank == 0, "ragtag/c")
        exchange_addresses(Place(rank, 2 + rank, "c", rendezvous=way), ("127.0.0.1", 5), deadline_s=3.0)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(peer, 0), threads.submit(peer, 1)
        with pytest.raises(TimeoutError, match=r"peer 1 of 2 .* WORLD_SIZE is 3 elsewhere: make them equal"):
            first.result(30)
        with pytest.raises(TimeoutError, match=r"peer 0, 2 of 3 .* WORLD_SIZE is 2 elsewhere"):
            second.result(30)


def test_a_store_that_ends_while_peers_wait_for_each_other_is_named() -> None:
    port = _free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    place = Place(1, 2, "c", rendezvous=Rendezvous("127.0.0.1", port, False, "ragtag/c"))
    with ThreadPoolExecutor(1) as threads:
        peer = threads.submit(exchange_addresses, place, ("127.0.0.1", 5), deadline_s=30.0)
        store.wait(["ragtag/c/of 2/address/1"])  # it waits for peer 0 now
        del store  # its process is killed
        with pytest.raises(TimeoutError, match=f"store at 127.0.0.1:{port} has ended .* with peer 0"):
            peer.result(30)


def test_peers_started_by_torchrun_exchange_addresses_through_its_agents_store(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(EXCHANGE)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(command, env=_env(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} {ALL_THREE[:2]}" for rank in range(2)]
