"""Rows that no environment writes are refused by ``reset(set_state=True)``."""

from __future__ import annotations

import pytest
import torch

from torchrl_lang.envs import TokenEnv
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.schema import ROW_KEYS

from .conftest import ENVS, WORDS, wordle_env

PLAIN = [name for name in ENVS if not name.endswith("_by_token")]


def played(env, words, turns=2):
    """Rows of games that go on after some turns in which the agent says something sensible."""
    control, width = env.tokenizer.control, env.action_length
    td = env.reset()
    for _ in range(turns):
        rows = [(env.tokenizer.encode(words[row % len(words)]) + [control.end_of_action])[:width] for row in range(3)]
        action = torch.tensor([row + [control.pad] * (width - len(row)) for row in rows])
        td = env.step(td.set("action", action))["next"]
    return td


def left_padded(td, env):
    """The same rows, padded on the left."""
    for key in ROW_KEYS:
        rows = [torch.roll(row, int((~mask).sum())) for row, mask in zip(td[key], td["attention_mask"], strict=True)]
        td["rolled", key] = torch.stack(rows)
    return td.pop("rolled")


def hole(td, env):
    td["attention_mask"][:, 1] = False
    return td


def mask_beyond_attention(td, env):
    td["agent_mask"][:, -1] = True
    return td


def agent_unmarked(td, env):
    """The agent's tokens appear as the environment's: a game that knew no guess would answer them."""
    td["agent_mask"][:] = False
    td["token_reward"][:] = 0
    return td


def padding_inside(td, env):
    td["tokens"][:, 1] = env.tokenizer.control.pad
    return td


def begins_twice(td, env):
    td["tokens"][:, 1] = env.tokenizer.control.begin_action
    td["agent_mask"][:, 1] = False
    td["token_reward"][:, 1] = 0
    return td


def ends_early(td, env):
    """The last token, an end, is missing: the row stops in the middle."""
    last = td["attention_mask"].sum(-1, keepdim=True) - 1
    for key in ("attention_mask", "agent_mask"):
        td[key].scatter_(1, last, False)
    td["token_reward"].scatter_(1, last, 0.0)
    return td


def beyond_the_vocabulary(td, env):
    td["tokens"][:, 1] = env.tokenizer.vocab_size
    return td


def not_finite(td, env):
    td["token_reward"][td["agent_mask"]] = float("nan")
    return td


DAMAGE = (
    left_padded,
    hole,
    mask_beyond_attention,
    agent_unmarked,
    padding_inside,
    begins_twice,
    ends_early,
    beyond_the_vocabulary,
    not_finite,
)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("wrap", [lambda env: env, TokenEnv], ids=["by_utterance", "by_token"])
@pytest.mark.parametrize("name", PLAIN)
def test_damaged_rows_are_refused(name, wrap, damage):
    make, words, _ = ENVS[name]
    env = make(batch_size=[3], seed=0)
    env.reset()
    words = {"guess_number": ["4", "5"], "wordle": WORDS[3:]}.get(name, words)
    td = played(env, words, turns=1)
    live = ~td["done"].squeeze(-1)
    assert live.any()
    named = {"game_seed": env.game_seed} if hasattr(env, "game_seed") else {}
    outer = wrap(env)
    whole = td.select(*ROW_KEYS, "done").clone().set("_reset", live)
    outer.reset()
    came = outer.reset(whole.clone(), set_state=True, **named)  # as they are, they are accepted
    assert torch.equal(came["tokens"][live], td["tokens"][live])
    if damage is ends_early and wrap is TokenEnv and name == "countdown":
        pytest.skip("one token a step, a row may stop inside an utterance")
    with pytest.raises(ValueError, match=r"row|Row|token|reward|attention_mask"):
        outer.reset(damage(whole.clone(), env), set_state=True, **named)


def test_every_row_that_is_played_is_accepted(registered):
    """What the agent babbles, control tokens among it, never makes a row that could not go on."""
    make, _, tensors_only = registered
    env = make(batch_size=[8], seed=0)
    torch.manual_seed(0)
    td, checked = env.reset(), 0
    named = {} if tensors_only else {"game_seed": getattr(env, "env", env).game_seed}
    for _ in range(6):
        td = env.step(env.rand_action(td))["next"].exclude("reward")
        live = ~td["done"]
        if live.any():
            came = env.reset(td.clone().set("_reset", live), set_state=True, **named)
            checked += int(live.sum())
            for key in ROW_KEYS:
                assert torch.equal(came[key], td[key])
    assert checked


def test_the_error_names_row_and_position():
    env = CorridorEnv(length=4, start=0, batch_size=[2], seed=0)
    td = env.reset().select(*ROW_KEYS).clone()
    td["tokens"][1, 1] = env.tokenizer.control.end_of_state
    with pytest.raises(ValueError, match="Row 1 cannot be continued: at position 0"):
        env.reset(td, set_state=True)
    td = env.step(env.reset().set("action", torch.tensor([[4, 5]] * 2)))["next"].select(*ROW_KEYS).clone()
    td["tokens"][0, 6] = env.tokenizer.control.begin_state
    with pytest.raises(ValueError, match="Row 0 cannot be continued: at position 6"):
        env.reset(td, set_state=True)


def test_rows_of_another_width_and_type_are_refused():
    env = wordle_env(batch_size=[1])
    td = env.reset().select(*ROW_KEYS).clone()
    with pytest.raises(ValueError, match=r"Rows have width 10, but this environment's row_length is 74"):
        env.reset(td.apply(lambda value: value[:, :10]), set_state=True)
    with pytest.raises(TypeError, match="tokens must be int64"):
        env.reset(td.clone().set("tokens", td["tokens"].float()), set_state=True)
