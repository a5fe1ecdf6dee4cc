"""PPO over rows: what every loss must do, its terms by hand, against TorchRL's, and on tasks whose best is known."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, assert_allclose_td
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate
from transformers import GPT2Model

from tests.letters import REWARD, Letters, first_token
from tests.modules.toys import without_blocks
from tests.objectives import test_contract as contract
from tests.objectives.conftest import VOCAB, WIDTH, T, losses_of, make_actor, make_heads, make_rows, total
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, corridor_value
from torchrl_lang.functional import decision_mask, find_decisions, shift_left
from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, row_log_prob, value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.schema import ControlTokens
from torchrl_lang.training import adamw, total_loss
from torchrl_lang.transforms import (
    AdaptiveKLController,
    ReferenceModelLogProbTransform,
    RowReference,
    adapters_off,
    frozen_copy,
)

CONTROL = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4, end_of_dialogue=5)
PLAIN = {"normalize_advantage": False}  # advantages standardised over a batch are no sum over its rows


def utterance_actor(seed=0, **options):
    return UtteranceActor(make_actor(seed), CONTROL, 4, **({"forbidden": ()} | options))


def make_ppo(actor=None, **options):
    return PPOLoss(make_actor() if actor is None else actor, make_heads()[1], **options)


def make_all_terms(**options):
    return make_ppo(**(PLAIN | {"entropy_weight": 0.1, "kl_weight": 0.3, "value_clip": 0.2} | options))


def make_exact(seed=7, **options):
    reference = frozen_copy(make_actor(seed))
    options = {"kl_weight": 0.3, "kl_estimator": "exact", "reference": reference, "entropy_weight": 0.1} | options
    return make_ppo(**(PLAIN | options))


LOSSES = {
    "all-terms": make_all_terms,
    "exact": make_exact,
    "in-pieces": lambda **options: make_exact(logits_chunk=5, **options),
    "utterance": lambda **options: make_all_terms(actor=utterance_actor(temperature=0.7), **options),
    "own-trunk": lambda **options: make_all_terms(
        value_trunk=make_actor(seed=3)[0], kl_estimator="k3", loss_critic_type="smooth_l1", **options
    ),
}


def acted(rows, seed=4):
    """The rows with all that PPO reads, so that some ratios are clipped and some are not."""
    g = torch.Generator().manual_seed(seed)
    agent = rows["agent_mask"]
    with torch.no_grad():
        log_prob = row_log_prob(make_actor(), rows)
    noise = {"token_log_prob": 0.3, "ref_log_prob": 0.5}
    entries = {key: log_prob + scale * torch.randn(agent.shape, generator=g) for key, scale in noise.items()}
    entries |= {key: torch.randn(agent.shape, generator=g) for key in ("advantage", "value_target", "state_value")}
    return rows.clone().update({key: torch.where(agent, value, 0.0) for key, value in entries.items()})


@pytest.fixture
def rows():
    return acted(make_rows())


@pytest.fixture(params=sorted(LOSSES))
def make_loss(request):
    return LOSSES[request.param]


# -- what every loss must do: the contract suite, on rows that were acted and estimated --------------------------------


@pytest.mark.parametrize("name", [*contract.ON_FURTHER_COLUMNS, "test_gradient_is_that_of_finite_differences"])
def test_contract(name, make_loss, rows):
    getattr(contract, name)(make_loss, rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GPT2Model decodes without a key-value cache:UserWarning")  # it is replaced below
@pytest.mark.parametrize("name", ["in-pieces", "utterance"])
def test_compile_gives_the_same_losses(name, rows, monkeypatch):
    monkeypatch.setattr(GPT2Model, "forward", without_blocks)
    contract.assert_compiles(LOSSES[name](), rows)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_any_batch_shape(make_loss, rows, shape):
    contract.test_any_batch_shape(make_loss, rows, shape)


def test_padding_changes_nothing(make_loss, rows):
    """Wider rows, and anything at all on the padding and on the environment's tokens."""
    loss = make_loss()
    agent = rows["agent_mask"]
    wide = {key: nn.functional.pad(value, (0, 5)) for key, value in rows.items() if key != "terminated"}
    for key in ("token_log_prob", "ref_log_prob", "advantage", "value_target", "state_value"):
        wide[key] = torch.where(wide["agent_mask"], wide[key], torch.nan)
    wide["tokens"] = torch.where(wide["attention_mask"], wide["tokens"], 9)
    assert not agent.all()
    contract.assert_same(loss(TensorDict(wide, batch_size=[6])), loss(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_mask_takes_rows_out(make_loss, rows, reduction):
    """In values, in gradients and in metrics, whatever the masked rows hold."""
    loss = make_loss(reduction=reduction, normalize_advantage=True)
    kept = torch.tensor([True, True, False, True, False, True])
    masked = rows.clone().set(("collector", "mask"), kept)
    masked["token_log_prob"][~kept] = -1e4  # its ratio is infinite
    masked["advantage"][~kept] = 1e6
    masked["value_target"][~kept] = 1e6
    expected = loss(rows[kept])
    contract.assert_same(loss(masked), expected, rtol=1e-4, atol=1e-5)
    gradients = contract.gradients(loss, rows[kept])
    contract.assert_same(contract.gradients(loss, masked), gradients, rtol=1e-4, atol=1e-5)


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
    rows = TensorDict(
        tokens=torch.stack([torch.full((n,), 3), tokens, torch.full((n,), 2)], -1),
        attention_mask=torch.ones(n, 3, dtype=torch.bool),
        agent_mask=torch.tensor([False, True, False]).expand(n, 3),
        batch_size=[n],
    )
    return rows.update({key: nn.functional.pad(value[:, None], (1, 1)) for key, value in entries.items()})


def test_terms_by_hand():
    """Four decisions with ratios 1.5, 1.5, 0.5, 0.5 and advantages 1, -1, 1, -1, clipped at 1.2 and 0.8.

    ``min``: 1.2, -1.5, 0.5, -0.8, in sum -0.6. The value is 1, was 0 and should be 0, 0.5, 2 and 4; it may move by 0.5.
    """
    probability = torch.tensor([0.3, 0.3, 0.1, 0.1])
    logits = torch.stack([probability, 1 - probability], -1).log()[:, None].expand(4, 3, 2).clone()
    rows = one_decision_each(
        torch.zeros(4, dtype=torch.int64),
        token_log_prob=torch.full((4,), 0.2).log(),
        advantage=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        value_target=torch.tensor([0.0, 0.5, 2.0, 4.0]),
        state_value=torch.zeros(4),
        ref_log_prob=torch.full((4,), 0.1).log(),
    )
    options = {"value_clip": 0.5, "entropy_weight": 0.1, "kl_weight": 0.5, "reduction": "sum"}
    out = table_loss(logits, value=1.0, **options)(rows)
    entropy = -(logits[:, 0].exp() * logits[:, 0]).sum(-1)
    kl = torch.tensor([1.5, 1.5, 0.5, 0.5]) * (probability / 0.1).log()
    expected = {
        "loss_objective": torch.tensor(0.6),
        "loss_critic": torch.tensor(0.5 * (1.0 + 0.25 + 2.25 + 12.25)),  # of 1 and 0.5 the one that is further off
        "loss_entropy": -0.1 * entropy.sum(),
        "loss_kl": 0.5 * kl.sum(),
        "kl_approx": -torch.tensor([1.5, 1.5, 0.5, 0.5]).log().mean(),
        "clip_fraction": torch.tensor(1.0),
        "ESS": torch.tensor(4.0**2 / (4 * 5.0)),
        "entropy": entropy.mean(),
        "explained_variance": torch.tensor(0.0),
        "kl": kl.mean(),
    }
    torch.testing.assert_close(dict(out.items()), expected)


def test_clipping_stops_the_gradient_and_has_two_sides():
    logits = torch.zeros(2, 3, 2)
    numbers = {"advantage": torch.ones(2), "value_target": torch.zeros(2)}
    rows = one_decision_each(torch.tensor([0, 0]), token_log_prob=torch.tensor([0.4, 0.3]).log(), **numbers)
    for epsilon, moves in ((0.2, [False, False]), ((0.2, 0.3), [True, False]), (0.9, [True, True])):
        loss = table_loss(logits.clone(), clip_epsilon=epsilon, value_weight=0.0)
        total(loss(rows)).backward()
        gradient = loss.actor_network[0].module.logits.grad
        assert gradient[:, 0].any(-1).tolist() == moves
        assert not gradient[:, 1:].any()


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
    rows = one_decision_each(
        torch.arange(5), token_log_prob=acting, ref_log_prob=ref.log_softmax(-1), advantage=torch.zeros(5).double()
    )
    value = (acting.exp() * loss(rows)["loss_kl"][:, 0]).sum()
    value.backward()
    mine = logits.clone().requires_grad_()
    exact = 0.7 * kl_divergence(Categorical(logits=mine), Categorical(logits=ref))
    exact.backward()
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(loss.actor_network[0].module.logits.grad[:, 0].sum(0), mine.grad)


def test_tokens_that_filters_take_out_leave_finite_gradients():
    """What was said is no longer among the two best: the ratio is 0, and nothing is infinite but the log-ratio."""
    actor = utterance_actor(top_k=2)
    rows = acted(make_rows())
    loss = make_all_terms(actor=actor)
    out = loss(rows)
    assert out["kl_approx"].isinf()
    total(out).backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)
    assert all(value.isfinite() for value in losses_of(out).values())


def test_pieces_change_nothing(rows):
    for make in (make_exact, make_all_terms):
        whole, pieces = make(logits_chunk=None), make(logits_chunk=3)
        contract.assert_same(pieces(rows), whole(rows), rtol=1e-5, atol=1e-6)
        expected = contract.gradients(whole, rows)
        contract.assert_same(contract.gradients(pieces, rows), expected, rtol=1e-4, atol=1e-6)


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


def test_a_head_with_adapters_cannot_be_its_own_reference():
    peft = pytest.importorskip("peft")
    lm = causal_lm("llama", vocab_size=VOCAB, layers=1, width=WIDTH, heads=2, max_length=32)
    actor = language_actor(peft.get_peft_model(lm, peft.LoraConfig(target_modules=["lm_head"])))
    with pytest.raises(ValueError, match="The head has adapters"):
        make_ppo(actor=actor, reference=adapters_off(actor), kl_weight=1.0, kl_estimator="exact")


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


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"temperature": 1.3, "top_p": 0.8}, {"min_p": 0.3}], ids=str
)
def test_ratios_are_one_on_fresh_data(options):
    """At every decision, the certain last slot among them; and they are not where the rule is another one."""
    env = corridor()
    policy = speaker(env, **options)
    rows = play(env, policy)
    decision = decision_mask(rows["agent_mask"])
    rows["value_target"] = torch.zeros_like(rows["token_log_prob"])
    for sign in (1.0, -1.0):
        rows["advantage"] = torch.full_like(rows["token_log_prob"], sign)
        ratio = PPOLoss(policy, value_module(ValueHead(32)), reduction="none", **PLAIN)(rows)["loss_objective"][
            decision
        ]
        torch.testing.assert_close(ratio, torch.full_like(ratio, -sign), rtol=0, atol=1e-5)
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
    actor, (_, head) = make_actor(), make_heads()
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


