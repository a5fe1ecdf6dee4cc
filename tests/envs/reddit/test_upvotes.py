"""Models of upvotes: features and optimum by plain loops, training, freezing, held-out texts, files."""

import json
import math
import re
from collections import Counter

import pytest
import torch
from transformers import GPT2Config, GPT2Model

from tests.envs.reddit.conftest import encoder, generated, word_tokenizer
from torchrl_lang._files import FileError, write_checksums
from torchrl_lang.envs.reddit import RedditComments, upvotes

TEXTS = ["well done, well done", "so what?", "What a pity; so what", "it's well made", "so well", "done so"]
LABELS = [True, False, False, True, True, False]


def words_of(text, longest):
    words = re.findall(r"[a-z0-9']+", text.lower())
    return [" ".join(words[i : i + n]) for n in range(1, longest + 1) for i in range(len(words) - n + 1)]


def features(text, texts, terms, longest):
    """A list of V numbers, by the formulas of the docstring."""
    counts = Counter(words_of(text, longest))
    values = []
    for term in terms:
        having = sum(term in words_of(other, longest) for other in texts)
        idf = math.log((1 + len(texts)) / (1 + having)) + 1
        values.append((1 + math.log(counts[term])) * idf if counts[term] else 0.0)
    length = math.sqrt(sum(value**2 for value in values))
    return [value / length for value in values] if length else values


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_tfidf_model_by_plain_loops(longest):
    """The probabilities of new texts, and a gradient of zero at the optimum."""
    model = upvotes.TfidfModel.fit(TEXTS, LABELS, words=longest, penalty=0.01, threshold=None)
    counts = Counter(term for text in TEXTS for term in set(words_of(text, longest)))
    terms = model.vectorizer.get_feature_names_out()
    weight, bias = model.regression.coef_[0], model.regression.intercept_
    assert sorted(terms) == sorted(term for term, count in counts.items() if count >= 2)

    def probability(text):
        x = features(text, TEXTS, terms, longest)
        return 1 / (1 + math.exp(-sum(w * value for w, value in zip(weight, x, strict=True)) - bias[0]))

    new = [*TEXTS, "nothing known", "", "so so so well done", "WELL done it's"]
    assert model(new).tolist() == pytest.approx([probability(text) for text in new], abs=1e-5)
    errors = [probability(text) - label for text, label in zip(TEXTS, LABELS, strict=True)]
    xs = [features(text, TEXTS, terms, longest) for text in TEXTS]
    for place, w in enumerate(weight):
        gradient = sum(error * x[place] for error, x in zip(errors, xs, strict=True)) / len(TEXTS) + 0.01 * w
        assert gradient == pytest.approx(0.0, abs=2e-4)
    assert sum(errors) == pytest.approx(0.0, abs=2e-3)


def test_a_baseline_beats_the_more_frequent_answer():
    train, held_out = generated(3000).split(0.2)
    trained = upvotes.train_upvote_baseline(train, held_out)
    assert trained.tested == len(held_out)
    assert trained.accuracy > trained.majority + 0.05
    new = [score > 0 for score in held_out.scores]
    right = [guess == up for guess, up in zip(trained.model(list(held_out.comments)).tolist(), new, strict=True)]
    assert trained.accuracy == pytest.approx(sum(right) / len(right))
    assert trained.majority == pytest.approx(max(sum(new), len(new) - sum(new)) / len(new))


def test_held_out_comments_with_texts_of_the_training_data_are_left_out():
    train = RedditComments(["p"] * 4, ["good one", "bad one", "good one", "bad one"], [3, -3, 2, -1])
    held_out = RedditComments(["p"] * 3, ["bad one", "good luck", "bad luck"], [5, 5, 5])
    trained = upvotes.train_upvote_baseline(train, held_out)
    assert (trained.tested, trained.accuracy, trained.majority) == (2, 0.5, 1.0)
    with pytest.raises(ValueError, match="None of 4 held-out comments"):
        upvotes.train_upvote_baseline(train, train)
    with pytest.raises(ValueError, match="All 4 comments are on one side of cutoff=9"):
        upvotes.train_upvote_baseline(train, held_out, cutoff=9)


