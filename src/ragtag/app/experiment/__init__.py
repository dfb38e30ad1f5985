"""A simulated run: peers that take random local steps and average, in virtual time, under faults.

Each peer holds a vector. A local step adds noise of variance 1 to every value, as stochastic gradients do
to a model; averaging pulls the peers' vectors together again. What is left between them after a round is the
disagreement, in units of a step's variance, which averaging over a lossy line keeps bounded
(``Yu et al., ICML 2019``, lemma on the mixing matrix).
"""

from ragtag.app.experiment.figures import ExperimentResult, RoundFigures
from ragtag.app.experiment.run import simulate
from ragtag.app.experiment.setup import ExperimentError, ExperimentSetup

__all__ = ["METHODS", "ExperimentError", "ExperimentResult", "RoundFigures", "ExperimentSetup", "simulate"]
