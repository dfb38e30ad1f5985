"""Outer steps in crews of real processes: newcomers and who resumes have the crew's momentum."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ragtag
from ragtag.app.crew.transport import SoloTransport
from ragtag.app.invitation.token import kept_token
from ragtag.codecs.dense import fp32
from ragtag.core.schema import Schema, TensorSpec
from ragtag.protocols.rounds.allreduce import direct
from tests.app.processes import Place

SCRIPT = """
import os, time
import torch, ragtag
torch.set_num_threads(1)
stop = os.environ["STOP"]
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(crew.rank)
    model = torch.nn.Linear(100, 30)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    outer = ragtag.Outer(fragments=3, delay=int(os.environ["DELAY"]))
    optimizer = crew.optimizer(adam, averager=ragtag.AllReduce(), model=model, outer=outer, every=4)
    begun = optimizer._averaged.outer_state.get("begun", [])
    print("seat", crew.rank, "begins with", begun.count(True), "anchors", flush=True)
    said = 0
    while not os.path.exists(stop):
        optimizer.zero_grad()
        model(torch.ones(2, 100)).square().mean().backward()
        optimizer.step()
        if optimizer.outcome is not None and optimizer.outcome.round > said + 10:
            said, heard = optimizer.outcome.round, bin(int(optimizer.outcome.heard[0]))
            size = sum(float(t.abs().sum()) for t in optimizer._averaged.outer_state["momentum"].values())
            print("heard", heard, "finite" if size == size and size < 1e9 else "off", flush=True)
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_a_newcomer_has_the_crews_anchors_and_momentum(place: Place, delay: int) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    crew = place.command("crew", "run", "-n", "2", "-o", str(place.run), "train.py", DELAY=str(delay))
    crew.says("heard 0b11 finite")
    assert "seat 0 begins with 0 anchors" in crew.lines(0)
    joined = place.join(kept_token(place.run), DELAY=str(delay))
    joined.says("heard 0b111 finite")
    crew.says("heard 0b111 finite", 1)
    assert "seat 2 begins with 3 anchors" in joined.lines(0), joined.text
    place.end()
    assert (crew.code(), joined.code()) == (0, 0), crew.text + joined.text
    assert not re.search(r"\boff\b", crew.text + joined.text)


def test_who_resumes_has_them_too(tmp_path: Path) -> None:
    def train(steps: int) -> dict[str, torch.Tensor]:
        with ragtag.join() as crew:
            model = torch.nn.Linear(100, 30)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = crew.optimizer(sgd, model=model, every=1, outer=ragtag.Outer(fragments=2))
            crew.resume(tmp_path)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(2, 100)).square().mean().backward()
                optimizer.step()
            crew.save(tmp_path)
            momentum: dict[str, torch.Tensor] = optimizer._averaged.outer_state["momentum"]
            return momentum

    before = train(6)
    assert all(float(tensor.abs().sum()) > 0 for tensor in before.values())
    again = train(0)
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


def test_alone_each_round_is_a_fragment() -> None:
    solo = SoloTransport(3)
    schema = Schema((TensorSpec("w", (1_000,), "float32"),), "fp32", direct.name, fragments=2)
    solo.configure(0, schema, direct, fp32)
    chunks = schema.n_chunks(fp32.elements)
    values = torch.arange(2.0).repeat_interleave(chunks)[:, None].repeat(1, fp32.elements).numpy()
    for round_ in range(4):
        outcome = solo.start(0, values, 1.0).wait()
        assert outcome.mean.shape == (chunks, fp32.elements)
        assert set(outcome.mean.reshape(-1)) == {round_ % 2}
