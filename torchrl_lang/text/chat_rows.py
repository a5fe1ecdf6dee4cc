"""The turns of an episode as the tokens of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import Episode, Turn

__all__ = ["Part", "chat_parts"]

Part = tuple[list[int], list[bool], float]
"""Tokens of one side, True on those of the agent, and a reward for the last of these."""


def chat_parts(episode: Episode, tokenizer: ChatTokenizer) -> list[Part]:
    """The parts of an episode in order: the opening, utterances with their ends, and what stands between them.

    Two utterances without a turn of the environment between them have an empty message of the user there.

    Raises:
        ValueError: the chat template has no such sequence of roles, or an utterance contains its end.
    """
    parts: list[Part] = []
    waiting: list[Turn] = []
    for index, turn in enumerate(episode.turns):
        if not turn.by_agent:
            waiting.append(turn)
            continue
        is_cut = episode.cut and index == len(episode.turns) - 1
        parts.append(_of_environment(waiting, tokenizer, opening=not parts))
        parts.append(_of_agent(turn, tokenizer, is_cut))
        waiting = []
        if is_cut:
            return parts
    answer = not parts or not episode.terminated
    return [*parts, _of_environment(waiting, tokenizer, opening=not parts, answer=answer)]


def _of_environment(turns: Sequence[Turn], tokenizer: ChatTokenizer, *, opening: bool, answer: bool = True) -> Part:
    """All that stands before the first utterance, between two, or after the last one."""
    exact = [turn.tokens for turn in turns if turn.tokens is not None]
    if exact and len(turns) > 1:
        raise ValueError(f"{len(turns)} turns of the environment follow each other: give their texts without tokens.")
    if exact:
        ids = list(exact[0])
    else:
        messages = [(turn.role, turn.text) for turn in turns] or [("user", "")]
        is_silent = not answer and messages == [("user", "")]
        ids = [] if is_silent else tokenizer.encode_stretch(messages, opening=opening, answer=answer)
    return ids, [False] * len(ids), 0.0


def _of_agent(turn: Turn, tokenizer: ChatTokenizer, is_cut: bool) -> Part:
    ids = tokenizer.encode_action(turn.text) if turn.tokens is None else list(turn.tokens)
    control = tokenizer.control
    if control.end_of_action in ids or control.pad in ids:
        raise ValueError(f"The utterance {turn.text!r} contains its end token or the padding token.")
    agent = [True] * len(ids)
    if not is_cut:
        ids, agent = [*ids, control.end_of_action], [*agent, turn.closed]
    return ids, agent, turn.reward or 0.0
