"""Games that are longer than a row: nothing is lost, and no action is in two training rows."""

import random

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv

from tests.data.chat_templates import EXACT, FIRST_PROMPT_ONLY, chat_tokenizer, tokenizer_of
from tests.rows import to_row
from torchrl_lang.data import EpisodeRows, generate_dataset, rows_from_rollout
from torchrl_lang.envs import LongGameEnv, TextGameEnv, check_language_env
from torchrl_lang.evaluation import play_games
from torchrl_lang.recipes.tasks.base import play_in_terminal
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import CharTokenizer, from_row
from torchrl_lang.transforms import LivingCost

from .helpers import say_after

LETTERS = CharTokenizer.from_alphabet("abcdefgh")


class Walk:
    """Replies with random letters, of the seed; ends after ``turns``."""

    turns = 20

    def reset(self, seed):
        self.draw = random.Random(seed)
        self.left = self.turns
        return "abc"[: seed % 4]

    def step(self, text):
        self.left -= 1
        reply = "".join(self.draw.choices("abcdefgh", k=self.draw.randint(0, 6)))
        return reply, float(len(text)), self.left == 0


@pytest.fixture(params=["control tokens", "chat"])
def make(request):
    tokenizer, row_length = (
        (LETTERS, 44) if request.param == "control tokens" else (chat_tokenizer(EXACT["chatml"]), 160)
    )

    def make(n=1, **options):
        options = {"row_length": row_length, "action_length": 4, "seed": 0, **options}
        return LongGameEnv(Walk, tokenizer, batch_size=[n], **options)

    return make


def player(env):
    """Utterances of one to three letters, of the seed."""
    draw = random.Random(0)
    control, letters = env.tokenizer.control, env.tokenizer.encode("abc")

    def act(tokens):
        ids = torch.full((*tokens.shape[:-1], 4), control.pad)
        for row in ids.reshape(-1, 4):
            length = draw.randint(1, 3)
            row[:length], row[length] = torch.tensor(draw.choices(letters, k=length)), control.end_of_action
        return ids

    return TensorDictModule(act, in_keys=["tokens"], out_keys=["action"])


def real(td, row=0):
    return td["tokens"][row][td["attention_mask"][row]].tolist()


def test_the_rows_of_a_game_have_each_action_once_and_all_rewards_after_the_opening_and_the_last_turns(make):
    """Compared with the same game in a row that is long enough for it."""
    env, whole = make(), make(row_length=1000)
    td, all_of_it = (e.reset(game_seed=torch.tensor([2])) for e in (env, whole))
    opening, policy, said, rows, earned, seen = real(td), player(env), [], [], 0.0, 0
    while not td["terminated"].any():
        action = policy(td)["action"]
        said += [token for token in action[0].tolist() if token != env.tokenizer.control.pad]
        td, all_of_it = (e.step(each.set("action", action))["next"] for e, each in ((env, td), (whole, all_of_it)))
        earned += td["reward"].item()
        if td["done"].any():
            rows.append(td[0].clone())
        if td["terminated"].any() or not td["truncated"].any():
            continue
        td = env.maybe_reset(td)
        assert td["continued"].all()
        assert env.game_seed.item() == 2
        assert not td["agent_mask"].any()
        row, transcript = real(td), real(all_of_it)
        if row[-1] != transcript[-1]:  # a silent environment has no end of its own in the whole transcript
            row = row[:-1]
        assert row[: len(opening)] == opening
        assert transcript[-len(row) + len(opening) :] == row[len(opening) :]
        assert len(row) <= env.window + 1
        seen += 1
    assert seen >= 2
    assert [token for row in rows for token in row["tokens"][row["agent_mask"]].tolist()] == said
    assert sum(row["token_reward"].sum().item() for row in rows) == earned
    assert [row["continued"].item() for row in rows] == [False] + [True] * seen
    assert not env.maybe_reset(td)["continued"].any()  # a new game


