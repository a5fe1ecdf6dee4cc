"""PPO over rows: its terms by hand, against TorchRL's, and on tasks whose best is known."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, assert_allclose_td
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torchrl.objectives import ClipPPOLoss, ValueEstimators
from torchrl.objectives.value import GAE, MultiAgentGAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from torchrl.objectives.value.functional import generalized_advantage_estimate

from tests.objectives import models
from tests.objectives import test_contract as contract
from tests.objectives.models import CONTROL, PLAIN, T, acted, by_hand, make_actor, make_all_terms, make_ppo, make_rows
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, corridor_value
from torchrl_lang.functional import decision_mask
from torchrl_lang.functional.decisions import find_decisions
from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.training import adamw, total_loss
from torchrl_lang.transforms import AdaptiveKLController, frozen_copy


@pytest.fixture
def rows():
    return models.rows_for("ppo")


def test_missing_entries_say_where_they_come_from(rows):
    loss = make_all_terms()
    for key, advice in {
        "advantage": r"loss\.estimate\(rows\)",
        "value_target": r"loss\.estimate\(rows\)",
        "token_log_prob": r"carry=\['token_log_prob'\]",
        "ref_log_prob": "ReferenceModelLogProbTransform",
    }.items():
        with pytest.raises(KeyError, match=f"{key}.*{advice}"):
            loss(rows.exclude(key))
    make_ppo()(rows.exclude("ref_log_prob", "state_value"))
    with pytest.raises(KeyError, match=r"RowAdvantage\.inv\(rows\) or ArCHerLoss\.estimate\(rows\)"):
        PPOLoss(make_actor())(rows.exclude("advantage"))


# -- the terms ---------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """Logits by hand, for every position of every row."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens):
        return self.logits, torch.zeros(*tokens.shape, 2)


def table_loss(logits, value=0.0, **options):
    trunk = TensorDictModule(Table(logits), in_keys=["tokens"], out_keys=["logits", "state"])
    prob = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next"], distribution_class=Categorical)
    head = nn.Linear(2, 1)
    nn.init.constant_(head.bias, value)
    value_network = TensorDictModule(head, in_keys=["state"], out_keys=["state_value"])
    return PPOLoss(ProbabilisticTensorDictSequential(trunk, prob), value_network, **(PLAIN | options))


def one_decision_each(tokens, **entries):
    """Rows ``<s> token </s>``, with numbers at the token."""
    n = len(tokens)
    around = torch.full((n,), 3), tokens, torch.full((n,), 2)
    rows = by_hand(torch.stack(around, -1), torch.tensor([False, True, False]).expand(n, 3))
    return rows.update({key: nn.functional.pad(value[:, None], (1, 1)) for key, value in entries.items()})


@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_the_divergence_has_its_exact_gradient(estimator):
    """Every token of a vocabulary of five, weighed by the policy that acted, which is not the one that learns."""
    g = torch.Generator().manual_seed(0)
    logits, acting, ref = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(3))
    acting = acting.log_softmax(-1)
    options = {"kl_weight": 0.7, "kl_estimator": estimator, "value_weight": 0.0, "reduction": "none"}
    if estimator == "exact":
        options["reference"] = frozen_copy(table_loss(ref.expand(5, 3, 5).clone()).actor_network)
    loss = table_loss(logits.expand(5, 3, 5).clone(), **options)
    entries = {"token_log_prob": acting, "ref_log_prob": ref.log_softmax(-1), "advantage": torch.zeros(5).double()}
    rows = one_decision_each(torch.arange(5), **entries)
    value = (acting.exp() * loss(rows)["loss_kl"][:, 0]).sum()
    value.backward()
    mine = logits.clone().requires_grad_()
    exact = 0.7 * kl_divergence(Categorical(logits=mine), Categorical(logits=ref))
    exact.backward()
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(loss.actor_network[0].module.logits.grad[:, 0].sum(0), mine.grad)


