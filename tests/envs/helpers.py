"""Saying things in words."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_lang.text.chat_tokenizer import encode_action


def action(env, *texts):
    """The texts as actions, one a row."""
    control = env.tokenizer.control
    rows = [[*encode_action(env.tokenizer, text), control.end_of_action] for text in texts]
    ids = torch.tensor([row + [control.pad] * (env.action_length - len(row)) for row in rows])
    return ids.reshape(env.action_spec.shape)


def say(env, *texts):
    """Step an environment with a text for each row."""
    return env.step(TensorDict(action=action(env, *texts), batch_size=env.batch_size))["next"]


def say_after(env, td, *texts):
    """The same after a reset or step that returned ``td``."""
    return env.step(td.set("action", action(env, *texts)))["next"]


def last_words(env, td, row=0):
    """What the environment said last in a row, or all it said if nothing else."""
    tokens = td["tokens"][row][td["attention_mask"][row]]
    return env.tokenizer.decode(tokens).split("</a>")[-1]
