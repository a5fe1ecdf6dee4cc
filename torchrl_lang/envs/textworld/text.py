"""Texts between agent and engine: cleaned commands, cleaned feedback, and formatted observations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import torch

REFUSED = "That is not a command of this game."
"""The reply to a command for the engine, which is not passed on."""
SILENT = "The game has stopped answering."
"""The reply if the engine gives no answer; the row is truncated."""

_META = frozenset(
    {"again", "brief", "disable", "enable", "g", "long", "no", "normal", "noscript", "notify", "nouns", "o", "oops"}
    | {"print", "pronouns", "q", "quit", "restart", "restore", "restrict", "save", "script", "short"}
    | {"undo", "unscript", "verbose", "verify", "version", "y", "yes"}
)
"""First words of commands that leave the game, write files, undo, or print hidden state. ``n`` (north) is allowed."""
_META_BEGINNINGS = ("print_st", "superbrie", "transcrip", "tw-")
"""Beginnings of further such words. The engine reads no more of a word: to it "print_stuff" is print_state."""

WORD = re.compile(r"type [a-z0-9]\b|[a-z]+(?:-[a-z]+)*")
"""A word in lower case, such as "half-eaten"; a mark such as "type y", as of a keycard, counts as one."""

_STATUS = re.compile(r"\n?>[ ]{20,}.*\Z", re.DOTALL)
_PROMPT = re.compile(r"\n>[ ]*\Z")
_OVER = re.compile(r"Would you like to RESTART,.*\Z", re.DOTALL)
_BANNER = re.compile(r"(?m)^[\s_$|\\/<>-]*(?:\$\$|____)[\s_$|\\/<>-]*$")


def clean_command(text: str) -> str:
    r"""Extract the first command of a text: no control characters or backslashes, nothing after a full stop or
    ``then``.

    Examples:
        >>> from torchrl_lang.envs.textworld.text import clean_command
        >>> clean_command("  open\x00  Box. take key")
        'open box'
        >>> clean_command("go east then take coin")
        'go east'
    """
    first = re.split(r"[\n\r.,;:!?\"]|\bthen\b", text.strip().lower(), maxsplit=1)[0]
    # The interpreter reads a backslash as a hot key and then waits forever for more input.
    return " ".join("".join(c if c.isprintable() and c != "\\" else " " for c in first).split())


def without_reply(feedback: str) -> str:
    """The engine's last feedback with its text replaced by :data:`REFUSED`; the status line is kept."""
    status = _STATUS.search(feedback)
    return REFUSED + (status[0] if status else "")


def exchanged(text: str, words: Mapping[str, str]) -> str:
    """The text with words replaced by others; only words in lower case.

    Examples:
        >>> from torchrl_lang.envs.textworld.text import exchanged
        >>> exchanged("take the key from the dish-pit", {"key": "sofa", "dish-pit": "attic"})
        'take the sofa from the attic'
        >>> exchanged("a type y box", {"type y": "steel", "y": "z"})
        'a steel box'
    """
    return WORD.sub(lambda found: words.get(found[0], found[0]), text) if words else text


def drawn_exchange(words: Sequence[str], seed: int) -> dict[str, str]:
    """Words that take each other's places at random, for :func:`exchanged`.

    Examples:
        >>> from torchrl_lang.envs.textworld.text import drawn_exchange
        >>> words = drawn_exchange(["key", "sofa", "attic"], seed=1)
        >>> sorted(words) == sorted(words.values())
        True
    """
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(seed)).tolist()
    return {words[other]: word for other, word in zip(order, words, strict=True)}


def is_meta(command: str) -> bool:
    """Whether a cleaned command is for the engine: saving, restarting, undoing, printing its state and similar.

    Examples:
        >>> from torchrl_lang.envs.textworld.text import is_meta
        >>> is_meta("restart"), is_meta("tw-print max_score"), is_meta("print_stuff"), is_meta("take scripture")
        (True, True, True, False)
    """
    words = re.findall(r"[\w-]+", command)
    return bool(words) and (words[0] in _META or words[0].startswith(_META_BEGINNINGS))


def clean_feedback(text: str) -> str:
    r"""The game's text without the title picture, the status line, the prompt and superfluous white space.

    Examples:
        >>> from torchrl_lang.envs.textworld.text import clean_feedback
        >>> clean_feedback("\nYou open the box.\n\n\n>" + 60 * " " + "-= Attic =-0/11")
        'You open the box.'
    """
    if "$$" in text:
        text = _BANNER.sub("", text)
    text = _OVER.sub("", _PROMPT.sub("", _STATUS.sub("", text)))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


# -- observations ------------------------------------------------------------------------------------------------------

