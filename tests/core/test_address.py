"""Which addresses that others tell are sent to."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.address import family_of, is_loopback, unusable


@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", 4), ("10.1.2.3", 4), ("::1", 6), ("fd00::1", 6), ("::ffff:10.0.0.1", 6)],
)
def test_a_numeric_address_of_one_host_is_taken_by_a_socket_of_its_family(host: str, family: int) -> None:
    assert family_of(host) == family
    assert unusable((host, 4000)) == unusable((host, 4000), family) == ""
    other = 10 - family
    assert unusable((host, 4000), other) == (
        f"'{host}', port 4000, is an IPv{family} address, and this peer has an IPv{other} one"
    )


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("otters.example", "is no numeric address"),
        ("127.0.0.1%x", "is no numeric address"),
        ("1.2.3", "is no numeric address"),
        ("01.2.3.4", "is no numeric address"),
        ("", "is no numeric address"),
        ("a\0b", "is no numeric address"),
        ("\ud800", "is no numeric address"),
        ("fe80::1%eth0", "names a network device, which means nothing on another machine"),
        ("255.255.255.255", "is no address of one host"),
        ("::ffff:255.255.255.255", "is no address of one host"),
        ("224.0.0.9", "is no address of one host"),
        ("ff02::1", "is no address of one host"),
        ("0.0.0.0", "is no address of one host"),
        ("::", "is no address of one host"),
    ],
)
def test_others_are_not_and_it_is_said_why(host: str, why: str) -> None:
    assert unusable((host, 4000)) == f"{host!r}, port 4000, {why}"


@pytest.mark.parametrize("port", [-1, 0, 65536, 1 << 40])
def test_a_port_is_needed(port: int) -> None:
    assert unusable(("127.0.0.1", port)) == f"'127.0.0.1', port {port}, has no port that could be sent to"


@given(st.one_of(st.text(max_size=60), st.ip_addresses().map(str), st.from_regex(r"[0-9a-f:.%]{0,45}")))
def test_what_is_taken_the_system_reads_without_looking_it_up(host: str) -> None:
    family = family_of(host)
    if not unusable((host, 4000)):
        assert socket.inet_pton(socket.AF_INET6 if family == 6 else socket.AF_INET, host)


def test_what_stays_on_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1")))
    assert not any(map(is_loopback, ("10.1.2.3", "0.0.0.0", "fd00::1", "::", "localhost", "")))
