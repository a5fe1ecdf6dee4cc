"""Training rows from TorchRL rollouts: the row of an episode is its last observation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang import schema
from torchrl_lang._checks import checked
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.decisions import row_length

_OF_EPISODES = (schema.FEATURES, schema.FEATURES_MASK, schema.GROUP)
"""Entries of the last observation that rows have where it has them."""
_TRAJECTORY = ("collector", "traj_ids")
COLLECTED = ("collector", "mask")
"""bool ``[*B, time]``: False on the steps with which a collector padded shorter trajectories."""


def finished_steps(rollout: TensorDictBase) -> Tensor:
    """True at the step that ends an episode, bool ``[*B, time]``, once per episode.

    Without resets TorchRL may step a finished row again, which adds no token, or (with
    ``rollout(break_when_all_done=True)``) repeat its last step until all rows have finished; these steps are False.
    """
    ended = rollout.get(("next", schema.DONE)).squeeze(-1)
    before, after = (row_length(rollout.get(key)) for key in (schema.ATTENTION_MASK, ("next", schema.ATTENTION_MASK)))
    ended = ended & (after > before)
    tokens = rollout.get(("next", schema.TOKENS))
    same = (tokens[..., 1:, :] == tokens[..., :-1, :]).all(-1) & (before[..., 1:] == before[..., :-1])
    repeats = ended[..., :-1] & same
    # Two equal one-turn episodes look like a repeated step, too; but if rows were reset, not all rows would repeat.
    if ended[..., 0].all() or not repeats[ended[..., :-1]].all():
        return ended
    return torch.cat([ended[..., :1], ended[..., 1:] & ~repeats], -1)


def rows_at(
    rollout: TensorDictBase,
    take: Tensor,
    *,
    keep: Sequence[str] = (),
    carry: Sequence[NestedKey] = (),
    reward_key: NestedKey | None = schema.REWARD,
) -> TensorDict:
    """The ``next`` observations at the steps ``take``, bool ``[*B, time]``, as checked rows ``[N]``.

    They have the entries of a row, its features and group if there are some, ``terminated``, ``truncated``, and the
    entries ``keep``; see :func:`rows_from_rollout` for the others.
    """
    step = rollout.get("next")
    own = [key for key in _OF_EPISODES if step.get(key, None) is not None]
    rows = {key: step[key][take] for key in (*schema.ROW_KEYS, schema.TERMINATED, *own, *keep)}
    # Without a truncated entry, an episode that is not terminated was cut by the end of the rollout.
    truncated = step.get(schema.TRUNCATED, None)
    terminated, done = rows[schema.TERMINATED], step.get(schema.DONE)
    rows[schema.TRUNCATED] = ~terminated if truncated is None else truncated[take] | ~done[take]
    out = TensorDict(rows, batch_size=[terminated.shape[0]], device=rollout.device)
    row = row_of_step(take)
    out.update({name: step_rewards(rollout, row, out, key) for name, key in reward_entries(step, reward_key).items()})
    if carry:
        out.update(token_values(rollout, row, out.get(schema.AGENT_MASK), carry))
    schema.check_row(out)
    return out


@checked
def rows_from_rollout(
    rollout: TensorDictBase,
    *,
    unfinished: Literal["drop", "truncate"],
    carry: Sequence[NestedKey] = (),
    keep: Sequence[str] = (),
    reward_key: NestedKey | None = schema.REWARD,
) -> TensorDict:
    """Rows ``[N]`` of the episodes in a rollout or a collector's batch ``[*B, time]``.

    The row of an episode is the ``next`` observation of the step that ends it. Rows have the order of the batch and,
    within one environment, of time.

    Args:
        rollout: steps of a language environment, with the time dimension last. Steps that a collector padded
            (``split_trajs=True``, ``trajs_per_batch=N``) are left out.
        unfinished: "drop" drops episodes that are unfinished at the last step, "truncate" returns them marked
            truncated.
        carry: entries that the policy wrote for each token of its utterances, ``[*B, time, K]``, to scatter to the
            tokens' positions, ``[N, T]``: KL penalties need ``["token_log_prob"]``, for instance.
        keep: entries ``[*B, time, ...]`` of the last ``next`` observation to copy beside the row, ``[N, ...]``.
        reward_key: the step reward under ``"next"`` that ``token_reward`` sums to, turn by turn. The default is the
            transformed reward (for instance by ``RewardScaling``); if it differs from the sum of the environment's
            token rewards of a turn, the difference is added to the turn's last token. None keeps the rows'
            ``token_reward``, which transforms may have changed as well.

    Returns:
        A copy of the row entries, ``features``, ``features_mask`` and ``group`` if the environment has them,
        ``terminated``, ``truncated``, the carried and the kept entries. If a divergence penalty was subtracted from
        the step rewards, ``raw_reward`` ``[N, T]`` holds the rewards without it, and the rows cannot be penalized a
        second time.

    Raises:
        KeyError: the rollout is not from a language environment, or lacks the reward or an entry to carry.
        ValueError: an episode began before the rollout although an entry is carried or transforms changed the rewards;
            an entry to carry lacks values of some tokens; values of the rows are invalid, see
            :func:`~torchrl_lang.schema.check_values`; ``MultiStep`` changed the steps; or log-probabilities are carried
            of random actions (``init_random_frames``), which have none.

    Note:
        The first episodes to finish are short ones. :func:`~torchrl_lang.data.generate_dataset` avoids this bias by
        keeping the first episodes to begin.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.data import rows_from_rollout
        >>> done = torch.tensor([[[False], [True], [False]]])
        >>> row = torch.zeros(1, 3, 4)
        >>> step = TensorDict(tokens=torch.arange(12).view(1, 3, 4), attention_mask=row == 0, agent_mask=row > 0,
        ...                   token_reward=row, done=done, terminated=done, truncated=~done & done,
        ...                   reward=torch.zeros(1, 3, 1))
        >>> rollout = TensorDict({"attention_mask": row > 0, "next": step}, batch_size=[1, 3])
        >>> rows_from_rollout(rollout, unfinished="drop")["tokens"]
        tensor([[4, 5, 6, 7]])
        >>> rows_from_rollout(rollout, unfinished="truncate")["truncated"].flatten()
        tensor([False,  True])
    """
    needed_entries(rollout, {key: key for key in carry}, keep, reward_key)
    check_steps(rollout, carry)
    take = finished_steps(rollout)
    if unfinished == "truncate":
        is_step = rollout.get(COLLECTED, torch.ones_like(take)).to(take.device)
        take = take | (is_step & ~shift_left(is_step) & ~rollout.get(("next", schema.DONE)).squeeze(-1))
    return rows_at(rollout, take, keep=keep, carry=carry, reward_key=reward_key)


def episode_numbers(done: Tensor, playing: Tensor, begun: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number the episodes of a batch of environments in the order in which they begin.

    ``done`` is bool ``[time, N]``, ``playing`` the number of each environment's episode at the first step, int64
    ``[N]``, and ``begun`` the number of episodes begun so far. Returns the number of each step's episode, int64
    ``[time, N]``, then ``playing`` and ``begun`` for the next steps.
    """
    begins = torch.where(done, begun + done.flatten().cumsum(0).view_as(done) - 1, -1)
    number = torch.cat([playing[None], begins]).cummax(0).values
    return number[:-1], number[-1], begun + done.sum()


