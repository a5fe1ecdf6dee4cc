"""Scripted players of text games: a function from texts to a text, as the policy of an environment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import shorten
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.schema import ACTION, DONE, ROW_KEYS, TERMINATED, TRUNCATED
from torchrl_lang.text.chat_tokenizer import encode_action
from torchrl_lang.text.episodes import Turn
from torchrl_lang.text.rows import from_row
from torchrl_lang.text.tokenizers import Tokenizer

PlayText = Callable[[list[str], random.Random], str]
"""Called as ``play(texts, rng)``: the texts of a game so far, the environment's last; returns the agent's next."""


class TextPlayer(TensorDictModuleBase):
    """A scripted policy for any :class:`~torchrl_lang.envs.LanguageEnv`, from texts to a text.

    Args:
        play: a function ``play(texts, rng) -> text``. ``texts`` are those of the game so far, of the environment and of
            the agent in turn, the environment's first and last (empty where it wrote nothing). ``rng``, a
            :class:`random.Random`, is its only source of chance, so that the same seed plays the same games.
        tokenizer: the environment's.
        action_length: ``K``, tokens of an utterance, its end included.
        seed: seed of ``rng``.

    It reads the row of an observation, also ``done``, and writes ``action`` int64 ``[*B, K]``. Rows that are done get
    an empty utterance, without a call.

    Raises:
        TypeError: ``play`` returns something other than a text.
        ValueError: the text does not fit into ``action_length`` tokens, or has symbols that the tokenizer has not.

    Examples:
        >>> from torchrl_lang.envs import TextGameEnv, TextPlayer
        >>> from torchrl_lang.text import CharTokenizer
        >>> class Higher:
        ...     def reset(self, seed):
        ...         self.number = seed % 7 + 1
        ...         return "1 to 7"
        ...     def step(self, text):
        ...         won = int(text) == self.number
        ...         return "lower" if int(text) > self.number else "higher", float(won), won
        >>> def halve(texts, rng):
        ...     low, high = 1, 7
        ...     for guess, reply in zip(texts[1::2], texts[2::2]):
        ...         low, high = (int(guess) + 1, high) if reply == "higher" else (low, int(guess) - 1)
        ...     return str((low + high) // 2)
        >>> tokenizer = CharTokenizer.from_alphabet("ehiglorwt 1234567")
        >>> env = TextGameEnv(Higher, tokenizer, row_length=48, action_length=2, batch_size=8, seed=0)
        >>> games = env.rollout(3, TextPlayer(halve, tokenizer, env.action_length), break_when_any_done=False)
        >>> bool(games["next", "terminated"].any(1).all())  # three guesses are enough
        True
    """

    in_keys = [*ROW_KEYS]
    out_keys = [ACTION]

    @checked
    def __init__(self, play: PlayText, tokenizer: Tokenizer, action_length: Count, *, seed: int | None = None) -> None:
        super().__init__()
        self.play, self.tokenizer, self.action_length, self.stream = play, tokenizer, action_length, RandomStream(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``."""
        batch, control = tensordict.batch_size, self.tokenizer.control
        rows = tensordict.select(*ROW_KEYS, TERMINATED, TRUNCATED, DONE, strict=False).reshape(-1).cpu()
        action = torch.full((len(rows), self.action_length), control.pad)
        seeds = self.stream.below(torch.full((len(rows),), 2**31)).tolist()
        done = rows.get(DONE, torch.zeros(len(rows), 1)).flatten().tolist()
        for i, row in enumerate(rows):
            ids = [] if done[i] else self._utterance(row, random.Random(seeds[i]))
            action[i, : len(ids) + 1] = torch.tensor([*ids, control.end_of_action])
        return tensordict.set(ACTION, action.reshape(*batch, -1).to(tensordict.device))

    def _utterance(self, row: TensorDictBase, rng: random.Random) -> list[int]:
        texts = _in_turn(from_row(row, self.tokenizer).turns)
        text = self.play(texts, rng)
        where = f"{getattr(self.play, '__name__', self.play)}({shorten(texts)})"
        if not isinstance(text, str):
            raise TypeError(f"{where} must return a text, got {shorten(text)}.")
        ids = encode_action(self.tokenizer, text)
        if len(ids) >= self.action_length:
            room = f"at most {self.action_length - 1} fit beside its end: give a larger action_length or shorter texts"
            raise ValueError(f"{where} returned {shorten(text)} of {len(ids)} tokens, and {room}.")
        return ids


def _in_turn(turns: Sequence[Turn]) -> list[str]:
    """The texts of the environment and the agent in turn, empty where a row has no turn of the environment."""
    texts: list[str] = []
    for turn in turns:
        if turn.by_agent and len(texts) % 2 == 0:
            texts.append("")
        elif not turn.by_agent and len(texts) % 2 == 1:  # a tool's message and the user's
            texts[-1] += f"\n{turn.text}"
            continue
        texts.append(turn.text)
    return texts if len(texts) % 2 else [*texts, ""]
