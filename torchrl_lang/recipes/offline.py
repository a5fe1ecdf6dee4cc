"""Offline training on a dataset or on dialogues: the data, their evaluation, and the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.objectives import LossModule

from torchrl_lang import _ranks
from torchrl_lang._files import file_digest
from torchrl_lang.data import RowDataset, best_rows, load_dataset, row_buffer
from torchrl_lang.modules import with_frozen_states
from torchrl_lang.modules.frozen.lower_layers import StatesOfRows
from torchrl_lang.recipes.algorithms.offline import OfflineOptions
from torchrl_lang.recipes.datasets import dialogue_dataset, open_task
from torchrl_lang.recipes.runs import open_run, train_and_evaluate
from torchrl_lang.recipes.tasks import DIALOGUES
from torchrl_lang.recipes.tasks.base import Task, check_features, check_tokenizer
from torchrl_lang.schema import AGENT_MASK, FEATURES, FROZEN_STATES
from torchrl_lang.text import ChatTokenizer, to_messages


@dataclass(frozen=True)
class OfflineData:
    """Episodes to learn from, and how a policy that learns from them is evaluated.

    With a task it plays games, and the mean return chooses the checkpoint; without one the policy's loss of held-out
    episodes does, if there are some.

    Args:
        dataset: the episodes.
        task: of games for evaluations, if there is one.
        source: named by errors.
        states: those below the first trained layer of an earlier training, to hand on; None: compute them here.

    Raises:
        ValueError: there is no task and the agent takes no turn, or the task has another tokenizer or shows other
            features.
    """

    dataset: RowDataset
    task: Task | None
    source: Path
    states: StatesOfRows | None = None

    def __post_init__(self) -> None:
        if self.task is None:
            if self.action_length < 2:
                raise ValueError(f"{self.source} has no turn of the agent to learn from.")
            return
        check_tokenizer(self.task, self.dataset.tokenizer, self.dataset.folder)
        if (features := self.dataset.rows.get(FEATURES, None)) is not None:
            check_features(self.task, features.shape[-1], self.dataset.folder)

    @property
    def best_by(self) -> str:
        """The figure to choose the best checkpoint by."""
        return "held_out_log_prob" if self.task is None else "return"

    @cached_property
    def action_length(self) -> int:
        """Tokens of an utterance with its end: one more than the longest of the data, so that its end is a choice."""
        return longest_utterance(self.dataset.rows) + 1 if self.task is None else self.task.action_length

    def notes(self) -> dict[str, Any]:
        """Notes of a run, so that it can be loaded."""
        if self.task is None:
            return {"task": DIALOGUES, "action_length": self.action_length}
        recorded: dict[str, Any] = self.dataset.manifest["notes"]
        return recorded if "task" in recorded else self.task.notes()

    def record(self) -> dict[str, Any]:
        """Record of the data of a run, which is compared when it is resumed."""
        contents = {key: entry["sha256"] for key, entry in self.dataset.manifest["entries"].items()}
        record: dict[str, Any] = {"notes": self.notes(), "dataset": contents}
        return record | ({"dialogues": file_digest(self.source)} if _are_dialogues(self.source) else {})

    def figures(self, policy: Any, checked: Mapping[str, float], options: OfflineOptions) -> dict[str, float]:
        """Figures of a policy, to log and to choose by, from games or from the ``checked`` figures of held-out rows."""
        if self.task is None:
            return {self.best_by: -checked["held_out_loss"]} if "held_out_loss" in checked else {}
        games: Any = {"games": options.eval_games, "seed": options.seed + 1, "device": options.torch_device()}
        return self.task.evaluate(policy, **games)[0].scalars()

    def describe(self, best: float) -> str:
        """The figure that chose the checkpoint, in words."""
        return f"held-out loss {-best:.3f}" if self.task is None else f"mean return {best:.2f}"

    def next_steps(self, run: Path) -> str:
        """Next commands for a finished run; empty where the commands show it."""
        if self.task is not None:
            return ""
        first, tokenizer = self.dataset.episode(0), self.dataset.tokenizer
        given = [repr(turn.text[:60]) for turn in first.turns[:1] if turn.text and not turn.by_agent]
        if isinstance(tokenizer, ChatTokenizer):
            begun = takewhile(lambda message: message["role"] != "assistant", to_messages(first, tokenizer))
            given = [repr([{**message, "content": message["content"][:60]} for message in begun])]
        given += ["features=..."] * (FEATURES in self.dataset.rows.keys())  # a placeholder for float [n, F]
        return (
            "This run has no environment. Ask the policy for an answer in Python:\n"
            "    from pathlib import Path\n"
            "    from torchrl_lang.recipes.load_run import load_run\n"
            f"    run = load_run(Path({str(run)!r}))\n"
            f"    print(run.reply({', '.join(given)}))\n"
            f"talk to it with `python -m torchrl_lang chat {run}`, make an agent of it with `export`,\n"
            "or give `evaluate`, `play` and `train ppo` an environment with --task package.module:make_env.\n"
        )


# Bytes that the states below the first trained layer may take for the rows of a dataset, see with_frozen_states. If
# they take more, or the run reads fewer rows than there are, they are computed for each batch.
_FROZEN_STATES = 2**30


def _are_dialogues(source: Path) -> bool:
    return source.is_file() or source.suffix == ".jsonl"


def open_data(options: OfflineOptions) -> OfflineData:
    """Open the dataset, or make one of the dialogues in the run's folder.

    Without a task, neither given nor recorded, the policy is evaluated on held-out episodes.

    Raises:
        ValueError: there is no such task, or the data do not fit it or the options.
    """
    options.check_machine()
    given = options.given_task()
    if _are_dialogues(options.data):
        task = None if given is None else given.without_notes()
        return OfflineData(dialogue_dataset(options, task), task, options.data)
    if given_options := options.given_of_dialogues():
        raise ValueError(f"{options.data} is no file of dialogues: leave out {', '.join(given_options)}.")
    dataset = load_dataset(options.data)
    return OfflineData(dataset, open_task(dataset, given), options.data)


def longest_utterance(rows: TensorDictBase) -> int:
    """Number of tokens of the agent's longest utterance in rows ``[N, T]``, its end included; 0 if there is none.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.recipes.offline import longest_utterance
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> longest_utterance(to_rows([Episode([Turn("a"), Turn("bcb", 1.0), Turn("c")], True)], tokenizer, 16))
        4
    """
    found, position = 0, torch.arange(rows.get(AGENT_MASK).shape[-1])
    for part in rows.split(10_000):
        mask = part.get(AGENT_MASK)
        gap = torch.where(mask, -1, position).cummax(-1).values
        found = max(found, int(torch.where(mask, position - gap, 0).amax()))
    return found


def held_out_rows(dataset: RowDataset, held_out: int) -> TensorDict:
    """The dataset's last ``held_out`` episodes, at most a tenth of it, which are not trained on."""
    return dataset[number_to_train(len(dataset), held_out) :]


