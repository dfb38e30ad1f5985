"""What one machine was told, told to another, gives the same outcomes bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core.faults import BurstLoss, Faults, Freeze
from ragtag.core.recording import Recording, RecordingFull
from ragtag.core.types import Arrived, Average, Joined, Outcome, Start
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps, rps_repair
from ragtag.simulation.check.replay import effects, replay
from tests.simulation.scripted import Crew, message, nodes, values

FAULTS = Faults(
    loss=BurstLoss(0.1, 0.4),
    latency_s=0.004,
    jitter_s=0.004,
    duplicate=0.2,
    reorder=0.2,
    reorder_s=0.02,
    freezes=(Freeze(1, 0.5, 1.0),),
)


def same(a: Outcome, b: Outcome) -> bool:
    arrays = all(
        getattr(a, name).tobytes() == getattr(b, name).tobytes()
        for name in ("mean", "weight", "heard", "averaged")
    )
    return arrays and (a.round, a.started_s, a.total_s, a.missed, a.expired) == (
        b.round,
        b.started_s,
        b.total_s,
        b.missed,
        b.expired,
    )


@pytest.mark.parametrize("method", [rps, rps_repair, direct, ring], ids=lambda method: method.name)
def test_a_recorded_peer_is_replayed_bit_for_bit(method: Averager) -> None:
    crew = Crew(4, method, FAULTS, rounds=5, record=True)
    world = crew.run(until_s=60.0)
    for peer, fresh in enumerate(nodes(4, method, 13, seed=1)):
        outcomes = replay(fresh, world.recordings[peer])
        assert len(outcomes) == len(crew.outcomes[peer]) > 0
        assert all(same(a, b) for a, b in zip(outcomes, crew.outcomes[peer], strict=True))


def test_a_replay_without_one_message_differs() -> None:
    crew = Crew(4, rps, Faults(latency_s=0.01), rounds=2, record=True)
    log = list(crew.run().recordings[0])
    first = next(i for i, (_, event) in enumerate(log) if isinstance(event, Arrived))
    outcomes = replay(nodes(4, rps, 13, seed=1)[0], log[:first] + log[first + 1 :])
    assert not same(outcomes[0], crew.outcomes[0][0])


def test_recording_changes_nothing() -> None:
    plain, recorded = (Crew(4, rps, FAULTS, rounds=4, record=record) for record in (False, True))
    assert plain.run().digest() == recorded.run().digest()
    assert plain.world.recordings == []


def test_a_log_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"goes back from 2\.0 s to 1\.0 s"):
        effects(nodes(1, rps, 1, seed=1)[0], [(2.0, Start()), (1.0, Start())])


def test_a_recording_keeps_copies() -> None:
    run, asked = message(1, 3), Average(0, values(1, 0, 0, 2), 1.0)
    recording = Recording()
    recording.add(0.5, Arrived([run]))
    recording.add(1.0, asked)
    run.payload[:] = 255
    run.weight[:] = 9
    asked.values[:] = 0
    (at_s, came), (_, kept) = recording
    assert at_s == 0.5 and isinstance(came, Arrived) and isinstance(kept, Average)
    assert came.runs[0].payload[:, 0].tolist() == [0, 1, 2] and came.runs[0].weight.tolist() == [1, 1, 1]
    assert np.array_equal(kept.values, values(1, 0, 0, 2))


def test_a_strided_payload_is_recorded_as_it_reads() -> None:
    buffer = np.zeros((4, 1152), np.uint8)
    buffer[:, 64:] = np.arange(4)[:, None]
    run = message(1, 4)
    strided = type(run)(1, run.key, 0, 4, buffer[:, 64:], run.weight, run.heard, np.array([1, 0, 1, 1], bool))
    recording = Recording()
    recording.add(0.0, Arrived([strided]))
    ((_, event),) = recording
    assert isinstance(event, Arrived) and event.runs[0].payload.flags.c_contiguous
    assert event.runs[0].payload[:, 5].tolist() == [0, 1, 2, 3]
    assert event.runs[0].mask is not None and event.runs[0].mask.tolist() == [True, False, True, True]


def test_a_full_recording_says_so_and_keeps_what_it_has() -> None:
    recording = Recording(bytes_max=12_000)
    recording.add(0.0, Arrived([message(1, 5)]))
    recording.add(1.0, Joined(1))
    with pytest.raises(RecordingFull, match=r"2 events.*raise bytes_max, now 12000"):
        recording.add(2.0, Arrived([message(1, 5)]))
    assert len(recording) == 2 and 5 * 1088 < recording.size_bytes <= 12_000
