"""The visual dialogue environment: its rows are those of the data, and its numbers those of plain loops."""

from __future__ import annotations

import pytest
import torch

from tests.data.chat_templates import EXACT, tokenizer_of
from tests.envs.helpers import say_after
from tests.envs.visual_dialogue.played_world import ROW, TOKENIZER, make_env, write_world
from tests.envs.visual_dialogue.word_overlap import WordOverlap
from torchrl_lang.envs import TokenEnv, check_language_env
from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueRewards, PercentileCutoff, Round, played_rounds
from torchrl_lang.envs.visual_dialogue.rewards import STOP
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import ChatTokenizer, RowFormat, from_row, to_rows

SCENES = 9


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"), SCENES)


def seeds(*numbers):
    return torch.tensor(numbers)


def questions_of(episode):
    return [turn.text for turn in episode.turns if turn.by_agent]


def chat_tokenizer():
    source = tokenizer_of(EXACT["chatml"])
    return ChatTokenizer(source, RowFormat.from_chat_template(source, system="Ask about the image."))


def replay(env, scenes, questions):
    """The rows after the questions of each scene; those that have ended get a word more, which changes nothing."""
    td = env.reset(game_seed=torch.as_tensor(scenes))
    for turn in range(max(map(len, questions))):
        td = say_after(env, td, *(asked[turn] if turn < len(asked) else "more?" for asked in questions))
    return td


# -- the rows of the data ----------------------------------------------------------------------------------------------

REWARDS = [
    *(DialogueRewards(penalty=penalty) for penalty in ("none", "soft", "hard", "conservative")),
    DialogueRewards(penalty="soft", soft_substrings=True, penalty_value=-0.5),
    DialogueRewards(cutoff=lambda initial, progress: len(progress) == 3),
    DialogueRewards("agent_stops"),
    DialogueRewards("agent_stops", scale=3.0),
    DialogueRewards("10_stop"),
    DialogueRewards("10_stop", scale=-2.0, shift=0.5),
]


@pytest.mark.parametrize("rewards", REWARDS, ids=lambda each: f"{each.mode}-{each.penalty}-{each.scale}")
def test_replayed_episodes_of_the_data_are_its_rows(data, rewards):
    episodes = data.episodes(rewards)
    scenes = [scene.image for scene in data.scenes(rewards)]
    expected = to_rows(episodes, TOKENIZER, ROW)
    found = replay(make_env(data, rewards=rewards, batch_size=[len(scenes)]), scenes, list(map(questions_of, episodes)))
    for key in (*ROW_KEYS, "terminated", "truncated"):
        assert torch.equal(found[key], expected[key]), key
    fixed = rewards.mode == "10_stop" or not isinstance(rewards.cutoff, PercentileCutoff | None)
    assert fixed or len({len(episode.turns) for episode in episodes}) > 1


@pytest.mark.parametrize("mode", ["env_stops", "agent_stops"])
def test_replayed_chats_of_the_data_are_its_rows(data, mode):
    rewards, tokenizer = DialogueRewards(mode), chat_tokenizer()
    episodes, scenes = data.episodes(rewards), [scene.image for scene in data.scenes(rewards)]
    env = make_env(data, rewards=rewards, tokenizer=tokenizer, row_length=1200, batch_size=[len(scenes)])
    found, expected = replay(env, scenes, list(map(questions_of, episodes))), to_rows(episodes, tokenizer, 1200)
    for key in (*ROW_KEYS, "terminated", "truncated"):
        assert torch.equal(found[key], expected[key]), key
    rounds = played_rounds(found, tokenizer)
    assert [list(scene.dialogue.rounds) for scene in data.scenes(rewards)] == rounds


