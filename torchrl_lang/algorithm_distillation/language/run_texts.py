"""Recorded runs as text histories: one block for each turn, or one for each episode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from torchrl_lang._checks import one_of
from torchrl_lang.algorithm_distillation.language.text_history import TextHistory
from torchrl_lang.algorithm_distillation.run_format import RunRecord, shortest_decimal

__all__ = ["BlockOf", "run_texts"]

BlockOf = Literal["turn", "episode"]
"""What a block describes: a turn with its reward, or an episode with its return."""


def run_texts(records: Sequence[RunRecord], block_of: BlockOf = "turn") -> list[TextHistory]:
    r"""The text histories of recorded turns, in their order.

    With ``"turn"`` the prompt is what the environment wrote since the last response, the completion is the response,
    and the reward is that of the turn. The blocks of an episode follow one another, so the dialogue so far is in the
    blocks before; all that a language model acted on is there, and each of its responses is a completion.

    With ``"episode"`` the prompt is the dialogue up to the last response, one text a line, the completion is that
    response, and the reward is the return of the episode.

    Args:
        records: those of :func:`~torchrl_lang.algorithm_distillation.read_run`, the turns of an episode one after
        another.
        block_of: "turn" or "episode".

    Raises:
        ValueError: ``block_of`` is unknown.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.algorithm_distillation import run_records
        >>> from torchrl_lang.algorithm_distillation.language import run_texts
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> turns = [Turn("a"), Turn("b", reward=-1), Turn("ca"), Turn("c", reward=2)]
        >>> rows = to_rows([Episode(turns, terminated=True)], tokenizer, 12)
        >>> records = list(run_records(rows, tokenizer, epoch=1, run="ppo"))
        >>> [(each.query, each.response, each.reward, each.episode) for each in run_texts(records)]
        [('a', 'b', -1.0, 0), ('ca', 'c', 2.0, 0)]
        >>> [(each.query, each.response, each.reward) for each in run_texts(records, "episode")]
        [('a\nb\nca', 'c', 1.0)]
    """
    one_of("block_of", block_of, ("turn", "episode"))
    if block_of == "turn":
        return [_text(record, record.query, record.reward) for record in records]
    return [
        _text(turns[-1], _dialogue(turns), shortest_decimal(sum(turn.reward for turn in turns)))
        for _, group in groupby(records, key=lambda record: (record.run, record.epoch, record.episode))
        if (turns := list(group))
    ]


def _dialogue(turns: Sequence[RunRecord]) -> str:
    """What was written before the last response; empty texts, such as the first query of many games, have no line."""
    texts = [text for turn in turns for text in (turn.query, turn.response)][:-1]
    return "\n".join(text for text in texts if text)


def _text(record: RunRecord, query: str, reward: float) -> TextHistory:
    return TextHistory(
        query=query,
        response=record.response,
        rewards=(reward,),
        log_probs=record.log_probs,
        epoch=record.epoch,
        run=record.run,
        query_tokens=record.query_tokens if query == record.query else (),
        response_tokens=record.response_tokens,
        episode=record.episode,
    )
