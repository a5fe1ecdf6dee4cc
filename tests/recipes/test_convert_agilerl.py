"""`convert-agilerl`: an agent of AgileRL as a run, which is evaluated, watched and trained on like any other."""

import json
from pathlib import Path

import pytest
import torch

from tests.agilerl_agents import make_agent
from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset
from torchrl_lang.modules import read_agilerl
from torchrl_lang.modules.agilerl.export import export
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.schema import ACTION

TOKENS, POSITIONS = 35, 74


@pytest.fixture
def data(wordle):
    return wordle / "data"


def convert(source: Path, data: Path, out: Path) -> int:
    return main(["convert-agilerl", "--source", str(source), "--data", str(data), "--out", str(out)])


@pytest.fixture(scope="module")
def run(wordle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    export(make_agent(vocab=TOKENS, length=POSITIONS), folder / "agent")
    assert convert(folder / "agent", wordle / "data", folder / "run") == 0
    return folder / "run"


def test_its_policy_and_guidance_are_the_agents(run, data):
    """At the first token: the policy's log-probabilities plus beta times the least target value."""
    agent, opened = read_agilerl(run.parent / "agent"), load_run(run)
    row = load_dataset(data)[:1].clone()
    row["attention_mask"] = torch.arange(row["tokens"].shape[-1])[None] < 1
    written = opened.policy(2.0, method="sample", seed=0)(row)
    first = written[ACTION][0, 0]
    start = row["tokens"][:, :1]
    states = agent.target.transformer(start).last_hidden_state[0]
    scores = agent.policy(start).logits[0, -1] + 2.0 * agent.target_qvalue(states)[0].amin(0)
    scores[opened.policy().decoder.rule.forbidden] = -torch.inf  # padding and the like
    torch.testing.assert_close(written["token_log_prob"][0, 0], scores.log_softmax(-1)[first], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores, agent.policy(start).logits[0, -1])
    record = json.loads((run / "config.json").read_text())
    assert (record["notes"]["task"], record["agilerl"]["expectile"]) == ("wordle", 0.8)


@pytest.mark.slow
def test_it_is_evaluated_watched_and_trained_on(run, data, tmp_path, capsys):
    assert main(["evaluate", "--run", str(run), "--games", "4", "--beta", "0", "3"]) == 0
    assert "run beta 3 greedy" in capsys.readouterr().out
    assert main(["play", "wordle", "--watch", str(run), "--games", "1", "--seed", "0"]) == 0
    small = ["--steps", "2", "--eval-every", "2", "--eval-games", "4", "--batch-size", "4"]
    assert main(["train", "ilql", "--data", str(data), "--start", str(run), "--out", str(tmp_path / "on"), *small]) == 0
    assert load_run(tmp_path / "on").model.lm.config.model_type == "agilerl_gpt"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vocab": 36, "length": POSITIONS}, "The agent has a vocabulary of 36"),
        ({"vocab": TOKENS, "length": 8}, "positions for 8, which do not fit"),
    ],
)
def test_agents_that_do_not_fit_the_data_are_refused(more, message, data, tmp_path, capsys):
    export(make_agent(**more), tmp_path / "agent")
    assert convert(tmp_path / "agent", data, tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_places_that_are_taken_are_refused(run, data, tmp_path, capsys):
    assert convert(run.parent / "agent", data, run) == 2
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "agent.pt").write_bytes(b"PK")
    assert convert(tmp_path / "agent.pt", data, tmp_path / "run") == 2
    assert "agilerl/export.py" in capsys.readouterr().err
