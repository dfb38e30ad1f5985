"""``ragtag invite``: making an invitation, and showing it."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ragtag.app.environment import Address, format_address, parse_address
from ragtag.app.token import Token, decode, encode, kept_token, new_key


@dataclass(frozen=True, slots=True)
class Invitation:
    """A token, and what to say of it. new: the crew does not exist yet."""

    token: Token
    new: bool

    @property
    def text(self) -> str:
        """The token as one line."""
        return encode(self.token)

    @property
    def here_only(self) -> bool:
        """Whether only this machine's processes can use it."""
        return all(host.startswith("127.") or host == "::1" for host, _ in self.token.addresses)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "token": self.text,
            "crew": self.token.crew,
            "addresses": [format_address(address) for address in self.token.addresses],
            "ends_unix_s": self.token.ends_unix_s or None,
            "new": self.new,
        }


def invitation_to(run_folder: Path, minutes: int | None) -> Invitation:
    """An invitation to the crew of a run on this machine.

    Raises:
        TokenError: the folder holds none.
    """
    token = decode(kept_token(run_folder))
    return Invitation(_ending(token, minutes), new=False)


def new_invitation(listen: str | None, crew: str | None, minutes: int | None) -> Invitation:
    """An invitation to a crew that the first peer to join will begin, on this machine.

    Raises:
        ValueError: ``listen`` is no address.
        OSError: it is not this machine's, or its port is taken.
    """
    name = crew or f"crew-{secrets.token_hex(4)}"
    token = Token((_address(listen),), name, new_key())
    return Invitation(_ending(token, minutes), new=True)


def _ending(token: Token, minutes: int | None) -> Token:
    return token if minutes is None else replace(token, ends_unix_s=int(time.time()) + 60 * minutes)


def _address(listen: str | None) -> Address:
    """An address of this machine, with a port that is free now."""
    host, port = _own_host(), 0
    if listen is not None:
        try:
            host, port = parse_address(listen)
        except ValueError:
            host, port = parse_address(f"[{listen}]:1" if ":" in listen else f"{listen}:1")[0], 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot listen at {format_address((host, port))}: {error.strerror}; give an address of "
                "this machine that is free: --listen HOST or HOST:PORT",
            ) from None
        return host, int(probe.getsockname()[1])


def _own_host() -> str:
    """The address by which this machine reaches others (nothing is sent); loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address of nobody
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def shown(invitation: Invitation, out: Console, err: Console) -> None:
    """The token alone on standard output, what to do with it on standard error."""
    out.print(invitation.text, soft_wrap=True, markup=False)
    where = ", ".join(format_address(address) for address in invitation.token.addresses[:2])
    more = len(invitation.token.addresses) - 2
    where += f" and {more} more" if more > 0 else ""
    err.print()
    if invitation.new:
        err.print(
            f"A new crew, [bold]{escape(invitation.token.crew)}[/bold]. Its first peer begins it at {where}:"
        )
        err.print("  on this machine:  [cyan]ragtag join TOKEN script.py[/cyan]")
        err.print(
            "  on any other:     [cyan]ragtag join TOKEN script.py[/cyan]  (then, or at any time later)"
        )
    else:
        err.print(f"The crew [bold]{escape(invitation.token.crew)}[/bold], through {where}:")
        err.print("  [cyan]ragtag join TOKEN script.py[/cyan]")
    if invitation.here_only:
        err.print("Its addresses are loopback: only this machine's processes can use it (see --listen).")
    if invitation.token.ends_unix_s:
        err.print(f"It ends at {time.strftime('%H:%M', time.localtime(invitation.token.ends_unix_s))}.")
    err.print("It holds the crew's key: whoever has it is in the crew.")
