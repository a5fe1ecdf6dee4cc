"""Records of played games."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang.functional.decisions import utterance_ends
from torchrl_lang.schema import ROW_KEYS, TERMINATED, TRUNCATED, ControlTokens, entry, missing_entry

__all__ = ["GameRecords"]


@dataclass(frozen=True)
class GameRecords:
    """The results of ``N`` games, on the CPU. Game ``i`` is episode ``i`` of the environment's seed."""

    rows: TensorDict
    """The final transcripts: the entries of a row, ``[N, T]``."""
    returns: Tensor
    """float32 ``[N]``: undiscounted sum of rewards."""
    turns: Tensor
    """int64 ``[N]``: turns of the agent."""
    terminated: Tensor
    """bool ``[N]``: the task ended."""
    truncated: Tensor
    """bool ``[N]``: a limit ended the game."""
    last_reward: Tensor
    """float32 ``[N]``: reward of the last turn."""
    agent_tokens: Tensor
    """int64 ``[N]``: tokens that the agent wrote."""
    log_ratio: Tensor | None = None
    """float32 ``[N]``: sum over the agent's tokens of ``log pi - log behaviour``; ``None`` if unknown."""
    entropy: Tensor | None = None
    """float32 ``[N]``: sum over the agent's tokens of the policy's entropy; ``None`` if unknown."""
    kept: TensorDict = field(default_factory=TensorDict)
    """Entries of the last ``next`` observation that ``keep`` named, each ``[N]`` or ``[N, ...]``."""

    def __len__(self) -> int:
        return len(self.returns)

    @classmethod
    def from_rows(cls, rows: TensorDictBase, control: ControlTokens) -> GameRecords:
        """Make records of the games in a dataset, to compare it with policies in one table.

        Args:
            rows: the entries of a row, ``[N, T]``, and optionally ``terminated`` and ``truncated`` (``[N]`` or
                ``[N, 1]``). Without them, a game has terminated if its row ends with the end-of-dialogue token, and is
                truncated otherwise; rows of a chat template need ``terminated``.
            control: the control tokens of the rows.

        Examples:
            >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
            >>> from torchrl_lang.evaluation import GameRecords
            >>> tokenizer = CharTokenizer.from_alphabet("ab")
            >>> rows = to_rows([Episode([Turn("a", reward=-1.0)], True)], tokenizer, 6)
            >>> records = GameRecords.from_rows(rows, tokenizer.control)
            >>> records.returns, records.turns, records.terminated
            (tensor([-1.]), tensor([1]), tensor([True]))
        """
        rows = rows.cpu()
        tokens, real, agent, reward = (entry(rows, key) for key in ROW_KEYS)
        ended = rows.get(TERMINATED, None)
        if ended is None:
            if not control.marks_turns:
                raise missing_entry("GameRecords of chats", [TERMINATED], rows, "Chats have no token for it.")
            ended = ((tokens == control.end_of_dialogue) & real).any(-1)
        ended = ended.reshape(len(rows))
        truncated = rows.get(TRUNCATED, None)
        position = torch.arange(tokens.shape[-1])
        last = torch.where(agent, position, 0).amax(-1, keepdim=True)
        return cls(
            rows=TensorDict({key: rows.get(key) for key in ROW_KEYS}, batch_size=[len(rows)]),
            returns=reward.sum(-1),
            turns=utterance_ends(tokens, real, agent, control.end_of_action).sum(-1),
            terminated=ended,
            truncated=~ended if truncated is None else truncated.reshape(len(rows)),
            last_reward=reward.gather(-1, last).squeeze(-1),
            agent_tokens=agent.sum(-1),
        )