def small_run(**options):
    data = generated(60)
    tokenizer = word_tokenizer(data.comments)
    start = encoder(tokenizer)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    stream = torch.get_rng_state()
    trained = upvotes.train_upvote_model(*data.split(0.3), start, tokenizer, **options)
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())  # it is copied
    after = trained.model.network.encoder.state_dict()
    return trained, any(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("freeze", [False, True])
def test_the_encoder_is_trained_unless_it_is_frozen(freeze):
    trained, changed = small_run(freeze=freeze, rate=1e-3)
    assert changed != freeze
    again, _ = small_run(freeze=freeze, rate=1e-3)
    texts = ["well, thanks", "hey, what crap"]
    assert torch.equal(again.model.probabilities(texts), trained.model.probabilities(texts))


def test_thresholds_and_batches():
    trained, _ = small_run(rate=1e-3)
    texts = ["well, thanks", "hey, what crap", "so", "right, your kites look great, well done"]
    found = trained.model.probabilities(texts)
    assert ((found > 0) & (found < 1)).all()
    cut = found.median().item()
    model = upvotes.UpvoteModel(trained.model.network, trained.model.tokenizer, threshold=cut, batch_size=1)
    assert torch.allclose(model.probabilities(texts), found, atol=1e-6)  # padding does not matter
    assert trained.model(texts).tolist() == [float(value >= 0.5) for value in found]
    empty = model.probabilities([""])  # without any token
    assert torch.allclose(empty, trained.model.probabilities(["well, thanks", ""])[1:], atol=1e-6)
    whole = upvotes.UpvoteModel(trained.model.network, trained.model.tokenizer, threshold=None)
    assert torch.equal(whole(texts), found)


@pytest.mark.slow
def test_an_upvote_model_learns():
    data = generated(1200, seed=2)
    tokenizer = word_tokenizer(data.comments)
    losses, options = [], {"rate": 2e-3, "epochs": 2, "report": lambda epoch, loss: losses.append(loss)}
    trained = upvotes.train_upvote_model(*data.split(0.2), encoder(tokenizer), tokenizer, **options)
    assert trained.accuracy > trained.majority + 0.05
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_upvote_files(tmp_path):
    trained, _ = small_run(rate=1e-3, threshold=None, max_length=40)
    texts = ["well, thanks", "hey, what crap"]
    trained.model.save(tmp_path / "model")
    loaded = upvotes.UpvoteModel.load(tmp_path / "model")
    assert torch.equal(loaded(texts), trained.model(texts))
    assert (loaded.threshold, loaded.max_length) == (None, 40)
    assert {each.suffix for each in (tmp_path / "model").rglob("*.*")} == {".json", ".safetensors"}
    with pytest.raises(FileExistsError):
        trained.model.save(tmp_path / "model")
    config = tmp_path / "model" / "encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 16}))
    with pytest.raises(FileError, match=r"config\.json differs"):
        upvotes.UpvoteModel.load(tmp_path / "model")
    config.write_text(json.dumps({**json.loads(config.read_text()), "attn_implementation": "someone/kernel"}))
    write_checksums(tmp_path / "model")
    with pytest.raises(FileError, match=r"config\.json asks for code from elsewhere: attn_implementation"):
        upvotes.UpvoteModel.load(tmp_path / "model")


def test_the_network():
    """The head is the paper's; a frozen encoder has no dropout; other models have no pooler."""
    tokenizer = word_tokenizer(["a b"])
    network = upvotes.UpvoteNetwork(encoder(tokenizer), freeze=True).train()
    assert [tuple(weight.shape) for weight in network.head.state_dict().values()] == [(64, 32), (64,), (1, 64), (1,)]
    assert (network.encoder.training, network.head.training) == (False, True)
    assert not any(each.requires_grad for each in network.encoder.parameters())
    assert upvotes.UpvoteNetwork(encoder(tokenizer)).train().encoder.training
    gpt = GPT2Model(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="GPT2Model has no pooler"):
        upvotes.UpvoteNetwork(gpt)({"input_ids": torch.ones(1, 2, dtype=torch.int64)})
