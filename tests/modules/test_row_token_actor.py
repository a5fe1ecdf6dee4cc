"""The actor of the tokens of rows: the distribution that acted, for the losses of TorchRL."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives.llm import DAPO, CISPOLoss, GRPOLoss

from tests.modules.toys import CONTROL, tiny_lm
from torchrl_lang.modules import RowTokenActor, UtteranceActor, ValueHead, language_actor, row_log_prob, value_module
from torchrl_lang.objectives import PPOLoss

T = 12


def make_rows(n=6, width=T, seed=0):
    """Ragged rows of letters; everybody speaks now and then, utterances of the agent's end."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(5, width + 1, (n,), generator=g)
    attention = torch.arange(width) < length[:, None]
    turn = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0]).bool()[:width]
    agent = turn & attention
    tokens = torch.randint(6, (n, width), generator=g)
    tokens[:, [2, 7, 10]] = CONTROL.end_of_action
    tokens = tokens.masked_fill(~attention, CONTROL.pad)
    return TensorDict(
        tokens=tokens,
        attention_mask=attention,
        agent_mask=agent,
        token_reward=torch.randn(n, width, generator=g) * agent,
        token_log_prob=-1.5 * torch.rand(n, width, generator=g) * agent,
        advantage=torch.randn(n, 1, 1, generator=g),
        batch_size=[n],
    )


@pytest.fixture(params=["plain", "utterances"])
def actor(request):
    plain = language_actor(tiny_lm())
    return plain if request.param == "plain" else UtteranceActor(plain, CONTROL, 3, temperature=0.8, seed=0)


def loss_of(actor, kind=GRPOLoss, **options):
    loss = kind(RowTokenActor(actor), **{"entropy_bonus": False, **options})
    loss.set_keys(action="tokens", sample_log_prob="token_log_prob", ref_log_probs="ref_log_prob")
    return loss


def test_the_distribution_is_the_one_that_acted(actor):
    rows = make_rows()
    dist = RowTokenActor(actor).get_dist(rows)
    found = dist.log_prob(rows["tokens"])
    torch.testing.assert_close(found, row_log_prob(actor, rows))
    assert dist.batch_shape == found.shape == rows["tokens"].shape
    assert torch.equal(dist.mask, rows["agent_mask"])
    assert (found[~rows["agent_mask"]] == 0).all()
    written = RowTokenActor(actor)(rows.clone())["token_log_prob"]
    assert torch.equal(written, found)


def test_the_entropy_by_hand():
    rows, lm = make_rows(), tiny_lm()
    found = RowTokenActor(language_actor(lm)).get_dist(rows).entropy()
    with torch.no_grad():
        logits = lm(input_ids=rows["tokens"], attention_mask=rows["attention_mask"].long()).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    expected = torch.nn.functional.pad(entropy[:, :-1], (1, 0)) * rows["agent_mask"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [GRPOLoss, DAPO, CISPOLoss])
def test_the_loss_by_hand(kind, actor):
    rows, low, high = make_rows(), 0.2, 0.28
    loss = loss_of(actor, kind, clip_epsilon=(low, high))
    ratio = (row_log_prob(actor, rows) - rows["token_log_prob"]).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * rows["advantage"][..., 0], clipped * rows["advantage"][..., 0])
    if kind is CISPOLoss:
        gain = clipped * rows["advantage"][..., 0]
    expected = -gain[rows["agent_mask"]].mean()
    torch.testing.assert_close(loss(rows).loss_objective, expected)


def gradients(loss, value):
    loss.zero_grad(set_to_none=True)
    value.backward()
    return {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_our_own_loss(actor):
    rows = make_rows()
    theirs = loss_of(actor, entropy_bonus=True, entropy_coeff=0.1)
    found = theirs(rows)
    ours = PPOLoss(actor, value_module(ValueHead(16)), value_weight=0.0, entropy_weight=0.1, normalize_advantage=False)
    expected = ours(rows.clone().set("advantage", rows["advantage"].squeeze(-1).expand(-1, T)))
    torch.testing.assert_close(found.loss_objective, expected["loss_objective"])
    torch.testing.assert_close(found.loss_entropy, expected["loss_entropy"])
    one = gradients(theirs, found.loss_objective + found.loss_entropy)
    other = gradients(ours, expected["loss_objective"] + expected["loss_entropy"])
    mine = {name.split(".", 2)[2] if name.startswith("actor_network.actor.") else name: g for name, g in one.items()}
    other = {name.split(".", 1)[1]: g for name, g in other.items()}
    assert mine
    assert mine.keys() == other.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-6, rtol=1e-4)


def test_tokens_that_are_not_learned_are_left_out(actor):
    rows = make_rows()
    rows["train_mask"] = rows["agent_mask"] & (torch.arange(T) > 4)
    loss = GRPOLoss(RowTokenActor(actor, mask_key="train_mask"), entropy_bonus=False)
    loss.set_keys(action="tokens", sample_log_prob="token_log_prob")
    found = loss(rows).loss_objective
    rows["token_log_prob"] = torch.where(rows["train_mask"], rows["token_log_prob"], -9.0)
    torch.testing.assert_close(loss(rows).loss_objective, found)
    assert not torch.isclose(found, loss_of(actor)(make_rows()).loss_objective)
