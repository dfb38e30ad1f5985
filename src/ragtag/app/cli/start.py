"""``ragtag demo``, ``run``, ``join``, ``invite`` and ``revoke``: peers as processes, or as actors on Ray."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ragtag.app.cli import options
from ragtag.app.cli.common import Command, fail, plain_errors, print_json, words_typed

if TYPE_CHECKING:
    from ragtag.app.invitation.token import Token
    from ragtag.app.on_ray.launch import Placement
import ctypes
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

_DAYS = 7.0  # of a person's token


@plain_errors
def demo(
    seed: options.Seed = 0,
    run_folder: options.RunFolder = None,
    watch: options.Watch = None,
    as_json: options.Json = False,
) -> None:
    """Train a small model on six peers while packets get lost, one peer freezes and one dies."""
    from ragtag.app.cli.common import new_run_folder
    from ragtag.app.demo import DemoPlan, run_demo

    console = Console(stderr=as_json)
    result = run_demo(
        plan=DemoPlan(seed=seed),
        folder=run_folder or new_run_folder("demo"),
        console=console,
        live=console.is_terminal if watch is None else watch,
    )
    if as_json:
        print_json(result.to_json())
    raise typer.Exit(0 if result.ok else 1)


@plain_errors
def run(
    ctx: typer.Context,
    script: options.Script,
    args: options.ScriptArgs = None,
    peers: options.Peers = 2,
    module: options.Module = False,
    on_error: options.WhenOneFails = options.OnError.continue_,
    faults: options.FaultsText = "",
    seed: options.Seed = 0,
    run_folder: options.RunFolder = None,
    watch: options.Watch = None,
    listen: options.Listen = "127.0.0.1",
    as_json: options.Json = False,
    on: options.OnWhat = None,
    cpus_per_peer: options.CpusPerPeer = None,
    gpus_per_peer: options.GpusPerPeer = None,
    restarts: options.Restarts = None,
    working_dir: options.WorkingDir = None,
    min_peers: options.MinPeers = 1,
) -> None:
    """Start N peers of a script, on this machine or on a Ray cluster.

    The script joins its crew with [bold]ragtag.join()[/bold]. Each line that a
    peer prints comes with its number; an error that several peers share is
    shown once. Others can join while it runs: [bold]ragtag invite[/bold] prints
    what they need.

    A peer has finished when its script came to its end and averaged. A peer
    is lost when a signal or a fault ended it: the others go on, and the run
    is well as long as enough of them finish. A script that ends with an
    error of its own is never well.
    """
    if listen.count(":") == 1:
        raise ValueError(f"--listen {listen}: give a host alone; each peer listens at a port that is free")
    argv = [*(["-m"] if module else []), script, *(args or [])]
    _launch(
        argv, script if module else Path(script).stem, peers, on_error.value, faults, seed, run_folder, watch,
        as_json, listen, None,
        _placement(on, listen, cpus_per_peer, gpus_per_peer, restarts, working_dir),
        min_peers, restarts if on is None else None, command=_again(ctx),
    )  # fmt: skip


@plain_errors
def join(
    ctx: typer.Context,
    token: options.TokenText,
    script: options.ScriptToJoin = None,
    args: options.ScriptArgs = None,
    auxiliary: options.Auxiliary = False,
    client: options.Client = False,
    peers: options.PeersHere = 1,
    module: options.Module = False,
    on_error: options.WhenOneFails = options.OnError.continue_,
    faults: options.FaultsText = "",
    run_folder: options.RunFolder = None,
    watch: options.Watch = None,
    as_json: options.Json = False,
) -> None:
    """Join a crew by its invitation, with one peer (or N) of a script on this machine.

    TOKEN is a file with what [bold]ragtag invite[/bold] printed, [bold]-[/bold] for standard
    input, or the folder of a run on this machine; where RAGTAG_TOKEN is set there
    is no TOKEN. The token itself can stand there, too, but other users may see it
    in passing. The first one to join a new crew, on the machine that its token
    names, begins it.

    With [bold]--auxiliary[/bold] there is no script: the peer owns a share of what is
    averaged, on a machine with a good line and no GPU, so that the others send
    and receive less.

    With [bold]--client[/bold] the peer trains and owns no share: it sends its values to
    those that do, and gets the averages back. One peer at least must be no
    client.
    """
    from ragtag.app.crew.membership import NotLetIn
    from ragtag.app.invitation.invite import RunOver, usable

    if not auxiliary and script is None:
        raise ValueError("Missing argument 'SCRIPT': what this peer trains (or --auxiliary: without one)")
    if auxiliary:
        given = {"SCRIPT": script, "-n": peers != 1, "-m": module, "--faults": faults, "-o": run_folder}
        given["--client"] = client
        for name in (name for name, value in given.items() if value):
            raise ValueError(f"{name} is for peers that train; an auxiliary computes nothing: leave one out")

    if token == VARIABLE and script is not None and not module:
        _require_script(script)
    try:
        text, said = usable(Path(token) if is_folder(token) else given_token(token))
    except (RunOver, NotLetIn) as error:
        fail(str(error), 1)
    if said:
        Console(stderr=True, highlight=False).print(f"ragtag: {escape(said)}", style="dim", soft_wrap=True)
    if auxiliary:
        _assist(text, as_json)
    assert script is not None
    argv = [*(["-m"] if module else []), script, *(args or [])]
    _launch(
        argv, script if module else Path(script).stem, peers, on_error.value, faults, 0, run_folder, watch,
        as_json, "", text, env={"RAGTAG_ROLE": "client"} if client else {}, command=_again(ctx),
    )  # fmt: skip


def _assist(token: str, as_json: bool) -> NoReturn:
    """Average for a crew, and say what is done."""
    from ragtag.app.crew.auxiliary import assist
    from ragtag.app.crew.membership import JoinError
    from ragtag.app.terminal.console import SparedConsole

    err = SparedConsole(stderr=True, highlight=False)
    try:
        done = assist(token, lambda line: err.print(f"ragtag: {escape(line)}", soft_wrap=True))
    except JoinError as error:
        fail(str(error), 1)
    err.print(f"ragtag: {escape(done.why)}; {escape(str(done))}", soft_wrap=True)
    if as_json:
        print_json(done.to_json())
    err.close()
    raise typer.Exit(done.exit_code)


@plain_errors
def invite(
    run_folder: options.RunToJoin = None,
    listen: options.ListenAt = None,
    crew: options.CrewName = None,
    minutes: options.Minutes = None,
    persons: options.PersonsOnly = False,
    person: options.ForWhom = None,
    days: options.Days = None,
    as_json: options.Json = False,
) -> None:
    """Print a token: all that another machine needs to join a crew.

    With RUN, the crew of that run, which must be running. Without, a new crew:
    the first peer to join, on this machine, begins it. Anybody that has the token
    can get in: it is as secret as the crew should be.

    With [bold]--persons[/bold] the new crew takes persons only, and the token is its
    holder's. [bold]--for NAME[/bold] makes one for a person of it, which ends, and which
    [bold]ragtag revoke[/bold] takes back.
    """
    from ragtag.app.crew.membership import NotLetIn
    from ragtag.app.invitation.invite import RunOver, for_person, invitation_to, new_invitation, shown

    if person is not None:
        _check_for_person(run_folder, minutes, persons)
    if run_folder is None and minutes is not None:
        raise ValueError(
            "the token of a new crew holds its key, and cannot end; begin the crew, then: ragtag invite RUN "
            "--minutes N"
        )
    if persons and run_folder is not None:
        raise ValueError("--persons is for a new crew, and RUN is one that there is: give one of them")
    if days is not None and person is None:
        raise ValueError("--days is of a person's token (--for NAME); an invitation's end is --minutes N")
    if run_folder is not None and not (listen is None and crew is None):
        raise ValueError(
            "--listen and --crew are of a new crew, and RUN is one that there is: give one of them"
        )
    try:
        if person is not None and run_folder is not None:
            token = for_person(_holder(run_folder), person, _DAYS if days is None else days)
        elif run_folder is not None:
            token = invitation_to(Path(run_folder), minutes)
        else:
            token = new_invitation(listen, crew, persons)
    except (RunOver, NotLetIn) as error:
        fail(str(error), 1)
    if as_json:
        print_json(token.to_json())
    else:
        shown(token, Console(highlight=False), Console(stderr=True, highlight=False))


def _check_for_person(holder: str | None, minutes: int | None, persons: bool) -> None:
    """Refuse what does not go with ``--for``.

    Raises:
        ValueError: no holder's token, or an option of another kind of token.
    """
    if persons:
        raise ValueError(
            "--persons is for a new crew, and --for NAME is of one that there is: give one of them"
        )
    if minutes is not None:
        raise ValueError(
            "--minutes is of an invitation; the end of a person's token (--for NAME) is --days N"
        )
    if holder is None:
        raise ValueError(
            "--for NAME needs the token of the crew's holder: ragtag invite --for NAME --days N HOLDER"
        )


@plain_errors
def revoke(whom: options.Whom, holder: options.HolderText, as_json: options.Json = False) -> None:
    """Take a person's tokens back: the crew puts its peers out, and goes on.

    By name, all tokens of that person that were issued until now are void; by a
    token, that one and those before it. A later one lets the person in again.
    """
    from ragtag.app.crew.membership import NotLetIn
    from ragtag.app.invitation.invite import RunOver, take_back
    from ragtag.app.invitation.token import decode

    named: str | None = None
    text = token_text(whom) if _TOKEN.match(whom) or _is(whom, Path.is_file) else ""
    if _TOKEN.match(text):
        credential = decode(text).credential
        if credential is None:
            raise ValueError(
                "that token is no person's, so it cannot be revoked; give a person's name or token"
            )
        named, serial = credential.shown.person, credential.shown.serial
    try:
        found = take_back(_holder(holder), named or whom, serial if named else None)
    except (RunOver, NotLetIn) as error:
        fail(str(error), 1)
    if as_json:
        print_json(found.to_json())
        return
    told = f"{len(found.told)} of the members that the token names were told, and tell the others"
    said = f"{escape(found.person)} is out of crew {escape(found.crew)}: {told}."
    Console(highlight=False).print(said, soft_wrap=True)


def _holder(given: str) -> Token:
    """The token that is meant: of a run's folder, or as ``ragtag join`` takes one."""
    from ragtag.app.invitation.token import decode, newest_token

    return decode(newest_token(Path(given)) if is_folder(given) else given_token(given))


