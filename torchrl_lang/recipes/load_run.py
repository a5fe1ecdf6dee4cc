"""Open a finished run: its task, its model, and policies that act with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from tensordict.nn import TensorDictModuleBase
from transformers import PreTrainedModel

from torchrl_lang._files import Record, file_errors, read_json
from torchrl_lang.modules import CHAIActor, ReturnConditionedActor, UtteranceActor
from torchrl_lang.modules.decoding.guidance import LikelihoodGuidance, UtteranceValueGuidance, ValueGuidance
from torchrl_lang.modules.reply import dialogue_of, replies
from torchrl_lang.modules.returns import ReturnEmbedding, condition_on_returns
from torchrl_lang.modules.save import (
    SavedModel,
    load_language_model,
    save_agent,
    saved_actor,
    saved_value_actor,
    saved_value_trunk,
)
from torchrl_lang.recipes.algorithms import ALGORITHMS
from torchrl_lang.recipes.algorithms.finished import BETAS
from torchrl_lang.recipes.algorithms.online import OnlineOptions
from torchrl_lang.recipes.algorithms.training import TrainingOptions, holds_model
from torchrl_lang.recipes.records import described, held_out, read_options, results_of
from torchrl_lang.recipes.tasks import DIALOGUES, OWN_TASK, find_task, task_from_notes
from torchrl_lang.recipes.tasks.base import Task, check_tokenizer
from torchrl_lang.text import Tokenizer
from torchrl_lang.text.messages import Dialogue
from torchrl_lang.text.tokenizer_files import tokenizer_from_config

Method = Literal["sample", "greedy", "beam", "best_of"]

_DECODING = "decoding.json"


class RunDecoding(Record):
    """How values decide, as the algorithm that learned them and the options of its run prescribe it."""

    include_logits: bool = True
    """Whether the language model's logits count beside the action values."""
    min_p: float | None = None
    """Least probability of a token under the language model, relative to the likeliest one's, where they do not, or
    where they are ratios of likelihoods."""
    log_prob_weight: float = 0.0
    """Weight of an utterance's log-probability beside its value where utterances are ranked."""
    likelihood_ratio: bool = False
    """Whether the values of a second language model are its probabilities relative to the first one's."""
    guidance_clip: float | None = None
    """Upper bound of ``beta * (Q - V)``."""

    def save(self, run: Path) -> None:
        """Write it to the folder of a run."""
        self.write(run / _DECODING)

    @classmethod
    def of_run(cls, run: Path) -> RunDecoding:
        """That of a finished run; the default where none was written."""
        return cls.read(run / _DECODING, remedy="train again") if (run / _DECODING).is_file() else cls()


_OF_LIKELIHOODS = (4.0, 8.0, 16.0, 32.0, 64.0)
"""Likewise of values that are probabilities, which differ by less than 1."""


