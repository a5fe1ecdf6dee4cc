"""What is utterance ILQL's own: numbers by hand and by loops, ends of utterances, the policy, learning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical

from tests.objectives.conftest import make_actor, make_rows, make_utterance_ilql, utterances_of
from tests.objectives.oracle_utterance import utterance_ilql_losses
from tests.objectives.tables import TableHead, TableQ, TableTrunk, make_table
from tests.objectives.test_ilql import touched
from torchrl_lang.objectives import UtteranceILQLLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
TOKENS = 5


class OneNumber(TableQ):
    """A table's Q without a vocabulary."""

    def forward(self, hidden):
        return super().forward(hidden).squeeze(-1)


def table_loss(heads=2, **options):
    """A loss whose trunk reads the entry ``table``: V, Q and target Q of ``heads`` heads, logits."""
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(TableTrunk(), in_keys=["table"], out_keys=["hidden"]),
        TensorDictModule(TableHead(1 + 2 * heads, TOKENS, (TOKENS,)), in_keys=["hidden"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"], distribution_class=Categorical),
    )
    qvalue = TensorDictModule(OneNumber(heads, 1), in_keys=["hidden"], out_keys=["utterance_value"])
    value = TensorDictModule(TableHead(0, 1, (1,)), in_keys=["hidden"], out_keys=["state_value"])
    loss = UtteranceILQLLoss(actor, qvalue, value, **options)
    loss.target_qvalue_network_params.data.zero_()
    return loss


def table_rows(seed=0, heads=2, n=8):
    """Ragged rows with random tables; rewards keep fractions."""
    g = torch.Generator().manual_seed(seed)
    rows = make_rows(n, seed=seed)
    rows["tokens"] = torch.where(rows["attention_mask"], rows["tokens"] % TOKENS, 0)
    width = rows["tokens"].shape[1]
    v, q, target, logits = (torch.randn(n, width, *shape, generator=g) for shape in ((), (heads,), (heads,), (TOKENS,)))
    rows["table"] = make_table(v, q.unsqueeze(-1), target.unsqueeze(-1), logits)
    return rows, [table.double().numpy() for table in (v, q, target, logits)]


OPTIONS = [
    {},
    {"gamma": 0.5, "expectile": 0.9},
    {"advantage_temperature": 2.0, "weight_clip": 1.5, "transition_weight": 2.0},
    {"advantage_weighting": "sign", "advantage_temperature": 0.8},
    {"actor_normalizer": "action", "advantage_temperature": 0.5},
    {"end_of_action": 3, "advantage_temperature": 1.0},
]


@pytest.mark.parametrize("masked", [False, True], ids=["all", "train-mask"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("seed", "heads"), [(0, 1), (1, 2)])
def test_terms_match_plain_loops(options, seed, heads, masked):
    rows, tables = table_rows(seed, heads)
    names = {"advantage_temperature": "beta", "advantage_weighting": "weighting", "weight_clip": "clip"}
    names["actor_normalizer"] = "normalizer"
    plain = {names.get(key, key): value for key, value in options.items()}
    if masked:
        rows["train_mask"] = torch.rand(rows["tokens"].shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        plain["trained"] = rows["train_mask"].numpy()
    out = table_loss(heads, **options)(rows)
    for term, value in utterance_ilql_losses(rows, *tables, **plain).items():
        np.testing.assert_allclose(out[f"loss_{term}"].item(), value, rtol=2e-5, err_msg=term)


def test_gradients_go_where_they_belong():
    loss = make_utterance_ilql(make_actor(), advantage_temperature=1.0)
    assert touched(loss, "loss_value") == {"v", "actor"}
    assert touched(loss, "loss_qvalue") == {"q", "actor"}
    assert touched(loss, "loss_actor") == {"actor"}


def test_one_pass_of_the_trunk_and_heads_at_utterances_only(rows, passes):
    loss = make_utterance_ilql(make_actor())
    seen, head = [], loss.qvalue_network.module
    full = head.forward
    head.forward = lambda hidden: seen.append(len(hidden)) or full(hidden)
    assert passes(loss, rows) == [True]
    n = sum(len(utterances_of(rows, row)[0]) for row in range(len(rows)))
    assert seen == [n, n]


# -- the policy --------------------------------------------------------------------------------------------------------


def appended(prompts, action, control):
    """Rows of prompts each of which some utterances follow, terminated."""
    copies = action.shape[0] // prompts.shape[0]
    rows = []
    for index, utterance in enumerate(action.tolist()):
        row = prompts[index // copies]
        begin = row["tokens"][row["attention_mask"]].tolist()
        written = utterance[: utterance.index(control.end_of_action) + 1]
        pad = [0] * (row["tokens"].shape[-1] - len(begin) - len(written))
        tokens = torch.tensor(begin + written + pad)
        agent = torch.zeros_like(tokens, dtype=torch.bool)
        agent[len(begin) : len(begin) + len(written)] = True
        attention = torch.arange(len(tokens)) < len(begin) + len(written)
        masks = {"attention_mask": attention, "agent_mask": agent, "terminated": torch.tensor([True])}
        rows.append(TensorDict(tokens=tokens, token_reward=torch.zeros(len(tokens)), **masks))
    return torch.stack(rows)
