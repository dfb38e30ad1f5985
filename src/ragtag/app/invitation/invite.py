"""``ragtag invite``: making an invitation, and showing it."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ragtag.app.crew.membership import NotLetIn, asked, begins_here, here_only, resolved
from ragtag.app.environment import Address, format_address, parse_address
from ragtag.app.invitation.token import Token, decode, encode, kept_token, new_key
from ragtag.app.tracefile import TraceFollower
from ragtag.core.errors import Error
from ragtag.network.membership.admission import ask_for_key
from ragtag.protocols.crew.joining import refusal, waiting
from ragtag.protocols.membership.pace import INITIAL_RTO_S

LOOK_S = 1.5 * INITIAL_RTO_S
"""How long a command looks whether a crew is there: a few attempts, with no round trip known."""


class RunOver(Error, RuntimeError):
    """The run has ended, so there is no crew to join; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A token, and what to say of it.

    new: the crew does not exist yet.
    """

    token: Token
    new: bool

    @property
    def text(self) -> str:
        """The token as one line."""
        return encode(self.token)

    @property
    def here_only(self) -> bool:
        """Whether only this machine's processes can use it."""
        return here_only(self.token)

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
        TokenError: the folder holds none, or its peers are not in the crew yet.
        RunOver: the run has ended.
    """
    token = decode(kept_token(run_folder))
    if token.number and minutes is None:  # its peers are newcomers themselves: it is theirs
        invitation = token
    else:
        invitation = token.invitation(0 if minutes is None else int(time.time()) + 60 * minutes)
    if not TraceFollower(run_folder).is_written() and not answers(invitation):
        raise RunOver(
            f"the run in {run_folder} has ended: nobody writes its trace, and no member of crew "
            f"{token.crew!r} answers any more. Start another run, or make a new crew: ragtag invite"
        )
    return Invitation(invitation, new=False)


def new_invitation(listen: str | None, crew: str | None) -> Invitation:
    """A token for a crew that the first peer to join will begin, on this machine.

    Raises:
        ValueError: ``listen`` is no address.
        OSError: it is not this machine's, or its port is taken.
    """
    name = crew or f"crew-{secrets.token_hex(4)}"
    return Invitation(Token((_address(listen),), name, new_key(), begins=True), new=True)


def usable(given: Path | str) -> tuple[str, str]:
    """A token to join by, and what is to be said first.

    given: a run's folder, or a token's text.

    Raises:
        TokenError: it is no token, or has ended.
        RunOver: the run has ended.
        NotLetIn: the members that it names do not let its holder in.
    """
    if isinstance(given, Path):
        return invitation_to(given, None).text, ""
    token = decode(given, time.time())
    if begins_here(token) or answers(token):
        return given, ""
    waits = waiting(token.crew, asked(token), None)
    return given, f"{waits}, as long as the script does (ragtag.join: 120 s, unless it says more)"


def answers(token: Token, for_s: float = LOOK_S) -> bool:
    """Whether a member lets this token's holder in, now.

    Raises:
        NotLetIn: all members that it names have refused, or none of its addresses can be found.
    """
    invitation = token if token.number else token.invitation()
    found = resolved(invitation)
    key, refused = ask_for_key(found.addresses, found.key, found.number, found.ends_unix_s, for_s)
    if key is None and len(refused) == len(set(found.addresses)):
        raise NotLetIn(refusal(found.crew, {format_address(at): said for at, said in refused.items()}))
    return key is not None


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
        err.print("  on this machine:  [cyan]ragtag join token.txt script.py[/cyan]")
        err.print(
            "  on any other:     [cyan]ragtag join token.txt script.py[/cyan]  (then, or at any time later)"
        )
    else:
        err.print(f"The crew [bold]{escape(invitation.token.crew)}[/bold], through {where}:")
        err.print("  [cyan]ragtag join token.txt script.py[/cyan]")
    if invitation.here_only:
        err.print("Its addresses are loopback: only this machine's processes can use it (see --listen).")
    if invitation.token.ends_unix_s:
        err.print(f"It ends at {time.strftime('%H:%M', time.localtime(invitation.token.ends_unix_s))}.")
    err.print("token.txt: a file with the token. Whoever has it can get in.")