@dataclass(frozen=True)
class FinishedRun:
    """The result of a training run."""

    games: Task | None
    """Its task; None if it was trained on dialogues alone."""
    model: SavedModel
    tokenizer: Tokenizer
    action_length: int
    """Number of tokens of an utterance, its end included."""
    values_note: str = ""
    """Result of the run's held-out check of its values, one sentence; empty where it was not made."""
    decoding: RunDecoding = field(default_factory=RunDecoding)
    """How its values decide."""
    folder: Path = Path()
    """Where it lies."""

    @property
    def task(self) -> Task:
        """Its task.

        Raises:
            ValueError: it was trained on dialogues alone.
        """
        if self.games is None:
            raise ValueError(f"A run on dialogues alone has no games: give an environment with --task {OWN_TASK}.")
        return self.games

    def to(self, device: torch.device) -> Self:
        """Move its networks to a device."""
        for network in (self.model.lm, self.model.value_lm, *self.model.heads.values()):
            if network is not None:
                network.to(device)
        return self

    @property
    def _likelihoods(self) -> PreTrainedModel | None:
        """The second language model of Q-SFT, whose token probabilities are values, if there is one."""
        return None if "target_qvalue" in self.model.heads else self.model.value_lm

    @property
    def has_values(self) -> bool:
        """Whether the run learned action values, those of the next token."""
        return "target_qvalue" in self.model.heads or self._likelihoods is not None

    @property
    def betas(self) -> tuple[float, ...]:
        """Weights of the action values to try; 1 alone where the values replace the language model's logits."""
        if not self.has_values:
            return ()
        if self._likelihoods is not None:
            return _OF_LIKELIHOODS
        return BETAS if self.decoding.include_logits else (1.0,)

    @property
    def methods(self) -> tuple[Method, ...]:
        """Ways to decode without a weight of action values that are worth a row in a table."""
        ranks = {"target_utterance_qvalue", "target_chai_qvalue"} & self.model.heads.keys()
        return ("best_of", "greedy") if ranks else ("sample", "greedy")

    def policy(
        self,
        beta: float = 0.0,
        *,
        method: Method = "sample",
        seed: int | None = None,
        target_return: float | None = None,
        **options: Any,
    ) -> TensorDictModuleBase:
        """The policy, with these and further ``options`` of an :class:`~torchrl_lang.modules.UtteranceActor`.

        It is one of these, for a decision transformer a :class:`~torchrl_lang.modules.ReturnConditionedActor` (option
        ``target_return``), and for ``"best_of"`` of CHAI a :class:`~torchrl_lang.modules.CHAIActor`.

        With ``beta`` above 0 it is guided by the learned values of tokens. ``"best_of"`` chooses by the learned value
        of the whole utterance, and without values by its probability.

        Raises:
            ValueError: ``beta`` is not 0 and the run has no values of tokens, or a return is given and it reads none.
        """
        heads, returns = self.model.heads, self.model.heads.get("returns")
        if beta and not self.has_values:
            raise ValueError(f"This run learned no values of tokens, so beta={beta} weighs nothing: leave it out.")
        actor, given = saved_actor(self.model), {"seed": seed, "diagnostics": True, **options}
        make = partial(UtteranceActor, actor, self.tokenizer.control, self.action_length)
        if isinstance(returns, ReturnEmbedding):
            condition_on_returns(actor, returns)
            return ReturnConditionedActor(make(method=method, **given), target_return)
        if target_return is not None:
            raise ValueError(f"Only decision transformers are asked for a return, got target_return={target_return}.")
        if "target_chai_qvalue" in heads and method == "best_of":
            candidates = given.pop("candidates", 8)
            return CHAIActor(make(**given), heads["target_chai_qvalue"], candidates=candidates)
        guidance, chosen = self._guidance(beta, method)
        return make(guidance=guidance, method=method, **{**chosen, **given})

    def _guidance(self, beta: float, method: Method) -> tuple[ValueGuidance | None, dict[str, Any]]:
        """The values that guide or rank, and the options of decoding that go with them."""
        heads, decoding = self.model.heads, self.decoding
        if beta and self._likelihoods is not None:
            ratio = decoding.likelihood_ratio
            values = LikelihoodGuidance(saved_value_actor(self.model), beta=beta, ratio=ratio)
            return values, {"min_p": decoding.min_p if ratio else None}
        ranks = method == "best_of"
        chosen = {"end_value_weight": 1.0, "log_prob_weight": decoding.log_prob_weight} if ranks else {}
        if "target_utterance_qvalue" in heads and ranks:
            return UtteranceValueGuidance(heads["target_utterance_qvalue"]), chosen
        if "target_qvalue" not in heads or not (beta or ranks):
            return None, {}
        qvalue, replaces_logits = heads["target_qvalue"], bool(beta) and not decoding.include_logits
        guidance = ValueGuidance(
            qvalue,
            heads["value"] if decoding.guidance_clip is not None else None,
            beta=beta,
            clip=decoding.guidance_clip,
            include_logits=not replaces_logits,
            value_trunk=saved_value_trunk(self.model),
        )
        return guidance, {**chosen, "min_p": decoding.min_p} if replaces_logits else chosen

    def reply(
        self,
        messages: str | Dialogue = (),
        *texts: str,
        tools: Sequence[Any] | None = None,
        features: Any = None,
        beta: float | None = None,
        method: Method | None = None,
        **options: Any,
    ) -> Any:
        """The agent's answer in a dialogue: a message, or a text where texts were given.

        Args:
            messages: of the dialogue so far, or its first text; see
                :meth:`SavedAgent.reply <torchrl_lang.modules.save.SavedAgent.reply>`.
            *texts: the further texts.
            tools: that the chat template describes to the agent.
            features: of the dialogue, float ``[n, F]``, for a run that reads some.
            beta: weight of the values; None: as in :meth:`prescribed`.
            method: of decoding; likewise.
            **options: further options of :meth:`policy`.

        Raises:
            ValueError: the last message is the agent's, or the chat template or the tokenizer cannot write the
                dialogue.
            KeyError: the run reads features, and none are given.
        """
        given: Any = {"tools": tools, "features": None if features is None else [features], "beta": beta}
        return self.replies([dialogue_of(messages, texts)], method=method, **given, **options)[0]

    def replies(
        self,
        dialogues: Sequence[Dialogue],
        *,
        tools: Sequence[Any] | None = None,
        features: Sequence[Any] | None = None,
        beta: float | None = None,
        method: Method | None = None,
        **options: Any,
    ) -> list[Any]:
        """The agent's answers in several dialogues, decoded as one batch; see :meth:`reply`."""
        policy, _ = self.prescribed(beta, method, **options)
        return replies(policy, self.tokenizer, self.action_length, dialogues, tools=tools, features=features)

    def save_agent(
        self, folder: str | Path, *, beta: float | None = None, method: Method | None = None, **options: Any
    ) -> Path:
        """Save the policy with :func:`~torchrl_lang.modules.save_agent`; the card describes the run's training.

        It has the figures of the run's last evaluation (``evaluate``) in which this policy played.

        Args:
            folder: of the agent.
            beta: weight of the values; default that with which the run evaluated its policy during training.
            method: of decoding; default that of the run's evaluations: greedy, but sampled for online recipes and psi,
                and the best of some samples for utterance-ilql.
            **options: further options of :meth:`policy`.

        Raises:
            ValueError: the policy is a decision transformer's, or chooses utterances as CHAI does.
        """
        policy, name = self.prescribed(beta, method, **options)
        if not isinstance(policy, UtteranceActor):
            advice = "use the run itself, or, of chai, method='greedy', its language model alone"
            raise ValueError(f"An agent holds an UtteranceActor, not a {type(policy).__name__}: {advice}.")
        about: Any = {**described(self.folder), "task": None if self.games is None else self.games.notes()}
        results = results_of(self.folder, name) or held_out(self.folder, name)
        return save_agent(folder, policy, self.tokenizer, results=results, **about)

    def prescribed(
        self, beta: float | None = None, method: Method | None = None, **options: Any
    ) -> tuple[TensorDictModuleBase, str]:
        """The policy as the run evaluated it during training, but for what is given, and its name in evaluations."""
        trained = read_options(self.folder / "config.json").model_dump()
        if beta is None:
            beta = (
                trained.get("beta", 1.0) if self.has_values and self.decoding.include_logits else float(self.has_values)
            )
        if method is None:
            name = str(trained.get("algorithm"))
            sampled = name == "psi" or issubclass(ALGORITHMS.get(name, TrainingOptions), OnlineOptions)
            method = "sample" if sampled else "greedy"
            method = self.methods[0] if self.methods[0] == "best_of" else method
        own = {name: trained[name] for name in ("candidates", "temperature") if name in trained} | options
        name = f"{self.folder.resolve().name}{f' beta {beta:g}' if beta else ''} {method}"
        changed = {
            name: value for name, value in own.items() if name != "candidates" and (name, value) != ("temperature", 1)
        }
        return self.policy(beta, method=method, **own), f"{name} {changed or ''}".rstrip()

    def choose_beta(self, *, seed: int, games: int = 250, betas: Sequence[float] | None = None) -> dict[float, float]:
        """Play games greedily with each weight of the values, on games that no result is reported on.

        Give another ``seed`` than that of the games that are reported. Returns the mean return of each weight, the
        best one first; of equal ones the smaller weight. It is empty for a run without values.
        """
        returns, device = {}, self.model.lm.device
        for beta in sorted(self.betas if betas is None else betas):
            summary, _ = self.task.evaluate(self.policy(beta, method="greedy"), games=games, seed=seed, device=device)
            returns[beta] = summary.mean_return
        return dict(sorted(returns.items(), key=lambda item: -item[1]))


