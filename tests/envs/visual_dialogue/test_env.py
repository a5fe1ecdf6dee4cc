"""The visual dialogue environment: its rows are those of the data, and its numbers those of plain loops."""

import pytest
import torch

from tests.data.chat_templates import EXACT, tokenizer_of
from tests.envs.helpers import say_after
from tests.envs.visual_dialogue.word_overlap import ROW, TOKENIZER, WordOverlap, make_env, write_world
from torchrl_lang.envs import TokenEnv, check_language_env
from torchrl_lang.envs.visual_dialogue import DialogueRewards, DialogueServer, RemoteModels, played_rounds
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
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


REWARDS = [
    DialogueRewards(),
    DialogueRewards(penalty="soft", soft_substrings=True, penalty_value=-0.5),
    DialogueRewards(cutoff=lambda initial, progress: len(progress) == 3),
    DialogueRewards("agent_stops"),
    DialogueRewards("10_stop", scale=-2.0, shift=0.5),
]


@pytest.mark.parametrize("rewards", REWARDS, ids=lambda each: f"{each.mode}-{each.penalty}-{each.scale}")
@pytest.mark.parametrize("chat", [False, True])
def test_replayed_episodes_of_the_data_are_its_rows(data, rewards, chat):
    tokenizer, row_length = (chat_tokenizer(), 1200) if chat else (TOKENIZER, ROW)
    episodes = data.episodes(rewards)
    scenes = [scene.image for scene in data.scenes(rewards)]
    options = {"tokenizer": tokenizer, "row_length": row_length, "batch_size": [len(scenes)]}
    found = replay(make_env(data, rewards=rewards, **options), scenes, list(map(questions_of, episodes)))
    expected = to_rows(episodes, tokenizer, row_length)
    for key in (*ROW_KEYS, "terminated", "truncated"):
        assert torch.equal(found[key], expected[key]), key
    fixed = rewards.mode == "10_stop" or rewards.cutoff is not None
    assert fixed or len({len(episode.turns) for episode in episodes}) > 1
    assert played_rounds(found, tokenizer) == [list(scene.dialogue.rounds) for scene in data.scenes(rewards)]


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
        assert torch.equal(row["features"], image)
        assert row["features_mask"].tolist() == [True]
    assert rounds > 3 * SCENES


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


def test_a_row_that_begins_anew_leaves_the_others_as_they_are(data):
    env, other = (make_env(data, rewards=DialogueRewards("agent_stops"), batch_size=[n]) for n in (3, 1))
    td = say_after(env, env.reset(game_seed=seeds(0, 1, 2)), "red?", STOP, "wet?")
    assert td["done"].flatten().tolist() == [False, True, False]
    again = env.reset(td.clone().set("_reset", td["done"]), game_seed=seeds(8, 8, 8))
    fresh = other.reset(game_seed=seeds(8))
    for key in ("tokens", "progress", "features"):
        assert torch.equal(again[key][[0, 2]], td[key][[0, 2]])
        assert torch.equal(again[key][1], fresh[key][0])
    after = say_after(env, again, "red?", "dog?", "red?")
    assert torch.equal(after["progress"][1], say_after(other, fresh, "dog?")["progress"][0])
    assert after["done"].sum() == 0


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


def test_the_rules_of_language_environments(data):
    """In mode "env_stops" they are tested with those of the other environments."""

    def make(n):
        options = {"rewards": DialogueRewards("agent_stops"), "row_length": 60, "action_length": 6}
        return TokenEnv(make_env(data, batch_size=[n], **options))

    check_language_env(make(2), make, utterances=["red?", "wet?", STOP])


def test_dialogues_in_turn(data):
    env, seen = make_env(data, order="cycle", batch_size=[4]), []
    for _ in range(2 * SCENES // 4):
        env.reset()
        seen += env.game_seed.tolist()
    assert seen == [number % SCENES for number in range(len(seen))]
    assert {"features", "features_mask"}.isdisjoint(make_env(data, image=False).reset().keys())


class Recorder(WordOverlap):
    """Remembers what it was asked."""

    def __init__(self):
        super().__init__()
        self.asked, self.scored = [], []

    def answers(self, dialogues, questions, features):
        self.asked.append((list(dialogues), list(questions)))
        return super().answers(dialogues, questions, features)

    def percentiles(self, dialogues, features):
        self.scored.append(list(dialogues))
        return super().percentiles(dialogues, features)


def test_the_models_are_asked_once_a_step_about_rows_that_play(data):
    models = Recorder()
    env = make_env(data, models, rewards=DialogueRewards("agent_stops"), batch_size=[3])
    td = env.reset(game_seed=seeds(0, 1, 2))
    assert ([len(each) for each in models.scored], models.asked) == ([3], [])
    td = say_after(env, td, "red?", f"no more {STOP}", "wet?")
    playing = [Dialogue(data.dialogues[scene].caption) for scene in (0, 2)]
    assert models.asked == [(playing, ["red?", "wet?"])]
    assert td["done"].flatten().tolist() == [False, True, False]
    say_after(env, td, STOP, "cat?", STOP)
    assert len(models.asked) == 1
    assert len(models.scored) == 2  # at the reset, and once for the completed rounds


@pytest.mark.parametrize(
    ("read", "gets"),
    [
        (lambda text: "", "\N{REPLACEMENT CHARACTER}"),
        (lambda text: " \n\t", "\N{REPLACEMENT CHARACTER}"),
        (lambda text: "a\ud800b", "a\N{REPLACEMENT CHARACTER}b"),
        (lambda text: "word " * 1000, ("word " * 1000)[:1000]),
        (lambda text: f" {text}?", " red??"),  # verbatim
        (None, "red?"),
    ],
)
def test_what_the_models_get_of_a_question(data, read, gets):
    models = Recorder()
    env = make_env(data, models, rewards=DialogueRewards("10_stop"), read=read)
    td = say_after(env, say_after(env, env.reset(game_seed=seeds(0)), "red?"), "red?")
    assert [questions for _, questions in models.asked] == [[gets], [gets]]
    assert models.asked[1][0][0].rounds[0].question == gets
    assert [turn.text for turn in from_row(td[0], TOKENIZER).turns if turn.by_agent] == ["red?", "red?"]


def test_wrong_options(data):
    class Wider(WordOverlap):
        def __init__(self):
            super().__init__()
            self.feature_size = 17

    with pytest.raises(ValueError, match=r"take images of 17 features, but .*images_val\.npy has 16"):
        make_env(data, Wider())
    with pytest.raises(ValueError, match="has no percentile to end at"):
        make_env(data, measure="distance")
    make_env(data, measure="distance", rewards=DialogueRewards(cutoff=lambda initial, progress: True))
    for scene in (-1, SCENES):
        with pytest.raises(ValueError, match=rf"game_seed must lie in \[0, {SCENES}\), got \[{scene}\]"):
            make_env(data).reset(game_seed=seeds(scene))


def test_a_server_that_has_gone(data, models):
    with DialogueServer(models) as server:
        client = RemoteModels(server.url, retries=1, first_wait=0.001, longest_wait=0.01)
        env = make_env(data, client)
        td = env.reset()
    with pytest.raises(ConnectionError, match="answered none of 2 requests"):
        say_after(env, td, "red?")
    with pytest.raises(RuntimeError, match="call reset"):
        say_after(env, td, "red?")
    with pytest.raises(ConnectionError):
        env.reset()
    with DialogueServer(models, port=server.port):
        td = say_after(env, env.reset(), "red?")
    assert [turn.text for turn in from_row(td[0], TOKENIZER).turns][1] == "red?"
