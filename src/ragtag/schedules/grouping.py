"""Progressive grouping: how many groups, and which peers are in which, from measured speeds.

"Balancing Stragglers Against Staleness in Distributed Deep Learning", Basu, Saxena, Panja, Verma, HiPC
2018: synchronous inside a group, asynchronous between groups, more groups as stragglers get slower. Peers of
like speed go together: "GSSP", Sun, Zhang, Yang, Zhang, IEEE TCC 2021. Where the paper is silent (only its
abstract is public) this file decides: a grouping's *efficiency* is the samples per second that it takes out
of the crew, over what the same peers would do if none waited for another; the fewest groups that reach a
goal are taken, because every group is a source of staleness.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from ragtag.schedules.base import is_number, whole
from ragtag.schedules.centre import inverse

Groups = tuple[tuple[int, ...], ...]
"""Peers of each group, the fastest group first."""

ABSURD = 1000.0
"""A step that is so many times longer or shorter than the crew's median is not believed."""


@dataclass(frozen=True, slots=True)
class ProgressiveGrouping:
    """Split when efficiency falls below ``split_below``; merge when fewer groups reach ``merge_above``.

    ``crew.optimizer(..., schedule=ragtag.schedules.ProgressiveGrouping())``: groups step through a central
    state without a master (``ragtag.Centre``), each its mean times ``scale`` of its ``share``.

    The gap between the two is the hysteresis: a grouping just made is never undone by the same speeds, and
    small changes of speed do nothing. groups_max: bounds staleness (of updates from peers of like speed to
    about as many versions).

    Raises ValueError: not 0 < split_below < merge_above <= 1, or ``groups_max`` below 1.
    """

    split_below: float = 0.93
    merge_above: float = 0.97
    groups_max: int = 8

    def __post_init__(self) -> None:
        numbers = is_number(self.split_below) and is_number(self.merge_above)
        if not (numbers and 0 < self.split_below < self.merge_above <= 1):
            raise ValueError(
                f"grouping: split_below is {self.split_below!r} and merge_above is {self.merge_above!r}; "
                f"they must be numbers, 0 < split_below < merge_above <= 1"
            )
        whole("grouping: groups_max", self.groups_max, 1, "groups")

    def groups(self, step_s: Mapping[int, float], now: Groups = ()) -> Groups:
        """The groups to go on with.

        step_s: seconds per step of each live peer, as measured.
        now: the groups so far (peers that are gone leave them, a group that empties ceases, new peers join
            the group of the nearest speed).
        Raises ValueError: no peer, or times that cannot be (see ``plausible``).
        """
        _check(step_s)
        now = carried(now, step_s)
        most = min(self.groups_max, len(step_s))
        if len(now) <= most and efficiency(now, step_s) >= self.split_below:
            most = len(now) - 1
            fallback = now
        else:
            fallback = best_groups(step_s, most)
        for g in range(1, most + 1):
            found = best_groups(step_s, g)
            if efficiency(found, step_s) >= self.merge_above:
                return found
        return fallback


def best_groups(step_s: Mapping[int, float], g: int) -> Groups:
    """The ``g`` groups of the highest throughput: runs of peers ranked by speed (dynamic programming).

    Raises ValueError: more groups than peers, no group, or times that cannot be.
    """
    _check(step_s)
    if whole("grouping: g", g, 1, "groups") > len(step_s):
        raise ValueError(f"{g} groups of {len(step_s)} peers: some would be empty; ask for at most one each")
    ranked = sorted(step_s, key=lambda peer: (step_s[peer], peer))
    times = np.array([step_s[peer] for peer in ranked])
    n = len(ranked)
    best = np.full(n + 1, -math.inf)  # of the first j peers in k groups; k grows
    best[0] = 0.0
    cuts = []
    for _ in range(g):
        grown, cut = np.full(n + 1, -math.inf), np.zeros(n + 1, np.int64)
        for j in range(1, n + 1):
            options = best[:j] + (j - np.arange(j)) / times[j - 1]  # the last group is peers i .. j - 1
            cut[j] = int(np.argmax(options))
            grown[j] = options[cut[j]]
        best = grown
        cuts.append(cut)
    groups: list[tuple[int, ...]] = []
    end = n
    for cut in reversed(cuts):
        groups.append(tuple(sorted(ranked[cut[end] : end])))
        end = int(cut[end])
    return tuple(reversed(groups))


