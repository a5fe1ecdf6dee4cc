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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torchrl_lang.recipes.errors import describe
from torchrl_lang.recipes.options import add_options, options_from
from torchrl_lang.recipes.stopping import Stopped
from torchrl_lang.recipes.tasks import OWN_TASK, TASKS, find_task, task_class

__all__ = ["main"]


Load = Callable[[], tuple[Any, Callable[[Any], Any]]]
"""Imports a recipe and returns its options class and its function; ``--help`` does not wait for that."""


def _recipe(module: str, options: str, task: str | None = None, *, run: str | None = None) -> Load:
    """A recipe whose options class is its module's, or a task's; a variant is ``run`` by another module."""

    def load() -> tuple[Any, Callable[[Any], Any]]:
        recipe = importlib.import_module(_full_name(module))
        main = importlib.import_module(_full_name(run or module)).main
        return getattr(recipe if task is None else find_task(task), options), main

    return load


def _full_name(module: str) -> str:
    return f"torchrl_lang.{'' if module.startswith('envs.') else 'recipes.'}{module}"


OF_TASKS: dict[str, Callable[[str], Load]] = {
    "generate": partial(_recipe, "datasets", "data_options"),
    "play": partial(_recipe, "play", "play_options"),
}
"""Commands that take the name of a task, which may be one of the user's own."""
COMMANDS: dict[str, tuple[str, dict[str, Load]]] = {
    "generate": ("generate a dataset", {task: OF_TASKS["generate"](task) for task in TASKS}),
    "train": (
        "train on a dataset, or on games of a policy",
        {
            "bc": _recipe("bc", "BC"),
            "percent-bc": _recipe("variants", "PercentBC", run="bc"),
            "dt": _recipe("dt", "DT"),
            "ilql": _recipe("ilql", "ILQL"),
            "single-step": _recipe("variants", "SingleStep", run="ilql"),
            "monte-carlo": _recipe("variants", "MonteCarlo", run="ilql"),
            "awac": _recipe("variants", "AWAC", run="ilql"),
            "paper-ilql": _recipe("variants", "PaperILQL", run="ilql"),
            "cql": _recipe("cql", "CQL"),
            "psi": _recipe("psi", "Psi"),
            "bcq": _recipe("bcq", "BCQ"),
            "qsft": _recipe("qsft", "QSFT"),
            "oreo": _recipe("oreo", "OREO"),
            "chai": _recipe("chai", "CHAI"),
            "utterance-ilql": _recipe("utterance_ilql", "UtteranceILQL"),
            "ppo": _recipe("ppo", "PPO"),
            "ad": _recipe("algorithm_distillation.ad", "AD"),
            "text-ad": _recipe("algorithm_distillation.text_ad", "TextAD"),
            "rejection": _recipe("rejection", "Rejection"),
        },
    ),
    "prepare": (
        "prepare what a task needs",
        {"visual_dialogue": _recipe("envs.visual_dialogue.prepare", "PrepareVisualDialogue")},
    ),
    "play": ("play yourself, or watch a policy", {task: OF_TASKS["play"](task) for task in TASKS}),
    "rewards": (
        "compute the rewards of a dataset",
        {"visual_dialogue": _recipe("envs.visual_dialogue.reward_recipe", "VisualDialogueRewards")},
    ),
    "serve": (
        "serve models over HTTP",
        {"visual_dialogue": _recipe("envs.visual_dialogue.serve", "ServeVisualDialogue")},
    ),
    "solve": ("find the best possible play", {"wordle": _recipe("envs.wordle.task", "SolveWordle")}),
}
"""Commands that take the name of a task or of an algorithm."""
WHOLE: dict[str, tuple[str, Load]] = {
    "evaluate": ("evaluate a finished run", _recipe("evaluate", "Evaluate")),
    "convert-agilerl": ("make a run of an agent of AgileRL's ILQL", _recipe("convert_agilerl", "ConvertAgileRL")),
    "demo": ("generate, train and compare on Wordle in ten minutes", _recipe("demo", "Demo")),
    "textworld": ("the same on TextWorld in half an hour", _recipe("textworld_demo", "TextWorldDemo")),
    "visual_dialogue": (
        "the same on visual dialogue under three rewards",
        _recipe("visual_dialogue_demo", "VisualDialogueDemo"),
    ),
    "reddit": ("the same on Reddit comments in a quarter of an hour", _recipe("reddit_demo", "RedditDemo")),
    "distill": (
        "algorithm distillation: models that improve in their context",
        _recipe("algorithm_distillation", "Distill"),
    ),
}
"""Commands that take options alone."""
RESUMABLE = ("train", "prepare", "demo", "textworld", "visual_dialogue", "reddit", "distill")


