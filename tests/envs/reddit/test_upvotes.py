"""Models of upvotes: features and optimum by plain loops, training, freezing, held-out texts, files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import pytest
import torch
from transformers import GPT2Config, GPT2Model

from tests.envs.reddit.conftest import encoder, generated, word_tokenizer
from torchrl_lang._files import FileError, write_checksums
from torchrl_lang.envs.reddit import RedditComments
from torchrl_lang.envs.reddit.rewards import (
    TfidfModel,
    UpvoteModel,
    UpvoteNetwork,
    UpvoteTraining,
    train_tfidf_model,
    train_upvote_baseline,
    train_upvote_model,
)

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
    model = train_tfidf_model(TEXTS, LABELS, words=longest, penalty=0.01, steps=500, threshold=None)
    counts = Counter(term for text in TEXTS for term in set(words_of(text, longest)))
    assert sorted(model.terms) == sorted(term for term, count in counts.items() if count >= 2)
    weight = model.weight.tolist()

    def probability(text):
        x = features(text, TEXTS, model.terms, longest)
        return 1 / (1 + math.exp(-sum(w * value for w, value in zip(weight, x, strict=True)) - model.bias))

    new = [*TEXTS, "nothing known", "", "so so so well done", "WELL done it's"]
    assert model(new).tolist() == pytest.approx([probability(text) for text in new], abs=1e-5)
    errors = [probability(text) - label for text, label in zip(TEXTS, LABELS, strict=True)]
    xs = [features(text, TEXTS, model.terms, longest) for text in TEXTS]
    for place, w in enumerate(weight):
        gradient = sum(error * x[place] for error, x in zip(errors, xs, strict=True)) / len(TEXTS) + 0.01 * w
        assert gradient == pytest.approx(0.0, abs=2e-4)
    assert sum(errors) == pytest.approx(0.0, abs=2e-3)


def test_the_most_frequent_terms_count():
    model = train_tfidf_model(TEXTS, LABELS, words=1, most_terms=2)
    assert model.terms == ["so", "well"]  # in four and three texts


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((TEXTS, LABELS[:-1]), {}, "a label for each text"),
        ((TEXTS, [True] * 6), {}, "all 6 texts have the same one"),
        ((TEXTS, LABELS), {"least_count": 7}, "No term occurs in least_count=7"),
        ((TEXTS, LABELS), {"words": 0}, "words"),
        ((TEXTS, LABELS), {"penalty": 0.0}, "penalty"),
        ((TEXTS, LABELS), {"steps": 0}, "steps"),
        ((TEXTS, LABELS), {"most_terms": 0}, "most_terms"),
        ((TEXTS, LABELS), {"threshold": 2.0}, "threshold"),
    ],
)
def test_wrong_tfidf_options(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        train_tfidf_model(*arguments, **options)


def test_tfidf_models_need_a_number_for_each_term():
    with pytest.raises(ValueError, match="one idf and one weight"):
        TfidfModel(["a", "a"], torch.ones(2), torch.ones(2), 0.0)


def test_a_baseline_beats_the_more_frequent_answer():
    train, held_out = generated(6000).split(0.2)
    trained = train_upvote_baseline(train, held_out)
    assert trained.tested == len(held_out)
    assert trained.accuracy > trained.majority + 0.05
    new = [score > 0 for score in held_out.scores]
    right = [guess == up for guess, up in zip(trained.model(list(held_out.comments)).tolist(), new, strict=True)]
    assert trained.accuracy == pytest.approx(sum(right) / len(right))
    assert trained.majority == pytest.approx(max(sum(new), len(new) - sum(new)) / len(new))


def test_held_out_comments_with_texts_of_the_training_data_are_left_out():
    train = RedditComments(["p"] * 4, ["good one", "bad one", "good one", "bad one"], [3, -3, 2, -1])
    held_out = RedditComments(["p"] * 3, ["bad one", "good luck", "bad luck"], [5, 5, 5])
    trained = train_upvote_baseline(train, held_out)
    assert (trained.tested, trained.accuracy, trained.majority) == (2, 0.5, 1.0)
    with pytest.raises(ValueError, match="None of 4 held-out comments"):
        train_upvote_baseline(train, train)
    with pytest.raises(ValueError, match="None of 4 held-out comments"):  # before anything is trained
        train_upvote_baseline(train, train, steps=0)


def test_tfidf_files(tmp_path):
    model = train_tfidf_model(TEXTS, LABELS, threshold=0.75)
    model.save(tmp_path / "model")
    loaded = TfidfModel.load(tmp_path / "model")
    assert torch.equal(loaded.probabilities(TEXTS), model.probabilities(TEXTS))
    assert (loaded.terms, loaded.threshold, loaded.words) == (model.terms, 0.75, 2)
    assert sorted(path.suffix for path in (tmp_path / "model").iterdir()) == [".json", ".json", ".safetensors"]
    with pytest.raises(FileExistsError):
        model.save(tmp_path / "model")
    (tmp_path / "model" / "weights.safetensors").write_bytes(b"x")
    with pytest.raises(FileError, match=r"weights\.safetensors differs"):
        TfidfModel.load(tmp_path / "model")
    with pytest.raises(FileError, match="missing"):
        TfidfModel.load(tmp_path)


@pytest.mark.parametrize(
    "make", [lambda: train_tfidf_model(TEXTS, LABELS), lambda: small_run(UpvoteTraining())[0].model]
)
def test_folders_whose_files_are_not_verified(make, tmp_path):
    model = make()
    model.save(tmp_path / "model")
    (tmp_path / "model" / "checksums.json").write_text('{"files": {}}')
    with pytest.raises(FileError, match=r"checksums\.json does not list \['.*\.json', .*\.safetensors'"):
        type(model).load(tmp_path / "model")


def small_run(options, pairs=60):
    data = generated(pairs)
    tokenizer = word_tokenizer(data.comments)
    start = encoder(tokenizer)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    stream = torch.get_rng_state()
    trained = train_upvote_model(*data.split(0.3), start, tokenizer, options)
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())  # it is copied
    after = trained.model.network.encoder.state_dict()
    return trained, any(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("freeze", [False, True])
def test_the_encoder_is_trained_unless_it_is_frozen(freeze):
    trained, changed = small_run(UpvoteTraining(freeze=freeze, rate=1e-3))
    assert changed != freeze
    again, _ = small_run(UpvoteTraining(freeze=freeze, rate=1e-3))
    texts = ["well, thanks", "hey, what crap"]
    assert torch.equal(again.model.probabilities(texts), trained.model.probabilities(texts))


def test_a_frozen_encoder_has_no_dropout():
    tokenizer = word_tokenizer(["a b"])
    network = UpvoteNetwork(encoder(tokenizer), freeze=True).train()
    assert not network.encoder.training
    assert network.head.training
    assert not any(each.requires_grad for each in network.encoder.parameters())
    assert UpvoteNetwork(encoder(tokenizer)).train().encoder.training


def test_the_head_is_the_papers():
    network = UpvoteNetwork(encoder(word_tokenizer(["a b"])))
    assert [tuple(weight.shape) for weight in network.head.state_dict().values()] == [(64, 32), (64,), (1, 64), (1,)]
    assert isinstance(network.head[1], torch.nn.ReLU)


def test_thresholds_and_batches():
    trained, _ = small_run(UpvoteTraining(rate=1e-3))
    texts = ["well, thanks", "hey, what crap", "so", "right, your kites look great, well done"]
    found = trained.model.probabilities(texts)
    assert ((found > 0) & (found < 1)).all()
    cut = found.median().item()
    model = UpvoteModel(trained.model.network, trained.model.tokenizer, threshold=cut, batch_size=1)
    assert torch.allclose(model.probabilities(texts), found, atol=1e-6)  # padding does not matter
    assert trained.model(texts).tolist() == [float(value >= 0.5) for value in found]
    empty = model.probabilities([""])  # without any token
    assert torch.allclose(empty, trained.model.probabilities(["well, thanks", ""])[1:], atol=1e-6)
    whole = UpvoteModel(trained.model.network, trained.model.tokenizer, threshold=None)
    assert torch.equal(whole(texts), found)


@pytest.mark.slow
def test_an_upvote_model_learns():
    data = generated(2000, seed=2)
    tokenizer = word_tokenizer(data.comments)
    options = UpvoteTraining(rate=2e-3, epochs=2)
    losses = []
    trained = train_upvote_model(
        *data.split(0.2), encoder(tokenizer), tokenizer, options, report=lambda epoch, loss: losses.append(loss)
    )
    assert trained.accuracy > trained.majority + 0.05
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_upvote_files(tmp_path):
    trained, _ = small_run(UpvoteTraining(rate=1e-3, threshold=None, max_length=40))
    texts = ["well, thanks", "hey, what crap"]
    trained.model.save(tmp_path / "model")
    loaded = UpvoteModel.load(tmp_path / "model")
    assert torch.equal(loaded(texts), trained.model(texts))
    assert (loaded.threshold, loaded.max_length) == (None, 40)
    suffixes = {path.suffix for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}
    with pytest.raises(FileExistsError):
        trained.model.save(tmp_path / "model")
    config = tmp_path / "model" / "encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 16}))
    with pytest.raises(FileError, match=r"config\.json differs"):
        UpvoteModel.load(tmp_path / "model")
    config.write_text(json.dumps({**json.loads(config.read_text()), "attn_implementation": "someone/kernel"}))
    write_checksums(tmp_path / "model")
    with pytest.raises(FileError, match=r"config\.json asks for code from elsewhere: attn_implementation"):
        UpvoteModel.load(tmp_path / "model")
    with pytest.raises(ValueError, match="batch_size"):
        UpvoteModel.load(tmp_path / "model", batch_size=0)


def test_encoders_without_a_pooler():
    gpt = GPT2Model(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="GPT2Model has no pooler"):
        UpvoteNetwork(gpt)({"input_ids": torch.ones(1, 2, dtype=torch.int64)})


def test_no_training_without_comments_to_test_on():
    data, epochs = generated(50), []
    tokenizer = word_tokenizer(data.comments)
    with pytest.raises(ValueError, match=r"None of \d+ held-out comments"):
        train_upvote_model(data, data, encoder(tokenizer), tokenizer, report=lambda *epoch: epochs.append(epoch))
    assert epochs == []


def test_a_model_is_tested_where_it_was_trained(monkeypatch):
    calls = []
    move, test = UpvoteNetwork.cpu, UpvoteModel._probabilities
    monkeypatch.setattr(UpvoteNetwork, "cpu", lambda self: calls.append("moves") or move(self))
    monkeypatch.setattr(UpvoteModel, "_probabilities", lambda *texts: calls.append("tests") or test(*texts))
    small_run(UpvoteTraining())
    assert calls == ["tests", "moves"]


def test_no_comments_to_train_on():
    tokenizer = word_tokenizer(["a b"])
    with pytest.raises(ValueError, match="All 0 comments are on one side"):
        train_upvote_model(RedditComments([], [], []), generated(5), encoder(tokenizer), tokenizer)


def test_comments_on_one_side_of_the_cutoff():
    data = generated(50)
    tokenizer = word_tokenizer(data.comments)
    with pytest.raises(ValueError, match=r"All .* on one side of cutoff=1000"):
        train_upvote_model(*data.split(0.3), encoder(tokenizer), tokenizer, UpvoteTraining(cutoff=1000.0))


@pytest.mark.parametrize(
    "options",
    [{"epochs": 0}, {"batch_size": 0}, {"max_length": 0}, {"rate": 0.0}, {"cutoff": math.nan}, {"threshold": 2}],
)
def test_wrong_training_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        UpvoteTraining(**options)
