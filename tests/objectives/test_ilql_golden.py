"""The losses reproduce the numbers of the paper's published code, and so do plain loops over single decisions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import SoftUpdate

from tests.modules.toys import Golden
from tests.objectives.oracle import ilql_losses, numpy_rows
from tests.objectives.tables import make_table, table_loss
from tests.objectives.test_contract import assert_same
from tests.objectives.test_ilql import of_oracle
from torchrl_lang.functional import cql_term, expectile_loss
from torchrl_lang.functional.value_terms import margin_term
from torchrl_lang.modules import language_actor, qvalue_module, value_module
from torchrl_lang.objectives import ILQLLoss

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = list(range(0, 32, 2))
# In these, a cut-off row counts one padded action or a row without actions gets a weight: faults of the paper's code.
FAULTY = {20, 22}
TERMS = {"value": "v", "qvalue": "q", "cql": "cql", "margin": "dm", "actor": "token"}


def load(case):
    with np.load(GOLDEN / f"loss_case_{case:02d}.npz") as file:
        data = {key: file[key] for key in file.files}
    return data, config_of(data)


def config_of(data):
    config = {key[4:]: float(value) for key, value in data.items() if key.startswith("cfg_")}
    return {key: None if np.isnan(value) else value for key, value in config.items()}


def to_rows(data):
    """The case's index lists as the masks of a row. Tables ``[B,A]`` become tables ``[B,T]`` by ``place``."""
    tokens = torch.as_tensor(data["tokens"]).long()
    attention = torch.as_tensor(data["attn_mask"]).bool()
    n_rows, width = tokens.shape
    rows = TensorDict(
        tokens=tokens,
        attention_mask=attention,
        agent_mask=torch.zeros(n_rows, width, dtype=torch.bool),
        token_reward=torch.zeros(n_rows, width),
        terminated=torch.zeros(n_rows, 1, dtype=torch.bool),
        batch_size=[n_rows],
    )
    places = []  # (row, slot, position) of every state
    for b in range(n_rows):
        live = [(j, p) for j, p in enumerate(data["state_idxs"][b]) if j == 0 or p != 0]
        slots = len(live) - 1
        for j, p in live:
            places.append((b, j, int(p)))
        for j in range(slots):
            position = int(data["action_idxs"][b, j]) + 1
            rows["agent_mask"][b, position] = True
            rows["token_reward"][b, position] = float(data["rewards"][b, j])
        rows["terminated"][b] = bool(data["terminals"][b, slots])
    return rows, places


def dense(values, places, width):
    """``[B,S,...]`` at slots -> ``[B,T,...]`` at positions, differentiable; slots that a table lacks are left out."""
    b, j, p = (torch.tensor(index) for index in zip(*places, strict=True))
    keep = j < values.shape[1]
    b, j, p = b[keep], j[keep], p[keep]
    empty = values.new_zeros(values.shape[0], width, *values.shape[2:])
    return empty.index_put((b, p), values[b, j])


def options_of(config):
    return {
        "gamma": config["gamma"],
        "expectile": config["tau"],
        "value_weight": config["v_loss_weight"],
        "qvalue_weight": config["q_loss_weight"],
        "cql_weight": config["cql_loss_weight"],
        "margin_weight": config["dm_loss_weight"],
        "actor_weight": config["awac_weight"],
        "cql_temperature": config["cql_temp"],
        "margin": config["dm_margin"],
        "advantage_temperature": config["beta"],
        "advantage_weighting": "exp" if config["exp_weights"] else "sign",
        "weight_clip": config["clip_weight"],
        "transition_weight": config["transition_weight"],
        "value_min": config["value_min"],
        "value_max": config["value_max"],
        "target": "mc" if config["mc_returns"] else "td",
    }


def run(case):
    data, config = load(case)
    heads = 2 if config["double_q"] else 1
    rows, places = to_rows(data)
    width = rows["tokens"].shape[1]
    names = ["vs", *[f"q{k}" for k in range(1, heads + 1)], "logits"]
    leaves = {name: torch.as_tensor(data[f"in_{name}"]).double().requires_grad_() for name in names}
    v = dense(leaves["vs"], places, width)
    q = torch.stack([dense(leaves[f"q{k}"], places, width) for k in range(1, heads + 1)], 2)
    targets = [torch.as_tensor(data[f"in_target_q{k}"]).double() for k in range(1, heads + 1)]
    target_q = torch.stack([dense(target, places, width) for target in targets], 2)
    vocab = q.shape[-1]
    rows["table"] = make_table(v, q, target_q, leaves["logits"]).float()
    loss = table_loss(heads, vocab, **{**options_of(config), "advantage_temperature": 1.0})
    loss.advantage_temperature = config["beta"]  # with the weights' sign the paper's code also takes 0 and 3
    out = loss(rows)
    sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    tables = [x.detach().numpy() for x in (v, q, target_q, leaves["logits"])]
    weights = {f"{term}_weight" for term in TERMS}
    options = {name: value for name, value in options_of(config).items() if name not in weights}
    plain = ilql_losses(numpy_rows(rows.exclude("table")), *tables, **of_oracle(options))
    return data, config, out, plain, leaves


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_plain_loops_and_the_papers_code(case):
    data, config, out, plain, leaves = run(case)
    weights = {"value": "v_loss", "qvalue": "q_loss", "cql": "cql_loss", "margin": "dm_loss", "actor": "awac"}
    for term, name in weights.items():
        expected = config[f"{name}_weight"] * plain[term]
        torch.testing.assert_close(out[f"loss_{term}"].double(), torch.tensor(expected).double(), rtol=2e-5, atol=1e-6)
    if case in FAULTY:
        return
    for term, name in TERMS.items():
        np.testing.assert_allclose(plain[term], data[f"out_{name}_loss"], rtol=1e-5, atol=1e-6, err_msg=term)
    total = sum(float(value.detach()) for key, value in out.items() if key.startswith("loss_"))
    np.testing.assert_allclose(total, data["out_loss"], rtol=1e-5)
    expected = {name: torch.as_tensor(data[f"grad_{name}"]).double() for name in leaves}
    assert_same({name: leaf.grad for name, leaf in leaves.items()}, expected, rtol=1e-4, atol=1e-6)


