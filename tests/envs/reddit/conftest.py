"""Tiny encoders and classifiers with tokenizers of words."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForSequenceClassification, RobertaModel

from torchrl_lang.envs.reddit import RedditComments
from torchrl_lang.envs.reddit.generator import generated_comments

UNREADABLE = ["\N{REPLACEMENT CHARACTER}", "", " ", "\0", "\ud800", "<pad>", "a" * 5000, "\N{GRINNING FACE}"]
"""Texts that no player of a game writes on purpose."""
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def generated(pairs, **options):
    comments = generated_comments(pairs, **options)
    columns = ([each.parent for each in comments], [each.text for each in comments], [each.score for each in comments])
    return RedditComments(*columns)


def word_tokenizer(texts):
    words = sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", model_max_length=60, cls_token="<s>"
    )


def config(tokenizer, **options):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": 1}
    return RobertaConfig(**{**sizes, **options})


def encoder(tokenizer):
    torch.manual_seed(0)
    return RobertaModel(config(tokenizer))


@pytest.fixture
def classifier_folder(tmp_path):
    """A folder with a classifier of three labels and random weights; ``make(**config)``."""

    def make(**options):
        tokenizer = word_tokenizer(["a b c d e"])
        labels = {"id2label": {0: "safe", 1: "rude", 2: "toxic"}, "label2id": {"safe": 0, "rude": 1, "toxic": 2}}
        torch.manual_seed(0)
        model = RobertaForSequenceClassification(config(tokenizer, **{**labels, **options}))
        torch.nn.init.normal_(model.classifier.out_proj.weight)
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model", model.eval(), tokenizer

    return make
