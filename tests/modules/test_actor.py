from __future__ import annotations

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from tests.modules.toys import KINDS, WIDTH, rows, tiny_lm
from torchrl_lang.modules import Trunk, causal_lm, language_actor
from torchrl_lang.modules.actor import split_actor


def categorical(out_key="action"):
    return ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=[out_key], distribution_class=Categorical)


@pytest.mark.parametrize("kind", KINDS)
def test_distribution_of_the_next_token_at_every_position(kind):
    lm, batch = tiny_lm(kind), rows()
    actor = language_actor(lm)
    dist = actor.get_dist(batch.clone())
    assert dist.batch_shape == (7, 20)
    expected = lm(batch["tokens"], attention_mask=batch["attention_mask"].long()).logits.log_softmax(-1)
    real = batch["attention_mask"]
    torch.testing.assert_close(dist.logits[real], expected[real], atol=1e-5, rtol=1e-5)
    said = actor(batch.clone())
    assert said["next_token"].shape == (7, 20)
    torch.testing.assert_close(said["next_token_log_prob"], dist.log_prob(said["next_token"]), atol=1e-5, rtol=1e-5)


def test_an_own_trunk_with_an_own_head():
    head = nn.Linear(WIDTH, 5)
    actor = language_actor(Trunk(tiny_lm()), head=head)
    assert actor.get_dist(rows()).logits.shape == (7, 20, 5)
    with pytest.raises(ValueError, match="Pass head="):
        language_actor(Trunk(tiny_lm()))


def test_models_that_change_their_logits_are_refused():
    lm = causal_lm("gemma2", vocab_size=9, layers=1, width=8, heads=2, max_length=16, head_dim=4)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        language_actor(lm)


def test_parts_of_an_actor_in_many_pieces():
    embed = TensorDictModule(nn.Embedding(9, 4), in_keys=["tokens"], out_keys=["embedded"])
    mix = TensorDictModule(nn.Linear(4, 4), in_keys=["embedded"], out_keys=["hidden"])
    wide = TensorDictModule(nn.Linear(4, 8), in_keys=["hidden"], out_keys=["wide"])
    out = TensorDictModule(nn.Linear(8, 9), in_keys=["wide"], out_keys=["logits"])
    actor = ProbabilisticTensorDictSequential(embed, mix, wide, out, categorical())
    parts = split_actor(actor)
    batch = rows()
    batch["tokens"] = batch["tokens"].clamp_max(8)
    hidden = parts.trunk(batch.clone()).select("hidden")
    torch.testing.assert_close(parts.head(hidden)["logits"].log_softmax(-1), actor.get_dist(batch.clone()).logits)
    assert isinstance(parts.prob, ProbabilisticTensorDictModule)


def test_what_is_no_actor_is_refused():
    with pytest.raises(TypeError, match="got Linear"):
        split_actor(nn.Linear(2, 2))
    silent = TensorDictModule(nn.Linear(2, 2), in_keys=["x"], out_keys=["y"])
    prob = ProbabilisticTensorDictModule(in_keys={"logits": "y"}, out_keys=["a"], distribution_class=Categorical)
    with pytest.raises(ValueError, match="writes 'logits'"):
        split_actor(ProbabilisticTensorDictSequential(silent, prob))
