"""Epochs of real crews: newcomers begin in the crew's, and all end with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ragtag.app.invitation.token import kept_token
from tests.app.processes import Command, Place

SCRIPT = """
import os, time
import torch, ragtag
from torch.utils.data import DataLoader, TensorDataset

HOLD, AVERAGE, here = int(os.environ["HOLD"]), os.environ["AVERAGE"], os.environ["STOP"] + ".here"
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
loader = DataLoader(TensorDataset(torch.ones(240, 4)), batch_size=2, shuffle=True)
with ragtag.join(deadline_s=60.0) as crew:
    newcomer = "NEWCOMER" in os.environ
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model, average=AVERAGE)
    def step(inputs):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
    for epoch in crew.epochs(6):
        print("counts", epoch, flush=True)
        for (inputs,) in crew.split(loader):
            step(inputs)
            if newcomer and not os.path.exists(here):
                print("step", crew.step, flush=True)
                open(here, "w").close()
            while epoch == HOLD and not os.path.exists(here):
                step(inputs)
    print("ends at", crew.step, flush=True)
"""


def epochs_of(command: Command, peer: int) -> list[int]:
    return [int(line.split()[1]) for line in command.lines(peer) if line.startswith("counts")]


@pytest.mark.parametrize(
    ("hold", "average"),
    [
        pytest.param(2, "models", marks=pytest.mark.slow),
        pytest.param(5, "models", marks=pytest.mark.slow),
        pytest.param(2, "gradients", marks=pytest.mark.slow),
    ],
)
def test_a_newcomer_begins_in_the_crews_epoch_and_ends_with_it(
    tmp_path: Path, hold: int, average: str
) -> None:
    place = Place(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    try:
        env = {"HOLD": str(hold), "AVERAGE": average}
        crew = place.command("crew", "run", "-n", "2", "-o", str(place.run), "train.py", **env)
        crew.says(f"counts {hold}")
        token = kept_token(place.run)
        newcomer = place.join(token, **env, NEWCOMER="1")
        assert crew.code() == 0, crew.text
        assert newcomer.code() == 0, newcomer.text
        for peer in range(2):
            assert epochs_of(crew, peer) == list(range(6))
        seen = epochs_of(newcomer, 0)
        assert seen[0] in (hold, min(5, hold + 1)), "what was left of the epoch may be claimed"
        assert seen == list(range(seen[0], 6))
        steps = [
            int(found) for text in (crew.text, newcomer.text) for found in re.findall(r"ends at (\d+)", text)
        ]
        assert len(steps) == 3
        assert max(steps) - min(steps) < 0.2 * max(steps)
    finally:
        place.close()
