"""Training that shows less of its data: a part of its own, which nothing else needs.

``correlation``: the distance correlation of samples with their codes. ``nopeek``: that as a term of any
loop's loss (NoPeek, Vepakomma et al., 2019; US patent 11,481,635 covers this loss). ``meters``: what is said
of a cut, measured on samples held out; ``inversion``: what updates tell; ``hijacking``: what a server gets
that trains a cut for its own ends. ``split``: a net that is cut between clients and a server. ``secagg``:
averages of which nobody sees the parts; ``encrypted``, which has to be imported by itself: sums of short
vectors of which the peer that adds up sees nothing. ``dp``: steps that are differentially private, and what
was spent; ``noise``: the randomness of both.
"""

from __future__ import annotations

from ragtag.privacy.correlation import distance_correlation
from ragtag.privacy.dp import NoOpacus, NotPrivate, PrivacyLedger, PrivateTraining, epsilon_of
from ragtag.privacy.hijacking import Hijacker, Hijacking, hijacked, hijacking
from ragtag.privacy.inversion import Inversion, gradients_of, inversion
from ragtag.privacy.meters import Leakage, leakage
from ragtag.privacy.nopeek import NoPass, NoPeek
from ragtag.privacy.secagg import DistributedNoise, SecureAverage, SecureMean
from ragtag.privacy.split import CutForm, ServerGone, SplitClient, SplitModel, SplitServer, state_values
from ragtag.protocols.secagg import NoSecureSum

__all__ = [
    "CutForm",
    "DistributedNoise",
    "Hijacker",
    "Hijacking",
    "Inversion",
    "Leakage",
    "PrivacyLedger",
    "NoOpacus",
    "NoPass",
    "NoPeek",
    "NoSecureSum",
    "NotPrivate",
    "PrivateTraining",
    "SecureAverage",
    "SecureMean",
    "ServerGone",
    "SplitClient",
    "SplitModel",
    "SplitServer",
    "distance_correlation",
    "epsilon_of",
    "gradients_of",
    "hijacked",
    "hijacking",
    "inversion",
    "leakage",
    "state_values",
]