def load_run(folder: str | Path, given: type[Task] | str | None = None, **kwargs: Any) -> FinishedRun:
    """Open the folder of a finished run, whose task is of the class ``given`` if it is not registered.

    ``"package.module:name"`` names the class, or an environment factory, which gets the options of the run. A run that
    was trained on dialogues alone gets the games of ``given``, if any. ``kwargs`` are those of
    :func:`~torchrl_lang.modules.load_language_model`, such as ``dtype``.

    Raises:
        FileNotFoundError: there is none, or it has not finished.
        ValueError: its record or its model is damaged, or its tokenizer is not the task's.
    """
    folder = Path(folder)
    notes = read_options(folder / "config.json").notes
    if isinstance(given, str):
        given = find_task(given, notes.get("options"))
    if notes.get("task") == DIALOGUES:
        games = None if given is None else given.without_notes()
    else:
        games = task_from_notes(notes, folder / "config.json", given)
    model, tokenizer = _model_of_run(folder, kwargs)
    if games is not None:
        check_tokenizer(games, tokenizer, folder / "model")
    values, note = folder / "values.json", ""
    if values.is_file():
        note = str(read_json(values, remedy="train again, or remove the file").get("summary", ""))
    longest = notes["action_length"] if games is None else games.action_length
    return FinishedRun(games, model, tokenizer, longest, note, RunDecoding.of_run(folder), folder)


