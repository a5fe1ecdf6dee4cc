"""What a user needs to hold on a GPU, compared with the CPU. ``TEST_DEVICE=cpu`` runs the same code without a GPU."""

import os
import warnings

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.objectives import SoftUpdate
from transformers import GPT2Model

from tests.algorithm_distillation.models import CELL, CONTEXT, EPISODE, continuous, model, windows
from tests.algorithm_distillation.test_loss import WEIGHTS
from tests.envs.conftest import ENVS, WORDS, wordle_env
from tests.modules.test_decoding import K, guidance
from tests.modules.test_prefix_cache import WIDTH, N, agree, grown, lm_of, own_values, pair
from tests.modules.toys import CONTROL, rows, tiny_lm, without_blocks
from tests.objectives.models import LOSSES, losses_of, make_ilql, make_ppo, make_rows, rows_for, total
from tests.objectives.test_contract import assert_same, gradients
from tests.processes import run, spawned
from tests.recipes.algorithm_distillation.test_ad import train as train_ad
from tests.recipes.test_text_ad import record
from tests.recipes.test_text_ad import train as train_text_ad
from tests.recipes.walks import ALGORITHMS, generate, train
from tests.transforms.test_rows import jitter, score, speaker
from torchrl_lang.__main__ import main
from torchrl_lang.algorithm_distillation import ADLoss, HistoryActor
from torchrl_lang.data import EpisodeRows, row_buffer, rows_from_rollout
from torchrl_lang.envs import CompiledRollout, check_language_env
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.modules import UtteranceActor, language_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.training import Checkpointer, RandomState, adamw, muon_adamw, train_steps
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, RowReference, frozen_copy

# How often a loss waits for the device: for the check of the rows (PPO's has two parts), twice to find the decisions,
# to read the lengths, and in the attention mask of transformers; CHAI, which has no trunk, to find its candidates.
MOST_WAITS = {"ilql": 5, "chai": 6, "ppo": 6}
DEVICE = os.environ.get("TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.slow,
]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # sums of single precision in another order


@pytest.fixture(autouse=True)
def without_a_mode():
    yield
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def never_wait(mode="error"):
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def on_cpu(values):
    return {key: value.detach().cpu() for key, value in values.items()}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_and_its_gradients_are_those_of_the_cpu(name):
    batch, here, there = rows_for(name), LOSSES[name](), LOSSES[name]().to(DEVICE)
    assert_same(on_cpu(there(batch.to(DEVICE))), on_cpu(here(batch)), **CLOSE)
    assert_same(on_cpu(gradients(there, batch.to(DEVICE))), gradients(here, batch), **CLOSE)


def test_estimates_of_ppo_are_those_of_the_cpu():
    batch = rows_for("ppo").exclude("advantage", "value_target", "state_value")
    here, there = make_ppo().estimate(batch.clone()), make_ppo().to(DEVICE).estimate(batch.to(DEVICE))
    assert_same(on_cpu(there), on_cpu(here), **CLOSE)


@pytest.mark.parametrize("make", [model, continuous])
def test_the_loss_of_algorithm_distillation_is_that_of_the_cpu_and_never_waits(make):
    batch, here, there = windows(make()), ADLoss(make(), **WEIGHTS), ADLoss(make(), **WEIGHTS).to(DEVICE)
    expected, moved = gradients(here, batch), batch.to(DEVICE)
    gradients(there, moved)
    never_wait()
    found = gradients(there, moved)
    never_wait("default")
    assert_same(on_cpu(found), expected, rtol=1e-3, atol=1e-4)  # weights of order one, so values are large


