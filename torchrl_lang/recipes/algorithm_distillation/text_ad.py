"""Train a language model on the learning histories of text tasks, and report how well it predicts their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential
from transformers import PreTrainedModel

from torchrl_lang._files import json_digest, shorten, write_file, write_json
from torchrl_lang.algorithm_distillation import language
from torchrl_lang.algorithm_distillation.language import BlockTemplate, Quantizer, TextRecord
from torchrl_lang.algorithm_distillation.language.metrics import RewardWords
from torchrl_lang.algorithm_distillation.language.records import TextSplit, episode_records, group_episodes, run_folders
from torchrl_lang.data import row_buffer
from torchrl_lang.evaluation.tables import format_columns
from torchrl_lang.modules import language_actor, load_causal_lm, save_language_model
from torchrl_lang.modules.hugging_face import positions
from torchrl_lang.modules.language_model import fit_vocabulary
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.algorithm_distillation.options import TextAD, TextHistoryOptions
from torchrl_lang.recipes.models import new_lm
from torchrl_lang.recipes.runs import open_run, train_and_evaluate
from torchrl_lang.text import HFTokenizer, Tokenizer, word_tokenizer

_MOST = 100
"""Number of different rewards that a model chooses among, without bins."""


class TextHistories(NamedTuple):
    """Rows to learn from and to report, and how they were written."""

    rows: dict[str, TensorDict]
    """Of each part, train, validation and test."""
    template: BlockTemplate
    tokenizer: Tokenizer
    values: list[float] | None
    """The rewards to choose among, where they are written in digits."""
    about: dict[str, Any]
    """Numbers of runs, episodes and blocks in each part, as JSON."""
    digest: str
    """Of all records, to recognise them when a run is resumed."""


def open_histories(options: TextHistoryOptions) -> TextHistories:
    """Read the histories, split and pack them.

    Raises:
        FileNotFoundError: there is no run in a folder.
        FileError: a history is damaged.
        ValueError: two runs have one name, there are no episodes for a part, no episode fits a row, or the rewards are
            too many to choose among.
    """
    given = None if options.pretrained is None else HFTokenizer(options.pretrained)
    records = _read(options, given)
    values = torch.tensor([record.reward for record in records], dtype=torch.float32).unique()
    template = _template(options, values)
    shares: dict[str, Any] = {name: getattr(options, name) for name in ("validation", "test", "test_runs")}
    split = language.split_texts(records, **shares, seed=options.split_seed)
    tokenizer: Tokenizer = _word_tokenizer(options, template, split) if given is None else given
    rows, about = dict[str, TensorDict](), dict[str, Any]()
    for name, part in split._asdict().items():
        packed = language.pack_blocks(part, template, tokenizer, options.row_length, loss_on=options.loss_on)
        rows[name] = packed.rows
        about[name] = {**_count(part), "blocks_left_out": len(packed.left_out), "rows": len(packed.rows)}
    chosen = sorted({record.reward for record in records}) if options.reward == "decimals" else None
    digest = json_digest({"records": [record.model_dump(mode="json") for record in records]})
    return TextHistories(rows, template, tokenizer, chosen, about, digest)


def _read(options: TextHistoryOptions, tokenizer: HFTokenizer | None) -> list[TextRecord]:
    """The records of all folders."""
    found, names = list[TextRecord](), set[str]()
    decode = None if tokenizer is None else partial(tokenizer.backend.decode, skip_special_tokens=True)
    for home in options.runs:
        if options.logs:
            records = language.read_run_logs(home, decode)
        else:
            records = [record for run in run_folders(home) for record in language.read_run(run)]
            records = records if options.block == "turn" else episode_records(records)
        own = {record.run for record in records}
        if twice := sorted(names & own):
            raise ValueError(f"Two folders of {shorten(options.runs)} have a run {shorten(twice)}: rename one of them.")
        found, names = found + records, names | own
    if not found:
        raise ValueError(f"The histories in {shorten(options.runs)} have no episode yet: record some iterations first.")
    return found


def _template(options: TextHistoryOptions, values: torch.Tensor) -> BlockTemplate:
    """How blocks are written, with the rewards float32 ``[R]``."""
    if options.reward == "bins":
        low, high = float(values[0]), float(values[-1])
        if low == high:
            raise ValueError(f"All rewards of the histories are {low}: there is no range for bins.")
        return BlockTemplate(Quantizer.bins(low, high, options.bins, outside="nearest"))  # float32 rounds the ends
    if len(values) > _MOST:
        raise ValueError(f"{len(values)} different rewards are more than {_MOST} to choose among: give --reward bins.")
    if options.reward == "decimals":
        return BlockTemplate()
    return BlockTemplate(Quantizer(values.tolist(), Quantizer.decimals().write(values), outside="nearest"))


def _word_tokenizer(options: TextHistoryOptions, template: BlockTemplate, split: TextSplit) -> Tokenizer:
    """A tokenizer of the words of the episodes to train on, and of the characters of all."""
    texts = (f"{record.query} {record.response}" for part in split for record in part)
    further = sorted({letter for text in texts for letter in text if not " " <= letter <= "~"} - {"\n"})
    symbols = ["Prompt", "Completion", "Reward", *template.vocabulary(), *options.symbols, *further]
    written = map(template.write, filter(template.can_write, split.train))  # pack_blocks leaves the others out
    return word_tokenizer(written, min_count=options.min_count, symbols=symbols)


def _count(records: Sequence[TextRecord]) -> dict[str, Any]:
    runs = sorted({record.run for record in records})
    return {"runs": runs, "episodes": len(group_episodes(records)), "blocks": len(records)}


# -- training ----------------------------------------------------------------------------------------------------------

_BEST_BY = "validation_log_prob"


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
        buffer = row_buffer(histories.rows["train"], options.batch_size, seed=options.seed)
        validation = histories.rows["validation"].to(device)
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
        readable, needed = positions(lm.config), options.row_length + longest
        if readable is not None and readable < needed:  # the report puts other rewards at the ends of rows
            advice = f"give --row-length {readable - longest} or less, or another model"
            raise ValueError(f"The pretrained model has {readable} positions, but rows need {needed}: {advice}.")
        return fit_vocabulary(lm, tokenizer.vocab_size, shrink=True)
    return new_lm(tokenizer, options.row_length + longest, **options.sizes)


def _validate(options: TextAD, actor: ProbabilisticTensorDictSequential, rows: TensorDict) -> dict[str, float]:
    """The mean log-probability of the tokens that are learned, on validation rows."""
    found = language.next_token_metrics(actor, rows, chunk=options.batch_size)
    return {_BEST_BY: -found["loss" if options.loss_on == "all" else "loss/action"]}


def _report(options: TextAD, histories: TextHistories, actor: ProbabilisticTensorDictSequential) -> dict[str, Any]:
    """Write and print the report on the test rows."""
    rows, template, tokenizer, values = histories[:4]
    test, chunk = rows["test"].to(options.torch_device()), options.batch_size
    share = f"a random {100 * options.test:g} % of each epoch's episodes"
    report = {
        "held_out": f"all episodes of {', '.join(options.test_runs)}" if options.test_runs else share,
        "block": options.block,
        "reward": options.reward,
        "histories": histories.about,
        "rewards": language.reward_accuracy(actor, test, template, tokenizer, values=values, chunk=chunk),
        "tokens": language.next_token_metrics(actor, test, chunk=chunk),
    }
    text = format_text_report(report)
    write_json(options.out / "report.json", report)
    write_file(options.out / "report.txt", text + "\n")
    print(f"\n{text}\n\nreport: {options.out / 'report.json'}", flush=True)
    return report


# -- the report --------------------------------------------------------------------------------------------------------

_FIGURES = ("exact", "within_one", "rank_correlation", "squared_error")


def format_text_report(report: Mapping[str, Any]) -> str:
    """The report as tables."""
    rewards, tokens, part = report["rewards"], report["tokens"], report["histories"]["test"]
    lines = [["reward", "model", "constant"]]
    for name in _FIGURES:
        constant = rewards.get(f"constant_{name}")
        cells = [name.replace("_", " "), f"{rewards[name]:.3f}", "-" if constant is None else f"{constant:.3f}"]
        lines.append(cells)
    kinds = ["", *(f"/{key.removeprefix('loss/')}" for key in tokens if key.startswith("loss/"))]
    table = [["next token", "loss", "accuracy"]]
    table += [[kind[1:] or "all", f"{tokens['loss' + kind]:.3f}", f"{tokens['accuracy' + kind]:.3f}"] for kind in kinds]
    held_out = f"Held out: {report['held_out']}: {part['episodes']} episodes, {part['blocks']} blocks."
    return "\n\n".join([held_out, format_columns(lines, "<>>"), format_columns(table, "<>>")])
