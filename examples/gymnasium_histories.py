"""Learning histories of TorchRL's own DQN and PPO on Gymnasium tasks, and a model that is distilled from them.

The tasks are cart poles of which some swap the two actions. A new learner begins on each of them, and every step that
it takes is recorded with its log-probability. Gymnasium comes with ``pip install 'torchrl-lang[gym]'``.
"""

import tempfile
from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import MLP, EGreedyModule, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate, ValueEstimators
from torchrl.objectives.value import GAE

from torchrl_lang.algorithm_distillation import (
    ADLoss,
    ADTransformer,
    HistoryActor,
    HistoryWindows,
    HistoryWriter,
    episode_returns,
    evaluate_in_context,
    load_history,
)
from torchrl_lang.training import adamw, train_steps

STEPS, FRAMES, STREAMS, LIMIT = 4000, 100, 1, 50  # of a life, between two updates, lives of each task, of an episode
FORCES = (10.0, -10.0)  # a negative force swaps the actions


def cart_pole(force):
    """A variant of the task, with numbers as actions."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=True, max_episode_steps=LIMIT)
    env._env.unwrapped.force_mag = force
    return env


def dqn(env):
    """A policy, and the update that returns the log-probabilities of the actions of a batch."""
    actor = QValueActor(MLP(4, 2, num_cells=[64, 64]), in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=STEPS // 3)
    loss = DQNLoss(actor, double_dqn=True)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.99)
    target, optimizer = SoftUpdate(loss, tau=0.02), torch.optim.Adam(loss.parameters(), 1e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(STEPS), batch_size=64)

    def update(batch):
        values, epsilon = batch["action_value"], explore.eps.clone()
        greedy = values.argmax(-1) == batch["action"]
        buffer.extend(batch.select("observation", "action", "next"))
        for _ in range(FRAMES // 2):
            optimizer.zero_grad()
            loss(buffer.sample())["loss"].backward()
            optimizer.step()
            target.step()
        explore.step(len(batch))
        return (epsilon / 2 + (1 - epsilon) * greedy).log()

    return TensorDictSequential(actor, explore), update


def ppo(env):
    """The same of proximal policy optimization."""
    network = TensorDictModule(MLP(4, 2, num_cells=[64, 64]), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        network, in_keys=["logits"], spec=env.action_spec, distribution_class=Categorical, return_log_prob=True
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    advantage, loss = GAE(gamma=0.99, lmbda=0.95, value_network=critic), ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), 2e-3)

    def update(batch):
        advantage(batch)
        for _ in range(8):
            losses = loss(batch)
            optimizer.zero_grad()
            sum(losses[key] for key in losses.keys() if key.startswith("loss_")).backward()
            optimizer.step()
        return batch["action_log_prob"].detach()

    return actor, update


def life(force, learner, seed):
    """Every step of one learner on one task, in the entries of a ``LearningHistory``, ``[STEPS]``."""
    torch.manual_seed(seed)
    env = cart_pole(force)
    env.set_seed(seed)
    policy, update = learner(env)
    rows = []
    options = {"frames_per_batch": FRAMES, "total_frames": STEPS, "auto_register_policy_transforms": False}
    for batch in Collector(env, policy, **options):
        after = {key: batch["next", key] for key in ("reward", "done", "terminated")}
        before = {key: batch[key].clone() for key in ("observation", "action")}
        rows.append(TensorDict({**before, **after, "action_log_prob": update(batch)}, batch.shape))
    steps = torch.cat(rows)
    begins = torch.cat([torch.tensor([True]), steps["done"].squeeze(-1)[:-1]])
    number = torch.arange(STEPS)
    steps["episode"] = begins.cumsum(-1) - 1
    steps["episode_step"] = number - torch.where(begins, number, 0).cummax(-1).values
    return steps


tasks = [{"task": number, "force": force} for number, force in enumerate(FORCES)]
for learner in (dqn, ppo):
    with tempfile.TemporaryDirectory() as folder:
        with HistoryWriter(folder, tasks, STREAMS, STEPS, source={"algorithm": learner.__name__}) as writer:
            lives = [torch.stack([life(force, learner, seed) for seed in range(STREAMS)]) for force in FORCES]
            writer.extend(torch.stack(lives))
        history = load_history(folder)
        episodes = int(history.steps["done"].sum(-2).min())
        curve = episode_returns(history.steps, episodes).mean((0, 1))
        print(
            f"{learner.__name__}: {history}, return {curve[:10].mean():.0f} at first, {curve[-10:].mean():.0f} at last"
        )
        torch.manual_seed(0)
        model = ADTransformer.for_env(cart_pole(10.0), context=200, episode_length=LIMIT, width=32, layers=2, heads=2)
        loss, windows = ADLoss(model), HistoryWindows(history, 200, skip_episodes=5, seed=0).buffer(batch_size=16)
        for _ in train_steps(loss, windows.sample, adamw(loss, 2e-3), steps=100):
            pass
        env = SerialEnv(2, [partial(cart_pole, force) for force in FORCES])
        returns = evaluate_in_context(env, HistoryActor(model.eval(), seed=0), episodes=10)
        share, first, last = (
            float(loss(windows.sample())["action_accuracy"]),
            returns[:, 0].mean(),
            returns[:, -3:].mean(),
        )
        print(
            f"  distilled: {share:.0%} of its actions; return {first:.0f} in the first episode, {last:.0f} in the last"
        )
