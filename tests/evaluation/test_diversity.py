"""Distinct n-grams, their entropy, and perplexity, by hand and by plain loops."""

from __future__ import annotations

import math
import random

import pytest
import torch

from torchrl_lang.evaluation import distinct_n, ngram_entropy, perplexity
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows


@pytest.mark.parametrize(
    ("texts", "n", "distinct", "entropy"),
    [
        (["a b a b"], 1, 2 / 4, math.log(2)),
        (["a b a b"], 2, 2 / 3, math.log(3) - 2 / 3 * math.log(2)),
        (["a b", "a b", "b a"], 2, 2 / 3, math.log(3) - 2 / 3 * math.log(2)),  # none reaches over the end
        (["a", "", "a b c"], 3, 1.0, 0.0),
        (["same words"] * 10, 2, 1 / 10, 0.0),
        (["a\n b\t c"], 2, 1.0, math.log(2)),
    ],
)
def test_by_hand(texts, n, distinct, entropy):
    assert distinct_n(texts, n) == pytest.approx(distinct)
    assert ngram_entropy(iter(texts), n) == pytest.approx(entropy, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_by_plain_loops(n):
    source = random.Random(n)
    texts = [" ".join(source.choices("abcd", k=source.randint(0, 9))) for _ in range(50)]
    found = []
    for text in texts:
        words = text.split()
        for start in range(len(words)):
            if start + n <= len(words):
                found.append(tuple(words[start : start + n]))
    rates = [found.count(gram) / len(found) for gram in set(found)]
    assert distinct_n(texts, n) == pytest.approx(len(set(found)) / len(found))
    assert ngram_entropy(texts, n) == pytest.approx(-sum(rate * math.log(rate) for rate in rates))


@pytest.mark.parametrize("measure", [distinct_n, ngram_entropy])
def test_texts_without_ngrams(measure):
    with pytest.raises(ValueError, match="None of 2 texts has 3 words"):
        measure(["a b", "c"], 3)
    with pytest.raises(ValueError, match="n must be at least 1"):
        measure(["a b"], 0)


def test_perplexity_counts_the_agents_tokens_alone():
    tokenizer = CharTokenizer.from_alphabet("abc")
    episodes = [Episode([Turn("abc"), Turn(text, reward=0.0)], True) for text in ("ab", "c", "")]
    rows = to_rows(episodes, tokenizer, 12)
    torch.manual_seed(0)
    lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=12).eval()
    logs = []
    for row in rows:
        ids = row["tokens"][row["attention_mask"]].long()
        with torch.no_grad():
            log_probs = lm(ids[None]).logits[0].double().log_softmax(-1)
        for place in range(len(ids) - 1):
            if row["agent_mask"][place + 1]:
                logs.append(log_probs[place, ids[place + 1]].item())
    assert len(logs) == 3 + 2 + 1  # with the ends of the turns
    assert perplexity(language_actor(lm), rows) == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-4)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    tokenizer = CharTokenizer.from_alphabet("abc")
    rows = to_rows([Episode([Turn("ab", reward=0.0)], True)], tokenizer, 8)
    lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=8)
    for parameter in lm.parameters():
        torch.nn.init.zeros_(parameter)
    assert perplexity(language_actor(lm), rows) == pytest.approx(tokenizer.vocab_size, rel=1e-5)


@pytest.mark.parametrize(("bias", "expected"), [(math.nan, math.nan), (1e4, math.inf)])
def test_models_without_numbers_and_impossible_tokens(bias, expected):
    tokenizer = CharTokenizer.from_alphabet("abc")
    rows = to_rows([Episode([Turn("ab", reward=0.0)], True)], tokenizer, 8)
    lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=8)
    head = torch.nn.Linear(8, tokenizer.vocab_size)  # all weight on the padding token, which the agent never writes
    torch.nn.init.constant_(head.weight, 0.0)
    head.bias.data = bias * torch.eye(tokenizer.vocab_size)[tokenizer.control.pad]
    lm.set_output_embeddings(head)
    assert perplexity(language_actor(lm), rows) == pytest.approx(expected, nan_ok=True)
