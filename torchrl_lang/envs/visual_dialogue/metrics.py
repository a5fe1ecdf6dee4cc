"""Metrics of played visual dialogues: percentile by round, and how many replies are yes-or-no answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.visual_dialogue.dialogue import Round
from torchrl_lang.envs.visual_dialogue.rewards import STOP
from torchrl_lang.envs.visual_dialogue.yes_no import Penalty, is_yes_no
from torchrl_lang.text.rows import from_row
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["percentiles_by_round", "played_rounds", "yes_no_rate"]


def percentiles_by_round(progress: Tensor) -> Tensor:
    """The percentile after the caption and after each round; a dialogue that has ended keeps its last one.

    Args:
        progress: the environment's last ``progress``, float ``[N, 11]``, such as ``records.kept["progress"]``. With
            ``measure="distance"`` the result are distances.

    Returns:
        float32 ``[N, 11]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import percentiles_by_round
        >>> percentiles_by_round(torch.tensor([[0.5, 0.25, -0.125, *[0.0] * 8]]))[0, :5]
        tensor([0.5000, 0.7500, 0.6250, 0.6250, 0.6250])
    """
    return progress.double().cumsum(-1).float()


def played_rounds(rows: TensorDictBase, tokenizer: Tokenizer) -> list[list[Round]]:
    """The questions and replies of each row; an utterance with ``<stop>`` that got no reply is no round.

    Args:
        rows: the entries of a row, ``[N, T]``, such as ``records.rows``; rows of a chat template need ``terminated``.
        tokenizer: of the rows.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.envs.visual_dialogue import played_rounds
        >>> tokenizer = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz ?<>")
        >>> turns = [Turn("a dog"), Turn("is it red?", 0.25), Turn("no"), Turn("<stop>", 0.0)]
        >>> played_rounds(to_rows([Episode(turns, terminated=True)], tokenizer, 40), tokenizer)
        [[Round(question='is it red?', answer='no')]]
    """
    return [_rounds(row, tokenizer) for row in rows]


def _rounds(row: TensorDictBase, tokenizer: Tokenizer) -> list[Round]:
    turns, rounds = from_row(row, tokenizer).turns, list[Round]()
    for number, turn in enumerate(turns):
        replied = number + 1 < len(turns) and not turns[number + 1].by_agent
        if turn.by_agent and (replied or STOP not in turn.text):
            rounds.append(Round(turn.text, turns[number + 1].text if replied else ""))
    return rounds


def yes_no_rate(rounds: Sequence[Sequence[Round]], penalty: Penalty, *, substrings: bool = False) -> Tensor:
    """The share of the rounds of each dialogue whose reply is a yes-or-no answer, float32 ``[N]``; 0 without rounds.

    Args:
        rounds: of each dialogue, see :func:`played_rounds`.
        penalty: which replies count, see :func:`is_yes_no`.
        substrings: see there.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Round, yes_no_rate
        >>> asked = [Round("is it red?", "no"), Round("how many?", "two")]
        >>> yes_no_rate([asked, asked[1:], []], "hard")
        tensor([0.5000, 0.0000, 0.0000])
    """
    counts = [sum(is_yes_no(each.answer, penalty, substrings=substrings) for each in some) for some in rounds]
    totals = torch.tensor([max(1, len(some)) for some in rounds], dtype=torch.float32)
    return torch.tensor(counts, dtype=torch.float32) / totals