def test_a_cut_off_row_counts_its_own_decisions_only():
    """The paper's code counts a padded slot of each such row as one more action."""
    data, _ = load(20)
    rows, _ = to_rows(data)
    assert int(rows["agent_mask"][:, 1:].sum()) == int((data["terminals"][:, :-1] == 0).sum()) - 1


# -- a whole model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def published():
    """The published model's weights in our modules, its batch as rows, and its options."""
    golden = Golden()
    config = config_of(golden.arrays)
    names = ("tokens", "attn_mask", "state_idxs", "action_idxs", "rewards", "terminals")
    rows, _ = to_rows({name: golden.arrays[f"in_{name}"] for name in names})
    heads = qvalue_module(golden.qvalue), value_module(golden.value)
    loss = ILQLLoss(language_actor(golden.lm), *heads, **options_of(config))
    updater = SoftUpdate(loss, tau=config["alpha"])
    target = TensorDict.from_module(golden.target_qvalue)
    loss.target_qvalue_network_params.get("module").data.update_(target.data)
    return golden, loss, updater, rows


def terms_with_the_papers_fault(loss, rows):
    """Our sums plus the two padded actions that the paper's code counts, over its count; differentiable.

    Rows 5 and 6 are unfinished games, shorter than the batch. Each has one more live slot there: the action at position
    0 again, with reward 0 and a terminal successor, beside the value of the row's last state.
    """
    loss.reduction = "sum"
    out = loss(rows)
    trunk = loss.actor_network[0]
    hidden = trunk(rows.copy())["hidden"]
    row, last = torch.tensor([5, 6]), rows["attention_mask"].sum(-1)[5:7] - 1
    action = rows["tokens"][row, 1]
    q = loss.qvalue_network.module(hidden[row, 0])
    target = loss.target_qvalue_network().module.taken(hidden[row, 0], action).amin(-1).detach()
    error = target - loss.value_network.module(hidden[row, last]).squeeze(-1)
    fault = {
        "value": expectile_loss(error, loss.expectile),
        "qvalue": q.gather(-1, action[:, None, None].expand(-1, 2, 1)).square(),
        "cql": loss.cql_weight * cql_term(q, action),
        "margin": loss.margin_weight * margin_term(q, action),
    }
    n = rows["agent_mask"].sum() + 2
    terms = {name: (out[f"loss_{name}"] + value.sum()) / n for name, value in fault.items()}
    return terms | {"actor": out["loss_actor"] / rows["attention_mask"][:, 1:].sum()}


def test_a_whole_model_gives_the_published_losses_and_gradients(published):
    golden, loss, _, rows = published
    terms = terms_with_the_papers_fault(loss, rows)
    weights = {"value": 1.0, "qvalue": 1.0, "cql": 0.1, "margin": 0.05, "actor": 1.0}
    for term, name in TERMS.items():
        expected = weights[term] * golden[f"out_{name}_loss"]
        torch.testing.assert_close(terms[term], expected.float(), rtol=1e-5, atol=1e-6)
    sum(terms.values()).backward()
    found = {name: parameter.grad for name, parameter in golden.lm.named_parameters()}
    assert_same(found, {name: golden[f"grad/model.{name}"] for name in found}, rtol=1e-4, atol=2e-6)
    for k, name in enumerate(("q", "q2")):
        expected = golden[f"grad/{name}.2.weight"]
        torch.testing.assert_close(golden.qvalue.out_weight.grad[k], expected, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(golden.qvalue.in_bias.grad[k], golden[f"grad/{name}.0.bias"], rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(golden.value.in_weight.grad[0], golden["grad/v.0.weight"], rtol=1e-4, atol=2e-6)


def test_three_steps_of_sgd_give_the_published_parameters(published):
    golden, loss, updater, rows = published
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=0.05)
    totals = []
    for _ in range(3):
        optimizer.zero_grad()
        total = sum(terms_with_the_papers_fault(loss, rows).values())
        total.backward()
        optimizer.step()
        updater.step()
        totals.append(total.detach())
    torch.testing.assert_close(torch.stack(totals), golden["sgd_losses"].float(), rtol=1e-5, atol=1e-6)
    found = {
        "model.transformer.wte.weight": golden.lm.get_input_embeddings().weight,
        "v.2.weight": golden.value.out_weight[0],
        "q.2.bias": golden.qvalue.out_bias[0],
        "target_q.2.weight": loss.target_qvalue_network_params["module", "out_weight"][0],
        "target_q2.0.weight": loss.target_qvalue_network_params["module", "in_weight"][1],
    }
    assert_same(found, {name: golden[f"param_after3/{name}"] for name in found}, rtol=1e-4, atol=1e-6)
