"""The steps of 228 games and the choices of the expert, recorded from the ILQL paper's code."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tests.envs.wordle.helpers import CONTROL, SYMBOL, TOKENIZER, letters
from torchrl_lang.envs.wordle import OptimalPlayer, WordIndex, WordleEnv
from torchrl_lang.envs.wordle.optimal import information_gain
from torchrl_lang.envs.wordle.rules import feedback
from torchrl_lang.envs.wordle.transcript import read_turns

GOLDEN = Path(__file__).parents[2] / "golden"


class Steps:
    """The recorded steps as rows of our schema."""

    def __init__(self) -> None:
        self.data = data = dict(np.load(GOLDEN / "wordle_transitions.npz"))
        self.n = len(data["guess"])
        self.words = [str(word) for word in data["vocab"]]
        self.env = WordleEnv(self.words, batch_size=[self.n], rules="ilql", action_length=8, consistent=True)
        width = self.env.row_length
        self.before, self.after = self._tokens("before_tokens", width), self._tokens("after_tokens", width)
        self.acts = torch.zeros(self.n, width, dtype=torch.bool)
        self.earned = torch.zeros(self.n, width)
        index, rewards = self._ragged("after_action_idxs"), self._ragged("after_rewards")
        for row, (at, reward) in enumerate(zip(index, rewards, strict=True)):
            self.acts[row, at.astype(np.int64) + 1] = True
            self.earned[row, at.astype(np.int64) + 1] = torch.from_numpy(reward)
        # The paper's code takes a </s> that a player typed for its own: it is an action like any other.
        end, squares = SYMBOL["</s>"], torch.tensor([SYMBOL["<g>"], SYMBOL["<b>"], SYMBOL["<y>"]])
        follows_square = torch.isin(torch.nn.functional.pad(self.after, (1, 0))[:, :-1], squares)
        self.typed = (self.after == end) & ~follows_square
        self.acts |= self.typed
        length = torch.from_numpy(data["before_tokens_len"].astype(np.int64))
        self.real = torch.arange(width) < length[:, None]

    def _ragged(self, name: str) -> list[np.ndarray]:
        return np.split(self.data[name + "_flat"], np.cumsum(self.data[name + "_len"])[:-1])

    def _tokens(self, name: str, width: int) -> Tensor:
        rows = torch.full((self.n, width), CONTROL.pad)
        for row, tokens in enumerate(self._ragged(name)):
            rows[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        return rows

    def begin(self) -> TensorDict:
        """The rows before each step, with the word that the paper's code drew for it, or any possible one."""
        members = torch.from_numpy(np.unpackbits(self.data["filtered_mask_packed"], axis=1)[:, : len(self.words)])
        number = {word: index for index, word in enumerate(self.words)}
        drawn = [number.get(str(word), -1) for word in self.data["hidden_word"]]
        hidden = torch.tensor(drawn)
        return TensorDict(
            tokens=self.before,
            attention_mask=self.real,
            agent_mask=self.acts & self.real,
            token_reward=torch.where(self.real, self.earned, 0.0),
            hidden_word=torch.where(hidden < 0, members.to(torch.int64).argmax(-1), hidden),
            batch_size=[self.n],
        )


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps()


def test_every_step_of_the_recorded_games(steps):
    env, data = steps.env, steps.data
    assert [str(symbol) for symbol in data["token_table"]] == list(TOKENIZER.symbols)
    td = env.reset(steps.begin(), set_state=True)
    assert td["consistent"].sum(-1).tolist() == data["filtered_before"].tolist()
    # What a guess adds to the row up to its </a> is what the player wrote.
    said = steps.acts & ~steps.real
    action = torch.full((steps.n, env.action_length), CONTROL.pad)
    place = said.cumsum(-1) - 1
    row, at = said.nonzero(as_tuple=True)
    action[row, place[row, at]] = steps.after[row, at]
    out = env.step(td.set("action", action))["next"]
    assert torch.equal(out["tokens"], steps.after)
    assert torch.equal(out["attention_mask"].sum(-1), torch.from_numpy(data["after_tokens_len"].astype(np.int64)))
    assert torch.equal(out["agent_mask"], steps.acts)
    # The reward of a step sits on the token that ends the guess, wherever the guess begins.
    assert torch.equal(out["token_reward"], steps.earned)
    assert out["reward"].flatten().tolist() == data["reward"].tolist()
    assert out["terminated"].flatten().tolist() == data["terminal"].astype(bool).tolist()
    assert not out["truncated"].any()
    packed = np.packbits(out["consistent"].numpy(), axis=1)
    assert (packed == data["filtered_mask_packed"]).all()
    assert out["consistent"].sum(-1).tolist() == data["filtered_after"].tolist()
    assert int(steps.typed.any(-1).sum()) >= 13  # the recorded fault does occur


def test_colours_of_every_valid_guess(steps):
    valid = steps.data["colors"] != ""
    guess, word = (letters(*steps.data[key][valid].tolist()) for key in ("guess", "hidden_word"))
    expected = torch.tensor([["byg".index(c) for c in colours] for colours in steps.data["colors"][valid].tolist()])
    assert torch.equal(feedback(guess, word, "ilql"), expected)


def test_choices_of_the_expert():
    data = np.load(GOLDEN / "wordle_optimal.npz")
    words = [str(word) for word in data["vocab"]]
    player, index = OptimalPlayer(words, rules="ilql", seed=0), WordIndex(words)
    recorded = (data[key].tolist() for key in ("observation", "candidates", "best_words", "info_gain"))
    for observation, candidates, best, gains in zip(*recorded, strict=True):
        tokens = torch.tensor([[SYMBOL[symbol] for symbol in re.findall("<[^>]*>|.", observation)]])
        agent = torch.ones_like(tokens, dtype=torch.bool) & (tokens < 26)
        turns = read_turns(tokens, torch.ones_like(agent), agent)
        possible = player.sets.members(turns.filter(player.sets))[0]
        assert [word for word, is_possible in zip(words, possible, strict=True) if is_possible] == candidates.split(",")
        table = player.table[possible][:, possible]
        assert information_gain(table).tolist() == pytest.approx([float(gain) for gain in gains.split(",")], abs=1e-8)
        (ties,) = player.best_words(turns)
        assert sorted(words[tie] for tie in ties) == sorted(best.split(","))
        assert index.text(player.choose(turns)[0]) in best.split(",")
