"""Epsilon of the sampled Gaussian mechanism by other means than ``privacy.epsilon_of`` has: to hold it to.

``renyi_epsilon`` takes the Renyi divergence for what it is, an integral (Mironov, Talwar, Zhang, arXiv
1908.10530, section 3), where Opacus has a series, and orders finer than those that the product goes over.
``exact_epsilon`` composes the privacy loss itself (Gopi, Lee, Wutschitz, arXiv 2106.02848).
"""

from __future__ import annotations

import numpy as np

ERROR = 1e-3
"""Of ``exact_epsilon``."""
STEP = 0.003
"""How far epsilon may be from another reckoning of the planned steps: half of what one step of 90 makes of
it, and thirty times what finer Renyi orders do."""
RENYI = 0.2
"""How much Renyi orders may lose beside the privacy loss's own distribution: they lose .15 here."""


def renyi_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon by Renyi orders from 1.05 to 64.

    noise: its standard deviation over the norm. rate: the chance of a sample to be in a batch.
    """
    orders = np.geomspace(1.05, 64.0, 1200)[:, None]
    x = np.linspace(-12 * noise, 64.0 + 12 * noise, 8001)  # at order a most of the integrand is around x = a
    # rate * exp(...) overflows nowhere here: (2 x - 1) / (2 noise^2) stays below some hundreds
    ratio = np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
    density = -(x**2) / (2 * noise**2) - np.log(noise * np.sqrt(2 * np.pi))
    logs = orders * ratio + density
    most = logs.max(1, keepdims=True)
    integral = most[:, 0] + np.log(np.trapezoid(np.exp(logs - most), x, axis=1))
    order = orders[:, 0]
    divergence = steps * integral / (order - 1)
    # from Renyi to (epsilon, delta): Canonne, Kamath, Steinke, arXiv 2004.00010, proposition 12
    return float(np.min(divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)))


def exact_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon by the privacy loss's own distribution, at most ``ERROR`` above it. It takes Opacus."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    with np.errstate(all="ignore"):  # a rate of 1 has it divide by 0 where the result is not used
        return float(accountant.get_epsilon(delta, eps_error=ERROR))
