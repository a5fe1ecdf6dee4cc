"""Models of visual dialogue without training, and files of dialogues that they answered themselves."""

import json
import random
import zlib

import numpy as np
import torch

from torchrl_lang.envs.visual_dialogue import VisualDialogueEnv, VisualDialogues, compute_reward_caches
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
from torchrl_lang.text import CharTokenizer

SIZE = 16
WORDS = ["red", "green", "blue", "black", "cat", "dog", "bird", "horse", "small", "large", "wet", "dry", "old", "young"]


def bag(text):
    """Counts of words, each in the place of its checksum, ``[SIZE]``."""
    counts = torch.zeros(SIZE)
    for word in text.lower().replace("?", " ").split():
        counts[zlib.crc32(word.encode()) % SIZE] += 1
    return counts


def unit(vector):
    return vector / vector.norm().clamp(min=1e-6)


def image(seed):
    """The features of an image: a few words, ``[SIZE]``, of length 1."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(len(WORDS), generator=generator)[:4].tolist()
    return unit(bag(" ".join(WORDS[place] for place in picked)) + 0.1 * torch.rand(SIZE, generator=generator))


class WordOverlap:
    """Answers "yes" to words of the image; guesses the bag of the caption and of all that was answered with yes."""

    def __init__(self, pool=50):
        self.feature_size = SIZE
        self.pool = torch.stack([image(seed) for seed in range(pool)])

    def answers(self, dialogues, questions, features):
        replies = []
        for dialogue, question, feature in zip(dialogues, questions, features, strict=True):
            overlap = float(bag(question) @ feature)
            replies.append(f"yes, round {len(dialogue.rounds) + 1}" if overlap > 0.3 else "no")
        return replies

    def distances(self, dialogues, features):
        return (self._guesses(dialogues) - features).square().mean(-1)

    def percentiles(self, dialogues, features):
        guesses = self._guesses(dialogues)
        to_pool = (guesses[:, None] - self.pool).square().sum(-1)
        nearer = (to_pool < (guesses - features).square().sum(-1, keepdim=True)).sum(-1)
        return 1 - (nearer + 1) / (len(self.pool) + 1)

    def _guesses(self, dialogues):
        """Row by row, so that a result does not depend on the rest of its batch."""
        guesses = []
        for dialogue in dialogues:
            confirmed = [turn.question for turn in dialogue.rounds if turn.answer.startswith("yes")]
            guesses.append(unit(bag(" ".join([dialogue.caption, *confirmed]))))
        return torch.stack(guesses)


def ask(dialogues):
    """A questioner: the next word of the list."""
    return [f"is it {WORDS[len(dialogue.rounds) % len(WORDS)]}?" for dialogue in dialogues]


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


def make_batch(count, seed=0, size=SIZE):
    """Dialogues of 0 to 4 rounds, a question of each, and features ``[count, size]``."""
    generator = torch.Generator().manual_seed(seed)

    def word():
        return WORDS[int(torch.randint(len(WORDS), (), generator=generator))]

    dialogues = []
    for number in range(count):
        rounds = [Round(f"is it {word()}?", ("yes", "no")[(number + turn) % 2]) for turn in range(number % 5)]
        dialogues.append(Dialogue(f"a {word()} {word()}", tuple(rounds)))
    features = torch.stack([image(seed * 1000 + number) for number in range(count)])
    return dialogues, [f"is it {word()} or {word()}?" for _ in range(count)], features


def _write(path, dialogues):
    items = []
    for number, each in enumerate(dialogues):
        rounds = [{"question": turn.question.removesuffix("?"), "answer": turn.answer} for turn in each.rounds]
        items.append({"caption": each.caption, "image_id": number, "dialog": rounds})
    path.write_text(json.dumps(items))
