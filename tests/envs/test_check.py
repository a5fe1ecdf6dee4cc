"""check_language_env finds every fault that it says it finds: one broken corridor a rule."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torchrl.data import Unbounded
from torchrl.envs import Compose, StepCounter, TransformedEnv

from torchrl_lang.envs import check_language_env
from torchrl_lang.envs.check import LanguageEnvError
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.schema import ACTION
from torchrl_lang.transforms import LivingCost, TurnRewardTransform


def edited(**edits):
    """A corridor whose observation is edited on its way out; each edit is a function of env and observation."""

    class Edited(CorridorEnv):
        pass

    for name, edit in edits.items():

        def method(self, *args, _name=name, _edit=edit, **kwargs):
            out = getattr(CorridorEnv, _name)(self, *args, **kwargs)
            _edit(self, out)
            return out

        setattr(Edited, name, method)
    return Edited


def after_two_turns(env, out, key, change):
    """Change an entry in rows that have taken two turns and go on."""
    rows = (env._turns == 2) & ~out["done"].squeeze(-1)
    out[key] = torch.where(rows[:, None], change(out[key]), out[key])


class WrongSpec(CorridorEnv):
    def _observe(self):
        return super()._observe().set("extra", torch.zeros(*self.batch_size, 1))


class TruncatedAsTerminated(CorridorEnv):
    def _observe(self):
        out = super()._observe()
        out["terminated"] = out["done"].clone()
        out["truncated"] = torch.zeros_like(out["done"])
        return out


class RewardWithoutLastDimension(CorridorEnv):
    def _make_specs(self):
        super()._make_specs()
        self.reward_spec = Unbounded(shape=self.batch_size, dtype=torch.float32)

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return out.set("reward", out["reward"].squeeze(-1))


class PlaysOn(CorridorEnv):
    def _step(self, tensordict):
        terminated, truncated = self._terminated, self._truncated
        self._terminated, self._truncated = terminated & False, truncated & False
        reward = super()._step(tensordict)["reward"]
        self._terminated, self._truncated = self._terminated | terminated, self._truncated | truncated
        return self._observe().set("reward", reward)


class PaysForever(CorridorEnv):
    def _step(self, tensordict):
        ended = self._terminated | self._truncated
        out = super()._step(tensordict)
        return out.set("reward", out["reward"] - ended[:, None].float())


class Endless(CorridorEnv):
    """Where no token fits any more it forgets to say so."""

    def __init__(self, **kwargs):
        super().__init__(length=10, start=0, **kwargs)

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self._truncated = self._truncated & False
        return out.set("truncated", out["truncated"] & False).set("done", out["terminated"].clone())


class SilentTurns(CorridorEnv):
    def _plan_turn(self, action, live):
        writes, reward = super()._plan_turn(action, live)
        silent = live & ~self._terminated
        rows, width = self._rows.rows, self.row_length
        place = torch.where(silent[:, None], width, writes.place)
        at = torch.where(silent[:, None], width, writes.reward_place)
        length = torch.where(silent, rows.length, writes.length)
        return writes._replace(place=place, reward_place=at, length=length), reward


class IgnoresMask(CorridorEnv):
    def _step(self, tensordict):
        return super()._step(tensordict.exclude("_step"))


class OtherEpisodesEachTime(CorridorEnv):
    count = 0

    def _open(self, episode, fresh, options):
        type(self).count += 1
        return super()._open(episode + self.count, fresh, options)


class EpisodesOfTheBatch(CorridorEnv):
    def _open(self, episode, fresh, options):
        return super()._open(episode + 10 * self._n, fresh, options)


class GlobalStream(CorridorEnv):
    def _open(self, episode, fresh, options):
        torch.rand(1)
        return super()._open(episode, fresh, options)


class StepsInPlace(CorridorEnv):
    """Keeps the tensor that it returned and writes the next tokens into it."""

    def _observe(self):
        out = super()._observe()
        if not hasattr(self, "_buffer"):
            self._buffer = out["tokens"].clone()
        self._buffer.copy_(out["tokens"])
        return out.set("tokens", self._buffer)


class WritesItsInput(CorridorEnv):
    def _step(self, tensordict):
        out = super()._step(tensordict)
        tensordict.get(ACTION).zero_()
        return out


class ReturnsItsState(CorridorEnv):
    """Returns the tensors that it keeps, though it steps in new ones."""

    def _step(self, tensordict):
        self._rows = deepcopy(self._rows)
        return super()._step(tensordict)

    def _observe(self):
        return super()._observe().set("tokens", self._rows.rows.tokens.reshape(*self.batch_size, -1))


class ResetsAll(CorridorEnv):
    def _begin_rows(self, fresh, *rest, **partial):
        super()._begin_rows(torch.ones_like(fresh), *rest, **partial)


class ResetsNone(CorridorEnv):
    def _begin_rows(self, fresh, *rest, **partial):
        super()._begin_rows(fresh if fresh.all() else torch.zeros_like(fresh), *rest, **partial)


class ForgetsState(CorridorEnv):
    def _reset(self, tensordict=None, set_state=False, **kwargs):
        return super()._reset(tensordict, set_state=False, **kwargs)


def unmask(env, out):
    after_two_turns(env, out, "attention_mask", lambda mask: mask & (torch.arange(mask.shape[-1]) != 1))


def dirty_padding(env, out):
    out["tokens"] = torch.where(out["attention_mask"], out["tokens"], 3)


def rewrite_opening(env, out):
    opening = torch.arange(env.row_length) == 1
    after_two_turns(env, out, "tokens", lambda tokens: torch.where(opening, (tokens + 1) % 3, tokens))


def double_reward(env, out):
    out["token_reward"] = 2 * out["token_reward"]


def has_a_past(env, out):
    out["agent_mask"][..., 1] = True


def not_done(env, out):
    out["done"] = out["terminated"].clone()


BROKEN = {
    "specs": [WrongSpec],
    "row": [edited(_observe=unmask), edited(_observe=dirty_padding)],
    "fresh": [edited(_reset=has_a_past)],
    "growth": [edited(_observe=rewrite_opening), SilentTurns, Endless],
    "flags": [TruncatedAsTerminated, edited(_observe=not_done)],
    "reward": [RewardWithoutLastDimension, edited(_observe=double_reward)],
    "latch": [PlaysOn, PaysForever],
    "mask": [IgnoresMask],
    "seed": [OtherEpisodesEachTime],
    "batch": [EpisodesOfTheBatch],
    "global stream": [GlobalStream],
    "stepping": [StepsInPlace, WritesItsInput],
    "aliasing": [ReturnsItsState],
    "partial reset": [ResetsAll, ResetsNone],
    "state": [ForgetsState],
}


@pytest.mark.parametrize(("rule", "broken"), [(rule, env) for rule, envs in BROKEN.items() for env in envs])
def test_a_broken_environment_is_found(rule, broken):
    with pytest.raises(LanguageEnvError) as caught:
        check_language_env(
            broken(batch_size=[4]),
            lambda n: broken(batch_size=[n]),
            utterances="lr",
        )
    assert caught.value.rule == rule, caught.value
    assert str(caught.value).startswith(f"[{rule}]")


class PaysLater(TurnRewardTransform):
    """Pays by the turns before, which another transform counts."""

    def earned(self, before, after):
        return before["step_count"].float()


def paid(n):
    return TransformedEnv(CorridorEnv(batch_size=[n]), Compose(StepCounter(), LivingCost(0.5), PaysLater()))


def test_rewards_by_transforms_keep_the_rules():
    check_language_env(paid(4), paid, utterances="lr")


def test_a_transform_that_breaks_a_rule_is_found():
    class PaysBesideTheRow(LivingCost):
        def _step(self, tensordict, next_tensordict):
            row = next_tensordict["token_reward"]
            return super()._step(tensordict, next_tensordict).set("token_reward", row)

    with pytest.raises(LanguageEnvError, match=r"\[reward\]"):
        check_language_env(TransformedEnv(CorridorEnv(batch_size=[4]), PaysBesideTheRow(0.5)), utterances="lr")
