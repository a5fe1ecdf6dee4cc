"""ArCHer: the critic's terms by hand, drawn utterances, the policy gradient, and learning in a corridor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import SoftUpdate

from tests.objectives import models
from tests.objectives import test_learning as learning
from tests.objectives.oracle import assert_matches
from tests.objectives.test_contract import assert_same
from torchrl_lang.data import LatestRows, row_buffer, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, corridor_value
from torchrl_lang.modules import draw_utterances, row_log_prob, with_drawn
from torchrl_lang.objectives import ArCHerLoss, PPOLoss
from torchrl_lang.training import adamw, train_steps

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

# -- the terms by hand -------------------------------------------------------------------------------------------------


class Read(nn.Module):
    """``x [N, 1] -> scale * x + shift``, one output a scale."""

    def __init__(self, *scale, shift=0.0):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(scale)), nn.Parameter(torch.tensor(shift))

    def forward(self, hidden):
        return hidden * self.scale + self.shift


def make_plain(**options):
    """The state of a position is its token; Q_1 = x, Q_2 = 2 x, V = x / 2; targets are 1 greater."""
    keys = {"in_keys": ["tokens", "attention_mask"], "out_keys": ["hidden"]}
    trunk = TensorDictModule(lambda tokens, attention_mask: tokens.unsqueeze(-1).float(), **keys)
    loss = ArCHerLoss(models.make_actor(), Read(1.0, 2.0), Read(0.5), value_trunk=trunk, gamma=0.5, **options)
    for name in ("target_qvalue_network_params", "target_value_network_params"):
        loss.get_submodule(name)["module", "shift"].data.add_(1.0)
    return loss


# The states of the two utterances are at the tokens 3 and 7, their last decisions at 4 and 7, the row ends with 9.
ROW = models.by_hand([[3, 4, 5, 7, 8, 9]], [[0, 1, 1, 0, 1, 0]], [[0.0, 0.5, 1.0, 0.0, -2.0, 0.0]])


@pytest.mark.parametrize(
    ("terminated", "last"),
    # y_1 = 0.5 + 1 + 0.5 (7 / 2 + 1) = 3.75; y_2 = -2, or -2 + 0.5 (9 / 2 + 1) = 0.75 where a limit ended the row.
    [(True, -2.0), (False, 0.75)],
)
def test_terms_by_hand(terminated, last):
    out = make_plain()(ROW.clone().set("terminated", torch.tensor([[terminated]])))
    first = (3.75 - 4) ** 2 + (3.75 - 8) ** 2
    second = (last - 7) ** 2 + (last - 14) ** 2
    assert out["loss_qvalue"].item() == pytest.approx((first + second) / 2)
    # min Qt is 4 + 1 at the first last decision and 7 + 1 at the second, V 3 / 2 and 7 / 2.
    assert out["loss_value"].item() == pytest.approx(((5 - 1.5) ** 2 + (8 - 3.5) ** 2) / 2)
    assert (out["value"].item(), out["qvalue"].item()) == pytest.approx((2.5, (6 + 10.5) / 2))


def test_advantages_by_hand():
    """min Q - V of the online heads, at the tokens of each utterance."""
    rows = make_plain().estimate(ROW.clone())
    assert rows["advantage"].tolist() == [[0.0, 2.5, 2.5, 0.0, 3.5, 0.0]]  # 4 - 3 / 2 and 7 - 7 / 2
    cut = models.by_hand([[3, 4, 5, 7, 8]], [[0, 1, 1, 0, 1]], terminated=False)
    assert make_plain().estimate(cut)["advantage"].tolist() == [[0.0, 2.5, 2.5, 0.0, 0.0]]
    assert make_plain().estimate(ROW[:0])["advantage"].shape == (0, 6)


def test_drawn_rows_train_v_and_the_others_q():
    played = models.make_rows()
    loss, drawn = models.make_archer(), draw_utterances(models.make_policy(), played)
    both = loss(with_drawn(played, drawn))
    assert both["loss_qvalue"].item() == pytest.approx(loss(played)["loss_qvalue"].item(), rel=1e-5)
    assert both["loss_value"].item() == pytest.approx(loss(drawn.exclude("drawn"))["loss_value"].item(), rel=1e-5)
    alone = loss(drawn)
    assert (alone["loss_qvalue"].item(), loss(with_drawn(played, drawn[:0]))["loss_value"].item()) == (0.0, 0.0)
    with pytest.raises(KeyError, match=r"with_drawn needs 'drawn', .* come second"):
        with_drawn(drawn, played)
    with pytest.raises(ValueError, match=r"drawn must have shape \(6, 1\)"):
        loss(played.set("drawn", torch.zeros(6, 2, dtype=torch.bool)))


def test_terms_match_plain_loops():
    """Also without a train mask on the end of an utterance, which then does not count."""
    rows = models.vary(models.make_rows(8, seed=3), "train-mask")
    loss = models.own_trunk(models.make_archer, gamma=0.7).double()
    hidden = loss.value_trunk(rows.clone())["hidden"]

    def said_by(network, params):
        with loss._modules[params].data.to_module(network):
            return network.module(hidden).detach().numpy()

    q, target_q = (said_by(loss.qvalue_network, f"{kind}qvalue_network_params") for kind in ("", "target_"))
    v, target_v = (said_by(loss.value_network, f"{kind}value_network_params") for kind in ("", "target_"))
    sums, number = np.zeros(2), 0
    for b in range(8):
        found, boot = models.utterances_of(rows, b)
        states = [utterance[0] - 1 for utterance in found] + [boot]
        for i, utterance in enumerate(found):
            if not rows["train_mask"][b, utterance[-1]]:
                continue
            over = i + 1 == len(found) and bool(rows["terminated"][b])
            y = sum(float(rows["token_reward"][b, p]) for p in utterance)
            y += 0.0 if over else 0.7 * target_v[b, states[i + 1], 0]
            last = utterance[-1] - 1
            sums += ((y - q[b, last]) ** 2).sum(), (target_q[b, last].min() - v[b, states[i], 0]) ** 2
            number += 1
    data = rows.apply(lambda value: value.double() if value.is_floating_point() else value)
    assert_matches(loss(data), dict(zip(("loss_qvalue", "loss_value"), sums / number, strict=True)), rtol=1e-6)


# -- what moves --------------------------------------------------------------------------------------------------------


def test_the_trunk_gets_no_gradient_where_it_is_detached_and_the_policy_none_beside_a_trunk():
    for loss, still in (
        (models.make_archer(detach_value=True), "actor_network"),
        (models.own_trunk(models.make_archer), "actor_network"),
        (models.own_trunk(models.make_archer, detach_value=True), "value_trunk"),
    ):
        models.total(loss(models.make_rows())).backward()
        assert all(p.grad is None for p in getattr(loss, still).parameters())
        assert all(p.grad.any() for p in loss.qvalue_network_params.parameters())
        assert all(p.grad.any() for p in loss.value_network_params.parameters())


def test_the_policys_gradient_is_that_of_reinforce():
    """``-mean_u A(u) sum_t log pi(u_t)``, and of that alone: no gradient flows through the advantages."""
    policy = models.make_policy()
    critic, rows = models.make_archer(policy), models.make_rows()
    drawn = critic.estimate(draw_utterances(policy, rows, 20))
    loss = PPOLoss(policy, aggregation=1)
    models.losses_of(loss(drawn))["loss_objective"].backward()
    found = {name: p.grad.clone() for name, p in loss.named_parameters()}
    loss.zero_grad()
    log_prob = row_log_prob(policy, drawn)
    assert drawn["advantage"].abs().amax(-1).min() > 0
    (-(drawn["advantage"] * log_prob).sum(-1).mean()).backward()
    assert_same(found, {name: p.grad for name, p in loss.named_parameters()}, rtol=1e-4, atol=1e-6)


# -- drawn utterances --------------------------------------------------------------------------------------------------


def test_utterances_are_drawn_in_the_states_of_rows():
    """What stands before them is the row's, their log-probability the policy's, and nothing follows."""
    rows, policy = models.make_rows(), models.make_policy()
    drawn = draw_utterances(policy, rows)
    states = [(b, u[0] - 1) for b in range(6) for u in models.utterances_of(rows, b, models.CONTROL.end_of_action)[0]]
    cut = [(b, models.utterances_of(rows, b, 1)[1]) for b in range(6)]
    states += [(b, p) for b, p in cut if p + 1 < models.T and rows["agent_mask"][b, p + 1]]
    states = sorted({*states})
    assert len(drawn) == len(states)
    for one, (b, p) in zip(drawn, states, strict=True):
        assert one["tokens"][: p + 1].tolist() == rows["tokens"][b, : p + 1].tolist()
        written = one["agent_mask"].nonzero().flatten().tolist()
        assert written == list(range(p + 1, int(one["attention_mask"].sum())))
        assert one["tokens"][written[-1]] == models.CONTROL.end_of_action
    assert drawn["drawn"].all()
    assert drawn["terminated"].all()
    assert not drawn["token_reward"].any()
    with torch.no_grad():
        torch.testing.assert_close(drawn["token_log_prob"], row_log_prob(policy, drawn), rtol=1e-4, atol=1e-5)


def test_states_are_chosen_with_replacement_and_by_the_policys_stream():
    rows = models.make_rows()
    some, again = (draw_utterances(models.make_policy(seed=3), rows, 40, rows_at_a_time=7) for _ in range(2))
    assert len(some) == 40 > len(draw_utterances(models.make_policy(), rows))
    assert (some == again).all()
    assert (some["tokens"] != draw_utterances(models.make_policy(seed=4), rows, 40, rows_at_a_time=7)["tokens"]).any()
    assert len(draw_utterances(models.make_policy(), rows[:1], 5)) == 0  # the row without an action
    with pytest.raises(ValueError, match="draw_utterances needs a policy with method='sample'"):
        draw_utterances(models.make_policy(method="greedy"), rows)


# -- learning ----------------------------------------------------------------------------------------------------------

GAMMA, CHANCES = 0.9, torch.tensor([0.1, 0.7, 0.2])  # of l, r and nothing


@pytest.fixture(scope="module")
def env():
    return CorridorEnv(learning.LENGTH, start=0, max_turns=8, batch_size=[32], seed=0)


def tabular(env):
    """A policy of one number for each state and token, that writes all utterances alike, and its critic."""
    policy, size = learning.mover(learning.tabular_actor(env), env, seed=0), env.tokenizer.vocab_size
    trunk = TensorDictModule(learning.LastThree(size), in_keys=["tokens", "attention_mask"], out_keys=["hidden"])
    return policy, ArCHerLoss(policy, learning.Table(size, 2), learning.Table(size, 1), value_trunk=trunk, gamma=GAMMA)


def train_critic(critic, policy, games, steps, lr=0.1, draws=256):
    played, drawn = (row_buffer(rows, 64, seed=0) for rows in (games, draw_utterances(policy, games, draws)))
    parameters = nn.ModuleList([critic.qvalue_network_params, critic.value_network_params])
    options = {"steps": steps, "target_updater": SoftUpdate(critic, tau=0.2)}
    for _ in train_steps(critic, lambda: with_drawn(played.sample(), drawn.sample()), adamw(parameters, lr), **options):
        pass


@pytest.mark.slow
def test_values_are_those_of_the_policy_though_another_played(env):
    """The wanderer moves left most often, the policy right."""
    policy, critic = tabular(env)
    table = policy.decoder.actor[1].module.rows.data
    for place in learning.starts(env):
        table[place, learning.moves(env)] = CHANCES.log()
    games = [env.rollout(64, learning.Wanderer(env.tokenizer), break_when_any_done=False) for _ in range(4)]
    rows = torch.cat([rows_from_rollout(steps, unfinished="drop") for steps in games])
    train_critic(critic, policy, rows, 120, draws=512)
    train_critic(critic, policy, rows, 100, lr=0.01, draws=2048)
    expected = learning.values_of(GAMMA, lambda q: q @ CHANCES.double()).float() @ CHANCES
    learned = critic.value_network_params["module", "rows"].detach()[learning.starts(env), 0]
    torch.testing.assert_close(learned, expected, rtol=0, atol=0.2)


@pytest.mark.slow
def test_it_learns_the_shortest_walk(env):
    """Of 3 moves, in 10 iterations of 32 games, from a policy that writes all utterances alike."""
    policy, critic = tabular(env)
    loss, games = PPOLoss(policy, aggregation=1), LatestRows(1000)
    optimizer, returns = adamw(loss, 0.1), []
    for _ in range(10):
        fresh = rows_from_rollout(env.rollout(24, policy, break_when_any_done=False), unfinished="truncate")
        returns.append(fresh["token_reward"].sum(-1).mean().item())
        train_critic(critic, policy, games.extend(fresh).rows, 25)
        drawn = row_buffer(critic.estimate(draw_utterances(policy, games.rows, 256)), 64, seed=0)
        for _ in train_steps(loss, drawn.sample, optimizer, steps=4):
            pass
    assert returns[0] < -5
    assert returns[-1] > corridor_value(learning.LENGTH - 1) - 0.3
