"""Addresses as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.environment import (
    format_address,
    parse_address,
)


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
