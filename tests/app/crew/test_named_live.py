"""Real processes with named tensors: one of three is killed, and others compute what it did."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

import ragtag
from ragtag.app import environment
from ragtag.app.environment import VARIABLES, Announcement, Reached, read_announcements
from ragtag.app.invitation.token import kept_token
from ragtag.training.named import NamedTensors
from tests.app.processes import Place

SCRIPT = """
import os, time
import torch, ragtag
torch.set_num_threads(1)
stop = os.environ["STOP"]
names = [f"basis{i}" for i in range(9)]
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model, average="gradients")
    tensors = crew.tensors("kfac", averaged={"factor": (33, 33)}, computed=dict.fromkeys(names, (40, 40)))
    print("seat", crew.rank, "pid", os.getpid(), flush=True)
    said, turn = None, 0
    while not os.path.exists(stop):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        factor = torch.full((33, 33), float(crew.rank))
        tensors.average({"factor": factor}, weight=1 + crew.rank).result()
        if turn % 3 == 0:
            tensors.publish({name: torch.full((40, 40), float(turn)) for name in tensors.mine()})
        turn += 1
        optimizer.step()
        found = [tensors.newest(name) for name in names]
        assert all(one is None or len(one.tensor.unique()) == 1 for one in found), "a mixture"
        if all(found):
            by = sorted({one.peer for one in found}), max(one.age_rounds for one in found) <= 12
            if by != said:
                print("by", *by, flush=True)
                said = by
        if turn == 40:
            print("far", flush=True)
        time.sleep(0.02)
    state = tensors.state_dict()
    print("state", state["clock"] > 30, int((state["versions"][:, 0] > 0).sum()), flush=True)
    crew.save(os.environ["SAVED"])
"""
RESUMED = """
    print("resumed", crew.resume(os.environ["SAVED"]) is not None, flush=True)
    began_s, olds = time.monotonic(), [None]
    while not all(olds) and time.monotonic() < began_s + 30:
        olds = [tensors.newest(name) for name in names]
        time.sleep(0.01)
    print("has", min(float(one.tensor.max()) for one in olds) >= 0, tensors.clock > 30, flush=True)
"""
AGAIN = SCRIPT.replace('    print("seat"', RESUMED.lstrip("\n") + '    print("seat"')
assert AGAIN != SCRIPT


def averages(tensors: NamedTensors) -> None:
    tensors.average({"a": torch.ones(3)}).result()


def publishes(tensors: NamedTensors) -> None:
    tensors.publish({"b": torch.ones(3)})


@pytest.mark.parametrize("share", [averages, publishes])
def test_a_peer_that_shares_named_tensors_only_has_taken_part(
    monkeypatch: pytest.MonkeyPatch, share: Callable[[NamedTensors], None]
) -> None:
    for name in (*VARIABLES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    read, write = os.pipe()
    place = environment.Place(0, 1, "otters", peers=(("127.0.0.1", 4000),), ready_fd=write)
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    with ragtag.join() as crew:
        tensors = crew.tensors("only", averaged={"a": (3,)}, computed={"b": (3,)})
        told = read_announcements(os.read(read, 1 << 10))
        assert Reached.AVERAGED not in [announcement.reached for announcement in told]
        share(tensors)
        share(tensors)
    os.close(write)
    assert read_announcements(os.read(read, 1 << 10)) == [Announcement(0, Reached.AVERAGED)]
    os.close(read)


@pytest.mark.slow
def test_one_of_three_is_killed_and_others_compute_for_it_and_a_later_run_goes_on(place: Place) -> None:
    saved = str(place.folder / "saved")
    (place.folder / "train.py").write_text(SCRIPT)
    crew = place.command("crew", "run", "-n", "3", "-o", str(place.run), "train.py", SAVED=saved)
    for peer in range(3):
        crew.says("by [0, 1, 2] True", peer)
    os.kill(crew.pid(1), signal.SIGKILL)
    for peer in (0, 2):
        crew.says("by [0, 2] True", peer)
        crew.says("far", peer)
    place.stop.touch()
    for peer in (0, 2):
        crew.says("state True 9", peer)
    crew.process.wait(60)
    place.stop.unlink()
    (place.folder / "train.py").write_text(AGAIN)
    later = place.command(
        "later", "run", "-n", "2", "-o", str(place.folder / "later"), "train.py", SAVED=saved
    )
    for peer in range(2):
        later.says("resumed True", peer)
        later.says("has True True", peer)
        later.says("by [0, 1] True", peer)


NEWCOMER = """
import os, time
import torch, ragtag
torch.set_num_threads(1)
with ragtag.join(deadline_s=60.0) as crew:
    model = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = crew.optimizer(sgd, model=model, average="gradients") if os.environ["OPTIMIZER"] else None
    tensors = crew.tensors("factors", averaged={"factor": (33, 33)})
    print("seat", crew.rank, flush=True)
    said = 0.0
    while not os.path.exists(os.environ["STOP"]):
        mean = tensors.average({"factor": torch.full((33, 33), float(crew.rank))}).result()
        if mean.shares["factor"].contributors > said:
            said = mean.shares["factor"].contributors
            print("of", said, float(mean["factor"][0, 0]), flush=True)
        if optimizer is not None:
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", "too"])
def test_a_newcomers_tensors_count_once_it_takes_part(place: Place, optimizer: str) -> None:
    (place.folder / "train.py").write_text(NEWCOMER)
    crew = place.command("crew", "run", "-n", "2", "-o", str(place.run), "train.py", OPTIMIZER=optimizer)
    for peer in range(2):
        crew.says("of 2.0 0.5", peer)
    newcomer = place.join(kept_token(place.run), OPTIMIZER=optimizer)
    newcomer.says("seat 2")
    newcomer.says("of 3.0 1.0")
    for peer in range(2):
        crew.says("of 3.0 1.0", peer)
    place.stop.touch()
    assert crew.process.wait(60) == 0
    assert newcomer.process.wait(60) == 0