def test_estimates_read_rewards_at_the_agents_tokens_only():
    loss, rows = make_ppo(), make_rows()
    rows["token_log_prob"] = torch.full(rows["tokens"].shape, -2.0)
    with contract.rewards_of_others():
        found = [loss.estimate(given) for given in (rows.clone(), contract.with_rewards_of_others(rows))]
    assert_allclose_td(*(each.exclude("token_reward") for each in found))


def test_estimates_know_turns_and_leave_modes_alone():
    rows = make_rows(n=12, seed=3)
    loss = make_ppo(turn_gamma=0.0, gamma=1.0, lmbda=1.0, bootstrap="mean").train()
    dropped = [module for module in loss.modules() if isinstance(module, nn.Dropout)]
    assert dropped
    for module in dropped:
        module.p = 0.5
    again = loss.estimate(rows.clone())
    assert torch.equal(loss.estimate(rows)["state_value"], again["state_value"])
    assert loss.actor_network[0].training
    assert all(module.training for module in dropped)
    last_of_turn = rows["agent_mask"] & ~shift_left(rows["agent_mask"]) & shift_left(rows["attention_mask"])
    assert last_of_turn.sum() > 5
    # Nothing of later turns arrives: there the target is the reward alone.
    torch.testing.assert_close(rows["value_target"][last_of_turn], rows["token_reward"][last_of_turn])


