"""The offline algorithms from end to end: options that reach the loss, logs, resumed runs, saved policies, learning."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.recipes.commands import assert_same_runs, interrupted_at, refused
from tests.recipes.walks import ALGORITHMS, generate, train
from torchrl_lang.__main__ import main
from torchrl_lang._files import FileError
from torchrl_lang.data import load_dataset, row_returns
from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.evaluation.plots import read_columns
from torchrl_lang.modules import (
    CHAIActor,
    ReturnConditionedActor,
    UtteranceActor,
    UtteranceValueGuidance,
    causal_lm,
    condition_on_returns,
    language_actor,
)
from torchrl_lang.modules.decoding.guidance import LikelihoodGuidance
from torchrl_lang.modules.save import language_model_of
from torchrl_lang.objectives import DecisionTransformerLoss, IPOLoss
from torchrl_lang.recipes import models
from torchrl_lang.recipes.algorithms import AWAC, BC, DT, ILQL, MonteCarlo, PaperILQL, PercentBC, SingleStep
from torchrl_lang.recipes.imitation import build_returns, held_out_loss
from torchrl_lang.recipes.load_run import RunDecoding, load_run
from torchrl_lang.recipes.offline import OfflineData
from torchrl_lang.recipes.tasks import TASKS, task_class
from torchrl_lang.recipes.token_values import build_loss, return_range
from torchrl_lang.text import CharTokenizer

VARIANTS = {"percent-bc": PercentBC, "single-step": SingleStep, "monte-carlo": MonteCarlo, "awac": AWAC}
PLACES = {"data": Path("data"), "out": Path("out")}


def kept(walks):
    """The held-out rows."""
    return load_dataset(walks / "data")[108:]


@pytest.fixture
def seen(walks, monkeypatch):
    """A function that returns the loss, the policy, its decoder's rule and the further parts of a recipe's training."""

    def look(recipe, *more):
        found = []
        monkeypatch.setattr(models, "train_offline", lambda *args, **parts: found.append((*args[2:4], parts)) or 0.0)
        assert train(walks, recipe, "unused", *more) == 0
        loss, policy, parts = found[0]
        return loss, policy, getattr(getattr(policy, "decoder", None), "rule", None), parts

    return look


@pytest.mark.parametrize(
    ("recipe", "more", "expected"),
    [
        ("cql", ["--beta", "3"], {"beta": 3.0, "include_logits": True, "min_p": None, "method": "greedy"}),
        ("bcq", ["--threshold", "0.2"], {"beta": 1.0, "include_logits": False, "min_p": 0.2, "method": "greedy"}),
        ("psi", ["--threshold", "0.1"], {"beta": 1.0, "include_logits": False, "min_p": 0.1, "method": "sample"}),
    ],
)
def test_options_of_algorithms_without_a_v(seen, recipe, more, expected):
    given = ["--gamma", "0.9", "--turn-gamma", "0.8", "--qvalue-weight", "0.7", "--tau", "0.25"]
    loss, policy, rule, parts = seen(recipe, *more, *given)
    assert parts["tau"] == 0.25
    guidance = rule.guidance
    found = {"beta": guidance.beta, "include_logits": guidance.include_logits, "min_p": rule.min_p}
    assert found | {"method": policy.method} == expected
    assert isinstance(loss.actor_network, UtteranceActor)  # knows which tokens cannot be written
    assert (loss.gamma, loss.turn_gamma, loss.qvalue_weight, loss.transition_weight) == (0.9, 0.8, 0.7, 1.0)
    assert getattr(loss, "threshold", 0.0) == (expected["min_p"] or 0.0)


def test_psi_learning_takes_the_policy_of_a_run_as_prior(walks, seen):
    loss, *_ = seen("psi", "--prior", "bc", "--reward-scale", "0.5")
    assert loss.reward_scale == 0.5
    prior = language_model_of(loss.reference.actor).state_dict()
    for name, weight in load_run(walks / "bc").model.lm.state_dict().items():
        torch.testing.assert_close(prior[name], weight, rtol=0, atol=0)


def test_options_of_q_sft(walks, seen):
    more = ["--beta", "3", "--threshold", "0.2", "--tau", "0.25", "--gamma", "0.9", "--turn-gamma", "0.8"]
    loss, policy, rule, parts = seen("qsft", "--start", "bc", *more, "--guide", "ratio")
    dataset = load_dataset(walks / "data")
    assert (loss.value_min, loss.value_max) == return_range(dataset.rows, dataset.tokenizer, 0.9, 0.8)
    assert (loss.gamma, loss.turn_gamma, loss.threshold, loss.rest) == (0.9, 0.8, 0.2, dataset.tokenizer.control.pad)
    assert parts["tau"] == 0.25
    assert (rule.guidance.beta, rule.guidance.ratio, rule.min_p) == (3.0, True, 0.2)
    reference = dict(loss.reference.actor.named_parameters())
    assert all(weight is reference[name] for name, weight in policy.named_parameters() if name in reference)
    more = ["--rest", "all", "--value-min", "-9", "--value-max", "1"]
    loss, _, rule, _ = seen("qsft", "--start", "bc", *more)
    assert (loss.value_min, loss.value_max, loss.rest) == (-9.0, 1.0, None)
    assert (rule.guidance.ratio, rule.min_p) == (False, None)


def test_options_of_oreo(walks, seen):
    more = ["--reward-scale", "0.3", "--kl-weight", "0.2", "--value-weight", "0.7", "--level", "utterance"]
    loss, _, rule, _ = seen("oreo", "--start", "bc", *more)
    assert (loss.beta, loss.kl_controller(), loss.value_weight, loss.level) == (0.3, 0.2, 0.7, "utterance")
    assert rule.guidance is None
    start = load_run(walks / "bc").model.lm.get_input_embeddings().weight
    assert any(torch.equal(weight, start) for weight in loss.reference.state().values())


def test_options_of_preferences(walks, seen, capsys):
    more = ["--reward-scale", "0.3", "--label-smoothing", "0.1", "--pairs", "2"]
    loss, _, _, parts = seen("dpo", "--start", "bc", *more)
    assert (loss.beta, loss.label_smoothing, loss.per_token) == (0.3, 0.1, False)
    rows = load_dataset(walks / "data").rows
    pairs = parts["prepare"](rows)
    assert pairs.shape[1] == 2
    begins = pairs["tokens"][:, :, 1]
    assert (begins[:, 0] == begins[:, 1]).all()  # the node
    assert begins[:, 0].unique(return_counts=True)[1].max() == 2
    assert (row_returns(pairs)[:, 0] > row_returns(pairs)[:, 1]).all()
    start = load_run(walks / "bc").model.lm.get_input_embeddings().weight
    assert any(torch.equal(weight, start) for weight in loss.reference.state().values())
    loss, _, _, parts = seen("ipo", "--start", "bc", "--per-token")
    assert (loss.beta, loss.per_token, type(loss)) == (0.3, True, IPOLoss)
    more = ["--desirable-weight", "1.3", "--undesirable-weight", "0.7", "--baseline", "rows"]
    loss, _, _, parts = seen("kto", "--start", "bc", *more)
    assert (loss.desirable_weight, loss.undesirable_weight, loss.baseline) == (1.3, 0.7, "rows")
    returns = row_returns(rows)
    assert parts["prepare"](rows)["desirable"].tolist() == (returns > returns.mean())[:, None].tolist()
    _, _, _, parts = seen("kto", "--start", "bc", "--threshold", "-99")
    with pytest.raises(ValueError, match=r"108 of 108 episodes .* a return above -99: give a --threshold"):
        parts["prepare"](rows[:108])
    call = ["train", "dpo", "--data", walks / "data", "--out", walks / "none", "--start", walks / "bc"]
    assert "dpo learns nothing from the environment's tokens" in refused(capsys, *call, "--transition-weight", "1")


def test_options_of_algorithms_with_values_of_utterances(walks, seen):
    common = ["--start", "bc", "--gamma", "0.8", "--tau", "0.25", "--candidates", "3"]
    loss, policy, _, parts = seen("chai", *common, "--cql-weight", "0.3")
    assert (loss.gamma, loss.cql_weight, policy.candidates, parts["tau"]) == (0.8, 0.3, 3, 0.25)
    weights = ["--value-weight", "0.6", "--qvalue-weight", "0.7", "--log-prob-weight", "0.2", "--expectile", "0.9"]
    loss, policy, _, parts = seen("utterance-ilql", *common, *weights)
    assert (loss.gamma, loss.expectile, loss.value_weight, loss.qvalue_weight) == (0.8, 0.9, 0.6, 0.7)
    decoder = policy.decoder
    assert (loss.transition_weight, parts["tau"]) == (1.0, 0.25)
    assert loss.end_of_action == decoder.control.end_of_action
    assert (decoder.candidates, decoder.end_value_weight, decoder.log_prob_weight) == (3, 1.0, 0.2)


def test_options_of_the_decision_transformer(seen):
    loss, policy, *_ = seen("dt", "--transition-weight", "0.3", "--target-return", "-2.5")
    assert (loss.transition_weight, loss.actor_normalizer) == (0.3, "action")
    assert loss.end_of_action == policy.actor.decoder.control.end_of_action
    assert (policy.target_return, policy.actor.method) == (-2.5, "greedy")
    with pytest.raises(ValueError, match="--target-return should be"):
        DT(**PLACES, target_return=float("nan"))


def test_a_policy_to_start_from_is_needed_and_not_one_that_is_asked_for_returns(walks, tmp_path, capsys):
    out = ["--out", tmp_path / "run"]
    data = ["--data", walks / "data", *out]
    assert "starts from a policy that imitates the data" in refused(capsys, "train", "oreo", *data)
    assert "chai trains no block" in refused(capsys, "train", "chai", *data, "--start", walks / "bc", "--top-layers", 1)
    for call in (["psi", *data, "--prior"], ["ppo", *out, "--start"]):
        assert "is a decision transformer, which plays by a return" in refused(capsys, "train", *call, walks / "dt")


def test_the_range_of_returns_by_hand():
    tokenizer = CharTokenizer.from_alphabet("ab")
    end = tokenizer.control.end_of_action
    rows = TensorDict(
        tokens=torch.tensor([[7, 7, end, 7, 7, end], [7, 7, end, 7, 0, 0]]),
        attention_mask=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]),
        agent_mask=torch.tensor([[False, True, True, False, True, True], [False, True, True, False, False, False]]),
        token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0, 0.0, -4.0], [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]]),
        batch_size=[2],
    )
    # From the right: -4, half of it, a quarter of that less 1, half of that.
    assert return_range(rows, tokenizer, gamma=0.5, turn_gamma=0.25) == (-4.0, 2.0)
    assert return_range(rows[:1], tokenizer, gamma=0.5, turn_gamma=0.25) == (-4.0, -0.75)


@pytest.mark.parametrize("variant", VARIANTS.values())
def test_presets_of_tasks_do_not_change_what_defines_a_variant(variant):
    base = BC if issubclass(variant, BC) else ILQL
    for task in map(task_class, TASKS):
        found, plain = (vars(kind.for_task(task, **PLACES)) for kind in (variant, base))
        defining = {option: getattr(variant(**PLACES), option) for option in variant.defining}
        assert found == plain | defining
        given = {next(iter(defining)): 0.625}
        assert vars(variant.for_task(task, **PLACES, **given)) == found | given  # a given option counts more


def test_variants_differ_from_ilql_where_their_papers_do():
    lm = causal_lm(vocab_size=9, layers=1, width=8, heads=2, max_length=8)
    kinds = (ILQL, SingleStep, MonteCarlo, AWAC, PaperILQL)
    loss = {kind: build_loss(kind(**PLACES), lm, language_actor(lm), 1)[0] for kind in kinds}
    assert loss[SingleStep].expectile == loss[MonteCarlo].expectile == 0.5 != loss[ILQL].expectile
    assert (loss[MonteCarlo].target, loss[MonteCarlo].qvalue_lmbda) == ("mc", 1.0)
    assert loss[ILQL].advantage_temperature == 0 < loss[AWAC].advantage_temperature
    assert (loss[PaperILQL].target, loss[PaperILQL].cql_weight, loss[PaperILQL].gamma) == ("td", 1e-4, 0.99)
    assert (loss[PaperILQL].actor_normalizer, loss[ILQL].actor_normalizer) == ("all", "action")


def test_the_papers_policy_only_lowers_probabilities_and_its_gradients_are_not_clipped(walks):
    assert train(walks, "paper-ilql", "paper-ilql") == 0
    out = walks / "paper-ilql"
    assert json.loads((out / "config.json").read_text())["max_grad_norm"] is None
    assert "grad_norm" not in (out / "log.csv").read_text().splitlines()[0]
    guidance = load_run(out).policy(16.0).decoder.rule.guidance
    assert (guidance.beta, guidance.clip) == (16.0, 0.0)
    hidden = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    advantage = guidance.qvalue(hidden).amin(-2) - guidance.value(hidden)
    assert (advantage > 0).any()
    torch.testing.assert_close(guidance(hidden), (16 * advantage).clamp_max(0))


def test_the_guide_has_a_table_of_the_options_of_variants():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "offline_algorithms.md").read_text(encoding="utf-8")
    lines = page[page.index("| `train` | `--expectile`") :].split("\n\n")[0].splitlines()
    names, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if "---" not in line)
    kinds = {"ilql": ILQL, "paper-ilql": PaperILQL, **VARIANTS}
    assert {row[0] for row in rows} == set(kinds) - {"percent-bc"}
    for name, *values in rows:
        options = kinds[name](**PLACES)
        for option, value in zip(names[1:], values, strict=True):
            found = getattr(options, option.removeprefix("--").replace("-", "_"))
            assert value == ("none" if found is None else f"{found:g}" if isinstance(found, float) else found)


def built(walks, **options):
    dataset = load_dataset(walks / "data")
    return build_returns(DT(**PLACES, **options), dataset.rows, 16, dataset.tokenizer.control.end_of_action), dataset[:]


@pytest.mark.parametrize("mode", ["constant", "decremented"])
def test_the_range_is_that_of_the_data_and_the_target_the_mean_of_the_best_tenth(walks, mode):
    returns, rows = built(walks, mode=mode)
    wholes = row_returns(rows)
    assert returns.target == pytest.approx(float(wholes[:108].sort(descending=True).values[:11].mean()))
    # The return to go before a last move is its reward, -1.
    assert (returns.low, returns.high) == (float(wholes.min()), float(wholes.max()) if mode == "constant" else -1.0)
    assert returns.mode == mode


def test_a_target_beyond_the_data_widens_the_range(walks):
    plain, _ = built(walks)
    with pytest.warns(UserWarning, match=r"target_return=3 lies outside the returns of the data, \[-"):
        wider, _ = built(walks, target_return=3.0)
    assert (wider.low, wider.high, wider.target) == (plain.low, 3.0, 3.0)
    inside, _ = built(walks, target_return=plain.low)
    assert (inside.low, inside.high, inside.target) == (plain.low, plain.high, plain.low)


def test_the_held_out_loss_without_returns_is_that_of_imitation(walks):
    returns, rows = built(walks)
    torch.manual_seed(0)
    lm = causal_lm(vocab_size=30, layers=1, width=16, heads=2, max_length=64)
    actor = condition_on_returns(language_actor(lm), returns)  # zero
    end = load_dataset(walks / "data").tokenizer.control.end_of_action
    plain = imitation_loss(language_actor(lm), rows, batch_size=50)
    assert held_out_loss(actor, rows, end, batch_size=50) == pytest.approx(plain, rel=1e-5)
    with torch.no_grad():
        returns.weight.normal_()
    loss = DecisionTransformerLoss(actor, actor_normalizer="action", end_of_action=end)(rows)["loss_actor"]
    found = held_out_loss(actor, rows, end, batch_size=50)
    assert found == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found != pytest.approx(plain, rel=1e-5)


HEADS = {
    **{key: {"target_qvalue", "qvalue"} for key in ("cql", "bcq", "psi")},
    "ilql": {"target_qvalue", "qvalue", "value"},
    "utterance-ilql": {"target_utterance_qvalue", "utterance_qvalue", "value"},
    "chai": {"target_chai_qvalue", "chai_qvalue"},
    "dt": {"returns"},
    "oreo": {"value"},
}
LOGGED = {
    **{key: {"held_out_loss", "loss_qvalue", "loss_actor", "td_target"} for key in ("bcq", "psi")},
    "cql": {"held_out_loss", "loss_qvalue", "loss_actor", "td_target", "loss_cql"},
    "utterance-ilql": {"held_out_loss", "loss_qvalue", "loss_value", "loss_actor"},
    "chai": {"held_out_value_loss", "loss_qvalue", "loss_cql", "candidate_value"},
    "qsft": {"held_out_value_loss", "held_out_likelihood", "loss_qvalue"},
    **{key: {"held_out_loss", "held_out_accuracy", "loss_actor", "margin", "accuracy"} for key in ("dpo", "ipo")},
    "kto": {"held_out_loss", "held_out_margin", "loss_actor", "margin", "baseline"},
}
PLAYERS = {
    **{key: ["sample", "greedy"] for key in ("bc", "dt", "oreo", "dpo", "ipo", "kto")},
    **{key: ["beta 1 sample", "beta 1 greedy"] for key in ("bcq", "psi")},
    **{key: ["best_of", "greedy"] for key in ("utterance-ilql", "chai")},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_logged_opened_and_evaluated(walks, name):
    run, columns = load_run(walks / name), read_columns(walks / name / "log.csv")
    heads = run.model.heads
    assert heads.keys() == HEADS.get(name, set())
    for target in (key for key in heads if key.startswith("target_")):
        pairs = zip(heads[target].parameters(), heads[target.removeprefix("target_")].parameters(), strict=True)
        assert any(not torch.equal(*pair) for pair in pairs)
    assert {"return"} | LOGGED.get(name, {"held_out_loss"}) <= columns.keys()
    assert ("loss_cql" in columns) == (name in ("cql", "ilql", "chai"))
    if name in ("bc", "cql", "bcq", "ilql"):
        logged = [pytest.approx(value, rel=1e-4) for value in columns["held_out_loss"]]
        assert imitation_loss(language_actor(run.model.lm), kept(walks)) in logged
    assert isinstance(run.reply("a", method="greedy"), str)
    assert main(["evaluate", "--run", str(walks / name), "--games", "8"]) == 0
    players = [player["name"] for player in json.loads((walks / name / "evaluation.json").read_text())["players"]]
    guided = ["sample", "greedy", *(f"beta {beta} greedy" for beta in (1, 2, 4, 8, 16))]
    mine = [player.removeprefix(f"{name} ") for player in players if player.startswith(name)]
    assert mine == PLAYERS.get(name, guided)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qsft", "chai"])
def test_a_run_that_was_stopped_ends_with_the_same_numbers(walks, name):
    with interrupted_at(OfflineData, "figures", 2):
        assert train(walks, name, f"stopped-{name}", *ALGORITHMS[name]) == 130
    assert train(walks, name, f"stopped-{name}", *ALGORITHMS[name]) == 0
    assert_same_runs(walks / name, walks / f"stopped-{name}")


def mean_return(run, policy):
    return run.task.evaluate(policy, games=8, seed=1)[0].mean_return


def test_the_policy_of_values_of_utterances_is_that_of_training(walks):
    """Built by hand from the saved heads; CHAI's language model is as it was."""
    logged = {name: read_columns(walks / name / "log.csv")["return"] for name in ("chai", "utterance-ilql")}
    run = load_run(walks / "utterance-ilql")
    values = UtteranceValueGuidance(run.model.heads["target_utterance_qvalue"])
    settings = {"method": "best_of", "candidates": 8, "end_value_weight": 1.0, "log_prob_weight": 0.5}
    parts = (language_actor(run.model.lm), run.tokenizer.control, run.action_length)
    found = mean_return(run, UtteranceActor(*parts, guidance=values, **settings))
    assert found in [pytest.approx(value, abs=1e-4) for value in logged["utterance-ilql"]]
    run, start = load_run(walks / "chai"), load_run(walks / "bc").model.lm.state_dict()
    assert all(torch.equal(weight, start[name]) for name, weight in run.model.lm.state_dict().items())
    sampling = UtteranceActor(language_actor(run.model.lm), run.tokenizer.control, run.action_length)
    found = mean_return(run, CHAIActor(sampling, run.model.heads["target_chai_qvalue"], candidates=4))
    assert found in [pytest.approx(value, abs=1e-4) for value in logged["chai"]]


