"""Two optimizers in one script: checkpoints and newcomers have both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ragtag
from ragtag.app.invitation.token import kept_token
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.app.processes import Place

SCRIPT = """
import os, time
import torch, ragtag
torch.set_num_threads(1)
stop, average = os.environ["STOP"], os.environ["AVERAGE"]
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(crew.rank)  # all begin with the lowest peer's weights
    one, two = torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)
    with torch.no_grad():
        two.weight.fill_(100.0)
    made = [
        crew.optimizer(torch.optim.Adam(m.parameters(), lr=lr), model=m, average=average)
        for m, lr in ((one, 1e-4), (two, 1e-4))
    ]
    print("seat", crew.rank, flush=True)
    said = False
    while not os.path.exists(stop):
        for model, optimizer in zip((one, two), made):
            optimizer.zero_grad()
            model(torch.ones(2, 10)).square().mean().backward()
            optimizer.step()
        heard = [bin(int(optimizer.outcome.heard[0])) for optimizer in made]
        steps = [int(next(iter(optimizer.state.values()))["step"]) for optimizer in made]
        if not said and crew.rank == 2 and heard == ["0b111", "0b111"]:
            said = True
            print("in, moments of", min(steps) > 5, "steps", flush=True)
        elif not said and crew.rank < 2 and min(steps) > 20:
            said = True
            print("going", flush=True)
        time.sleep(0.01)
    with torch.no_grad():  # as after a round of which some lost a part
        one.bias += 0.01 * crew.rank
        two.bias += 0.01 * crew.rank
    began_s = time.monotonic()
    done = crew.finish()
    print("within half of the deadline", time.monotonic() - began_s < 30.0, flush=True)
    print("far apart", two.weight.mean().item() > 50.0 and one.weight.mean().item() < 5.0, flush=True)
    print("ended", done.alike, len(done.peers), done.digest, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("average", ["models", "gradients"])
def test_a_newcomer_has_both_and_all_end_alike(place: Place, average: str) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    crew = place.command("crew", "run", "-n", "2", "-o", str(place.run), "train.py", AVERAGE=average)
    crew.says("going")
    joined = place.join(kept_token(place.run), AVERAGE=average)
    joined.says("in, moments of True steps")
    place.end()
    assert (crew.code(), joined.code()) == (0, 0), crew.text + joined.text
    ended = {
        line for of, peer in ((crew, 0), (crew, 1), (joined, 0)) for line in of.lines(peer) if "ended" in line
    }
    assert len(ended) == 1, ended
    assert "ended True 3" in ended.pop()
    assert (crew.text + joined.text).count("far apart True") == 3
    assert (crew.text + joined.text).count("within half of the deadline True") == 3


def pair(crew: ragtag.Crew, shared: bool = False) -> tuple[list[nn.Module], list[CrewOptimizer]]:
    torch.manual_seed(0)
    if shared:  # one model under two optimizers
        both = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        models: list[nn.Module] = [both, both]
        parts = [list(both[0].parameters()), [*both[1].parameters(), *both[2].parameters()]]
    else:
        models = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]
        parts = [list(model.parameters()) for model in models]
    inner = [torch.optim.Adam(parts[0], lr=0.01), torch.optim.SGD(parts[1], lr=0.1, momentum=0.9)]
    return models, [crew.optimizer(one, model=model) for one, model in zip(inner, models, strict=True)]


def train(models: list[nn.Module], optimizers: list[CrewOptimizer], steps: int) -> None:
    for at in range(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(at))
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(inputs).square().mean() for model in dict.fromkeys(models)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()


def state(models: list[nn.Module], optimizers: list[CrewOptimizer]) -> list[torch.Tensor]:
    found = [t for model in models for t in model.state_dict().values()]
    for optimizer in optimizers:
        found += [t for of in optimizer.state.values() for t in of.values() if isinstance(t, torch.Tensor)]
    return [tensor.clone() for tensor in found]