@pytest.mark.parametrize("ends", [{}, {"end_of_action": 1}])
def test_the_end_of_action_tells_turns_apart_where_nobody_answers(ends):
    rows = TensorDict(
        tokens=torch.tensor([[4, 7, 1, 7, 1, 5]]),
        attention_mask=torch.ones(1, 6, dtype=torch.bool),
        agent_mask=torch.tensor([[False, True, True, True, True, False]]),
        token_reward=torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0, 0.0]]),
        terminated=torch.tensor([[True]]),
        batch_size=[1],
    )
    clocks = {"gamma": 1.0, "lmbda": 1.0, "turn_gamma": 0.5, "turn_lmbda": 1.0}
    expected = [0, 2, 2, 2, 2, 0] if ends else [0, 3, 3, 2, 2, 0]
    got = make_ppo(**clocks, **ends).estimate(rows.clone())["value_target"]
    assert got.tolist() == [expected]
    if ends:  # an utterance actor knows it
        assert make_ppo(actor=utterance_actor(), **clocks).estimate(rows)["value_target"].tolist() == [expected]


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
    with pytest.raises(KeyError, match=r"needs 'state_value'.*carry"):
        loss.estimate(rows, reuse_values=True)


def test_a_certain_slot_is_worth_what_follows_it():
    """By hand: two turns of two tokens, the second of each certain; rewards 1 and 2; the row is cut off, worth 5."""
    acted = torch.tensor([[0.0, 3.0, torch.nan, 0.0, 4.0, torch.nan]])
    rows = TensorDict(
        tokens=torch.tensor([[3, 1, 2, 0, 1, 2]]),
        attention_mask=torch.ones(1, 6, dtype=torch.bool),
        agent_mask=torch.tensor([[False, True, True, False, True, True]]),
        token_reward=torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 2.0]]),
        terminated=torch.tensor([[False]]),
        state_value=acted,
        batch_size=[1],
    )
    clocks = {"gamma": 1.0, "lmbda": 1.0, "turn_gamma": 0.5, "turn_lmbda": 0.0}
    loss = table_loss(torch.zeros(1, 6, 4), value=5.0, end_of_action=2, **clocks)
    out = loss.estimate(rows, reuse_values=True)
    # The certain slots: 1 + 0.5 * 4 = 3, and 2 + 0.5 * 5 = 4.5. The tokens before see through them.
    torch.testing.assert_close(out["state_value"], torch.tensor([[0.0, 3.0, 3.0, 0.0, 4.0, 4.5]]))
    torch.testing.assert_close(out["advantage"], torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.5, 0.0]]))
    torch.testing.assert_close(out["value_target"], torch.tensor([[0.0, 3.0, 3.0, 0.0, 4.5, 4.5]]))
    mean = table_loss(torch.zeros(1, 6, 4), value=5.0, end_of_action=2, bootstrap="mean", **clocks)
    out = mean.estimate(rows.set("state_value", acted), reuse_values=True)  # of the second turn (4 + 4.5) / 2
    torch.testing.assert_close(out["value_target"], torch.tensor([[0.0, 3.125, 3.125, 0.0, 4.5, 4.5]]))