def test_tokens_of_an_engine_weigh_by_its_error_up_to_a_limit(rows):
    error = torch.linspace(-1, 1, T).expand(rows["tokens"].shape)
    rows["engine_log_prob"] = rows["token_log_prob"] - error  # of tokens, and losses are at the decisions before them
    found, plain = (make_ppo(reduction="none", max_engine_weight=w)(rows)["loss_objective"] for w in (1.5, None))
    torch.testing.assert_close(found, plain * error.exp().clamp(max=1.5).roll(-1, -1))
    assert plain.any()
    with pytest.raises(KeyError, match=r"engine_log_prob.*what an inference engine reported"):
        make_ppo(max_engine_weight=1.5)(rows.exclude("engine_log_prob"))


def test_tokens_that_filters_take_out_leave_finite_gradients():
    """What was said is no longer among the two best: the ratio is 0, and nothing is infinite but the log-ratio."""
    loss = make_all_terms(actor=UtteranceActor(make_actor(), CONTROL, 4, forbidden=(), top_k=2))
    out = loss(acted(make_rows()))
    assert out["kl_approx"].isinf()
    models.total(out).backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)
    assert all(value.isfinite() for value in models.losses_of(out).values())


def test_a_controller_sets_the_weight_and_the_metric_feeds_it(rows):
    controller = AdaptiveKLController(0.2, target=1.0, horizon=10)
    loss = make_all_terms(kl_weight=controller)
    out = loss(rows)
    torch.testing.assert_close(out["loss_kl"], make_all_terms(kl_weight=0.2)(rows)["loss_kl"])
    n = rows["agent_mask"].any(-1).sum()
    torch.testing.assert_close(out["kl"], out["loss_kl"].detach() / 0.2 * rows["agent_mask"].sum() / n)
    controller.update(5.0, n=int(n))
    changed = loss(rows)["loss_kl"]
    torch.testing.assert_close(changed, out["loss_kl"] * controller.coef / 0.2)
    assert controller.coef > 0.2
    assert any("kl_controller" in key for key in loss.state_dict())


# -- on fresh data -----------------------------------------------------------------------------------------------------


def corridor(n=64, **options):
    return CorridorEnv(4, start=0, max_turns=8, batch_size=[n], seed=0, **options)


def speaker(env, seed=0, spread=0.3, **options):
    """An utterance actor; the larger the spread of its weights, the further from uniform what it says."""
    torch.manual_seed(seed)
    vocabulary = env.tokenizer.vocab_size
    lm = causal_lm(vocab_size=vocabulary, layers=1, width=32, heads=2, max_length=48, initializer_range=spread)
    return UtteranceActor(language_actor(lm), env.tokenizer.control, env.action_length, seed=seed, **options)


def play(env, policy, turns=8):
    rollout = env.rollout(turns, policy, break_when_any_done=False)
    return rows_from_rollout(rollout, unfinished="truncate", carry=["token_log_prob"])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"temperature": 1.3, "top_p": 0.8}], ids=str)
def test_ratios_are_one_on_fresh_data(options):
    """At every decision, the certain last slot among them; and they are not where the rule is another one."""
    env = corridor()
    policy = speaker(env, **options)
    rows = play(env, policy)
    decision = decision_mask(rows["agent_mask"])
    rows["value_target"] = torch.zeros_like(rows["token_log_prob"])
    for sign in (1.0, -1.0):
        rows["advantage"] = torch.full_like(rows["token_log_prob"], sign)
        ratio = PPOLoss(policy, value_module(ValueHead(32)), reduction="none", **PLAIN)(rows)["loss_objective"]
        torch.testing.assert_close(ratio[decision], -rows["advantage"][decision], rtol=0, atol=1e-5)
        bare = PPOLoss(policy.decoder.actor, value_module(ValueHead(32)), reduction="none", **PLAIN)(rows)
    assert (bare["loss_objective"][decision] - 1).abs().max() > 0.1


def test_nothing_is_left_to_chance_in_the_last_slot():
    """There the end is certain: no entropy, and no divergence from a model that would have said something else."""
    env = corridor()
    policy, other = speaker(env), speaker(env, seed=1)
    rows = play(env, policy)
    rows["advantage"] = rows["value_target"] = torch.zeros_like(rows["token_log_prob"])
    options = {"kl_weight": 1.0, "kl_estimator": "exact", "reference": frozen_copy(other), "entropy_weight": 1.0}
    out = PPOLoss(policy, value_module(ValueHead(32)), reduction="none", **options)(rows)
    decision = decision_mask(rows["agent_mask"])
    second = decision & rows["agent_mask"]  # utterances have two slots
    assert second.sum() > 50
    for key in ("loss_entropy", "loss_kl"):
        assert not out[key][second].any()
        assert out[key][decision & ~second].abs().min() > 0


