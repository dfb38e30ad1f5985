"""Training that shows less of its data: a part of its own, which nothing else needs.

``correlation``: the distance correlation of samples with their codes. ``nopeek``: that as a term of any
loop's loss (NoPeek, Vepakomma et al., 2019; US patent 11,481,635 covers this loss). ``meters``: what is said
of a cut, measured on samples held out. ``split``: a net that is cut between clients and a server. ``secagg``:
averages of which nobody sees the parts.
"""

from __future__ import annotations

from ragtag.privacy.correlation import distance_correlation
from ragtag.privacy.meters import Leakage, leakage
from ragtag.privacy.nopeek import NoPass, NoPeek
from ragtag.privacy.secagg import SecureAverage, SecureMean
from ragtag.privacy.split import CutForm, ServerGone, SplitClient, SplitModel, SplitServer
from ragtag.protocols.secagg import NoSecureSum

__all__ = [
    "CutForm",
    "Leakage",
    "NoPass",
    "NoPeek",
    "NoSecureSum",
    "SecureAverage",
    "SecureMean",
    "ServerGone",
    "SplitClient",
    "SplitModel",
    "SplitServer",
    "distance_correlation",
    "leakage",
]
