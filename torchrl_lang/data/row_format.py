"""The strings of a chat template around the texts of a row, derived from the template and checked against it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal

from torchrl_lang.data.hf_tokenizer import load_hf_tokenizer
from torchrl_lang.functional.checks import one_of
from torchrl_lang.storage import Fields, one_line, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowFormat"]

Message = Mapping[str, Any]
"""A message of a chat: its ``role`` and ``content``."""


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How the turns of a row are written as a chat.

    A row is ``opening text prompt utterance end_of_action between text prompt utterance end_of_action ...``: the
    environment writes the user's texts and all strings of the template, the agent its utterances with their
    ``end_of_action``. An environment without a text writes an empty message of the user, so that there is always
    something between two utterances. The text that ends a task is followed by ``close``, or not written at all if it is
    empty. No token marks the end of an episode: only the entry ``terminated`` does.

    Use :meth:`from_chat_template`, and :class:`~torchrl_lang.data.ChatTokenizer` for environments and datasets.

    Args:
        opening: all before the first text: the system prompt, tools, and the user's header.
        prompt: from the end of a text to the place where the agent writes (the template's generation prompt).
        end_of_action: the special token that ends an utterance.
        between: from the end of an utterance, after ``end_of_action``, to the next text.
        close: what follows a text that the agent does not answer.
        lead: what an utterance begins with in the template, such as the space of Mistral's first template.
        strips_text: the template removes white space around the environment's texts; so do rows.
        strips_action: the template removes white space around utterances. Rows keep what the agent sampled; utterances
            that are given as text, as in a dataset, lose it.
        history: "exact" if the rows of a whole dialogue equal the template's, "kept" if only the first prompt does.
        template: the chat template (Jinja), saved beside a model.
    """

    opening: str
    prompt: str
    end_of_action: str
    between: str
    close: str
    lead: str = ""
    strips_text: bool = False
    strips_action: bool = False
    history: Literal["exact", "kept"] = "exact"
    template: str | None = None

    @classmethod
    def from_chat_template(
        cls,
        source: str | os.PathLike[str] | PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        tools: Sequence[Any] | None = None,
        history: Literal["exact", "kept"] = "exact",
        **template_options: Any,
    ) -> RowFormat:
        """Derive the format from a tokenizer's chat template, and check it on conversations of up to five messages.

        The strings are fixed here: a template that writes today's date writes the same date in all rows.

        Args:
            source: a tokenizer of transformers with a chat template, or the name or local path of one.
            system: the system prompt; by default the template's own, if it has one.
            tools: JSON schemas or documented functions, as ``apply_chat_template`` takes them.
            history: "exact" raises an error if the template changes earlier messages of a longer dialogue. "kept"
                allows that: rows keep all tokens as they were when the agent wrote, so they equal the template's text
                for the first prompt only. Templates that drop the thoughts of earlier turns, or whose generation prompt
                contains a block that the history lacks, need it.
            template_options: further arguments of the template, such as ``enable_thinking=False``.

        Raises:
            OSError: there is no tokenizer of this name or path.
            ValueError: there is no chat template, or rows cannot be written as it writes dialogues; the message has
                the reason.

        Examples:
            >>> from tokenizers import Tokenizer, models
            >>> from transformers import PreTrainedTokenizerFast
            >>> from torchrl_lang.data import RowFormat
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
        """
        one_of("history", history, ("exact", "kept"))
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
                    **template_options,
                )
            except Exception as error:  # templates raise Jinja's errors, with a message of their own
                raise ValueError(f"The chat template refuses these messages: {one_line(error)}.") from error

        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        found = _derive(render, special, history)
        template = tokenizer.chat_template
        row_format = cls(**found, history=history, template=template if isinstance(template, str) else None)
        _check(row_format, render)
        return row_format

    def render(self, messages: Sequence[str], *, answer: bool = True) -> str:
        """The text of a row whose messages are the environment's and the agent's in turn, the environment's first.

        Args:
            messages: texts, of which the first, third, ... are the environment's.
            answer: whether the agent answers the last message, if that is the environment's.
        """
        text = ""
        for index, message in enumerate(messages):
            if index % 2:
                text += self.lead + self.clean_action(message) + self.end_of_action
            else:
                last = index == len(messages) - 1
                after = self.prompt if answer or not last else self.close
                text += (self.between if index else self.opening) + self.clean_text(message) + after
        return text

    def clean_text(self, text: str) -> str:
        """A text of the environment as the template writes it."""
        return text.strip() if self.strips_text else text

    def clean_action(self, text: str) -> str:
        """An utterance as the template writes it."""
        return text.strip() if self.strips_action else text

    def config(self) -> dict[str, Any]:
        """The fields as JSON."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RowFormat:
        """Build the format from its :meth:`config`; raises ``ValueError`` if the configuration is invalid."""
        read = Fields(config, "The row format", "take it from a tokenizer's config()")
        types = {"strips_text": bool, "strips_action": bool}
        values: dict[str, Any] = {
            field.name: read.take(field.name, types.get(field.name, str))
            for field in fields(cls)
            if config.get(field.name) is not None or field.name != "template"
        }
        one_of("history", values["history"], ("exact", "kept"))
        return cls(**values)


# -- deriving the strings ----------------------------------------------------------------------------------------------

_TEXTS = ("Xu1X", "Xu2X", "Xu3X")
_ACTIONS = ("Xa1X", "Xa2X")


def _chat(messages: Sequence[str]) -> list[Message]:
    roles = islice(cycle(("user", "assistant")), len(messages))
    return [{"role": role, "content": content} for role, content in zip(roles, messages, strict=True)]


def _derive(render: Callable[..., str], special: Sequence[str], history: str) -> dict[str, Any]:
    """The strings between marked messages in the template's text of a short dialogue."""
    one, two = _TEXTS[0], _TEXTS[1]
    opening, prompt = _split(render(_chat([one])), one)
    dialogue = render(_chat([one, _ACTIONS[0], two]))
    before, rest = _split(dialogue, one)
    middle, rest = _split(rest, _ACTIONS[0])
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
    closed = render(_chat([one, _ACTIONS[0], two]), False)
    close = _split(closed, two)[1] if two in closed else ""
    padded = [_split(render(_chat([f"  {one}  "])), one), _split(render(_chat([one, f"  {_ACTIONS[0]}  ", two])), "a1")]
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


def _without_final_token(close: str, special: Sequence[str], between: str) -> str:
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


def _check(row_format: RowFormat, render: Callable[..., str]) -> None:
    """Raise ValueError unless dialogues equal the template's, as far as ``history`` promises it."""
    exact = row_format.history == "exact"
    for messages in _BATTERY:
        for length in (1, 3, 5) if exact else (1,):
            texts = list(messages[:length])
            expected, found = render(_chat(texts)), row_format.render(texts)
            if found != expected:
                raise ValueError(
                    f"Rows cannot be written as the chat template writes the messages {shorten(str(texts))}: it writes "
                    f"{shorten(expected)}, the derived strings give {shorten(found)}."
                )
    thinking = f"<think>\n{_THOUGHT}\n</think>\n\nanswer"
    if exact and _THOUGHT not in render(_chat([_TEXTS[0], thinking, _TEXTS[1]])):
        raise ValueError(
            "The chat template drops the thoughts of earlier turns (<think> ... </think>), but a row keeps what the "
            "agent wrote: history='kept' allows that; then only the first prompt equals the template's."
        )
