"""Plain-Python games in a batch: seeds, texts that are lost, wrong games, states, threads, features."""

import copy
import random
import re
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from torchrl_lang.envs import TextGameEnv, TokenEnv
from torchrl_lang.envs.adapters.private_random import PrivateRandom
from torchrl_lang.schema import ROW_KEYS, check_row
from torchrl_lang.text import CharTokenizer

from .conftest import Picture, guess_number_env, picture_env
from .helpers import say, step, transcript

AB = CharTokenizer.from_alphabet("ab")


class Scripted:
    """Returns from ``reset`` and from every ``step`` what it was made with; remembers what it was told."""

    def __init__(self, opening="a", turn=("b", 0.5, False)):
        self.opening, self.turn, self.seeds, self.told = opening, turn, [], []

    def reset(self, seed):
        self.seeds.append(seed)
        return self.opening

    def step(self, text):
        self.told.append(text)
        if isinstance(self.turn, Exception) and "b" in text:
            raise self.turn
        return ("b", 0.5, False) if isinstance(self.turn, Exception) else self.turn


def make(opening="a", turn=("b", 0.5, False), n=1, *, game=None, tokenizer=AB, **options):
    options = {"row_length": 20, "action_length": 3, "seed": 0, **options}
    return TextGameEnv(game or (lambda: Scripted(opening, turn)), tokenizer, batch_size=[n], **options)


def test_what_cannot_be_decoded_reaches_the_game_as_a_replacement_character_and_control_tokens_by_name():
    class Strict(CharTokenizer):
        def decode(self, ids):
            if list(ids[:2]) == [1, 1]:
                raise ValueError("half a character")
            return super().decode(ids)

    env = make(tokenizer=Strict(AB.symbols), turn=("a", 0.0, False), row_length=40)
    env.reset()
    for ids in ([1, 1, 0], [0, 999, 0], [AB.control.end_of_state, 1, 0]):  # an id outside the vocabulary is an end
        step(env, [ids])
    assert env._games[0].told == ["\N{REPLACEMENT CHARACTER}", "a", "</s>ba"]


@pytest.mark.parametrize(("over", "end"), [(False, ""), (True, "</eod>")])
def test_a_reply_that_cannot_be_encoded_truncates_its_row_and_is_warned_of_once(over, end):
    env = make(turn=("what?", 0.5, over), n=2)
    env.reset()
    with pytest.warns(UserWarning, match=r"Game 0 of the batch \(seed \d+, turn 1\) wrote 'what\?'"):
        td = say(env, "a", "a")
    assert transcript(env, td) == f"<s>a</s>a</a>{end}"
    assert td["truncated"].all()
    assert td["terminated"].all() == over
    assert (td["reward"] == 0.5).all()  # the turn was played
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset()
        assert say(env, "a", "a")["truncated"].all()


def test_an_opening_that_cannot_be_encoded_is_left_out_and_its_rows_are_truncated_after_a_turn():
    openings = iter(["a", "hello", "b"])
    env = make(game=lambda: Scripted(next(openings)), n=3, row_length=40)
    with pytest.warns(UserWarning, match="Game 1 of the batch .*turn 0.* wrote 'hello'"):
        td = env.reset()
    assert transcript(env, td, 1) == "<a>"
    assert not td["done"].any()
    td = say(env, "a", "a", "a")
    assert transcript(env, td, 1) == "<a>a</a>b</s>"
    assert td["truncated"].flatten().tolist() == [False, True, False]
    env.maybe_reset(td)  # row 1 begins again, and its game opens as before
    assert say(env, "a", "a", "a")["truncated"].flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("length", [14, 15, 40])
