from __future__ import annotations

import pytest
import torch

from torchrl_lang.data import CharTokenizer, Episode, Turn, to_rows, top_fraction, write_dataset

WORDS = CharTokenizer.from_alphabet("abcdef")
RETURNS = [0.0, 2.0, 1.0, 2.0, -1.0, 2.0]


@pytest.fixture
def rows():
    # The n-th episode says n letters, the first of which is its name.
    said = ["abcdef"[n] + n * "a" for n in range(6)]
    return to_rows([Episode([Turn(text, r)], True) for text, r in zip(said, RETURNS, strict=True)], WORDS, 12)


def names(rows):
    return [WORDS.decode([index]) for index in rows["tokens"][:, 1]]


@pytest.mark.parametrize(
    ("fraction", "kept"),
    [(1e-9, "b"), (1 / 6, "b"), (1 / 3, "bd"), (0.5, "bdf"), (2 / 3, "bcdf"), (5 / 6, "abcdf"), (1.0, "abcdef")],
)
def test_the_best_by_return_ties_to_the_earlier(rows, fraction, kept):
    assert names(top_fraction(rows, fraction)) == list(kept)


def test_other_orders(rows):
    assert names(top_fraction(rows, 0.5, by="tokens")) == list("abc")
    assert names(top_fraction(rows, 0.5, by=torch.tensor([1, 2, 3, 4, 5, 6]))) == list("def")


def test_a_data_set_on_disk(rows, tmp_path):
    best = top_fraction(write_dataset(tmp_path / "data", rows, WORDS), 0.5)
    assert names(best) == list("bdf")
    write_dataset(tmp_path / "best", best, WORDS)


def test_errors(rows):
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match="the best tenth"):
            top_fraction(rows, fraction)
    with pytest.raises(ValueError, match="by must be"):
        top_fraction(rows, 0.5, by="luck")
    with pytest.raises(ValueError, match="A score of shape"):
        top_fraction(rows, 0.5, by=torch.zeros(5))
