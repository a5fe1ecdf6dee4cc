"""Words of the models: splitting, joining, unknown words and padding."""

import pytest
import torch

from torchrl_lang.envs.visual_dialogue import Dialogue, Round
from torchrl_lang.envs.visual_dialogue.models.words import (
    END,
    PAD,
    UNKNOWN,
    DialogueBatch,
    WordIndex,
    join_words,
    split_words,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("can't", ["ca", "n't"]),
        ("I don\N{RIGHT SINGLE QUOTATION MARK}t think so", ["i", "do", "n't", "think", "so"]),
        ("is it red?", ["is", "it", "red", "?"]),
        ("it's 10, maybe.", ["it", "'s", "10", ",", "maybe", "."]),
        ("no", ["no"]),
        ("  ", []),
    ],
)
def test_splitting_and_joining(text, words):
    assert split_words(text) == words
    assert split_words(join_words(words)) == words


def test_joined_texts_have_no_spaces_before_punctuation():
    assert join_words(["ca", "n't", "see", "it", ",", "is", "it", "the", "dog", "'s", "?"]) == (
        "can't see it, is it the dog's?"
    )


def test_ids_of_rare_words():
    words = WordIndex.of_texts(["a dog and a cat", "a dog"], least=2)
    assert words.words == ("a", "dog")
    assert words.ids(["a red dog", "", "dog"]).tolist() == [[4, UNKNOWN, 5], [PAD, PAD, PAD], [5, PAD, PAD]]
    assert words.ids(["a a a a"], longest=2).tolist() == [[4, 4]]
    assert words.ids([""]).shape == (1, 1)
    assert words.text([4, UNKNOWN, 5, END, 5]) == "a dog"
    assert words.text([]) == ""


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_wrong_words(names):
    with pytest.raises(ValueError, match="at least one word, and each once"):
        WordIndex(names)


def test_batches_place_rounds():
    words = WordIndex.of_texts(["a b c d"])
    a, b, c, d = words.ids(["a b c d"])[0].tolist()
    batch = DialogueBatch.of([Dialogue("a"), Dialogue("b", (Round("c", "d"), Round("d c", "")))], words)
    assert batch.rounds.tolist() == [0, 2]
    assert batch.caption.tolist() == [[a], [b]]
    assert batch.questions.tolist() == [[[PAD, PAD]] * 2, [[c, PAD], [d, c]]]
    assert batch.answers.tolist() == [[[PAD], [PAD]], [[d], [PAD]]]
    assert DialogueBatch.of([Dialogue("a")], words).questions.shape[:2] == (1, 0)
    assert torch.equal(batch.rows(torch.tensor([1])).questions, batch.questions[1:])
