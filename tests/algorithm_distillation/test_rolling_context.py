"""The context of streams with episodes and steps of all lengths, against plain lists."""

import pytest
import torch

from torchrl_lang.algorithm_distillation.rolling_context import RollingContext

STREAMS, STEPS, WIDEST = 7, 9, 3


@pytest.mark.parametrize("budget", [15, 100])
def test_as_few_whole_episodes_as_needed_are_evicted(budget):
    """Episodes have 1 to 4 steps of 1 to 3 tokens; 100 tokens never fill the context, its steps do."""
    random = torch.Generator().manual_seed(0)
    kept = RollingContext({"reward": torch.zeros(STREAMS, STEPS), "width": torch.zeros(STREAMS, STEPS).long()})
    plain, clock = [[] for _ in range(STREAMS)], [0] * STREAMS
    for number in range(60):
        width = kept.steps["width"] * (torch.arange(STEPS) < kept.length[:, None])
        after = torch.stack([width[:, first:].sum(-1) for first in range(STEPS + 1)], -1)
        room = kept.length[:, None] - torch.arange(STEPS + 1) < STEPS
        evicted, changed = kept.evict((after + WIDEST <= budget) & room).tolist(), []
        for row, steps in enumerate(plain):
            before = len(steps)
            while len(steps) == STEPS or sum(wide for _, wide, _ in steps) + WIDEST > budget:
                del steps[0]
                while steps and steps[0][2] != 0:
                    del steps[0]
            changed += [row] * (len(steps) < before)
        assert evicted == changed
        wide = torch.randint(1, WIDEST + 1, (STREAMS,), generator=random)
        kept.write(reward=torch.full((STREAMS,), number), width=wide)
        done = (torch.rand(STREAMS, generator=random) < 0.3) | (torch.tensor(clock) == 3)
        kept.close(done)
        for row, steps in enumerate(plain):
            steps.append((number, int(wide[row]), clock[row]))
            clock[row] = 0 if done[row] else clock[row] + 1
            found = kept.steps[row, : kept.length[row]]
            columns = zip(*(found[key].tolist() for key in ("reward", "width", "episode_step")), strict=True)
            assert list(columns) == steps


def test_a_running_episode_without_room_raises():
    kept = RollingContext({"reward": torch.zeros(2, 3)})
    for _ in range(3):
        kept.write(reward=torch.zeros(2))
        kept.close(torch.tensor([True, False]))
    with pytest.raises(ValueError, match="running episode of stream 1 leaves no room"):
        kept.evict((torch.arange(4) > 0).expand(2, 4))
