"""An agent of AgileRL in training here: its terms by hand, its targets, options, copies and checkpoints."""

from __future__ import annotations

import pytest
import torch

from tests.agilerl_agents import VOCAB, make_agent, outputs, states
from tests.objectives.models import make_rows
from torchrl_lang.modules.agilerl.checkpoint import agilerl_agent
from torchrl_lang.modules.agilerl.export import OPTIONS
from torchrl_lang.objectives import agilerl_loss
from torchrl_lang.training import total_loss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")


def converted(**more):
    agent = make_agent(**more)
    return agent, agilerl_agent(agent.weights, agent.net_config, {name: getattr(agent, name) for name in OPTIONS})


@pytest.fixture
def rows():
    batch = make_rows()
    batch["tokens"] = batch["tokens"] % VOCAB
    return batch


def by_hand(agent, rows):
    """Terms of AgileRL's loss, decision by decision, where no padded action counts."""
    found, count, real = dict.fromkeys(("value", "qvalue", "cql", "actor"), 0.0), 0, 0
    heads = ("q", "q2") if agent.double_q else ("q",)
    for row in rows:
        tokens = row["tokens"][row["attention_mask"]]
        online, target = states(agent, "model", tokens), states(agent, "actor_target", tokens).detach()
        acting = states(agent, "actor", tokens)
        log_prob = outputs(agent, "pi", acting.detach() if agent.detach_pi else acting).log_softmax(-1)
        v = outputs(agent, "v", online.detach() if agent.detach_v else online)[:, 0]
        online = online.detach() if agent.detach_q else online
        agents = row["agent_mask"][: len(tokens)]
        decisions = agents[1:].nonzero().flatten().tolist()
        real += len(tokens) - 1
        for p in range(len(tokens) - 1):
            if p not in decisions:
                weight = min(agent.transition_weight, agent.clip_weight)
                found["actor"] -= weight * log_prob[p, tokens[p + 1]]
        for j, p in enumerate(decisions):
            a, last = tokens[p + 1], j + 1 == len(decisions)
            values = torch.stack([outputs(agent, f"target_{head}", target)[p, a] for head in heads])
            goal = values.min().clamp(agent.value_min, agent.value_max).detach()
            u, after = goal - v[p], len(tokens) - 1 if last else decisions[j + 1]
            found["value"] += (agent.tau if u >= 0 else 1 - agent.tau) * u**2
            boot = 0.0 if last and bool(row["terminated"]) else agent.gamma * v[after].detach()
            for head in heads:
                q = outputs(agent, head, online)[p]
                found["qvalue"] += (row["token_reward"][p + 1] + boot - q[a]) ** 2
                found["cql"] -= (q / agent.cql_temp).log_softmax(-1)[a]
            weight = agent.beta if u > 0 else 1 - agent.beta
            found["actor"] -= min(weight, agent.clip_weight) * log_prob[p, a]
            count += 1
    return {name: value / (real if name == "actor" else count) for name, value in found.items()}


@pytest.mark.parametrize("double_q", [True, False])
def test_the_terms_are_those_of_the_agent(double_q, rows):
    agent, ours = converted(double_q=double_q)
    out = agilerl_loss(ours, cql_weight=1.0)[0](rows)
    for name, expected in by_hand(agent, rows).items():
        torch.testing.assert_close(out[f"loss_{name}"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("detached", ["", "detach_pi", "detach_v", "detach_q", "detach_pi detach_v detach_q"])
def test_so_are_the_gradients_of_all_weights(detached, rows):
    """Of each embedding, block and head, worked out by automatic differentiation of the terms by hand."""
    options = {name: name in detached.split() for name in ("detach_pi", "detach_v", "detach_q")}
    agent, ours = converted(**options)
    total_loss(agilerl_loss(ours, cql_weight=1.0)[0](rows)).backward()
    agent.weights = {name: value.clone().requires_grad_() for name, value in agent.weights.items()}
    sum(by_hand(agent, rows).values()).backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in agent.weights.items()}
    expected = agilerl_agent(gradients, agent.net_config, {name: getattr(agent, name) for name in OPTIONS})
    trained = set()
    for network in ("policy", "values", "qvalue", "value"):
        wanted = dict(getattr(expected, network).named_parameters())
        for name, weight in getattr(ours, network).named_parameters():
            found = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(found, wanted[name].detach(), rtol=1e-3, atol=1e-5, msg=lambda m, n=name: n + m)
            trained |= {(network, name)} if found.any() else set()
    assert ("policy", "transformer.policy.0.weight") in trained
    assert (("policy", "transformer.gpt.wte.weight") in trained) != options["detach_pi"]
    assert (("values", "transformer.gpt.wte.weight") in trained) != (options["detach_v"] and options["detach_q"])


def test_the_targets_are_its_own_and_follow():
    ours = converted()[1]
    loss, updater = agilerl_loss(ours)
    wte = ("module", "model", "gpt", "wte", "weight")
    before = ours.target.get_input_embeddings().weight.clone()
    assert torch.equal(loss.target_value_trunk_params[wte], before)
    assert torch.equal(loss.target_qvalue_network_params["module", "out_weight"], ours.target_qvalue.out_weight)
    updater.step()
    online = ours.values.get_input_embeddings().weight
    torch.testing.assert_close(loss.target_value_trunk_params[wte], before.lerp(online, 0.02))
    assert torch.equal(ours.target.get_input_embeddings().weight, before)  # the agent's own was copied