def test_values_written_while_acting_are_those_of_a_pass_over_the_rows():
    env = corridor()
    actor = speaker(env)
    head = ValueHead(32)
    policy = UtteranceActor(actor.decoder.actor, env.tokenizer.control, env.action_length, seed=0, value=head)
    rollout = env.rollout(8, policy, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="truncate", carry=["token_log_prob", "state_value"])
    loss = PPOLoss(policy, value_module(head), lmbda=0.0, turn_lmbda=0.0)
    computed = loss.estimate(rows.exclude("state_value"))
    acted = rows["state_value"]
    known = rows["agent_mask"] & ~acted.isnan()
    assert known.any()
    torch.testing.assert_close(acted[known], computed["state_value"][known], rtol=1e-4, atol=1e-5)
    reused = loss.estimate(rows.clone(), reuse_values=True)
    assert reused["advantage"].isfinite().all()
    forced = reused["advantage"][rows["agent_mask"] & acted.isnan()]
    torch.testing.assert_close(forced, torch.zeros_like(forced), rtol=0, atol=1e-6)
    losses = loss(reused)
    assert all(losses[key].isfinite() for key in losses.keys() if key.startswith("loss_"))


def test_estimates_take_any_batch_shape_and_other_keys():
    rows = make_rows(n=6)
    expected = make_ppo().estimate(rows.clone())
    shaped = make_ppo().estimate(rows.clone().reshape(2, 3))
    torch.testing.assert_close(shaped["advantage"].reshape(6, T), expected["advantage"])
    loss = make_ppo()
    loss.set_keys(advantage=("ppo", "advantage"), token_reward="pay")
    moved = loss.estimate(rows.clone().rename_key_("token_reward", "pay"))
    torch.testing.assert_close(moved["ppo", "advantage"], expected["advantage"])
    stored = rows.clone().set("tokens", rows["tokens"].int())
    torch.testing.assert_close(make_ppo().estimate(stored)["advantage"], expected["advantage"])
    with pytest.raises(KeyError, match="terminated"):
        make_ppo().estimate(rows.exclude("terminated"))