# Rounding tolerance between a step's reward and the sum of several token rewards of its turn.
_ROUNDING = 1e-5
_WHY_LACKING = (
    "the policy wrote fewer values; the episodes began before this batch: use EpisodeRows; or the collector dropped "
    "steps, as MultiAsyncCollector does while learning takes over a second"
)


def check_steps(rollout: TensorDictBase, carry: Sequence[NestedKey]) -> None:
    """Raise ValueError if a component of TorchRL changed the steps in a way that makes their rows wrong.

    Args:
        rollout: steps of a language environment, ``[*B, time]``.
        carry: the entries that the policy wrote.
    """
    if (rollout.get("steps_to_next_obs", torch.ones(())) > 1).any():
        raise ValueError("MultiStep has changed these steps: convert the collector's own, losses look ahead anyway.")
    for key in carry:
        if _is_of_random_actions(rollout, key):
            raise ValueError(f"{key!r} is 0 for random actions: collect with init_random_frames=0, or do not carry it.")


def _is_of_random_actions(rollout: TensorDictBase, key: NestedKey) -> bool:
    """Whether zeros stand for the log-probabilities of random actions, as a collector's random frames have them.

    A policy may be as certain, but then its utterances end with the same token.
    """
    log_prob, action = rollout.get(key), rollout.get(schema.ACTION, None)
    if not str(key[-1] if isinstance(key, tuple) else key).endswith("log_prob"):
        return False
    if action is None or action.ndim == rollout.ndim or action.shape[-1] < 2:
        return False  # the actions are single tokens
    before, after = (row_length(x.get(schema.ATTENTION_MASK)) for x in (rollout, rollout.get("next")))
    agent = rollout.get(("next", schema.AGENT_MASK))
    place = torch.arange(agent.shape[-1], device=agent.device)
    last = torch.where(agent & (place >= before.unsqueeze(-1)), place, -1).amax(-1)
    # Rows that are full may lack an utterance's end.
    certain = (log_prob == 0).reshape(*rollout.shape, -1).all(-1) & (last >= 0) & (after < agent.shape[-1])
    trained = rollout.get(schema.TRAIN_MASK, None)
    if trained is not None:  # the turns of other players, as in a MixedPolicy, have zeros as well
        certain = certain & trained.reshape(*rollout.shape, -1).any(-1)
    end = rollout.get(("next", schema.TOKENS)).gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1)[certain]
    return bool((end != end[:1]).any())