_INFOS = {
    "feedback": (),
    "room": (),
    "description": ("description",),
    "inventory": ("inventory",),
    "objective": ("objective",),
    "commands": ("admissible_commands",),
    "outcome": ("admissible_commands",),  # without them the engine counts every turn as a move
}
"""The fields of a template, and the engine's infos that each one needs."""


@dataclass(frozen=True)
class Template:
    r"""Format of observations. The row contains the whole transcript, so a reply need not repeat earlier texts.

    Both texts may contain the fields ``{feedback}``, the game's text (at first the objective and the room);
    ``{objective}``; ``{description}`` of the room; ``{room}``, its name; ``{inventory}``; ``{commands}``, the
    admissible ones, separated by commas; and ``{outcome}`` of the last command: "done", or "failed" if it was not
    understood, impossible, or for the engine; empty at first. Unused fields cost no time: descriptions and inventories
    slow the engine down most, admissible commands and outcomes less, the others not at all.

    Args:
        opening: format of the first observation.
        reply: format of the later ones.
        hide: verbs of commands that ``{commands}`` leaves out.
        lower: convert everything to lower case, which reduces the number of words.

    Raises:
        ValueError: a text contains an unknown field.

    Examples:
        >>> from torchrl_lang.envs.textworld.text import Template
        >>> template = Template(reply="{outcome}: {feedback} {commands}", hide=("look", "inventory"), lower=True)
        >>> state = {"feedback": "\nOpened.\n", "admissible_commands": ["go east", "look"], "acted": True}
        >>> template.write("reply", state)
        'done: opened. go east'
    """

    opening: str = "{feedback}"
    reply: str = "{feedback}"
    hide: tuple[str, ...] = ()
    lower: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(self.fields - set(_INFOS)):
            raise ValueError(f"A template names {unknown}, the fields are {list(_INFOS)}.")

    @property
    def fields(self) -> set[str]:
        """The fields in the two texts."""
        return self._named("opening") | self._named("reply")

    @property
    def infos(self) -> set[str]:
        """The engine's infos that the fields need."""
        return {info for field in self.fields for info in _INFOS.get(field, ())}

    def visible(self, commands: Iterable[str]) -> list[str]:
        """Commands without the hidden verbs."""
        return [command for command in commands if command.split(" ", 1)[0] not in self.hide]

    def write(self, which: str, state: Mapping[str, Any]) -> str:
        """Format a state of the engine with the template ``"opening"`` or ``"reply"``."""
        fields = {name: self._field(name, state) for name in self._named(which)}
        return self.cased(getattr(self, which).format(**fields))

    def cased(self, text: str) -> str:
        """A text, or a command such as "open type J chest", as observations are written: in lower case if ``lower``."""
        return text.lower() if self.lower else text

    def _field(self, field: str, state: Mapping[str, Any]) -> str:
        if field == "room":
            status = _STATUS.search(state.get("feedback") or "")
            name = status and re.search(r"-= (.*) =-", status[0])
            return name[1] if name else ""
        if field == "commands":
            return ", ".join(self.visible(state.get("admissible_commands") or ()))
        if field == "outcome":
            return {None: "", True: "done", False: "failed"}[state.get("acted")]
        return clean_feedback(state.get(field) or "")  # feedback, description, inventory, objective

    def _named(self, which: str) -> set[str]:
        return {name for _, name, _, _ in Formatter().parse(getattr(self, which)) if name}


_STATE = "\n{description}\n{inventory}\nYou can {commands}."
_DULL = ("close", "drop", "examine", "inventory", "look")

TEMPLATES: Mapping[str, Template] = {
    "exits": Template("{commands}", "{commands}", hide=_DULL, lower=True),
    "rooms": Template("{room}: {commands}", "{room}: {commands}", hide=_DULL, lower=True),
    "orders": Template("{objective}", "{outcome} in {room}", hide=_DULL, lower=True),
    "short": Template("{objective}\n{room}: {commands}", "{room}: {commands}", hide=_DULL, lower=True),
    "lower": Template(lower=True),
    "plain": Template(),
    "commands": Template("{feedback}\nYou can {commands}.", "{feedback}\nYou can {commands}."),
    "state": Template("{objective}" + _STATE, "{feedback}" + _STATE),
}
"""Templates by name, from few words to many. The first four hide the commands that the engine's quests rarely need, and
write rooms as names.

``exits`` writes the admissible commands only: in a maze without an objective these are the ways to go. ``rooms`` adds
the room's name, so that a small model can memorize a few games. ``orders`` is for games whose objective lists the
commands to play: it writes the objective once, then only the outcome of the last command and the room. ``short`` is
``rooms`` with the objective in front. ``plain`` is the game's text and nothing else, ``lower`` the same in lower case.
"""
