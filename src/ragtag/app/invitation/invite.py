"""``ragtag invite`` and ``ragtag revoke``: making an invitation, showing it, and taking a person's back."""

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
from ragtag.app.invitation.token import KEY_BYTES, Token, decode, encode, new_key, newest_token
from ragtag.app.tracefile import TraceFollower
from ragtag.core.address import family_of, unusable
from ragtag.core.errors import Error
from ragtag.network.membership.admission import ask_for_key, tell_revocation
from ragtag.protocols.crew.joining import refusal, waiting
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.membership.passes import DAY_S, PASS_DAYS_MAX, Took

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
        of = None if self.token.credential is None else self.token.credential.shown
        return {
            "token": self.text,
            "crew": self.token.crew,
            "addresses": [format_address(address) for address in self.token.addresses],
            "ends_unix_s": self.token.ends_unix_s or None,
            "person": None if of is None else of.person,
            "serial": None if of is None else of.serial,
            "new": self.new,
        }


def invitation_to(run_folder: Path, minutes: int | None) -> Invitation:
    """An invitation to the newest crew of a run on this machine.

    Raises:
        TokenError: the folder holds none, or its peers are not in the crew yet.
        RunOver: the run has ended.
    """
    token = decode(newest_token(run_folder))
    if minutes is None and (token.number or token.signing):  # its peers' own, or the holder's
        invitation = token
    else:
        invitation = token.invitation(0 if minutes is None else int(time.time()) + 60 * minutes)
    if not TraceFollower(run_folder).is_written() and not answers(invitation):
        raise RunOver(
            f"the run in {run_folder} has ended: nobody writes its trace, and no member of crew "
            f"{token.crew!r} answers any more. Start another run, or make a new crew: ragtag invite"
        )
    return Invitation(invitation, new=False)


def new_invitation(listen: str | None, crew: str | None, persons: bool = False) -> Invitation:
    """A token for a crew that the first peer to join will begin, on this machine.

    persons: whether the crew takes persons only; then this is the holder's token.

    Raises:
        ValueError: ``listen`` is no address.
        OSError: it is not this machine's, or its port is taken.
    """
    name = crew or f"crew-{secrets.token_hex(4)}"
    signing = secrets.token_bytes(KEY_BYTES) if persons else b""
    return Invitation(Token((_address(listen),), name, new_key(), begins=True, signing=signing), new=True)


def for_person(holder: Token, person: str, days: float) -> Invitation:
    """A token for a person.

    holder: what ``new_invitation`` made, with members' addresses.

    Raises:
        TokenError: ``holder`` is another token.
        ValueError: the name or the days cannot be.
    """
    now_unix_s = time.time()
    ends_unix_s = int(now_unix_s + DAY_S * days) if 0 < days <= PASS_DAYS_MAX else 0
    return Invitation(holder.for_person(person, ends_unix_s, now_unix_s), new=False)


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A person's tokens are void. serial: the newest of them. told: the members that said so."""

    crew: str
    person: str
    serial: int
    told: tuple[Address, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "crew": self.crew,
            "person": self.person,
            "issued_until_unix_s": self.serial / 1e6,
            "told": [format_address(address) for address in self.told],
        }


def take_back(holder: Token, person: str, serial: int | None = None) -> TakenBack:
    """Tell members that a person's tokens are void; they put its peers out, and tell the others.

    serial: the newest of them (``None``: all that were issued until now).

    Raises:
        TokenError: ``holder`` is not the token of the holder of the crew's signing key.
        ValueError: the person's name cannot be.
        RunOver: no member took it.
    """
    now_s = time.time()
    told = holder.revocation(person, int(now_s * 1e6) if serial is None else serial)
    found = resolved(holder)
    answers = tell_revocation(found.addresses, found.key, told, LOOK_S)
    took = tuple(address for address, said in answers.items() if said is Took.YES)
    where = ", ".join(format_address(address) for address in holder.addresses)
    if not answers:
        raise RunOver(
            f"no member of crew {holder.crew!r} answers at {where}, so nobody was told that {person} is out: "
            "run this again while the crew runs, with the folder of a run of it in place of the token"
        )
    if not took:
        raise RunOver(
            f"the members of crew {holder.crew!r} at {where} do not take it: they take no persons, or their "
            "signing key is another one"
        )
    return TakenBack(holder.crew, person, told.serial, took)


