"""Plain-Python games in a batch: seeds, text that cannot be said or read, states, failures."""

from __future__ import annotations

import copy
import random
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.envs import TextGameEnv, TokenEnv
from torchrl_lang.envs.adapters.private_random import PrivateRandom
from torchrl_lang.envs.games import guess_number_env
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import CharTokenizer


class Scribe:
    """Remembers what it was told; says what it is given to say."""

    def __init__(self, replies=("b",)):
        self.seeds, self.told, self.replies = [], [], replies

    def reset(self, seed):
        self.seeds.append(seed)
        return "a"

    def step(self, text):
        self.told.append(text)
        return self.replies[min(len(self.told), len(self.replies)) - 1], 0.5, False


def scribes(n=2, replies=("b",), tokenizer=None, **kwargs):
    games = []

    def make():
        games.append(Scribe(replies))
        return games[-1]

    tokenizer = CharTokenizer.from_alphabet("ab") if tokenizer is None else tokenizer
    env = TextGameEnv(make, tokenizer, row_length=40, action_length=3, batch_size=[n], **{"seed": 0, **kwargs})
    return env, games


def say(env, ids):
    action = torch.tensor(ids, dtype=torch.int64)
    return env.step(TensorDict(action=action, batch_size=env.batch_size))["next"]


def guess(env, *numbers):
    control, k = env.tokenizer.control, env.action_length
    rows = [[*env.tokenizer.encode(str(number)), control.end_of_action] for number in numbers]
    return say(env, [row + [control.pad] * (k - len(row)) for row in rows])


