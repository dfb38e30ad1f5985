"""A process learns its place from `ragtag run`, from torchrun, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.environment import (
    Place,
    PlaceError,
    Rendezvous,
    place_from_environment,
)
from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Role

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
    seal=False,
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
        ({"WORLD_SIZE": "1025"}, "WORLD_SIZE is 1025; a crew has 1 to 1024 peers"),
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


def test_a_peer_may_be_told_that_it_is_a_client() -> None:
    for said, role in (("client", Role.CLIENT), ("trainer", Role.TRAINER)):
        told = place_from_environment({**PLACE.variables(), "RAGTAG_ROLE": said})
        assert told is not None and told.role is role and place_from_environment(told.variables()) == told
    with pytest.raises(PlaceError, match=r"RAGTAG_ROLE is 'auxiliary'.*ragtag join --auxiliary"):
        place_from_environment({**PLACE.variables(), "RAGTAG_ROLE": "auxiliary"})


def test_whether_to_seal_is_said_by_on_or_off() -> None:
    env = PLACE.variables()
    assert env["RAGTAG_SEAL"] == "off"
    sealed = place_from_environment({**env, "RAGTAG_SEAL": "on"})
    assert sealed is not None and sealed.seal is True
    with pytest.raises(PlaceError, match="RAGTAG_SEAL is 'yes'; it must be on or off"):
        place_from_environment({**env, "RAGTAG_SEAL": "yes"})
    del env["RAGTAG_SEAL"]
    unsaid = place_from_environment(env)
    assert unsaid is not None and unsaid.seal is None
