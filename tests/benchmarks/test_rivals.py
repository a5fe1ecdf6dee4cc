"""Training steps of others over ours: the same rows handed over, the same losses by other means, and honest gaps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from benchmarks.rival_agilerl import FOLDER, AgileRL, hand_over, install, installed
from benchmarks.rival_discrete_iql import OneTrunkPass, TrunkInEach
from benchmarks.rivals import SIZES, VOCABULARY, WIDTH, Learner, make_ilql, make_lm
from benchmarks.wordle_batches import wordle_batches
from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.training import total_loss

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
KEYS = ["agent_mask", "attention_mask", "terminated", "token_reward", "tokens"]


@pytest.fixture(scope="module")
def batches() -> list[TensorDictBase]:
    return wordle_batches(2, rows=8, games=64)


@pytest.fixture
def rows() -> TensorDict:
    """Three games of several turns: one ended, one cut off, one that is shorter."""
    length = torch.tensor([[12], [12], [7]])
    real = torch.arange(12) < length
    agent = torch.tensor([False, True, True, True, False, False] * 2) & real
    g = torch.Generator().manual_seed(0)
    return TensorDict(
        tokens=torch.where(real, torch.randint(1, 9, (3, 12), generator=g), 0),
        attention_mask=real,
        agent_mask=agent,
        token_reward=torch.where(agent, torch.randn(3, 12, generator=g), 0.0),
        terminated=torch.tensor([[True], [False], [True]]),
        batch_size=[3],
    )


def test_what_is_handed_over_are_the_rows_as_plain_arrays(batches: list[TensorDictBase], tmp_path: Path) -> None:
    hand_over(batches, SIZES, tmp_path)
    assert json.loads((tmp_path / "sizes.json").read_text()) == SIZES | {"batches": 2}
    for number, batch in enumerate(batches):
        files = sorted((tmp_path / str(number)).iterdir())
        assert [file.stem for file in files] == KEYS
        for file in files:
            np.testing.assert_array_equal(np.load(file, allow_pickle=False), batch[file.stem].numpy())


@pytest.mark.skipif(not installed(), reason=f"no AgileRL in {FOLDER.name}: run the benchmark 'rivals' once")
def test_agilerl_reads_these_rows_and_learns_from_them(batches: list[TensorDictBase]) -> None:
    with AgileRL(batches, SIZES, install()) as rival:
        # Its own trunk and ours are of one size, and what it has read was compared when it started.
        assert rival.loaded["trunk"] == sum(p.numel() for p in make_lm().parameters())
        assert rival.loaded["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
        before = rival.losses(0)
        assert rival.losses(0) == pytest.approx(before, rel=1e-6)  # no step was taken
        for _ in range(5):
            rival.step(0)
        assert rival.losses(0) < before


@pytest.mark.parametrize("form", [OneTrunkPass, TrunkInEach])
def test_discrete_iql_over_rows_is_ilql_without_cql(rows: TensorDict, form: type) -> None:
    torch.manual_seed(0)
    lm = causal_lm(vocab_size=9, layers=2, width=16, heads=2, max_length=12)
    qvalue, value = QValueHead(16, 9), ValueHead(16)
    torch.nn.init.normal_(qvalue.out_weight)  # values that tell the heads apart
    torch.nn.init.normal_(value.out_weight)
    theirs = form(lm, qvalue, value)
    heads = qvalue_module(qvalue), value_module(value)
    ours = ILQLLoss(language_actor(lm), *heads, cql_weight=0.0, actor_normalizer="action")
    gradients = []
    for loss in (theirs, ours):
        lm.zero_grad()
        out = loss(rows)
        total_loss(out).backward()
        gradients.append([parameter.grad.clone() for parameter in lm.parameters()])
    expected = ours(rows)
    for name in ("loss_value", "loss_qvalue", "loss_actor"):
        torch.testing.assert_close(theirs(rows)[name], expected[name])
        assert expected[name] > 0
    # Sums that nearly cancel are as exact as their largest term: by the scale of each layer's gradient.
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6 * max(1.0, float(wanted.abs().max())))


MAKERS = {
    "ours": lambda: make_ilql(make_lm()),
    "paper": lambda: make_ilql(make_lm(), value_lm=make_lm()),
    "one pass": lambda: OneTrunkPass(make_lm(), QValueHead(WIDTH, VOCABULARY), ValueHead(WIDTH)),
    "in each": lambda: TrunkInEach(make_lm(), QValueHead(WIDTH, VOCABULARY), ValueHead(WIDTH)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_trains_what_is_trained_and_moves_the_targets(name: str, batches: list[TensorDictBase]) -> None:
    torch.manual_seed(0)
    learner = Learner(MAKERS[name](), batches)
    loss = learner.loss if isinstance(learner.loss, ILQLLoss) else learner.loss.loss
    trained = [parameter for parameter in learner.loss.parameters() if parameter.requires_grad]
    targets = list(loss.target_qvalue_network_params.values(True, True))
    targets += list(loss.target_value_trunk_params.values(True, True)) if name == "paper" else []
    before = [parameter.detach().clone() for parameter in trained]
    targets_before = [target.clone() for target in targets]
    learner.losses()
    assert all(torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    learner.step()
    assert all(parameter.grad is None for parameter in trained)
    assert all(not torch.equal(old, new) for old, new in zip(before, trained, strict=True) if new.ndim > 1)
    moved = [not torch.equal(old, new) for old, new in zip(targets_before, targets, strict=True) if new.ndim > 1]
    assert all(moved)