@pytest.mark.parametrize("name", MOST_WAITS)
def test_a_loss_waits_to_find_its_decisions_and_the_rest_of_a_step_never(name):
    make = make_ilql if name == "ilql" else LOSSES[name]
    loss, batch = make().to(DEVICE), rows_for(name).to(DEVICE)
    updater = None if name == "ppo" else SoftUpdate(loss, tau=0.1)
    for kind in (adamw,) if name == "chai" else (adamw, muon_adamw):  # CHAI trains no linear layer
        optimizer = kind(loss, 1e-3)
        for measured in (False, True):  # the first time libraries set themselves up
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                never_wait("warn" if measured else "default")
                terms = total(loss(batch))
            never_wait("error" if measured else "default")
            terms.backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if updater is not None:
                updater.step()
            never_wait("default")
        found = [str(one.message) for one in waits if "synchroniz" in str(one.message)]
        assert len(found) <= MOST_WAITS[name], [f"{one.filename}:{one.lineno}" for one in waits]


@pytest.mark.filterwarnings("ignore:GPT2Model decodes without a key-value cache:UserWarning")  # it is replaced
def test_a_compiled_loss_is_the_eager_one(monkeypatch):
    monkeypatch.setattr(GPT2Model, "forward", without_blocks)
    loss, batch = make_ilql().to(DEVICE), make_rows().to(DEVICE)
    torch.compiler.reset()
    assert_same(losses_of(torch.compile(loss)(batch)), losses_of(loss(batch)), **CLOSE)


def test_training_in_bfloat16_lowers_the_loss():
    loss, batch = LOSSES["ilql-all-terms-in-pieces"]().to(DEVICE), make_rows(16).to(DEVICE)
    SoftUpdate(loss, tau=0.1)
    steps = train_steps(loss, [batch], adamw(loss, 1e-2), steps=30, max_grad_norm=1.0, autocast=torch.bfloat16)
    found = [figures["loss"] for _, figures in steps]
    assert found[-1] < 0.7 * found[0]


def test_a_checkpoint_of_the_gpu_is_loaded_on_the_cpu(tmp_path):
    losses = [make_ilql().to(place) for place in (DEVICE, "cpu")]
    optimizers = [adamw(loss, 1e-2) for loss in losses]
    batch = make_rows()
    total(losses[0](batch.to(DEVICE))).backward()
    optimizers[0].step()
    for loss, optimizer, use in zip(losses, optimizers, ("save", "restore"), strict=True):
        saved = Checkpointer(tmp_path).register("loss", loss).register("optimizer", optimizer)
        saved.register("random", RandomState())
        saved.save(1) if use == "save" else saved.restore()
    assert {value.device.type for value in losses[1].state_dict().values()} == {"cpu"}
    assert_same(on_cpu(losses[0].state_dict()), losses[1].state_dict(), rtol=0, atol=0)
    first, second = (next(iter(optimizer.state.values())) for optimizer in optimizers)
    assert_same(on_cpu(first), second, rtol=0, atol=0)
    total(losses[1](batch)).backward()
    optimizers[1].step()


WAYS = [("gpt2", None, "sample"), ("gpt2", "exp", "greedy"), ("gpt2", "own trunk", "best_of")]
WAYS += [("llama", "own trunk", "beam"), ("qwen2", None, "sample")]


@pytest.mark.parametrize(("kind", "guide", "method"), WAYS)
def test_dialogues_go_as_without_a_prefix_cache_and_as_on_the_cpu(kind, guide, method):
    guides = {None: lambda: None, "exp": lambda: guidance().double(), "own trunk": own_values}
    actors = [actor.to(DEVICE) for actor in pair(lm_of(kind), guidance=guides[guide](), method=method)]
    plain = pair(lm_of(kind), guidance=guides[guide](), method=method)[0]
    batch = rows(N, WIDTH, longest=9)
    for _ in range(3):
        action = agree(actors, batch.to(DEVICE))["action"].cpu()
        assert torch.equal(action, plain(batch.clone())["action"])
        batch = grown(batch, action)


