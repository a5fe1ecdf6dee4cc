"""Games that are longer than a row: nothing is lost, and no action is in two training rows."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector

from tests.data.chat_templates import EXACT, tokenizer_of
from tests.envs.helpers import say_after
from torchrl_lang.data import EpisodeRows
from torchrl_lang.envs import LongGameEnv, check_language_env
from torchrl_lang.text import CharTokenizer, ChatTokenizer, RowFormat, from_row, to_row

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


def chat():
    source = tokenizer_of(EXACT["chatml"])
    return ChatTokenizer(source, RowFormat.from_chat_template(source))


TOKENIZERS = {"control tokens": (lambda: LETTERS, 44), "chat": (chat, 160)}


@pytest.fixture(params=TOKENIZERS)
def make(request):
    tokenizer, row_length = TOKENIZERS[request.param][0](), TOKENIZERS[request.param][1]

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


def agent_tokens(rows):
    return [row["tokens"][row["agent_mask"]].tolist() for row in rows]


def test_the_rows_of_a_game_have_each_action_once_and_all_rewards(make):
    env = make()
    td = env.reset(game_seed=torch.tensor([3]))
    policy, said, rows, earned = player(env), [], [], 0.0
    while not (td["terminated"].any()):
        td = policy(td)
        said += [token for token in td["action"][0].tolist() if token != env.tokenizer.control.pad]
        td = env.step(td)["next"]
        earned += td["reward"].item()
        if td["done"].any():
            rows.append(td[0].clone())
        if not td["terminated"].any() and td["truncated"].any():
            assert td["continued"].item() == (len(rows) > 1)
            td = env.maybe_reset(td)
            assert env.game_seed.item() == 3
    assert len(rows) > 2
    assert [token for tokens in agent_tokens(rows) for token in tokens] == said
    assert sum(row["token_reward"].sum().item() for row in rows) == earned
    assert [row["continued"].item() for row in rows] == [False] + [True] * (len(rows) - 1)
    assert not env.maybe_reset(td)["continued"].any()  # a new game


def test_a_new_row_begins_with_the_opening_and_the_last_turns(make):
    """Those of the same game in a row that is long enough for it."""
    env, whole = make(), make(row_length=1000)
    td, all_of_it = (e.reset(game_seed=torch.tensor([2])) for e in (env, whole))
    opening = td[0]["tokens"][td[0]["attention_mask"]].tolist()
    policy, seen = player(env), 0
    for _ in range(Walk.turns):
        action = policy(td)["action"]
        td, all_of_it = (e.step(each.set("action", action))["next"] for e, each in ((env, td), (whole, all_of_it)))
        td = env.maybe_reset(td)
        if td["terminated"].any() or not td["continued"].any():
            continue
        row = td[0]["tokens"][td[0]["attention_mask"]].tolist()
        transcript = all_of_it[0]["tokens"][all_of_it[0]["attention_mask"]].tolist()
        if row[-1] != transcript[-1]:  # a silent environment has no end of its own in the whole transcript
            row = row[:-1]
        assert row[: len(opening)] == opening
        rest = row[len(opening) :]
        assert transcript[-len(rest) :] == rest
        assert not td[0]["agent_mask"][: len(row)].all()
        if td[0]["agent_mask"].any():
            continue
        seen += 1
        assert len(row) <= env.window + 1
    assert seen >= 2


def test_collectors_continue_games_and_rows_are_whole(make):
    env = make(8)
    collector = Collector(
        env, player(env), frames_per_batch=200, total_frames=600, auto_register_policy_transforms=False
    )
    rows_of = EpisodeRows()
    rows = torch.cat([rows_of(steps) for steps in collector])
    collector.shutdown()
    ended = rows["terminated"].squeeze(-1)
    assert 0 < ended.sum() < len(rows) / 2
    assert (rows["terminated"] | rows["truncated"]).all()
    for row in rows[:20]:
        again = to_row(from_row(row, env.tokenizer), env.tokenizer, env.row_length)
        for key in ("tokens", "agent_mask", "token_reward"):
            assert torch.equal(again[key], row[key]), key


def test_the_rules_of_language_environments(make):
    check_language_env(make(3, row_length=400), lambda n: make(n, row_length=400), utterances=["a", "bc"])


def test_games_begin_anew_where_a_reset_asks_for_it(make):
    env = make()
    td = env.reset(game_seed=torch.tensor([1]))
    policy = player(env)
    while not td["done"].any():
        td = env.step(policy(td))["next"]
    assert td["truncated"].any()
    assert not env.reset()["continued"].any()
    td = env.reset(game_seed=torch.tensor([1]))
    while not td["done"].any():
        td = env.step(policy(td))["next"]
    fresh = env.reset(td.select().set("_reset", torch.tensor([[True]])), game_seed=torch.tensor([2]))
    assert not fresh["continued"].any()
    assert env.game_seed.item() == 2


def test_what_does_not_fit(make):
    with pytest.raises(ValueError, match="window"):
        make(window=1000)

    class Novel(Walk):
        def step(self, text):
            return "a" * 30, 0.0, False

    env = LongGameEnv(Novel, LETTERS, row_length=32, action_length=4, seed=0)
    td = env.reset(game_seed=torch.tensor([3]))
    with pytest.warns(UserWarning, match=r"an opening and a turn of 3\d tokens together, of which 26 fit"):
        td = say_after(env, td, "a")
    assert td["truncated"].all()
    assert not env.maybe_reset(td)["continued"].any()
