"""Models that predict from a comment's text whether its score is above a cutoff, and their training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrl_lang._checks import Count, Positive, checked, needs_extra
from torchrl_lang._files import Record, RecordFolder, read_weights, write_weights
from torchrl_lang.envs.reddit.classifiers import encoded_batches, pretrained, readable_tokens
from torchrl_lang.envs.reddit.data import RedditComments
from torchrl_lang.envs.reddit.rewards import ProbabilityReward

__all__ = [
    "TfidfModel",
    "TrainedUpvotes",
    "UpvoteModel",
    "UpvoteNetwork",
    "train_upvote_baseline",
    "train_upvote_model",
]

_REMEDY = "train and save the model again"
_HEAD = "head.safetensors"


class _UpvoteRecord(Record):
    threshold: float | None
    max_length: int
    freeze: bool


_NEEDS = (_HEAD, "encoder/config.json", "encoder/model.safetensors", "tokenizer/tokenizer_config.json")
_UPVOTES = RecordFolder(_UpvoteRecord, "upvote_model.json", _NEEDS, remedy=_REMEDY)
_WORD = r"[^\W_]+(?:'[^\W_]+)*"


class UpvoteNetwork(nn.Module):
    """Pooled output of an encoder, then ``Linear(d, 2 d)``, ReLU, ``Linear(2 d, 1)``.

    Args:
        encoder: a Hugging Face encoder with a pooler.
        freeze: leave the encoder's weights as they are, and keep it in evaluation mode.
    """

    def __init__(self, encoder: Any, *, freeze: bool = False) -> None:
        super().__init__()
        self.encoder, self.freeze = encoder.requires_grad_(not freeze), freeze
        width = encoder.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, batch: Any) -> Tensor:
        """Logits of being upvoted, ``[n]``, for a batch with ``input_ids`` and ``attention_mask`` ``[n, L]``."""
        pooled = getattr(self.encoder(**batch), "pooler_output", None)
        if pooled is None:
            raise ValueError(f"{type(self.encoder).__name__} has no pooler: use an encoder such as RoBERTa or BERT.")
        return self.head(pooled).squeeze(-1)

    def train(self, mode: bool = True) -> UpvoteNetwork:
        """Set the mode of training; a frozen encoder stays without dropout."""
        super().train(mode)
        self.encoder.train(mode and not self.freeze)
        return self


class UpvoteModel(ProbabilityReward):
    """1 for a comment that is probably upvoted, else 0, by a trained encoder with a head.

    (The ILQL paper's description has 1 and -1, its code 1 and 0.) Train it with :func:`train_upvote_model`.

    Args:
        network: the encoder with its head.
        tokenizer: of the encoder.
        threshold: the reward is 1 from this probability on, else 0; None: it is the probability itself.
        max_length: tokens of a comment that are read, at most; fewer if the encoder reads fewer.
        batch_size: comments at a time.

    Examples:
        >>> from torchrl_lang.envs.reddit.upvotes import UpvoteModel
        >>> UpvoteModel.load("runs/upvotes")(["well done"])  # doctest: +SKIP
        tensor([1.])
    """

    @checked
    def __init__(
        self,
        network: UpvoteNetwork,
        tokenizer: Any,
        *,
        threshold: float | None = 0.5,
        max_length: Count = 256,
        batch_size: Count = 32,
    ) -> None:
        super().__init__(threshold)
        self.network, self.tokenizer, self.batch_size = network.eval(), tokenizer, batch_size
        self.max_length = min(max_length, readable_tokens(network.encoder, tokenizer))

    @torch.no_grad()
    def _probabilities(self, texts: list[str]) -> Tensor:
        device = next(self.network.parameters()).device
        batches = encoded_batches(self.tokenizer, texts, self.batch_size, self.max_length)
        return torch.cat([self.network(batch.to(device)).sigmoid().float().cpu() for batch in batches])

    def save(self, folder: str | Path) -> None:
        """Save weights as safetensors and the rest as JSON into a new folder, atomically.

        Raises:
            FileExistsError: the folder exists and is not empty.
        """
        record = _UpvoteRecord(threshold=self.threshold, max_length=self.max_length, freeze=self.network.freeze)
        with _UPVOTES.write(folder, record) as target:
            self.network.encoder.save_pretrained(target / "encoder")
            self.tokenizer.save_pretrained(target / "tokenizer")
            write_weights(target / _HEAD, self.network.head.state_dict(), "head")

    @classmethod
    def load(cls, folder: str | Path, *, batch_size: int = 32) -> UpvoteModel:
        """Load a model that :meth:`save` saved, on the CPU.

        Raises:
            FileError: a file is missing, damaged or does not fit the others, or asks for code from elsewhere.
        """
        from transformers import AutoModel

        folder, record = Path(folder), _UPVOTES.read(folder)
        encoder, tokenizer = pretrained(AutoModel, folder / "encoder", folder / "tokenizer", _REMEDY, local=True)
        network = UpvoteNetwork(encoder, freeze=record.freeze)
        network.head.load_state_dict(read_weights(folder / _HEAD, network.head.state_dict(), "head's", remedy=_REMEDY))
        limits: Any = record.model_dump(include={"threshold", "max_length"})
        return cls(network, tokenizer, batch_size=batch_size, **limits)


class TfidfModel(ProbabilityReward):
    """A logistic regression on TF-IDF features of a text's words, by scikit-learn.

    The feature of a term (one word or several that follow each other) that occurs ``c`` times is
    ``(1 + log c) * idf``, and the features of a text have length 1.

    Args:
        vectorizer: scikit-learn's, fitted.
        regression: the logistic regression on its features, fitted.
        threshold: the reward is 1 from this probability on, else 0; None: it is the probability itself.

    Examples:
        >>> from torchrl_lang.envs.reddit.upvotes import TfidfModel
        >>> texts = ["well done", "so well", "so what", "what a pity"]  # doctest: +SKIP
        >>> model = TfidfModel.fit(texts, [True, True, False, False])  # doctest: +SKIP
        >>> model(["very well", "what now"])  # doctest: +SKIP
        tensor([1., 0.])
    """

    def __init__(self, vectorizer: Any, regression: Any, *, threshold: float | None = 0.5) -> None:
        super().__init__(threshold)
        self.vectorizer, self.regression = vectorizer, regression

    @classmethod
    def fit(
        cls,
        texts: Sequence[str],
        labels: Sequence[bool],
        *,
        words: int = 2,
        penalty: float = 1e-4,
        threshold: float | None = 0.5,
    ) -> TfidfModel:
        """Minimize the mean binary cross entropy plus ``penalty / 2 * |weight|^2``.

        The terms are the 50,000 most frequent ones of those in at least two texts.

        Args:
            texts: to train on.
            labels: True for the texts of probability 1.
            words: the longest term has this number of words.
            penalty: of large weights.
            threshold: of the model.

        Raises:
            ImportError: scikit-learn is not installed.
            ValueError: the labels are not those of the texts or all alike, no term counts, or a number is out of range.
        """
        with needs_extra("TfidfModel", "reddit"):
            from sklearn.feature_extraction.text import TfidfVectorizer
            from sklearn.linear_model import LogisticRegression
        counted: Any = {"ngram_range": (1, words), "token_pattern": _WORD, "min_df": 2, "max_features": 50_000}
        vectorizer = TfidfVectorizer(sublinear_tf=True, **counted)
        features = vectorizer.fit_transform(texts)
        regression = LogisticRegression(C=1 / (penalty * len(texts)), tol=1e-6, max_iter=1000).fit(features, labels)
        return cls(vectorizer, regression, threshold=threshold)

    def _probabilities(self, texts: list[str]) -> Tensor:
        return torch.as_tensor(self.regression.decision_function(self.vectorizer.transform(texts))).sigmoid()


class TrainedUpvotes(NamedTuple):
    """A model of upvotes, and its accuracy on comments whose texts it was not trained on."""

    model: ProbabilityReward
    accuracy: float
    """Fraction of the tested comments for which ``p >= 0.5`` is right."""
    majority: float
    """Accuracy of the more frequent answer."""
    tested: int
    """Held-out comments whose text is not in the training data."""


@checked
def train_upvote_model(
    train: RedditComments,
    held_out: RedditComments,
    encoder: Any,
    tokenizer: Any,
    *,
    cutoff: float = 0.0,
    freeze: bool = False,
    threshold: float | None = 0.5,
    epochs: Count = 1,
    batch_size: Count = 16,
    rate: Positive = 1e-5,
    max_length: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    report: Callable[[int, float], None] | None = None,
) -> TrainedUpvotes:
    """Trains an encoder with a head, as the ILQL paper's upvote model (arXiv 2206.11871), by binary cross entropy.

    (The paper's code trains on the test split; the defaults are its.) The global random stream is left as it was, and
    so is ``encoder``, which is copied.

    Args:
        train: the comments to train on.
        held_out: others to test on, such as the second part of :meth:`RedditComments.split`; those whose text is also
            in ``train`` are left out.
        encoder: a Hugging Face encoder with a pooler, such as ``AutoModel.from_pretrained("roberta-base")``.
        tokenizer: its tokenizer.
        cutoff: a comment counts as upvoted if its score is above this.
        freeze: train the head alone, not the encoder.
        threshold: the model's reward is 1 from this probability on, else 0; None: the probability.
        epochs: passes over the training data.
        batch_size: comments in a batch.
        rate: learning rate of AdamW.
        max_length: tokens of a comment that are read.
        seed: of the head's initial weights and the order of the comments.
        device: where to train.
        report: called after each epoch with its number and its mean loss.

    Returns:
        The model on the CPU, its ``accuracy``, that of the more frequent answer (``majority``), and the number of
        comments that were ``tested``.

    Raises:
        ValueError: all comments to train on are upvoted, or none is; no held-out comment is left to test on; or a
            number is out of range.

    Examples:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
        >>> from torchrl_lang.envs.reddit import RedditComments
        >>> from torchrl_lang.envs.reddit.upvotes import train_upvote_model
        >>> words = Tokenizer(models.WordLevel({"?": 0, "-": 1, "well": 2, "done": 3}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="-")
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> train = RedditComments(["hi"] * 2, ["well done", "so what"], [12, -3])
        >>> test = RedditComments(["hi"], ["well so"], [1])
        >>> train_upvote_model(train, test, BertModel(BertConfig(vocab_size=4, **sizes)), tokenizer).tested
        1
    """
    (new, labels), device = _prepared(train, held_out, cutoff), torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        network = UpvoteNetwork(copy.deepcopy(encoder), freeze=freeze).to(device)
        model = UpvoteModel(network, tokenizer, threshold=threshold, max_length=max_length)
        optimizer = torch.optim.AdamW([each for each in network.parameters() if each.requires_grad], lr=rate)
        for epoch in range(1, epochs + 1):
            network.train()
            order, total = torch.randperm(len(train)), 0.0
            texts = [train.comments[place] for place in order.tolist()]
            batches = encoded_batches(tokenizer, texts, batch_size, model.max_length)
            for batch, target in zip(batches, labels[order].split(batch_size), strict=True):
                loss = functional.binary_cross_entropy_with_logits(network(batch.to(device)), target.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(target)
            if report is not None:
                report(epoch, total / len(train))
    network.eval()
    tested = _tested(model, new, cutoff)
    network.cpu()
    return tested


def train_upvote_baseline(
    train: RedditComments,
    held_out: RedditComments,
    *,
    cutoff: float = 0.0,
    threshold: float | None = 0.5,
    **options: Any,
) -> TrainedUpvotes:
    """Trains a :class:`TfidfModel` on upvotes.

    Args:
        train: the comments to train on.
        held_out: others to test on; those whose text is also in ``train`` are left out.
        cutoff: a comment counts as upvoted if its score is above this.
        threshold: of the model.
        **options: of :meth:`TfidfModel.fit`.

    Returns:
        As :func:`train_upvote_model`.

    Examples:
        >>> from torchrl_lang.envs.reddit import RedditComments
        >>> from torchrl_lang.envs.reddit.upvotes import train_upvote_baseline
        >>> train = RedditComments(["hi"] * 4, ["well done", "so well", "so what", "what a pity"], [3, 1, -2, -4])
        >>> train_upvote_baseline(train, RedditComments(["hi"], ["well"], [5])).accuracy  # doctest: +SKIP
        1.0
    """
    new, labels = _prepared(train, held_out, cutoff)
    return _tested(TfidfModel.fit(train.comments, labels.bool().tolist(), threshold=threshold, **options), new, cutoff)


def _prepared(train: RedditComments, held_out: RedditComments, cutoff: float) -> tuple[RedditComments, Tensor]:
    """The held-out comments whose text is not in the training data, and its labels, float32 ``[N]``."""
    seen, labels = set(train.comments), _labels(train, cutoff)
    new = held_out.take(place for place, text in enumerate(held_out.comments) if text not in seen)
    if not len(new):
        raise ValueError(f"None of {len(held_out)} held-out comments has a text that is not in the training data.")
    if len(labels.unique()) != 2:
        raise ValueError(f"All {len(labels)} comments are on one side of cutoff={cutoff:g}: choose one between scores.")
    return new, labels


def _labels(data: RedditComments, cutoff: float) -> Tensor:
    return torch.tensor([float(score > cutoff) for score in data.scores])


def _tested(model: ProbabilityReward, new: RedditComments, cutoff: float) -> TrainedUpvotes:
    labels = _labels(new, cutoff)
    right = (model.probabilities(list(new.comments)) >= 0.5).float() == labels
    upvoted = float(labels.mean())
    return TrainedUpvotes(model, float(right.float().mean()), max(upvoted, 1 - upvoted), len(new))
