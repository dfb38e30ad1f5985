"""Delay compensation: a stale gradient, brought up to date to first order.

"Asynchronous Stochastic Gradient Descent with Delay Compensation", Zheng, Meng, Wang, Chen, Yu, Ma, Liu,
ICML 2017 (arXiv 1609.08326): DC-ASGD with a constant lambda.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


def compensated(gradient: Vector, model: Vector, stale: Vector, strength: float) -> Vector:
    """``g + lambda g * g * (model - stale)``: the diagonal of g g' stands for the Hessian.

    gradient: computed on ``stale``.
    model: what it will be applied to. All three are float32 of one shape.
    strength: lambda (depends on the model: tune it); 0 changes nothing.
    Raises ValueError: shapes differ, or a strength below 0.
    """
    if not gradient.shape == model.shape == stale.shape:
        raise ValueError(
            f"delay compensation: gradient {gradient.shape}, model {model.shape}, stale {stale.shape}; "
            f"they must have one shape"
        )
    if not (strength >= 0 and math.isfinite(strength)):
        raise ValueError(f"delay compensation: strength {strength}; it must be 0 or more, and finite")
    corrected: Vector = gradient + np.float32(strength) * gradient * gradient * (model - stale)
    return corrected
