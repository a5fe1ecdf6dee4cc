"""What trained models make of generated dialogues about images that they were not trained on."""

import pytest
import torch

from torchrl_lang.envs import visual_dialogue
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.generate import ATTRIBUTES
from torchrl_lang.envs.visual_dialogue.rewards import is_yes_no

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models, held-out dialogues and the features of their images."""
    home = tmp_path_factory.mktemp("learned")
    visual_dialogue.generate_visual_dialogues(home / "data", {"train": 800, "val": 150}, npy=True, seed=3)
    train, val = (visual_dialogue.VisualDialogues.in_folder(home / "data", split) for split in ("train", "val"))
    options = {"guesser_epochs": 13, "answerer_epochs": 10, "batch_size": 32, "width": 64}
    options |= {"guesser_rate": 3e-3, "answerer_rate": 8e-3}
    visual_dialogue.train_dialogue_models(train.dialogues, train.features, **options).save(home / "models")
    pool = val.features.all()
    return visual_dialogue.LocalDialogueModels(home / "models", pool), val.dialogues, pool


def prefixes(dialogues, rounds):
    return [each._replace(rounds=each.rounds[:rounds]) for each in dialogues]


def test_captions_are_not_informative_and_rounds_help(trained):
    models, dialogues, pool = trained
    mean = torch.stack([models.percentiles(prefixes(dialogues, rounds), pool).mean() for rounds in (0, 3, 6, 10)])
    assert 0.6 < mean[0] < 0.75
    assert (mean.diff() > 0.01).all()
    assert mean[-1] > mean[0] + 0.1
    closed = [[each for each in dialogue.rounds if is_yes_no(each.answer, "conservative")] for dialogue in dialogues]
    only_closed = [each._replace(rounds=tuple(rounds)) for each, rounds in zip(dialogues, closed, strict=True)]
    assert models.percentiles(only_closed, pool).mean() < mean[-1] - 0.1


def test_answers_are_right(trained):
    """Nine of ten to open questions; to those with yes or no, of three forms each, more than the half that guesses."""
    models, dialogues, pool = trained
    right = {True: [], False: []}
    for rounds in range(10):
        asked = [each.rounds[rounds] for each in dialogues]
        answers = models.answers(prefixes(dialogues, rounds), [each.question for each in asked], pool)
        for got, each in zip(answers, asked, strict=True):
            right[is_yes_no(each.answer, "conservative")].append(got == each.answer)
    assert min(map(len, right.values())) > 700
    assert sum(right[False]) / len(right[False]) > 0.9
    assert sum(right[True]) / len(right[True]) > 0.65


def test_asking_the_models_reaches_the_image(trained):
    models, dialogues, pool = trained
    asked = [Dialogue(each.caption) for each in dialogues]
    for attribute in ATTRIBUTES[:10]:
        question = f"{attribute.open_questions[0][0]}?"
        answers = models.answers(asked, [question] * len(asked), pool)
        asked = [each.then(question, answer) for each, answer in zip(asked, answers, strict=True)]
    assert models.percentiles(asked, pool).mean() > 0.85
