"""AgileRL's terms beside ours: what is handed over, and, where AgileRL is installed, that they agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase

from benchmarks import agilerl_terms
from benchmarks.agilerl_findings import FINDINGS
from benchmarks.agilerl_terms import CASES, MAX_DIFFERENCE, PADDED, SIZES, WORKER, difference, make_batches, our_terms
from benchmarks.rival_agilerl import FOLDER, AgileRL, install, installed
from tests.agilerl_agents import make_agent
from torchrl_lang.modules import read_agilerl
from torchrl_lang.modules.agilerl.checkpoint import agilerl_agent
from torchrl_lang.modules.agilerl.export import OPTIONS
from torchrl_lang.schema import check_row

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
ROOT = Path(__file__).parents[2]
needs_agilerl = pytest.mark.skipif(not installed(), reason=f"no AgileRL in {FOLDER.name}: run its benchmark once")


@pytest.fixture(scope="module")
def batches() -> list[TensorDictBase]:
    return make_batches(8)


def test_the_batches_are_finished_games_and_two_kinds_of_unfinished_ones(batches: list[TensorDictBase]) -> None:
    games, alike, unlike = batches
    for batch in batches:
        check_row(batch, vocab_size=SIZES["vocabulary"])
    assert games["terminated"].all()
    assert not alike["terminated"].any()
    assert not unlike["terminated"].any()
    assert (alike["attention_mask"].sum(-1) == 24).all()
    assert len(set(unlike["attention_mask"].sum(-1).tolist())) == len(unlike)
    assert (unlike["token_reward"][~unlike["agent_mask"]] == 0).all()


def test_our_side_needs_no_agilerl_and_every_option_changes_something(
    batches: list[TensorDictBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = {name for case in CASES for name in case.options}
    assert set(OPTIONS) - tried == {"alpha", "batch_size", "lr", "weight_decay"}  # no part of a loss
    assert [case.name for case in CASES if case.reason] == ["unfinished rows of several lengths, beta=1"]
    agent = make_agent(vocab=SIZES["vocabulary"], length=SIZES["max_length"], exp_weights=True, detach_q=False)
    ours = agilerl_agent(agent.weights, agent.net_config, {name: getattr(agent, name) for name in OPTIONS})
    ours = ours._replace(options={**ours.options, "value_min": None, "value_max": None, "weight_clip": None})
    plain, gradients = our_terms(ours, batches[0], CASES[0])
    for case in CASES[1:]:
        if case.batch == 0 and not case.name.startswith(("per_token", "get_loss")):
            terms, its = our_terms(ours, batches[0], case)
            same = terms == plain and all(torch.equal(its[key], value) for key, value in gradients.items())
            assert not same, case.name
    monkeypatch.setattr(agilerl_terms, "installed", lambda: False)
    (found,) = agilerl_terms.run(quick=True)
    assert "AgileRL was not started" in found["note"]


@pytest.fixture(scope="module")
def rival(batches: list[TensorDictBase]) -> Iterator[AgileRL]:
    with AgileRL(batches, SIZES, install(), WORKER) as found:
        yield found


@needs_agilerl
@pytest.mark.slow
def test_terms_agree_where_definitions_do(rival: AgileRL, batches: list[TensorDictBase], tmp_path: Path) -> None:
    agent = read_agilerl(rival.ask(json.dumps({"export": str(tmp_path)}))["folder"])
    for case in CASES:
        worst = max(difference(rival, agent, batches[case.batch], case).values())
        assert worst < MAX_DIFFERENCE if not case.reason else worst > MAX_DIFFERENCE, case.name
        assert case.reason in ("", PADDED)


@needs_agilerl
@pytest.mark.slow
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.probe)
def test_agilerl_does_what_the_page_describes(finding, rival: AgileRL) -> None:
    assert finding.holds(rival.ask(json.dumps({"probe": finding.probe})))
