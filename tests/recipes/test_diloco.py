import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults, Loss
from ragtag.optim.outer import Nesterov
from ragtag.protocols.rounds.rps import rps
from ragtag.recipes import RECIPES
from ragtag.recipes.diloco import recipe as diloco
from ragtag.recipes.diloco import training
from ragtag.recipes.diloco.recipe import (
    ALONE,
    DILOCO,
    EVERY_GRADIENT,
    EVERY_MODEL,
    METHODS,
    STREAMING,
    Plan,
    of,
)
from ragtag.recipes.diloco.training import Method, Run, Setup, Trainee, train
from ragtag.recipes.tasks.texts import split_text
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport

SMALL = {"n": 3, "width": 16, "layers": 1, "length": 8, "batch": 2, "looks": 2}
"""A width of 16: each tensor is a multiple of 64 bytes, so that a vector of values lies as averages do."""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """20 KB of random letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 20_000, np.uint8)))
    return path


def setup(method: Method, steps: int = 8, seed: int = 0) -> Setup:
    return Setup(method, seed, steps, 0.01, **SMALL)


def ends(text: Path, method: Method, steps: int = 8) -> list[float]:
    return train(setup(method, steps), text).losses


def written_out(setup: Setup, text: Path) -> float:
    """The final loss of a crew without a network, by algorithm 1 as it is printed; each fragment's first
    average is taken as it is, and is what its outer steps begin from."""
    read, method = split_text(text.read_bytes())[0], setup.method
    begun = training.pretrained(setup, read)
    models = [copy.deepcopy(begun) for _ in range(setup.n)]
    inner = [training.text_adamw(model, setup) for model in models]
    paces = [LambdaLR(optimizer, training.warm_cosine(setup.steps)) for optimizer in inner]
    texts = [training.text_batches(read, setup, peer, setup.n) for peer in range(setup.n)]
    size = sum(p.numel() for p in begun.parameters())
    part = fp32.elements * math.ceil(size / (fp32.elements * method.fragments))
    anchor, momentum, mean = torch.zeros(size), torch.zeros(size), torch.zeros(size)
    rounds = 0
    for step in range(1, setup.steps + 1):
        for model, optimizer, pace, source in zip(models, inner, paces, texts, strict=True):
            training.learn_text(model, optimizer, *next(source))
            pace.step()
        mean = torch.stack([parameters_to_vector(m.parameters()).detach() for m in models]).mean(0)
        if step % (method.every // method.fragments):
            continue
        at = slice(rounds % method.fragments * part, (rounds % method.fragments + 1) * part)
        after = mean[at].clone()
        if method.outer is not None and rounds >= method.fragments:
            moved = anchor[at] - mean[at]
            momentum[at] = 0.9 * momentum[at] + moved
            after = anchor[at] - 0.7 * (moved + 0.9 * momentum[at])
        anchor[at] = mean[at] = after
        for model in models:
            values = parameters_to_vector(model.parameters()).detach()
            values[at] = after
            vector_to_parameters(values, model.parameters())
        rounds += 1
    return training._Training(setup, text).loss(mean)


@pytest.mark.parametrize(
    "method",
    [Method("models", 4), Method("DiLoCo", 4, Nesterov()), Method("streaming", 4, Nesterov(), 2)],
    ids=lambda method: method.name,
)
def test_the_crew_comes_to_what_the_paper_says_step_by_step(text, method) -> None:
    asked = replace(setup(method, 24), pretrained=4)
    run = train(asked, text)
    assert run.loss == pytest.approx(written_out(asked, text), rel=1e-5)
    assert run.rounds == 24 * method.fragments // 4


def test_plain_averages_are_those_of_an_outer_step_of_one_without_momentum(text) -> None:
    assert ends(text, Method("a", 4)) == ends(text, Method("b", 4, Nesterov(1.0, 0.0)))


def test_gradients_averaged_are_those_of_one_optimiser_on_all_samples(text) -> None:
    asked = setup(EVERY_GRADIENT)
    run, read = train(asked, text), split_text(text.read_bytes())[0]
    single = training.pretrained(asked, read)
    optimizer = training.text_adamw(single, asked)
    pace = LambdaLR(optimizer, training.warm_cosine(asked.steps))
    texts = [training.text_batches(read, asked, peer, asked.n) for peer in range(asked.n)]
    for _ in range(asked.steps):
        x, y = (torch.cat(column) for column in zip(*(next(t) for t in texts), strict=True))
        training.learn_text(single, optimizer, x, y)
        pace.step()
    alone = training._Training(asked, text).loss(parameters_to_vector(single.parameters()).detach())
    assert run.loss == pytest.approx(alone, rel=1e-5) and run.rounds == asked.steps


def test_what_came_of_an_average_in_part_moves_that_part_alone(text, monkeypatch) -> None:
    asked = setup(Method("DiLoCo", 1000, Nesterov()))
    first = training.pretrained(asked, split_text(text.read_bytes())[0])
    monkeypatch.setattr(training, "direct", rps)
    shares: list[float] = []

    def table(trainee: Trainee, like: np.ndarray) -> np.ndarray:
        found = np.zeros(like.size, np.float32)
        found[: len(trainee.values)] = trainee.values.numpy()
        return found.reshape(like.shape)

    def partly(peer: SimulatedTransport) -> None:
        me = Trainee(asked, text.read_bytes(), first, peer)
        anchor = momentum = np.float32(0.0)
        for average in range(5):
            me.step()
            own = me.values
            outcome = me.optimizer.average()
            mean, came = outcome.mean.copy(), outcome.averaged.copy()
            before = np.zeros(mean.size, np.float32)
            before[: len(own)] = own.numpy()
            expected = before.reshape(mean.shape)
            if average == 0:
                expected[came] = mean[came]
                anchor, momentum = expected.copy(), np.zeros_like(expected)
            else:
                moved = anchor - mean
                grown = np.float32(0.9) * momentum + moved
                after = anchor - np.float32(0.7) * (moved + np.float32(0.9) * grown)
                expected[came], anchor[came], momentum[came] = after[came], after[came], grown[came]
            assert np.allclose(table(me, mean), expected, atol=1e-6)
            shares.append(float(came.mean()))

    SimulatedCrew(3, Faults(loss=Loss(0.2), latency_s=0.001), seed=1, cost=ComputeCost(0.01)).run(partly)
    assert len(shares) == 15 and any(0 < share < 1 for share in shares[3:])


def test_bytes_are_those_of_the_lines(text) -> None:
    every, seldom = train(setup(EVERY_MODEL), text), train(setup(Method("d", 4)), text)
    assert (every.rounds, seldom.rounds) == (8, 2)
    assert seldom.bytes / every.bytes == pytest.approx(0.25)
    # all-reduce: each value goes out (n - 1)/n times to owners and as often to the others
    assert every.round_bytes > 2 * 2 / 3 * 4 * every.size
    assert every.bytes_at[-1] == every.bytes and every.bytes_at[0] == 0
    assert train(setup(ALONE), text).bytes == 0
    assert seldom.largest_bytes == pytest.approx(seldom.round_bytes, rel=0.03)
    streamed = train(setup(Method("s", 4, Nesterov(), 2)), text)
    assert streamed.rounds > 2 and 0 < streamed.largest_bytes < 0.6 * seldom.largest_bytes
    assert streamed.largest_bytes >= 0.99 * streamed.round_bytes


def test_a_run_depends_on_its_seed_alone(text) -> None:
    assert ends(text, DILOCO) == ends(text, DILOCO)
    assert train(setup(DILOCO, seed=1), text).losses != ends(text, DILOCO)


def report_runs(setups: list[Setup], text: Path) -> list[Run]:
    return [train(replace(s, steps=2), text) for s in setups]


def test_pretraining_is_one_model_for_all_and_better_than_none(text) -> None:
    runs = [train(replace(setup(m, 2), pretrained=60), text) for m in (Method("d", 2), EVERY_MODEL)]
    assert runs[0].losses[0] == runs[1].losses[0]
    assert runs[0].losses[0] < train(setup(Method("d", 2), 2), text).losses[0] - 0.5


def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch, text) -> None:
    tiny = [Setup(method, 0, 50, 0.003, **SMALL) for method in METHODS]
    monkeypatch.setattr(Plan, "setups", lambda self: tiny)
    report = diloco.reproduce(quick=True, data=text, out=tmp_path / "out", jobs=1)
    assert not any(r.group.startswith("Final") for r in report.rows)  # too early to compare
    assert len(diloco.losses(report_runs(tiny, text))) == 5
    sent = {r.quantity: r for r in report.rows if r.group.startswith("Bytes")}
    assert all(r.ok for name, r in sent.items() if name.startswith("DiLoCo"))
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["runs"]) == len(METHODS) and loaded["settings"]["text"] == "text.txt"
    assert (tmp_path / "out/index.html").read_text("utf-8").count("<svg") == 1
    assert RECIPES["diloco"] == diloco.__name__


@pytest.mark.slow
def test_a_table_shows_how_far_diloco_is_by_length(text) -> None:
    runs = [train(setup(method, steps), text) for steps in (50, 100) for method in diloco.BY_LENGTH]
    table = diloco._lengths(runs)
    assert [line[:2] for line in table.rows] == [("50", "1"), ("100", "2")]
    assert table.rows[1][3] == f"{100 * (runs[5].loss / runs[4].loss - 1):+.2f} %"


def test_plans_have_every_method() -> None:
    for quick, count in ((True, 1), (False, 3)):
        setups = Plan.of(quick=quick, seeds=3).setups()
        longest = [s for s in setups if s.steps == max(s.steps for s in setups)]
        assert len(longest) == count * len(METHODS) and {s.n for s in setups} == {8}
        assert {s.seed for s in setups if s not in longest} <= {0}
        assert all(s.steps % 50 == 0 for s in setups)


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": -1},
        {"every": 10, "fragments": 3},
        {"every": 10, "fragments": 5},
        {"every": 2, "gradients": True},
    ],
)
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="x: "):
        Method("x", **wrong)


def test_reproduce_refuses_nonsense(tmp_path) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        diloco.reproduce(out=tmp_path, seeds=0)
    with pytest.raises(FileNotFoundError, match="no text"):
        diloco.reproduce(out=tmp_path, data=tmp_path / "nothing.txt")
    assert math.isclose(STREAMING.every / STREAMING.fragments, 10) and of([], DILOCO) == []
