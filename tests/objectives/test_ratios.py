"""Ratios of tokens, turns and rows, their clipping and their means: by hand, and against TorchRL's losses."""

from __future__ import annotations

import pytest
import torch
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import DAPO, CISPOLoss, GRPOLoss

from tests.objectives.models import PLAIN, acted, by_hand, make_actor, make_heads, make_ppo, make_rows, utterances_of
from tests.objectives.test_ppo import table_loss
from tests.objectives.test_torchrl_losses import change
from torchrl_lang import modules
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.objectives import PPOLoss

OF_TORCHRL = [
    (GRPOLoss, 0.2, "token_mean"),
    (GRPOLoss, 0.2, "prompt_mean"),
    (DAPO, (0.2, 0.28), "token_mean"),
    (CISPOLoss, 0.2, "token_mean"),
]


def moved_rows(noise=1.0):
    """Rows in which each writes, with log-probabilities around those of the actor."""
    rows, actor = acted(make_rows())[1:], make_actor()
    own = modules.row_log_prob(actor, rows).detach()
    rows["token_log_prob"] = torch.where(rows["agent_mask"], own + noise * (rows["token_log_prob"] - own), 0.0)
    return rows, actor


def gradients(actor, loss):
    return torch.autograd.grad(loss, list(actor.parameters()), retain_graph=True)


def torchrls(kind, actor, rows, **options):
    loss = kind(modules.RowTokenActor(actor), entropy_bonus=False, **options)
    loss.set_keys(action="tokens", sample_log_prob="token_log_prob")
    return loss(rows.clone().set("advantage", rows["advantage"].unsqueeze(-1))).loss_objective.sum()


@pytest.mark.parametrize(("kind", "clip", "aggregation"), OF_TORCHRL)
def test_the_terms_are_torchrls(kind, clip, aggregation):
    """CISPO's gradients where no ratio is clipped, the others' where many are."""
    is_cispo = kind is CISPOLoss
    rows, actor = moved_rows(0.05 if is_cispo else 1.0)
    theirs = torchrls(kind, actor, rows, clip_epsilon=clip, aggregation=aggregation)
    options = {"surrogate": "cispo" if is_cispo else "ppo", "clip_epsilon": clip, "aggregation": aggregation}
    out = PPOLoss(actor, **options, **PLAIN)(rows)
    assert (out["clip_fraction"] > 0.1) == (not is_cispo)
    torch.testing.assert_close(out["loss_objective"], theirs, rtol=0, atol=1e-6)
    mine = gradients(actor, out["loss_objective"])
    torch.testing.assert_close(mine, gradients(actor, theirs), rtol=0, atol=1e-6)


def test_clipped_tokens_keep_their_gradient_in_cispo():
    """As in the paper: the clipped ratio weighs the log-probability. TorchRL's value is the same, its gradient not."""
    rows, actor = moved_rows()
    theirs = torchrls(CISPOLoss, actor, rows, clip_epsilon=0.2)
    loss = PPOLoss(actor, surrogate="cispo", **PLAIN)(rows)["loss_objective"]
    torch.testing.assert_close(loss, theirs, rtol=0, atol=1e-6)
    log_prob, agent = modules.row_log_prob(actor, rows), rows["agent_mask"]
    weight = (log_prob.detach() - rows["token_log_prob"]).exp().clamp(0.8, 1.2)
    by_paper = gradients(actor, -(weight * rows["advantage"] * log_prob)[agent].mean())
    mine, its = gradients(actor, loss), gradients(actor, theirs)
    torch.testing.assert_close(mine, by_paper, rtol=1e-5, atol=1e-6)
    assert max((a - b).abs().max() for a, b in zip(mine, its, strict=True)) > 1e-3


# Of two rows of a vocabulary of two, every token at probability 1/2; the first has two turns of two and one token.
ROWS = by_hand([[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]], [[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]])
LOG_RHO = torch.tensor([[0.0, 0.1, 0.3, 0.0, -0.4, 0.0], [0.0, 0.2, 0.0, 0.0, 0.0, 0.0]])
LOG_RATIOS = {
    ("token", True): [0.1, 0.3, -0.4, 0.2],
    ("turn", True): [0.2, 0.2, -0.4, 0.2],
    ("turn", False): [0.4, 0.4, -0.4, 0.2],
    ("row", True): [0.0, 0.0, 0.0, 0.2],
    ("row", False): [0.0, 0.0, 0.0, 0.2],
}


def by_table(**options):
    rows = ROWS.clone().set("token_log_prob", torch.where(ROWS["agent_mask"], -LOG_RHO - torch.tensor(2.0).log(), 0.0))
    rows["advantage"] = torch.where(ROWS["agent_mask"], torch.tensor([[2.0], [-1.0]]), 0.0)
    return table_loss(torch.zeros(2, 6, 2), value_weight=0.0, clip_epsilon=(1.0, 9.0), **options)(rows)


