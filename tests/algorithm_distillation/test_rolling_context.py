"""The context of streams with episodes of all lengths, against plain lists."""

import pytest
import torch

from torchrl_lang.algorithm_distillation import Continuous, Discrete
from torchrl_lang.algorithm_distillation.actor import RollingContext


class PlainContext:
    """One stream's context as a list of (observation, action, reward, episode_step)."""

    def __init__(self, context):
        self.context, self.steps = context, []

    def evict(self):
        """Drop the oldest episode if the context is full."""
        if len(self.steps) < self.context:
            return False
        del self.steps[0]
        while self.steps and self.steps[0][3] != 0:
            del self.steps[0]
        return True


def play(streams, context, steps, seed):
    """Random episodes of 1 to 4 steps, in the context and in plain lists."""
    random = torch.Generator().manual_seed(seed)
    kept = RollingContext(streams, context, Continuous(2), Discrete([5]))
    plain = [PlainContext(context) for _ in range(streams)]
    clock = torch.zeros(streams, dtype=torch.int64)
    for _ in range(steps):
        evicted = kept.evict().tolist()
        assert evicted == [row for row, stream in enumerate(plain) if stream.evict()]
        seen, reward = torch.randn(streams, 2, generator=random), torch.randn(streams, generator=random)
        action = torch.randint(5, (streams,), generator=random)
        kept.open(seen, clock)
        yield kept, plain, seen, clock
        kept.close(action, reward)
        for row, stream in enumerate(plain):
            stream.steps.append((seen[row].tolist(), int(action[row]), float(reward[row]), int(clock[row])))
        done = (torch.rand(streams, generator=random) < 0.3) | (clock == 3)
        clock = torch.where(done, 0, clock + 1)


@pytest.mark.parametrize("context", [4, 5, 9])
def test_whole_episodes_are_evicted(context):
    for kept, plain, seen, clock in play(7, context, 60, seed=context):
        assert kept.length.tolist() == [len(stream.steps) for stream in plain]
        assert (kept.length < context).all()
        window = kept.window(context)
        for row, stream in enumerate(plain):
            for t, (observation, _, _, step) in enumerate(stream.steps):
                assert window.observation[row, t].tolist() == observation
                assert window.episode_step[row, t] == step
                if t:
                    assert window.previous_action[row, t] == stream.steps[t - 1][1]
                    assert window.previous_reward[row, t] == stream.steps[t - 1][2]
            last = kept.last()
            assert last.position[row] == len(stream.steps)
            assert last.observation[row].tolist() == seen[row].tolist()
            assert last.episode_step[row] == clock[row]
            if stream.steps:
                assert (last.previous_action[row], last.previous_reward[row]) == stream.steps[-1][1:3]


def test_a_part_of_an_episode_at_the_beginning_is_evicted_as_one():
    kept = RollingContext(1, 6, Discrete([9]), Discrete([5]))
    numbers = torch.tensor([[2, 3, 0, 1, 2, 0]])
    kept.fill(torch.arange(6)[None, :, None], torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 6), numbers)
    assert kept.evict().tolist() == [0]
    assert kept.length.tolist() == [4]
    assert kept.window(4).observation.flatten().tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("entry", "dtype", "kept_as"),
    [(Continuous(1), torch.float64, torch.float32), (Discrete([9]), torch.int32, torch.int64)],
)
def test_steps_of_other_dtypes_are_converted(entry, dtype, kept_as):
    """Gymnasium's observations are often float64 or int32."""
    kept = RollingContext(2, 4, entry, entry)
    for number in (3, 4):
        value = torch.full((2, 1), number, dtype=dtype)
        kept.open(value, torch.zeros(2, dtype=torch.int32))
        kept.close(value if entry == Continuous(1) else value[:, 0], torch.ones(2, dtype=torch.float64))
    window = kept.window(2)
    assert window.observation.dtype == window.previous_action.dtype == kept_as
    assert window.observation[0].flatten().tolist() == [3, 4]
    assert (window.previous_action[:, 1] == 3).all()
    assert window.previous_reward[0, 1] == 1
