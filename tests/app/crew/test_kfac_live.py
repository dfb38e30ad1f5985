"""K-FAC in real processes: one of three is killed, another comes later, and a later run goes on."""

from __future__ import annotations

import os
import signal

import pytest

from ragtag.app.invitation.token import kept_token
from tests.app.processes import Place

SCRIPT = """
import os, time
import torch, ragtag
from torch import nn
torch.set_num_threads(1)
stop = os.environ["STOP"]
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model, average="gradients")
    kfac = crew.kfac(model, optimizer, damping=0.1, scaling="fisher", inverse_every=3, cost="measured")
    print("seat", crew.rank, "pid", os.getpid(), flush=True)
    rng = torch.Generator().manual_seed(crew.rank)
    far, first, turn = False, None, 0
    while not os.path.exists(stop):
        x = torch.randn(32, 8, generator=rng)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
        loss.backward()
        kfac.step()
        optimizer.step()
        turn += 1
        young = not kfac.plain and kfac.age is not None and kfac.age <= 30
        if young and len(crew.live) == int(os.environ.get("LIVE", "3")) and kfac.steps > 20 and not far:
            far = True
            print("young", turn < kfac.steps, flush=True)
        if turn == 60:
            print("learns", loss.item() < 0.7, flush=True)
        time.sleep(0.02)
    print("end", not kfac.plain, flush=True)
    if crew.rank == 0:
        crew.save(os.environ["SAVED"])
"""
RESUMED = """
    found = crew.resume(os.environ["SAVED"])
    print("resumed", found is not None and kfac.steps > 20, flush=True)
"""
AGAIN = SCRIPT.replace("    rng =", RESUMED.lstrip("\n") + "    rng =")
assert AGAIN != SCRIPT


@pytest.mark.slow
def test_one_of_three_is_killed_and_a_newcomer_and_a_later_run_go_on(place: Place) -> None:
    saved = str(place.folder / "saved")
    (place.folder / "train.py").write_text(SCRIPT)
    crew = place.command("crew", "run", "-n", "3", "-o", str(place.run), "train.py", SAVED=saved)
    for peer in range(3):
        crew.says("young False", peer)
    os.kill(crew.pid(1), signal.SIGKILL)
    for peer in (0, 2):
        crew.says("learns True", peer)
    late = place.command("late", "join", kept_token(place.run), "train.py", SAVED=saved)
    late.says("young True")  # its count of steps came with the crew's state
    place.stop.touch()
    for peer in (0, 2):
        crew.says("end True", peer)
    late.says("end True")
    crew.process.wait(60)
    place.stop.unlink()
    (place.folder / "train.py").write_text(AGAIN)
    later = place.command(
        "later", "run", "-n", "2", "-o", str(place.folder / "later"), "train.py", SAVED=saved, LIVE="2"
    )
    for peer in range(2):
        later.says("resumed True", peer)
        later.says("young True", peer)
