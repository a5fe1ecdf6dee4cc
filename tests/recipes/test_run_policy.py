"""Finished runs of every algorithm are opened with the policy that their training evaluated."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang._files import FileError
from torchrl_lang.modules import CHAIActor, ReturnConditionedActor, UtteranceActor
from torchrl_lang.modules.decoding.guidance import LikelihoodGuidance
from torchrl_lang.recipes.load_run import RunDecoding, load_run

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "3"]
ALGORITHMS = ("bc", "ilql", "cql", "bcq", "psi", "utterance-ilql", "chai", "dt", "qsft", "oreo")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(folder / "data"), *graph]) == 0
    for name in ALGORITHMS:
        start = {"utterance-ilql": ["--log-prob-weight", "0.5"]}.get(name, [])
        if name in ("chai", "qsft", "oreo"):
            start = ["--start", str(folder / "bc")]
        more = ["--data", str(folder / "data"), "--out", str(folder / name), *TINY, *start]
        assert main(["train", name, *more]) == 0
    return folder


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_run_is_evaluated(runs, name, capsys):
    assert main(["evaluate", "--run", str(runs / name), "--games", "8"]) == 0
    players = [player["name"] for player in json.loads((runs / name / "evaluation.json").read_text())["players"]]
    mine = [player.removeprefix(f"{name} ") for player in players if player.startswith(name)]
    expected = {
        "bc": ["sample", "greedy"],
        "dt": ["sample", "greedy"],
        "oreo": ["sample", "greedy"],
        "bcq": ["beta 1 sample", "beta 1 greedy"],
        "psi": ["beta 1 sample", "beta 1 greedy"],
        "utterance-ilql": ["best_of", "greedy"],
        "chai": ["best_of", "greedy"],
    }
    guided = ["sample", "greedy", *(f"beta {beta} greedy" for beta in (1, 2, 4, 8, 16))]
    assert mine == expected.get(name, guided)


def test_action_values_replace_the_logits_where_the_algorithm_says_so(runs):
    for name, min_p in (("bcq", 0.3), ("psi", 0.05)):
        run = load_run(runs / name)
        rule = run.policy(1.0, method="greedy").decoder.rule
        assert (rule.guidance.include_logits, rule.guidance.beta, rule.min_p) == (False, 1.0, min_p)
        assert run.betas == (1.0,)
        plain = run.policy().decoder.rule
        assert (plain.guidance, plain.min_p) == (None, None)  # the language model as it is
    rule = load_run(runs / "cql").policy(2.0).decoder.rule
    assert (rule.guidance.include_logits, rule.min_p) == (True, None)


def test_the_policy_is_that_of_the_algorithm(runs):
    conditioned = load_run(runs / "dt").policy(target_return=-5.0)
    assert isinstance(conditioned, ReturnConditionedActor)
    assert conditioned.target_return == -5.0
    chai, ranked = load_run(runs / "chai"), load_run(runs / "utterance-ilql")
    assert isinstance(chai.policy(method="best_of", candidates=3), CHAIActor)
    assert isinstance(chai.policy(method="greedy"), UtteranceActor)
    decoder = ranked.policy(method="best_of", candidates=3).decoder
    assert (decoder.candidates, decoder.end_value_weight, decoder.log_prob_weight) == (3, 1.0, 0.5)


def test_likelihoods_guide_the_model_that_they_began_as(runs):
    run, start = load_run(runs / "qsft"), load_run(runs / "bc")
    for name, weight in start.model.lm.state_dict().items():
        torch.testing.assert_close(run.model.lm.state_dict()[name], weight)
    trained = run.model.value_lm.state_dict()
    assert any(not torch.equal(trained[name], weight) for name, weight in start.model.lm.state_dict().items())
    rule = run.policy(4.0).decoder.rule
    assert isinstance(rule.guidance, LikelihoodGuidance)
    assert (rule.guidance.beta, rule.guidance.ratio, rule.min_p) == (4.0, False, None)
    by_value = dataclasses.replace(run, decoding=RunDecoding(min_p=0.3, likelihood_ratio=True)).policy(4.0).decoder.rule
    assert (by_value.guidance.ratio, by_value.min_p) == (True, 0.3)
    assert RunDecoding.read(runs / "qsft") == RunDecoding(min_p=0.3)
    plain = run.policy().decoder.rule
    assert (plain.guidance, plain.min_p) == (None, None)
    assert load_run(runs / "oreo").model.heads.keys() == {"value"}


def test_what_an_algorithm_has_not_is_an_error(runs):
    with pytest.raises(ValueError, match=r"learned no values of tokens, so beta=2\.0"):
        load_run(runs / "chai").policy(2.0)
    with pytest.raises(ValueError, match="Only a decision transformer is asked for a return"):
        load_run(runs / "bc").policy(target_return=-1.0)


@pytest.mark.parametrize(
    ("recipe", "option"), [("ppo", "--start"), ("chai", "--start"), ("qsft", "--start"), ("psi", "--prior")]
)
def test_a_policy_that_is_asked_for_returns_is_not_taken_without_them(runs, recipe, option, tmp_path, capsys):
    data = [] if recipe == "ppo" else ["--data", str(runs / "data"), *TINY]
    assert main(["train", recipe, *data, option, str(runs / "dt"), "--out", str(tmp_path / "run")]) == 2
    assert "is a decision transformer, which plays by a return" in capsys.readouterr().err


def test_a_damaged_record_of_decoding_is_an_error(runs, tmp_path):
    path = runs / "psi" / "decoding.json"
    content = path.read_text()
    path.write_text(content.replace("false", "3"))
    try:
        with pytest.raises(FileError, match="include_logits"):
            load_run(runs / "psi")
    finally:
        path.write_text(content)


def test_one_utterance_of_each_run(runs):
    for name in ALGORITHMS:
        assert isinstance(load_run(runs / name).reply("a", method="greedy"), str)
