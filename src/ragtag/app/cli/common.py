"""What commands share: one line for an error, exit codes, examples, JSON, progress, a folder for a run."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typer import BadParameter
from typer.core import TyperCommand

from ragtag.app.disk import explain

P = ParamSpec("P")

_EXIT_CODES = """[bold]Exit codes[/bold]
0    all is well
1    a peer failed, a number missed its tolerance, or an error
2    wrong usage
130  interrupted"""

RUN_CODES = """[bold]Exit codes[/bold]
0    enough peers finished (--min-peers; one) and no script failed
1    fewer finished, a script failed, or an error
2    wrong usage
130  interrupted (128 and the signal's number)"""

settings = {"debug": False}


def examples(*lines: str, codes: str = _EXIT_CODES) -> str:
    """An epilog: one example a line, and what the exit codes mean."""
    shown = [f"[dim]$[/dim] [cyan]{escape(line)}[/cyan]" for line in lines]
    return "\n".join(["[bold]Examples[/bold]", *shown]) + f"\n\n{codes}"


_WORDS = "ragtag.words"


def words_typed(ctx: typer.Context) -> list[str]:
    """The command line, word by word, without options of ``ragtag`` itself."""
    return list(ctx.meta[_WORDS])


class Command(TyperCommand):
    """A command of which no argument or option may be empty, as of an unset variable, but for those that
    are by default.

    An empty path would be the current folder, and an empty name or address no name and no address. The words
    of the command line are kept for the trace, see ``words_typed``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look for what is empty before values are made of the texts."""
        self.keep_words(ctx, args)
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        params: Any = self.get_params(ctx)
        for param in params:
            if given.get(param.name) == "" and param.default != "":
                instead = f"give {param.metavar or 'a value'}{'' if param.required else ', or leave it out'}"
                raise BadParameter(f"it is empty: {instead}", ctx, param)
        return super().parse_args(ctx, args)

    @staticmethod
    def keep_words(ctx: Any, args: list[str]) -> None:
        """Keep the words for ``words_typed``, unless they were kept before they were put in another order."""
        ctx.meta.setdefault(_WORDS, [*ctx.command_path.split(), *args])


def plain_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Errors become one line on standard error and an exit code; ``--debug`` shows the traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            fail("interrupted", 130)
        except BrokenPipeError:
            sys.stdout = None  # the reader has gone; there is nothing more to flush
            raise typer.Exit(1) from None
        except Exception as error:
            if settings["debug"]:
                raise
            expected = isinstance(error, ValueError | OSError)
            text = explain(error) if isinstance(error, OSError) else str(error)
            said = " ".join(text.split()) or type(error).__name__
            hint = "" if expected else f" ({type(error).__name__}; ragtag --debug shows where)"
            fail(said + hint, 2 if expected else 1)

    return wrapped


def fail(text: str, code: int) -> NoReturn:
    """Say what is wrong in one line, which a terminal shows broken between words, and exit."""
    from ragtag.app.terminal.run_view import print_wrapped

    print_wrapped(Console(stderr=True), Text.assemble(("error:", "bold red"), f" {text}"))
    raise typer.Exit(code) from None


def print_json(value: dict[str, Any]) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False, default=str))


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, in a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title}: {escape(what)}")

        yield tell


RUNS = Path("runs")


def new_run_folder(name: str, under: Path = RUNS) -> Path:
    """Make a new folder for a run: ``runs/NAME-DATE-TIME``, with a number where that is taken.

    Raises:
        OSError: the folder cannot be made.
    """
    safe = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:60] or "run"
    base = f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = under / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{under / base} and 998 more are taken; give a folder with --run-folder")
