"""What a crew's batches come to together: a line for a script that was tuned for one process."""

from __future__ import annotations

from ragtag.training.samples.portion import Portion


def together(portion: Portion, peers: int, target: float | None = None) -> str:
    """A crew of ``peers`` takes fewer steps an epoch than one process, each from more samples; what to do.

    target: samples of a step of all, where the crew has a target batch.

    Averaging n models, or n gradients, makes one step of n batches (Goyal et al., 2017, arXiv 1706.02677, on
    learning rates for larger batches; "Measuring the Effects of Data Parallelism on Neural Network Training",
    Shallue et al., JMLR 2019, arXiv 1811.03600, on when more steps are needed all the same).
    """
    if target is not None:
        return (
            f"{peers} peers take a step together for {target:g} samples: choose the learning rate as for one "
            "process with batches of that size"
        )
    size = portion.batch_size
    try:
        mine = len(portion)
    except TypeError:  # a stream has no length
        steps = "each peer takes a part of the steps that one alone would take in an epoch"
    else:
        steps = f"an epoch is {mine:,} steps of each peer, where one alone takes about {peers * mine:,}"
    batch = "" if size is None else f" with batches of {size:,}: {peers * size:,} samples in a step of all"
    return (
        f"{peers} peers{batch}; {steps}. For as good a model, raise the learning rate (as for a batch "
        f"{peers} times as large) or train for more epochs"
    )