@pytest.mark.parametrize(("ratio", "normalize"), LOG_RATIOS)
def test_ratios_by_hand(ratio, normalize):
    out = by_table(ratio=ratio, normalize_ratio=normalize, reduction="none")
    found = out["loss_objective"][:, :5][ROWS["agent_mask"][:, 1:]]
    expected = -torch.tensor(LOG_RATIOS[ratio, normalize]).exp() * torch.tensor([2.0, 2.0, 2.0, -1.0])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(out["kl_approx"], -torch.tensor([0.1, 0.3, -0.4, 0.2]).mean())


@pytest.mark.parametrize(
    ("aggregation", "mean"),
    {
        "token_mean": lambda a, b, c, d: (a + b + c + d) / 4,
        "turn_mean": lambda a, b, c, d: ((a + b) / 2 + c + d) / 3,
        "prompt_mean": lambda a, b, c, d: ((a + b + c) / 3 + d) / 2,
        10: lambda a, b, c, d: (a + b + c + d) / 10 / 2,
    }.items(),
)
def test_means_by_hand(aggregation, mean):
    terms = [-2 * 1.1051709, -2 * 1.3498588, -2 * 0.6703200, 1.2214028]
    found = by_table(aggregation=aggregation)["loss_objective"]
    torch.testing.assert_close(found, torch.tensor(mean(*terms)))
    entropy = by_table(aggregation=aggregation, entropy_weight=1.0)["loss_entropy"]
    torch.testing.assert_close(entropy, -torch.tensor(mean(*[0.6931472] * 4)))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("ratio", ["turn", "row"])
