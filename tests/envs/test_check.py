"""check_language_env finds every fault that it says it finds: one broken corridor a rule."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torchrl.data import Unbounded
from torchrl.envs import Compose, StepCounter, TransformedEnv

from torchrl_lang.envs import TokenEnv, check_language_env
from torchrl_lang.envs.check import LanguageEnvError
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.schema import ACTION
from torchrl_lang.transforms import LivingCost, TurnRewardTransform


def broken(method, edit):
    """A corridor of which one method is replaced by a function of the environment, the method and its arguments."""

    def edited(self, *args, **kwargs):
        return edit(self, partial(getattr(CorridorEnv, method), self), *args, **kwargs)

    return type(edit.__name__, (CorridorEnv,), {method: edited})


def shows(edit):
    """A corridor that changes its observations."""

    def observe(env, method, *args, **kwargs):
        out = method(*args, **kwargs)
        edit(env, out)
        return out

    return broken("_observe", observe)


def after_two_turns(key, change):
    """Change an entry in rows that have taken two turns and go on."""

    def edit(env, out):
        rows = (env._turns == 2) & ~out["done"].squeeze(-1)
        out[key] = torch.where(rows[:, None], change(out[key]), out[key])

    return shows(edit)


def steps_in_place(env, out):
    """Keeps the tensor that it returned and writes the next tokens into it."""
    if not hasattr(env, "_buffer"):
        env._buffer = out["tokens"].clone()
    out["tokens"] = env._buffer.copy_(out["tokens"])


def has_a_past(env, reset, *args, **kwargs):
    out = reset(*args, **kwargs)
    out["agent_mask"][..., 1] = True
    return out


def silent_turns(env, plan, action, live):
    writes, reward = plan(action, live)
    silent = ~env._terminated
    place = torch.where(silent[:, None], env.row_length, writes.place)
    at = torch.where(silent[:, None], env.row_length, writes.reward_place)
    length = torch.where(silent, env._rows.rows.length, writes.length)
    return writes._replace(place=place, reward_place=at, length=length), reward


def takes_no_forced_end(env, plan, action, live):
    return plan(action, live & (action == env.tokenizer.control.end_of_action).any(-1))


def plays_on(env, step, td):
    terminated, truncated = env._terminated, env._truncated
    env._terminated, env._truncated = terminated & False, truncated & False
    reward = step(td)["reward"]
    env._terminated, env._truncated = env._terminated | terminated, env._truncated | truncated
    return env._observe().set("reward", reward)


def pays_forever(env, step, td):
    ended = env._terminated | env._truncated
    out = step(td)
    return out.set("reward", out["reward"] - ended[:, None].float())


def writes_its_input(env, step, td):
    out = step(td)
    td.get(ACTION).zero_()
    return out


def other_episodes_each_time(env, begin, episode, *rest):
    env.count = getattr(env, "count", 0) + 1
    return begin(episode + env.count, *rest)


class RewardWithoutLastDimension(CorridorEnv):
    def _make_specs(self):
        super()._make_specs()
        self.reward_spec = Unbounded(shape=self.batch_size, dtype=torch.float32)

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return out.set("reward", out["reward"].squeeze(-1))


class ReturnsItsState(CorridorEnv):
    """Returns the tensors that it keeps, though it steps in new ones."""

    def _step(self, tensordict):
        self._rows = deepcopy(self._rows)
        return super()._step(tensordict)

    def _observe(self):
        return super()._observe().set("tokens", self._rows.rows.tokens.reshape(*self.batch_size, -1))


class Endless(CorridorEnv):
    """Where no token fits any more it forgets to say so."""

    def __init__(self, **kwargs):
        super().__init__(length=10, start=0, **kwargs)

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self._truncated = self._truncated & False
        return out.set("truncated", out["truncated"] & False).set("done", out["terminated"].clone())


def begins(change):
    return broken("_begin_rows", lambda env, begin, fresh, *rest, **partial: begin(change(fresh), *rest, **partial))


SECOND = torch.arange(44) == 1
BROKEN = {
    "specs": [shows(lambda env, out: out.set("extra", torch.zeros(*env.batch_size, 1)))],
    "row": [
        after_two_turns("attention_mask", lambda mask: mask & ~SECOND),
        shows(lambda env, out: out.set("tokens", torch.where(out["attention_mask"], out["tokens"], 3))),
    ],
    "fresh": [broken("_reset", has_a_past)],
    "growth": [
        after_two_turns("tokens", lambda tokens: torch.where(SECOND, (tokens + 1) % 3, tokens)),
        broken("_plan_turn", silent_turns),
        broken("_plan_turn", takes_no_forced_end),
        lambda **options: TokenEnv(broken("_plan_turn", takes_no_forced_end)(**options)),
        Endless,
    ],
    "flags": [
        shows(lambda env, out: out.update({"terminated": out["done"].clone(), "truncated": out["done"] & False})),
        shows(lambda env, out: out.set("done", out["terminated"].clone())),
    ],
    "reward": [RewardWithoutLastDimension, shows(lambda env, out: out.set("token_reward", 2 * out["token_reward"]))],
    "latch": [broken("_step", plays_on), broken("_step", pays_forever)],
    "mask": [broken("_step", lambda env, step, td: step(td.exclude("_step")))],
    "seed": [broken("_open", other_episodes_each_time)],
    "batch": [broken("_open", lambda env, begin, episode, *rest: begin(episode + 10 * env._n, *rest))],
    "global stream": [broken("_open", lambda env, begin, *args: (torch.rand(1), begin(*args))[1])],
    "stepping": [shows(steps_in_place), broken("_step", writes_its_input)],
    "aliasing": [ReturnsItsState],
    "partial reset": [begins(torch.ones_like), begins(lambda fresh: fresh & fresh.all())],
    "state": [broken("_reset", lambda env, reset, td=None, set_state=False, **kwargs: reset(td, **kwargs))],
}


@pytest.mark.parametrize(("rule", "make"), [(rule, env) for rule, envs in BROKEN.items() for env in envs])
def test_a_broken_environment_is_found(rule, make):
    with pytest.raises(LanguageEnvError) as caught:
        check_language_env(make(batch_size=[4]), lambda n: make(batch_size=[n]), utterances="lr")
    assert caught.value.rule == rule, caught.value
    assert str(caught.value).startswith(f"[{rule}]")


class PaysLater(TurnRewardTransform):
    """Pays by the turns before, which another transform counts."""

    def earned(self, before, after):
        return before["step_count"].float()


def test_rewards_by_transforms():
    class PaysBesideTheRow(LivingCost):
        def _step(self, tensordict, next_tensordict):
            row = next_tensordict["token_reward"]
            return super()._step(tensordict, next_tensordict).set("token_reward", row)

    def paid(n):
        return TransformedEnv(CorridorEnv(batch_size=[n]), Compose(StepCounter(), LivingCost(0.5), PaysLater()))

    check_language_env(paid(4), paid, utterances="lr")
    with pytest.raises(LanguageEnvError, match=r"\[reward\]"):
        check_language_env(TransformedEnv(CorridorEnv(batch_size=[4]), PaysBesideTheRow(0.5)), utterances="lr")
