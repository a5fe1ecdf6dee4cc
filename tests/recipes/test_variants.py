"""Algorithms that are other options of a recipe: their options, what tasks may change, and what they train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchrl_lang.__main__ import COMMANDS, main
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.recipes.algorithms import AWAC, BC, ILQL, MonteCarlo, PaperILQL, PercentBC, SingleStep
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks import TASKS, task_class
from torchrl_lang.recipes.token_values import build_loss

VARIANTS = {"percent-bc": PercentBC, "single-step": SingleStep, "monte-carlo": MonteCarlo, "awac": AWAC}
PLACES = {"data": Path("data"), "out": Path("out")}
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "3"]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("task", TASKS)
def test_presets_of_tasks_do_not_change_what_defines_a_variant(name, task):
    variant = VARIANTS[name]
    base = BC if issubclass(variant, BC) else ILQL
    found, plain = variant.for_task(task_class(task), **PLACES), base.for_task(task_class(task), **PLACES)
    for option in variant.defining:
        assert getattr(found, option) == getattr(variant(**PLACES), option)
    others = vars(plain).keys() - set(variant.defining)
    assert {option: getattr(found, option) for option in others} == {
        option: getattr(plain, option) for option in others
    }


def test_a_given_option_counts_more_than_the_variants():
    assert SingleStep.for_task(task_class("wordle"), **PLACES, expectile=0.6).expectile == 0.6


def test_variants_differ_from_ilql_where_their_papers_do(tiny_lm):
    loss = {
        kind: build_loss(kind(**PLACES), tiny_lm, language_actor(tiny_lm), 1)[0]
        for kind in (ILQL, SingleStep, MonteCarlo, AWAC, PaperILQL)
    }
    assert loss[SingleStep].expectile == loss[MonteCarlo].expectile == 0.5 != loss[ILQL].expectile
    assert (loss[MonteCarlo].target, loss[MonteCarlo].qvalue_lmbda) == ("mc", 1.0)
    assert loss[ILQL].advantage_temperature == 0 < loss[AWAC].advantage_temperature
    assert (loss[PaperILQL].target, loss[PaperILQL].cql_weight, loss[PaperILQL].gamma) == ("td", 1e-4, 0.99)
    assert (loss[PaperILQL].actor_normalizer, loss[ILQL].actor_normalizer) == ("all", "action")


def test_the_papers_policy_only_lowers_probabilities_and_its_gradients_are_not_clipped(tmp_path):
    data, out = tmp_path / "data", tmp_path / "run"
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(data), *graph]) == 0
    assert main(["train", "paper-ilql", "--data", str(data), "--out", str(out), *TINY]) == 0
    run = load_run(out)
    assert json.loads((out / "config.json").read_text())["max_grad_norm"] is None
    assert "grad_norm" not in (out / "log.csv").read_text().splitlines()[0]
    guidance = run.policy(16.0).decoder.rule.guidance
    assert (guidance.beta, guidance.clip) == (16.0, 0.0)
    hidden = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    advantage = guidance.qvalue(hidden).amin(-2) - guidance.value(hidden)
    assert (advantage > 0).any()
    torch.testing.assert_close(guidance(hidden), (16 * advantage).clamp_max(0))


def test_the_guide_has_a_table_of_their_options():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "offline_algorithms.md").read_text(encoding="utf-8")
    lines = page[page.index("| `train` | `--expectile`") :].split("\n\n")[0].splitlines()
    names, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if "---" not in line)
    kinds = {
        "ilql": ILQL,
        "paper-ilql": PaperILQL,
        **{name: VARIANTS[name] for name in VARIANTS if name != "percent-bc"},
    }
    assert {row[0] for row in rows} == set(kinds)
    for name, *values in rows:
        options = kinds[name](**PLACES)
        for option, value in zip(names[1:], values, strict=True):
            found = getattr(options, option.removeprefix("--").replace("-", "_"))
            assert value == ("none" if found is None else f"{found:g}" if isinstance(found, float) else found)


@pytest.fixture
def tiny_lm():
    return causal_lm(vocab_size=9, layers=1, width=8, heads=2, max_length=8)


def test_every_variant_trains_by_its_name(tmp_path):
    data = ["--data", str(tmp_path / "data")]
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(tmp_path / "data"), *graph]) == 0
    for name, variant in VARIANTS.items():
        assert name in COMMANDS["train"][1]
        assert main(["train", name, *data, "--out", str(tmp_path / name), *TINY]) == 0
        recorded = json.loads((tmp_path / name / "config.json").read_text())
        expected = variant(**PLACES)
        assert all(recorded[option] == getattr(expected, option) for option in variant.defining)
        assert load_run(tmp_path / name).has_values == issubclass(variant, ILQL)