def test_the_decision_transformer_is_saved_with_its_returns(walks):
    run, logged = load_run(walks / "dt"), read_columns(walks / "dt" / "log.csv")
    returns = run.model.heads["returns"]
    assert returns.weight.any()
    actor, end = condition_on_returns(language_actor(run.model.lm), returns), run.tokenizer.control.end_of_action
    assert held_out_loss(actor, kept(walks), end) in [
        pytest.approx(value, rel=1e-4) for value in logged["held_out_loss"]
    ]
    policy = ReturnConditionedActor(UtteranceActor(actor, run.tokenizer.control, run.action_length, method="greedy"))
    assert policy.target_return == returns.target
    assert mean_return(run, policy) in [pytest.approx(value, abs=1e-3) for value in logged["return"]]
    assert json.loads((walks / "dt" / "config.json").read_text())["mode"] == returns.mode == "constant"
    conditioned = run.policy(target_return=-5.0)
    assert isinstance(conditioned, ReturnConditionedActor)
    assert conditioned.target_return == -5.0


def test_action_values_replace_the_logits_where_the_algorithm_says_so(walks):
    for name, min_p in (("bcq", 0.3), ("psi", 0.05)):
        run = load_run(walks / name)
        rule = run.policy(1.0, method="greedy").decoder.rule
        assert (rule.guidance.include_logits, rule.guidance.beta, rule.min_p) == (False, 1.0, min_p)
        assert run.betas == (1.0,)
        plain = run.policy().decoder.rule
        assert (plain.guidance, plain.min_p) == (None, None)  # the language model as it is
    rule = load_run(walks / "cql").policy(2.0).decoder.rule
    assert (rule.guidance.include_logits, rule.min_p) == (True, None)