def test_an_opening_that_is_too_long_is_cut_so_that_one_turn_fits(length):
    """Of 20 tokens an utterance takes 3 and its end 1, and 2 stand around the opening: 14 are left."""
    env = make(opening="a" * length, turn=("", 0.0, length == 40))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        td = env.reset()
    assert len(seen) == (length > 14)
    assert int(td["attention_mask"].sum()) == 16
    came = env.reset(td.select(*ROW_KEYS).clone(), set_state=True, game_seed=env.game_seed)
    assert torch.equal(came["tokens"], td["tokens"])
    td = say(env, "ab")
    assert td["truncated"].all()
    assert td["terminated"].all() == (length == 40)
    assert int(td["agent_mask"].sum()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opening": "what"}, r"turn 0\) wrote 'what'"),
        ({"opening": "a" * 15}, r"turn 0\) opens with 15 tokens, of which 14 fit"),
        ({"turn": ("what", 0.0, False)}, r"turn 1\) wrote 'what'"),
        ({"turn": ("a" * 15, 0.0, False)}, r"turn 1\) replies with 15 tokens, of which 14 fit"),
        ({"turn": ("a" * 14, 0.0, True)}, r"turn 1\) replies with 14 tokens, of which 13 fit"),
        ({"turn": ("a" * 14, 0.0, False)}, None),
        ({"turn": ("a" * 13, 0.0, True)}, None),
    ],
)
def test_lost_text_is_an_error_where_that_is_asked_for(options, message):
    env = make(on_bad_text="raise", **options)

    def play():
        env.reset()
        return say(env, "a")

    if message is None:
        assert play()["done"].all()
        return
    with pytest.raises(ValueError, match=rf"Game 0 of the batch \(seed \d+, {message}"):
        play()
    with pytest.raises(RuntimeError, match="reset"):  # games are out of step with their rows
        say(env, "a")


@pytest.mark.parametrize("opening", ["ab", ("ab", {"level": 3})])
@pytest.mark.parametrize(
    ("turn", "flags"),
    [
        (("b", 1, False), (False, False)),
        (("b", np.float32(1), np.True_), (True, False)),
        (("b", torch.tensor(1.0), False, True, {}), (False, True)),
        (("b", True, 0, 1, {}), (False, True)),
    ],
)
def test_games_may_return_three_values_or_five(opening, turn, flags):
    env = make(opening, turn)
    assert transcript(env, env.reset()) == "<s>ab</s>"
    td = say(env, "a")
    assert transcript(env, td).startswith("<s>ab</s>a</a>b</s>")
    assert (td["terminated"].item(), td["truncated"].item()) == flags
    assert td["reward"].item() == 1
    check_row(td)


def test_a_reset_that_returns_no_text_is_an_error():
    for opening in (None, b"ab", ("ab",), (None, {})):
        with pytest.raises(TypeError, match=r"Game 0 of the batch \(seed \d+, turn 0\) returned .* from reset"):
            make(opening).reset()


@pytest.mark.parametrize(
    ("turn", "noun"),
    [
        *((turn, "from step") for turn in (None, "b", ("b", 1.0), ("b", 1.0, True, {}), (None, 1.0, True))),
        *((("b", reward, True), "reward") for reward in (None, "1.0", np.ones(2), 1j, float("nan"), -np.inf, 1e39)),
        *((("b", 1.0, over), "terminated") for over in ("False", None, 2)),
        (("b", 1.0, True, {}, {}), "truncated"),
        (("x" * 10_000, None, True), "reward"),
    ],
)
def test_a_step_that_returns_other_things_is_an_error(turn, noun):
    env = make(turn=turn)
    env.reset()
    with pytest.raises((TypeError, ValueError), match=rf"Game 0 of the batch \(seed \d+, turn 1\) .*{noun}") as caught:
        say(env, "a")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("wrap", [lambda env: env, TokenEnv], ids=["utterances", "tokens"])
def test_set_state_plays_the_row_again(wrap):
    env, inner = (guess_number_env(batch_size=[3], seed=seed) for seed in (0, 77))
    env.reset()
    say(env, "4", "?", "1")
    state = say(env, "2", "6", "7")
    live = ~state["done"]
    assert live.any()
    other = wrap(inner)
    other.reset()
    given = state.select(*ROW_KEYS, "done").clone().set("game_seed", env.game_seed).set("_reset", live)
    came = other.reset(given, set_state=True)
    assert (came.select(*ROW_KEYS) == state.select(*ROW_KEYS)).all()
    one, two = say(env, "3", "3", "3"), say(inner, "3", "3", "3")
    rows = live.squeeze(-1)
    for key in (*ROW_KEYS, "reward", "done"):
        assert torch.equal(one[key][rows], two[key][rows])


