from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.language_env import LanguageEnv, Reply, TaskState
from torchrl_lang.envs.row_state import Utterance
from torchrl_lang.functional import random_index
from torchrl_lang.text import CharTokenizer


class Guess(LanguageEnv):
    """A digit is hidden; a guess is answered by whether it is too low or too high, a letter by nothing."""

    def __init__(self, batch_size: int | tuple[int, ...], seed: int | None = None) -> None:
        tokenizer = CharTokenizer.from_alphabet("0123456789+-=x")
        super().__init__(
            tokenizer, row_length=40, action_length=3, max_turns=4, batch_size=batch_size, seed=seed, device="cpu"
        )

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        none = torch.zeros((len(episode), 0), dtype=torch.int64)
        return none, torch.zeros_like(episode), {"hidden": random_index(self._key, episode, 10)}

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        guess, hidden = utterance.tokens[:, 0], task["hidden"]
        valid = (guess < 10) & (utterance.length == 1)
        right = valid & (guess == hidden)
        answer = torch.where(right, 12, torch.where(guess < hidden, 10, 11))[:, None]
        return Reply(answer, valid.long(), torch.where(right, 0.0, -1.0), right), task


class Bisect:
    """Guesses the middle of what is left, reading the row; ``first`` is the opening guess."""

    def __init__(self, env: LanguageEnv, first: int = 5) -> None:
        self.end = env.tokenizer.control.end_of_action
        self.first = first

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        actions = [self._guess(row, mask) for row, mask in zip(*self._rows(td), strict=True)]
        return td.set("action", torch.tensor(actions).reshape(*td.batch_size, 3))

    def _rows(self, td: TensorDictBase) -> tuple[list[list[int]], list[list[bool]]]:
        return tuple(td[key].flatten(0, -2).tolist() for key in ("tokens", "attention_mask"))

    def _guess(self, row: list[int], real: list[bool]) -> list[int]:
        words = [token for token, exists in zip(row, real, strict=True) if exists and token < 13]
        low, high, guess = 0, 9, self.first
        for last, answer in zip(words[::2], words[1::2], strict=True):
            low, high = (last + 1, high) if answer == 10 else (low, last - 1)
            guess = (low + high) // 2
        return [guess, self.end, self.end]


@pytest.fixture
def guess() -> type[Guess]:
    return Guess


@pytest.fixture
def bisect() -> type[Bisect]:
    return Bisect
