"""TextWorld as a language environment: what it says, what it pays, how it ends, and what it owes to TorchRL."""

import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv

from torchrl_lang._files import FileError
from torchrl_lang.envs import check_language_env
from torchrl_lang.envs.textworld import ExpertPlayer, RandomAdmissiblePlayer, TextWorldEnv
from torchrl_lang.envs.textworld.text import Template
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.transforms import EntryReward, LivingCost

from ..helpers import last_words, say, say_after
from .conftest import COIN, SIMPLE, SPECS

EVERYTHING = ("go south", "go east", "take coin", "look", "open antique trunk", "restart", "save", "frob")

pytest.importorskip("textworld", reason="the extra 'textworld' is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reused_engines")]


TOLD = ("frob", "restart", "look", "Go South", "go north", "go south", "go east", "go east", "take coin")
EARNED = [-1.25, -1.25, 0.25, 0.25, 0.25, 0.25, 0.25, -1.25, 12.25]
OF_THE_TURN = ("invalid", "was_admissible")


def paid(env):
    pays = ({"invalid": -1.0}, {"was_admissible": 0.5}, {"points": 1.0}, {"won": 10.0, "lost": -10.0})
    return TransformedEnv(env, Compose(LivingCost(0.25), *map(EntryReward, pays)))


def test_the_rules_of_language_environments(make_env):
    make = partial(make_env, "coin", "simple", offers=("expert", "admissible", *OF_THE_TURN), max_turns=5)
    check_language_env(make(batch_size=[2]), lambda n: make(batch_size=[n]), utterances=EVERYTHING)
    check_language_env(paid(make(batch_size=[2])), utterances=TOLD)


def test_every_reward_by_hand_and_the_row_shows_it(make_env):
    """'frob', 'restart' and walking into a wall do nothing; 'look' does something."""
    env, seen = make_env(offers=OF_THE_TURN), []
    env = paid(env)
    td = env.reset()
    for command in TOLD:
        td = say_after(env, td, command)
        seen.append([td[key].item() for key in ("reward", *OF_THE_TURN, "points")])
    assert [turn[0] for turn in seen] == EARNED
    no, yes = [1, 0, 0], [0, 1, 0]
    assert [turn[1:] for turn in seen] == [no, no, yes, yes, yes, yes, yes, no, [0, 1, 1]]
    ends = td["agent_mask"] & ~td["agent_mask"].roll(-1, -1)
    assert td["token_reward"][ends].tolist() == EARNED
    assert (td["token_reward"][~ends] == 0).all()


def test_what_is_said_is_clean(make_env):
    env = make_env()
    td = env.reset()
    opening = last_words(env, td)
    assert opening.startswith("<s>You are now playing a fast paced episode of TextWorld!")
    room = "-= Cookhouse =-\nYou've entered a cookhouse. The room is well lit.\n"
    assert opening.endswith(f"{room}There is an unblocked exit to the south.</s>")
    assert last_words(env, say(env, "frob")) == "That's not a verb I recognise.</s>"
    say(env, "go south"), say(env, "go east")
    end = last_words(env, say(env, "take coin"))
    assert end.endswith("*** The End ***\nYou scored 1 out of a possible 1, in 4 turns.</s></eod>")


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        *((command, "That is not a command of this game.") for command in ("save", "RESTART", "tw-print max_score")),
        *((command, "-= Spare Room =-") for command in ("go south\nrestart", "go south. go east")),
        *(("n", "You can't go that way."), ("", "I beg your pardon?")),
    ],
)
def test_one_command_a_turn_and_none_for_the_engine(make_env, command, reply):
    env = make_env()
    env.reset()
    td = say(env, command)
    assert last_words(env, td).startswith(reply)
    assert (td["reward"].item(), td["done"].item()) == (0.0, False)
    moved = "Spare Room" in reply
    assert last_words(env, say(env, "go east")).startswith("-= Studio =-" if moved else "You can't go that way.")


def test_a_game_that_is_over_is_not_asked(make_env):
    env = make_env(batch_size=[2], max_turns=4)
    env.reset()
    for command in COIN:
        td = say(env, command, "look")
    assert td["done"].flatten().tolist() == [True, False]
    told = len(env.pool._played[0][1])
    again = say(env, "look", "restart")
    assert again["won"].flatten().tolist() == [True, False]
    assert again["truncated"].flatten().tolist() == [False, True]
    assert len(env.pool._played[0][1]) == told  # the engine would begin to doubt


