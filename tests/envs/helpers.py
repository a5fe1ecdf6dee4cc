"""Actions and transcripts as text."""

import random
from functools import partial

import torch
from tensordict import TensorDict

from torchrl_lang.envs import PromptEnv, TextGameEnv, check_language_env
from torchrl_lang.text import CharTokenizer
from torchrl_lang.text.chat_tokenizer import encode_action

PROMPTS = ["ab", "c", "", "fade"]
LETTERS = CharTokenizer.from_alphabet("".join(map(chr, range(32, 127))) + "\n")


def in_letters(make_game, n=2, **options):
    """An environment of plain-Python games, with one token per letter."""
    options = {"row_length": 160, "action_length": 8, "seed": 0, **options}
    return TextGameEnv(make_game, LETTERS, batch_size=[n], **options)


def check_game(make_game, *words, **options):
    """Check that an environment of the games keeps the rules of language environments."""
    make = partial(in_letters, make_game, **options)
    check_language_env(make(), lambda n: make(n), utterances=words)


def length_reward(prompts, completions):
    """Depends on both texts."""
    return [len(prompt) + 0.5 * len(completion) for prompt, completion in zip(prompts, completions, strict=True)]


def prompt_env(batch_size=(2,), *, tokenizer=LETTERS, reward=length_reward, prompts=PROMPTS, **options):
    """Prompts of letters, the empty one among them."""
    options = {"row_length": 16, "action_length": 4, "seed": 0, **options}
    return PromptEnv(prompts, reward, tokenizer, batch_size=batch_size, **options)


def action(env, *texts):
    """The texts as actions, one a row."""
    control = env.tokenizer.control
    rows = [[*encode_action(env.tokenizer, text), control.end_of_action][: env.action_length] for text in texts]
    ids = torch.tensor([row + [control.pad] * (env.action_length - len(row)) for row in rows])
    return ids.reshape(env.action_spec.shape)


def step(env, ids, **entries):
    """Step an environment with actions as token ids."""
    return env.step(TensorDict(action=torch.as_tensor(ids), **entries, batch_size=env.batch_size))["next"]


def say(env, *texts):
    """Step an environment with a text for each row."""
    return step(env, action(env, *texts))


def say_after(env, td, *texts):
    """The same after a reset or step that returned ``td``."""
    return env.step(td.set("action", action(env, *texts)))["next"]


def transcript(env, td, row=0, mask="attention_mask"):
    """The text of a row, or of the tokens of a mask."""
    return env.tokenizer.decode(td["tokens"][row][td[mask][row]])


def last_words(env, td, row=0):
    """What the environment said last in a row, or all it said if nothing else."""
    return transcript(env, td, row).split("</a>")[-1]


def play(game, player, seed):
    """The texts and the return of a game."""
    texts, total, done, rng = [game.reset(seed)], 0.0, False, random.Random(seed)
    while not done:
        texts.append(player(texts, rng))
        reply, reward, done = game.step(texts[-1])
        texts, total = [*texts, reply], total + reward
    return texts, total