def test_collectors_continue_games_and_rows_are_whole(make):
    env = make(8)
    options = {"frames_per_batch": 200, "total_frames": 600, "auto_register_policy_transforms": False}
    collector, rows_of = Collector(env, player(env), **options), EpisodeRows()
    rows = torch.cat([rows_of(steps) for steps in collector])
    collector.shutdown()
    ended = rows["terminated"].squeeze(-1)
    assert 0 < ended.sum() < len(rows) / 2
    assert (rows["terminated"] | rows["truncated"]).all()
    for row in rows[:20]:
        again = to_row(from_row(row, env.tokenizer), env.tokenizer, env.row_length)
        for key in ("tokens", "agent_mask", "token_reward"):
            assert torch.equal(again[key], row[key]), key


@pytest.mark.parametrize("n", [1, 3])
def test_games_are_played_to_their_end(make, n):
    """Each reward is the number of letters written: the return of a game is that of its 20 turns, in several rows."""
    env = TransformedEnv(make(n), LivingCost(0.0))
    letters, control = env.tokenizer.encode("ab"), env.tokenizer.control
    say = TensorDictModule(
        lambda tokens: torch.tensor([*letters, control.end_of_action, control.pad]).expand(*tokens.shape[:-1], 4),
        in_keys=["tokens"],
        out_keys=["action"],
    )
    records = play_games(env, say, games=5, seed=3)
    assert records.terminated.all()
    assert (records.turns.tolist(), records.returns.tolist()) == ([20] * 5, [40.0] * 5)
    assert records.agent_tokens.tolist() == [60] * 5
    assert not torch.equal(records.rows["tokens"][0], records.rows["tokens"][1])


def test_a_person_plays_to_the_end_and_a_dataset_has_rows(tmp_path, capsys):
    env = LongGameEnv(Walk, LETTERS, row_length=44, action_length=4, batch_size=[1], seed=0)
    assert play_in_terminal(env, input_fn=lambda prompt: "ab") == 40
    assert capsys.readouterr().out.count("The game is over") == 1
    with pytest.warns(UserWarning, match="the first 4 rows that begin"):
        generate_dataset(env, player(env), tmp_path / "rows", episodes=4, seed=0, progress=False)


def test_the_rules_of_language_environments(make):
    check_language_env(make(3, row_length=400), lambda n: make(n, row_length=400), utterances=["a", "bc"])


@pytest.mark.parametrize("seed", [None, 2])
def test_games_begin_anew_where_a_reset_asks_for_it(make, seed):
    env = make()
    td = env.reset(game_seed=torch.tensor([1]))
    policy = player(env)
    while not td["done"].any():
        td = env.step(policy(td))["next"]
    assert td["truncated"].any()
    mask = td.select().set("_reset", torch.tensor([[True]]))
    fresh = env.reset() if seed is None else env.reset(mask, game_seed=torch.tensor([seed]))
    assert not fresh["continued"].any()
    assert seed is None or env.game_seed.item() == seed


def test_what_does_not_fit(make):
    for option in ("window", "group_size"):
        with pytest.raises(ValueError, match=option):
            make(**{option: 1000})

    class Novel(Walk):
        def step(self, text):
            return "a" * 30, 0.0, False

    env = LongGameEnv(Novel, LETTERS, row_length=32, action_length=4, seed=0)
    td = env.reset(game_seed=torch.tensor([3]))
    with pytest.warns(UserWarning, match=r"an opening and a turn of 3\d tokens together, of which 27 fit"):
        td = say_after(env, td, "a")
    assert td["truncated"].all()
    assert not env.maybe_reset(td)["continued"].any()
    env, td = echo("a", "a", row_length=9)  # 6 tokens of a turn, 2 of an utterance and the end that it may need
    assert env.maybe_reset(td)["continued"].all()


class Echo:
    """Begins with nothing, and always replies the same; shows a vector."""

    features = ((1.0, 2.0),)

    def reset(self, seed):
        return ""

    def step(self, text):
        return "gh", 0.0, False


