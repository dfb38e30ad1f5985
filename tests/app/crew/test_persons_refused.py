"""What ``ragtag.join`` says where a crew that takes persons, or none, does not let a peer in."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import ragtag
from ragtag.app.crew.join import JoinError
from ragtag.app.environment import VARIABLES
from ragtag.app.invitation.token import Token, encode
from ragtag.network.membership.admission import tell_revocation
from ragtag.protocols.membership.passes import Took
from tests.network.agents import KEY, turned
from tests.network.crew import PATIENCE_S

SIGNING = bytes(range(32))
DEADLINE_S = 20.0


def refused(monkeypatch: pytest.MonkeyPatch, token: Token, **env: str) -> str:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RAGTAG_TOKEN": encode(token), **env}.items():
        monkeypatch.setenv(name, value)
    began_s = time.monotonic()
    with pytest.raises(JoinError) as error:
        ragtag.join(deadline_s=DEADLINE_S)
    assert time.monotonic() - began_s < DEADLINE_S, "it is told, and does not wait in vain"
    return str(error.value)


def test_what_a_crew_of_persons_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    with turned(SIGNING) as agents:
        at = tuple(agents.addresses.values())
        holder = Token(at, "otters", KEY, signing=SIGNING)
        alice = holder.for_person("alice", int(now_s) + 60, now_s)
        assert alice.credential is not None
        said = refused(monkeypatch, replace(holder, signing=bytes(32)))
        assert "holder's token is not signed by this crew's signing key" in said
        said = refused(monkeypatch, Token(at, "otters", KEY))
        assert "does not let this peer in: this crew takes persons only, and the token names none" in said
        later = holder.for_person("bob", int(now_s) + 9_000, now_s + 3_600)
        assert "bob's token is not valid yet: the clock here is behind" in refused(monkeypatch, later)
        told = holder.revocation("alice", alice.credential.shown.serial)
        assert set(tell_revocation(at, KEY, told, PATIENCE_S).values()) == {Took.YES}
        assert "the token to crew 'otters' was revoked" in refused(monkeypatch, alice)
        inside = replace(alice, key=KEY, number=b"", ends_unix_s=0)  # she had the crew's key before
        assert "alice's token was revoked by the holder" in refused(monkeypatch, inside)
        assert "alice's token has ended" in refused(monkeypatch, holder.for_person("alice", 2, 1.0))
        assert agents.agree()


def test_a_person_in_a_crew_that_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    with turned(b"") as agents:
        holder = Token(tuple(agents.addresses.values()), "otters", KEY, signing=SIGNING)
        said = refused(monkeypatch, holder.for_person("alice", int(now_s) + 60, now_s))
        assert "this crew takes no persons" in said


def test_a_crew_of_persons_cannot_be_begun_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Token((("127.0.0.1", 1),), "otters", KEY, signing=SIGNING)
    said = refused(monkeypatch, holder, RAGTAG_SEAL="off")
    assert "RAGTAG_SEAL is off, and a crew that takes persons always encrypts" in said
