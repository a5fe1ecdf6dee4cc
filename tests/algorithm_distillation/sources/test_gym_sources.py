"""DQN and PPO on Gymnasium tasks: flags, log-probabilities, seeds, and that they learn."""

import sys

import pytest
import torch

from torchrl_lang.algorithm_distillation import LearningHistory, load_history, record_history
from torchrl_lang.algorithm_distillation.sources import DQN, PPO, GymTask, LinearDecay, cart_pole
from torchrl_lang.algorithm_distillation.sources.gym_source import step_numbers

gymnasium = pytest.importorskip("gymnasium")

SHORT = {"max_episode_steps": 9}
TASKS = [cart_pole(**SHORT), cart_pole(force=-10.0, length=1.0, **SHORT)]
SMALL = {"frames": 16, "width": 8, "batch_size": 8}
SOURCES = {
    "dqn": lambda **options: DQN(TASKS, 70, streams=2, updates=1, **SMALL, **options),
    "ppo": lambda **options: PPO(TASKS, 70, streams=2, epochs=1, **SMALL, **options),
    "continuous": lambda **options: PPO(
        [GymTask("Pendulum-v1", {"g": g, **SHORT}) for g in (5.0, 10.0)], 70, streams=2, epochs=1, **SMALL, **options
    ),
}


@pytest.fixture(params=SOURCES)
def make(request):
    return SOURCES[request.param]


@pytest.mark.slow
def test_histories_are_well_formed_and_episodes_at_the_limit_are_truncated(make):
    source = make()
    steps = LearningHistory(source.history(), source.tasks, source=source.describe()).steps  # checks flags and numbers
    assert steps.shape == (2, 2, 70)
    limit = steps["episode_step"] == 8
    done, terminated = steps["done"].squeeze(-1), steps["terminated"].squeeze(-1)
    assert limit.any()
    assert done[limit].all()
    assert (done[~limit] == terminated[~limit]).all()  # nothing else truncates
    is_over = (steps["observation"][..., 0].abs() > 2.4) | (steps["observation"][..., 2].abs() > 0.2095)
    if "Pendulum-v1" in source.tasks[0]["name"]:
        assert not terminated.any()
        assert steps["action"].shape == (2, 2, 70, 1)
    else:
        assert not terminated[limit].all()
        assert not is_over.any()  # what ended an episode is not among the observations before an action
    # A new episode begins at a start state.
    starts = steps["observation"][steps["episode_step"] == 0]
    assert starts.unique(dim=0).shape[0] == starts.shape[0]
    if steps["action"].ndim == 3:
        assert (starts.abs() <= 0.05).all()


@pytest.mark.slow
def test_a_history_is_the_same_every_time_and_in_any_blocks(make):
    before = torch.get_rng_state()
    whole, blocks = make(seed=3).history(), list(make(seed=3).blocks(32))
    assert torch.equal(torch.get_rng_state(), before)
    assert [block.shape[-1] for block in blocks] == [32, 32, 6]
    assert (torch.cat(blocks, -1) == whole).all()
    flat = whole["observation"].flatten(0, 1)
    assert flat.unique(dim=0).shape[0] == 4  # tasks and streams differ
    assert not torch.equal(make(seed=4).history()["observation"], whole["observation"])


class Spy:
    """Keeps what each learner was given."""

    def __init__(self, source, monkeypatch):
        self.batches = []
        build = source._learner

        def learner(env, random):
            made = build(env, random)
            learn = made.learn

            def spied(batch):
                given = batch.clone()
                epsilon = made.explore.eps.item() if isinstance(source, DQN) else None
                with torch.no_grad():
                    self.batches.append((given, self.distribution(source, made, given, epsilon)))
                return learn(batch)

            made.learn = spied
            return made

        monkeypatch.setattr(source, "_learner", learner)

    def distribution(self, source, made, batch, epsilon):
        """The log-probability of each action under the networks before they learn."""
        if not isinstance(source, DQN):
            return made.policy.get_dist(batch).log_prob(batch["action"])
        values = made.policy[0](batch.select("observation"))["action_value"]
        probability = torch.full_like(values, epsilon / 2)
        for row, best in enumerate(values.argmax(-1).tolist()):
            probability[row, best] += 1 - epsilon
        return probability[torch.arange(len(batch)), batch["action"]].log()


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_networks_that_acted(make, monkeypatch):
    source = make()
    spy = Spy(source, monkeypatch)
    history = source.history().flatten(0, 1)
    assert len(spy.batches) == 4 * 5
    for number, stream in enumerate(history.unbind(0)):
        of_stream = spy.batches[5 * number : 5 * number + 5]  # streams are learned one after the other
        batch, expected = (torch.cat(parts)[:70] for parts in zip(*of_stream, strict=True))
        torch.testing.assert_close(stream["action_log_prob"], expected, atol=1e-4, rtol=1e-4)
        assert all(torch.equal(stream[key], batch[key]) for key in ("observation", "action"))
        assert all(torch.equal(stream[key], batch["next", key]) for key in ("reward", "done", "terminated"))
    assert history["action_log_prob"].unique().numel() > 2


def test_epsilon_decays_over_the_history():
    source = DQN(TASKS[:1], 64, updates=1, decay=LinearDecay(1.0, 0.2, fraction=(0.5, 0.5)), **SMALL)
    history = source.history()[0, 0]
    for batch, epsilon in zip(history["action_log_prob"].exp().split(16), [1.0, 0.6, 0.2, 0.2], strict=True):
        allowed = torch.tensor([epsilon / 2, 1 - epsilon / 2])
        assert ((batch[:, None] - allowed).abs() < 1e-6).any(-1).all()