def number_to_train(episodes: int, held_out: int) -> int:
    """How many of a dataset's episodes, its first ones, are trained on."""
    return episodes - min(held_out, episodes // 10)


def train_offline(
    options: OfflineOptions,
    data: OfflineData,
    loss: LossModule,
    policy: TensorDictModuleBase,
    save: Callable[[Path], Any],
    check: Callable[[TensorDictBase], Mapping[str, float]],
    *,
    tau: float | None = None,
    prepare: Callable[[TensorDictBase], TensorDictBase] = lambda rows: rows,
    rates: Sequence[tuple[nn.Module, float]] = (),
) -> float:
    """Train, evaluate and checkpoint; at the end the best checkpoint becomes the run's model.

    The run's folder contains ``config.json``, ``log.csv``, ``checkpoints`` and, at the end, ``model``. A run that was
    killed resumes from its last checkpoint and ends with the same numbers as an uninterrupted one. One process at a
    time trains in a folder.

    Args:
        options: of the recipe.
        data: episodes to learn from, and the evaluation.
        loss: to minimize.
        policy: to evaluate; shares its weights with the loss.
        save: writes the trained model to a folder.
        check: maps the held-out rows to numbers, logged with each evaluation.
        tau: rate at which the loss's target parameters follow the trained ones, if it has some.
        prepare: adds what the loss needs to the rows to train on, the same each time it is called.
        rates: modules of the loss with their own learning rates.

    Returns:
        The best mean return of the evaluations, or without games the best held-out log-probability of a token.

    Raises:
        FileExistsError: another process trains in this folder.
        NonFiniteError: a loss, a gradient or a weight has become NaN or infinite; earlier checkpoints stay.
    """
    dataset = data.dataset
    free = ("data", "length_groups", "compile", "checkpointing")
    name = data.source.name if data.task is None else dataset.manifest["source"]
    about: Any = {"learned_from": {"name": name, "episodes": len(dataset)}, "from_pretrained": options.from_pretrained}
    with open_run(options, free=free, fixed=data.record(), best_by=data.best_by, **about) as checkpoints:
        kept = held_out_rows(dataset, options.held_out)
        rows = dataset.rows[: len(dataset) - len(kept)]
        if options.fraction < 1 or options.bottom_fraction < 1:
            select = partial(best_rows, fraction=options.fraction, bottom_fraction=options.bottom_fraction)
            rows, kept = select(rows), select(kept)  # checkpoints are chosen by what is to be imitated
        device = options.torch_device()

        def carrying(rows: TensorDictBase, carry: Any = with_frozen_states, **limit: int) -> TensorDictBase:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.bf16):
                return carry(loss, rows, **limit)

        rows = prepare(rows)
        if data.states is not None or (options.steps * options.batch_size > len(rows) and not options.shard):
            carry = with_frozen_states if data.states is None else data.states.carrying
            rows = carrying(rows, carry, limit=_FROZEN_STATES)
        share = _ranks.rank(), _ranks.size()
        buffer = row_buffer(rows, options.batch_size, seed=options.seed, share=share)

        def evaluate() -> tuple[dict[str, float], dict[str, float]]:
            checked = dict(check(kept.to(device))) if len(kept) else {}
            return data.figures(policy, checked, options), checked

        best = train_and_evaluate(
            options,
            checkpoints,
            loss,
            buffer.sample if FROZEN_STATES in rows.keys() else lambda: carrying(buffer.sample().to(device)),
            evaluate,
            save,
            tau=tau,
            shown="held_out_loss" if data.task is None else "return",
            describe=data.describe,
            rates=rates,
            sampler=buffer.sampler,
        )
    print(data.next_steps(options.out), end="", flush=True)
    return best
