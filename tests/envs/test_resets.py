"""Resets that name what is played, in bare and wrapped environments; copies and moves of an environment."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from torchrl_lang.envs import TokenEnv, WordleEnv
from torchrl_lang.envs.games import CorridorEnv, guess_number_env
from torchrl_lang.schema import ROW_KEYS

from .conftest import wordle_env

NAMED = torch.tensor([2, 0, 1])
# name: (factory, the entry that a reset may name)
TASKS = {
    "corridor": (CorridorEnv, "place"),
    "guess_number": (guess_number_env, "game_seed"),
    "wordle": (wordle_env, "hidden_word"),
}
WRAPS = {
    "bare": lambda env: env,
    "transformed": lambda env: TransformedEnv(env, StepCounter()),
    "by_token": TokenEnv,
    "by_token_transformed": lambda env: TransformedEnv(TokenEnv(env), StepCounter()),
}


def played(env, key):
    return env.game_seed if key == "game_seed" else env._task[{"hidden_word": "word"}.get(key, key)]


def through_pickle(env):
    return pickle.loads(pickle.dumps(env))  # noqa: S301


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("task", TASKS)
def test_what_is_played_can_be_named_by_keyword(task, wrap):
    make, key = TASKS[task]
    env = make(batch_size=[3], seed=0)
    wrapped = WRAPS[wrap](env)
    wrapped.reset(**{key: NAMED})
    assert torch.equal(played(env, key), NAMED)
    # Rows that are not reset keep theirs, and so does the caller's tensordict.
    given = TensorDict(_reset=torch.tensor([[True], [False], [False]]), batch_size=[3])
    wrapped.reset(given, **{key: torch.tensor([1, 1, 1])})
    assert played(env, key).tolist() == [1, 0, 1]
    assert key not in given


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_side_by_side_each_environment_can_be_given_its_own(kind):
    env = kind(2, partial(CorridorEnv, length=4, batch_size=[2], seed=0))
    try:
        td = env.reset(list_of_kwargs=[{"place": torch.tensor([0, 1])}, {"place": torch.tensor([2, 0])}])
        assert td["tokens"][..., 1].tolist() == [[0, 1], [2, 0]]
        td = env.reset(place=torch.tensor([2, 2]))
        assert td["tokens"][..., 1].tolist() == [[2, 2], [2, 2]]
        rows = td.select(*ROW_KEYS).clone()
        env.reset()
        assert torch.equal(env.reset(rows.clone(), set_state=True)["tokens"], rows["tokens"])
    finally:
        env.close(raise_if_closed=False)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("task", TASKS)
def test_set_state_reaches_a_wrapped_environment(task, wrap):
    make, _ = TASKS[task]
    env = make(batch_size=[3], seed=0)
    wrapped = WRAPS[wrap](env)
    action = torch.full((3,) if "token" in wrap else (3, env.action_length), env.tokenizer.control.end_of_action)
    td = wrapped.step(wrapped.reset().set("action", action))["next"]
    named = {"game_seed": env.game_seed} if task == "guess_number" else {}
    rows = td.select(*ROW_KEYS).clone()
    wrapped.reset()
    came = wrapped.reset(set_state=True, **rows, **named)
    for row_key in ROW_KEYS:
        assert torch.equal(came[row_key], td[row_key])
    wrapped.reset()
    if "transformed" in wrap:
        with pytest.raises(KeyError, match="by keyword"):
            wrapped.reset(rows, set_state=True, **named)
    else:
        assert torch.equal(wrapped.reset(rows, set_state=True, **named)["tokens"], td["tokens"])


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("mask", [torch.tensor([1, 0, 0]), torch.tensor([[True, False]] * 3), torch.tensor([0.0] * 3)])
def test_masks_are_checked(wrap, mask):
    env = WRAPS[wrap](CorridorEnv(batch_size=[3], seed=0))
    td = env.reset()
    with pytest.raises(ValueError, match="'_reset' must be 3 bool flags"):
        env._reset(TensorDict(_reset=mask, batch_size=[3]))
    step = env.base_env._step if "transformed" in wrap else env._step  # TransformedEnv looks at the mask itself
    with pytest.raises(ValueError, match="'_step' must be 3 bool flags"):
        step(env.rand_action(td).set("_step", mask))


@pytest.mark.parametrize("wrap", WRAPS)
def test_to_moves_everything_and_forgets_the_rows(wrap):
    env = wordle_env(batch_size=[3], consistent=True, guesses="words", seed=0)
    wrapped = WRAPS[wrap](env)
    wrapped.reset()
    assert wrapped.to("meta") is wrapped
    assert wrapped.device == env.device == torch.device("meta")
    tensors = [env._key, env._episode, *env.buffers()]
    assert any(value is env._answers for value in tensors)
    assert {value.device.type for value in tensors} == {"meta"}
    with pytest.raises(RuntimeError, match="before its first reset"):
        (wrapped.base_env if "transformed" in wrap else wrapped)._step(TensorDict())


@pytest.mark.parametrize("again", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("wrap", ["bare", "by_token"])
def test_copies_of_an_unseeded_environment_play_their_own_words(wrap, again):
    def words(env):
        env.reset()
        return getattr(env, "env", env).hidden_word

    env = WRAPS[wrap](WordleEnv(batch_size=[64]))
    one, other = words(again(env)), words(again(env))
    assert not torch.equal(one, other)
    assert not torch.equal(one, words(env))
    env.set_seed(0)
    assert torch.equal(words(again(env)), words(env))
    env.set_seed(None)
    assert not torch.equal(words(again(env)), words(env))
