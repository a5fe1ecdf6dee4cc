"""The recipes on rows with features: a game whose answer no text tells, from the command line and by name."""

import json

import pytest
import torch

from tests.processes import spawned
from tests.recipes.walks import ARCHER
from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset, write_dataset
from torchrl_lang.envs.visual_dialogue.prepare import run_questioner
from torchrl_lang.evaluation.plots import read_columns
from torchrl_lang.modules import causal_lm
from torchrl_lang.recipes.algorithms import ALGORITHMS
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks import find_task

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "2"]
FROM_SCRATCH = ("bc", "ilql", "cql", "bcq", "psi", "utterance-ilql", "dt")
FROM_BC = ("chai", "qsft", "oreo", "dpo", "ipo", "kto")
NAME = "tests.recipes.games:shown_env"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A dataset of 400 random games, without and with features, and a run of BC."""
    folder = tmp_path_factory.mktemp("features")
    generate = ["generate", NAME, "--games", "400", "--batch", "50"]
    assert main([*generate, "--out", str(folder / "data")]) == 0
    assert main([*generate, "--out", str(folder / "texts"), "--option", "features=false"]) == 0
    assert train(folder, "bc", "bc") == 0
    return folder


def train(home, recipe, out, *more, data="data", task=NAME, option=None):
    places = ["--data", str(home / data), "--out", str(home / out)]
    places += [] if task is None else ["--task", task]
    places += [] if option is None else ["--option", option]
    return main(["train", recipe, *places, *TINY, *map(str, more)])


def refused(home, capsys, *arguments, **more):
    capsys.readouterr()
    assert train(home, *arguments, **more) == 2
    return capsys.readouterr().err


def opened(home, name):
    return load_run(home / name, find_task(NAME))


def policies(run):
    """Every way in which a run plays: without its values, guided by them, by those of whole utterances."""
    found = [run.policy(method="greedy")]
    found += [run.policy(run.betas[0], method="greedy")] if run.has_values else []
    return found + [run.policy(method="best_of", candidates=2, seed=0)]


def test_no_recipe_is_left_out():
    """But variants, which train as the recipes do that they are variants of."""
    assert {kind.place for kind in ALGORITHMS.values()} == {
        ALGORITHMS[name].place for name in (*FROM_SCRATCH, *FROM_BC, "ppo", "rejection", "grpo", "archer")
    }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*FROM_SCRATCH, *FROM_BC])
def test_every_offline_recipe_reads_features(home, recipe):
    start = ["--start", home / "bc"] if recipe in FROM_BC else ["--features-hidden", "5"]
    start += ["--prior", home / "bc"] if recipe == "psi" else []
    assert train(home, recipe, f"all/{recipe}", *start) == 0
    run = opened(home, f"all/{recipe}")
    assert run.model.heads["features"].config()["hidden"] == (0 if recipe in FROM_BC else 5)
    rows = run.task.env(6, seed=3).reset()
    for policy in policies(run):
        assert "features" in policy.in_keys
        changed = rows.clone().set("features", rows["features"] + 1.0)
        first, same, other = (log_probs(run, policy, given) for given in (rows, rows, changed))
        assert torch.equal(first, same)
        assert (first != other).any(-1).all()  # in every row
    if recipe == "qsft":  # the projector of the model that imitates is the start's, that of the values has learned
        start, kept, learned = opened(home, "bc").model.heads["features"], *run.model.heads.values()
        assert torch.equal(start.project.weight, kept.project.weight)
        assert not torch.equal(start.project.weight, learned.project.weight)
        assert policies(run)[1].decoder.rule.guidance.value_trunk.module.features is learned


def log_probs(run, policy, rows):
    """Log-probabilities of four answers at each row, ``[N, 4]``."""
    control, inner = run.tokenizer.control, getattr(policy, "policy", policy)  # of a decision transformer and CHAI
    actions = torch.tensor([[token, control.end_of_action] for token in run.tokenizer.encode("012?")])
    dist = inner.get_dist(rows)
    return torch.stack([dist.log_prob(action.expand(*rows.batch_size, 2)) for action in actions], -1)


@pytest.mark.slow
def test_a_start_gives_its_projector(home):
    assert train(home, "bc", "wide", "--features-hidden", "5", "--no-feature-positions") == 0
    frozen = ["--lr", "1e-12", "--weight-decay", "0"]
    assert train(home, "cql", "from-wide", "--start", home / "wide", *frozen) == 0
    before, after = (opened(home, name).model.heads["features"] for name in ("wide", "from-wide"))
    assert before.config() == after.config() == {"features": 3, "width": 16, "hidden": 5, "positions": False}
    for name, weight in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], weight, rtol=0, atol=1e-6)


def test_a_run_without_features_gets_a_new_projector(home):
    assert train(home, "bc", "blind", data="texts", option="features=false") == 0
    assert opened(home, "blind").model.heads == {}
    assert json.loads((home / "blind" / "model" / "torchrl_lang.json").read_text())["heads"] == {}
    # A model from scratch has positions for its rows alone, and these have two features as well.
    assert train(home, "bc", "seeing", "--start", home / "blind", "--no-feature-positions") == 0
    assert opened(home, "seeing").model.heads["features"].config()["positions"] is False


def test_a_pretrained_model_gets_a_new_projector(home):
    pretrained = ["--pretrained", home / "wider"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        causal_lm(vocab_size=9, layers=1, width=24, heads=2, max_length=16).save_pretrained(home / "wider")
    assert train(home, "bc", "pretrained", *pretrained) == 0
    assert opened(home, "pretrained").model.heads["features"].config()["width"] == 24


@pytest.mark.slow
def test_what_does_not_go_together_is_refused(home, capsys, tmp_path):
    dataset = load_dataset(home / "data")
    rows = dataset[:40]
    rows["features"] = torch.cat([rows["features"], rows["features"]], -1)
    write_dataset(home / "six", rows, dataset.tokenizer, notes=dict(dataset.manifest["notes"]))
    error = refused(home, capsys, "bc", "x", data="six")
    assert "show features of width 3, not 6 as" in error
    write_dataset(home / "six-alone", rows, dataset.tokenizer)
    error = refused(home, capsys, "bc", "x", "--start", home / "bc", data="six-alone", task=None)
    assert "bc reads features of width 3, those of the data have width 6: start from another one" in error
    error = refused(home, capsys, "bc", "x", "--start", home / "bc", data="texts", option="features=false")
    assert "bc reads features of width 3, those of the data have width None" in error
    error = refused(home, capsys, "bc", "x", "--start", home / "bc", "--features-hidden", "5")
    assert "--features-hidden" in error
    assert "bc has its own" in error
    error = refused(home, capsys, "bc", "x", "--features-hidden", "5", data="texts", option="features=false")
    assert "of new projectors: the data have none" in error
    write_dataset(home / "texts-alone", load_dataset(home / "texts")[:40], dataset.tokenizer)
    assert train(home, "bc", "alone", data="texts-alone", task=None) == 0
    error = refused(home, capsys, "oreo", "x", "--start", home / "alone")
    assert "does not read the features of the data: give a run of BC that does" in error
    call = ["train", "ppo", "--start", str(home / "alone"), "--out", str(tmp_path / "x"), "--task", NAME]
    assert main(call) == 2
    assert "show features of width 3, not None as" in capsys.readouterr().err


@pytest.mark.slow
def test_games_without_the_features_of_a_run_are_refused(home, capsys):
    dataset = load_dataset(home / "data")
    write_dataset(home / "alone-data", dataset[:40], dataset.tokenizer)
    assert train(home, "bc", "seen", data="alone-data", task=None) == 0
    assert "run.reply('?', features=...)" in capsys.readouterr().out
    for command in (["evaluate", "--run"], ["train", "ppo", "--out", str(home / "x"), "--start"]):
        given = ["--task", NAME, "--option", "features=false"]
        assert main([*command, str(home / "seen"), *given]) == 2
        error = capsys.readouterr().err
        assert "do not show" in error or "show features of width None" in error
    run = load_run(home / "seen")
    vectors = torch.eye(3)
    alone = [run.reply("?", features=vectors[:1]), run.reply("?", features=vectors[1:])]
    assert run.replies([["?"], ["?"]], features=[vectors[:1], vectors[1:]]) == alone
    with pytest.raises(KeyError, match="needs 'features'"):
        run.reply("?")
    for wrong in ([vectors[0]], [vectors, vectors], []):
        with pytest.raises(ValueError, match=r"Give features \[n, F\] of each of the 1 dialogues"):
            run.replies([["?"]], features=wrong)
    with pytest.raises(ValueError, match="reads image features, which requests for questions do not have"):
        run_questioner(home / "seen")


@pytest.mark.slow
def test_ilql_finds_the_answers_that_random_games_show(home, capsys):
    """From the command line: values of features, so imitation of the random games earns a fifth as much."""
    size = ["--layers", "2", "--width", "32", "--optimizer", "adamw", "--lr", "5e-3", "--batch-size", "64"]
    more = [*size, "--features-hidden", "32", "--transition-weight", "0"]
    values = ["--qvalue-weight", "5", "--value-weight", "5", "--steps", "200"]
    returns = {}
    assert train(home, "ilql", "learned/ilql", *more, *values) == 0
    for beta in ("0", "32"):  # the first imitates
        call = ["evaluate", "--run", str(home / "learned/ilql"), "--task", NAME, "--games", "100"]
        assert main([*call, "--beta", beta, "--method", "sample"]) == 0
        path = max((home / "learned/ilql").glob("evaluation*.json"), key=lambda path: len(path.name))
        returns[beta] = json.loads(path.read_text())["players"][-1]["mean_return"]
    assert returns["0"] < 0.5 < 0.9 < returns["32"]
    assert load_run(home / "learned/ilql", find_task(NAME)).choose_beta(seed=9, games=50, betas=[32.0])[32.0] > 0.9
    watch = ["play", NAME, "--watch", str(home / "learned/ilql"), "--games", "2", "--beta", "32", "--seed", "1"]
    assert main(watch) == 0
    assert capsys.readouterr().out.count("(+1)") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("ppo", ["--value-warmup", "0", "--lora-rank", "2"]),
        ("rejection", ["--best-so-far", "4", "--collector", "sync", "--workers", "1"]),
        ("archer", ["--value-warmup", "0", *ARCHER]),
    ],
    ids=["adapters", "workers", "archer"],
)
def test_online_recipes_play_games_with_features(home, recipe, more, tmp_path):
    options = ["--iterations", "2", "--games", "16", "--turns", "1", "--batch-size", "8", "--eval-games", "8"]
    options += ["--start", str(home / "bc"), "--out", str(tmp_path / "run"), "--task", NAME]
    with spawned():
        assert main(["train", recipe, *options, *more]) == 0
    begun, run = opened(home, "bc"), load_run(tmp_path / "run", find_task(NAME))
    same = torch.equal(begun.model.heads["features"].project.weight, run.model.heads["features"].project.weight)
    assert same == ("--lora-rank" in more)  # adapters train alone
    assert run.model.heads.keys() == {"value", "features"}
    assert main(["evaluate", "--run", str(tmp_path / "run"), "--task", NAME, "--games", "4"]) == 0


@pytest.mark.slow
def test_ppo_learns_from_features(home):
    options = ["--iterations", "28", "--games", "64", "--turns", "1", "--batch-size", "64", "--eval-games", "100"]
    options += ["--kl-coef", "0", "--kl-target", "none", "--lr", "0.01", "--value-warmup", "2", "--task", NAME]
    assert main(["train", "ppo", "--start", str(home / "bc"), "--out", str(home / "ppo-learned"), *options]) == 0
    assert read_columns(home / "ppo-learned" / "log.csv")["eval_return"][-1] > 0.9