class UsageError(ValueError):
    """The command line cannot be parsed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0: success. 2: an error that the user can correct, described in one line on standard error. 130 and 143: stopped by
    SIGINT (Ctrl-C) or SIGTERM. 141: the reader of standard output has gone. Bugs raise.
    """
    argv = sys.argv[1:] if arguments is None else list(arguments)
    options = None
    try:
        parsed = _parsed(argv)
        if parsed is not None and parsed.command == "list":
            print(_listing())
        elif parsed is not None:
            kind, run = parsed.load()
            options = options_from(kind, parsed)
            run(options)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        resumes = argv[:1] and argv[0] in RESUMABLE
        then = "; the same command continues from its last checkpoint, or from the beginning" if resumes else ""
        _report(str(stop) or f"stopped{then}")
        return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
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
    """Whether standard output is a pipe that its reader has closed; if so, further output is discarded."""
    if not hasattr(select, "poll"):  # on Windows
        return False
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
    if closed:  # the interpreter flushes once more on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


class _Parser(argparse.ArgumentParser):
    """Raises errors, so that they are printed as one line like all others."""

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
    commands.add_parser("list", help="list all recipes")
    for name, (text, load) in WHOLE.items():
        whole = commands.add_parser(name, help=text)
        if argv[:1] == [name]:
            _add_recipe(whole, load)
    for name, (text, recipes) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        shown = [*recipes, OWN_TASK] if name in OF_TASKS else [*recipes]
        choices = command.add_subparsers(dest="recipe", required=True, metavar="|".join(shown))
        for recipe_name, load in (recipes | _own_task(argv)).items():
            recipe = choices.add_parser(recipe_name)
            if list(argv[:2]) == [name, recipe_name]:
                _add_recipe(recipe, load)
    return parser


def _own_task(argv: Sequence[str]) -> dict[str, Load]:
    """The recipe for a task of the user's own, if one is named."""
    command, name = [*argv, "", ""][:2]
    return {name: OF_TASKS[command](name)} if command in OF_TASKS and ":" in name else {}


def _add_recipe(parser: argparse.ArgumentParser, load: Load) -> None:
    """The options of a recipe, with the presets of all tasks in their help."""
    options, _ = load()
    parser.description = options.__doc__
    parser.set_defaults(load=load)
    tasks = TASKS if options.preset else ()
    add_options(parser, options, {task: options.preset_of(task_class(task)) for task in tasks})


def _listing() -> str:
    lines = []
    for name, (text, recipes) in COMMANDS.items():
        lines.append(f"{name}: {text}")
        lines += [f"  {name} {recipe:13} {_first_line(load)}" for recipe, load in recipes.items()]
        lines += [f"  {name} {OWN_TASK}: your own Task or environment factory"] * (name in OF_TASKS)
    lines += [f"{name}: {_first_line(load)}" for name, (_, load) in WHOLE.items()]
    return "\n".join([*lines, "", "Options of each: python -m torchrl_lang COMMAND [RECIPE] --help"])


def _first_line(load: Load) -> str:
    return load()[0].__doc__.splitlines()[0]


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """One line for each warning; those of this package without the place in its code."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"torchrl_lang: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """A replacement for characters that standard output cannot encode."""
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
        # A second signal ends the interpreter at once, without a traceback; one that is ignored stays so.
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(_run())