def usable(given: Path | str) -> tuple[str, str]:
    """A token to join by, and what is to be said first.

    given: a run's folder, or a token's text.

    Raises:
        TokenError: it is no token, or has ended.
        RunOver: the run has ended.
        NotLetIn: the members that it names do not let its holder in.
    """
    if isinstance(given, Path):
        return invitation_to(given, None).text, ""  # its peers' own, the holder's, or a new one
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
    invitation = token if token.number else Token(token.addresses, token.crew, token.key).invitation()
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
            if listen.count(":") == 1:  # a port that is none, and no host of IPv6
                raise
            host, port = parse_address(f"[{listen}]:1" if ":" in listen else f"{listen}:1")[0], 0
    if family_of(host) and (why := unusable((host, port or 1))):
        raise ValueError(f"--listen {listen}: {why}: give the address at which others reach this machine")
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
    of = invitation.token.credential
    if of is not None:
        ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(of.shown.ends_unix_s))
        who = escape(of.shown.person)
        crew = escape(invitation.token.crew)
        err.print(f"For [bold]{who}[/bold] alone, in the crew [bold]{crew}[/bold], until {ends}:")
        err.print("  [cyan]ragtag join token.txt script.py[/cyan]")
        err.print(f"Whoever has it takes part as {who}. ragtag revoke {who} HOLDER puts {who} out.")
        return
    if invitation.token.signing and not invitation.new:
        err.print(
            f"The crew [bold]{escape(invitation.token.crew)}[/bold] takes persons only. This is its holder's "
            "own token, for your eyes only: whoever has it lets persons in and puts them out."
        )
        err.print("  let a person in:  [cyan]ragtag invite --for alice --days 7 RUN[/cyan]")
        err.print("  put a person out: [cyan]ragtag revoke alice RUN[/cyan]")
        err.print("RUN: the folder that you gave.")
        return
    if invitation.token.signing:
        err.print(
            f"A new crew that takes persons only, [bold]{escape(invitation.token.crew)}[/bold]. This is the "
            "token of its holder:"
        )
        err.print("  begin it, on this machine:  [cyan]ragtag join holder.txt script.py[/cyan]")
        err.print("  let a person in:            [cyan]ragtag invite --for alice --days 7 holder.txt[/cyan]")
        err.print("  put a person out:           [cyan]ragtag revoke alice holder.txt[/cyan]")
        err.print(
            f"Its first peer listens at {where}. holder.txt: a file with this token, for your eyes only."
        )
        return
    if invitation.new:
        err.print(
            f"A new crew, [bold]{escape(invitation.token.crew)}[/bold]. Its first peer begins it at {where}:"
        )
        err.print("  on this machine:  [cyan]ragtag join token.txt script.py[/cyan]")
        err.print(
            "  on any other:     [cyan]ragtag join token.txt script.py[/cyan]  (then, or any time later)"
        )
    else:
        err.print(f"The crew [bold]{escape(invitation.token.crew)}[/bold], through {where}:")
        err.print("  [cyan]ragtag join token.txt script.py[/cyan]")
    if invitation.here_only:
        err.print("Its addresses are loopback: only this machine's processes can use it (see --listen).")
    if invitation.token.ends_unix_s:
        err.print(f"It ends at {time.strftime('%H:%M', time.localtime(invitation.token.ends_unix_s))}.")
    err.print("token.txt: a file with the token. Whoever has it can get in.")
