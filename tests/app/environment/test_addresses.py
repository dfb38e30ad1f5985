"""Addresses as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.environment import (
    format_address,
    looked_up,
    parse_address,
)
from ragtag.app.environment.addresses import require_one_family


def test_addresses_read_back() -> None:
    for address in (("127.0.0.1", 1), ("::1", 65535), ("host.example", 29500)):
        assert parse_address(format_address(address)) == address


@pytest.mark.parametrize(
    "text", ["", ":1", "a:", "a:0", "a:65536", "::1:5", "a:-1", "a:1e3", "x" * 300 + ":1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert host
    assert 1 <= port <= 65535


def test_names_are_looked_up_before_anything_is_started() -> None:
    assert looked_up(("127.0.0.1", 4000)) == ("127.0.0.1", 4000)
    assert looked_up(("localhost", 4000)) in (("127.0.0.1", 4000), ("::1", 4000))
    with pytest.raises(ValueError, match=r"^address 'otters.invalid' cannot be found: "):
        looked_up(("otters.invalid", 4000))
    with pytest.raises(ValueError, match=r"^address '255.255.255.255', port 4000, is no address of one host"):
        looked_up(("255.255.255.255", 4000))


def test_peers_of_two_families_are_told_apart_by_number() -> None:
    require_one_family([("10.0.0.1", 1), ("10.0.0.2", 2)], ("10.0.0.2", 2))
    with pytest.raises(
        ValueError, match=r"^peer 1 told the address '::1', port 2, is an IPv6 address, and this"
    ):
        require_one_family([("10.0.0.1", 1), ("::1", 2)], ("10.0.0.1", 1))
