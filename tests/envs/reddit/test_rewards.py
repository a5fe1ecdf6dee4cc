"""Rewards of texts: values worked out by hand, missing packages, wrong options."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2ForSequenceClassification

from tests.envs.reddit.conftest import word_tokenizer
from torchrl_lang._files import FileError
from torchrl_lang.envs.reddit import RedditComments, rewards_of
from torchrl_lang.envs.reddit.rewards import (
    ClassifierReward,
    Noised,
    ProbabilityReward,
    ProfanityReward,
    ScoreReward,
    SentimentReward,
    ThreeLevels,
    WorstSentence,
)

WEIGHTS, PT = "model.safetensors", {"format": "pt"}
UNREADABLE = ["\N{REPLACEMENT CHARACTER}", "", " ", "\0", "\ud800", "<pad>", "a" * 5000, "\N{GRINNING FACE}"]


def constant(*values):
    return lambda texts: torch.tensor(values[: len(texts)])


def test_scores_of_dataset_comments():
    texts = ["up", "down", "zero", "twice", "twice", "even", "even"]
    reward = ScoreReward(RedditComments(["p"] * 7, texts, [3, -3, 0, 5, -4, 5, -5]))
    assert reward(["down", "up", "zero", "twice", "even"]).tolist() == [-1.0, 1.0, -1.0, 1.0, -1.0]
    assert reward(["up"]).dtype == torch.float32
    assert reward([]).shape == (0,)


def test_texts_without_a_score():
    data = RedditComments(["p"], ["up"], [3])
    with pytest.raises(ValueError, match=r"None of the 1 comments of the dataset is 'else': .*unknown=0.0"):
        ScoreReward(data)(["up", "else"])
    assert ScoreReward(data, unknown=-0.5)(["else", "up", *UNREADABLE]).tolist() == [-0.5, 1.0] + [-0.5] * 8
    with pytest.raises(ValueError, match="unknown must be a finite number"):
        ScoreReward(data, unknown=math.nan)


def test_three_levels():
    levels = ThreeLevels(constant(0.0, 0.24, 0.25, 0.74, 0.75, 1.0), low=0.25, high=0.75)
    assert levels(list("abcdef")).tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="high must be a finite number of at least"):
        ThreeLevels(constant(0.0), low=0.5, high=0.4)


def test_the_worst_sentence():
    seen = []

    def lengths(texts):
        seen.extend(texts)
        return torch.tensor([float(len(text)) for text in texts])

    texts = ["a. bbb! cc? d", "", "e.g. 3.5 km", "one\ntwo.  three"]
    assert WorstSentence(lengths)(texts).tolist() == [4.0, 0.0, 6.0, 8.0]
    assert seen == ["a.", "bbb!", "cc?", "d", "", "e.g.", "3.5 km", "one\ntwo.", "three"]
    assert WorstSentence(lengths)([]).shape == (0,)


def test_noise_changes_only_the_middle_level():
    values = [0.0, 1.0, 2.0] * 1000
    noised = Noised(constant(*values), seed=3)
    found = noised(["same text"] * 3000)
    levels = torch.tensor(values)
    assert torch.equal(found[levels != 1], levels[levels != 1])
    drawn = found[levels == 1]
    assert set(drawn.tolist()) == {0.0, 2.0}
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(Noised(constant(*values), seed=3)(["same text"] * 3000), found)
    assert not torch.equal(Noised(constant(*values), seed=4)(["same text"] * 3000), found)
    assert not torch.equal(noised(["same text"] * 3000), found)  # another draw


def test_noise_leaves_the_global_random_stream():
    before = torch.get_rng_state()
    Noised(constant(1.0), seed=3)(["a"])
    assert torch.equal(before, torch.get_rng_state())


def test_scale_and_shift():
    assert rewards_of(constant(0.0, 1.0, 2.0), list("abc"), scale=-5.0, shift=1.0).tolist() == [1.0, -4.0, -9.0]
    for name in ("scale", "shift"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number"):
            rewards_of(constant(0.0), ["a"], **{name: math.inf})


@pytest.mark.parametrize(
    ("values", "options"),
    [([0.0, 10**400], {}), ([0.0, 1e39], {}), ([0.0, 1e38], {"scale": -10.0}), ([0.0, math.nan], {"scale": 0.0})],
)
def test_rewards_that_are_not_finite(values, options):
    with pytest.raises(ValueError, match="Rewards must be finite, got"):
        rewards_of(lambda texts: values, ["a", "b"], **options)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_probabilities_that_are_no_numbers(threshold):
    class Broken(ProbabilityReward):
        def _probabilities(self, texts):
            return torch.tensor([0.75, math.nan])

    with pytest.raises(ValueError, match="must be finite, got nan for 'b'"):
        Broken(threshold)(["a", "b"])
    assert Broken(threshold)([]).shape == (0,)


@pytest.mark.parametrize("wrap", [ThreeLevels, Noised, WorstSentence])
def test_wrong_inner_rewards(wrap):
    with pytest.raises(ValueError, match="one number for each of 2 texts"):
        wrap(constant(1.0))(["a", "b"])


def test_profanity():
    pytest.importorskip("profanity_check")
    texts = ["thank you very much", "what the hell is this crap", "you are an idiot"]
    found = ProfanityReward()(texts)
    assert found.dtype == torch.float32
    assert found[0] < 0.1
    assert (found[1:] > 0.9).all()
    assert ProfanityReward(threshold=0.5)(texts).tolist() == [0.0, 1.0, 1.0]
    assert ProfanityReward()(UNREADABLE).isfinite().all()
    assert ProfanityReward()([]).shape == (0,)
    assert ThreeLevels(ProfanityReward())(texts).tolist() == [0.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="threshold must lie in"):
        ProfanityReward(threshold=1.5)


def test_sentiment():
    pytest.importorskip("vaderSentiment")
    found = SentimentReward()(["i love it, it is great", "the table", "it is horrible and sad"])
    assert found.dtype == torch.float32
    assert found[0] > 0.5
    assert found[1] == 0
    assert found[2] < -0.5
    assert SentimentReward()(UNREADABLE).isfinite().all()
    assert SentimentReward()([]).shape == (0,)


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("profanity_check", ProfanityReward),
        ("vaderSentiment.vaderSentiment", SentimentReward),
    ],
)
def test_missing_packages_name_the_extra(monkeypatch, package, make):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"torchrl-lang\[reddit\]"):
        make()


VALUES = {"safe": 1.0, "rude": -0.5, "toxic": -2.0}


def logits_of(model, tokenizer, text):
    """Of one text alone, without padding."""
    with torch.no_grad():
        return model(**tokenizer([text], return_tensors="pt")).logits[0].double()


def test_expected_value_of_a_classifier(classifier_folder):
    folder, model, tokenizer = classifier_folder()
    texts = ["a b", "c", "e e e d a b", "a"]
    found = ClassifierReward(folder, VALUES, batch_size=3)(texts)
    for text, value in zip(texts, found.tolist(), strict=True):
        weights = [math.exp(logit) for logit in logits_of(model, tokenizer, text).tolist()]
        assert value == pytest.approx((weights[0] - 0.5 * weights[1] - 2 * weights[2]) / sum(weights), abs=1e-5)
    assert ClassifierReward(str(folder), VALUES)([]).shape == (0,)
    integers = {label: int(value * 2) for label, value in VALUES.items()}
    assert ClassifierReward(folder, integers)(texts).tolist() == pytest.approx((found * 2).tolist(), abs=1e-5)
    assert len({round(value, 3) for value in found.tolist()}) > 1


def test_value_of_the_likeliest_label(classifier_folder):
    folder, model, tokenizer = classifier_folder()
    texts = ["a b", "c", "e e e d a b", "d d d"]
    found = ClassifierReward(folder, VALUES, output="likeliest")(texts)
    likeliest = [int(logits_of(model, tokenizer, text).argmax()) for text in texts]
    assert found.tolist() == [[1.0, -0.5, -2.0][label] for label in likeliest]


def test_labels_that_do_not_exclude_each_other(classifier_folder):
    folder, model, tokenizer = classifier_folder(problem_type="multi_label_classification")
    logits = logits_of(model, tokenizer, "a b").tolist()
    expected = sum(value / (1 + math.exp(-x)) for x, value in zip(logits, VALUES.values(), strict=True))
    assert ClassifierReward(folder, VALUES)(["a b"]).item() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="does not choose one label"):
        ClassifierReward(folder, VALUES, output="likeliest")


def test_a_classifier_with_one_output(classifier_folder):
    """Its probability, as text classification pipelines of transformers have it, or its number."""
    one = {"id2label": {0: "toxic"}, "label2id": {"toxic": 0}}
    folder, model, tokenizer = classifier_folder(**one)
    logit = logits_of(model, tokenizer, "a b").item()
    assert ClassifierReward(folder, {"toxic": -2.0})(["a b"]).item() == pytest.approx(
        -2 / (1 + math.exp(-logit)), abs=1e-5
    )
    with pytest.raises(ValueError, match="does not choose one label"):
        ClassifierReward(folder, {"toxic": -2.0}, output="likeliest")
    folder, model, tokenizer = classifier_folder(**one, problem_type="regression")
    logit = logits_of(model, tokenizer, "a b").item()
    assert ClassifierReward(folder, {"toxic": -2.0})(["a b"]).item() == pytest.approx(-2 * logit, abs=1e-5)


def test_models_that_are_no_trained_classifiers(classifier_folder):
    """transformers draws missing weights at random."""
    folder, model, _ = classifier_folder()
    weights = model.state_dict()
    save_file({name: value for name, value in weights.items() if "layer.0.output" not in name}, folder / WEIGHTS, PT)
    with pytest.raises(FileError, match=r"lacks the weights roberta.encoder.layer.0.output.* trained text class"):
        ClassifierReward(folder, VALUES)
    save_file({**weights, "classifier.out_proj.bias": torch.zeros(7)}, folder / WEIGHTS, PT)
    with pytest.raises(FileError, match=r"weights of other shapes .*classifier.out_proj.bias \(7,\) for \(3,\)"):
        ClassifierReward(folder, VALUES)
    model.roberta.save_pretrained(folder)
    with pytest.raises(FileError, match=r"lacks the weights classifier.dense.bias, .* and 1 more"):
        ClassifierReward(folder, dict.fromkeys(model.roberta.config.id2label.values(), 1.0))


def test_a_classifier_without_a_padding_token(tmp_path):
    """The rewards of a decoder do not depend on the other texts of a batch."""
    tokenizer = word_tokenizer(["a b c d e"])
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": len(tokenizer)}
    model = GPT2ForSequenceClassification(GPT2Config(num_labels=2, **sizes))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    reward = ClassifierReward(tmp_path, {"LABEL_0": 0.0, "LABEL_1": 1.0})
    texts = ["a b", "c", "d e a b", "a " * 40]
    found = reward(texts)
    assert len({round(value, 4) for value in found.tolist()}) == 4
    assert found.tolist() == pytest.approx([reward([text]).item() for text in texts], abs=1e-6)
    assert found[3].item() == pytest.approx(reward(["a " * 16]).item(), abs=1e-6)  # its 16 positions


def test_texts_longer_than_a_classifier_reads(classifier_folder):
    folder, _, _ = classifier_folder(max_position_embeddings=20)
    reward = ClassifierReward(folder, VALUES)
    assert reward.max_length == 18  # RoBERTa's first two positions are those of padding
    assert reward(["a " * 40]).item() == pytest.approx(reward(["a " * 18]).item(), abs=1e-6)


def test_labels_with_a_gap(classifier_folder):
    folder, _, _ = classifier_folder()
    config = folder / "config.json"
    labels = {"0": "safe", "1": "rude", "3": "toxic"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "id2label": labels}))
    with pytest.raises(ValueError, match=r"numbers its labels \[0, 1, 3\], expected 0 to 2"):
        ClassifierReward(folder, VALUES)


def test_any_text_has_a_class(classifier_folder):
    folder, _, _ = classifier_folder()
    texts = [*UNREADABLE, "a " * 500]
    found = ClassifierReward(folder, VALUES)(texts)
    assert found.isfinite().all()
    alone = torch.cat([ClassifierReward(folder, VALUES, batch_size=1)([text]) for text in texts])
    assert alone.tolist() == pytest.approx(found.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"safe": 1.0}, {}, r"has the labels \['rude', 'safe', 'toxic'\], got values of \['safe'\]"),
        ({**VALUES, "other": 1.0}, {}, r"got values of \['other', 'rude', 'safe', 'toxic'\]"),
        ({**VALUES, "rude": math.nan}, {}, "must be a finite number"),
        (VALUES, {"output": "mean"}, "output='mean' is unknown"),
        (VALUES, {"batch_size": 0}, "batch_size"),
        (VALUES, {"max_length": 0}, "max_length"),
    ],
)
def test_wrong_classifier_options(classifier_folder, values, options, message):
    folder, _, _ = classifier_folder()
    with pytest.raises(ValueError, match=message):
        ClassifierReward(folder, values, **options)


def test_a_folder_without_a_classifier(tmp_path):
    with pytest.raises(OSError, match="no readable text classification model"):
        ClassifierReward(tmp_path, VALUES, local_files_only=True)


def test_a_classifier_that_asks_for_code_from_elsewhere(classifier_folder):
    folder, _, _ = classifier_folder()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attn_implementation": "someone/kernel"}))
    with pytest.raises(OSError, match="asks for code from elsewhere: attn_implementation is 'someone/kernel'"):
        ClassifierReward(folder, VALUES)


@pytest.mark.slow
def test_rewards_without_a_language_model_do_not_wait_for_transformers():
    code = "import sys, torchrl_lang.envs.reddit.rewards as _; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
