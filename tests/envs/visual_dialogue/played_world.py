"""Dialogues that the models of :mod:`word_overlap` answered themselves, in files, with caches of their rewards."""

import json
import random

import numpy as np

from tests.envs.visual_dialogue.word_overlap import WORDS, WordOverlap, image
from torchrl_lang.envs.visual_dialogue import VisualDialogueEnv, VisualDialogues, compute_reward_caches
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
from torchrl_lang.text import CharTokenizer

TOKENIZER = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz 0123456789,?<>")
SHORT = [word for word in WORDS if len(word) == 3]
ROW, ACTION = 420, 24


def write_world(home, many, *, measure="rank", models=None):
    """A split "val" with ``many`` images; captions have one length, questions name one or two words."""
    models, draw = models or WordOverlap(), random.Random(0)
    np.save(home / "images_val.npy", np.stack([image(seed).numpy() for seed in range(many)]))
    path = home / "visdial_0.5_val.json"
    dialogues = [Dialogue(f"a {draw.choice(SHORT)} {draw.choice(SHORT)}") for _ in range(many)]
    _write(path, [each._replace(rounds=(Round("?", "no"),) * 10) for each in dialogues])
    features = VisualDialogues.in_folder(home, "val").features.all()
    for _ in range(10):
        asked = [f"is it {' or '.join(draw.sample(WORDS, draw.choice((1, 2))))}?" for _ in range(many)]
        answers = models.answers(dialogues, asked, features)
        dialogues = [each.then(*turn) for each, *turn in zip(dialogues, asked, answers, strict=True)]
    _write(path, dialogues)
    compute_reward_caches(models, dialogues, lambda rows: features[list(rows)]).save(home, "val")
    return VisualDialogues.in_folder(home, "val", rewards=measure)


def make_env(data, models=None, *, tokenizer=TOKENIZER, batch_size=(1,), **options):
    options = {"row_length": ROW, "action_length": ACTION, "seed": 0, **options}
    return VisualDialogueEnv(data, models or WordOverlap(), tokenizer, batch_size=batch_size, **options)


def _write(path, dialogues):
    items = []
    for number, each in enumerate(dialogues):
        rounds = [{"question": turn.question.removesuffix("?"), "answer": turn.answer} for turn in each.rounds]
        items.append({"caption": each.caption, "image_id": number, "dialog": rounds})
    path.write_text(json.dumps(items))
