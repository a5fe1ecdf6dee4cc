"""Derive the strings of a row format from a chat template, and check them against it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, pairwise
from typing import TYPE_CHECKING, Any

from torchrl_lang._files import one_line, shorten
from torchrl_lang.text.hf_tokenizer import load_hf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_lang.text.row_format import RowFormat

__all__ = ["Message", "Render", "check_format", "derive_format", "derive_joins", "template_renderer"]

Message = Mapping[str, Any]
"""A message of a chat: its ``role`` and ``content``."""

Render = Callable[..., str]
"""Maps messages, and whether an utterance is to follow, to the template's text."""


def template_renderer(
    source: str | os.PathLike[str] | PreTrainedTokenizerBase,
    system: str | None,
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
) -> tuple[PreTrainedTokenizerBase, Render]:
    """A tokenizer and what its chat template writes.

    Raises:
        OSError: there is no tokenizer of this name or path.
        ValueError: it has no chat template. The function raises it where the template refuses messages.
    """
    tokenizer = load_hf_tokenizer(source, trust_remote_code=False)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat template: set tokenizer.chat_template, or use HFTokenizer, "
            f"whose rows have control tokens of their own."
        )

    def render(messages: Sequence[Message], prompt: bool = True) -> str:
        first = [] if system is None else [{"role": "system", "content": system}]
        try:
            return tokenizer.apply_chat_template(
                [*first, *messages],
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=prompt,
                **options,
            )
        except Exception as error:  # templates raise Jinja's errors, with a message of their own
            raise ValueError(f"The chat template refuses these messages: {one_line(error)}.") from error

    return tokenizer, render


# -- the strings of a dialogue of user and agent -----------------------------------------------------------------------

_TEXTS = ("Xu1X", "Xu2X")
_ACTION = "Xa1X"


def _chat(messages: Sequence[str]) -> list[Message]:
    roles = islice(cycle(("user", "assistant")), len(messages))
    return [{"role": role, "content": content} for role, content in zip(roles, messages, strict=True)]


def derive_format(render: Render, special: Sequence[str], history: str) -> dict[str, Any]:
    """The strings between marked messages in the template's text of a short dialogue.

    Raises:
        ValueError: rows cannot be written as the template writes this dialogue.
    """
    one, two = _TEXTS[0], _TEXTS[1]
    opening, prompt = _split(render(_chat([one])), one)
    dialogue = render(_chat([one, _ACTION, two]))
    before, rest = _split(dialogue, one)
    middle, rest = _split(rest, _ACTION)
    ending, prompt_after = _split(rest, two)
    if before != opening:
        raise ValueError(
            f"The chat template changes the text before the first message of a longer dialogue, from "
            f"{shorten(opening)} to {shorten(before)}: rows only grow. Leave out the system prompt and tools, which "
            f"some templates move to the last message, and write them into the first text."
        )
    if prompt_after != prompt:
        raise ValueError(f"The chat template's generation prompts differ: {shorten(prompt)}, {shorten(prompt_after)}.")
    lead = middle.removeprefix(prompt)
    if not middle.startswith(prompt) or lead.strip():
        if history == "exact":
            raise ValueError(
                f"The chat template writes {shorten(prompt)} before an utterance is generated but {shorten(middle)} "
                f"before it in the history: history='kept' keeps the former, so only the first prompt equals the "
                f"template's."
            )
        lead = ""
    end = max((token for token in special if ending.startswith(token)), key=len, default=None)
    if end is None:
        raise ValueError(
            f"The chat template writes {shorten(ending)} after an utterance, which does not begin with a special "
            f"token: the agent needs one to end its utterance. Special tokens are {shorten(str(special))}."
        )
    between = ending.removeprefix(end)
    closed = render(_chat([one, _ACTION, two]), False)
    close = _split(closed, two)[1] if two in closed else ""
    padded = [_split(render(_chat([f"  {one}  "])), one), _split(render(_chat([one, f"  {_ACTION}  ", two])), "a1")]
    return {
        "opening": opening,
        "prompt": prompt,
        "end_of_action": end,
        "between": between,
        "close": _without_final_token(close, special, between),
        "lead": lead,
        "strips_text": not padded[0][0].endswith("  "),
        "strips_action": not padded[1][1].startswith("X  "),
    }


def _split(text: str, mark: str) -> tuple[str, str]:
    if text.count(mark) != 1:
        raise ValueError(
            f"The chat template writes a message {text.count(mark)} times in {shorten(text)}, expected once."
        )
    before, after = text.split(mark)
    return before, after


def _without_final_token(close: str, special: Iterable[str], between: str) -> str:
    """``close`` without a token for the end of the whole text, which some templates add to a finished dialogue."""
    ends = [token for token in special if close.endswith(token) and close != token and token not in between]
    return close.removesuffix(max(ends, key=len)) if ends else close


# -- checking them -----------------------------------------------------------------------------------------------------

