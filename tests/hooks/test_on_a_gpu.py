"""DDP's hooks on a GPU come to what they come to on the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragtag.app.launch import launch
from ragtag.app.launch.events import Event, Printed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORKER = Path(__file__).with_name("gpu_worker.py")


def weights(device: str, hook: str, meet: Path) -> list[torch.Tensor]:
    """What each of two ranks ends with."""
    events: list[Event] = []
    result = launch(2, [str(WORKER), device, hook, str(meet / device)], on_event=events.append)
    printed = [event for event in events if isinstance(event, Printed)]
    assert [end.status for end in result.ends] == [0, 0], [event.text for event in printed if event.error]
    said = [event.text.split() for event in printed if event.text.startswith("ended")]
    assert [words[1] for words in said] == [device] * 2
    return [torch.tensor([float(word) for word in words[2:]]) for words in said]


@pytest.mark.parametrize("hook", ["crew", "sparse"])
def test_ranks_come_to_the_same(hook: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = weights("cuda", hook, tmp_path), weights("cpu", hook, tmp_path)
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()
        assert (ours - on_gpu[0]).norm() < 1e-6 * ours.norm()