def test_utterances_are_ranked_by_their_values(walks):
    chai, ranked = load_run(walks / "chai"), load_run(walks / "utterance-ilql")
    assert isinstance(chai.policy(method="best_of", candidates=3), CHAIActor)
    assert isinstance(chai.policy(method="greedy"), UtteranceActor)
    decoder = ranked.policy(method="best_of", candidates=3).decoder
    assert (decoder.candidates, decoder.end_value_weight, decoder.log_prob_weight) == (3, 1.0, 0.5)
    bc, ilql = (load_run(walks / name).policy(method="best_of", candidates=2).decoder for name in ("bc", "ilql"))
    assert (bc.end_value_weight, bc.log_prob_weight) == (0.0, 1.0)
    assert (ilql.end_value_weight, ilql.log_prob_weight) == (1.0, 0.0)


def test_likelihoods_guide_the_model_that_they_began_as(walks):
    run, start = load_run(walks / "qsft"), load_run(walks / "bc").model.lm.state_dict()
    for name, weight in start.items():
        torch.testing.assert_close(run.model.lm.state_dict()[name], weight)
    trained = run.model.value_lm.state_dict()
    assert any(not torch.equal(trained[name], weight) for name, weight in start.items())
    rule = run.policy(4.0).decoder.rule
    assert isinstance(rule.guidance, LikelihoodGuidance)
    assert (rule.guidance.beta, rule.guidance.ratio, rule.min_p) == (4.0, False, None)
    by_value = dataclasses.replace(run, decoding=RunDecoding(min_p=0.3, likelihood_ratio=True)).policy(4.0).decoder.rule
    assert (by_value.guidance.ratio, by_value.min_p) == (True, 0.3)
    assert run.decoding == RunDecoding(min_p=0.3)
    plain = run.policy().decoder.rule
    assert (plain.guidance, plain.min_p) == (None, None)


