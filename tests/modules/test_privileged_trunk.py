"""Privileged information in front of rows: states, padding, errors, and a critic that predicts with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from tests.modules.featured_rows import featured, projector, real
from tests.modules.toys import KINDS, TOKENIZER, WIDTH, rows, tiny_lm
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.modules import (
    PrivilegedTrunk,
    Trunk,
    ValueHead,
    causal_lm,
    language_actor,
    value_module,
    with_features,
)
from torchrl_lang.modules.trunk import trunk_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.schema import PRIVILEGED, PRIVILEGED_MASK
from torchrl_lang.training import adamw

WORDS = ["crane", "slate", "mouse", "point"]


def with_privileged(count: int = 3, width: int = 4) -> TensorDict:
    """Ragged rows, the ``i``-th with ``i + 1`` privileged tokens."""
    batch = rows(count)
    generator = torch.Generator().manual_seed(5)
    batch[PRIVILEGED] = torch.randint(TOKENIZER.vocab_size, (count, width), generator=generator)
    batch[PRIVILEGED_MASK] = torch.arange(width) <= torch.arange(count)[:, None]
    return batch


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_may_exclude_any_of_the_tokens(kind: str) -> None:
    """Not only the last: each row alone, its real privileged tokens written in front of its own."""
    trunk, batch = Trunk(tiny_lm(kind)).eval(), with_privileged()
    batch[PRIVILEGED_MASK] = torch.tensor([[False, True, False, True], [False] * 4, [True, False, True, False]])
    hidden = PrivilegedTrunk(trunk)(batch.clone())["hidden"]
    for row, found in zip(batch, hidden, strict=True):
        extra, own = row[PRIVILEGED][row[PRIVILEGED_MASK]], row["tokens"][row["attention_mask"]]
        expected = trunk(torch.cat([extra, own])[None])[0, len(extra) :]
        torch.testing.assert_close(found[: len(own)], expected, atol=1e-5, rtol=1e-5)


def reads_features_first(trunk: Trunk) -> PrivilegedTrunk:
    """A trunk with a projector, then privileged tokens."""
    return PrivilegedTrunk(with_features(trunk, projector()))


def reads_features_last(trunk: Trunk) -> PrivilegedTrunk:
    """The other order."""
    return with_features(PrivilegedTrunk(trunk), projector())


BOTH_ORDERS = pytest.mark.parametrize("make", [reads_features_first, reads_features_last])


@BOTH_ORDERS
@pytest.mark.parametrize("mask", ["all", "some"])
def test_features_come_before_privileged_tokens(make: Callable, mask: str) -> None:
    """States by the model alone, on each row's features, privileged and own tokens."""
    trunk, batch = Trunk(tiny_lm().double()).eval(), featured(with_privileged(), mask)
    critic = make(trunk)
    assert critic.in_keys == ["tokens", "attention_mask", "features", "features_mask", PRIVILEGED, PRIVILEGED_MASK]
    hidden = critic(batch.clone())["hidden"]
    for row in range(len(batch)):
        one = batch[row]
        extra, own = one[PRIVILEGED][one[PRIVILEGED_MASK]], one["tokens"][one["attention_mask"]]
        joined = trunk.model.get_input_embeddings()(torch.cat([extra, own]))
        whole = torch.cat([trunk.features(real(batch, row)), joined])
        expected = trunk.model(inputs_embeds=whole[None]).last_hidden_state[0, -len(own) :]
        torch.testing.assert_close(hidden[row, : len(own)], expected, atol=1e-9, rtol=1e-9)


def test_without_a_mask_all_tokens_are_real_and_the_input_stays() -> None:
    """Only the states are written."""
    trunk, batch = PrivilegedTrunk(Trunk(tiny_lm()).eval()), with_privileged()
    batch[PRIVILEGED_MASK] = torch.ones_like(batch[PRIVILEGED_MASK])
    bare = batch.exclude(PRIVILEGED_MASK)
    tokens = bare["tokens"].clone()
    torch.testing.assert_close(trunk(bare)["hidden"], trunk(batch.clone())["hidden"])
    assert torch.equal(bare["tokens"], tokens)
    assert set(bare.keys()) == set(batch.exclude(PRIVILEGED_MASK).keys()) | {"hidden"}


def test_errors_name_the_entry_and_the_remedy() -> None:
    """A missing entry, and too long rows."""
    trunk, batch = PrivilegedTrunk(Trunk(tiny_lm())), with_privileged()
    with pytest.raises(KeyError, match=r"privileged.*EpisodeRows\(keep="):
        trunk(batch.exclude(PRIVILEGED))
    long = batch.exclude(PRIVILEGED_MASK).set(PRIVILEGED, torch.zeros(3, 500, dtype=torch.int64))
    with pytest.raises(ValueError, match="exceed the model's"):
        trunk(long)


def wordle_rows() -> TensorDict:
    """Games of a player that always begins with the same word, so that the hidden word decides the return."""
    env = WordleEnv(WORDS, [64], max_tries=1, privileged=True, seed=0)
    games = env.rollout(1, RandomWordPlayer(WORDS, openers=("crane",), seed=0))
    batch = rows_from_rollout(games, unfinished="truncate", keep=[PRIVILEGED])
    return batch.set("token_log_prob", torch.zeros_like(batch["token_reward"]))


@pytest.mark.parametrize("privileged", [True, False])
def test_a_critic_that_sees_the_hidden_word_predicts_the_return(privileged: bool) -> None:
    """It explains all of the returns' variance; the best critic without the word is their mean and explains none."""
    torch.manual_seed(0)
    batch = wordle_rows()
    model = {"vocab_size": 35, "layers": 1, "width": WIDTH, "heads": 2, "max_length": 24}
    own = Trunk(causal_lm(**model))
    critic = PrivilegedTrunk(own) if privileged else trunk_module(own)
    loss = PPOLoss(language_actor(causal_lm(**model)), value_module(ValueHead(WIDTH)), value_trunk=critic, gamma=1.0)
    optimizer = adamw(loss, 1e-2)
    for _ in range(40):
        out = loss(loss.estimate(batch))
        out["loss_critic"].backward()
        optimizer.step()
        optimizer.zero_grad()
    explained = float(loss(loss.estimate(batch))["explained_variance"])
    assert explained > 0.95 if privileged else explained < 0.1
    assert all(parameter.grad is None for parameter in loss.actor_network.parameters())