def _again(ctx: typer.Context) -> str:
    """What to type to run this again, for the trace, which others may read: without a token."""
    return shlex.join("TOKEN" if _TOKEN.match(word) else word for word in words_typed(ctx))


def _launch(
    argv: list[str],
    name: str,
    peers: int,
    on_error: Literal["continue", "stop"],
    faults: str,
    seed: int,
    run_folder: Path | None,
    watch: bool | None,
    as_json: bool,
    listen: str,
    token: str | None,
    placement: Placement | None = None,
    min_peers: int = 1,
    restarts: int | None = None,
    env: Mapping[str, str] | None = None,
    command: str = "",
) -> None:
    """What ``run`` and ``join`` share.

    placement: on Ray.
    restarts, env: on this machine.
    command: what was typed.
    """
    from ragtag.app.launch import check_launch, launch
    from ragtag.app.on_ray.launch import check_on_ray, launch_on_ray
    from ragtag.app.terminal.console import SparedConsole
    from ragtag.app.terminal.run_view import RunView, models, print_wrapped, result_json, summary, watching
    from ragtag.core.faultspec import parse_faults

    parsed = parse_faults(faults)
    if placement is not None:
        check_on_ray(peers, argv, placement, parsed, min_peers)
    else:  # before a folder is made
        joins = token is not None
        check_launch(peers, argv, parsed, joins=joins, min_peers=min_peers, restarts=restarts or 0)
    out = SparedConsole(stderr=as_json, highlight=False)
    err = out if out.is_terminal else SparedConsole(stderr=True, highlight=False)
    folder = _folder(run_folder, name)
    live = out.is_terminal if watch is None else watch
    view = RunView(out, err, watched=live, on_error=on_error)
    start = (
        partial(launch, host=listen or "127.0.0.1", token=token, restarts=restarts or 0, env=env)
        if placement is None
        else partial(launch_on_ray, placement=placement)
    )
    with watching(folder, out, name) if live else nullcontext():
        result = start(
            peers,
            argv,
            run_folder=folder,
            seed=seed,
            faults=parsed,
            on_error=on_error,
            on_event=view.show,
            min_peers=min_peers,
            command=command,
        )
    alike = models(folder) if result.finished else ""  # a peer that was ended early never agreed on one
    if as_json:
        print_json(result_json(result) | {"models": alike or None})
    else:
        told = f"trace in {escape(str(folder))}; [cyan]ragtag report {escape(str(folder))}[/cyan]"
        for line in [*summary(result), *([alike] if alike else []), told]:
            print_wrapped(err, Text.from_markup(line))
    out.close()
    err.close()
    raise typer.Exit(result.exit_code)