def equal_groups(peers: Sequence[int], g: int) -> Groups:
    """``g`` groups of sizes that differ by one at most, peers in the order given: what is fixed in advance.

    Raises ValueError: more groups than peers, or no group.
    """
    if whole("grouping: g", g, 1, "groups") > len(peers):
        raise ValueError(f"{g} groups of {len(peers)} peers: some would be empty; ask for at most one each")
    edges = [i * len(peers) // g for i in range(g + 1)]
    return tuple(tuple(peers[a:b]) for a, b in pairwise(edges))


def efficiency(groups: Groups, step_s: Mapping[int, float]) -> float:
    """Samples per second of these groups, over those of the same peers if none waited; 0 without groups."""
    mine = sum(len(group) / max(step_s[peer] for peer in group) for group in groups)
    return mine / sum(1.0 / s for s in step_s.values())


def carried(groups: Groups, step_s: Mapping[int, float]) -> Groups:
    """The same groups with the peers that there are now: those gone leave, new ones join the nearest."""
    kept = [[peer for peer in group if peer in step_s] for group in groups]
    kept = [group for group in kept if group]
    known = {peer for group in kept for peer in group}
    if not kept:
        return (tuple(sorted(step_s)),)
    pace = [max(step_s[peer] for peer in group) for group in kept]
    for peer in sorted(set(step_s) - known):
        kept[min(range(len(kept)), key=lambda i: abs(math.log(pace[i] / step_s[peer])))].append(peer)
    return tuple(tuple(sorted(group)) for group in kept)


def plausible(step_s: Mapping[int, float]) -> tuple[dict[int, float], dict[int, float]]:
    """Which times per step to believe, and which not: those are not positive and finite, or absurd."""
    sane = {peer: s for peer, s in step_s.items() if s > 0 and math.isfinite(s)}
    middle = median(sane.values()) if sane else 1.0
    good = {peer: s for peer, s in sane.items() if middle / ABSURD <= s <= middle * ABSURD}
    return good, {peer: s for peer, s in step_s.items() if peer not in good}


def barrier_s(step_s: Sequence[float], headroom: float = 1.5) -> float:
    """How long a group waits for its members from the start of a round: ``headroom`` times its slowest.

    step_s: what their steps are known to take. Raises ValueError: none is known.
    """
    if not step_s:
        raise ValueError("a group's deadline comes from what its members' steps take; none is known yet")
    return headroom * max(step_s)


def share(group: Iterable[int], rate: Mapping[int, float]) -> float:
    """A group's part of what the crew learns from: its samples per second over those of all.

    rate: samples per second of each peer, the group's among them. By samples, not by heads: the model then
    moves as far per second as the mean of all that keep pace would move it. By heads, a straggler that hardly
    ever gives anything would take its n-th off each step of the others.
    """
    return sum(rate[peer] for peer in group) / sum(rate.values())


def scale(share: float, staleness: int) -> float:
    """How much of a full step a group's update is: its share (``share``), and never above 1/tau.

    Groups of one size and speed have both alike: g groups, a share of 1/g, a staleness of about g.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a group's share of the crew is {share}; it is above 0 and at most 1")
    return min(share, inverse(staleness))


def predicted(g: int, slow_groups: int, delay: float) -> float:
    """T(g)/T0 of ``g`` equal groups of which some are (1 + delay) times slower: g / (g - k d/(1+d))."""
    if not 0 <= slow_groups <= g or not delay >= 0:
        raise ValueError(f"{slow_groups} slow groups of {g}, delay {delay}: 0 to g, and 0 or more")
    return g / (g - slow_groups * delay / (1.0 + delay))


def _check(step_s: Mapping[int, float]) -> None:
    if not step_s:
        raise ValueError("grouping: there is no peer to put into a group")
    _, doubted = plausible(step_s)
    if doubted:
        peer, s = next(iter(doubted.items()))
        raise ValueError(
            f"grouping: peer {peer} reports {s} s a step; a time is above 0, and within {ABSURD:g} times the "
            f"crew's median. Leave such peers out (plausible) and say so"
        )
