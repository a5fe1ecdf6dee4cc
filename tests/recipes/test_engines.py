"""Games that an inference engine plays: the trainer scores them, and its weights are the engine's."""

import importlib.util
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.recipes.commands import assert_same_runs, interrupted_at, log_of, refused
from tests.recipes.walks import ARCHER
from torchrl_lang.__main__ import main
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.recipes.algorithms import PPO, train
from torchrl_lang.recipes.collect import Games
from torchrl_lang.recipes.engines import engine_figures, open_engine, score_as_trainer
from torchrl_lang.recipes.online import OnlineRun, kl_transform, load_initial_policy
from torchrl_lang.recipes.online_algorithms import PPOLearner
from torchrl_lang.text import CharTokenizer

SMALL = ["--iterations", "3", "--games", "8", "--turns", "3", "--batch-size", "4", "--eval-every", "2"]
SMALL += ["--eval-games", "4", "--engine", "transformers"]
HAS_VLLM = importlib.util.find_spec("vllm") is not None
WITHOUT_VLLM = pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VLLM = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "gpu_memory_utilization": 0.2}
ENGINES = [("transformers", {}), pytest.param("vllm", VLLM, marks=[WITHOUT_VLLM, pytest.mark.slow])]
SAME = 1e-4 if DEVICE == "cuda" else 1e-5


def arguments(recipe, start, out, *more):
    return ["train", recipe, "--start", str(start), "--out", str(out), *SMALL, *more]


def played(env, engine, policy):
    """Rows that an engine played, and the figures of its error, after the trainer has scored them."""
    steps = env.rollout(8, engine.policy, break_when_any_done=False)
    rows = rows_from_rollout(steps, unfinished="truncate", carry=["token_log_prob"])
    scored = score_as_trainer(policy, rows)
    assert torch.equal(scored["engine_log_prob"], rows["token_log_prob"])
    return scored, {name: float(value) for name, value in engine_figures(scored).items()}


@pytest.mark.parametrize(("kind", "options"), ENGINES)
def test_an_engine_samples_from_the_policy_by_the_weights_that_were_sent(kind, options):
    """Where it has others the trainer's ratio is 1 nevertheless, and the error is seen."""
    env = CorridorEnv(4, batch_size=[32], seed=0, device=DEVICE)
    size = env.tokenizer.vocab_size + 3  # the model has more embeddings than there are tokens
    torch.manual_seed(0)
    lm = causal_lm("llama", vocab_size=size, layers=2, width=64, heads=2, max_length=64).to(DEVICE)
    head = ValueHead(64).to(DEVICE)
    policy = UtteranceActor(language_actor(lm), env.tokenizer.control, env.action_length, temperature=0.7, value=head)
    loss = PPOLoss(policy, value_module(head))
    engine = open_engine(PPO(start=Path("a"), out=Path("b"), engine=kind, engine_option=options), lm, policy)
    fresh = played(env, engine, policy)[1]
    assert fresh["engine_gap"] < fresh["engine_gap_max"] < SAME
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0)
    stale, error = played(env, engine, policy)
    assert error["engine_gap_max"] > error["engine_gap"] > 0.01
    assert error["engine_ratio"] == pytest.approx(1, abs=0.1)
    out = loss(loss.estimate(stale, reuse_values=True))
    assert abs(out["kl_approx"]) < 1e-5
    assert out["clip_fraction"] == 0
    engine.send_weights()
    assert played(env, engine, policy)[1]["engine_gap_max"] < SAME
    if kind == "transformers":
        assert all(torch.equal(w, x) for w, x in zip(lm.parameters(), engine.policy.parameters(), strict=True))
        engine.policy.wrapper.model.register_forward_hook(lambda m, a, out: setattr(out, "logits", out.logits / 2))
        wrong, error = played(env, engine, policy)
        assert error["engine_gap"] > 0.02
        assert abs(loss(loss.estimate(wrong, reuse_values=True))["kl_approx"]) < 1e-5


@pytest.mark.parametrize("examples", [0.0, 0.4])
def test_scores_of_the_trainer_are_those_that_it_writes_while_acting(examples, wordle):
    options = PPO(start=wordle / "bc", out=Path("unused"), games=32, examples=examples, temperature=0.8)
    begun = load_initial_policy(options)
    run = OnlineRun(options, begun, kl_transform(options, begun), PPOLearner(options, begun))
    with closing(run.games):
        rows = run.games.play(to_end=True).rows
    scored, agent = score_as_trainer(begun.policy, rows), rows["agent_mask"]
    close = {"atol": 1e-5, "rtol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(scored["token_log_prob"], rows["token_log_prob"], **close)
    torch.testing.assert_close(scored["state_value"][agent], rows["state_value"][agent], **close)
    assert rows["state_value"][agent].isfinite().double().mean() > 0.4
    assert engine_figures(scored)["engine_gap_max"] < 1e-5


@pytest.mark.parametrize("recipe", ["ppo", "grpo", "rejection", "archer"])
def test_every_recipe_learns_from_the_games_of_an_engine(recipe, wordle, tmp_path):
    weights = ["--max-engine-weight", "2", "--examples", "0.3"]
    more = {"ppo": weights, "archer": ARCHER}.get(recipe, [])
    assert main(arguments(recipe, wordle / "bc", tmp_path / "run", "--turns", "6", *more)) == 0
    log = log_of(tmp_path / "run")
    assert len(log) == 3
    assert all(float(row["engine_gap"]) <= float(row["engine_gap_max"]) < 1e-4 for row in log)
    assert abs(float(log[0]["kl"])) < 1e-4
    assert float(log[-1]["kl"]) != 0


def test_an_interrupted_run_sends_its_weights_and_ends_with_the_same_numbers(wordle, tmp_path):
    """What the engine samples depends on torch's random state, which checkpoints have."""
    more = ["--turns", "6", "--lr", "0.01", "--value-warmup", "0", "--games", "4"]
    assert main(arguments("ppo", wordle / "bc", tmp_path / "whole", *more)) == 0
    call = arguments("ppo", wordle / "bc", tmp_path / "broken", *more)
    with interrupted_at(Games, "play", 3):
        assert main(call) == 130
    assert main(call) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("engine", [{}, {"engine": "transformers"}, {"engine": "transformers", "max_engine_weight": 2}])
def test_it_learns_as_without(engine, tmp_path):
    torch.manual_seed(0)
    size = CharTokenizer.from_alphabet("abc").vocab_size
    causal_lm("llama", vocab_size=size, layers=1, width=16, heads=2, max_length=16).save_pretrained(tmp_path / "lm")
    sizes = {"games": 64, "turns": 1, "iterations": 12, "eval_every": 12, "eval_games": 64, "batch_size": 64}
    given = {"pretrained": str(tmp_path / "lm"), "task": "tests.recipes.games:letters_env", "out": tmp_path / "run"}
    learning = {"lr": 0.01, "warmup": 0, "value_warmup": 0, "kl_coef": 0.0, "kl_target": None}
    found = PPO(**given, **learning, **sizes, **engine)
    assert train(found) > 2.5  # of at most 3
    assert float(log_of(tmp_path / "run")[0]["return"]) < 1.5


def test_what_an_engine_cannot_do_is_refused(wordle, tmp_path, capsys):
    call = arguments("ppo", wordle / "bc", tmp_path / "run")
    takes = "transformers takes dtype alone, such as bfloat16"
    assert takes in refused(capsys, *call, "--engine-option", "dtype=float99")
    needs = "--engine vllm needs an extra: pip install 'torchrl-lang[vllm]'"
    assert HAS_VLLM or needs in refused(capsys, *call, "--engine", "vllm")
