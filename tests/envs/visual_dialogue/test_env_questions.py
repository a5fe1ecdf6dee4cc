"""What the models of a visual dialogue are asked, what the agent may write, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.envs.helpers import say_after
from tests.envs.visual_dialogue.played_world import TOKENIZER, make_env, write_world
from tests.envs.visual_dialogue.word_overlap import WordOverlap
from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueRewards
from torchrl_lang.envs.visual_dialogue.rewards import STOP
from torchrl_lang.text import from_row

SCENES = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"), SCENES)


def seeds(*numbers):
    return torch.tensor(numbers)


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
    [(dialogues, questions)] = models.asked
    assert questions == ["red?", "wet?"]
    assert dialogues == [Dialogue(data.dialogues[scene].caption) for scene in (0, 2)]
    assert td["done"].flatten().tolist() == [False, True, False]
    say_after(env, td, STOP, "cat?", STOP)
    assert len(models.asked) == 1
    assert len(models.scored) == 2  # at the reset, and once for the completed rounds


def test_stop_is_a_question_where_agents_do_not_stop(data):
    models = Recorder()
    td = say_after(*_env_and_reset(data, models), STOP)
    assert models.asked[0][1] == [STOP]
    assert not td["done"].any()


def _env_and_reset(data, models, **options):
    env = make_env(data, models, rewards=DialogueRewards("10_stop"), **options)
    return env, env.reset(game_seed=seeds(0))


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
    env, td = _env_and_reset(data, models, read=read)
    td = say_after(env, say_after(env, td, "red?"), "red?")
    assert [questions for _, questions in models.asked] == [[gets], [gets]]
    assert models.asked[1][0][0].rounds[0].question == gets
    assert [turn.text for turn in from_row(td[0], TOKENIZER).turns if turn.by_agent] == ["red?", "red?"]


def test_what_cannot_be_decoded(data, monkeypatch):
    def undecodable(ids):
        raise ValueError("no text")

    models = Recorder()
    env, td = _env_and_reset(data, models)
    action = env.action_spec.rand()
    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "decode", undecodable)
        env.step(td.set("action", action))
    assert models.asked[0][1] == ["\N{REPLACEMENT CHARACTER}"]


def test_wrong_options(data):
    class Wider(WordOverlap):
        def __init__(self):
            super().__init__()
            self.feature_size = 17

    with pytest.raises(ValueError, match=r"take images of 17 features, but .*images_val\.npy has 16"):
        make_env(data, Wider())
    with pytest.raises(ValueError, match="A PercentileCutoff needs percentiles"):
        make_env(data, measure="distance")
    make_env(data, measure="distance", rewards=DialogueRewards(cutoff=lambda initial, progress: True))
    with pytest.raises(ValueError, match="measure must be"):
        make_env(data, measure="percentile")
    for scene in (-1, SCENES):
        with pytest.raises(ValueError, match=f"no dialogue {scene}: game_seed is a number below {SCENES}"):
            make_env(data).reset(game_seed=seeds(scene))


def test_models_that_fail(data):
    class Fails(WordOverlap):
        def answers(self, dialogues, questions, features):
            raise RuntimeError("out of memory")

    env = make_env(data, Fails())
    td = env.reset()
    with pytest.raises(RuntimeError, match="out of memory"):
        say_after(env, td, "red?")
    with pytest.raises(RuntimeError, match="call reset"):
        say_after(env, td, "red?")
    env.reset()
