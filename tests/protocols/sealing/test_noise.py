"""Noise handshakes, held to the Noise project's test vectors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.protocols.sealing.noise import Handshake, HandshakeError, KeyPair, cipher_of, nonce_of

VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text())["vectors"]


def ends_of(vector: dict) -> tuple[Handshake, Handshake]:
    _, pattern, _, cipher, hash_name = vector["protocol_name"].split("_")

    def end(which: str, initiator: bool) -> Handshake:
        def given_key(name: str) -> bytes | None:
            text = vector.get(f"{which}_{name}")
            return None if text is None else bytes.fromhex(text)

        static = given_key("static")
        return Handshake(
            pattern, cipher, initiator=initiator, psk=bytes.fromhex(vector[f"{which}_psks"][0]),
            prologue=given_key("prologue") or b"", ephemeral=KeyPair(given_key("ephemeral") or b""),
            static=None if static is None else KeyPair(static),
            remote=given_key("remote_static"), hash_name=hash_name,
        )  # fmt: skip

    return end("init", True), end("resp", False)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["protocol_name"])
def test_both_ends_write_and_read_what_the_official_vector_says(vector: dict) -> None:
    initiator, responder = ends_of(vector)
    cipher = vector["protocol_name"].split("_")[3]
    turns = [(initiator, responder), (responder, initiator)]
    messages = [(bytes.fromhex(m["payload"]), bytes.fromhex(m["ciphertext"])) for m in vector["messages"]]
    for (writer, reader), (payload, ciphertext) in zip(turns, messages, strict=False):
        assert writer.write(payload) == ciphertext
        assert reader.read(ciphertext) == payload
    assert initiator.hash == responder.hash == bytes.fromhex(vector["handshake_hash"])
    if "init_static" in vector:
        assert responder.remote == KeyPair(bytes.fromhex(vector["init_static"])).public
    keys = initiator.split()
    assert responder.split() == keys
    for at, (payload, ciphertext) in enumerate(messages[2:]):  # the initiator's turn first, then by turns
        sender = cipher_of(cipher, keys[at % 2])
        assert sender.encrypt(nonce_of(cipher, at // 2), payload, b"") == ciphertext


def pair(psk: bytes = b"k" * 32, other: bytes = b"k" * 32, knows: int = 2) -> tuple[Handshake, Handshake]:
    """An IKpsk2 handshake; the initiator believes that the responder is the holder of key ``knows``."""
    keys = [KeyPair(bytes([n]) * 32) for n in range(1, 5)]
    return (
        Handshake(
            "IKpsk2", "AESGCM", initiator=True, psk=psk, prologue=b"p", ephemeral=keys[2], static=keys[0],
            remote=KeyPair(bytes([knows]) * 32).public,
        ),
        Handshake(
            "IKpsk2", "AESGCM", initiator=False, psk=other, prologue=b"p", ephemeral=keys[3], static=keys[1]
        ),
    )  # fmt: skip


def test_another_crew_s_key_gets_no_session() -> None:
    initiator, responder = pair(other=b"x" * 32)
    responder.read(initiator.write())  # psk2 is mixed in with the answer
    with pytest.raises(HandshakeError):
        initiator.read(responder.write())


def test_a_message_for_another_member_is_not_read() -> None:
    initiator, responder = pair(knows=9)
    with pytest.raises(HandshakeError):
        responder.read(initiator.write())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_to_a_message_is_refused(data: st.DataObject) -> None:
    initiator, responder = pair()
    message = bytearray(initiator.write(b"payload"))
    turn = data.draw(st.sampled_from(["first", "second"]))
    if turn == "second":
        responder.read(bytes(message))
        message = bytearray(responder.write(b"answer"))
    reader = responder if turn == "first" else initiator
    cut = data.draw(st.booleans())
    if cut:
        message = message[: data.draw(st.integers(0, len(message) - 1))]
    else:
        message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(HandshakeError):
        reader.read(bytes(message))


def test_a_point_of_small_order_is_refused() -> None:
    with pytest.raises(HandshakeError, match="small order"):
        KeyPair(b"\x01" * 32).shared(bytes(32))


def test_keys_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        pair(psk=b"k" * 33)
    with pytest.raises(ValueError, match="public key"):
        Handshake("IKpsk2", "AESGCM", initiator=True, psk=b"k" * 32, prologue=b"",
                  ephemeral=KeyPair(b"\x03" * 32), static=KeyPair(b"\x01" * 32))  # fmt: skip
    initiator, _ = pair()
    with pytest.raises(RuntimeError, match="last message"):
        initiator.split()
