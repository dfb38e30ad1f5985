"""Encrypted sums: those with the key read the sum, the one that adds up reads nothing."""

from __future__ import annotations

import sys

import pytest
import torch

from ragtag.core.errors import NotFinite
from ragtag.core.seed import generator
from ragtag.privacy.encrypted import LENGTH_MAX, EncryptedSum, NoTenSEAL, add_encrypted

LENGTH, PEERS = 2050, 3  # two ciphertexts


def vector(peer: int, length: int = LENGTH) -> torch.Tensor:
    return torch.from_numpy(generator(0, "vector", peer).uniform(-1, 1, length))


def test_peers_read_the_sum_and_the_one_that_adds_up_does_not() -> None:
    pytest.importorskip("tenseal")
    first = EncryptedSum(LENGTH, peers=PEERS)
    peers = [first, *(EncryptedSum(LENGTH, peers=PEERS, key=first.key) for _ in range(PEERS - 1))]
    parts = [peer.encrypt(vector(i)) for i, peer in enumerate(peers)]
    total = add_encrypted(first.public, parts)
    wanted = sum((vector(i) for i in range(PEERS)), torch.zeros(LENGTH, dtype=torch.float64))
    for peer in peers:
        torch.testing.assert_close(peer.decrypt(total), wanted, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="public part of a key, which cannot decrypt"):
        EncryptedSum(LENGTH, peers=PEERS, key=first.public)
    assert first.encrypt(vector(0)) != parts[0], "a vector looks another each time"
    stranger = EncryptedSum(LENGTH, peers=PEERS).decrypt(total)
    assert float((stranger - wanted).abs().max()) > 1.0


def test_values_up_to_the_limit_do_not_wrap_around() -> None:
    pytest.importorskip("tenseal")
    peer = EncryptedSum(2, peers=PEERS)
    most = torch.tensor([peer.limit, -peer.limit], dtype=torch.float64)
    total = peer.decrypt(add_encrypted(peer.public, [peer.encrypt(most)] * PEERS))
    torch.testing.assert_close(total, PEERS * most, rtol=1e-8, atol=0)
    with pytest.raises(ValueError, match="clip or scale them"):
        peer.encrypt(2 * most)


def test_bad_input_is_named() -> None:
    pytest.importorskip("tenseal")
    peer = EncryptedSum(4, peers=2)
    part = peer.encrypt(torch.zeros(4))
    with pytest.raises(ValueError, match=r"a vector \[3\]; it must be \[4\]"):
        peer.encrypt(torch.zeros(3))
    with pytest.raises(NotFinite, match="the vector to encrypt"):
        peer.encrypt(torch.tensor([0.0, 0.0, 0.0, float("nan")]))
    with pytest.raises(ValueError, match="no messages"):
        add_encrypted(peer.public, [])
    with pytest.raises(ValueError, match="among others of another size"):
        add_encrypted(peer.public, [part, EncryptedSum(3, peers=2, key=peer.key).encrypt(torch.zeros(3))])
    for broken, said in ((part[:-1], "cut off"), (part + b"1", "cut off"), (b"", "0 ciphertexts")):
        with pytest.raises(ValueError, match=said):
            peer.decrypt(broken)
    with pytest.raises(ValueError, match="this is no message"):
        peer.decrypt(part[:4] + bytes(len(part) - 4))
    with pytest.raises(ValueError, match="this is no key"):
        EncryptedSum(4, peers=2, key=b"key")


@pytest.mark.parametrize(("length", "said"), [(LENGTH_MAX + 1, "use crew.secure_average"), (0, "0 values")])
def test_long_vectors_are_for_secure_averages(length: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EncryptedSum(length, peers=2)
    with pytest.raises(ValueError, match="0 peers"):
        EncryptedSum(1, peers=0)


def test_without_tenseal_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(NoTenSEAL, match=r"pip install 'ragtag\[encrypted\]'"):
        EncryptedSum(4, peers=2)
