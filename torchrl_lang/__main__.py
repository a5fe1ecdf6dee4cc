"""The command line: ``python -m torchrl_lang --help``."""

from __future__ import annotations

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
from typing import Any, NoReturn

from torchrl_lang.recipes.algorithms import ALGORITHMS, together
from torchrl_lang.recipes.command_line import UsageError, describe, parse
from torchrl_lang.recipes.options import near
from torchrl_lang.recipes.stopping import Stopped
from torchrl_lang.recipes.tasks import OWN_TASK, TASKS, options_of

_PROG = "python -m torchrl_lang"
_DIALOGUES = "tasks.visual_dialogue"


GROUPS = {
    "generate": "generate a dataset",
    "train": "train on a dataset, or on games of a policy",
    "prepare": "prepare what a task needs",
    "play": "play yourself, or watch a policy",
    "rewards": "compute the rewards of a dataset",
    "serve": "serve models over HTTP",
    "solve": "find the best possible play",
}
"""Commands that take the name of a recipe."""
OF_TASKS = {"generate": "datasets:main", "play": "play:main"}
"""Those that take the name of a task, which may be one of the user's own, and their functions."""
OF_RUNS = ("evaluate", "export", "chat")
"""Those that take a run's folder, with or without ``--run`` before it."""
RECIPES = {
    **{f"train {name}": (f"algorithms:{kind.__name__}", kind.place) for name, kind in ALGORITHMS.items()},
    "train ad": ("algorithm_distillation.options:AD", "algorithm_distillation.ad:main"),
    "train text-ad": ("algorithm_distillation.options:TextAD", "algorithm_distillation.text_ad:main"),
    "prepare visual_dialogue": (f"{_DIALOGUES}:PrepareVisualDialogue", "envs.visual_dialogue.prepare:main"),
    "rewards visual_dialogue": (f"{_DIALOGUES}:VisualDialogueRewards", "envs.visual_dialogue.prepare:compute_rewards"),
    "serve visual_dialogue": (f"{_DIALOGUES}:ServeVisualDialogue", "envs.visual_dialogue.prepare:serve"),
    "solve wordle": ("tasks.wordle:SolveWordle", "envs.wordle.task:main"),
    "evaluate": ("algorithms.finished:Evaluate", "evaluate:main"),
    "export": ("agents:Export", "agents:export"),
    "chat": ("agents:Chat", "agents:chat"),
    "plan": ("planning.options:Plan", "planning.report:main"),
    "convert-agilerl": ("algorithms.finished:ConvertAgileRL", "convert_agilerl:main"),
    "demo": ("demo_options:Demo", "demo:main"),
    "demo-chat": ("demo_options:ChatDemo", "chat_demo:main"),
    "textworld": ("demo_options:TextWorldDemo", "textworld_demo:main"),
    "visual_dialogue": ("demo_options:VisualDialogueDemo", "visual_dialogue_demo:main"),
    "reddit": ("demo_options:RedditDemo", "reddit_demo:main"),
    "distill": ("algorithm_distillation.options:Distill", "algorithm_distillation.distill:main"),
}
"""The options class and the function of each other command as ``module:name``, so that ``--help`` imports no torch."""
RESUMABLE = ("train", "prepare", "demo", "demo-chat", "textworld", "visual_dialogue", "reddit", "distill")


def attribute(place: str) -> Any:
    """Import a module and return what it has at ``module:name``."""
    module, _, name = place.partition(":")
    prefix = "torchrl_lang" if module.startswith("envs.") else "torchrl_lang.recipes"
    return getattr(importlib.import_module(f"{prefix}.{module}"), name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0: success. 2: an error that the user can correct, described in one line on standard error. 130 and 143: stopped by
    SIGINT (Ctrl-C) or SIGTERM. 141: the reader of standard output has gone. Bugs raise.
    """
    argv = sys.argv[1:] if arguments is None else list(arguments)
    options = None
    try:
        found = _find(argv)
        if found is None:
            print(_listing(argv[:1]))
        else:
            kind, place, words = found
            prog = " ".join([_PROG, *argv[: len(argv) - len(words)]])
            options = parse(kind, words, prog)
            if options is not None:
                with together(options):
                    attribute(place)(options)
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
    if "RANK" in os.environ:  # one of several processes
        from torchrl_lang import _ranks

        if not _ranks.reports():
            return
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


def _find(argv: Sequence[str]) -> tuple[type[Any], str, Sequence[str]] | None:
    """The options class, the place of the function and the words that are left; None where it asks for a list."""
    command, *rest = [*argv] or [""]
    name, *words = rest or [""]
    if command in ("list", "-h", "--help") or (command in GROUPS and name in ("-h", "--help")):
        return None
    if command in OF_TASKS and (":" in name or name in TASKS):
        return options_of(name, command), OF_TASKS[command], words  # type: ignore[arg-type]
    recipe = f"{command} {name}" if command in GROUPS else command
    if recipe not in RECIPES:
        raise UsageError(_unknown(command, name))
    if command in OF_RUNS and name and not name.startswith("-"):
        rest = ["--run", *rest]
    options, place = RECIPES[recipe]
    return attribute(options), place, words if command in GROUPS else rest


def _recipes(group: str) -> list[str]:
    """The names after a command; of "" those of commands that take none."""
    return [key.split()[-1] for key in RECIPES if " ".join(key.split()[:-1]) == group]


def _unknown(command: str, name: str) -> str:
    kind, names, prog = "recipe", _recipes(command), f"{_PROG} {command}"
    if command in OF_TASKS:
        kind, names = "task", [*TASKS, OWN_TASK]
    elif command not in GROUPS:
        kind, name, names, prog = "command", command, [*GROUPS, *_recipes(""), "list"], _PROG
    if not name or name.startswith("-"):
        return f"The {kind} is missing after `{prog}`: give {', '.join(names)}."
    return f"There is no {kind} {name!r} after `{prog}`{near(name, names)} The choices are {', '.join(names)}."


def _listing(argv: Sequence[str]) -> str:
    """All commands with their recipes, or those of one command."""
    chosen = [name for name in argv if name in GROUPS] or [*GROUPS]
    lines = []
    for name in chosen:
        lines.append(f"{name}: {GROUPS[name]}")
        if name in OF_TASKS:
            lines += [f"  {name} {task:15} {_first_line(options_of(task, name))}" for task in TASKS]  # type: ignore[arg-type]
            lines.append(f"  {name} {OWN_TASK}: your own Task or environment factory")
        lines += [f"  {name} {key:15} {_first_line(attribute(RECIPES[f'{name} {key}'][0]))}" for key in _recipes(name)]
    if len(chosen) > 1:
        lines += [f"{name}: {_first_line(attribute(RECIPES[name][0]))}" for name in _recipes("")]
    return "\n".join([*lines, "", f"Options of each: {_PROG} COMMAND [RECIPE] --help"])


def _first_line(kind: type[Any]) -> str:
    return (kind.__doc__ or "").splitlines()[0]


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
