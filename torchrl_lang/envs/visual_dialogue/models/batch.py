"""Dialogues as tensors of word ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.models.words import BEGIN, END, PAD, WordIndex

__all__ = ["MAX_WORDS", "DialogueBatch", "with_begin_and_end"]

MAX_WORDS = 40
"""Words of a caption, question or answer that the models read."""


class DialogueBatch(NamedTuple):
    """Dialogues of different numbers of rounds, right-padded.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, Round
        >>> from torchrl_lang.envs.visual_dialogue.models import DialogueBatch, WordIndex
        >>> dialogues = [Dialogue("a dog"), Dialogue("a cat", (Round("is it red?", "no"),))]
        >>> batch = DialogueBatch.of(dialogues, WordIndex.of_texts(["a cat or a dog"]))
        >>> batch.questions.shape, batch.rounds
        (torch.Size([2, 1, 4]), tensor([0, 1]))
    """

    caption: Tensor
    """Int64 ``[N, L]``."""
    questions: Tensor
    """Int64 ``[N, R, L]``."""
    answers: Tensor
    """Int64 ``[N, R, L]``."""
    rounds: Tensor
    """Number of rounds, int64 ``[N]``."""

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue], words: WordIndex) -> DialogueBatch:
        """The ids of dialogues."""
        rounds = torch.tensor([len(each.rounds) for each in dialogues], dtype=torch.int64)
        pairs = [each for dialogue in dialogues for each in dialogue.rounds]
        return cls(
            words.ids([each.caption for each in dialogues], longest=MAX_WORDS),
            _placed(words.ids([each.question for each in pairs], longest=MAX_WORDS), rounds),
            _placed(words.ids([each.answer for each in pairs], longest=MAX_WORDS), rounds),
            rounds,
        )

    def to(self, device: torch.device | str) -> DialogueBatch:
        """The batch on a device."""
        return DialogueBatch(*(each.to(device) for each in self))

    def rows(self, index: Tensor) -> DialogueBatch:
        """Some of the dialogues."""
        return DialogueBatch(*(each[index] for each in self))


def with_begin_and_end(ids: Tensor) -> Tensor:
    """Right-padded ids ``[..., L]`` with the begin id in front and the end id behind, ``[..., L + 2]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue.models.batch import with_begin_and_end
        >>> with_begin_and_end(torch.tensor([[7, 8], [7, 0]]))
        tensor([[2, 7, 8, 3],
                [2, 7, 3, 0]])
    """
    wider = functional.pad(ids, (1, 1), value=PAD)
    wider[..., 0] = BEGIN
    return wider.scatter(-1, (ids != PAD).sum(-1, keepdim=True) + 1, END)


def _placed(ids: Tensor, rounds: Tensor) -> Tensor:
    """The ids ``[N, R, L]`` of texts ``[sum(rounds), L]`` in the order of dialogues and rounds."""
    most = int(rounds.max()) if len(rounds) else 0
    placed = torch.full((len(rounds), most, ids.shape[-1]), PAD)
    placed[torch.arange(most) < rounds[:, None]] = ids
    return placed
