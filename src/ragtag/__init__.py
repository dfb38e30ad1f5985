"""Train one PyTorch model on a ragtag crowd of machines: some slow, some gone, some losing packets.

crew = ragtag.join()
optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager=ragtag.RPS())
for epoch in crew.epochs(10):
    for inputs, targets in crew.split(loader):
        criterion(model(inputs), targets).backward()
        optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ragtag import hooks as hooks
    from ragtag import privacy as privacy
    from ragtag import schedules as schedules
    from ragtag.app.crew.crew import Crew as Crew
    from ragtag.app.crew.join import JoinError as JoinError
    from ragtag.app.crew.peer import Expelled as Expelled
    from ragtag.app.crew.peer import StateMissing as StateMissing
    from ragtag.app.crew.transport import SeatLost as SeatLost
    from ragtag.app.environment import PlaceError as PlaceError
    from ragtag.app.invitation.token import TokenError as TokenError
    from ragtag.app.join import join as join
    from ragtag.core.errors import Error as Error
    from ragtag.core.errors import HasLeft as HasLeft
    from ragtag.core.errors import NotFinite as NotFinite
    from ragtag.core.schema import SchemaMismatch as SchemaMismatch
    from ragtag.network.driver.mailbox import DriverFailed as DriverFailed
    from ragtag.network.link.udp import PortInUse as PortInUse
    from ragtag.optim.kfac.preconditioner import KFAC as KFAC
    from ragtag.optim.outer import Outer as Outer
    from ragtag.protocols.channel.averager import Averager as Averager
    from ragtag.protocols.groups.channel import Moshpit as Moshpit
    from ragtag.protocols.groups.channel import RandomGroups as RandomGroups
    from ragtag.protocols.publish.assignment import OwnerPair as OwnerPair
    from ragtag.protocols.rounds.allreduce import AllReduce as AllReduce
    from ragtag.protocols.rounds.robust import CentredClipping as CentredClipping
    from ragtag.protocols.rounds.robust import TrimmedMean as TrimmedMean
    from ragtag.protocols.rounds.rps import RPS as RPS
    from ragtag.training.align.plan import Align as Align
    from ragtag.training.coherence import Coherence as Coherence
    from ragtag.training.exchange.central import Centre as Centre
    from ragtag.training.exchange.compress import TopK as TopK
    from ragtag.training.named import NamedTensors as NamedTensors
    from ragtag.training.samples.shards import skewed_shards as skewed_shards
    from ragtag.training.samples.sizes import BatchSizes as BatchSizes
    from ragtag.training.state.checkpoint import NoWholeCheckpoint as NoWholeCheckpoint

_HOMES = {
    "Error": "ragtag.core.errors",
    "DriverFailed": "ragtag.network.driver.mailbox",
    "Expelled": "ragtag.app.crew.peer",
    "HasLeft": "ragtag.core.errors",
    "NoWholeCheckpoint": "ragtag.training.state.checkpoint",
    "PlaceError": "ragtag.app.environment",
    "PortInUse": "ragtag.network.link.udp",
    "SeatLost": "ragtag.app.crew.transport",
    "StateMissing": "ragtag.app.crew.peer",
    "TokenError": "ragtag.app.invitation.token",
    "Crew": "ragtag.app.crew.crew",
    "JoinError": "ragtag.app.crew.join",
    "join": "ragtag.app.join",
    "SchemaMismatch": "ragtag.core.schema",
    "KFAC": "ragtag.optim.kfac.preconditioner",
    "Outer": "ragtag.optim.outer",
    "Align": "ragtag.training.align.plan",
    "Averager": "ragtag.protocols.channel.averager",
    "RPS": "ragtag.protocols.rounds.rps",
    "AllReduce": "ragtag.protocols.rounds.allreduce",
    "TrimmedMean": "ragtag.protocols.rounds.robust",
    "CentredClipping": "ragtag.protocols.rounds.robust",
    "Moshpit": "ragtag.protocols.groups.channel",
    "RandomGroups": "ragtag.protocols.groups.channel",
    "Centre": "ragtag.training.exchange.central",
    "NamedTensors": "ragtag.training.named",
    "NotFinite": "ragtag.core.errors",
    "OwnerPair": "ragtag.protocols.publish.assignment",
    "BatchSizes": "ragtag.training.samples.sizes",
    "Coherence": "ragtag.training.coherence",
    "TopK": "ragtag.training.exchange.compress",
    "skewed_shards": "ragtag.training.samples.shards",
}
_ROOMS = ("hooks", "privacy", "schedules")
__all__ = ["__version__", "hooks", "privacy", "schedules", *_HOMES]


def __dir__() -> list[str]:
    """What there is for users, imported or not."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command starts without torch."""
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"ragtag.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ragtag' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
