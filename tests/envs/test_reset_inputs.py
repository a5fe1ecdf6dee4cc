"""What ``reset`` is given: names of what is played, masks, rows to continue; in bare and wrapped environments."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from torchrl_lang.envs import TokenEnv, WordleEnv
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.schema import ROW_KEYS

from .conftest import ENVS, wordle_env
from .helpers import say_after

NAMED = torch.tensor([2, 0, 1])
# The entry that a reset may name, and words with which a game goes on.
TASKS = {"corridor": ("place", "l"), "guess_number": ("game_seed", "?"), "wordle": ("hidden_word", "speed")}
WRAPS = {
    "bare": lambda env: env,
    "transformed": lambda env: TransformedEnv(env, StepCounter()),
    "by_token": TokenEnv,
    "by_token_transformed": lambda env: TransformedEnv(TokenEnv(env), StepCounter()),
}


def played(env, key):
    return env.game_seed if key == "game_seed" else env._task[{"hidden_word": "word"}.get(key, key)]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("task", TASKS)
def test_a_game_and_rows_are_named_by_keyword(task, wrap):
    key, word = TASKS[task]
    env = ENVS[task][0](batch_size=[3], seed=0)
    wrapped = WRAPS[wrap](env)
    wrapped.reset(**{key: NAMED})
    assert torch.equal(played(env, key), NAMED)
    # Rows that are not reset keep theirs, and so does the caller's tensordict.
    given = TensorDict(_reset=torch.tensor([[True], [False], [False]]), batch_size=[3])
    wrapped.reset(given, **{key: torch.tensor([1, 1, 1])})
    assert played(env, key).tolist() == [1, 0, 1]
    assert key not in given
    rows = say_after(env, env.reset(), *[word] * 3).select(*ROW_KEYS).clone()
    named = {"game_seed": env.game_seed} if task == "guess_number" else {}
    wrapped.reset()
    came = wrapped.reset(set_state=True, **rows, **named)
    assert (came.select(*ROW_KEYS) == rows.select(*ROW_KEYS)).all()
    if "transformed" in wrap:
        with pytest.raises(KeyError, match="by keyword"):
            wrapped.reset(rows, set_state=True, **named)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_side_by_side_each_environment_can_be_given_its_own(kind):
    env = kind(2, partial(CorridorEnv, length=4, batch_size=[2], seed=0))
    try:
        td = env.reset(list_of_kwargs=[{"place": torch.tensor([0, 1])}, {"place": torch.tensor([2, 0])}])
        assert td["tokens"][..., 1].tolist() == [[0, 1], [2, 0]]
        rows = env.reset(place=torch.tensor([2, 2])).select(*ROW_KEYS).clone()
        assert rows["tokens"][..., 1].tolist() == [[2, 2], [2, 2]]
        env.reset()
        assert torch.equal(env.reset(rows.clone(), set_state=True)["tokens"], rows["tokens"])
    finally:
        env.close(raise_if_closed=False)


@pytest.mark.parametrize("mask", [torch.tensor([1, 0, 0]), torch.tensor([[True, False]] * 3)])
def test_masks_are_checked(mask):
    for env in (CorridorEnv(batch_size=[3], seed=0), TokenEnv(CorridorEnv(batch_size=[3], seed=0))):
        td = env.rand_action(env.reset())
        with pytest.raises(ValueError, match="'_reset' must be 3 bool flags"):
            env._reset(TensorDict(_reset=mask, batch_size=[3]))
        with pytest.raises(ValueError, match="'_step' must be 3 bool flags"):
            env._step(td.set("_step", mask))


@pytest.mark.parametrize("wrap", WRAPS)
def test_to_moves_everything_and_forgets_the_rows(wrap):
    env = wordle_env(batch_size=[3], consistent=True, guesses="words", seed=0)
    wrapped = WRAPS[wrap](env)
    wrapped.reset()
    assert wrapped.to("meta") is wrapped
    assert wrapped.device == env.device == torch.device("meta")
    tensors = [env._key, env._episode, *env.buffers()]
    assert any(value is env._answers for value in tensors)
    assert {value.device.type for value in tensors} == {"meta"}
    with pytest.raises(RuntimeError, match="before its first reset"):
        (wrapped.base_env if "transformed" in wrap else wrapped)._step(TensorDict())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])  # noqa: S301
@pytest.mark.parametrize("wrap", ["bare", "by_token"])
def test_copies_of_an_unseeded_environment_play_their_own_words(wrap, again):
    def words(env):
        env.reset()
        return getattr(env, "env", env).hidden_word

    env = WRAPS[wrap](WordleEnv(batch_size=[64]))
    one, other = words(again(env)), words(again(env))
    assert not torch.equal(one, other)
    assert not torch.equal(one, words(env))
    env.set_seed(0)
    assert torch.equal(words(again(env)), words(env))
    env.set_seed(None)
    assert not torch.equal(words(again(env)), words(env))


def without_marks(td, position=slice(None)):
    """The agent's tokens appear as the environment's: a game that knew no guess would answer them."""
    for key in ("agent_mask", "token_reward"):
        td[key][:, position] = 0
    return td


def moved(td, control):
    for key in ROW_KEYS:
        td[key] = td[key].roll(1, -1)


def without_end(td, control):
    last = td["attention_mask"].sum(-1, keepdim=True) - 1
    for key in ("attention_mask", "agent_mask", "token_reward"):
        td[key].scatter_(1, last, 0)


DAMAGE = {
    "left padding": moved,
    "a hole": lambda td, control: td["attention_mask"][:, 1].fill_(False),
    "agent tokens in the padding": lambda td, control: td["agent_mask"][:, -1].fill_(True),
    "no agent tokens": lambda td, control: without_marks(td),
    "padding inside": lambda td, control: td["tokens"][:, 1].fill_(control.pad),
    "two beginnings": lambda td, control: without_marks(td, 1)["tokens"][:, 1].fill_(control.begin_action),
    "no end": without_end,
    "an unknown token": lambda td, control: td["tokens"][:, 1].fill_(10**6),
    "an infinite reward": lambda td, control: td["token_reward"].masked_fill_(td["agent_mask"], float("inf")),
}


@pytest.mark.parametrize("wrap", ["bare", "by_token"])
@pytest.mark.parametrize("name", ["corridor", "guess_number", "countdown", "visual_dialogue", "wordle"])
def test_damaged_rows_are_refused(name, wrap):
    make, words, _ = ENVS[name]
    env = make(batch_size=[3], seed=0)
    td = say_after(env, env.reset(), *[words[3 if len(words) > 3 else 0]] * 3)
    live = ~td["done"].squeeze(-1)
    assert live.any()
    named = {"game_seed": env.game_seed} if hasattr(env, "game_seed") else {}
    outer = WRAPS[wrap](env)
    whole = td.select(*ROW_KEYS, "done").clone().set("_reset", live)
    outer.reset()
    came = outer.reset(whole.clone(), set_state=True, **named)  # as they are, they are accepted
    assert torch.equal(came["tokens"][live], td["tokens"][live])
    for kind, damage in DAMAGE.items():
        if kind == "no end" and wrap == "by_token" and name == "countdown":
            continue  # one token a step, a row may stop inside an utterance
        damaged = whole.clone()
        damage(damaged, env.tokenizer.control)
        with pytest.raises(ValueError, match=r"row|Row|token|reward|attention_mask"):
            outer.reset(damaged, set_state=True, **named)


def test_every_row_that_is_played_is_accepted(registered):
    """What the agent babbles, control tokens among it, never makes a row that could not go on."""
    make, _, tensors_only = registered
    env = make(batch_size=[8], seed=0)
    torch.manual_seed(0)
    td, checked = env.reset(), 0
    named = {} if tensors_only else {"game_seed": getattr(env, "env", env).game_seed}
    for _ in range(6):
        td = env.step(env.rand_action(td))["next"].exclude("reward")
        live = ~td["done"]
        if live.any():
            came = env.reset(td.clone().set("_reset", live), set_state=True, **named)
            checked += int(live.sum())
            assert (came.select(*ROW_KEYS) == td.select(*ROW_KEYS)).all()
    assert checked


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "Row 0 has no token"),
        ("<s>0</s>r</a>1</s>r</a>2</s></eod>", "Row 0 has ended"),
        ("<s>0</s>l</a>0</s>l</a>0</s>", "no room or no turn left"),
        *(("<s>0</s>r", "no end of its last utterance"), ("<s>0", "no end of its last text")),
        ("<s>2</s>", r"place must lie in \[0, 2\)"),
        ("<s>0</s>r</a>1<s>", "no end of its last text"),
        *((row, "an order of tokens") for row in ("<s></s></s>", "<s>0</s>r</a>1<s></s>", "<s>0</s>0</s>")),
    ],
)
def test_the_error_says_what_is_wrong_with_a_row(row, message):
    env = CorridorEnv(length=3, max_turns=2)
    ids = [env.tokenizer.symbols.index(symbol) for symbol in re.findall(r"<.*?>|.", row)]
    tokens = torch.tensor([ids + [env.tokenizer.control.pad] * (env.row_length - len(ids))], dtype=torch.int64)
    real = torch.arange(env.row_length)[None] < len(ids)
    said = [*env.tokenizer.encode("lr"), env.tokenizer.control.end_of_action]
    rows = {"tokens": tokens, "attention_mask": real, "agent_mask": torch.isin(tokens, torch.tensor(said)) & real}
    with pytest.raises(ValueError, match=message):
        env.reset(set_state=True, **rows, token_reward=torch.zeros(tokens.shape))