def echo(*said, **options):
    env = LongGameEnv(Echo, LETTERS, action_length=2, **options)
    td = env.reset()
    for text in said:
        td = say_after(env, td, text)
    assert td["truncated"].all()
    return env, td


def test_a_row_that_begins_with_an_empty_utterance_is_read():
    env, td = echo("", "", row_length=8)
    td = env.maybe_reset(td)
    assert LETTERS.decode(real(td)) == "<s></a>gh</s>"
    (turn,) = from_row(td[0], LETTERS).turns
    assert (turn.text, turn.by_agent) == ("</a>gh", False)
    td = say_after(env, td, "")
    again = to_row(from_row(td[0], LETTERS), LETTERS, env.row_length)
    assert again["tokens"].tolist() == td["tokens"][0].tolist()


def test_features_stay_the_same_in_all_rows_of_a_game():
    env, td = echo("a", "a", row_length=9, features=(2, 2))
    shown = env.maybe_reset(td)
    assert shown["continued"].all()
    assert shown["features"].tolist() == [[[1.0, 2.0], [0.0, 0.0]]]
    assert shown["features_mask"].tolist() == [[True, False]]


def test_a_game_that_was_restored_continues_with_its_last_turns():
    env, _ = echo("a", "b", "c", "d", row_length=20, window=12)
    begun = env.reset()
    for text in "abc":
        begun = say_after(env, begun, text)
    begun = env.reset(set_state=True, game_seed=env.game_seed, **begun.select(*ROW_KEYS))
    td = env.maybe_reset(say_after(env, begun, "d"))
    assert LETTERS.decode(real(td)) == "<s>c</a>gh</s>d</a>gh</s>"


class Asks:
    """Asks three questions."""

    def reset(self, seed):
        self.turn = 0
        return "what?"

    def step(self, text):
        self.turn += 1
        return f"and {self.turn}?", 1.0, self.turn == 3


@pytest.mark.parametrize("name", FIRST_PROMPT_ONLY)
def test_each_turn_reads_what_a_template_that_drops_thoughts_writes(name):
    family = FIRST_PROMPT_ONLY[name]
    tokenizer = chat_tokenizer(family, **family.options)
    limits = {"row_length": 120, "action_length": 24}
    with pytest.raises(ValueError, match=r"changes earlier messages .*: use LongGameEnv"):
        TextGameEnv(Asks, tokenizer, **limits)
    env = LongGameEnv(Asks, tokenizer, **limits)
    check_language_env(env, utterances=["<think>so</think>yes", "no"])
    said = [*tokenizer.encode_action("<think>so</think>yes"), tokenizer.control.end_of_action]
    action = torch.tensor([[*said, *[tokenizer.control.pad] * (24 - len(said))]])
    policy = TensorDictModule(lambda tokens: action, in_keys=["tokens"], out_keys=["action"])
    steps = env.rollout(4, policy, break_when_any_done=False)
    messages = [{"role": "user", "content": "what?"}]
    for turn, step in enumerate(steps[0, :3].unbind(0), start=1):
        given = {"add_generation_prompt": True, "return_dict": False, **family.options}
        read = step["tokens"][step["attention_mask"]].tolist()
        assert read == tokenizer_of(family).apply_chat_template(messages, **given)
        messages += [{"role": "assistant", "content": "<think>so</think>yes"}]
        messages += [{"role": "user", "content": f"and {turn}?"}]
        assert step["next", "tokens"][len(read) : len(read) + len(said)].tolist() == said
        assert (bool(step["next", "terminated"]), bool(step["next", "truncated"])) == (turn == 3, turn < 3)
    assert steps["continued"].flatten().tolist() == [False, True, True, False]
    rows = rows_from_rollout(steps[:, :3], unfinished="drop")
    assert rows["token_reward"].sum(-1).tolist() == [1.0, 1.0, 1.0]