@pytest.mark.parametrize("mode", ["env_stops", "agent_stops"])
def test_only_the_environment_scales_and_shifts_what_the_data_does_not(data, mode):
    plain, scaled = DialogueRewards(mode), DialogueRewards(mode, scale=2.0, shift=0.25)
    episodes, scenes = data.episodes(plain), [scene.image for scene in data.scenes(plain)]
    asked = list(map(questions_of, episodes))
    found = replay(make_env(data, rewards=scaled, batch_size=[len(scenes)]), scenes, asked)
    for row, episode in zip(found, episodes, strict=True):
        expected = [2.0 * turn.reward + 0.25 for turn in episode.turns if turn.by_agent]
        rewards = [turn.reward for turn in from_row(row, TOKENIZER).turns if turn.by_agent]
        assert rewards == pytest.approx(expected, abs=1e-6)  # that of <stop> is 0.25


def test_rewards_ends_and_progress_of_plain_loops(data):
    """Whatever is asked: each row is played again question by question, without the library's rules."""
    models, env = WordOverlap(), make_env(data, rewards=DialogueRewards(penalty="hard"), batch_size=[SCENES])
    draw = torch.Generator().manual_seed(0)
    words = ["red", "green", "cat", "dog", "wet", "dry", "old", "young", "black"]
    td, rounds = env.reset(game_seed=torch.arange(SCENES)), 0
    while not td["done"].all():
        td = say_after(env, td, *(f"{words[int(torch.randint(9, (), generator=draw))]}?" for _ in range(SCENES)))
    for scene, row in enumerate(td):
        image, dialogue = data.features.rows([scene]), Dialogue(data.dialogues[scene].caption)
        percentile = [float(models.percentiles([dialogue], image))]
        expected = []
        for question in questions_of(from_row(row, TOKENIZER)):
            [answer] = models.answers([dialogue], [question], image)
            dialogue = Dialogue(dialogue.caption, (*dialogue.rounds, Round(question, answer)))
            percentile.append(float(models.percentiles([dialogue], image)))
            ended = percentile[-1] - percentile[0] >= 0.5 * (1 - percentile[0]) or len(percentile) == 11
            expected.append((0.0 if ended else -1.0) + (-2.0 if answer in ("yes", "no") else 0.0))
            assert ended == (len(expected) == len(questions_of(from_row(row, TOKENIZER))))
            rounds += 1
        assert [turn.reward for turn in from_row(row, TOKENIZER).turns if turn.by_agent] == expected
        by_round = row["progress"].cumsum(-1)[: len(percentile)]
        torch.testing.assert_close(by_round, torch.tensor(percentile), atol=1e-6, rtol=0)
        assert not row["progress"][len(percentile) :].any()
    assert rounds > 3 * SCENES


def test_ten_rounds_end_a_dialogue_in_every_mode(data):
    never = DialogueRewards(cutoff=lambda initial, progress: False)
    for rewards in (never, DialogueRewards("agent_stops"), DialogueRewards("10_stop")):
        td = replay(make_env(data, rewards=rewards, batch_size=[1]), [0], [["?"] * 9])
        assert not td["done"].any()
        td = replay(make_env(data, rewards=rewards, batch_size=[1]), [0], [["?"] * 10])
        assert td["terminated"].all()
        assert not td["truncated"].any()


# -- entries -----------------------------------------------------------------------------------------------------------


def test_observations_after_a_reset(data):
    td = make_env(data, batch_size=[2]).reset(game_seed=seeds(4, 1))
    images = data.features.rows([4, 1])
    assert torch.equal(td["features"], images[:, None])
    assert td["features_mask"].tolist() == [[True], [True]]
    captions = [Dialogue(data.dialogues[scene].caption) for scene in (4, 1)]
    assert torch.equal(td["progress"][:, 0], WordOverlap().percentiles(captions, images))
    assert not td["progress"][:, 1:].any()
    assert TOKENIZER.decode(td["tokens"][0][td["attention_mask"][0]]) == f"<s>{data.dialogues[4].caption}</s>"


def test_an_agent_that_does_not_see(data):
    env = make_env(data, image=False)
    assert {"features", "features_mask"}.isdisjoint(env.reset().keys())
    assert not env.step(env.reset().set("action", env.action_spec.rand()))["next"].keys() & {
        "features",
        "features_mask",
    }