def test_set_state_of_other_rows_is_refused():
    env, seed = guess_number_env(batch_size=[1], seed=0), torch.tensor([0])
    env.reset(game_seed=seed)
    state = say(env, "1").select(*ROW_KEYS)
    with pytest.raises(KeyError, match="game_seed"):
        env.reset(state.clone(), set_state=True)
    wrong_reward, wrong_reply = state.clone(), state.clone()
    wrong_reward["token_reward"] *= 2
    higher, lower = env.tokenizer.encode("higherlower")
    wrong_reply["tokens"][wrong_reply["tokens"] == higher] = lower
    for wrong in (wrong_reward, wrong_reply):
        with pytest.raises(ValueError, match="Row 0 differs from the replay of game seed 0"):
            env.reset(wrong, set_state=True, game_seed=seed)
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        say(env, "2")
    over = make(turn=("b", 0.0, False, True, {}))
    over.reset()
    with pytest.raises(ValueError, match=r"turn 1\) was truncated"):
        over.reset(say(over, "a").select(*ROW_KEYS).clone(), set_state=True, game_seed=over.game_seed)


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


@pytest.mark.parametrize("kind", [Meeting, Dice])
def test_as_many_games_as_workers_are_in_their_step_at_once(kind):
    barrier, alone = threading.Barrier(6), threading.Barrier(1)
    env, serial = (
        make(game=partial(kind, *[at][: kind is Meeting]), n=12, row_length=60, workers=workers)
        for at, workers in ((barrier, 6), (alone, 1))
    )
    before = random.getstate()
    with torch.no_grad():
        td, expected = env.reset(), serial.reset()
        ids = torch.randint(0, 2, (12, 3))
        for _ in range(3):
            td, expected = step(env, ids), step(serial, ids)
    assert (td == expected).all()
    assert random.getstate() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("kind", [OSError, StopIteration])  # the second would end a loop over the games
def test_an_error_names_the_first_game_that_failed_and_the_env_goes_on_after_a_reset(workers, kind):
    env = make(turn=kind("gone"), n=4, workers=workers)
    env.reset()
    with pytest.raises((OSError, RuntimeError)) as raised:
        say(env, "a", "b", "a", "b")
    error = raised.value.__cause__ or raised.value
    assert (type(error), str(error)) == (kind, "gone")
    assert re.fullmatch(r"Game 1 of the batch \(seed \d+, turn 1\) was in step\('b'\)\.", error.__notes__[0])
    for one in (env, copy.deepcopy(env)):
        one.reset()
        assert say(one, "a", "a", "a", "a")["reward"].flatten().tolist() == [0.5] * 4


def test_each_game_shows_its_own_and_padding_is_masked_also_in_a_state_that_is_set():
    env, other, seeds = picture_env(batch_size=[3]), picture_env(batch_size=[3]), torch.tensor([0, 1, 5])
    td = env.reset(game_seed=seeds)
    first, second = td["features"].unbind(1)
    assert (first.dtype, first.tolist()) == (torch.float32, torch.eye(3).tolist())
    assert second.tolist() == [[0.0, 0.0, 0.0], [0.5, 0.25, 1.0], [0.5, 0.25, 5.0]]
    assert td["features_mask"].tolist() == [[True, False], [True, True], [True, True]]
    td = say(env, "b", "c", "a")
    found = other.reset(td.exclude("reward", "features", "features_mask").set("game_seed", seeds), set_state=True)
    assert (found.select("features", "features_mask") == td.select("features", "features_mask")).all()


@pytest.mark.parametrize(
    ("shown", "noun"),
    [
        *(("x", "invalid"), (None, "NoneType"), ([1.0, 2.0, 3.0], r"Game 0 .*\(3,\)")),
        *(([[1.0, 2.0]], r"\(1, 2\)"), ([[1.0] * 3] * 3, r"\(3, 3\)"), ([[1.0, 2.0, float("nan")]], "not all of them")),
    ],
)
def test_what_is_no_features_is_refused(shown, noun):
    class Wrong(Picture):
        def reset(self, seed):
            text = super().reset(seed)
            self.features = shown
            return text

    with pytest.raises((TypeError, ValueError), match=noun):
        picture_env(game=Wrong, seed=0).reset()