def test_what_an_algorithm_has_not_and_a_damaged_record_of_decoding_are_errors(walks, tmp_path):
    with pytest.raises(ValueError, match=r"learned no values of tokens, so beta=2\.0"):
        load_run(walks / "chai").policy(2.0)
    with pytest.raises(ValueError, match="Only decision transformers are asked for a return"):
        load_run(walks / "bc").policy(target_return=-1.0)
    run = shutil.copytree(walks / "psi", tmp_path / "psi")
    (run / "decoding.json").write_text((run / "decoding.json").read_text().replace("false", "3"))
    with pytest.raises(FileError, match=r"decoding\.json"):
        load_run(run)


LEARN = ["--layers", "1", "--width", "32", "--batch-size", "24", "--eval-games", "64", "--eval-every", "500"]
LEARN += ["--lr", "4e-3"]


@pytest.mark.slow
def test_ilql_finds_shortest_paths_and_bc_does_not(tmp_path, capsys):
    generate(tmp_path, games=1000)
    assert train(tmp_path, "bc", "bc", *LEARN, "--steps", "40") == 0
    assert train(tmp_path, "ilql", "ilql", *LEARN, "--steps", "100", "--tau", "0.2") == 0
    run = str(tmp_path / "ilql")
    also = ["--also", str(tmp_path / "bc"), "--beta", "2", "--games", "64"]
    assert main(["evaluate", "--task", "random_walks", "--run", run, *also]) == 0
    figures = json.loads((tmp_path / "ilql" / "evaluation.json").read_text())
    optimality = {player["name"]: player["metrics"]["optimality"] for player in figures["players"]}
    assert optimality["shortest"] == 1
    assert optimality["ilql beta 2 greedy"] > 0.85
    assert max(optimality[name] for name in ("random", "bc sample", "bc greedy")) < 0.5
    assert "optimality" in capsys.readouterr().out
    assert main(["play", "random_walks", "--watch", run, "--games", "2", "--seed", "0"]) == 0
    assert len(capsys.readouterr().out.split("\n\n")) == 3  # two games and the end
    assert "the task 'random_walks', not 'wordle'" in refused(capsys, "evaluate", "--task", "wordle", "--run", run)
    assert "the task random_walks has no splits" in refused(capsys, "evaluate", "--run", run, "--split", "test")
