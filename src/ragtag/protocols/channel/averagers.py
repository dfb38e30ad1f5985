"""The averagers by name: what a script, the command, the simulator and its checks find them by."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ragtag.core.names import Named, named
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit, RandomGroups
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS

AVERAGERS: Mapping[str, Named[Averager]] = {
    "rps": Named(RPS),
    "rps+repair": Named(partial(RPS, repair=True)),
    "allreduce": Named(AllReduce),
    "ring": Named(partial(AllReduce, ring=True)),
    "moshpit": Named(Moshpit, "group"),
    "random-groups": Named(RandomGroups, "group"),
}
"""``averager="moshpit=4"`` is ``averager=Moshpit(group=4)``."""


def averager_named(text: str) -> Averager:
    """The averager that a text names. Raises ValueError: it names none."""
    return named(text, AVERAGERS, "averager")
