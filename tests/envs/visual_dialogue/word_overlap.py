"""Models of visual dialogue without training: an image is a bag of words, and so is what is known about it."""

import zlib

import torch

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