# -- estimates ---------------------------------------------------------------------------------------------------------


def test_estimates_are_gae_on_the_flattened_tokens():
    rows = make_rows(n=12, seed=3)
    clocks = {"gamma": 0.9, "lmbda": 0.8, "turn_gamma": 0.9, "turn_lmbda": 0.8}
    loss = make_ppo(**clocks)
    same = loss.estimate(rows)
    assert same is rows
    actor, (_, head) = make_actor(), models.make_heads()
    with torch.no_grad():
        value = head.module(actor[0](rows.clone())["hidden"]).squeeze(-1)
    agent = rows["agent_mask"]
    found = find_decisions(rows["attention_mask"], agent)
    row, place = found.row[found.state], found.position[found.state]
    v = value[found.row, found.position]
    ended = found.last & rows["terminated"][row, 0]
    reward = rows["token_reward"][row, place + 1]
    entries = (v[found.state], v[found.state + 1], reward, found.last, ended)
    advantage, target = generalized_advantage_estimate(0.9, 0.8, *(entry[:, None] for entry in entries))
    for key, expected in (("advantage", advantage), ("value_target", target), ("state_value", v[found.state, None])):
        torch.testing.assert_close(rows[key][row, place + 1], expected.squeeze(-1), rtol=1e-5, atol=1e-5)
        assert not rows[key][~agent].any()
        assert not rows[key].requires_grad


def test_estimates_apply_no_dropout_leave_modes_alone_and_read_rewards_at_the_agents_tokens_only():
    loss, rows = make_ppo().train(), make_rows()
    for module in loss.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    with contract.rewards_of_others():
        found = [loss.estimate(given) for given in (rows.clone(), contract.with_rewards_of_others(rows))]
    assert_allclose_td(*(each.exclude("token_reward") for each in found), rtol=0, atol=0)
    assert all(module.training for module in loss.modules())


@pytest.mark.parametrize("ends", [{}, {"end_of_action": 1}])
def test_the_end_of_action_tells_turns_apart_where_nobody_answers(ends):
    rows = by_hand([[4, 7, 1, 7, 1, 5]], [[0, 1, 1, 1, 1, 0]], [[0.0, 0.0, 1.0, 0.0, 2.0, 0.0]])
    clocks = {"gamma": 1.0, "lmbda": 1.0, "turn_gamma": 0.5, "turn_lmbda": 1.0}
    expected = [0, 2, 2, 2, 2, 0] if ends else [0, 3, 3, 2, 2, 0]
    got = make_ppo(**clocks, **ends).estimate(rows.clone())["value_target"]
    assert got.tolist() == [expected]
    if ends:  # an utterance actor knows it
        actor = UtteranceActor(make_actor(), CONTROL, 4, forbidden=())
        assert make_ppo(actor=actor, **clocks).estimate(rows)["value_target"].tolist() == [expected]


def test_values_of_acting_are_not_computed_again():
    """The same estimates, and of the rows only those are read that are not over."""
    rows = make_rows(n=8, seed=3)
    loss = make_ppo()
    expected = loss.estimate(rows.clone())
    seen = []
    loss.actor_network[0].register_forward_hook(lambda _, args, out: seen.append(len(out)))
    carried = rows.clone().set("state_value", expected["state_value"])
    got = loss.estimate(carried, reuse_values=True)
    assert seen == [4]
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(got[key], expected[key], rtol=1e-5, atol=1e-6)
    over = carried.clone().set("terminated", torch.ones(8, 1, dtype=torch.bool))
    loss.estimate(over, reuse_values=True)
    assert seen == [4]
    torch.testing.assert_close(over["advantage"], loss.estimate(over.clone())["advantage"], rtol=1e-5, atol=1e-6)
    with pytest.raises(KeyError, match='"state_value" not found'):
        loss.estimate(rows, reuse_values=True)


