"""Runs a script until its optimiser has made some steps; keeps what error feedback makes of its gradients.

    python -m ragtag.app.probe.script OUT STEPS RATIO SCRIPT [ARGS]...

Of several optimisers the first one that steps counts.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.options import Options
from ragtag.core.types import Floats


class GradientWatch:
    """Called before each step of any optimiser; ends the process once there were enough."""

    def __init__(self, out: Path, steps: int, ratio: float) -> None:
        self._out, self._steps, self._ratio = out, steps, ratio
        self._parameters: list[torch.Tensor] | None = None
        self._feedback: ErrorFeedback | None = None
        self._step = 0

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take this step's gradient."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._parameters is None:
            self._parameters = parameters
        if len(parameters) != len(self._parameters) or any(
            a is not b for a, b in zip(parameters, self._parameters, strict=True)
        ):
            return
        gradient = _flat(parameters)
        if self._feedback is None:
            options = Options(Density(self._ratio), values="fp32")
            self._feedback = ErrorFeedback(len(gradient), options)
        feedback = self._feedback
        before = feedback.residual.copy()
        feedback.commit(feedback.prepare(gradient, self._step).ticket)
        self._step += 1
        if self._step >= self._steps:
            np.save(self._out / "residual.npy", before, allow_pickle=False)
            np.save(self._out / "gradient.npy", gradient, allow_pickle=False)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # whatever the script catches, or still has open


def _flat(parameters: list[torch.Tensor]) -> Floats:
    parts = []
    for p in parameters:
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        parts.append(gradient.detach().reshape(-1).to("cpu", torch.float32))
    return np.ascontiguousarray(torch.cat(parts).numpy())


def main() -> None:
    """As the module says."""
    out, steps, ratio, script, *arguments = sys.argv[1:]
    register_optimizer_step_pre_hook(GradientWatch(Path(out), int(steps), float(ratio)))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
