"""Answer in dialogues as an agent: to texts, to the messages of a chat, and in a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_lang._files import shorten
from torchrl_lang.schema import ACTION, FEATURES, FEATURES_MASK
from torchrl_lang.text.chat_template import Message
from torchrl_lang.text.chat_tokenizer import ChatTokenizer, decode_action
from torchrl_lang.text.messages import Dialogue, encode_dialogue, read_utterance
from torchrl_lang.text.rows import stack_episodes
from torchrl_lang.text.tokenizers import Tokenizer


def dialogue_of(messages: str | Dialogue, texts: Sequence[str]) -> Dialogue:
    """The dialogue that ``reply(messages)`` or ``reply(text, text, ...)`` is given."""
    return [messages, *texts] if isinstance(messages, str) else messages


def replies(
    policy: TensorDictModuleBase,
    tokenizer: Tokenizer,
    action_length: int,
    dialogues: Sequence[Dialogue],
    *,
    tools: Sequence[Any] | None = None,
    features: Sequence[Any] | None = None,
) -> list[Any]:
    """The answers of a policy in several dialogues, decoded as one batch.

    Args:
        policy: such as an :class:`~torchrl_lang.modules.UtteranceActor`.
        tokenizer: of the rows that it was trained on.
        action_length: number of tokens of an answer, its end included.
        dialogues: of each its messages or its texts, see ``encode_dialogue``.
        tools: that the chat template describes to the agent, in all dialogues.
        features: of each dialogue, float ``[n, F]``, for a policy that reads some; their numbers may differ.

    Returns:
        A message of the assistant for each dialogue of messages, with ``tool_calls`` where the chat template reads
        the answer so; a text for each dialogue of texts.

    Raises:
        ValueError: as ``encode_dialogue``, a text or a message stands in the place of a dialogue, or the features do
            not fit.
        KeyError: the policy reads features, and none are given.
    """
    if not dialogues or any(isinstance(each, str | Mapping) for each in dialogues):
        raise ValueError(f"Give a dialogue or more, each a list of messages or texts, got {shorten(str(dialogues))}.")
    episodes = [encode_dialogue(dialogue, tokenizer, tools=tools) for dialogue in dialogues]
    control, longest = tokenizer.control, max(len(episode.tokens) for episode in episodes)
    rows = stack_episodes(episodes, control.pad, longest + action_length)
    if features is not None:
        rows.update(_shown(features, len(episodes)))
    written = policy(rows.to(next(policy.parameters()).device))[ACTION].tolist()
    ends = (control.end_of_action, control.pad)
    texts = [decode_action(tokenizer, [token for token in ids if token not in ends]) for ids in written]
    return [
        text if all(isinstance(each, str) for each in dialogue) else _message(text, tokenizer)
        for text, dialogue in zip(texts, dialogues, strict=True)
    ]


def _message(text: str, tokenizer: Tokenizer) -> dict[str, Any]:
    if isinstance(tokenizer, ChatTokenizer):
        return read_utterance(text, tokenizer)
    return {"role": "assistant", "content": text}


def _shown(features: Sequence[Any], dialogues: int) -> dict[str, Tensor]:
    """The features of each dialogue, padded, and their mask."""
    given = [torch.as_tensor(one, dtype=torch.float32) for one in features]
    shapes = [tuple(one.shape) for one in given]
    if len(given) != dialogues or any(len(shape) != 2 for shape in shapes):
        raise ValueError(f"Give features [n, F] of each of the {dialogues} dialogues, got shapes {shapes[:3]}.")
    masks = [torch.ones(len(one), dtype=torch.bool) for one in given]
    return {FEATURES: pad_sequence(given, batch_first=True), FEATURES_MASK: pad_sequence(masks, batch_first=True)}


COMMANDS = "/system TEXT begins a dialogue with a system prompt, /reset one without messages, /quit ends."


def chat(
    answer: Callable[[list[Message]], Message],
    *,
    input_fn: Callable[[str], str] = input,
    output_fn: Callable[[str], Any] = print,
) -> list[Message]:
    """Talk to an agent in a terminal: each line is a message of the user, or one of :data:`COMMANDS`.

    A message that cannot be answered is not kept, and the reason is shown.

    Args:
        answer: maps messages to the assistant's next one.
        input_fn: asks for a line, as :func:`input` does; ``EOFError`` ends.
        output_fn: shows a text.

    Returns:
        The messages of the last dialogue.

    Examples:
        >>> from torchrl_lang.modules.reply import chat
        >>> lines = iter(["hi", "/quit"])
        >>> messages = chat(lambda read: {"role": "assistant", "content": read[-1]["content"].upper()},
        ...     input_fn=lambda prompt: next(lines), output_fn=print)
        /system TEXT begins a dialogue with a system prompt, /reset one without messages, /quit ends.
        HI
    """
    system, messages = list[Message](), list[Message]()
    output_fn(COMMANDS)
    while True:
        try:
            line = input_fn("> ").strip()
        except EOFError:
            return messages
        command, _, text = line.partition(" ")
        if command == "/quit":
            return messages
        if command == "/system":
            system = [{"role": "system", "content": text.strip()}] if text.strip() else []
        if command in ("/system", "/reset"):
            messages = [*system]
            output_fn("A new dialogue.")
        elif command.startswith("/"):
            output_fn(f"There is no command {command}: {COMMANDS}")
        elif line:
            asked: list[Message] = [*messages, {"role": "user", "content": line}]
            try:
                messages = [*asked, answer(asked)]
            except ValueError as error:
                output_fn(f"No answer: {error}")
                continue
            last = messages[-1]
            output_fn("\n".join([last["content"], *map(json.dumps, last.get("tool_calls", ()))]).strip("\n"))
