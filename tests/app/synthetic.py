"""A trace that looks like a real run's, made up from a seed: for tests of what reads traces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file
from ragtag.core import seed as random
from ragtag.core import trace


@dataclass(frozen=True)
class Story:
    """What happens: one peer freezes, one is killed, datagrams are lost; times are shares of the run."""

    peers: int = 6
    rounds: int = 300
    seed: int = 7
    round_s: float = 0.15
    steps_per_round: int = 2
    evals: int = 24
    loss: float = 0.1
    frozen: int | None = 2
    freeze_at: float = 0.35
    freeze_for: float = 0.12
    killed: int | None = 4
    kill_at: float = 0.6
    finished: bool = True
    name: str = "digits, six peers, one in ten datagrams lost"

    @property
    def until_t(self) -> float:
        """When the last round ends, in seconds."""
        return 1.0 + self.rounds * self.round_s

    def at(self, share: float) -> float:
        """A share of the run as a time, in seconds."""
        return 1.0 + share * self.rounds * self.round_s

    def state(self, peer: int, t: float) -> str:
        """ "up", "frozen" or "killed"."""
        if peer == self.killed and t >= self.at(self.kill_at):
            return "killed"
        if peer == self.frozen and self.at(self.freeze_at) <= t < self.at(self.freeze_at + self.freeze_for):
            return "frozen"
        return "up"


def crew_records(story: Story) -> Iterator[trace.Record]:
    """What the launcher writes."""
    yield trace.Run(
        t=0.0,
        world="live",
        name=story.name,
        seed=story.seed,
        peers=story.peers,
        method="rps",
        config={
            "learning rate": "0.1",
            "batch": "8",
            "model": "38,282 parameters",
            "loss": f"{story.loss:g}",
        },
        started_unix_s=1.7e9,
        steps_planned=story.rounds * story.steps_per_round,
        planned_s=story.until_t,
        command=f"ragtag demo --seed {story.seed}",
    )
    if story.loss:
        yield trace.Fault(t=0.0, name="loss", detail=f"{story.loss:.0%} of datagrams")
    if story.frozen is not None:
        start, end = story.at(story.freeze_at), story.at(story.freeze_at + story.freeze_for)
        yield trace.Fault(t=start, peer=story.frozen, name="freeze", detail="SIGSTOP", until_t=end)
    if story.killed is not None:
        yield trace.Fault(t=story.at(story.kill_at), peer=story.killed, name="kill", detail="SIGKILL")
    if story.finished:
        for k in range(story.evals + 1):
            t = story.at(k / story.evals)
            accuracy = _accuracy(k / story.evals) + 0.006
            yield trace.Eval(
                t=t,
                model="mean",
                step=k,
                loss=2.3 * (1 - accuracy) + 0.05,
                accuracy=min(1.0, accuracy),
                n=360,
            )
        end = story.until_t + 0.5
        yield trace.Result(
            t=end, name="accuracy of the survivors", value=0.961, expected=0.967, tolerance=0.01, passed=True
        )
        yield trace.Result(t=end, name="one peer alone on its shard", value=0.312)
        yield trace.Result(t=end, name="p95 of round times / median", value=2.31, expected=2.0, passed=False)


def peer_records(story: Story, peer: int) -> Iterator[trace.Record]:
    """What one peer writes."""
    rng = random.generator(story.seed, "synthetic", peer)
    others = [p for p in range(story.peers) if p != peer]
    yield trace.Join(
        t=0.4 + 0.05 * peer, peer=peer, address=f"127.0.0.1:{4000 + peer}", rtt_s=0.0004, others=len(others)
    )
    silent: set[int] = set()
    steps = sent = evals = 0
    for number in range(story.rounds):
        t = 1.0 + (number + 1) * story.round_s
        state = story.state(peer, t)
        if state == "killed":
            return
        if state == "frozen":
            continue
        for _ in range(story.steps_per_round):
            steps += 1
            noise = math.exp(0.25 * rng.standard_normal())
            loss = (0.05 + 2.25 * (1 - _accuracy(number / story.rounds))) * noise
            at = t - story.round_s * 0.8 + 0.01 * (steps % story.steps_per_round)
            yield trace.Step(t=at, peer=peer, step=steps, samples=8 * steps, loss=loss)
        waited = [p for p in others if p not in silent]
        away = {p for p in others if story.state(p, t) != "up"}
        missed = sorted((away - silent) | {p for p in waited if rng.random() < 0.004})
        for other in sorted(away - silent):
            yield trace.Note(t=t, peer=peer, what="silent", other=other)
        for other in sorted(silent - away):
            yield trace.Note(t=t, peer=peer, what="heard again", other=other, detail="after 31 silent rounds")
        silent = away
        sent += 650_000
        yield _round(story, rng, peer, number, t, waited, missed, sent)
        if number * story.evals // story.rounds >= evals:
            evals += 1
            low = _accuracy(number / story.rounds) - abs(0.03 * rng.standard_normal())
            yield trace.Eval(
                t=t, peer=peer, model="own", step=steps, loss=2.3 * (1 - low), accuracy=max(0.0, low), n=360
            )
    if story.finished:
        yield trace.Leave(
            t=story.until_t,
            peer=peer,
            steps=steps,
            samples=8 * steps,
            bytes_sent=sent,
            bytes_received=int(sent * (1 - story.loss)),
            datagrams_lost=int(sent * story.loss / 1152),
        )


def write_run(folder: Path, story: Story = Story()) -> Path:
    """Write a whole run's trace files; returns the folder."""
    with TraceWriter(folder / CREW_FILE) as writer:
        for record in crew_records(story):
            writer.write(record)
    for peer in range(story.peers):
        with TraceWriter(folder / peer_file(peer)) as writer:
            for record in peer_records(story, peer):
                writer.write(record)
    return folder


def _accuracy(share: float) -> float:
    return 0.1 + 0.86 * (1 - math.exp(-6 * share))


def _round(
    story: Story,
    rng: np.random.Generator,
    peer: int,
    number: int,
    t: float,
    waited: list[int],
    missed: list[int],
    sent: int,
) -> trace.Round:
    scatter_s = 0.012 * math.exp(0.2 * rng.standard_normal()) * (2.6 if missed else 1.0)
    gather_s = 0.010 * math.exp(0.2 * rng.standard_normal())
    arrived = float(np.clip(1 - story.loss + 0.012 * rng.standard_normal() - 0.12 * len(missed), 0, 1))
    return trace.Round(
        t=t,
        peer=peer,
        round=number,
        scatter_s=scatter_s,
        gather_s=gather_s,
        total_s=scatter_s + gather_s,
        arrived=arrived,
        contributors=1 + len(waited) * (1 - story.loss),
        waited_for=waited,
        missed=missed,
        expired=bool(missed),
        bytes_sent=sent,
        bytes_received=int(sent * (1 - story.loss)),
    )
