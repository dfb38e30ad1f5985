"""Real processes with named tensors: one of three is killed, and others compute what it did."""

from __future__ import annotations

import os
import signal

import pytest

from tests.app.test_elastic import Place, place

__all__ = ["place"]

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
