"""Metrics of played dialogues, by hand and against the models."""

from __future__ import annotations

import pytest
import torch

from tests.envs.helpers import action
from tests.envs.visual_dialogue.played_world import TOKENIZER, make_env, write_world
from tests.envs.visual_dialogue.word_overlap import WORDS, WordOverlap
from torchrl_lang.envs.visual_dialogue import DialogueRewards, played_rounds
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
from torchrl_lang.envs.visual_dialogue.play import yes_no_rate
from torchrl_lang.evaluation import play_games
from torchrl_lang.text import Episode, Turn, to_rows


def test_rounds_of_rows():
    def rounds(*turns, **ended):
        episode = Episode([Turn("a dog"), *turns], **(ended or {"terminated": True}))
        return played_rounds(to_rows([episode], TOKENIZER, 60), TOKENIZER)[0]

    asked = Turn("red?", -1.0), Turn("no")
    assert rounds() == []
    assert rounds(*asked) == [Round("red?", "no")]
    assert rounds(*asked, Turn("ok <stop>", 0.0)) == [Round("red?", "no")]
    assert rounds(Turn("<stop>?", 0.0), Turn("yes"), *asked) == [Round("<stop>?", "yes"), Round("red?", "no")]
    assert rounds(Turn("red?", 0.0), Turn("wet?", 0.0), Turn("no")) == [Round("red?", ""), Round("wet?", "no")]
    assert rounds(*asked, Turn("", -1.0), terminated=False, truncated=True) == [Round("red?", "no"), Round("", "")]


@pytest.mark.parametrize(
    ("penalty", "substrings", "rates"),
    [
        ("none", False, [0, 0, 0]),
        ("hard", False, [0.25, 0, 0]),
        ("soft", False, [0.5, 0, 0]),
        ("soft", True, [0.75, 0, 0]),
        ("conservative", False, [0.75, 1, 0]),
    ],
)
def test_yes_no_rates_by_hand(penalty, substrings, rates):
    rounds = [[Round("?", answer) for answer in answers] for answers in (["no", "yes.", "snow", "two"], ["maybe"], [])]
    assert yes_no_rate(rounds, penalty, substrings=substrings).tolist() == rates


@pytest.mark.parametrize("mode", ["env_stops", "agent_stops"])
def test_played_games(tmp_path, mode):
    """Progress that is kept, rounds that are read and percentiles of the models agree."""
    data, models = write_world(tmp_path, 9), WordOverlap()
    env, same = (make_env(data, models, rewards=DialogueRewards(mode), batch_size=[rows]) for rows in (4, 7))
    same.reset()
    scenes, draw = same.game_seed.tolist(), torch.Generator().manual_seed(0)

    def policy(td):
        words = [WORDS[word] for word in torch.randint(len(WORDS), (4,), generator=draw).tolist()]
        return td.set("action", action(env, *("<stop>" if word == "wet" else f"{word}?" for word in words)))

    records = play_games(env, policy, games=7, keep=["progress"])
    progress, rounds = records.kept["progress"], played_rounds(records.rows, TOKENIZER)
    assert progress.shape == (7, 11)
    found = progress.double().cumsum(-1).float()
    stops = 0
    for game, played in enumerate(rounds):
        image, caption = data.features.rows([scenes[game]]), data.dialogues[scenes[game]].caption
        for turn in range(11):
            expected = models.percentiles([Dialogue(caption, tuple(played[:turn]))], image)
            torch.testing.assert_close(found[game, turn : turn + 1], expected, atol=1e-6, rtol=0)
        stops += int(records.turns[game]) - len(played)
    assert (stops > 0) == (mode == "agent_stops")
    assert 0 < yes_no_rate(rounds, "hard").mean() < 1