def test_a_compiled_trunk_says_what_an_eager_one_says():
    """And one of half precision decodes."""
    lm, batch = tiny_lm(max_length=WIDTH + K).to(DEVICE), rows(N, WIDTH, longest=9).to(DEVICE)
    torch.compiler.reset()
    eager, compiled = (
        UtteranceActor(language_actor(lm, compile=flag), CONTROL, K, method="greedy") for flag in (False, True)
    )
    for _ in range(2):
        action = eager(batch.clone())["action"]
        assert torch.equal(compiled(batch.clone())["action"], action)
        batch = grown(batch.cpu(), action.cpu()).to(DEVICE)
    said = UtteranceActor(language_actor(lm.to(torch.bfloat16)), CONTROL, K)(rows(N, WIDTH, longest=9).to(DEVICE))
    assert said["token_log_prob"].isfinite().all()
    assert said["action"].device.type == torch.device(DEVICE).type


def test_acting_in_context_is_that_of_the_cpu():
    here, there = HistoryActor(model(), seed=0), HistoryActor(model().to(DEVICE), seed=0)
    generator = torch.Generator().manual_seed(0)
    for actor in (here, there):
        actor.begin(5)
    for step in range(2 * CONTEXT):
        observation = torch.stack([torch.randint(n, (5,), generator=generator) for n in CELL.sizes], -1)
        action = here.act(observation)
        assert torch.equal(there.act(observation.to(DEVICE)).cpu(), action)
        reward, done = torch.rand(5, generator=generator), torch.full((5,), step % EPISODE == EPISODE - 1)
        here.observe(reward, done)
        there.observe(reward.to(DEVICE), done.to(DEVICE))


@pytest.mark.parametrize("name", sorted(ENVS))
def test_an_environment_on_the_gpu_keeps_all_rules_and_plays_as_on_the_cpu(name):
    make, utterances, _ = ENVS[name]
    check_language_env(
        make(batch_size=[3], device=DEVICE), lambda n: make(batch_size=[n], device=DEVICE), utterances=utterances
    )
    played = []
    for device in ("cpu", DEVICE):
        env = make(batch_size=[3], seed=1, device=device)
        td, generator, found = env.reset(), torch.Generator().manual_seed(0), []
        for _ in range(8):
            action = torch.randint(env.tokenizer.vocab_size, env.action_spec.shape, generator=generator)
            step, td = env.step_and_maybe_reset(td.set("action", action.to(device)))
            found.append(step.cpu())
        played.append(torch.stack(found, -1))
    assert (played[0] == played[1]).all()


def test_steps_of_environments_in_tensors_never_wait():
    for name, (make, _, in_tensors) in ENVS.items():
        if in_tensors and name != "random_walks":
            env = make(batch_size=[3], seed=0, device=DEVICE)
            td = env.reset()
            action = env.action_spec.rand()
            td = env.step(td.set("action", action))["next"].set("action", action)
            never_wait()
            env._step(td)
            never_wait("default")


@pytest.mark.parametrize("keep", ["rows", "steps"])
def test_a_compiled_rollout_is_that_of_the_cpu(keep):
    found = []
    for device in ("cpu", DEVICE):
        torch.compiler.reset()
        player = RandomWordPlayer(WORDS, prob_smart=0.5, seed=1).to(device)
        play = CompiledRollout(wordle_env(batch_size=[5], seed=5, device=device), player, 14, keep=keep)
        found.append(play().cpu())
    assert found[0].batch_size == found[1].batch_size
    assert (found[0] == found[1]).all()


