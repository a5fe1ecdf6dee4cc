"""The command line: ``python -m torchrl_lang --help``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    argv = sys.argv[1:] if arguments is None else list(arguments)
    parsed = _parser(argv).parse_args(argv)
    if parsed.command == "list":
        print(_listing())
        return 0
    recipe = WHOLE[parsed.command][1] if parsed.command in WHOLE else COMMANDS[parsed.command][1][parsed.recipe]
    options, run = recipe.load()
    try:
        run(options_from(options, parsed))
    except (OSError, ValueError, ImportError) as error:
        # What a user can mend is said in a line; anything else keeps its traceback.
        print(f"torchrl_lang: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumes = parsed.command == "train" or parsed.command in WHOLE
        print("stopped" + "; the same command goes on from the last checkpoint" * resumes, file=sys.stderr)
        return 130
    return 0


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the recipe that is asked for is imported for its options."""
    parser = argparse.ArgumentParser(prog="python -m torchrl_lang", description="Reinforcement learning on language.")
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


if __name__ == "__main__":
    sys.exit(main())
