"""Privileged information in front of rows: states, padding, errors, and a critic that predicts with it."""

from __future__ import annotations

import pytest
import torch

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


def with_privileged(width=4):
    """Three ragged rows, the ``i``-th with ``i + 1`` privileged tokens."""
    batch, generator = rows(3), torch.Generator().manual_seed(5)
    batch[PRIVILEGED] = torch.randint(TOKENIZER.vocab_size, (3, width), generator=generator)
    return batch.set(PRIVILEGED_MASK, torch.arange(width) <= torch.arange(3)[:, None])


MAKE = {
    "no features": PrivilegedTrunk,
    "features first": lambda trunk: PrivilegedTrunk(with_features(trunk, projector())),
    "features last": lambda trunk: with_features(PrivilegedTrunk(trunk), projector()),
}
CASES = [(kind, "no features", "all") for kind in KINDS]
CASES += [("gpt2", order, mask) for order in ("features first", "features last") for mask in ("all", "some")]


@pytest.mark.parametrize(("kind", "order", "mask"), CASES)
def test_each_row_is_read_alone_behind_its_features_and_then_its_privileged_tokens(kind, order, mask):
    """By the model alone; a mask may exclude any of the tokens, not only the last."""
    trunk, batch = Trunk(tiny_lm(kind).double()), featured(with_privileged(), mask)
    batch[PRIVILEGED_MASK] = torch.tensor([[False, True, False, True], [False] * 4, [True, False, True, False]])
    critic, features = MAKE[order](trunk), order != "no features"
    keys = ["features", "features_mask"] * features
    assert critic.in_keys == ["tokens", "attention_mask", *keys, PRIVILEGED, PRIVILEGED_MASK]
    hidden = critic(batch.clone())["hidden"]
    for row, one in enumerate(batch):
        extra, own = one[PRIVILEGED][one[PRIVILEGED_MASK]], one["tokens"][one["attention_mask"]]
        whole = trunk.model.get_input_embeddings()(torch.cat([extra, own]))
        if features:
            whole = torch.cat([trunk.features(real(batch, row)), whole])
        expected = trunk.model(inputs_embeds=whole[None]).last_hidden_state[0, -len(own) :]
        torch.testing.assert_close(hidden[row, : len(own)], expected, atol=1e-9, rtol=1e-9)


def test_without_a_mask_all_tokens_are_real_and_only_states_are_written():
    trunk, batch = PrivilegedTrunk(Trunk(tiny_lm())), with_privileged()
    batch[PRIVILEGED_MASK] = torch.ones_like(batch[PRIVILEGED_MASK])
    bare = batch.exclude(PRIVILEGED_MASK)
    found = trunk(bare.clone())
    torch.testing.assert_close(found["hidden"], trunk(batch.clone())["hidden"])
    assert (found.exclude("hidden") == bare).all()


def test_errors_name_the_entry_and_the_remedy():
    trunk, batch = PrivilegedTrunk(Trunk(tiny_lm())), with_privileged()
    with pytest.raises(KeyError, match=r"privileged.*EpisodeRows\(keep="):
        trunk(batch.exclude(PRIVILEGED))
    long = batch.exclude(PRIVILEGED_MASK).set(PRIVILEGED, torch.zeros(3, 500, dtype=torch.int64))
    with pytest.raises(ValueError, match="exceed the model's"):
        trunk(long)


@pytest.mark.parametrize("privileged", [True, False])
def test_a_critic_that_sees_the_hidden_word_predicts_the_return(privileged):
    """It explains all of the returns' variance; the best critic without the word is their mean and explains none."""
    torch.manual_seed(0)
    env = WordleEnv(WORDS, [64], max_tries=1, privileged=True, seed=0)
    games = env.rollout(1, RandomWordPlayer(WORDS, openers=("crane",), seed=0))  # the hidden word decides the return
    batch = rows_from_rollout(games, unfinished="truncate", keep=[PRIVILEGED])
    batch["token_log_prob"] = torch.zeros_like(batch["token_reward"])
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
