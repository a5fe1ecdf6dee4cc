"""Text classification models as rewards: values by plain loops, files that are no classifier, any text."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2ForSequenceClassification

from tests.envs.reddit.conftest import UNREADABLE, word_tokenizer
from torchrl_lang._files import FileError
from torchrl_lang.envs.reddit import ClassifierReward
from torchrl_lang.envs.reddit.classifiers import encoded_batches

WEIGHTS, PT = "model.safetensors", {"format": "pt"}
VALUES = {"safe": 1.0, "rude": -0.5, "toxic": -2.0}


def logits_of(model, tokenizer, text):
    """Of one text alone, without padding."""
    with torch.no_grad():
        return model(**tokenizer([text], return_tensors="pt")).logits[0].double()


def test_expected_value_of_a_classifier(classifier_folder):
    folder, model, tokenizer = classifier_folder()
    texts = ["a b", "c", "e e e d a b", "a"]
    assert ClassifierReward(folder, VALUES)([*UNREADABLE, "a " * 500]).isfinite().all()
    found = ClassifierReward(folder, VALUES, batch_size=3)(texts)
    for text, value in zip(texts, found.tolist(), strict=True):
        weights = [math.exp(logit) for logit in logits_of(model, tokenizer, text).tolist()]
        assert value == pytest.approx((weights[0] - 0.5 * weights[1] - 2 * weights[2]) / sum(weights), abs=1e-5)
    assert ClassifierReward(str(folder), VALUES)([]).shape == (0,)
    integers = {label: int(value * 2) for label, value in VALUES.items()}
    assert ClassifierReward(folder, integers)(texts).tolist() == pytest.approx((found * 2).tolist(), abs=1e-5)
    assert len({round(value, 3) for value in found.tolist()}) > 1

    found = ClassifierReward(folder, VALUES, output="likeliest")(texts)
    likeliest = [int(logits_of(model, tokenizer, text).argmax()) for text in texts]
    assert found.tolist() == [[1.0, -0.5, -2.0][label] for label in likeliest]


def test_padding_on_the_left_is_not_read():
    tokenizer = word_tokenizer(["a b c d e"])
    tokenizer.padding_side = "left"
    (batch,) = encoded_batches(tokenizer, ["a b c", "a"], 2, 18)
    assert batch["attention_mask"].sum(-1).tolist() == [len(tokenizer(text).input_ids) for text in ("a b c", "a")]


def test_labels_that_do_not_exclude_each_other(classifier_folder):
    folder, model, tokenizer = classifier_folder(problem_type="multi_label_classification", max_position_embeddings=20)
    logits = logits_of(model, tokenizer, "a b").tolist()
    expected = sum(value / (1 + math.exp(-x)) for x, value in zip(logits, VALUES.values(), strict=True))
    reward = ClassifierReward(folder, VALUES)
    assert reward(["a b"]).item() == pytest.approx(expected, abs=1e-5)
    assert reward.max_length == 18  # RoBERTa's first two positions are those of padding
    assert reward(["a " * 40]).item() == pytest.approx(reward(["a " * 18]).item(), abs=1e-6)
    for values, options, noun in ((VALUES, {"output": "likeliest"}, "does not choose one label"),
                                  ({"safe": 1.0}, {}, "labels"), (VALUES, {"output": "mean"}, "output"),
                                  (VALUES, {"batch_size": 0}, "batch_size")):  # fmt: skip
        with pytest.raises(ValueError, match=noun):
            ClassifierReward(folder, values, **options)


def test_a_classifier_with_one_output(classifier_folder):
    """Its probability, as text classification pipelines of transformers have it, or its number."""
    one = {"id2label": {0: "toxic"}, "label2id": {"toxic": 0}}
    folder, model, tokenizer = classifier_folder(**one)
    logit = logits_of(model, tokenizer, "a b").item()
    found = ClassifierReward(folder, {"toxic": -2.0})(["a b"]).item()
    assert found == pytest.approx(-2 / (1 + math.exp(-logit)), abs=1e-5)
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


def test_a_folder_without_a_classifier_or_with_code_from_elsewhere(tmp_path, classifier_folder):
    with pytest.raises(FileError, match=r"config\.json"):
        ClassifierReward(tmp_path, VALUES, local_files_only=True)
    folder, _, _ = classifier_folder()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attn_implementation": "someone/kernel"}))
    with pytest.raises(FileError, match="asks for code from elsewhere: attn_implementation is 'someone/kernel'"):
        ClassifierReward(folder, VALUES)