def test_what_is_offered(make_env):
    env = make_env(offers=("expert", "admissible"), max_admissible=6, template=Template(hide=("inventory",)))
    assert env.possible_starts(9).tolist() == [0]  # all seeds begin the same game
    td = env.reset()

    def read(ids):
        return env.tokenizer.decode(ids).split("</a>")[0]

    for command, room in zip(COIN, ({"go south"}, {"go east", "go north"}, {"go west", "take coin"}), strict=True):
        assert read(td["expert_action"][0]) == command
        mask = td["admissible_mask"][0]
        expected = {"look", *room, *(["examine coin"] if "take coin" in room else [])}
        assert {read(ids) for ids in td["admissible_action"][0][mask]} == expected
        assert (td["admissible_action"][0][~mask] == env.tokenizer.control.pad).all()
        td = say(env, command)
    with pytest.raises(ValueError, match="2 commands are admissible, max_admissible is 1"):
        make_env(offers="admissible", max_admissible=1, template=Template(hide=("look",))).reset()
    with pytest.raises(ValueError, match="'go south' does not fit into action_length=2"):
        make_env(offers="expert", action_length=2).reset()


def test_commands_are_offered_as_texts_are_written(make_env):
    """Names such as "type J chest" have capitals, of which a template in lower case makes no words."""
    plain, lower = (make_env(template=Template(lower=lower)) for lower in (False, True))
    shown = []
    for env in (plain, lower):
        env.reset()
        shown.append(env._shown_text(0, "open type J chest"))
    assert shown == ["open type J chest", "open type j chest"]


def test_set_state_plays_a_row_again(make_env):
    env, other = (make_env("simple", row_length=2500, batch_size=[2], seed=seed) for seed in (0, 1))
    env.reset()
    say(env, SIMPLE[0], "restart")
    state = say(env, SIMPLE[1], "open antique trunk")
    other.reset()
    given = state.select(*ROW_KEYS).clone().set("game_seed", env.game_seed)
    came = other.reset(given, set_state=True)
    assert (came.select(*ROW_KEYS, "score") == state.select(*ROW_KEYS, "score")).all()
    one, two = (say(e, SIMPLE[2], SIMPLE[1]) for e in (env, other))
    assert (one.select(*ROW_KEYS, "reward", "score") == two.select(*ROW_KEYS, "reward", "score")).all()


def test_environments_that_cannot_be(games, tokenizer):
    make = partial(TextWorldEnv, tokenizer=tokenizer, row_length=100, action_length=5)
    with pytest.raises(ValueError, match="at least one"):
        make([])
    for place in (games["coin"], str(games["coin"]), *os.scandir(Path(games["coin"]).parent)):
        with pytest.raises(ValueError, match="must be a sequence of files"):
            make(place)
    with pytest.raises(FileError, match=r"nowhere\.z8 is no game"):
        make([Path("nowhere.z8")])
    with pytest.raises(ValueError, match="template"):
        make([games["coin"]], template="shortest")


WORDS = ("antique", "bedroom", "trunk", "old", "wooden")


def test_names_trade_places_in_each_episode_and_back_in_commands(make_env):
    """Undone word by word, an episode is that of the game: its texts, and the commands that win it."""
    options = {"template": Template(lower=True), "row_length": 2500, "action_length": 12}
    plain = make_env("custom", "simple", **options)
    env = make_env("custom", "simple", exchange=WORDS, offers=("expert", "admissible"), **options)
    assert last_words(env, env.reset(game_seed=torch.tensor([1]))) == last_words(
        plain, plain.reset(game_seed=torch.tensor([1]))
    )
    texts = set()
    for seed in (3, 5, 7, 9):
        original = last_words(plain, plain.reset(game_seed=torch.tensor([seed])))
        td = env.reset(game_seed=torch.tensor([seed]))
        shown = last_words(env, td)
        texts.add(shown)
        words = dict(zip(re.findall("[a-z]+", original), re.findall("[a-z]+", shown), strict=True))
        assert {word for word, other in words.items() if word != other} <= set(WORDS) >= {*words.values()} - {*words}
        assert len({*words.values()}) == len(words)
        offered = td["admissible_action"][0][td["admissible_mask"][0]].tolist()
        assert td["expert_action"][0].tolist() in offered
        while not td["done"].all():
            td = env.step(ExpertPlayer()(td))["next"]
        assert td["won"].all()
    assert len(texts) > 1
    wrong = (["Old"], "old", ["old key", "box"], [1], ["old", "old"])
    for template, words in (("plain", WORDS), *(("lower", words) for words in wrong)):
        with pytest.raises(ValueError, match="different words in lower case"):
            make_env(exchange=words, template=template)


