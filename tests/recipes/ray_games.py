"""Games and policies that the workers of a Ray cluster import."""

import os
import signal
import time

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.envs.games import CorridorEnv


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
