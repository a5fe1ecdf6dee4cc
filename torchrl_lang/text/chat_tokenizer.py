"""Tokenizers whose rows are written as a chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lang._files import Record, one_line, shorten, validate
from torchrl_lang.schema import ControlTokens
from torchrl_lang.text.chat_template import Message, RowFormat
from torchrl_lang.text.hf_tokenizer import PlainTextEncoder, backend_text, load_hf_tokenizer, read_backend
from torchrl_lang.text.tokenizers import CONFIG, CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatConfig(Record):
    """The configuration of a :class:`ChatTokenizer`."""

    kind: str
    tokenizer: dict[str, Any]
    row_format: dict[str, Any]
    roles: dict[str, str]
    pad: str


class ChatTokenizer:
    """A Hugging Face tokenizer, unchanged, whose rows are written as its chat template writes a dialogue.

    Its rows hold no token that the model has not seen: the environment writes the template's strings, and an
    utterance ends with the template's special token. Each stretch of the environment, from the end of an utterance to
    the place where the agent writes again, is encoded in one call, as the template's text would be. So the first prompt
    has exactly the template's ids. What the agent sampled is never encoded again: with ``row_format.history="exact"``
    the decoded row equals the template's text, up to white space that the template strips, and so do its ids unless the
    tokenizer would merge an utterance with the strings around it.

    Names of special tokens in a text of the environment are encoded as plain text, so no text can forge a turn. The
    agent may write added tokens that are not special, such as ``<think>`` or tool calls, but no other special token:
    they are in ``control.forbidden``.

    Args:
        source: a fast tokenizer, or the name or local path of one.
        row_format: the strings of its template, from :meth:`RowFormat.from_chat_template`.
        pad: the padding token; by default the tokenizer's own, if it does not end utterances, or else another special
            token that the template does not use.
        trust_remote_code: as in :class:`~torchrl_lang.text.HFTokenizer`.

    Raises:
        OSError, TypeError: as :class:`~torchrl_lang.text.HFTokenizer`.
        ValueError: the format does not belong to this tokenizer, or there is no token to pad with.

    Examples:
        >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from torchrl_lang.text import ChatTokenizer, Episode, RowFormat, Turn, to_rows
        >>> letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        >>> backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
        >>> backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        >>> backend.decoder = decoders.ByteLevel()
        >>> source = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>",
        ...     additional_special_tokens=["<|im_start|>"], chat_template="{% for m in messages %}<|im_start|>"
        ...     "{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        ...     "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}")
        >>> tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
        >>> rows = to_rows([Episode([Turn("hi"), Turn("yo", 1.0), Turn("<|im_end|>")], terminated=True)], tokenizer, 64)
        >>> row = rows["tokens"][0, :rows["attention_mask"].sum()]
        >>> tokenizer.decode(row)
        '<|im_start|>user: hi<|im_end|><|im_start|>assistant: yo<|im_end|><|im_start|>user: <|im_end|><|im_end|>'
        >>> (row == tokenizer.control.end_of_action).sum()  # the last text's is plain text
        tensor(3)
    """

    vocab_size: int
    """Number of token ids."""
    control: ControlTokens
    """Ids of the padding token and of the end of an utterance; ``forbidden`` has all other special tokens."""
    row_format: RowFormat
    """The strings of the template."""

    def __init__(
        self,
        source: str | Path | PreTrainedTokenizerBase,
        row_format: RowFormat,
        *,
        pad: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        tokenizer = load_hf_tokenizer(source, trust_remote_code)
        names = {role: getattr(tokenizer, role, None) for role in ("unk_token", "bos_token", "eos_token")}
        roles = {role: token for role, token in names.items() if token is not None}
        own = getattr(tokenizer, "pad_token", None)
        candidates = [*([] if own is None else [own]), *roles.values()] if pad is None else [pad]
        self._build(backend_text(tokenizer), row_format, roles, candidates, strict=pad is not None)

    def _build(self, text: str, row_format: RowFormat, roles: dict[str, str], pads: list[str], *, strict: bool) -> None:
        self.backend = read_backend(text)
        """The underlying ``tokenizers.Tokenizer``."""
        self.row_format = row_format
        self._plain = PlainTextEncoder(self.backend)
        end = self._plain.special.get(row_format.end_of_action)
        if end is None:
            found = f"{row_format.end_of_action!r}, which is not a special token of this tokenizer"
            raise ValueError(f"The row format ends utterances with {found}: derive the format from the same tokenizer.")
        self.roles = roles
        """Names of the tokens for unknown words and for the ends of texts, as in transformers."""
        self._pad = self._choose_pad(pads if strict else [*pads, *self._plain.special])
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())
        pad_id = self._plain.special[self._pad]
        forbidden = tuple(sorted({*self._plain.special.values()} - {end, pad_id}))
        self.control = ControlTokens(pad_id, end, vocab_size=self.vocab_size, forbidden=forbidden)
        self.prompt_ids = self._plain.following(row_format.prompt)
        """Ids of the template's generation prompt."""

    def _choose_pad(self, candidates: Sequence[str]) -> str:
        strings = [self.row_format.end_of_action, *self.row_format.all_joins.values()]
        for token in candidates:
            if token in self._plain.special and not any(token in string for string in strings):
                return token
        found = f"{shorten(str([*candidates]))}: give a special token that the chat template does not use as pad="
        raise ValueError(f"Rows cannot be padded with any of {found}.")

    # -- the protocol of tokenizers ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text; names of added tokens in it are plain text."""
        return self._plain.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are written by name."""
        return self.backend.decode([int(index) for index in ids], skip_special_tokens=False)

    def config(self) -> dict[str, Any]:
        """The whole tokenizer and the row format as JSON."""
        own = {"tokenizer": json.loads(self.backend.to_str()), "row_format": self.row_format.config()}
        return {"kind": "chat", **own, "roles": dict(self.roles), "pad": self._pad}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ChatTokenizer:
        """Build the tokenizer from its :meth:`config`; raises ``ValueError`` if the configuration is invalid."""
        read = validate(ChatConfig, config, CONFIG)
        tokenizer = cls.__new__(cls)
        row_format = RowFormat.from_config(read.row_format)
        tokenizer._build(json.dumps(read.tokenizer), row_format, read.roles, [read.pad], strict=True)
        return tokenizer

    # -- the chat template itself --------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The chat template's text of messages, without a system prompt or tools of the row format.

        Raises:
            ValueError: the row format has no template, or the template refuses the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

        template = self.row_format.template
        if template is None:
            raise ValueError("The row format has no chat template to write messages with: derive it from one.")
        names = {**self.roles, "pad_token": self.decode([self.control.pad])}
        try:
            return render_jinja_template([list(messages)], chat_template=template, **options, **names)[0][0]
        except Exception as error:  # templates raise Jinja's errors, with a message of their own
            raise ValueError(f"The chat template refuses these messages: {one_line(error)}.") from error

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the chat template's text of messages with its generation prompt; see :meth:`render`.

        The system prompt and tools of the row format are part of it. Names of added tokens in the environment's texts
        are plain text, and so are names of special tokens in the agent's.
        """
        row_format, cut = self.row_format, self._plain.cut
        first = [] if row_format.system is None else [{"role": "system", "content": row_format.system}]
        texts = [{**m, "content": cut(m["content"], only_special=m["role"] == "assistant")} for m in messages]
        given: Any = {"tools": row_format.tools, "add_generation_prompt": True, **row_format.template_options}
        return self._plain.encode_cut(self.render([*first, *texts], **given))

    # -- the parts of a row --------------------------------------------------------------------------------------------

    def encode_opening(self, text: str) -> list[int]:
        """Ids of all that stands before the first utterance, ``text`` included; empty if the agent begins."""
        return self.encode_stretch([("user", text)], opening=True)

    def encode_reply(self, text: str, *, role: str = "user", answer: bool = True) -> list[int]:
        """Ids between the end of an utterance and the next, or after the last one if the agent does not ``answer``.

        A last reply without text has no ids.
        """
        return self.encode_stretch([(role, text)], answer=answer) if text or answer else []

    def encode_stretch(
        self, messages: Sequence[tuple[str, str]], *, opening: bool = False, answer: bool = True
    ) -> list[int]:
        """Ids of all that the environment writes in one place.

        Args:
            messages: role and text of at least one message.
            opening: before the first utterance instead of after one.
            answer: whether the agent answers.

        Raises:
            ValueError: the template has no such roles in this order.
        """
        row_format = self.row_format
        roles = ["start" if opening else "assistant", *(role for role, _ in messages), "assistant" if answer else "end"]
        strings = [row_format.join(*pair) for pair in pairwise(roles)]
        texts = [row_format.clean_text(text) for _, text in messages]
        if opening:
            return self._plain.interleave(strings, texts)
        # The end of the utterance is a token of the agent, but the strings after it are encoded as if it were not.
        strings[0] = row_format.end_of_action + strings[0]
        return self._plain.interleave(strings, texts)[1:]

    def encode_action(self, text: str) -> list[int]:
        """Ids of an utterance that is given as text, without its end; only special tokens' names are plain text."""
        return self._plain.encode(self.row_format.lead + self.row_format.clean_action(text), only_special=True)

    def decode_action(self, ids: Sequence[int]) -> str:
        """The text of an utterance, without its end and the template's lead."""
        return self.decode(ids).removeprefix(self.row_format.lead)


def encode_action(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of an utterance that is given as text, without its end."""
    if isinstance(tokenizer, ChatTokenizer | CharTokenizer):
        return tokenizer.encode_action(text)
    return tokenizer.encode(text)


def padded_action(tokenizer: Tokenizer, text: str, length: int) -> list[int] | None:
    """Ids of an utterance with its end, padded to a length; None if they are more."""
    ids = [*encode_action(tokenizer, text), tokenizer.control.end_of_action]
    return None if len(ids) > length else ids + [tokenizer.control.pad] * (length - len(ids))


def decode_action(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of an utterance, without its end."""
    return tokenizer.decode_action(ids) if isinstance(tokenizer, ChatTokenizer) else tokenizer.decode(ids)