def load_model(folder: Path, **kwargs: Any) -> tuple[SavedModel, Tokenizer | None]:
    """The model of a finished run, of a saved agent or of a Hugging Face folder, and its tokenizer.

    There is none where the folder does not record one, as that of another program.

    Args:
        folder: of the run or the model.
        **kwargs: of :func:`~torchrl_lang.modules.load_language_model`, such as ``dtype``.

    Raises:
        FileNotFoundError: there is none, or it has not finished.
        ValueError: its record or its model is damaged.
    """
    if not holds_model(folder):
        return _model_of_run(folder, kwargs)
    model = load_language_model(folder, **kwargs)
    return model, None if model.tokenizer is None else _own_tokenizer(folder, model)


def _model_of_run(folder: Path, kwargs: dict[str, Any]) -> tuple[SavedModel, Tokenizer]:
    read_options(folder / "config.json")
    if not (folder / "model").is_dir():
        raise FileNotFoundError(f"The run in {folder} has not finished: continue it with its `train` command.")
    model = load_language_model(folder / "model", **kwargs)
    return model, _own_tokenizer(folder / "model", model)


def _own_tokenizer(folder: Path, model: SavedModel) -> Tokenizer:
    with file_errors(folder, "has no tokenizer that can be read", "train again", ValueError):
        return tokenizer_from_config(model.tokenizer or {})


def refuse_returns(folder: Path, model: SavedModel) -> None:
    """Raise ValueError if a run's policy is asked for returns, where its language model alone would be taken."""
    if "returns" in model.heads:
        raise ValueError(f"{folder} is a decision transformer, which plays by a return: start from another run.")
