"""Which crew a run's folder invites to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.invitation.invite import invitation_to
from ragtag.app.invitation.token import Token, TokenError, encode, keep_token, new_key
from ragtag.app.tracefile import CREW_FILE, TraceWriter
from ragtag.core import trace


def begin_crew(folder: Path) -> None:
    """Its trace comes first."""
    with TraceWriter(folder / "peer-00.jsonl") as writer:
        writer.write(trace.Note(t=0.0, peer=0, what="it begins"))


def test_it_is_the_newest_that_can_be_joined(tmp_path: Path) -> None:
    def invited() -> str:
        return invitation_to(tmp_path, None).token.crew

    def keep(folder: Path, crew: str) -> None:
        keep_token(folder, encode(Token((("127.0.0.1", 4321),), crew, new_key())))

    with TraceWriter(tmp_path / CREW_FILE):  # a launcher that runs
        with pytest.raises(TokenError, match="holds no invitation"):
            invited()
        keep(tmp_path, "otters")
        assert invited() == "otters"
        begin_crew(tmp_path / "crew-2")
        assert invited() == "otters"
        keep(tmp_path / "crew-2", "otters.2")
        assert invited() == invitation_to(tmp_path, 5).token.crew == "otters.2"