def test_a_collector_plays_under_a_kl_penalty_and_the_rows_train_from_the_cpu():
    """Actor and frozen reference are on the GPU, the replay buffer is not."""
    env = wordle_env(batch_size=[8], seed=0, device=DEVICE)
    policy = speaker(env)
    frozen = frozen_copy(policy)
    jitter(policy)
    policy.to(DEVICE)
    controller = AdaptiveKLController(0.5, target=1.0, horizon=100)
    by_turn = TransformedEnv(env, KLConstrainedTransform(frozen, controller).to(DEVICE))
    collector = Collector(by_turn, policy, frames_per_batch=64, total_frames=192, device=DEVICE)
    rows_of, kind = EpisodeRows(carry=["token_log_prob"]), torch.device(DEVICE).type
    for steps in collector:
        step, coef = steps["next"], controller.coef.clone()
        assert step["kl"].device.type == step["reward"].device.type == kind
        torch.testing.assert_close(step["kl"], steps["token_log_prob"] - step["ref_log_prob"], **CLOSE)
        expected = step["raw_reward"] - coef.to(DEVICE) * step["kl"].sum(-1, keepdim=True)
        torch.testing.assert_close(step["reward"], expected, **CLOSE)
        controller.update(step["kl"].sum(-1).mean(), n=8)
        assert controller.coef.device.type == "cpu"
        assert controller.coef != coef
        played = rows_of(steps)
    collector.shutdown()
    log_prob = score(RowReference(frozen_copy(policy)), played.select("tokens", "attention_mask", "agent_mask"))
    torch.testing.assert_close(log_prob, played["token_log_prob"], rtol=1e-4, atol=1e-4)
    loss, buffer = BCLoss(policy).to(DEVICE), row_buffer(played.cpu(), batch_size=4)
    steps = train_steps(loss, lambda: buffer.sample().to(DEVICE), muon_adamw(loss, 1e-2), steps=20)
    found = [float(figures["loss"]) for _, figures in steps]
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_a_rollout_becomes_the_rows_of_the_cpu():
    env = wordle_env(batch_size=[6], seed=0, device=DEVICE)
    steps = env.rollout(5, RandomWordPlayer(WORDS, seed=1).to(DEVICE), break_when_any_done=False)
    for unfinished in ("drop", "truncate"):
        rows_there = rows_from_rollout(steps, unfinished=unfinished)
        assert rows_there["tokens"].device.type == torch.device(DEVICE).type
        assert_same(on_cpu(rows_there), dict(rows_from_rollout(steps.cpu(), unfinished=unfinished)), rtol=0, atol=0)


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walks")
    generate(folder)
    assert train(folder, "bc", "bc", "--device", DEVICE) == 0
    return folder


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "bc"])
def test_an_offline_recipe_trains(walks, name):
    assert train(walks, name, name, *ALGORITHMS[name], "--device", DEVICE, "--bf16") == 0


def test_a_run_of_the_gpu_is_judged_there_and_where_there_is_none(tmp_path):
    data = ["--words", "10", "--games", "60", "--out", str(tmp_path / "data")]
    assert main(["generate", "wordle", *data]) == 0
    assert train(tmp_path, "ilql", "run", "--device", DEVICE) == 0
    done = load_run(tmp_path / "run")
    found = [
        done.task.evaluate(done.policy(1.0, method="greedy").to(device), games=8, seed=0, device=device)
        for device in ("cpu", DEVICE)
    ]
    assert found[0][0].scalars() == pytest.approx(found[1][0].scalars(), abs=1e-5, nan_ok=True)
    call = ["evaluate", "--run", str(tmp_path / "run"), "--games", "8"]
    program = run("-m", "torchrl_lang", *call, CUDA_VISIBLE_DEVICES="")
    assert program.returncode == 0, program.stderr


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("ppo", []),
        ("rejection", []),
        ("archer", []),
        ("ppo", ["--collector", "sync", "--workers", "2"]),
        ("dapo", ["--group-size", "4", "--curriculum", "5"]),
    ],
)
def test_an_online_recipe_plays_and_learns(walks, tmp_path, recipe, more):
    options = ["--iterations", "2", "--games", "8", "--batch-size", "4", "--eval-every", "2", "--eval-games", "8"]
    options += ["--value-warmup", "1"] if recipe in ("ppo", "archer") else []
    call = ["train", recipe, "--start", str(walks / "bc"), "--out", str(tmp_path / "run"), "--device", DEVICE]
    with spawned():
        assert main([*call, *options, *more]) == 0


def test_recipes_of_algorithm_distillation_train(tmp_path):
    assert train_ad(tmp_path / "ad", "--device", DEVICE) == 0
    record(tmp_path / "histories")
    assert train_text_ad(tmp_path / "histories", tmp_path / "text", "--device", DEVICE) == 0
