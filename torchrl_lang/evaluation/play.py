"""Play games with a policy, and records of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

from torchrl_lang import schema
from torchrl_lang._checks import Count, checked
from torchrl_lang._random_stream import seeded_generators
from torchrl_lang.functional.decisions import utterance_ends
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.schema import (
    AGENT_MASK,
    CONTINUED,
    DONE,
    REWARD,
    ROW_KEYS,
    TERMINATED,
    TRUNCATED,
    ControlTokens,
    entry,
)


@dataclass(frozen=True)
class GameRecords:
    """The results of ``N`` games, on the CPU. Game ``i`` is episode ``i`` of the environment's seed."""

    rows: TensorDict
    """The final transcripts: the entries of a row, ``[N, T]``; of a game in several rows the last one."""
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
    log_prob: Tensor | None = None
    """float32 ``[N]``: log-probability of all that the agent wrote, ``log pi``, in nats; ``None`` if unknown."""
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
        ended, truncated = rows.get(TERMINATED, None), rows.get(TRUNCATED, None)
        if ended is None and not control.marks_turns:
            raise schema.missing_entry("GameRecords of chats", [TERMINATED], rows, "Chats have no token for it.")
        ended = ((tokens == control.end_of_dialogue) & real).any(-1) if ended is None else ended.reshape(len(rows))
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


_Record = dict[NestedKey, Tensor]
"""Tensors of each game of a wave, ``[N, ...]``."""


@torch.no_grad()
@checked
def play_games(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    games: Count,
    seed: int = 0,
    keep: Sequence[str] = (),
    exploration: ExplorationType = ExplorationType.RANDOM,
) -> GameRecords:
    """Play exactly the episodes ``0 .. games - 1`` of a seed in parallel, each to its end.

    Games are played in waves: all rows are reset together, and a wave ends with its last game. Counting the first
    ``games`` to finish would over-represent short games. The episodes do not depend on the environment's batch size.

    The call seeds ``env``, so use another environment for training. During the call torch's global generators and the
    generators of the policy's modules are seeded, and the policy is in evaluation mode. All are restored afterwards, so
    evaluation does not change a training run, and the same call plays the same games. Cached keys and values are freed
    at the end.

    Args:
        env: a language environment, possibly transformed.
        policy: reads a row, writes ``action``. A policy with its own generator must be the module (or object) that
            holds it: generators in closures are not found and not seeded, so repeated calls differ. If the policy also
            writes ``token_log_prob``, ``behavior_log_prob`` or ``token_entropy``, each ``[*B, K]``, they are summed
            over the agent's tokens.
        games: number of games; need not be a multiple of the batch size.
        seed: seed of the episodes and of sampling.
        keep: entries of the last ``next`` observation to keep, such as ``["won"]`` if the environment writes it:
            ``records.kept["won"]``, ``[N]`` of an entry ``[*B]`` or ``[*B, 1]`` and ``[N, ...]`` of one ``[*B, ...]``.
        exploration: ``ExplorationType.RANDOM`` samples, ``DETERMINISTIC`` takes the mode, if the policy supports it.

    Returns:
        The :class:`GameRecords`, in the order of the episodes.

    Raises:
        KeyError: the environment lacks an entry of ``keep``.
        ValueError: ``games`` is below 1.

    Examples:
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> from torchrl_lang.evaluation import play_games
        >>> env = CorridorEnv(length=3, batch_size=[4])
        >>> play_games(env, CorridorPlayer(env.tokenizer, length=3), games=6).turns
        tensor([7, 8, 8, 8, 5, 7])
    """
    waves: list[TensorDict] = []
    mode = eval_mode(policy) if isinstance(policy, nn.Module) else nullcontext()
    with seeded_generators(seed, policy), mode, set_exploration_type(exploration):
        env.set_seed(seed)
        while (left := games - sum(map(len, waves))) > 0:
            waves.append(_play_wave(env, policy, left, keep))
    for actor in policy.modules() if isinstance(policy, nn.Module) else ():
        if isinstance(actor, UtteranceActor):
            actor.forget()  # of 200 games of a chat model: gigabytes
    result: Any = torch.cat(waves, 0)  # typed as a tensor by torch
    rows = result.select(*ROW_KEYS)
    return GameRecords(rows=rows, **{str(k): v for k, v in result.exclude(*ROW_KEYS).items()})


def _play_wave(
    env: EnvBase, policy: Callable[[TensorDictBase], TensorDictBase], wanted: int, keep: Sequence[str]
) -> TensorDict:
    """One game on each row of the environment, of which at most ``wanted`` are returned."""
    td = env.reset()
    n = td.numel()
    # Do not wait for rows that are not wanted.
    live = torch.arange(n, device=td.get(DONE).device) < wanted
    record: _Record = {}
    while True:
        td = env.step(policy(td))
        record = _add_turn(record, td, live, keep)
        done = td.get(("next", DONE)).reshape(n)
        again = live & done & env.continues.reshape(n) if CONTINUED in td.keys() else done & False
        live = live & (~done | again)
        if not live.any():
            return TensorDict(record, batch_size=[n])[:wanted].cpu()
        td = step_mdp(td)
        if again.any():
            td = env.reset(td.set("_reset", again.reshape(td.get(DONE).shape)))


def _add_turn(record: _Record, td: TensorDictBase, live: Tensor, keep: Sequence[str]) -> _Record:
    """Add one turn of the rows that are still playing."""
    n = len(live)
    after = td.get("next")
    now = {key: schema.entry(after, key).reshape(n, -1) for key in (*ROW_KEYS, TERMINATED, TRUNCATED, REWARD)}
    # A token-level environment that truncates a row may append only a part of the utterance.
    written = now[AGENT_MASK].sum(-1) - td.get(AGENT_MASK).reshape(n, -1).sum(-1)
    sums: _Record = {"returns": now[REWARD][:, 0], "turns": torch.ones_like(written), "agent_tokens": written}
    sums |= _diagnostics(td, written)
    states: _Record = {
        TERMINATED: now[TERMINATED][:, 0],
        TRUNCATED: now[TRUNCATED][:, 0],
        "last_reward": now[REWARD][:, 0],
        **{key: now[key] for key in ROW_KEYS},
        **{("kept", key): _value(after, key, n) for key in keep},
    }
    added = {key: record.get(key, 0) + torch.where(live, value, 0) for key, value in sums.items()}
    for key, value in states.items():
        added[key] = torch.where(live.reshape(n, *[1] * (value.ndim - 1)), value, record.get(key, value))
    return added


def _value(after: TensorDictBase, key: str, n: int) -> Tensor:
    """An entry of ``keep``, ``[N]`` if it has one value a game, else ``[N, ...]``."""
    value = after[key]
    return value.reshape(n) if value.numel() == n else value.reshape(n, *value.shape[after.ndim :])


def _diagnostics(td: TensorDictBase, written: Tensor) -> _Record:
    """Sums of the policy's log-probability, log-ratio and entropy over the tokens just written."""
    log_prob, behavior = td.get(schema.TOKEN_LOG_PROB, None), td.get(schema.BEHAVIOR_LOG_PROB, None)
    log_ratio = None if log_prob is None or behavior is None else log_prob - behavior
    found = {"log_prob": log_prob, "log_ratio": log_ratio, "entropy": td.get(schema.TOKEN_ENTROPY, None)}
    sums: _Record = {}
    for name, values in found.items():
        if values is not None:
            values = values.reshape(len(written), -1)
            is_written = torch.arange(values.shape[-1], device=values.device) < written[:, None]
            sums[name] = torch.where(is_written, values, 0).sum(-1)
    return sums
