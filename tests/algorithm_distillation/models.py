"""Small models with large random weights, and windows for them."""

import torch
from tensordict import TensorDict

from torchrl_lang.algorithm_distillation import ADTransformer, Continuous, Discrete

CONTEXT, EPISODE = 12, 5
CELL, MOVE = Discrete([3, 4]), Discrete([5])


def model(observation=CELL, action=MOVE, seed=0, **options):
    """Random weights of a size at which every input matters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = {"context": CONTEXT, "episode_length": EPISODE, "width": 16, "layers": 2, "heads": 2, **options}
        made = ADTransformer(observation, action, **sizes)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return made


def continuous(seed=0, **options):
    return model(Continuous(3), Continuous(2), seed, **options)


def windows(made, rows=6, length=CONTEXT, seed=0):
    """Windows of episodes of 1 to 5 steps, of which some begin inside one."""
    random = torch.Generator().manual_seed(seed)
    shape = (rows, length)
    step, done = torch.randint(3, (rows,), generator=random), torch.rand(shape, generator=random) < 0.3
    clock = []
    for t in range(length):
        clock.append(step)
        done[:, t] |= step == EPISODE - 1
        step = torch.where(done[:, t], 0, step + 1)
    entries = {}
    for key, entry in (("observation", made.observation), ("action", made.action)):
        if isinstance(entry, Discrete):
            columns = [torch.randint(n, shape, generator=random) for n in entry.sizes]
            entries[key] = torch.stack(columns, -1) if key == "observation" else columns[0]
        else:
            entries[key] = torch.randn(*shape, entry.size, generator=random)
    entries |= {"reward": torch.randn(*shape, 1, generator=random), "done": done[..., None]}
    entries |= {"episode_step": torch.stack(clock, 1), "action_log_prob": -torch.rand(shape, generator=random)}
    return TensorDict(entries, shape)