def test_gradients_by_finite_differences(ratio, normalize):
    """In float64; a ratio of the second row is clipped."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 2, generator=g, dtype=torch.float64)
    rows = ROWS.clone().set("advantage", torch.where(ROWS["agent_mask"], torch.tensor([[2.0], [1.0]]), 0.0).double())
    rows["token_log_prob"] = torch.where(ROWS["agent_mask"], torch.tensor([[-0.7], [-4.0]]), 0.0).double()
    options = {"ratio": ratio, "normalize_ratio": normalize, "clip_epsilon": (0.9, 3.0), "value_weight": 0.0}

    def objective(logits):
        return table_loss(logits.detach().clone(), **options)(rows)["loss_objective"]

    loss = table_loss(logits, **options)
    loss(rows)["loss_objective"].backward()
    found = loss.actor_network[0].module.logits.grad
    steps = 1e-5 * torch.eye(logits.numel(), dtype=torch.float64).reshape(-1, *logits.shape)
    expected = torch.stack([(objective(logits + step) - objective(logits - step)) / 2e-5 for step in steps])
    assert found[0].any()
    assert not found[1].any()
    torch.testing.assert_close(found, expected.detach().reshape(logits.shape), rtol=1e-6, atol=1e-8)


def test_a_masked_token_is_in_no_ratio_and_in_no_mean():
    rows = ROWS.clone().set("train_mask", torch.ones_like(ROWS["agent_mask"]))
    rows["train_mask"][0, 2] = False
    rows["token_log_prob"] = torch.where(ROWS["agent_mask"], -LOG_RHO - torch.tensor(2.0).log(), 0.0)
    rows["advantage"] = ROWS["agent_mask"].float()
    options = {"value_weight": 0.0, "clip_epsilon": (1.0, 9.0), "ratio": "row"}
    found = table_loss(torch.zeros(2, 6, 2), **options)(rows)["loss_objective"]
    torch.testing.assert_close(found, -(torch.tensor([-0.15, 0.2]).exp().mean()))  # (0.1 - 0.4) / 2


def test_a_product_over_a_turn_is_torchrls_ratio_of_an_utterance():
    """ClipPPOLoss on the steps of an utterance actor, on fresh data, where ratios are 1, and on old ones."""
    env = WordleEnv(["crane", "slate"], batch_size=[12], max_tries=3, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"vocab_size": 35, "layers": 1, "width": 32, "heads": 2, "max_length": env.row_length + 6}
        lm = modules.causal_lm(**shape, initializer_range=0.1)
        policy = modules.UtteranceActor(modules.language_actor(lm), env.tokenizer.control, 6, seed=0)
        theirs = ClipPPOLoss(policy, modules.row_value_module(policy, modules.ValueHead(32)), entropy_bonus=False)
    steps = env.rollout(6, policy, break_when_any_done=False)
    steps["advantage"] = steps["value_target"] = torch.randn(12, 6, 1, generator=torch.Generator().manual_seed(0))
    given = steps.clone().set("advantage", steps["advantage"].expand_as(steps["token_log_prob"]).contiguous())
    rows = rows_from_rollout(given, unfinished="truncate", carry=["token_log_prob", "advantage"])
    ours = PPOLoss(policy, ratio="turn", normalize_ratio=False, **PLAIN)
    for ratio in ("turn", "row"):
        fresh = PPOLoss(policy, ratio=ratio, **PLAIN)(rows)
        torch.testing.assert_close((fresh["ESS"], fresh["kl_approx"]), (torch.tensor(1.0), torch.tensor(0.0)))
    torch.testing.assert_close(ours(rows)["loss_objective"], -steps["advantage"].mean(), rtol=1e-4, atol=1e-5)
    change(policy)
    mine, its = ours(rows), theirs(steps)["loss_objective"]
    assert 0 < mine["clip_fraction"] < 1
    torch.testing.assert_close(mine["loss_objective"], its, rtol=1e-4, atol=1e-5)
    compared = (gradients(policy, value) for value in (mine["loss_objective"], its))
    torch.testing.assert_close(*compared, rtol=1e-3, atol=1e-5)


def test_a_loss_without_values():
    rows, actor = moved_rows()
    loss = PPOLoss(actor, **PLAIN)
    out, with_values = loss(rows.exclude("value_target")), PPOLoss(actor, make_heads()[1], **PLAIN)(rows)
    assert (out["loss_critic"], loss.value_weight) == (0, 0)
    torch.testing.assert_close(out["loss_objective"], with_values["loss_objective"])
    torch.testing.assert_close(PPOLoss(actor)(rows)["loss_objective"], out["loss_objective"])  # not standardised
    assert loss.critic_network_params is loss.value_network_params is None
    for call in (loss.estimate, loss.value_estimator):
        with pytest.raises(ValueError, match="has no value_network"):
            call(rows)
    given = {"turn_values": True, "lmbda": 0.5, "turn_gamma": 1.0, "value_clip": 0.2, "detach_value": True}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"^{name}: about values, so give a value_network"):
            PPOLoss(actor, **{name: value})
    PPOLoss(actor, value_weight=None, value_clip=False, lmbda=0.95)


def test_one_value_a_turn():
    """Advantages are the same over a turn, and the critic learns at its first decision only."""
    rows = acted(make_rows(n=12, seed=3))
    loss = make_ppo(turn_values=True, turn_gamma=0.9, turn_lmbda=0.8, gamma=0.3, lmbda=0.1, reduction="none", **PLAIN)
    loss.estimate(rows)
    critic, plain = loss(rows)["loss_critic"], make_ppo(reduction="none", **PLAIN)(rows)["loss_critic"]
    firsts = torch.zeros_like(rows["agent_mask"])
    for row in range(12):
        found, rest = utterances_of(rows, row)
        agent = rows["agent_mask"][row].nonzero().flatten().tolist()
        for turn in [*found, [p for p in agent if p > rest]]:
            if turn:
                firsts[row, turn[0] - 1] = True
                assert rows["advantage"][row, turn].unique().numel() == 1
    assert firsts.sum() < rows["agent_mask"].sum()
    torch.testing.assert_close(critic, torch.where(firsts, plain, 0.0))
    mean = make_ppo(turn_values=True, **PLAIN)(rows)["loss_critic"]
    torch.testing.assert_close(mean, critic.sum() / firsts.sum())


def test_a_constant_length_divides_by_all_rows_also_those_that_do_not_train():
    rows, actor = moved_rows()
    rows["train_mask"] = rows["agent_mask"] & (torch.arange(len(rows)) > 0)[:, None]
    one, total = (PPOLoss(actor, aggregation=7, reduction=each, **PLAIN)(rows) for each in (None, "sum"))
    torch.testing.assert_close(one["loss_objective"], total["loss_objective"] / 7 / len(rows))


@pytest.mark.parametrize("surrogate", ["ppo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_product_of_ratios_that_would_overflow_has_finite_gradients(surrogate, advantage):
    """Where it is clipped, it has the value of the bound; elsewhere it is finite, and so are all gradients."""
    rows = ROWS.clone().set("token_log_prob", torch.where(ROWS["agent_mask"], -60.0, 0.0))  # exp(178) in the first row
    rows["advantage"] = torch.where(ROWS["agent_mask"], advantage, 0.0)
    options = {"ratio": "row", "normalize_ratio": False, "surrogate": surrogate, "value_weight": 0.0}
    logits = torch.zeros(2, 6, 2)
    loss = table_loss(logits, clip_epsilon=(0.2, 0.3), **options)
    out = loss(rows)["loss_objective"]
    out.backward()
    assert out.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in loss.parameters())
    if advantage >= 0 or surrogate == "cispo":
        torch.testing.assert_close(out, torch.tensor(-1.3 * advantage))


def test_a_penalty_is_in_the_rewards_or_in_the_loss():
    rows, actor = moved_rows()
    rows["raw_reward"], rows["ref_log_prob"] = rows["token_reward"], rows["token_log_prob"]
    PPOLoss(actor)(rows)
    with pytest.raises(
        ValueError, match="The rows have 'raw_reward' and 'ref_log_prob': there is a penalty of log-ratios"
    ):
        PPOLoss(actor, kl_weight=0.1)(rows)
    assert PPOLoss(actor, kl_weight=0.1)(rows.exclude("raw_reward"))["loss_kl"] > 0