_BATTERY = (
    ("a dog", "is it red?", "no", "a cat?", "yes"),
    ("", "ok", "", "fine", ""),
    ("42 + 1 =", "43", "7\t8", "15", "0.5"),
    ("\u00fcber \u65e5\u672c \U0001f600", "na\u00efve", "\u0645\u0631\u062d\u0628\u0627", "\u201cso\u201d", "e\u0301"),
    ("\n\nlines\n\n", "one\n\ntwo", "  two spaces  ", "x  y", "\n"),
    ('{"name": "look", "arguments": {}}', "```py\nprint(1)\n```", "<b>", "user: hi", "assistant"),
)
"""Messages in turn, the first the environment's."""

_THOUGHT = "Xt1X"


def check_format(row_format: RowFormat, render: Render) -> None:
    """Raise ValueError unless dialogues equal the template's, as far as ``history`` promises it."""
    exact = row_format.history == "exact"
    for messages in _BATTERY:
        for length in (1, 3, 5) if exact else (1,):
            texts = _chat(messages[:length])
            expected, found = render(texts), row_format.render(texts)
            if found != expected:
                raise ValueError(
                    f"Rows cannot be written as the chat template writes the messages {shorten(str(messages))}: it "
                    f"writes {shorten(expected)}, the derived strings give {shorten(found)}."
                )
    thinking = f"<think>\n{_THOUGHT}\n</think>\n\nanswer"
    if exact and _THOUGHT not in render(_chat([_TEXTS[0], thinking, _TEXTS[1]])):
        raise ValueError(
            "The chat template drops the thoughts of earlier turns (<think> ... </think>), but a row keeps what the "
            "agent wrote: history='kept' allows that; then only the first prompt equals the template's."
        )


# -- further roles, as far as the template has them --------------------------------------------------------------------

_SEQUENCES = (
    ("system",),
    ("system", "user"),
    ("user", "user"),
    ("user", "assistant", "user", "user"),
    ("user", "assistant", "tool"),
    ("user", "assistant", "tool", "user"),
    ("user", "assistant", "user", "tool"),
    ("user", "assistant", "tool", "tool"),
    ("user", "assistant", "tool", "tool", "user"),
    ("system", "user", "assistant", "tool", "assistant", "user"),
)
"""Roles of dialogues from which the strings between them are derived, and on which they are checked."""


def derive_joins(row_format: RowFormat, render: Render, special: Sequence[str], *, has_system: bool) -> RowFormat:
    """The format with strings between messages of further roles.

    Strings are left out if a dialogue with them differs from the template's. Where ``history`` is "kept", only what
    follows the last utterance is compared.
    """
    joins: dict[str, str] = {}
    sequences = [roles for roles in _SEQUENCES if not (has_system and "system" in roles)]
    for roles in sequences:
        for pair, string in _strings_between(row_format, render, special, roles).items():
            if pair not in row_format.all_joins:
                joins.setdefault(pair, string)
    found = replace(row_format, joins=joins)
    equal: dict[bool, set[str]] = {True: set(), False: set()}
    for roles in sequences:
        pairs = {f"{a}>{b}" for a, b in (*pairwise(["start", *roles, "assistant"]), (roles[-1], "end"))}
        if pairs <= found.all_joins.keys():
            equal[_equals_template(found, render, roles)] |= pairs
    return replace(found, joins={pair: joins[pair] for pair in joins if pair in equal[True] - equal[False]})


def _strings_between(
    row_format: RowFormat, render: Render, special: Sequence[str], roles: Sequence[str]
) -> dict[str, str]:
    """What the template writes between messages, by their roles; nothing if it refuses the dialogue."""
    marks = [f"Xm{index}X" for index in range(len(roles))]
    dialogue = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    found = {}
    try:
        rest = render(dialogue)
        if "tool" in roles and rest == render(
            [{**m, "role": m["role"].replace("tool", "assistant")} for m in dialogue]
        ):
            return {}  # the template has no tools and takes them for the agent
        for mark, pair in zip(marks, pairwise(["start", *roles]), strict=True):
            found[pair], rest = _split(rest, mark)
        found[roles[-1], "assistant"] = rest
        close = _split(render(dialogue, False), marks[-1])[1]
        found[roles[-1], "end"] = _without_final_token(close, special, row_format.between)
    except ValueError:
        return {}
    end = row_format.end_of_action
    return {
        f"{first}>{second}": string.removeprefix(end) if first == "assistant" else string
        for (first, second), string in found.items()
        if first != "assistant" or string.startswith(end)
    }


def _equals_template(row_format: RowFormat, render: Render, roles: Sequence[str]) -> bool:
    """Whether the battery's texts, with these roles, are written as the template writes them."""
    for texts in _BATTERY:
        dialogue = [{"role": role, "content": text} for role, text in zip(roles, cycle(texts), strict=False)]
        try:
            expected, closed = render(dialogue), render(dialogue, False)
        except ValueError:
            return False
        if row_format.history == "kept" and "assistant" in roles:
            last = len(roles) - roles[::-1].index("assistant")
            stretch = row_format.render_stretch(dialogue[last:], after="assistant")
            equal = expected.endswith(row_format.end_of_action + stretch)
        else:
            equal = expected == row_format.render(dialogue)
            equal &= closed.startswith(row_format.render(dialogue, answer=False))
        if not equal:
            return False
    return True