def needed_entries(
    steps: TensorDictBase,
    carry: Mapping[str, NestedKey],
    keep: Sequence[str],
    reward_key: NestedKey | None,
    further: Sequence[NestedKey] = (),
) -> TensorDict:
    """The entries of steps that rows are made of, those of ``carry`` by their new names.

    Raises:
        KeyError: an entry is missing.
    """
    step = steps.get("next")
    own = [key for key in _OF_EPISODES if step.get(key, None) is not None]
    rewards = reward_entries(step, reward_key).values()
    after = (*schema.ROW_KEYS, schema.DONE, schema.TERMINATED, *own, *keep, *rewards)
    found: dict[NestedKey, Tensor | None] = {("next", key): step.get(key, None) for key in after}
    found |= {key: steps.get(key, None) for key in (schema.ATTENTION_MASK, *further)}
    found |= {name: steps.get(key, None) for name, key in carry.items()}
    missing = [key for key, value in found.items() if value is None]
    if missing:
        advice = "Pass steps of a language environment (EpisodeRows: of a collector), or name another reward_key=."
        if beside := [key for key in keep if ("next", key) in missing and steps.get(key, None) is not None]:
            advice = f"keep= copies entries of 'next'; for those of the steps themselves write carry={beside}."
        elif missing == [_TRAJECTORY]:
            advice = "A collector with track_traj_ids=False and an LLMCollector number no episodes: leave that out, or "
            advice += "collect with yield_completed_trajectories=True and write "
            advice += "rows_from_rollout(steps, unfinished='drop')."
        elif ("next", schema.TOKENS) in missing and steps.get(schema.TOKENS, None) is not None:
            advice = "Collect without compact_obs=True, which drops the observations after a step."
        raise schema.missing_entry("A conversion to rows", missing, steps, advice)
    if schema.TRUNCATED in step.keys():
        found["next", schema.TRUNCATED] = step.get(schema.TRUNCATED)
    return TensorDict(found, batch_size=steps.batch_size)


def reward_entries(step: TensorDictBase, reward_key: NestedKey | None) -> dict[NestedKey, NestedKey]:
    """Map entries of rows to the step rewards that they are computed from: the reward, and its values before penalties.

    An entry ``"raw_reward"`` (or with this suffix) means that a divergence penalty was subtracted. It is copied to the
    rows as well, so that the same penalty is not subtracted a second time.
    """
    if reward_key is None:
        return {}
    raw = [key for key in step.keys() if isinstance(key, str) and key.endswith(schema.RAW_REWARD)]
    return {schema.TOKEN_REWARD: reward_key} | {key: key for key in raw}


