"""Games and policies that commands are given by name and that workers import."""

import os
import signal
import time

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.envs import PromptEnv, TextGameEnv
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.text import CharTokenizer, ChatTokenizer, HFTokenizer, RowFormat


class Shown:
    """Shows the answer as one of three unit vectors, and every other time a constant beside it."""

    def reset(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.answer = int(torch.randint(3, (), generator=generator))
        self.features = torch.stack([torch.eye(3)[self.answer], torch.ones(3)])[: 1 + seed % 2]
        return "?"

    def step(self, text):
        return "", float(text == str(self.answer)), True


def shown_env(batch_size, *, features=True, **options):
    size = (2, 3) if features else None
    tokenizer = CharTokenizer.from_alphabet("012?")
    return TextGameEnv(Shown, tokenizer, row_length=8, action_length=2, batch_size=batch_size, features=size, **options)


class Greeting:
    """Rewards what begins with an h."""

    def reset(self, seed):
        return "hi"

    def step(self, text):
        return "", float(text.startswith("h")), True


def greeting_env(batch_size, *, model, chat=True, **options):
    """With the tokenizer of the folder ``model``."""
    tokenizer = ChatTokenizer(model, RowFormat.from_chat_template(model)) if chat else HFTokenizer(model)
    return TextGameEnv(Greeting, tokenizer, row_length=60, action_length=4, batch_size=batch_size, **options)


def length_env(batch_size, *, row_length=30, **options):
    """Rewards long words, of the letters of the dialogues of ``test_dialogues.py``."""
    tokenizer = CharTokenizer.from_alphabet("bcdghilnostuwy", unknown=True)
    sizes = {"row_length": row_length, "action_length": 6, "batch_size": batch_size}
    return PromptEnv(["big", "hot"], lambda _, words: [len(word) for word in words], tokenizer, **sizes, **options)


def letters_env(batch_size, **options):
    """Rewards the letter b."""
    sizes = {"row_length": 8, "action_length": 4, "batch_size": batch_size}
    tokenizer = CharTokenizer.from_alphabet("abc")
    return PromptEnv(["a"], lambda _, said: [float(text.count("b")) for text in said], tokenizer, **sizes, **options)


class Corridor:
    """A task: two moves to the right end a walk."""

    def env(self, n, *, seed, device):
        return CorridorEnv(length=3, start=0, batch_size=[n], seed=seed, device=device)


class NoGame:
    """A task with a mistake."""

    def env(self, n, *, seed, device):
        return {}["the level"]


class Walker(TensorDictModuleBase):
    """Moves to the right with a probability that is learned; its "values" are the number of its process.

    With a ``flag``, the first worker that makes this file, with the number of its process, dies in its tenth turn.
    """

    in_keys, out_keys = ["tokens"], ["action", "token_log_prob", "state_value"]

    def __init__(self, logit, flag=None, slow=0.0):
        super().__init__()
        self.logit = torch.nn.Parameter(torch.tensor(logit))
        self.flag, self.slow, self.turns = flag, slow, 0
        tokenizer = CorridorEnv(length=3).tokenizer
        self.letters, self.end = torch.tensor(tokenizer.encode("lr")), tokenizer.control.end_of_action

    def log_probs(self):
        """Of left and right."""
        return torch.stack([torch.nn.functional.logsigmoid(-self.logit), torch.nn.functional.logsigmoid(self.logit)])

    @torch.no_grad()
    def forward(self, td):
        time.sleep(self.slow)
        self.turns += 1
        if self.flag is not None and self.turns == 10:
            self._die_once()
        log_probs = self.log_probs()
        move = torch.multinomial(log_probs.exp().expand(*td.batch_size, 2), 1)
        none = torch.zeros(*td.batch_size, 2)
        td.set("action", torch.cat([self.letters[move], torch.full_like(move, self.end)], -1))
        td.set("token_log_prob", none + log_probs[move])
        return td.set("state_value", none + os.getpid())

    def _die_once(self):
        try:
            with open(self.flag, "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        time.sleep(0.5)  # what it has sent is on its way
        os.kill(os.getpid(), signal.SIGKILL)
