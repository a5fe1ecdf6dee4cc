"""Train a language model on the learning histories of text tasks, and report how well it predicts their rewards."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential
from transformers import PreTrainedModel

from torchrl_lang._checks import check_heads
from torchrl_lang._files import write_file, write_json
from torchrl_lang.algorithm_distillation.language import next_token_metrics
from torchrl_lang.algorithm_distillation.language.reward_words import RewardWords
from torchrl_lang.data import row_buffer
from torchrl_lang.modules import fit_vocabulary, language_actor, load_causal_lm, save_language_model
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.algorithm_distillation.text_histories import TextHistories, TextHistoryOptions, open_histories
from torchrl_lang.recipes.algorithm_distillation.text_report import format_text_report, text_report
from torchrl_lang.recipes.algorithms import LoopOptions
from torchrl_lang.recipes.new_model import new_lm
from torchrl_lang.recipes.options import option, with_defaults
from torchrl_lang.recipes.run_common import open_run
from torchrl_lang.recipes.training_loop import train_and_evaluate

__all__ = ["TextAD", "main"]

_BEST_BY = "validation_log_prob"


@with_defaults(eval_every=100, steps=400, weight_decay=0.05)
class TextAD(TextHistoryOptions, LoopOptions):
    """Algorithm distillation of text tasks: a language model of recorded runs, and its accuracy of rewards."""

    batch_size: int = option(16, "rows in a batch", at_least=1)
    width: int = option(64, "hidden size of a model from scratch", at_least=1)
    layers: int = option(3, "transformer blocks of a model from scratch", at_least=1)
    heads: int = option(4, "attention heads of a model from scratch", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.width, self.heads)


def main(options: TextAD) -> dict[str, Any]:
    """Train, and report on the held-out episodes; returns the report.

    The run's folder contains ``config.json``, ``log.csv``, ``checkpoints`` and, at the end, ``model`` (that of the
    checkpoint with the lowest loss on the validation episodes), ``report.json`` and ``report.txt``. The same command
    continues a run that was killed, and ends with the same numbers.
    """
    histories = open_histories(options)
    device, tokenizer = options.torch_device(), histories.tokenizer
    torch.manual_seed(options.seed)
    lm = _model(options, histories).to(device)
    actor = language_actor(lm)
    loss = BCLoss(actor, actor_normalizer="action")
    with open_run(options, free=("runs",), fixed={"histories": histories.digest}, best_by=_BEST_BY) as checkpoints:
        buffer = row_buffer(histories.rows.train, options.batch_size, seed=options.seed)
        validation = histories.rows.validation.to(device)
        train_and_evaluate(
            options,
            checkpoints,
            loss,
            buffer.sample,
            lambda: (_validate(options, actor, validation), {}),
            lambda folder: save_language_model(folder, lm, {}, tokenizer=tokenizer.config()),
            describe=lambda best: f"validation loss {-best:.3f}",
            sampler=buffer.sampler,
        )
        return _report(options, histories, actor)


def _model(options: TextAD, histories: TextHistories) -> PreTrainedModel:
    """The model to train, from scratch or pretrained.

    Raises:
        ValueError: the pretrained model has too few positions for the rows and the rewards to choose among.
    """
    tokenizer = histories.tokenizer
    longest = RewardWords(histories.template, tokenizer, histories.values).longest
    if options.pretrained is not None:
        lm = load_causal_lm(options.pretrained)
        _check_positions(lm, options.row_length, longest)
        return fit_vocabulary(lm, tokenizer.vocab_size, shrink=True)
    return new_lm(
        vocab_size=tokenizer.vocab_size,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        max_length=options.row_length + longest,
        pad=tokenizer.control.pad,
    )


def _check_positions(lm: PreTrainedModel, row_length: int, longest: int) -> None:
    """Raise ValueError unless a model has positions for the report, which puts other rewards at the ends of rows."""
    positions = getattr(lm.config, "max_position_embeddings", None)
    if positions is not None and positions < row_length + longest:
        raise ValueError(
            f"The pretrained model has {positions} positions, but rows of row_length={row_length} tokens and rewards "
            f"of {longest} tokens need {row_length + longest}: give --row-length {positions - longest} or less, or "
            f"another model."
        )


def _validate(options: TextAD, actor: ProbabilisticTensorDictSequential, rows: TensorDict) -> dict[str, float]:
    """The mean log-probability of the tokens that are learned, on validation rows."""
    found = next_token_metrics(actor, rows, chunk=options.batch_size)
    return {_BEST_BY: -found["loss" if options.loss_on == "all" else "loss/action"]}


def _report(options: TextAD, histories: TextHistories, actor: ProbabilisticTensorDictSequential) -> dict[str, Any]:
    """Write and print the report on the test rows."""
    on_device = histories._replace(rows=histories.rows._replace(test=histories.rows.test.to(options.torch_device())))
    report = text_report(options, on_device, actor, chunk=options.batch_size)
    text = format_text_report(report)
    write_json(options.out / "report.json", report)
    write_file(options.out / "report.txt", text + "\n")
    print(f"\n{text}\n\nreport: {options.out / 'report.json'}", flush=True)
    return report