def step_rewards(rollout: TensorDictBase, row: Tensor, rows: TensorDictBase, key: NestedKey) -> Tensor:
    """Rewards of the rows' tokens, float32 ``[N, T]``, that sum to the step rewards, turn by turn.

    If a step's reward differs from the sum of ``token_reward`` over its turn, the difference is added to the turn's
    last agent token, or to the last agent token before it if the agent wrote none in this step. Otherwise the rows' own
    rewards are returned bit by bit. Steps that add no token (their row has ended) are ignored. ``row`` is the number of
    each step's row, see :func:`row_of_step`.
    """
    step, own = rollout.get("next"), rows.get(schema.TOKEN_REWARD)
    reward = step.get(key)
    if reward.numel() != row.numel():
        shapes = f"{[*row.shape, 1]}, got {[*reward.shape]}"
        raise ValueError(f"{key!r} must be one number per step, {shapes}: combine them, or name another one.")
    before, after = (row_length(x.get(schema.ATTENTION_MASK)) for x in (rollout, step))
    place = torch.arange(own.shape[-1], device=own.device)
    earned = torch.where(place >= before.unsqueeze(-1), step.get(schema.TOKEN_REWARD), 0.0)
    counts = (row >= 0) & (after > before)
    extra = reward.reshape(row.shape).to(own.dtype) - earned.sum(-1)
    changed = counts & (extra != 0)
    if changed.any():
        # The difference is exactly zero if at most one token has a reward.
        inexact = earned.abs().sum(-1) - earned.abs().amax(-1)
        changed = changed & ~(extra.abs() <= _ROUNDING * inexact)
    if not changed.any():
        return own.clone()
    last = torch.where(step.get(schema.AGENT_MASK), place, -1).max(-1).values
    without_token = int((changed & (last < 0)).sum())
    if without_token:
        steps = f"{without_token} steps have another {key!r}"
        raise ValueError(f"{steps} but no token of the agent for it: use reward_key=None.")
    _tokens_of_steps(rollout, row, rows.get(schema.AGENT_MASK), own.shape[-1], key)
    return own.index_put((row[changed], last[changed]), extra[changed], accumulate=True)


