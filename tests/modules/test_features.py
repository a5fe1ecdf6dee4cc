"""Features in front of rows: the trunk reads them, masked ones and their padding count for nothing."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.modules.featured_rows import F, P, feature_rows, featured, reading, states_one_by_one
from tests.modules.toys import CONTROL, KINDS, SLIDING, WIDTH, rows, sliding_lm, tiny_lm
from torchrl_lang.modules import FeatureEmbedding, Trunk, UtteranceActor, language_actor, row_log_prob, with_features
from torchrl_lang.modules.trunk import trunk_module
from torchrl_lang.transforms import RowReference, frozen_copy
from torchrl_lang.transforms.divergence import row_kl

TIGHT = {"atol": 1e-9, "rtol": 1e-9}
OPTIONS = [(kind, positions) for kind in KINDS for positions in (True, False)]


def inputs(batch):
    return [batch.get(key, None) for key in ("tokens", "attention_mask", "features", "features_mask")]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("kind", "positions"), [*OPTIONS, *((kind, None) for kind in SLIDING)])
def test_states_are_those_of_each_row_read_alone(kind, positions, groups):
    """Sliding windows, without a choice of positions here, count features as places."""
    options = {"lm": sliding_lm(kind)} if positions is None else {"positions": positions}
    actor = reading(kind, length_groups=groups, **options)
    batch = feature_rows("all" if kind == "llama" else "some")
    with torch.no_grad():
        states = actor[0](batch.clone())["hidden"]
        expected = torch.cat(states_one_by_one(actor[0].module, batch))
    torch.testing.assert_close(states[batch["attention_mask"]], expected, **TIGHT)


@pytest.mark.parametrize(("kind", "positions"), OPTIONS[:2])
def test_masked_features_and_the_padding_of_features_change_nothing(kind, positions):
    trunk, batch = reading(kind, positions=positions, hidden=7)[0].module, feature_rows()
    tokens, attention, features, real = inputs(batch)
    wide, mask = torch.full((7, 2 * P, F), torch.nan).double(), torch.zeros(7, 2 * P, dtype=torch.bool)
    wide[:, [0, 2, 5]] = torch.where(real[..., None], features, torch.nan)
    mask[:, [0, 2, 5]] = real
    expected, found = (trunk(tokens, attention, *each)[attention] for each in ((features, real), (wide, mask)))
    torch.testing.assert_close(found, expected, **TIGHT)
    found.square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in trunk.features.parameters())


def test_what_does_not_fit_is_refused():
    trunk, (tokens, attention, features, mask) = reading()[0].module, inputs(feature_rows())
    for call, error, match in (
        (lambda: trunk(tokens, attention, features.long()), TypeError, "must be a float"),
        (lambda: trunk(tokens, attention, features[:2]), ValueError, r"must be \[\*B, P, F\]"),
        (lambda: trunk(tokens, attention, features, mask.long()), TypeError, "must be bool"),
        (lambda: trunk(tokens, attention, features, mask[:, :2]), ValueError, "features_mask must have shape"),
        (lambda: trunk(tokens, attention), KeyError, "needs 'features'"),
        (lambda: Trunk(tiny_lm())(tokens, attention, features), ValueError, "reads no features"),
        (lambda: reading().get_dist(rows()), KeyError, "needs 'features'"),
    ):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize(("positions", "room"), [(True, 40 - P), (False, 40)])
def test_features_and_tokens_must_fit_the_model(positions, room):
    trunk = reading(positions=positions)[0].module
    batch = featured(TensorDict(tokens=torch.zeros(7, room, dtype=torch.int64), batch_size=[7]))
    assert trunk.room(P) == room
    assert trunk(*inputs(batch)).isfinite().all()
    longer = featured(TensorDict(tokens=torch.zeros(7, room + 1, dtype=torch.int64), batch_size=[7]))
    with pytest.raises(ValueError, match=r"beside 3 features exceed the model's 40 positions.*max_length=41"):
        trunk(*inputs(longer))


def test_keys_of_all_modules_name_what_is_read():
    both = ["tokens", "attention_mask", "features", "features_mask"]
    policy = UtteranceActor(language_actor(tiny_lm()), CONTROL, 3)
    with_features(policy, FeatureEmbedding(F, WIDTH))
    actor = policy.decoder.actor
    assert policy.in_keys == actor.in_keys == actor[0].in_keys == both
    assert UtteranceActor(actor, CONTROL, 3).in_keys == trunk_module(actor[0].module).in_keys == both
    assert with_features(policy, None) is policy
    assert policy.in_keys == actor.in_keys == actor[0].in_keys == both[:2]
    own = with_features(trunk_module(Trunk(tiny_lm())), FeatureEmbedding(F, WIDTH))
    assert own.in_keys == both


def test_row_scores_and_references_read_the_features():
    actor, batch = reading(), feature_rows()
    batch["agent_mask"] = batch["attention_mask"] & (torch.arange(20) % 3 > 0)
    expected = torch.zeros(batch["tokens"].shape, dtype=torch.float64)
    for row, states in enumerate(states_one_by_one(actor[0].module, batch)):
        log_prob = actor[1].module(states).log_softmax(-1)
        for place in batch["agent_mask"][row].nonzero().flatten().tolist():
            expected[row, place] = log_prob[place - 1, batch["tokens"][row, place]]
    torch.testing.assert_close(row_log_prob(actor, batch), expected, **TIGHT)
    reference = RowReference(frozen_copy(actor))
    with torch.no_grad():
        actor[0].module.features.project.weight.zero_()
    torch.testing.assert_close(reference.log_prob(batch, batch), expected.detach(), **TIGHT)
    with pytest.raises(KeyError, match="needs 'features'"):
        row_log_prob(actor, batch.exclude("features"))


def test_who_reads_no_features_may_have_a_column_of_that_name():
    """Scores of rows, and the exact divergence of two models that share layers."""
    batch, actor = rows(), language_actor(tiny_lm())
    batch["agent_mask"] = batch["attention_mask"] & (torch.arange(batch["tokens"].shape[1]) > 1)
    named = batch.clone().set("features", torch.arange(7))
    assert torch.equal(row_log_prob(actor, named), row_log_prob(actor, batch))
    policy, reference = (RowReference(frozen_copy(one)) for one in (actor, language_actor(tiny_lm(seed=1))))
    assert torch.equal(row_kl(policy, reference, named), row_kl(policy, reference, batch))
