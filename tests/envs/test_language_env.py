"""The base of the environments, on the corridor: whose tokens are whose, limits, given states, helpful errors."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.envs import LanguageEnv
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import CharTokenizer

from .conftest import countdown_env


def say(env, *texts, td=None):
    """Say one utterance a row; text may name control tokens, as decode writes them."""
    symbols = {symbol: index for index, symbol in enumerate(env.tokenizer.symbols)}
    action = torch.full((len(texts), env.action_length), env.tokenizer.control.pad)
    for row, text in enumerate(texts):
        for place, symbol in enumerate(text):
            action[row, place] = symbols[symbol]
    return env.step(TensorDict(action=action, batch_size=[len(texts)]))["next"]


def text(env, td, row=0):
    return env.tokenizer.decode(td["tokens"][row][td["attention_mask"][row]])


def agents(env, td, row=0):
    return env.tokenizer.decode(td["tokens"][row][td["agent_mask"][row]])


def corridor(n=1, **kwargs):
    env = CorridorEnv(**{"length": 3, "start": 0, "batch_size": [n], "seed": 0, **kwargs})
    env.reset()
    return env


def test_a_walk_token_by_token():
    env = corridor()
    td = say(env, ["r", "</a>"])
    assert text(env, td) == "<s>0</s>r</a>1</s>"
    assert agents(env, td) == "r</a>"
    assert td["reward"].item() == -1
    td = say(env, ["r", "</a>"])
    assert text(env, td) == "<s>0</s>r</a>1</s>r</a>2</s></eod>"
    assert td["token_reward"][0].nonzero().flatten().tolist() == [4]  # on the first turn's </a>; the second earns 0
    assert (td["reward"].item(), td["terminated"].item(), td["truncated"].item()) == (0, True, False)


def test_an_utterance_without_end_is_closed_by_the_environment():
    env = corridor()
    td = say(env, ["r", "l"])
    assert text(env, td) == "<s>0</s>rl</a>0</s>"
    assert agents(env, td) == "rl"
    assert td["token_reward"][0].nonzero().flatten().tolist() == [4]  # the l, the last token that the agent wrote


def test_an_id_outside_the_vocabulary_ends_the_utterance():
    env = corridor(2)
    right = env.tokenizer.encode("r")[0]
    td = env.step(TensorDict(action=torch.tensor([[right, 500], [-1, right]]), batch_size=[2]))["next"]
    assert [text(env, td, row) for row in range(2)] == ["<s>0</s>r</a>1</s>", "<s>0</s></a>0</s>"]
    assert td["tokens"].max() < env.tokenizer.vocab_size
    assert td["tokens"].min() >= 0


def test_a_row_without_room_for_another_utterance_is_truncated():
    env = countdown_env(batch_size=[1], seed=0)  # T = 24, K = 4, silent
    env.reset()
    td = None
    for length in (4, 7, 10, 13, 16):
        td = say(env, ["g", "g", "</a>"])
        assert td["attention_mask"].sum() == length
        assert not td["done"].any()
    td = say(env, ["g", "g", "</a>"])  # 19 tokens: four more and their end fill the row
    assert not td["done"].any()
    td = say(env, ["</a>"])  # 20: they would not fit
    assert td["truncated"].all()
    assert not td["terminated"].any()


def test_set_state_goes_on_where_the_row_stops():
    env = corridor(2, length=4, start=None)
    state = say(env, ["r", "</a>"], ["l", "</a>"])
    other = CorridorEnv(length=4, batch_size=[2], seed=9)
    other.reset()
    came = other.reset(state.select(*ROW_KEYS).clone(), set_state=True)
    for key in ROW_KEYS:
        assert torch.equal(came[key], state[key])
    for _ in range(8):
        one, two = say(env, ["r", "</a>"], ["l", "</a>"]), say(other, ["r", "</a>"], ["l", "</a>"])
        assert (one == two).all()
    assert one["done"].all()


def test_set_state_looks_only_at_rows_that_are_reset():
    env = corridor(2, length=3)
    say(env, ["r", "</a>"], ["l", "</a>"])
    td = say(env, ["r", "</a>"], ["l", "</a>"])  # row 0 has ended
    td = env.reset(td.exclude("reward").set("_reset", torch.tensor([[False], [True]])), set_state=True)
    assert text(env, td, 1) == "<s>0</s>l</a>0</s>l</a>0</s>"
    assert td["done"].flatten().tolist() == [True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "are empty"),
        ("<s>0</s>r</a>1</s>r</a>2</s></eod>", "has ended"),
        ("<s>0</s>l</a>0</s>l</a>0</s>", "no room or no turn left"),
        ("<s>0</s>r", "ends inside an utterance"),
        ("<s>2</s>", "must lie before the goal"),
    ],
)
def test_states_that_cannot_go_on_are_refused(row, message):
    env = corridor(max_turns=2)
    import re

    ids = [env.tokenizer.symbols.index(symbol) for symbol in re.findall(r"<.*?>|.", row)]
    n, width = len(ids), env.row_length
    tokens = torch.tensor([ids + [env.tokenizer.control.pad] * (width - n)], dtype=torch.int64)
    agent = (tokens == env.tokenizer.encode("r")[0]) | (tokens == env.tokenizer.encode("l")[0]) | (tokens == 6)
    agent = agent | (tokens == env.tokenizer.control.end_of_action)
    real = torch.arange(width)[None] < n
    td = TensorDict(
        tokens=tokens,
        attention_mask=real,
        agent_mask=agent & real,
        token_reward=torch.zeros(1, width),
        batch_size=[1],
    )
    with pytest.raises(ValueError, match=message):
        env.reset(td, set_state=True)


@pytest.mark.parametrize(
    ("action", "error", "noun"),
    [
        (None, KeyError, "action"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"shape \(2, 2\)"),
        (torch.zeros(2, 2, dtype=torch.int32), ValueError, "int32"),
    ],
)
def test_actions_are_checked(action, error, noun):
    env = CorridorEnv(batch_size=[2])
    td = env.reset()
    with pytest.raises(error, match=noun):
        env.step(td if action is None else td.set("action", action))


def test_a_first_reset_resets_every_row():
    env = CorridorEnv(batch_size=[2])
    with pytest.raises(RuntimeError, match="reset"):
        env.step(TensorDict(action=torch.zeros(2, 2, dtype=torch.int64), batch_size=[2]))
    with pytest.raises(RuntimeError, match="every row"):
        env.reset(TensorDict(_reset=torch.tensor([[True], [False]]), batch_size=[2]))
    for options in ({"max_turns": 0}, {"action_length": 0}, {"row_length": 5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Silent(**options)


class Silent(CorridorEnv):
    def __init__(self, **options):
        LanguageEnv.__init__(
            self, CharTokenizer.from_alphabet("lr"), **{"row_length": 9, "action_length": 4, **options}
        )


@pytest.mark.parametrize("seed", [1.5, "3", [1]])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        CorridorEnv(seed=seed)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        CorridorEnv().set_seed(seed)


def corridor_of(seed):
    return CorridorEnv(length=10, batch_size=[9], seed=seed).reset()["tokens"]
