"""The strings of a chat template around the texts of a row."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from torchrl_lang._checks import one_of
from torchrl_lang._files import Fields
from torchrl_lang.text.template_strings import Message, check_format, derive_format, derive_joins, template_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowFormat"]


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
        history: "exact" if the rows of a whole dialogue equal the template's, "kept" if only the first prompt does.
        template: the chat template (Jinja), saved beside a model.
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

        The strings are fixed here: a template that writes today's date writes the same date in all rows. Roles and
        sequences of messages that the template refuses or rewrites have no entry in ``joins``, so writing them is an
        error.

        Args:
            source: a tokenizer of transformers with a chat template, or the name or local path of one.
            system: the system prompt of all rows; by default the template's own, if it has one, or that of a row's
                first message.
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
        one_of("history", history, ("exact", "kept"))
        tokenizer, render = template_renderer(source, system, tools, template_options)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        template = tokenizer.chat_template
        row_format = cls(
            **derive_format(render, special, history),
            history=history,
            template=template if isinstance(template, str) else None,
        )
        check_format(row_format, render)
        return derive_joins(row_format, render, special, has_system=system is not None)

    @cached_property
    def all_joins(self) -> Mapping[str, str]:
        """:attr:`joins` with ``opening``, ``prompt``, ``between`` and ``close``."""
        own = {
            "start>user": self.opening,
            "user>assistant": self.prompt,
            "assistant>user": self.between,
            "user>end": self.close,
        }
        return {**self.joins, **own}

    def join(self, first: str, second: str) -> str:
        """What stands between two messages of these roles; after an utterance, after its ``end_of_action``.

        Raises:
            ValueError: the chat template has no such messages.
        """
        string = self.all_joins.get(f"{first}>{second}")
        if string is None:
            raise ValueError(
                f"Rows of this chat template cannot have {_place(first, second)}: the template refuses or rewrites it, "
                f"or the format has a system prompt. Possible are {', '.join(self.all_joins)}."
            )
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
        """An utterance as the template writes it."""
        return text.strip() if self.strips_action else text

    def config(self) -> dict[str, Any]:
        """The fields as JSON."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RowFormat:
        """Build the format from its :meth:`config`; raises ``ValueError`` if the configuration is invalid."""
        read = Fields(config, "The row format", "take it from a tokenizer's config()")
        types = {"strips_text": bool, "strips_action": bool, "joins": dict}
        values: dict[str, Any] = {
            each.name: read.take(each.name, types.get(each.name, str))
            for each in fields(cls)
            if config.get(each.name) is not None or each.name not in ("template", "joins")
        }
        one_of("history", values["history"], ("exact", "kept"))
        joins = Fields(values.get("joins", {}), "The joins of the row format", "take them from a tokenizer's config()")
        return cls(**{**values, "joins": {pair: joins.take(pair, str) for pair in joins.content}})


def _place(first: str, second: str) -> str:
    """A sequence of two roles in words."""
    if first == "start":
        return f"a {second} message at the beginning"
    if second == "assistant":
        return f"an utterance after a {first} message"
    if second == "end":
        return f"a {first} message at the end"
    return f"a {second} message after {'an utterance' if first == 'assistant' else f'a {first} message'}"