def _tokens_of_steps(
    rollout: TensorDictBase, row: Tensor, agent_mask: Tensor, width: int, key: NestedKey
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which of the first ``width`` tokens of each step the agent wrote, bool ``[*B, time, width]``, and their indices.

    Raises:
        ValueError: the steps lack tokens of the agent.
    """
    before, after = row_length(rollout.get(schema.ATTENTION_MASK)), rollout.get(("next", schema.AGENT_MASK))
    place = before.unsqueeze(-1) + torch.arange(width, device=before.device)
    inside = place < after.shape[-1]
    written = inside & after.gather(-1, place.clamp_max(after.shape[-1] - 1)) & (row >= 0).unsqueeze(-1)
    index = (row.unsqueeze(-1).expand_as(place)[written], place[written])
    known = torch.zeros_like(agent_mask).index_put(index, torch.ones_like(index[0], dtype=torch.bool))
    if lost := int((agent_mask & ~known).any(-1).sum()):
        lacking = f"{lost} of {len(agent_mask)} episodes have tokens of the agent without {key!r}, {width} a turn"
        raise ValueError(f"{lacking} ({_WHY_LACKING}).")
    return written, index


def token_values(
    rollout: TensorDictBase, row: Tensor, agent_mask: Tensor, keys: Sequence[NestedKey]
) -> dict[NestedKey, Tensor]:
    """Values of the agent's tokens at the tokens' positions in the rows, each ``[N, T]``, zero on other tokens.

    An entry of the steps ``[*B, time]`` has one value per token of the turn's utterance, ``[*B, time, K]``, or one for
    all tokens of the turn, ``[*B, time]`` or ``[*B, time, 1]``. ``row`` is the number of each step's row, and
    ``agent_mask`` that of the rows.

    Raises:
        ValueError: an entry lacks the values of some tokens.
    """
    out = {}
    for key in keys:
        value = rollout.get(key)
        value = value if value.ndim > row.ndim else value.unsqueeze(-1)
        width = value.shape[-1] if value.shape[-1] > 1 else agent_mask.shape[-1]
        written, index = _tokens_of_steps(rollout, row, agent_mask, width, key)
        out[key] = value.new_zeros(agent_mask.shape).index_put(index, value.expand_as(written)[written])
    return out


def row_of_step(take: Tensor) -> Tensor:
    """The number of the row that each step belongs to, int64 ``[*B, time]``; -1 if its episode has no row."""
    number = (take.flatten().cumsum(0) - 1).view_as(take)
    none = take.numel()
    # The numbers increase with time, so a step's row is the smallest number from it onwards.
    ahead = torch.where(take, number, none).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(ahead == none, -1, ahead)


_BATCH = ("collector", "batch_number")
_MOST_BATCHES = 128
"""Unfinished episodes of at most this many batches may wait; it exceeds the number of workers of a collector."""


class EpisodeRows:
    """Convert a collector's batches, one after the other, to the rows of the episodes that end in each batch.

    By default the steps of an episode that is unfinished at the end of a batch are kept until the batch in which it
    ends. So no episode is cut, and short episodes are not over-represented. This works with single-process,
    multi-process, synchronous and asynchronous collectors, because episodes are distinguished by the collector's
    ``traj_ids``. A call costs a few tensor operations, whatever the number of episodes.

    Args:
        carry: entries that the policy wrote for each token of its utterances, ``[*B, time, K]``, or for each turn,
            ``[*B, time, 1]``; they are scattered to the tokens' positions, ``[N, T]``. A mapping renames them.
        keep: entries ``[*B, time, ...]`` of the last ``next`` observation to copy beside the row.
        reward_key: the step reward that ``token_reward`` sums to, as in
            :func:`~torchrl_lang.data.rows_from_rollout`. The default is the transformed reward; None keeps
            the rows' ``token_reward``.
        unfinished: what happens to an episode that is unfinished at the end of a batch. ``"wait"``: it continues in the
            next batch. With a collector that resets at each batch (``reset_at_each_iter=True``) no episode continues:
            ``"truncate"`` returns it marked truncated, ``"drop"`` drops it, which over-represents short episodes.

    Raises:
        KeyError: on calls, the steps do not come from a collector over a language environment, or lack the reward or an
            entry to carry.
        ValueError: on calls, an episode that has ended continues, as with a collector's ``set_truncated=True`` or
            ``unfinished="truncate"`` without resets; an entry to carry lacks turns of an episode that began before the
            first batch; ``MultiStep`` changed the steps; log-probabilities are carried of random actions
            (``init_random_frames``); or values of the rows are invalid, see
            :func:`~torchrl_lang.schema.check_values`.
        RuntimeError: on calls with ``"wait"``, unfinished episodes of more than 128 batches wait, because the collector
            does not continue them.

    Examples:
        >>> from torchrl.collectors import Collector
        >>> from torchrl_lang.data import EpisodeRows
        >>> from torchrl_lang.envs import WordleEnv
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer
        >>> words = ["crane", "slate", "purge", "mouse"]
        >>> env = WordleEnv(words, batch_size=[8], seed=0)
        >>> collector = Collector(env, RandomWordPlayer(words, seed=0), frames_per_batch=16, total_frames=160)
        >>> rows_of = EpisodeRows()
        >>> rows = [rows_of(steps) for steps in collector]  # two turns a batch
        >>> all(bool(batch["terminated"].all()) for batch in rows), sum(map(len, rows)) + rows_of.waiting <= 160
        (True, True)
    """

    @checked
    def __init__(
        self,
        carry: Sequence[str] | Mapping[str, NestedKey] = (),
        keep: Sequence[str] = (),
        *,
        reward_key: NestedKey | None = schema.REWARD,
        unfinished: Literal["wait", "truncate", "drop"] = "wait",
    ) -> None:
        self.reward_key, self.unfinished = reward_key, unfinished
        self._batches = 0
        self.carry = dict(carry) if isinstance(carry, Mapping) else {key: key for key in carry}
        self.keep = tuple(keep)
        self._steps: TensorDictBase | None = None
        self._ended: deque[Tensor] = deque(maxlen=_MOST_BATCHES)

    @property
    def waiting(self) -> int:
        """Number of unfinished episodes."""
        return 0 if self._steps is None else self._steps.get(_TRAJECTORY).unique().numel()

    def forget(self) -> None:
        """Drop the unfinished episodes, for instance after a reset of the collector."""
        self._steps = None
        self._ended.clear()

    def __call__(self, steps: TensorDictBase, *, only_waiting: bool = False) -> TensorDict:
        """Return the rows ``[N]`` of the episodes that end in ``steps`` ``[*B, time]``; ``N`` may be 0.

        With ``only_waiting``, episodes that begin in ``steps`` are dropped, whatever their length. Collecting like this
        until :attr:`waiting` is 0 finishes all episodes that began before, without preferring short ones.
        """
        flat = needed_entries(steps, self.carry, self.keep, self.reward_key, [_TRAJECTORY, schema.AGENT_MASK])
        check_steps(steps, list(self.carry.values()))
        is_step = steps.get(COLLECTED, None)
        flat = flat.reshape(-1) if is_step is None else flat[is_step]
        # A collector that was given no device keeps its own entries on the CPU, those of an environment on a GPU there.
        if any(value.device != flat.get(("next", schema.DONE)).device for value in flat.values(True, True)):
            flat = flat.to(flat.get(("next", schema.DONE)).device)
        self._batches += 1
        flat.set(_BATCH, torch.full_like(flat.get(_TRAJECTORY), self._batches))
        if only_waiting:
            waiting = flat[:0] if self._steps is None else self._steps
            flat = flat[torch.isin(flat.get(_TRAJECTORY), waiting.get(_TRAJECTORY))]
        self._refuse_ended(flat)
        if self._steps is not None:
            flat = torch.cat([self._steps, flat])
        # Stable sort: the steps of an episode keep their order. The steps themselves are gathered only once, below.
        trajectory, order = flat.get(_TRAJECTORY).sort(stable=True)
        ends = flat.get(("next", schema.DONE)).squeeze(-1)[order]
        if self.unfinished == "truncate":
            ends = _is_last(trajectory)
        _, episode, count = trajectory.unique_consecutive(return_inverse=True, return_counts=True)
        has_ended = ends[count.cumsum(0) - 1][episode]  # whether the last step of the step's episode is among the ends
        self._wait(flat[order[~has_ended]])
        flat, ends = flat[order[has_ended]], ends[has_ended]
        self._ended.append(trajectory[has_ended].unique())
        return rows_at(flat, ends, keep=self.keep, carry=list(self.carry), reward_key=self.reward_key)

    def _refuse_ended(self, steps: TensorDictBase) -> None:
        """Raise ValueError if steps ``[M]``, which do not begin an episode, continue one that has ended."""
        began = steps.get(schema.AGENT_MASK).any(-1)
        ended = torch.cat([*self._ended, steps.get(_TRAJECTORY)[:0]])
        if bool(torch.isin(steps.get(_TRAJECTORY)[began], ended).any()):
            remedy = "leave out the collector's set_truncated=True, and unfinished='truncate' unless it resets"
            raise ValueError(f"Episodes continue after the end that their rows have: {remedy}.")

    def _wait(self, running: TensorDictBase) -> None:
        """Keep the steps of unfinished episodes; raise if the collector does not continue them."""
        self._steps = running if self.unfinished == "wait" else running[:0]
        # An unfinished episode continues in its worker's next batch. Workers deliver batches in turns, so at most as
        # many batches as there are workers have unfinished episodes, unless the collector resets.
        if self._steps.get(_BATCH)[_is_last(self._steps.get(_TRAJECTORY))].unique().numel() > _MOST_BATCHES:
            what = f"{self.waiting} episodes of more than {_MOST_BATCHES} batches wait for steps"
            raise RuntimeError(f"{what}: if the collector resets, use unfinished='truncate' or 'drop', or forget().")


def _is_last(trajectory: Tensor) -> Tensor:
    """True on the last step of each episode, bool ``[M]``; the steps of an episode must be adjacent and in order."""
    return torch.cat([trajectory[1:] != trajectory[:-1], torch.ones_like(trajectory[:1], dtype=torch.bool)])