@pytest.mark.parametrize("shared", [False, True])
def test_a_checkpoint_has_both(tmp_path: Path, shared: bool) -> None:
    with ragtag.join() as crew:
        models, optimizers = pair(crew, shared)
        train(models, optimizers, 7)
        crew.save(tmp_path)
        saved = state(models, optimizers)
    with ragtag.join() as crew:
        models, optimizers = pair(crew, shared)
        train(models, optimizers, 1)
        assert crew.resume(tmp_path) is not None
        assert [optimizer._averaged.progress for optimizer in optimizers] == [(7, 0), (7, 0)]
        again = state(models, optimizers)
    assert len(again) == len(saved)
    assert all(torch.equal(a, b) for a, b in zip(again, saved, strict=True))


def test_what_is_found_of_an_optimizer_that_is_made_later_waits_for_it(tmp_path: Path) -> None:
    with ragtag.join() as crew:
        models, optimizers = pair(crew)
        train(models, optimizers, 5)
        crew.save(tmp_path)
        saved = state(models, optimizers)
    with ragtag.join() as crew:
        torch.manual_seed(1)
        one, two = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        first = crew.optimizer(torch.optim.Adam(one.parameters(), lr=0.5), model=one)
        assert crew.resume(tmp_path) is not None
        second = crew.optimizer(torch.optim.SGD(two.parameters(), lr=0.5, momentum=0.9), model=two)
        again = state([one, two], [first, second])
    assert all(torch.equal(a, b) for a, b in zip(again, saved, strict=True))


def test_another_model_in_a_second_optimizer_is_named(tmp_path: Path) -> None:
    with ragtag.join() as crew:
        models, optimizers = pair(crew)
        train(models, optimizers, 2)
        crew.save(tmp_path)
    with ragtag.join() as crew:
        torch.manual_seed(0)
        one, two = nn.Linear(4, 4), nn.Linear(4, 3)
        crew.optimizer(torch.optim.Adam(one.parameters()), model=one)
        crew.optimizer(torch.optim.SGD(two.parameters(), lr=0.1), model=two)
        with pytest.raises(ValueError, match="optimizer 'model 2': "):
            crew.resume(tmp_path)


RESUMES = """
import os, torch, ragtag
torch.set_num_threads(1)
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 10)
    optimizer = crew.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    found = crew.resume(f"disk-{crew.rank}")
    print("counts rounds after", crew._peer.keeper._shelf.round)
    moments = [int(of["step"]) for of in optimizer.state.values()]
    total = model.weight.sum().item()
    print("resumes", None if found is None else found.step, moments, optimizer._averaged.progress[0], total)
    print("from", None if found is None else (found.peer, str(found.path)))
    for step in range(5 + 3 * (found is not None)):
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
    crew.save(f"disk-{crew.rank}")
"""


@pytest.mark.slow
def test_peers_whose_disks_differ_go_on_from_the_newest(place: Place) -> None:
    """A machine was replaced: its weights, never trained, were averaged with the others'."""
    (place.folder / "train.py").write_text(RESUMES)
    first = place.command("first", "run", "-n", "2", "train.py")
    assert first.code() == 0, first.text
    for lost in (place.folder / "disk-0").iterdir():
        lost.unlink()
    again = place.command("again", "run", "-n", "2", "train.py")
    assert again.code() == 0, again.text
    said = [next(line for line in again.lines(peer) if line.startswith("resumes")) for peer in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("resumes 5 [5, 5] 5 ")
    assert all("counts rounds after -1" in again.lines(peer) for peer in (0, 1)), "giving it was no round"
    assert "folder has no checkpoint; it takes the state that peer 1 resumes, of step 5" in again.text
    assert "from (1, 'disk-1/peer-01-step-000005.ragtag')" in again.lines(1)
    assert "from (1, 'None')" in again.lines(0), "of what another gave there is no file here"
