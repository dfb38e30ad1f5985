"""Numbers and peers in plain English."""

from __future__ import annotations

import pytest

from ragtag.app.terminal.words import counted, these_peers


def test_a_number_agrees_with_its_noun() -> None:
    assert [counted(n, "peer") for n in (0, 1, 2, 1200)] == ["0 peers", "1 peer", "2 peers", "1,200 peers"]
    assert [counted(n, "process", "processes") for n in (1, 2)] == ["1 process", "2 processes"]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([], "no peer"),
        ([2], "peer 2"),
        ([1, 0], "peers 0 and 1"),
        ([0, 1, 2], "peers 0 to 2"),
        ([5, 0, 1, 2, 7, 7], "peers 0 to 2, 5 and 7"),
        ([0, 2, 3, 4, 5], "peers 0 and 2 to 5"),
    ],
)
def test_which_peers(numbers: list[int], said: str) -> None:
    assert these_peers(numbers) == said