def _placement(
    on: options.On | None,
    listen: str,
    cpus: float | None,
    gpus: float | None,
    restarts: int | None,
    working_dir: Path | None,
) -> Placement | None:
    """What peers take of a Ray cluster; ``None``: they run on this machine."""
    given = {
        "cpus_per_peer": cpus,
        "gpus_per_peer": gpus,
        "working_dir": working_dir,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if on is None:
        for name in given:
            raise ValueError(f"--{name.replace('_', '-')} is for peers on a Ray cluster: add --on ray")
        return None
    if listen != "127.0.0.1":
        raise ValueError("--listen is for peers on this machine; on Ray each listens at its node's address")
    from ragtag.app.on_ray.launch import Placement

    if restarts is not None:
        given["restarts"] = restarts
    return Placement(**given)  # type: ignore[arg-type]


def _folder(given: Path | None, name: str) -> Path:
    from ragtag.app.cli.common import new_run_folder

    if given is None:
        return new_run_folder(name)
    given.mkdir(parents=True, exist_ok=True)
    return given


# -- How ``join`` is told its token: what other users of the machine can read is no place for it

VARIABLE = "RAGTAG_TOKEN"
_TOKEN = re.compile(r"\s*ragtag\d+-", re.IGNORECASE)
_TEXT_MAX = 8192


class JoinCommand(Command):
    """Takes options between TOKEN and SCRIPT, too, and no TOKEN where the environment has it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Bring the arguments into the order that the parser knows: options, TOKEN, SCRIPT, its arguments."""
        self.keep_words(ctx, args)
        options, rest = self._parted(ctx, args)
        if "--" not in options:
            if os.environ.get(VARIABLE):
                if rest and (rest[0] == "-" or _TOKEN.match(rest[0])):
                    ctx.fail(f"the token is in {VARIABLE} already; give it once")
                token = [VARIABLE]
            else:
                token, rest = rest[:1], rest[1:]
            more, rest = self._parted(ctx, rest)
            args = [*options, *more, *token, *rest]
        return super().parse_args(ctx, args)

    def _parted(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        """Options that stand first, and what begins with the first argument that is none."""
        found, left, _ = self.make_parser(ctx).parse_args(args=list(args))
        named = [found[name] for name in ("token", "script") if isinstance(found.get(name), str)]
        at = len(args) - len(named) - len(found.get("args") or ()) - len(left)
        return args[:at], args[at:]


def is_folder(given: str) -> bool:
    """Whether a TOKEN is a run's folder."""
    return _is(given, Path.is_dir)


def _is(given: str, what: Callable[[Path], bool]) -> bool:
    """Whether a file is that; a token, or what was to be one, may be too long for a file's name."""
    try:
        return bool(given) and _TOKEN.match(given) is None and what(Path(given))
    except OSError:
        return False


def _require_script(given: str) -> None:
    """Refuse a TOKEN where the environment has one: in the place of a SCRIPT it would be run as Python.

    Raises:
        ValueError: it is a file with a token, or a run's folder.
    """
    program = _is(given, lambda path: (path / "__main__.py").exists())
    if (is_folder(given) and not program) or (
        _is(given, Path.is_file) and _TOKEN.match(token_text(given)) is not None
    ):
        raise ValueError(
            f"the token is given twice: by {VARIABLE}, and by {given}. Leave {given} out, or unset {VARIABLE}"
        )


def given_token(given: str) -> str:
    """``token_text``, where that begins as a token does.

    Raises:
        ValueError: it does not, or there is none.
        OSError: the file cannot be read.
    """
    from ragtag.app.invitation.token import no_token

    text = token_text(given)
    if _TOKEN.match(text):
        return text
    if given == VARIABLE:
        what = f"what {VARIABLE} holds"
    elif given == "-":
        what = "what came on standard input" if text.strip() else "standard input was empty: that"
    elif _is(given, Path.exists):
        what = f"what is in {given}" if text.strip() else f"{given} is empty: that"
    else:
        what = f"{given[:24]!r} is no file, and"
    raise no_token(what)


def token_text(given: str) -> str:
    """The token that is meant: a file's content, standard input's (``-``), the environment's, or itself.

    One that stands in the command line is made unreadable there, where the system lets a process do that.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    if given == VARIABLE:
        text = os.environ.get(VARIABLE, "")
        if not text:
            raise ValueError(
                f"{VARIABLE} is not set; put the token there, in a file, or on standard input (-)"
            )
        return text
    if given == "-":
        return _of_input()
    if _is(given, Path.exists):
        with Path(given).open(encoding="utf-8", errors="replace") as file:
            return file.read(_TEXT_MAX + 1)
    hide(given)
    return given


def _of_input() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.read(_TEXT_MAX + 1)
    print("token: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline(_TEXT_MAX + 1)


def hide(text: str) -> bool:
    """Overwrite ``text`` in this process's command line, as ``ps`` shows it to every user; whether it was.

    Linux alone tells where that is (proc(5): arg_start and arg_end, fields 48 and 49 of /proc/PID/stat).
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return False
    secret = os.fsencode(text)
    at = ctypes.string_at(start, end - start).find(secret) if 0 < start < end and secret else -1
    if at < 0:
        return False
    ctypes.memset(start + at, ord("x"), len(secret))
    return True