def test_a_certain_slot_is_worth_what_follows_it():
    """By hand: two turns of two tokens, the second of each certain; rewards 1 and 2; the row is cut off, worth 5."""
    value, reward = torch.tensor([[0.0, 3.0, torch.nan, 0.0, 4.0, torch.nan]]), [[0.0, 0.0, 1.0, 0.0, 0.0, 2.0]]
    rows = by_hand([[3, 1, 2, 0, 1, 2]], [[0, 1, 1, 0, 1, 1]], reward, terminated=False, state_value=value)
    clocks = {"gamma": 1.0, "lmbda": 1.0, "turn_gamma": 0.5, "turn_lmbda": 0.0}
    loss = table_loss(torch.zeros(1, 6, 4), value=5.0, end_of_action=2, **clocks)
    out = loss.estimate(rows, reuse_values=True)
    # The certain slots: 1 + 0.5 * 4 = 3, and 2 + 0.5 * 5 = 4.5. The tokens before see through them.
    torch.testing.assert_close(out["state_value"], torch.tensor([[0.0, 3.0, 3.0, 0.0, 4.0, 4.5]]))
    torch.testing.assert_close(out["advantage"], torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.5, 0.0]]))
    torch.testing.assert_close(out["value_target"], torch.tensor([[0.0, 3.0, 3.0, 0.0, 4.5, 4.5]]))
    mean = table_loss(torch.zeros(1, 6, 4), value=5.0, end_of_action=2, bootstrap="mean", **clocks)
    out = mean.estimate(rows.set("state_value", value), reuse_values=True)  # of the second turn (4 + 4.5) / 2
    torch.testing.assert_close(out["value_target"], torch.tensor([[0.0, 3.125, 3.125, 0.0, 4.5, 4.5]]))


def test_estimates_take_any_batch_shape_other_keys_and_no_rows():
    rows = make_rows(n=6)
    expected = make_ppo().estimate(rows.clone())["advantage"]
    shaped = make_ppo().estimate(rows.clone().reshape(2, 3).set("tokens", rows["tokens"].reshape(2, 3, -1).int()))
    torch.testing.assert_close(shaped["advantage"].reshape(6, T), expected)
    loss = make_ppo()
    loss.set_keys(advantage=("ppo", "advantage"), token_reward="pay")
    moved = loss.estimate(rows.clone().rename_key_("token_reward", "pay"))
    torch.testing.assert_close(moved["ppo", "advantage"], expected)
    with pytest.raises(KeyError, match="terminated"):
        make_ppo().estimate(rows.exclude("terminated"))
    for reuse_values in (False, True):
        none = make_ppo().estimate(rows[:0], reuse_values=reuse_values)
        assert all(none[key].shape == (0, T) for key in ("advantage", "value_target", "state_value"))


def one_clock(lmbda, **options):
    return make_ppo(gamma=0.9, lmbda=lmbda, turn_gamma=0.9, turn_lmbda=lmbda, **options)


@pytest.mark.parametrize("kind", [GAE, TDLambdaEstimator, TD0Estimator, TD1Estimator])
def test_torchrls_estimators_are_ours_with_one_clock(kind):
    """A class, and an instance with a network that is not run; by estimate, by the module, as tensors."""
    rows, loss, lmbda = make_rows(n=12, seed=3), make_ppo(), {TD0Estimator: 0, TD1Estimator: 1}.get(kind, 0.8)
    expected = one_clock(lmbda).estimate(rows.clone())
    given = {"gamma": 0.9, **({"lmbda": lmbda} if 0 < lmbda < 1 else {})}
    for built in (kind, kind(**given, value_network=nn.Identity())):
        options = {} if isinstance(built, nn.Module) else {"device": "cpu", **given}
        assert loss.make_value_estimator(built, **options) is loss
        assert (loss.value_type, loss.state_dict().keys()) == (kind, make_ppo().state_dict().keys())
        own = {"params": loss.critic_network_params, "target_params": loss.target_critic_network_params}
        assert_allclose_td(loss.value_estimator(rows.clone(), **own), expected, rtol=1e-6, atol=1e-6)
        found = loss.value_estimator(*(rows[key] for key in loss.value_estimator.in_keys))
        torch.testing.assert_close(found, tuple(expected[key] for key in loss.value_estimator.out_keys))
    certain = rows.clone().set("state_value", expected["state_value"].masked_fill(rows["tokens"] % 3 == 0, torch.nan))
    found, expected = (each.estimate(certain.clone(), reuse_values=True) for each in (loss, one_clock(lmbda)))
    assert_allclose_td(found, expected, rtol=1e-6, atol=1e-6)
    none = {key: torch.zeros_like(rows[key]) for key in ("agent_mask", "token_reward")}
    assert not loss.estimate(rows.clone().update(none))["advantage"].any()
    again = loss.make_value_estimator("gae").estimate(rows.clone())
    assert_allclose_td(again, make_ppo().estimate(rows), rtol=0, atol=0)