# -- TorchRL's loss on the flattened tokens ----------------------------------------------------------------------------


class AtLast(nn.Module):
    """What a causal trunk makes of the last real token of each prefix."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk

    def forward(self, tokens, last):
        return self.trunk(tokens)[torch.arange(len(tokens)), last]


@pytest.mark.parametrize("options", [{}, {"value_clip": 0.2}, {"clip_epsilon": (0.1, 0.3)}], ids=str)
def test_torchrls_loss_on_the_flattened_tokens(options):
    """The same numbers and gradients of all terms, from a tensordict with one prefix for each token."""
    clocks = {"gamma": 0.9, "lmbda": 0.8, "turn_gamma": 0.9, "turn_lmbda": 0.8}
    loss = make_ppo(**clocks, **PLAIN, entropy_weight=0.1, **options)
    rows = acted(make_rows()).exclude("advantage", "value_target", "state_value")
    loss.estimate(rows)
    if "value_clip" in options:
        rows["state_value"] = rows["state_value"] + torch.where(rows["agent_mask"], 0.3 * rows["advantage"], 0.0)
    actor, (_, head) = make_actor(), make_heads()
    hidden = TensorDictModule(AtLast(actor[0].module), in_keys=["tokens", "last"], out_keys=["hidden"])
    prob = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    theirs = ClipPPOLoss(
        ProbabilisticTensorDictSequential(hidden, actor[1], prob),
        head,
        clip_epsilon=options.get("clip_epsilon", 0.2),
        clip_value=options.get("value_clip"),
        entropy_coeff=0.1,
        critic_coeff=0.5,
        loss_critic_type="l2",
    )
    row, last = decision_mask(rows["agent_mask"]).nonzero(as_tuple=True)
    flat = {key: rows[key][row, last + 1].unsqueeze(-1) for key in ("advantage", "value_target", "state_value")}
    # TorchRL counts from the value that the tensordict holds, and its critic writes over the key in a copy of it.
    steps = TensorDict(
        tokens=rows["tokens"][row],
        last=last,
        action=rows["tokens"][row, last + 1],
        action_log_prob=rows["token_log_prob"][row, last + 1],
        **flat,
        batch_size=[len(row)],
    )
    mine, its = loss(rows), theirs(steps)
    for key in ("loss_objective", "loss_critic", "loss_entropy", "clip_fraction", "kl_approx", "entropy"):
        torch.testing.assert_close(mine[key], its[key], rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    torch.testing.assert_close(mine["ESS"], its["ESS"].squeeze(), rtol=1e-5, atol=1e-6)
    assert 0 < mine["clip_fraction"] < 1
    total(mine).backward()
    (its["loss_objective"] + its["loss_critic"] + its["loss_entropy"]).backward()
    pairs = [*zip(loss.actor_network.parameters(), actor.parameters(), strict=True)]
    pairs += zip(loss.value_network.parameters(), theirs.critic_network_params.parameters(), strict=True)
    compared = 0
    for left, right in pairs:
        if left.grad is not None and right.grad is not None:
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5)
            compared += bool(left.grad.any())
        else:
            assert left.grad is None
            assert right.grad is None
    assert compared > 10


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


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_it_finds_the_best_trade_off(estimator):
    """``pi(a) ~ ref(a) exp(R(a) / coef)``, with the divergence in the loss and several epochs a batch."""
    env, coef = Letters(256), 0.5
    policy = speaker(env)
    frozen = frozen_copy(policy)
    options = {"reference": frozen} if estimator == "exact" else {}
    loss = PPOLoss(
        policy, value_module(ValueHead(32)), kl_weight=coef, kl_estimator=estimator, turn_gamma=1.0, **PLAIN, **options
    )
    reference = ReferenceModelLogProbTransform(RowReference(frozen))
    optimizer = torch.optim.Adam(loss.parameters(), 3e-3)
    before = first_token(env, policy)
    for _ in range(80):
        rows = loss.estimate(reference(play(env, policy, 1)))
        for _ in range(2):
            optimizer.zero_grad()
            total_loss(loss(rows)).backward()
            optimizer.step()
    best = (before + torch.cat([REWARD, torch.zeros(1)]) / coef).softmax(-1)
    found = first_token(env, policy).exp()
    assert (found - best).abs().sum() / 2 < 0.06
    assert (before.exp() - best).abs().sum() / 2 > 0.1
