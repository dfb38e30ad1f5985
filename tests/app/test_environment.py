"""A process learns its place from `ragtag run`, from torchrun, or not at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.environment import (
    Place,
    PlaceError,
    Rendezvous,
    announce_ready,
    exchange_addresses,
    format_address,
    parse_address,
    place_from_environment,
    reachable_host,
    read_announcements,
)
from ragtag.core.faults import Faults, Loss

SRC = Path(__file__).parents[2] / "src"

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.1.2.3",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PLACE = Place(
    rank=1,
    size=2,
    crew="brave-otter",
    seed=7,
    run_folder=Path("/runs/a, b"),
    started_unix_s=1700000000.25,
    peers=(("127.0.0.1", 4000), ("::1", 4001)),
    socket_fd=5,
    ready_fd=6,
    faults=Faults(loss=Loss(0.1)),
)


def test_nothing_set_is_a_crew_of_one() -> None:
    assert place_from_environment({"PATH": "/bin", "MASTER_ADDR": "left over from a shell"}) is None


def test_ragtag_variables_read_back_as_the_place_they_were_written_from() -> None:
    assert place_from_environment(PLACE.variables()) == PLACE


def test_ragtag_run_takes_precedence_over_torchrun() -> None:
    assert place_from_environment(TORCHRUN | PLACE.variables()) == PLACE


def test_torchrun_is_recognised() -> None:
    assert place_from_environment(TORCHRUN | {"RAGTAG_SEED": "3", "RAGTAG_FAULTS": "loss=0.1"}) == Place(
        rank=1,
        size=4,
        crew="torchrun-job-7.2",
        seed=3,
        rendezvous=Rendezvous("10.1.2.3", 29500, hosted=False, prefix="ragtag/torchrun-job-7.2"),
        one_machine=False,
        faults=Faults(loss=Loss(0.1)),
    )


def test_without_an_agents_store_rank_0_hosts_it() -> None:
    env = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": "none"}
    hosts = [place_from_environment(env | {"RANK": str(rank)}) for rank in range(2)]
    assert [place.rendezvous.hosted for place in hosts if place and place.rendezvous] == [True, False]
    assert hosts[0] is not None and hosts[0].crew == "torchrun-29500.2"


def test_torchrun_with_one_process_needs_no_store() -> None:
    place = place_from_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert place == Place(0, 1, "torchrun-None.0") or (place is not None and place.rendezvous is None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": ""}, "WORLD_SIZE set, but not RANK"),
        ({"RANK": "4"}, "RANK is 4; the 4 peers of WORLD_SIZE are numbered 0 to 3"),
        ({"RANK": "one"}, "RANK is 'one'; it must be an integer"),
        ({"RANK": "-1"}, "RANK is '-1'; it must be an integer of 0 or more"),
        ({"RANK": "٣"}, "RANK is '٣'; it must be an integer"),
        ({"WORLD_SIZE": "65"}, "WORLD_SIZE is 65; one crew averages 1 to 64 peers"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"MASTER_ADDR": ""}, "MASTER_PORT set, but not MASTER_ADDR"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; a port lies between"),
        ({"RAGTAG_FAULTS": "kill=4@1"}, "RAGTAG_FAULTS: .* names peer 4"),
        ({"RAGTAG_FAULTS": "los=1"}, "RAGTAG_FAULTS: .* no fault is called 'los'"),
    ],
)
def test_a_nonsensical_torchrun_environment_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(PlaceError, match=message):
        place_from_environment(TORCHRUN | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RAGTAG_CREW": ""}, "but not RAGTAG_CREW; `ragtag run` sets them all"),
        ({"RAGTAG_PEERS": "127.0.0.1:1"}, "RAGTAG_PEERS has 1 addresses for the 2 peers"),
        ({"RAGTAG_PEERS": "127.0.0.1:1,nonsense"}, "RAGTAG_PEERS: 'nonsense' is no address"),
        ({"RAGTAG_RANK": "2"}, "RAGTAG_RANK is 2; the 2 peers"),
        ({"RAGTAG_FD": "x"}, "RAGTAG_FD is 'x'"),
        ({"RAGTAG_STARTED": "noon"}, "RAGTAG_STARTED is 'noon'"),
    ],
)
def test_a_nonsensical_ragtag_environment_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(PlaceError, match=message):
        place_from_environment(PLACE.variables() | change)


def test_addresses_read_back() -> None:
    for address in (("127.0.0.1", 1), ("::1", 65535), ("host.example", 29500)):
        assert parse_address(format_address(address)) == address


@pytest.mark.parametrize(
    "text", ["", ":1", "a:", "a:0", "a:65536", "::1:5", "a:-1", "a:1e3", "x" * 300 + ":1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert host
    assert 1 <= port <= 65535


def test_addresses_that_are_known_are_not_asked_for() -> None:
    assert exchange_addresses(PLACE, ("127.0.0.1", 9), deadline_s=1) == list(PLACE.peers or ())
    alone = Place(0, 1, "alone")
    assert exchange_addresses(alone, ("127.0.0.1", 9), deadline_s=1) == [("127.0.0.1", 9)]
    assert reachable_host(alone) == "127.0.0.1"


def test_on_several_machines_a_peer_is_reached_at_the_interface_that_leads_to_the_store() -> None:
    place = Place(0, 2, "c", rendezvous=Rendezvous("127.0.0.1", 29500, False, "p"), one_machine=False)
    assert reachable_host(place) == "127.0.0.1"  # the way to loopback is loopback


def test_the_launcher_is_told_that_a_peer_has_joined() -> None:
    read, write = os.pipe()
    try:
        announce_ready(Place(3, 4, "c", ready_fd=write))
        assert os.read(read, 100) == b"3\n"
    finally:
        os.close(read)
        os.close(write)
    announce_ready(Place(0, 1, "c"))  # no launcher: nothing to tell


def test_the_launcher_is_told_by_what_a_peer_averages() -> None:
    read, write = os.pipe()
    try:
        announce_ready(Place(3, 4, "c", ready_fd=write), "rps+repair")
        announce_ready(Place(0, 4, "c", ready_fd=write), "ring")
        assert read_announcements(os.read(read, 100)) == [(3, "rps+repair"), (0, "ring")]
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"x\n", b"-1\n", b"12345\n", b"1 \x1b[2J\n", b"\xb2\n"])
def test_what_is_no_announcement_is_left_out(data: bytes) -> None:
    assert read_announcements(data + b"7\n") == [(7, "")]


@given(st.binary(max_size=200))
def test_any_bytes_are_announcements_or_left_out(data: bytes) -> None:
    for number, method in read_announcements(data):
        assert 0 <= number < 10_000
        assert len(method) <= 40


EXCHANGE = """
import sys
from dataclasses import replace
from ragtag.app.environment import exchange_addresses, place_from_environment
place = place_from_environment()
addresses = exchange_addresses(place, ("127.0.0.1", 5000 + place.rank), 60.0)
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

    def peer(rank: int) -> list[tuple[str, int]]:
        place = place_from_environment(env | {"RANK": str(rank)})
        assert place is not None
        return exchange_addresses(place, ("127.0.0.1", 5000 + rank), deadline_s=20.0)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(peer, range(3), timeout=30)) == [ALL_THREE] * 3


def test_peers_that_do_not_come_are_named() -> None:
    place = Place(0, 3, "c", rendezvous=Rendezvous("127.0.0.1", _free_port(), True, "ragtag/c"))
    with pytest.raises(TimeoutError, match=r"no address from peer 1, 2 of 3 within 0.2 s"):
        exchange_addresses(place, ("127.0.0.1", 5), deadline_s=0.2)


def test_a_store_that_does_not_answer_is_named() -> None:
    place = Place(1, 2, "c", rendezvous=Rendezvous("127.0.0.1", port := _free_port(), False, "ragtag/c"))
    with pytest.raises(TimeoutError, match=f"torchrun's store at 127.0.0.1:{port} did not answer"):
        exchange_addresses(place, ("127.0.0.1", 5), deadline_s=0.5)


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
