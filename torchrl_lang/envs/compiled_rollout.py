"""Compiled rollouts of tensor-only environments, without unneeded copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang.envs.language_env import LanguageEnv
from torchrl_lang.envs.row_state import read_action
from torchrl_lang.envs.text_game import TextGameEnv
from torchrl_lang.schema import ACTION, DONE, GROUP, REWARD, ROW_KEYS, TERMINATED, TRUNCATED

Policy = Callable[[TensorDictBase], TensorDictBase]


class CompiledRollout:
    """Computes the same as ``env.rollout(steps, policy, break_when_any_done=False)``, with compiled turns.

    Each call resets the environment, plays, and resets rows that are done. The turn is compiled once, at the first
    call: reading the action, the task's reply, and the positions of new tokens. Tokens are then written in place to the
    environment's own rows, and rows are copied only for the result:

    - ``keep="steps"``: everything in TorchRL's rollout, ``[*B, steps]``, equal entry by entry, in preallocated memory.
      Most of the cost is writing two observations per turn.
    - ``keep="rows"``: the rows of the episodes that ended, ``[M]``, equal to
      :func:`~torchrl_lang.data.rows_from_rollout` of that rollout with ``unfinished="drop"``. One copy per episode.
    - ``keep="turns"``: ``action``, ``reward`` and the flags of each turn, ``[*B, steps]``, without rows.

    The policy is not compiled, so any policy works and samples the same random numbers as elsewhere. It gets the
    observation without a copy: it may write its own entries, but must not change tensors in place. Entries that it
    writes are not passed to the next turn. A policy with ``in_keys`` gets these entries only, which saves time.

    Args:
        env: a language environment whose task uses tensors only, such as ``WordleEnv``, without transforms. It can be
            used as usual between calls.
        policy: reads the observation and writes ``action``; None samples random tokens, as ``env.rollout`` does.
        steps: turns of each row.
        keep: the kind of result, see above.
        backend: backend of ``torch.compile``; ``"eager"`` does not compile and needs no compiler.

    Raises:
        TypeError: the environment has transforms, or its games are plain Python.
        KeyError: on calls, the policy wrote no ``action``.
        ValueError: an option is out of range, or on calls, ``action`` has another dtype or shape than the
            environment's.

    Examples:
        >>> from torchrl_lang.envs import CompiledRollout, WordleEnv
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer
        >>> words = ["crane", "slate", "point"]
        >>> env, player = WordleEnv(words, batch_size=[8], seed=0), RandomWordPlayer(words, seed=0)
        >>> play = CompiledRollout(env, player, 12, keep="rows", backend="eager")
        >>> rows = play()
        >>> bool(rows["terminated"].all()), rows["tokens"].shape[-1] == env.row_length
        (True, True)
    """

    @checked
    def __init__(
        self,
        env: LanguageEnv,
        policy: Policy | None,
        steps: Count,
        *,
        keep: Literal["steps", "rows", "turns"] = "steps",
        backend: str = "inductor",
    ) -> None:
        if not isinstance(env, LanguageEnv) or isinstance(env, TextGameEnv):
            raise TypeError(f"{type(env).__name__} has transforms or plain-Python games: use env.rollout().")
        self.env, self.policy, self.steps, self.keep = env, policy, steps, keep

        def plan(action: Tensor) -> Any:
            return env._plan_turn(action, torch.ones_like(env._terminated))

        # Dynamo counts recompilations per code object: a separate one keeps the limits of other rollouts unaffected.
        plan.__code__ = plan.__code__.replace()
        reads = () if policy is None else getattr(policy, "in_keys", None)
        self._reads = None if keep == "steps" else reads
        self._plan = torch.compile(plan, fullgraph=True, dynamic=False, backend=backend)

    @torch.no_grad()
    def __call__(self) -> TensorDict:
        """Reset the environment, play, and return the result described in the class."""
        env = self.env
        env.reset()
        kept = _KEPT[self.keep](env, self.steps)
        for step in range(self.steps):
            observed = env._observe(copy=False, only=self._reads)
            acted = env.rand_action(observed) if self.policy is None else self.policy(observed)
            action = read_action("CompiledRollout", acted, (*env.batch_size, env.action_length))
            kept.before(step, acted)
            writes, reward = self._plan(action.reshape(env._n, env.action_length))
            env._begun().write_(writes)
            kept.after(step, reward)
            if step + 1 < self.steps:  # no reset after the last turn, as in TorchRL
                fresh = env._terminated | env._truncated
                if fresh.any():
                    env._begin_rows(fresh, None, None, partial=True)
        return kept.result()


class _Steps:
    """Collects everything, in memory that is allocated when the first turn shows the entries."""

    def __init__(self, env: LanguageEnv, steps: int) -> None:
        self.env, self.steps, self.out = env, steps, TensorDict(batch_size=[*env.batch_size, steps], device=env.device)
        self.out.set("next", self.out.empty())

    def before(self, step: int, acted: TensorDictBase) -> None:
        """Called with the observation and the action, before the turn is written to the rows."""
        self._write(self.out, acted, step)

    def after(self, step: int, reward: Tensor) -> None:
        """Called after a turn, before rows that are done are reset."""
        following = self.env._observe(copy=False).set(REWARD, reward.reshape(*self.env.batch_size, 1))
        self._write(self.out.get("next"), following, step)

    def _write(self, out: TensorDict, part: TensorDictBase, step: int) -> None:
        if step == 0:
            ndim, room = part.ndim, [*part.batch_size, self.steps]
            like = part.apply(lambda value: value.new_empty((*room, *value.shape[ndim:])), batch_size=room)
            out.update(like)
        out.select(*part.keys())[..., step] = part

    def result(self) -> TensorDict:
        return self.out.refine_names(..., "time")


class _Turns:
    """Collects actions, rewards and flags; one copy at the end, for columns of single numbers are slow to write."""

    def __init__(self, env: LanguageEnv, steps: int) -> None:
        self.env, self.turns = env, list[TensorDict]()

    def before(self, step: int, acted: TensorDictBase) -> None:
        self.action = acted.get(ACTION)

    def after(self, step: int, reward: Tensor) -> None:
        env = self.env
        flags = {TERMINATED: env._terminated, TRUNCATED: env._truncated, DONE: env._terminated | env._truncated}
        shaped = {key: value.reshape(*env.batch_size, 1) for key, value in {REWARD: reward, **flags}.items()}
        self.turns.append(TensorDict({ACTION: self.action, "next": shaped}, env.batch_size, device=env.device))

    def result(self) -> TensorDict:
        return TensorDict.stack(self.turns, -1).refine_names(..., "time")


class _Rows:
    """Collects the rows of episodes that ended."""

    def __init__(self, env: LanguageEnv, steps: int) -> None:
        self.env, self.blocks, self.owners = env, list[TensorDict](), list[Tensor]()

    def before(self, step: int, acted: TensorDictBase) -> None:
        """The rows contain the actions."""

    def after(self, step: int, reward: Tensor) -> None:
        env = self.env
        index = (env._terminated | env._truncated).nonzero()[:, 0]
        rows = env._begun().at(index)
        entries = {key: getattr(rows, key) for key in ROW_KEYS}
        entries |= {TERMINATED: env._terminated[index][:, None], TRUNCATED: env._truncated[index][:, None]}
        entries |= {} if env.group_size is None else {GROUP: env._group[index]}
        self.blocks.append(TensorDict(entries, batch_size=[index.shape[0]], device=env.device))
        self.owners.append(index)

    def result(self) -> TensorDict:
        # By row of the batch, then by time, as in TorchRL's rollouts.
        order = torch.cat(self.owners).sort(stable=True).indices
        return torch.cat(self.blocks)[order]


_KEPT: dict[str, Any] = {"steps": _Steps, "rows": _Rows, "turns": _Turns}