def test_game_seeds_do_not_depend_on_the_batch():
    one, (game,) = scribes(1)
    four, games = scribes(4)
    for _ in range(4):
        one.reset()
    four.reset()
    assert four.game_seed.tolist() == game.seeds
    assert game.seeds == [g.seeds[0] for g in games]
    assert len(set(game.seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in game.seeds)


def test_control_tokens_reach_the_game_by_name():
    env, (game,) = scribes(1)
    env.reset()
    say(env, [[env.tokenizer.control.end_of_state, 1, 0]])
    assert game.told == ["</s>ba"]


def test_what_cannot_be_decoded_reaches_the_game_as_a_replacement_character():
    class Strict(CharTokenizer):
        def decode(self, ids):
            if 1 in ids:
                raise ValueError("half a character")
            return super().decode(ids)

    env, (game,) = scribes(1, tokenizer=Strict(CharTokenizer.from_alphabet("ab").symbols), replies=("a",))
    env.reset()
    say(env, [[1, 0, 0]])
    say(env, [[0, 999, 0]])  # an id outside the vocabulary ends what is said
    assert game.told == ["\N{REPLACEMENT CHARACTER}", "a"]


@pytest.mark.parametrize("wrap", [lambda env: env, TokenEnv], ids=["utterances", "tokens"])
def test_set_state_plays_the_row_again(wrap):
    env = guess_number_env(7, batch_size=[3], seed=0)
    env.reset()
    guess(env, 4, "?", 1)
    state = guess(env, 2, 6, 7)
    live = ~state["done"]
    assert live.any()
    inner = guess_number_env(7, batch_size=[3], seed=77)
    other = wrap(inner)
    other.reset()
    given = state.select(*ROW_KEYS, "done").clone().set("game_seed", env.game_seed).set("_reset", live)
    came = other.reset(given, set_state=True)
    for key in ROW_KEYS:
        assert torch.equal(came[key], state[key])
    one, two = guess(env, 3, 3, 3), guess(inner, 3, 3, 3)
    rows = live.squeeze(-1)
    for key in (*ROW_KEYS, "reward", "done"):
        assert torch.equal(one[key][rows], two[key][rows])


def test_set_state_of_other_rows_is_refused():
    env = guess_number_env(7, batch_size=[1], seed=0)
    env.reset(TensorDict(game_seed=torch.tensor([0]), batch_size=[1]))
    state = guess(env, 1).select(*ROW_KEYS)
    with pytest.raises(KeyError, match="game_seed"):
        env.reset(state.clone(), set_state=True)
    wrong_reward = state.clone().set("game_seed", torch.tensor([0]))
    wrong_reward["token_reward"] *= 2
    with pytest.raises(ValueError, match="Row 0 differs"):
        env.reset(wrong_reward, set_state=True)
    wrong_reply = state.clone().set("game_seed", torch.tensor([0]))
    higher, lower = env.tokenizer.encode("higherlower")
    wrong_reply["tokens"][wrong_reply["tokens"] == higher] = lower
    with pytest.raises(ValueError, match="Row 0 differs from the replay of game seed 0"):
        env.reset(wrong_reply, set_state=True)
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        guess(env, 2)


# -- several games at a time -------------------------------------------------------------------------------------------


class Meeting:
    """Goes on only when as many games as the barrier waits for are in the same call."""

    def __init__(self, barrier):
        self.barrier = barrier

    def reset(self, seed):
        self.barrier.wait(timeout=30)
        self.seed, self.learns = seed, torch.is_grad_enabled()
        return "a"

    def step(self, text):
        self.barrier.wait(timeout=30)
        assert torch.is_grad_enabled() == self.learns
        return "ab"[self.seed % 2] * (1 + self.seed % 3), self.seed % 5, False


def in_letters(make, n, **options):
    options = {"row_length": 60, "action_length": 3, "seed": 0, **options}
    return TextGameEnv(make, CharTokenizer.from_alphabet("ab"), batch_size=[n], **options)


def test_as_many_games_as_workers_are_in_their_step_at_once():
    barrier, alone = threading.Barrier(8), threading.Barrier(1)
    env, serial = in_letters(lambda: Meeting(barrier), 16, workers=8), in_letters(lambda: Meeting(alone), 16)
    with torch.no_grad():
        td, expected = env.reset(), serial.reset()
        action = torch.randint(0, 2, (16, 3))
        for _ in range(3):
            td, expected = (
                env.step(td.set("action", action))["next"],
                serial.step(expected.set("action", action))["next"],
            )
    assert (td == expected).all()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


class Dice:
    """Draws from the global stream of this process, as games of other libraries do."""

    def __init__(self):
        self.random = PrivateRandom()

    def reset(self, seed):
        self.random.seed(seed)
        return self.step("")[0]

    def step(self, text):
        with self.random.active():
            drawn = []
            for _ in range(4):
                drawn.append(random.choice("ab"))
                time.sleep(0.0002)  # other threads go on
        return "".join(drawn), float(drawn.count("a")), False


def test_games_of_the_global_random_stream_keep_their_own_in_threads():
    env, serial = in_letters(Dice, 6, workers=6), in_letters(Dice, 6)
    before = random.getstate()
    td, expected = env.reset(), serial.reset()
    for _ in range(3):
        action = env.action_spec.zero()
        td, expected = env.step(td.set("action", action))["next"], serial.step(expected.set("action", action))["next"]
    assert (td == expected).all()
    assert random.getstate() == before


class Fails(Scribe):
    def step(self, text):
        if "b" in text:
            raise OSError("gone")
        return super().step(text)


def test_an_error_in_a_thread_names_the_first_game_that_failed_and_the_env_goes_on_after_a_reset():
    env = in_letters(Fails, 4, workers=4)
    env.reset()
    with pytest.raises(OSError, match="gone") as raised:
        guess(env, "a", "b", "a", "b")
    assert raised.value.__notes__[0].startswith("Game 1 of the batch (seed ")
    assert raised.value.__notes__[0].endswith("turn 1) was playing 'b'.")
    again = copy.deepcopy(env)
    for one in (env, again):
        one.reset()
        assert guess(one, "a", "a", "a", "a")["reward"].flatten().tolist() == [0.5] * 4