def test_tasks_are_described_and_differ():
    task = cart_pole(length=1.0, force=-5.0, pole_mass=0.2, cart_mass=0.8, max_episode_steps=50)
    env = task.make()
    inner = env._env.unwrapped
    assert (inner.length, inner.force_mag, inner.masspole, inner.masscart) == (1.0, -5.0, 0.2, 0.8)
    assert (inner.polemass_length, inner.total_mass) == (0.2, 1.0)
    assert env._env.spec.max_episode_steps == 50
    assert DQN([task], 10).tasks == [
        {
            "task": 0,
            "name": "CartPole-v1",
            "options": {"max_episode_steps": 50},
            "attributes": {
                "length": 1.0,
                "force_mag": -5.0,
                "masspole": 0.2,
                "masscart": 0.8,
                "total_mass": 1.0,
                "polemass_length": 0.2,
            },
        }
    ]
    speeds = []
    for task in (cart_pole(), cart_pole(force=-10.0)):
        env = task.make()
        env.set_seed(0)
        td = env.reset()
        speeds.append(env.step(td.set("action", torch.tensor(1)))["next", "observation"][1].item())
    assert speeds[0] > 0.1
    assert speeds[1] < -0.1


def test_the_default_cart_pole_is_that_of_gymnasium():
    changed, own = cart_pole(), gymnasium.make("CartPole-v1").unwrapped
    assert {name: getattr(own, name) for name in changed.attributes} == changed.attributes


@pytest.mark.slow
def test_a_recorded_history_is_resumed_and_compared(tmp_path):
    source = SOURCES["dqn"]()
    history = record_history(tmp_path, source, part=40)
    assert history.complete
    assert (record_history(tmp_path, SOURCES["dqn"](), part=30).steps == history.steps).all()
    assert load_history(tmp_path).source["algorithm"] == "DQN"
    assert load_history(tmp_path).tasks == source.tasks
    with pytest.raises(ValueError, match="begun with other source"):
        record_history(tmp_path, SOURCES["dqn"](seed=1))
    other = SOURCES["dqn"](seed=1)
    other.describe = source.describe
    with pytest.raises(ValueError, match="is that of another source"):
        record_history(tmp_path, other)


def returns(history):
    """The return of each whole episode of the only stream, in order."""
    episode = history["episode"][0, 0]
    total = torch.zeros(int(episode[-1]) + 1).index_add(0, episode, history["reward"][0, 0].squeeze(-1))
    return total[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: DQN([cart_pole(force=-10.0)], 4000), lambda: PPO([cart_pole()], 5000)])
def test_learners_improve(make):
    """About nine seconds on one core."""
    found = returns(make().history())
    assert found[:10].mean() < 40
    assert found[-5:].mean() > 2.5 * found[:10].mean()


class Aim(gymnasium.Env):
    """Shows a number, and pays for an action near to it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-3, 1, (1,))  # not symmetric: half of the policy's first actions are far off

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.aim = self.np_random.uniform(-1, 1, 1).astype("float32")
        return self.aim, {}

    def step(self, action):
        reward = -float(abs(action - self.aim).sum())
        self.aim = self.np_random.uniform(-1, 1, 1).astype("float32")
        return self.aim, reward, False, False, {}


@pytest.mark.slow
def test_continuous_actions_improve():
    if "Aim-v0" not in gymnasium.registry:
        gymnasium.register("Aim-v0", Aim, max_episode_steps=8)
    history = PPO([GymTask("Aim-v0")], 4096, frames=256, gamma=0.5).history()[0, 0]
    reward = -(history["action"] - history["observation"]).abs()
    torch.testing.assert_close(history["reward"], reward)  # each action beside what it answered
    assert reward[:256].mean() < -1.1
    assert reward[2048:].mean() > -0.5


@pytest.mark.slow
def test_lunar_lander():
    pytest.importorskip("Box2D")
    pytest.importorskip("pygame")
    for task in (GymTask("LunarLander-v3", {"gravity": -8.0}), GymTask("LunarLander-v3", {"continuous": True})):
        source = PPO([task], 70, epochs=1, **SMALL)
        history = LearningHistory(source.history(), source.tasks)
        assert history.steps["observation"].shape == (1, 1, 70, 8)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-lang\[gym\]'"):
        cart_pole().make()


def test_numbers_of_steps_by_hand():
    done = torch.tensor([[False, True, False, False, True], [True, True, False, False, False]])
    episode, step = step_numbers(done)
    assert episode.tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]
    assert step.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DQN([GymTask("Pendulum-v1")], 10), "DQN needs discrete actions"),
        (lambda: DQN([cart_pole(), GymTask("Acrobot-v1")], 10), "The tasks of a source have the same spaces"),
        (lambda: DQN([], 10), "needs at least one task"),
        (lambda: DQN(TASKS, 0), "steps must be at least 1"),
        (lambda: DQN(TASKS, 10, updates=0), "updates must be at least 1"),
        (lambda: PPO(TASKS, 10, streams=0), "streams must be at least 1"),
        (lambda: PPO(TASKS, 10, lmbda=2), r"lmbda must lie in \[0, 1\], got 2"),
        (lambda: PPO(TASKS, 10, learning_rate=0), "learning_rate must be positive"),
        (lambda: GymTask("CartPole-v1", attributes={"lenght": 1.0}).make(), "no attribute 'lenght'; .*'length'"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