def test_distances(data):
    rewards = DialogueRewards("10_stop")
    models, env = WordOverlap(), make_env(data, rewards=rewards, measure="distance", batch_size=[1])
    td = say_after(env, env.reset(game_seed=seeds(2)), "is it red?")
    image, caption = data.features.rows([2]), data.dialogues[2].caption
    before = float(models.distances([Dialogue(caption)], image))
    [answer] = models.answers([Dialogue(caption)], ["is it red?"], image)
    after = float(models.distances([Dialogue(caption, (Round("is it red?", answer),))], image))
    assert td["reward"].item() == pytest.approx(before - after, abs=1e-6)
    assert td["progress"][0, :3].tolist() == pytest.approx([before, after - before, 0.0], abs=1e-6)


def test_the_distances_of_a_cache_are_the_rewards(tmp_path):
    data, rewards = write_world(tmp_path, 3, measure="distance"), DialogueRewards("10_stop")
    asked = list(map(questions_of, data.episodes(rewards)))
    found = replay(make_env(data, rewards=rewards, measure="distance", batch_size=[3]), range(3), asked)
    assert torch.equal(found["token_reward"], to_rows(data.episodes(rewards), TOKENIZER, ROW)["token_reward"])


def test_a_row_that_begins_anew_leaves_the_others_as_they_are(data):
    env = make_env(data, rewards=DialogueRewards("agent_stops"), batch_size=[3])
    td = say_after(env, env.reset(game_seed=seeds(0, 1, 2)), "red?", STOP, "wet?")
    assert td["done"].flatten().tolist() == [False, True, False]
    again = env.reset(td.clone().set("_reset", td["done"]), game_seed=seeds(8, 8, 8))
    other, fresh = _begun(data, 8)
    for key in ("tokens", "progress", "features"):
        assert torch.equal(again[key][[0, 2]], td[key][[0, 2]])
        assert torch.equal(again[key][1], fresh[key][0])
    after = say_after(env, again, "red?", "dog?", "red?")
    assert torch.equal(after["progress"][1], say_after(other, fresh, "dog?")["progress"][0])
    assert after["done"].sum() == 0


def _begun(data, scene):
    env = make_env(data, rewards=DialogueRewards("agent_stops"))
    return env, env.reset(game_seed=seeds(scene))


def test_a_state_that_is_set_has_its_progress_and_goes_on(data):
    env, other = (make_env(data, batch_size=[2]) for _ in range(2))
    td = say_after(env, env.reset(game_seed=seeds(3, 5)), "is it red?", "is it a dog?")
    state = td.select(*ROW_KEYS).set("game_seed", seeds(3, 5))
    found = other.reset(state, set_state=True)
    for key in ("progress", "features", "features_mask"):
        assert torch.equal(found[key], td[key])
    one, two = (say_after(each, start, "wet?", "") for each, start in ((env, td), (other, found)))
    assert (one.exclude("action") == two.exclude("action")).all()
    with pytest.raises(ValueError, match="differs from the replay of game seed 4"):
        other.reset(state.set("game_seed", seeds(3, 4)), set_state=True)


# -- the rules of language environments --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["env_stops", "agent_stops", "10_stop"])
def test_the_rules_of_language_environments(data, mode):
    def make(batch_size, **options):
        return make_env(data, rewards=DialogueRewards(mode), batch_size=batch_size, **options)

    check_language_env(make([2]), lambda n: make([n]), utterances=["red?", "is it a dog?", STOP])
    short = {"row_length": 60, "action_length": 5}
    token_env = TokenEnv(make([2], **short))
    check_language_env(token_env, lambda n: TokenEnv(make([n], **short)), utterances=["red?", "wet?"])


def test_every_scene_is_drawn(data):
    env = make_env(data, batch_size=[400])
    env.reset()
    assert (env.game_seed.bincount(minlength=SCENES) > 20).all()


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_dialogues_in_turn(data, batch):
    env, seen = make_env(data, order="cycle", batch_size=[batch]), []
    for _ in range(2 * SCENES // batch):
        env.reset()
        seen += env.game_seed.tolist()
    assert seen == [number % SCENES for number in range(len(seen))]
    with pytest.raises(ValueError, match="order"):
        make_env(data, order="sorted")
