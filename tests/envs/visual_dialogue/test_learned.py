"""What trained models make of generated dialogues about images that they were not trained on."""

import pytest
import torch

from torchrl_lang.envs.visual_dialogue import (
    DialogueRewards,
    LocalDialogueModels,
    VisualDialogues,
    generate_visual_dialogues,
    train_dialogue_models,
)
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.generate import ATTRIBUTES
from torchrl_lang.envs.visual_dialogue.rewards import is_yes_no

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models, held-out dialogues and the features of their images."""
    home = tmp_path_factory.mktemp("learned")
    generate_visual_dialogues(home / "data", {"train": 2000, "val": 400}, npy=True, seed=3)
    train, val = (VisualDialogues.in_folder(home / "data", split) for split in ("train", "val"))
    options = {"guesser_epochs": 20, "answerer_epochs": 10}
    train_dialogue_models(train.dialogues, train.features, **options).save(home / "models")
    pool = val.features.all()
    return LocalDialogueModels(home / "models", pool), val.dialogues, pool


def prefixes(dialogues, rounds):
    return [each._replace(rounds=each.rounds[:rounds]) for each in dialogues]


def is_closed(each):
    return is_yes_no(each.answer, "conservative")


@pytest.fixture(scope="module")
def by_round(trained):
    """Percentiles ``[N, 11]`` after the caption and after each round."""
    models, dialogues, pool = trained
    return torch.stack([models.percentiles(prefixes(dialogues, rounds), pool) for rounds in range(11)], dim=1)


def test_captions_are_not_informative_and_every_round_helps(by_round):
    mean = by_round.mean(0)
    assert 0.6 < mean[0] < 0.75
    assert (mean.diff() > 0.005).all()
    assert mean[-1] > 0.88


def test_the_cutoff_is_reached_after_some_questions(by_round):
    ends = []
    for values in by_round.double():
        progress = values.diff().tolist()
        ends.append(
            next((end for end in range(1, 11) if DialogueRewards().is_last(float(values[0]), progress[:end])), 10)
        )
    assert 4 <= sum(ends) / len(ends) <= 6
    assert sum(end == 1 for end in ends) < 0.25 * len(ends)


def test_each_kind_of_question_carries_information(trained, by_round):
    models, dialogues, pool = trained
    for deleted in (True, False):
        rest = [each._replace(rounds=tuple(r for r in each.rounds if is_closed(r) != deleted)) for each in dialogues]
        assert models.percentiles(rest, pool).mean() < by_round[:, -1].mean() - 0.03


@pytest.mark.parametrize("closed", [True, False], ids=["yes-no", "open"])
def test_answers_are_right(trained, closed):
    models, dialogues, pool = trained
    right = []
    for rounds in range(10):
        asked = [each.rounds[rounds] for each in dialogues]
        answers = models.answers(prefixes(dialogues, rounds), [each.question for each in asked], pool)
        right += [got == each.answer for got, each in zip(answers, asked, strict=True) if is_closed(each) == closed]
    assert len(right) > 1000
    assert sum(right) / len(right) > 0.9


def test_asking_the_models_reaches_the_image(trained):
    models, dialogues, pool = trained
    asked = [Dialogue(each.caption) for each in dialogues]
    for attribute in ATTRIBUTES[:10]:
        question = f"{attribute.open_questions[0][0]}?"
        answers = models.answers(asked, [question] * len(asked), pool)
        asked = [each.then(question, answer) for each, answer in zip(asked, answers, strict=True)]
    assert models.percentiles(asked, pool).mean() > 0.9
