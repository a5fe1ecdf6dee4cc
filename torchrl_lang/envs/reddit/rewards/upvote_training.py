"""Train models of upvotes: from a comment's text, whether its score is above a cutoff."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchrl_lang._checks import at_least_one, finite, positive, within
from torchrl_lang.envs.reddit.dataset import RedditComments
from torchrl_lang.envs.reddit.rewards.encoding import encoded_batches, readable_tokens
from torchrl_lang.envs.reddit.rewards.probability import ProbabilityReward
from torchrl_lang.envs.reddit.rewards.tfidf import TfidfModel, train_tfidf_model
from torchrl_lang.envs.reddit.rewards.upvote_model import UpvoteModel, UpvoteNetwork

__all__ = ["TrainedUpvotes", "UpvoteTraining", "train_upvote_baseline", "train_upvote_model"]


class TrainedUpvotes(NamedTuple):
    """A model of upvotes, and how well it does on comments whose texts it was not trained on.

    Examples:
        >>> from torchrl_lang.envs.reddit import generate_reddit_comments, generated_comments, RedditComments
        >>> from torchrl_lang.envs.reddit.rewards import train_upvote_baseline
        >>> comments = generated_comments(1200)
        >>> columns = ([each.parent for each in comments], [each.text for each in comments])
        >>> train, held_out = RedditComments(*columns, [each.score for each in comments]).split(0.2)
        >>> trained = train_upvote_baseline(train, held_out)
        >>> trained.accuracy > trained.majority
        True
    """

    model: ProbabilityReward
    accuracy: float
    """Fraction of the tested comments for which ``p >= 0.5`` is right."""
    majority: float
    """Accuracy of the more frequent answer."""
    tested: int
    """Held-out comments whose text is not in the training data."""


@dataclass(frozen=True)
class UpvoteTraining:
    """How to train an upvote model; the defaults are those of the ILQL paper's code (arXiv 2206.11871).

    Args:
        cutoff: a comment counts as upvoted if its score is above this.
        freeze: train the head alone, not the encoder.
        threshold: the model's reward is 1 from this probability on, else 0; None: the probability.
        epochs: passes over the training data.
        batch_size: comments in a batch.
        rate: learning rate of Adam.
        max_length: tokens of a comment that are read.
        seed: of the head's initial weights and the order of the comments.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards import UpvoteTraining
        >>> UpvoteTraining(freeze=True, rate=1e-3).batch_size
        16
    """

    cutoff: float = 0.0
    freeze: bool = False
    threshold: float | None = 0.5
    epochs: int = 1
    batch_size: int = 16
    rate: float = 1e-5
    max_length: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        finite("cutoff", self.cutoff, low=None)
        if self.threshold is not None:
            within("threshold", self.threshold, 0.0, 1.0)
        for name in ("epochs", "batch_size", "max_length"):
            at_least_one(name, getattr(self, name))
        positive("rate", self.rate)


def train_upvote_model(
    train: RedditComments,
    held_out: RedditComments,
    encoder: Any,
    tokenizer: Any,
    options: UpvoteTraining | None = None,
    *,
    device: torch.device | str = "cpu",
    report: Callable[[int, float], None] | None = None,
) -> TrainedUpvotes:
    """Train an encoder with a head, as the ILQL paper's upvote model, by binary cross entropy.

    (The paper's code trains on the test split.) The global random stream is left as it was, and so is ``encoder``,
    which is copied.

    Args:
        train: the comments to train on.
        held_out: others to test on, such as the second part of :meth:`RedditComments.split`; those whose text is also
            in ``train`` are left out.
        encoder: a Hugging Face encoder with a pooler, such as ``AutoModel.from_pretrained("roberta-base")``.
        tokenizer: its tokenizer.
        options: default ``UpvoteTraining()``.
        device: where to train.
        report: called after each epoch with its number and its mean loss.

    Returns:
        The model, an :class:`UpvoteModel` on the CPU, and its accuracy.

    Raises:
        ValueError: all comments to train on are upvoted, or none is; or no held-out comment is left to test on.

    Examples:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
        >>> from torchrl_lang.envs.reddit import RedditComments
        >>> from torchrl_lang.envs.reddit.rewards import train_upvote_model
        >>> words = Tokenizer(models.WordLevel({"?": 0, "-": 1, "well": 2, "done": 3}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="-")
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> train = RedditComments(["hi"] * 2, ["well done", "so what"], [12, -3])
        >>> test = RedditComments(["hi"], ["well so"], [1])
        >>> train_upvote_model(train, test, BertModel(BertConfig(vocab_size=4, **sizes)), tokenizer).tested
        1
    """
    options = UpvoteTraining() if options is None else options
    new = _unseen(train, held_out)
    labels = _both_labels(train, options.cutoff)
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        network = UpvoteNetwork(copy.deepcopy(encoder), freeze=options.freeze).to(device)
        for epoch, loss in _epochs(network, tokenizer, train, labels, options, device):
            if report is not None:
                report(epoch, loss)
    model = UpvoteModel(network, tokenizer, threshold=options.threshold, max_length=options.max_length)
    tested = _tested(model, new, options.cutoff)
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
    """Train a logistic regression on TF-IDF features; see :class:`TrainedUpvotes` for an example.

    Args:
        train: the comments to train on.
        held_out: others to test on; those whose text is also in ``train`` are left out.
        cutoff: a comment counts as upvoted if its score is above this.
        threshold: see :class:`UpvoteTraining`.
        **options: of :func:`train_tfidf_model`.

    Returns:
        The model, a :class:`TfidfModel`, and its accuracy.

    Raises:
        ValueError: as for :func:`train_upvote_model`.
    """
    new = _unseen(train, held_out)
    model: TfidfModel = train_tfidf_model(
        train.comments, _both_labels(train, cutoff).bool().tolist(), threshold=threshold, **options
    )
    return _tested(model, new, cutoff)


def _labels(data: RedditComments, cutoff: float) -> Tensor:
    """float32 ``[N]``: 1 for upvoted comments."""
    return torch.tensor([float(score > cutoff) for score in data.scores])


def _both_labels(data: RedditComments, cutoff: float) -> Tensor:
    """As :func:`_labels`, an error unless there are comments on both sides."""
    labels = _labels(data, cutoff)
    if len(set(labels.tolist())) != 2:
        raise ValueError(
            f"All {len(labels)} comments are on one side of cutoff={cutoff:g}: there is nothing to learn. Choose a "
            f"cutoff between the scores."
        )
    return labels


def _epochs(
    network: UpvoteNetwork,
    tokenizer: Any,
    train: RedditComments,
    labels: Tensor,
    options: UpvoteTraining,
    device: torch.device,
) -> Iterator[tuple[int, float]]:
    """Train; the number and the mean loss of each epoch."""
    max_length = min(options.max_length, readable_tokens(network.encoder, tokenizer))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.rate)
    for epoch in range(1, options.epochs + 1):
        network.train()
        order = torch.randperm(len(train)).tolist()
        texts = [train.comments[place] for place in order]
        batches = encoded_batches(tokenizer, texts, options.batch_size, max_length)
        total, first = 0.0, 0
        for batch in batches:
            logits = network(batch.to(device))
            target = labels[order[first : first + len(logits)]].to(device)
            loss = functional.binary_cross_entropy_with_logits(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(logits)
            first += len(logits)
        yield epoch, total / len(train)


def _unseen(train: RedditComments, held_out: RedditComments) -> RedditComments:
    """The held-out comments whose text is not in the training data."""
    seen = set(train.comments)
    new = held_out.take(place for place, text in enumerate(held_out.comments) if text not in seen)
    if not len(new):
        raise ValueError(f"None of {len(held_out)} held-out comments has a text that is not in the training data.")
    return new


def _tested(model: ProbabilityReward, new: RedditComments, cutoff: float) -> TrainedUpvotes:
    labels = _labels(new, cutoff)
    right = (model.probabilities(list(new.comments)) >= 0.5).float() == labels
    upvoted = float(labels.mean())
    return TrainedUpvotes(model, float(right.float().mean()), max(upvoted, 1 - upvoted), len(new))