def test_average_gae_is_over_all_decisions_of_the_batch():
    """Ours and that of an instance, which has no padding to count; within the groups of rows where it has a key."""
    rows = make_rows(n=12, seed=3).set("task", torch.arange(12)[:, None] % 2)
    plain, agent = one_clock(0.8).estimate(rows.clone()), rows["agent_mask"]
    theirs = {"gamma": 0.9, "lmbda": 0.8, "value_network": None, "average_gae": True, "time_dim": 0}
    for loss in (one_clock(0.8).make_value_estimator(average_gae=True), make_ppo().make_value_estimator(GAE(**theirs))):
        found, raw = loss.estimate(rows.clone()), plain["advantage"][agent]
        torch.testing.assert_close(found["advantage"][agent], (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["value_target"], plain["value_target"])
    found = make_ppo().make_value_estimator(GAE(**theirs, group_key="task")).estimate(rows.clone())["advantage"]
    for task in range(2):
        raw = plain["advantage"][of_task := agent & (rows["task"] == task)]
        torch.testing.assert_close(found[of_task], (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)
    for kind in (ValueEstimators.GAE, ValueEstimators.TD0):
        assert not one_clock(0.8).make_value_estimator(average_gae=True).make_value_estimator(kind).average_gae
    with pytest.raises(TypeError, match="average_gae"):
        make_ppo().make_value_estimator(ValueEstimators.TD0, average_gae=True)


def test_estimators_that_need_more_than_values_are_refused():
    loss, given = make_ppo(), {"gamma": 0.9, "lmbda": 0.8, "value_network": None}
    for kind, needs in ((VTrace, "VTrace: it needs log-prob"), (MultiAgentGAE(**given), "GAE: it needs a dimension")):
        with pytest.raises(NotImplementedError, match=needs):
            loss.make_value_estimator(kind)
    for option in ("differentiable", "auto_reset_env"):
        with pytest.raises(NotImplementedError, match=f"PPOLoss has no {option}=True"):
            loss.make_value_estimator(GAE(**given, **{option: True}))
    with pytest.raises(TypeError, match=r"got \['gamma'\] as well"):
        loss.make_value_estimator(GAE(**given), gamma=0.5)
    with pytest.raises(NotImplementedError, match="its own value_network"):
        loss.value_estimator(make_rows(), params=make_ppo().critic_network_params)


# -- TorchRL's loss on the flattened tokens ----------------------------------------------------------------------------


class AtLast(nn.Module):
    """What a causal trunk makes of the last real token of each prefix."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk

    def forward(self, tokens, last):
        return self.trunk(tokens)[torch.arange(len(tokens)), last]


THEIR_NAMES = {"entropy_coeff": 0.1, "critic_coeff": 0.5, "loss_critic_type": "l2", "clip_epsilon": 0.2}


@pytest.mark.parametrize("options", [{}, {"clip_value": 0.2}, {"clip_epsilon": (0.1, 0.3)}], ids=str)
def test_torchrls_loss_on_the_flattened_tokens(options):
    """The same numbers and gradients of all terms by the same options, with one prefix for each token."""
    clocks, options = {"gamma": 0.9, "lmbda": 0.8, "turn_gamma": 0.9, "turn_lmbda": 0.8}, THEIR_NAMES | options
    loss = make_ppo(**clocks, **PLAIN, **options)
    rows = acted(make_rows()).exclude("advantage", "value_target", "state_value")
    loss.estimate(rows)
    if "clip_value" in options:
        rows["state_value"] = rows["state_value"] + torch.where(rows["agent_mask"], 0.3 * rows["advantage"], 0.0)
    actor, (_, head) = make_actor(), models.make_heads()
    hidden = TensorDictModule(AtLast(actor[0].module), in_keys=["tokens", "last"], out_keys=["hidden"])
    sampled = {"distribution_class": Categorical, "return_log_prob": True}
    prob = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], **sampled)
    theirs = ClipPPOLoss(ProbabilisticTensorDictSequential(hidden, actor[1], prob), head, **options)
    row, last = decision_mask(rows["agent_mask"]).nonzero(as_tuple=True)
    # TorchRL counts from the value that the tensordict holds, and its critic writes over the key in a copy of it.
    flat = {key: rows[key][row, last + 1].unsqueeze(-1) for key in ("advantage", "value_target", "state_value")}
    names = {"tokens": "action", "token_log_prob": "action_log_prob"}
    flat |= {name: rows[key][row, last + 1] for key, name in names.items()}
    steps = TensorDict(tokens=rows["tokens"][row], last=last, **flat, batch_size=[len(row)])
    mine, its = loss(rows), theirs(steps)
    for key in ("loss_objective", "loss_critic", "loss_entropy", "clip_fraction", "kl_approx", "entropy"):
        torch.testing.assert_close(mine[key], its[key], rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    torch.testing.assert_close(mine["ESS"], its["ESS"].squeeze(), rtol=1e-5, atol=1e-6)
    assert 0 < mine["clip_fraction"] < 1
    models.total(mine).backward()
    (its["loss_objective"] + its["loss_critic"] + its["loss_entropy"]).backward()
    pairs = [*zip(loss.actor_network.parameters(), actor.parameters(), strict=True)]
    pairs += zip(loss.value_network.parameters(), theirs.critic_network_params.parameters(), strict=True)
    assert all((left.grad is None) == (right.grad is None) for left, right in pairs)
    compared = [(left.grad, right.grad) for left, right in pairs if left.grad is not None and left.grad.any()]
    assert len(compared) > 10
    for left, right in compared:
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_options_by_torchrls_names(rows):
    """Each is the option of ours, and numbers may have a last dimension of one."""
    of_torchrl, ours = make_ppo(**THEIR_NAMES, **PLAIN), make_ppo(entropy_weight=0.1, loss_critic_type="l2", **PLAIN)
    tall = {key: rows[key].unsqueeze(-1) for key in ("advantage", "value_target", "token_log_prob")}
    contract.assert_same(of_torchrl(rows.clone().update(tall)), ours(rows), rtol=0, atol=0)
    assert make_ppo(entropy_bonus=True).entropy_weight == 0.01
    assert make_ppo(entropy_bonus=False, entropy_coeff=0.1).entropy_weight == make_ppo().entropy_weight == 0
    assert "value_target" not in make_ppo(critic_coeff=None).in_keys
    assert make_ppo(separate_losses=True).detach_value
    assert make_ppo(clip_value=True, clip_epsilon=0.05).value_clip == 0.05
    assert make_ppo(clip_value=False).value_clip is None
    with pytest.raises(TypeError, match=r"PPOLoss has no argument 'max_importance_ratio'\. If .*torchrl_llm\.md has"):
        make_ppo(max_importance_ratio=2.0)
    by_old_names = PPOLoss(actor=of_torchrl.actor_network, critic=of_torchrl.value_network)
    assert by_old_names.critic_network is of_torchrl.value_network
    with pytest.raises(TypeError, match="critic_coeff is TorchRL's name of value_weight: give PPOLoss one of them"):
        make_ppo(critic_coeff=1.0, value_weight=1.0)


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_finds_the_straight_walk():
    env = corridor(64)
    policy = speaker(env, spread=0.1)
    loss = PPOLoss(policy, value_module(ValueHead(32)), entropy_weight=0.01)
    optimizer = adamw(loss, 7e-3, weight_decay=0.0)
    returns = []
    for _ in range(20):
        rows = loss.estimate(play(env, policy))
        returns.append(float(rows["token_reward"].sum(-1).mean()))
        for _ in range(4):
            out = loss(rows)
            optimizer.zero_grad()
            total_loss(out).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimizer.step()
    best = float(corridor_value(3))
    assert returns[0] < best - 3
    assert sum(returns[-5:]) / 5 > best - 0.15
    assert out["explained_variance"] > 0.5
