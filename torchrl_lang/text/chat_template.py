"""The strings of a chat template around the texts of a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from torchrl_lang._checks import checked
from torchrl_lang._files import mistake, one_line, shorten
from torchrl_lang.text.hf_tokenizer import load_hf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How the turns of a row are written as a chat.

    A row is ``opening text prompt utterance end_of_action between text prompt utterance end_of_action ...``: the
    environment writes the user's texts and all strings of the template, the agent its utterances with their
    ``end_of_action``. An environment without a text writes an empty message of the user, so that there is always
    something between two utterances. The text that ends a task is followed by ``close``, or not written at all if it is
    empty. No token marks the end of an episode: only the entry ``terminated`` does.

    Between two utterances there may also be messages of a tool, or several messages, and before the first text one of
    the system, as far as the template has them: ``joins`` has the strings between them.

    Use :meth:`from_chat_template`, and :class:`~torchrl_lang.text.ChatTokenizer` for environments and datasets.

    Args:
        opening: all before the first text: the system prompt, tools, and the user's header.
        prompt: from the end of a text to the place where the agent writes (the template's generation prompt).
        end_of_action: the special token that ends an utterance.
        between: from the end of an utterance, after ``end_of_action``, to the next text.
        close: what follows a text that the agent does not answer.
        joins: what stands between two further messages, by their roles, such as ``{"assistant>tool": ...}``. The roles
            are "system", "user", "tool" and "assistant"; "start" and "end" are those of the row.
        lead: what an utterance begins with in the template, such as the space of Mistral's first template.
        strips_text: the template removes white space around the environment's texts; so do rows.
        strips_action: the template removes white space around utterances. Rows keep what the agent sampled; utterances
            that are given as text, as in a dataset, lose it.
        history: "exact" if what stands before an utterance always equals the template's text, "kept" if only the first
            prompt does.
        rewrites: what the template changes in earlier messages, such as the thoughts that it drops; empty if nothing.
            Then each utterance has a row of its own, after all before it as the template writes it at that time.
        template: the chat template (Jinja), saved beside a model.
        system, tools, template_options: what :meth:`from_chat_template` was given, as JSON; the opening has them.
    """

    opening: str
    prompt: str
    end_of_action: str
    between: str
    close: str
    joins: Mapping[str, str] = field(default_factory=dict, hash=False)
    lead: str = ""
    strips_text: bool = False
    strips_action: bool = False
    history: Literal["exact", "kept"] = "exact"
    rewrites: str = ""
    template: str | None = None
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, hash=False)
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    @checked
    def from_chat_template(
        cls,
        source: str | Path | PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        tools: Sequence[Any] | None = None,
        history: Literal["exact", "kept"] = "exact",
        **template_options: Any,
    ) -> RowFormat:
        """Derive the format from a tokenizer's chat template, and check it on conversations of up to five messages.

        The strings are fixed here: a template that writes today's date writes the same date in all rows. Roles and
        sequences of messages that the template refuses or rewrites have no entry in ``joins``, so writing them is an
        error.

        Args:
            source: a tokenizer of transformers with a chat template, or the name or local path of one.
            system: the system prompt of all rows; by default the template's own, if it has one, or that of a row's
                first message.
            tools: JSON schemas or documented functions, as ``apply_chat_template`` takes them.
            history: for templates that change earlier messages of a longer dialogue: that drop the thoughts of earlier
                turns, or whose generation prompt contains a block that the history lacks. With "exact" each utterance
                has a row of its own (:attr:`rewrites`), so the agent always reads what it will read at inference.
                With "kept" a dialogue is one row, which keeps all tokens as they were when the agent wrote, and only
                the first prompt equals the template's.
            template_options: further arguments of the template, such as ``enable_thinking=False``.

        Raises:
            OSError: there is no tokenizer of this name or path.
            ValueError: there is no chat template, or rows cannot be written as it writes dialogues; the message has
                the reason.

        Examples:
            >>> from tokenizers import Tokenizer, models
            >>> from transformers import PreTrainedTokenizerFast
            >>> from torchrl_lang.text import RowFormat
            >>> template = (
            ...     "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
            ...     "{% if add_generation_prompt %}<|assistant|>{% endif %}"
            ... )
            >>> tokenizer = PreTrainedTokenizerFast(
            ...     tokenizer_object=Tokenizer(models.BPE()), eos_token="<|end|>", chat_template=template
            ... )
            >>> row_format = RowFormat.from_chat_template(tokenizer, system="Play.")
            >>> row_format.opening, row_format.prompt, row_format.between
            ('<|system|>Play.<|end|><|user|>', '<|end|><|assistant|>', '<|user|>')
            >>> row_format.joins["assistant>tool"]
            '<|tool|>'
        """
        schemas = tool_schemas(tools)
        tokenizer, render = template_renderer(source, system, schemas, template_options)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        template = tokenizer.chat_template
        own = template if isinstance(template, str) else None
        given: Any = {"system": system, "tools": schemas, "template_options": template_options}
        row_format = cls(**derive_format(render, special), history=history, template=own, **given)
        if difference := first_difference(row_format, render, longest=1):
            raise ValueError(difference)
        found = row_format.rewrites or first_difference(row_format, render, longest=5)
        row_format = replace(row_format, rewrites=found if history == "exact" else "")
        return derive_joins(row_format, render, special, has_system=system is not None)

    @cached_property
    def all_joins(self) -> Mapping[str, str]:
        """:attr:`joins` with ``opening``, ``prompt``, ``between`` and ``close``."""
        own = {"start>user": self.opening, "user>assistant": self.prompt, "assistant>user": self.between}
        return {**self.joins, **own, "user>end": self.close}

    @cached_property
    def thought(self) -> str:
        """The beginning of a thought, or an empty one, that :attr:`prompt` ends with; empty if it has none."""
        return "".join(self.prompt.rpartition("<think>")[1:]) if "<think>" in self.prompt else ""

    def join(self, first: str, second: str) -> str:
        """Text between two messages of these roles; after an utterance, after its ``end_of_action``.

        Raises:
            ValueError: the chat template has no such messages.
        """
        string = self.all_joins.get(f"{first}>{second}")
        if string is None:
            why = "the template refuses or rewrites it, or the format has a system prompt"
            remedy = f"Write its text into a message of the user, or use what it has, {[*self.all_joins]}"
            raise ValueError(f"Rows of this chat template cannot have '{first}>{second}': {why}. {remedy}.")
        return string

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The text of a row.

        Args:
            messages: the ``role`` and ``content`` of each message, in order.
            answer: whether the agent answers the last message, if that is the environment's.
        """
        text, waiting, after = "", list[Message](), "start"
        for message in messages:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            text += self.render_stretch(waiting, after=after)
            text += self.lead + self.clean_action(message["content"]) + self.end_of_action
            waiting, after = [], "assistant"
        return text + self.render_stretch(waiting, after=after, answer=answer) if waiting else text

    def render_stretch(self, messages: Sequence[Message], *, after: str, answer: bool = True) -> str:
        """The text of the environment's messages between two utterances, or at the end of a row.

        Args:
            messages: at least one, as in :meth:`render`.
            after: "start" or "assistant", after whose ``end_of_action`` the text begins.
            answer: whether the agent answers.
        """
        roles = [after, *(message["role"] for message in messages), "assistant" if answer else "end"]
        texts = ["", *(self.clean_text(message["content"]) for message in messages)]
        return "".join(text + self.join(*pair) for text, pair in zip(texts, pairwise(roles), strict=True))

    def clean_text(self, text: str) -> str:
        """A text of the environment as the template writes it."""
        return text.strip() if self.strips_text else text

    def clean_action(self, text: str) -> str:
        """An utterance as the template writes it, without the beginning of a thought that the prompt ends with."""
        text = text.strip() if self.strips_action else text
        begun = next((mark for mark in (self.thought, self.thought.rstrip()) if text.startswith(mark)), "")
        return text.removeprefix(begun)

    def config(self) -> dict[str, Any]:
        """The fields as JSON; those that earlier versions had not are left out where they are empty."""
        return {name: value for name, value in asdict(self).items() if value or name not in _LATER}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RowFormat:
        """Build the format from its :meth:`config`; raises ``ValueError`` if the configuration is invalid."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(config))
        except ValidationError as error:
            raise ValueError(f"The row format {mistake(error)}: take it from a tokenizer's config().") from None


