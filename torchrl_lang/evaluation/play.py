"""Play a fixed set of games with a policy and record how they went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

from torchrl_lang.evaluation.records import GameRecords
from torchrl_lang.functional import generators
from torchrl_lang.modules.eval_mode import eval_mode
from torchrl_lang.schema import (
    ACTION_MASK,
    BEHAVIOR_LOG_PROB,
    DONE,
    REWARD,
    ROW_KEYS,
    TERMINATED,
    TOKEN_ENTROPY,
    TOKEN_LOG_PROB,
    TRUNCATED,
)

__all__ = ["play_games"]

_Record = dict[NestedKey, Tensor]
"""What is known of each game of a wave, ``[N, ...]``."""


@torch.no_grad()
def play_games(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    games: int,
    seed: int = 0,
    keep: Sequence[str] = (),
    exploration: ExplorationType = ExplorationType.RANDOM,
    progress: Callable[[int], Any] | None = None,
) -> GameRecords:
    """Play exactly the episodes ``0 .. games - 1`` of a seed, side by side, each to its end.

    Games are played in waves: all rows are reset together and a wave ends when its last game does. Counting the first
    ``games`` that finish instead would favour short games. An environment of any batch size plays the same episodes.

    The call seeds ``env``, so training should use another one. While it lasts, torch's global stream and the generators
    that the policy's modules hold are seeded as well and the policy is in evaluation mode; all is put back, so that
    evaluating changes nothing about a training run, and evaluating again gives the same games.

    Args:
        env: a language environment, possibly transformed.
        policy: reads a row, writes ``action``. A policy with a generator of its own must be the module (or object) that
            holds it: a generator inside a closure is not found and goes on where it stands, so the same call then gives
            other games. Where the policy also writes ``token_log_prob`` and ``behavior_log_prob``, or
            ``token_entropy``, each ``[*B, K]``, they are summed over the tokens that the agent wrote.
        games: number of games; need not be a multiple of the batch.
        seed: of the episodes and of sampling.
        keep: entries ``[*B, 1]`` or ``[*B]`` of the last ``next`` observation to be kept beside the row, such as
            ``["won"]`` where the environment says so: ``records.kept["won"]``.
        exploration: ``ExplorationType.RANDOM`` samples, ``DETERMINISTIC`` takes the mode, for policies that heed it.
        progress: called after every turn with the number of games finished so far.

    Returns:
        The :class:`GameRecords`, in the order of the episodes.

    Raises:
        KeyError: the environment lacks an entry that is to be kept.
        ValueError: ``games`` is no positive number, or an entry that is to be kept has more than one value a game.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import CharTokenizer
        >>> from torchrl_lang.envs.language_env import LanguageEnv, Reply
        >>> from torchrl_lang.evaluation import play_games
        >>> class Echo(LanguageEnv):  # says what was said, pays for an "a"
        ...     def _open(self, episode, fresh, options):
        ...         return episode.new_zeros(len(episode), 0), torch.zeros_like(episode), {}
        ...     def _reply(self, utterance, task, live):
        ...         said = utterance.tokens[:, 0]
        ...         return Reply(said[:, None], torch.ones_like(said), (said == 0).float(), said == 0), task
        >>> env = Echo(CharTokenizer.from_alphabet("ab"), row_length=16, action_length=1, max_turns=2, batch_size=4)
        >>> policy = lambda td: td.set("action", torch.zeros(4, 1, dtype=torch.int64))
        >>> play_games(env, policy, games=6).returns
        tensor([1., 1., 1., 1., 1., 1.])
    """
    if games < 1:
        raise ValueError(f"games must be at least 1, got {games}.")
    waves: list[TensorDict] = []
    played = 0
    mode = eval_mode(policy) if isinstance(policy, nn.Module) else nullcontext()
    with _own_streams(policy, seed), mode, set_exploration_type(exploration):
        env.set_seed(seed)
        while played < games:
            wave = _play_wave(env, policy, games - played, played, keep, progress)
            waves.append(wave)
            played += len(wave)
    result: Any = torch.cat(waves, 0)  # typed as a tensor by torch
    rows = result.select(*ROW_KEYS)
    return GameRecords(rows=rows, **{str(k): v for k, v in result.exclude(*ROW_KEYS).items()})


def _play_wave(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    wanted: int,
    played: int,
    keep: Sequence[str],
    progress: Callable[[int], Any] | None,
) -> TensorDict:
    """One game on each row of the environment; at most ``wanted`` of them are kept."""
    td = env.reset()
    n = td.numel()
    # Rows that nobody wants are not waited for.
    live = torch.arange(n, device=td.get(DONE).device) < wanted
    record: _Record = {}
    while True:
        td = env.step(policy(td))
        record = _add_turn(record, td, live, keep)
        live = live & ~td.get(("next", DONE)).reshape(n)
        unfinished = int(live.sum())
        if progress is not None:
            progress(played + min(n, wanted) - unfinished)
        if not unfinished:
            return TensorDict(record, batch_size=[n])[:wanted].cpu()
        td = step_mdp(td)


def _add_turn(record: _Record, td: TensorDictBase, live: Tensor, keep: Sequence[str]) -> _Record:
    """Tally one turn of the rows that are still being played."""
    n = len(live)
    after = td.get("next")
    now = {key: after.get(key).reshape(n, -1) for key in (*ROW_KEYS, TERMINATED, TRUNCATED, REWARD)}
    # Token by token, an environment that cuts a row off may not take all of an utterance.
    written = now[ACTION_MASK].sum(-1) - td.get(ACTION_MASK).reshape(n, -1).sum(-1)
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
    kept = {
        key: torch.where(live.reshape(n, *[1] * (value.ndim - 1)), value, record.get(key, value))
        for key, value in states.items()
    }
    return added | kept


def _value(after: TensorDictBase, key: str, n: int) -> Tensor:
    """An entry that is to be kept, ``[N]``."""
    value = after.get(key, None)
    if value is None:
        known = sorted(map(str, after.keys()))
        raise KeyError(f"There is no {key!r} to be kept: the environment's steps have {known}. Mend keep.")
    if value.numel() != n:
        raise ValueError(
            f"{key!r} is {tuple(value.shape)}, what is kept has one value for each of {n} games, [*B] or [*B, 1]."
        )
    return value.reshape(n)


def _diagnostics(td: TensorDictBase, written: Tensor) -> _Record:
    """Sums over the tokens just written of what the policy says about them."""

    def total(values: Tensor) -> Tensor:
        values = values.reshape(len(written), -1)
        is_written = torch.arange(values.shape[-1], device=values.device) < written[:, None]
        return torch.where(is_written, values, 0).sum(-1)

    sums: _Record = {}
    log_prob, behavior = td.get(TOKEN_LOG_PROB, None), td.get(BEHAVIOR_LOG_PROB, None)
    if log_prob is not None and behavior is not None:
        sums["log_ratio"] = total(log_prob - behavior)
    entropy = td.get(TOKEN_ENTROPY, None)
    if entropy is not None:
        sums["entropy"] = total(entropy)
    return sums


@contextmanager
def _own_streams(policy: Any, seed: int) -> Iterator[None]:
    """Seed torch's global streams and the policy's generators, and put them back afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    streams = generators(policy)
    states = [stream.get_state() for stream in streams]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for index, stream in enumerate(streams):
            stream.manual_seed(seed + index + 1)  # streams that are not copies of each other
        try:
            yield
        finally:
            for stream, state in zip(streams, states, strict=True):
                stream.set_state(state)
