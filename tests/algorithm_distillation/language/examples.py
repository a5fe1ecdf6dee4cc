"""Random histories, and templates of every kind."""

import torch
from tensordict import TensorDict

from torchrl_lang.algorithm_distillation.language import Quantizer, StepTemplate, TextRecord
from torchrl_lang.algorithm_distillation.language.block_rows import _BLOCK
from torchrl_lang.text import CharTokenizer

MOVES = ["stay", "north", "south", "west", "east"]
CELLS = Quantizer(range(9))


def random_steps(generator, *shape, continuous=False, components=2):
    """Steps ``[*B, L]`` whose episodes end in both ways; each stream begins with an episode."""
    draw = {"generator": generator}
    terminated = torch.rand(shape, **draw) < 0.15
    done = terminated | (torch.rand(shape, **draw) < 0.15)
    number, step = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for place in range(1, shape[-1]):  # a plain loop, independent of the library's way to count
        over = done[..., place - 1]
        number[..., place] = number[..., place - 1] + over
        step[..., place] = (step[..., place - 1] + 1) * ~over
    if continuous:
        observation = torch.rand(*shape, components, **draw) * 2 - 1
        action, reward = torch.rand(*shape, 1, **draw) * 2 - 1, torch.randn(shape, **draw)
        reward = torch.where(torch.rand(shape, **draw) < 0.5, 0.0, reward)
    else:
        observation = torch.randint(9, (*shape, components), **draw)
        action, reward = torch.randint(5, shape, **draw), torch.randint(3, shape, **draw).float()
    entries = {"observation": observation, "action": action, "reward": reward[..., None], "done": done[..., None]}
    entries |= {"terminated": terminated[..., None], "episode": number, "episode_step": step}
    return TensorDict(entries, batch_size=shape)


def random_histories(generator, count, **options):
    """Histories of 1 to 11 steps."""
    for stream in random_steps(generator, count, 11, **options):
        yield stream[: int(torch.randint(1, 12, (), generator=generator))]


def discrete_template(kind):
    return StepTemplate(kind, [CELLS, CELLS], Quantizer(range(5), MOVES), Quantizer([0, 1, 2]))


def continuous_template(kind, numbers):
    quantizer = Quantizer.decimals() if numbers == "decimals" else Quantizer.bins(-1, 1, 21, outside="nearest")
    reward = Quantizer.decimals() if numbers == "decimals" else Quantizer.bins(-5, 5, 11, prefix="r", outside="nearest")
    return StepTemplate(kind, [quantizer, quantizer], [quantizer], reward)


def parse_blocks(template, text):
    """The records of a text of blocks."""
    records, place = [], 0
    while place < len(text):
        match = _BLOCK.match(text, place)
        query, response, word = match.groups()
        records.append(TextRecord(query=query, response=response, reward=float(template.reward.read([word])[0])))
        place = match.end()
    return records


def read_blocks(row, template, tokenizer):
    """The records of a row of pack_blocks."""
    return parse_blocks(template, tokenizer.decode(row["tokens"][row["attention_mask"]][1:].tolist()))


LETTERS = CharTokenizer.from_alphabet("abcdef")