_LATER = ("rewrites", "system", "tools", "template_options")

Message = Mapping[str, Any]
"""A message of a chat: its ``role`` and ``content``."""

Render = Callable[..., str]
"""Maps messages, and whether an utterance is to follow, to the template's text."""


def tool_schemas(tools: Sequence[Any] | None) -> list[Mapping[str, Any]] | None:
    """JSON schemas of tools, which may also be documented functions."""
    from transformers.utils import get_json_schema

    return None if tools is None else [tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools]


def template_renderer(
    source: str | Path | PreTrainedTokenizerBase,
    system: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> tuple[PreTrainedTokenizerBase, Render]:
    """A tokenizer and what its chat template writes.

    Raises:
        OSError: there is no tokenizer of this name or path.
        ValueError: it has no chat template. The function raises it where the template refuses messages.
    """
    tokenizer = load_hf_tokenizer(source, trust_remote_code=False)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{type(tokenizer).__name__} has no chat template: set one, or use HFTokenizer.")

    def render(messages: Sequence[Message], prompt: bool = True) -> str:
        first = [] if system is None else [{"role": "system", "content": system}]
        own: Any = {"tools": tools, "add_generation_prompt": prompt, "tokenize": False}
        try:  # the options may not name one of these
            return tokenizer.apply_chat_template([*first, *messages], **own, **options)
        except Exception as error:  # templates raise Jinja's errors, with a message of their own
            raise ValueError(f"The chat template refuses these messages: {one_line(error)}.") from error

    return tokenizer, render


# -- the strings of a dialogue of user and agent -----------------------------------------------------------------------

_TEXTS = ("Xu1X", "Xu2X")
_ACTION = "Xa1X"


def _chat(messages: Sequence[str]) -> list[Message]:
    roles = islice(cycle(("user", "assistant")), len(messages))
    return [{"role": role, "content": content} for role, content in zip(roles, messages, strict=True)]


def derive_format(render: Render, special: Sequence[str]) -> dict[str, Any]:
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
        found = f"from {shorten(opening)} to {shorten(before)}: write system prompt and tools into the first text"
        raise ValueError(f"The chat template changes the text before the first message later, {found}.")
    if prompt_after != prompt:
        raise ValueError(f"The chat template's generation prompts differ: {shorten(prompt)}, {shorten(prompt_after)}.")
    lead, rewrites = middle.removeprefix(prompt), ""
    if middle.startswith(prompt) and any(token in lead for token in special):
        found = f"{shorten(lead)} before an utterance, which its generation prompt lacks and agents cannot write"
        raise ValueError(f"The chat template writes {found}: use one whose generation prompt ends with it.")
    if not middle.startswith(prompt) or lead.strip():
        lead, rewrites = "", f"{shorten(prompt)}, where the agent writes, becomes {shorten(middle)} in the history"
    end = max((token for token in special if ending.startswith(token)), key=len, default=None)
    if end is None:
        found = f"{shorten(ending)} after an utterance, which does not begin with a special token"
        raise ValueError(f"The chat template writes {found}, {shorten(str(special))}, to end it with.")
    between = ending.removeprefix(end)
    closed = render(_chat([one, _ACTION, two]), False)
    close = _split(closed, two)[1] if two in closed else ""
    padded = [_split(render(_chat([f"  {one}  "])), one), _split(render(_chat([one, f"  {_ACTION}  ", two])), "a1")]
    close = _without_final_token(close, special, between)
    strips = {"strips_text": not padded[0][0].endswith("  "), "strips_action": not padded[1][1].startswith("X  ")}
    own = {"opening": opening, "prompt": prompt, "end_of_action": end, "between": between, "close": close}
    return {**own, "lead": lead, "rewrites": rewrites, **strips}


def _split(text: str, mark: str) -> tuple[str, str]:
    if text.count(mark) != 1:
        raise ValueError(f"The chat template writes a message {text.count(mark)} times in {shorten(text)}, not once.")
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


def first_difference(row_format: RowFormat, render: Render, longest: int) -> str:
    """Where dialogues of up to ``longest`` messages differ from the template's; empty if nowhere."""
    for messages in _BATTERY:
        for length in range(1, longest + 1, 2):
            texts = _chat(messages[:length])
            expected, found = render(texts), row_format.render(texts)
            if found != expected:
                differs = f"Rows cannot be written as the chat template writes the messages {shorten(str(messages))}"
                return f"{differs}: it writes {shorten(expected)}, the derived strings give {shorten(found)}."
    thinking = f"<think>\n{_THOUGHT}\n</think>\n\nanswer"
    is_dropped = longest > 1 and _THOUGHT not in render(_chat([_TEXTS[0], thinking, _TEXTS[1]]))
    return "the thoughts of earlier turns (<think> ... </think>) are dropped" if is_dropped else ""


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

    Strings are left out if a dialogue with them differs from the template's. Where the template changes earlier
    messages, only what follows the last utterance is compared.
    """
    joins: dict[str, str] = {}
    sequences = [roles for roles in _SEQUENCES if not (has_system and "system" in roles)]
    for roles in sequences:
        for pair, string in _strings_in(row_format, render, special, roles).items():
            if pair not in row_format.all_joins:
                joins.setdefault(pair, string)
    found = replace(row_format, joins=joins)
    equal: dict[bool, set[str]] = {True: set(), False: set()}
    for roles in sequences:
        pairs = {f"{a}>{b}" for a, b in (*pairwise(["start", *roles, "assistant"]), (roles[-1], "end"))}
        if pairs <= found.all_joins.keys():
            equal[_equals_template(found, render, roles)] |= pairs
    return replace(found, joins={pair: joins[pair] for pair in joins if pair in equal[True] - equal[False]})


def _strings_in(row_format: RowFormat, render: Render, special: Sequence[str], roles: Sequence[str]) -> dict[str, str]:
    """Texts that the template writes between messages, by their roles; nothing if it refuses the dialogue."""
    marks = [f"Xm{index}X" for index in range(len(roles))]
    dialogue = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    found = {}
    try:
        rest = render(dialogue)
        renamed = [{**m, "role": m["role"].replace("tool", "assistant")} for m in dialogue]
        if "tool" in roles and rest == render(renamed):
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
        if (row_format.history == "kept" or row_format.rewrites) and "assistant" in roles:
            last = len(roles) - roles[::-1].index("assistant")
            stretch = row_format.render_stretch(dialogue[last:], after="assistant")
            equal = expected.endswith(row_format.end_of_action + stretch)
        else:
            equal = expected == row_format.render(dialogue)
            equal &= closed.startswith(row_format.render(dialogue, answer=False))
        if not equal:
            return False
    return True
