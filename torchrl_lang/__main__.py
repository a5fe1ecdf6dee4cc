"""The command line: ``python -m torchrl_lang --help``."""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from torchrl_lang.recipes.errors import describe
from torchrl_lang.recipes.options import add_options, options_from

__all__ = ["main"]


class Recipe(NamedTuple):
    """Where a recipe lives: imported when it is asked for, so that ``--help`` does not wait for torch."""

    module: str
    options: str

    def load(self) -> tuple[Any, Any]:
        """Its options' class and its main function."""
        module = importlib.import_module(f"torchrl_lang.recipes.{self.module}")
        return getattr(module, self.options), module.main


COMMANDS: dict[str, tuple[str, dict[str, Recipe]]] = {
    "generate": (
        "make a data set",
        {"wordle": Recipe("wordle_data", "WordleData"), "textworld": Recipe("textworld_data", "TextWorldData")},
    ),
    "train": (
        "learn from a data set, or from the games of a policy",
        {
            "wordle_bc": Recipe("bc", "BC"),
            "wordle_ilql": Recipe("ilql", "ILQL"),
            "wordle_ppo": Recipe("ppo", "PPO"),
            "wordle_rejection": Recipe("rejection", "Rejection"),
            "textworld_bc": Recipe("bc", "TextWorldBC"),
            "textworld_ilql": Recipe("ilql", "TextWorldILQL"),
            "textworld_ppo": Recipe("ppo", "TextWorldPPO"),
            "textworld_rejection": Recipe("rejection", "TextWorldRejection"),
        },
    ),
    "evaluate": (
        "judge a trained run",
        {
            "wordle": Recipe("wordle_evaluate", "WordleEvaluate"),
            "textworld": Recipe("textworld_evaluate", "TextWorldEvaluate"),
        },
    ),
    "play": ("play yourself, or watch", {"wordle": Recipe("wordle_play", "WordlePlay")}),
}
WHOLE = {
    "demo": ("play, learn and compare, about ten minutes", Recipe("demo", "Demo")),
    "textworld": ("the same on TextWorld, half an hour, or five minutes", Recipe("textworld_demo", "TextWorldDemo")),
}
"""Commands that go all the way by themselves."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come; whoever cleans up after Ctrl-C does so here as well."""


class UsageError(ValueError):
    """The command line cannot be parsed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0: done. 2: something that the user can correct, described in one line on standard error. 130 and 143: stopped by
    SIGINT (Ctrl-C) or SIGTERM. 141: nobody reads standard output any more. Our own bugs raise.
    """
    argv = sys.argv[1:] if arguments is None else list(arguments)
    options = None
    try:
        parsed = _parsed(argv)
        if parsed is not None and parsed.command == "list":
            print(_listing())
        elif parsed is not None:
            whole = parsed.command in WHOLE
            recipe = WHOLE[parsed.command][1] if whole else COMMANDS[parsed.command][1][parsed.recipe]
            kind, run = recipe.load()
            options = options_from(kind, parsed)
            run(options)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        resumes = bool(argv) and (argv[0] == "train" or argv[0] in WHOLE)
        _report("stopped" + "; the same command continues from the last checkpoint" * resumes)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + 13  # SIGPIPE, which Windows lacks
        message = describe(error, options)
        if message is None:
            raise
        _report(message)
        return 2
    return 0


def _report(message: str) -> None:
    print(f"torchrl_lang: {message}", file=sys.stderr, flush=True)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that its reader has closed; if so, what is still to be written is dropped."""
    if not hasattr(select, "poll"):  # on Windows
        return False
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
    if closed:  # the interpreter flushes once more on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


class _Parser(argparse.ArgumentParser):
    """Its errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`.")


def _parsed(argv: Sequence[str]) -> argparse.Namespace | None:
    """The arguments, or ``None`` where ``--help`` was among them and has been printed."""
    try:
        return _parser(argv).parse_args(argv)
    except SystemExit:
        return None


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the recipe that is asked for is imported for its options."""
    parser = _Parser(prog="python -m torchrl_lang", description="Reinforcement learning on language.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("list", help="list what there is")
    for name, (text, recipe) in WHOLE.items():
        whole = commands.add_parser(name, help=text)
        if argv[:1] == [name]:
            add_options(whole, recipe.load()[0])
    for name, (text, recipes) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        choices = command.add_subparsers(dest="recipe", required=True, metavar="|".join(recipes))
        for recipe_name, recipe in recipes.items():
            if list(argv[:2]) == [name, recipe_name]:
                options = recipe.load()[0]
                add_options(choices.add_parser(recipe_name, help=options.__doc__, description=options.__doc__), options)
            else:
                choices.add_parser(recipe_name)
    return parser


def _listing() -> str:
    lines = []
    for name, (text, recipes) in COMMANDS.items():
        lines.append(f"{name}: {text}")
        for recipe_name, recipe in recipes.items():
            lines.append(f"  {name} {recipe_name:19} {recipe.load()[0].__doc__.splitlines()[0]}")
    lines += [f"{name}: {recipe.load()[0].__doc__.splitlines()[0]}" for name, (_, recipe) in WHOLE.items()]
    return "\n".join([*lines, "", "Options of each: python -m torchrl_lang COMMAND RECIPE --help"])


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """One line for each warning; those of this package without the place in its code."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"torchrl_lang: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """What is printed for characters that standard output cannot encode."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return text.replace("±", "+-").encode("ascii", "replace").decode("ascii"), error.end


def _run() -> int:
    """:func:`main` as a process of its own: its signals and its streams."""
    signal.signal(signal.SIGTERM, _terminate)
    warnings.formatwarning = _format_warning
    codecs.register_error("torchrl_lang", _replaced)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="torchrl_lang")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    try:
        return main()
    finally:
        # A second signal ends the interpreter at once, without a traceback from wherever it is.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(_run())