def test_a_row_with_exchanged_names_is_played_again(make_env):
    options = {"template": Template(lower=True), "exchange": WORDS, "row_length": 2500, "action_length": 12}
    env, other = (make_env("simple", seed=seed, offers="expert", **options) for seed in (0, 1))
    state = env.step(ExpertPlayer()(env.reset(game_seed=torch.tensor([4]))))["next"]
    given = state.select(*ROW_KEYS).clone().set("game_seed", env.game_seed)
    came = other.reset(given, set_state=True)
    assert (came.select(*ROW_KEYS, "expert_action") == state.select(*ROW_KEYS, "expert_action")).all()


def test_an_expert_may_first_look_at_what_it_carries(make_env):
    env = make_env(offers=("expert", "admissible"))
    first = env._utterance("inventory")
    td, said = env.reset(), []
    while not td["done"].all():
        td = ExpertPlayer(first=first, epsilon=0.0)(td)
        said.append(env.tokenizer.decode(td["action"][0].tolist()).split("</a>")[0])
        td = env.step(td)["next"]
    assert said == ["inventory", *COIN]


BEST = {"simple": 8.0, "coin": 1.0, "treasure": 1.0, "custom": 1.0, "cooking": 11.0}


def test_the_expert_wins_every_kind_of_game(make_env):
    options = {"batch_size": [5], "row_length": 5000, "action_length": 16, "max_turns": 60}
    env = make_env(*SPECS, offers="expert", order="cycle", **options)
    td, won, earned = env.reset(), torch.zeros(5, 1, dtype=torch.bool), torch.zeros(5, 1)
    player = ExpertPlayer()
    while not td["done"].all():
        td = env.step(player(td))["next"]
        won, earned = won | td["won"], earned + td["reward"]
    assert won.all()
    assert not td["truncated"].any()
    assert earned.flatten().tolist() == [BEST[name] for name in SPECS]


def test_experts_err_by_row_with_commands_of_their_own_or_of_other_games():
    """The expert says 7 and can say row number + 10."""
    offered = TensorDict(
        expert_action=torch.full((400, 2), 7),
        admissible_action=torch.arange(400)[:, None, None].expand(400, 1, 2) + 10,
        admissible_mask=torch.ones(400, 1, dtype=torch.bool),
        batch_size=[400],
    )
    own = torch.arange(400) + 10
    for foreign in (0.0, 1.0):
        action = ExpertPlayer(epsilon=(0.0, 1.0), foreign=foreign, seed=0)(offered.clone())["action"][:, 0]
        assert (action[::2] == 7).all()
        assert ((action[1::2] == own[1::2]) == (foreign == 0)).all()
        assert (action[1::2] >= 10).all()
    half = ExpertPlayer(epsilon=0.5, foreign=0.5, seed=0)(offered)["action"][:, 0]
    assert (half == 7).float().mean().item() == pytest.approx(0.5, abs=0.125)  # five standard deviations
    assert (half == own).float().mean().item() == pytest.approx(0.25, abs=0.11)
    with pytest.raises(ValueError, match=r"epsilon\[1\]"):
        ExpertPlayer(epsilon=(0.1, 1.1))


def test_random_commands_are_admissible_and_uniform():
    n, commands = 4000, torch.arange(1, 7).reshape(3, 2)
    mask = torch.tensor([True, True, False])
    td = TensorDict({"admissible_action": commands.expand(n, 3, 2), "admissible_mask": mask.expand(n, 3)}, [n])
    action = RandomAdmissiblePlayer(seed=0)(td)["action"]
    first = (action == commands[0]).all(-1)
    assert (first | (action == commands[1]).all(-1)).all()
    assert first.float().mean().item() == pytest.approx(0.5, abs=0.04)  # five standard deviations
