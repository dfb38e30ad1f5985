"""Names and the numbers that stand for them: the same everywhere, and no protocol's own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.channels import NAME_MAX, channel_of, require_name, topic_of
from ragtag.core.wire import NAMED

USED = ["model", "model 2", "a", "b", "gradients", "é", "model/models", "model/whole", "model/replicas"]


@given(st.text())
def test_numbers_are_no_protocols_own_and_fit_32_bits(name: str) -> None:
    for number in (channel_of(name), topic_of(name)):
        assert NAMED <= number < 1 << 32
    assert (channel_of(name), topic_of(name)) == (channel_of(name), topic_of(name))


def test_two_names_have_distinct_numbers() -> None:
    parts = ("", "/models", "/whole", "/replicas", "/pace")
    names = [f"{kind} {at}{part}" for kind in ("model", "a", "b", "é") for at in range(50) for part in parts]
    assert len({channel_of(name) for name in names}) == len(names)
    assert len({topic_of(name) for name in names}) == len(names)


def test_other_processes_have_the_same_numbers() -> None:
    """They do not follow from what a process hashes texts to, which differs from one to the next."""
    ask = (
        "from ragtag.core.channels import channel_of, topic_of\n"
        f"for name in {USED!r}: print(channel_of(name), topic_of(name))"
    )
    for seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", ask],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        numbers = [tuple(int(n) for n in line.split()) for line in answer.stdout.splitlines()]
        assert numbers == [(channel_of(name), topic_of(name)) for name in USED]


@pytest.mark.parametrize("name", ["a", "model 2", "é", "x" * NAME_MAX, "gradients.of-a_b"])
def test_a_name_is_taken_as_it_is(name: str) -> None:
    assert require_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "a/b", "/", "model/", "x" * (NAME_MAX + 1), "a\n", "\x00", "a\tb", None, 3, b"a"]
)
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError) as refused:
        require_name(name)
    assert str(refused.value) == (
        f"name is {name!r}; give 1 to {NAME_MAX} printable characters without a slash, the same on all peers"
    )
