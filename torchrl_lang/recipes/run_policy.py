"""The policy of a finished run: what its algorithm prescribes, read from the heads that were saved with the model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.modules import (
    CHAIActor,
    ReturnConditionedActor,
    ReturnEmbedding,
    SavedModel,
    UtteranceActor,
    UtteranceValueGuidance,
    ValueGuidance,
    condition_on_returns,
    language_actor,
)
from torchrl_lang.schema import ControlTokens
from torchrl_lang.storage import Fields, write_file

__all__ = ["Method", "RunDecoding", "build_policy", "methods_of"]

Method = Literal["sample", "greedy", "beam", "best_of"]

_FILE = "decoding.json"


@dataclass(frozen=True)
class RunDecoding:
    """How action values decide, as the algorithm that learned them prescribes it."""

    include_logits: bool = True
    """Whether the language model's logits count beside the values."""
    min_p: float | None = None
    """Least probability of a token under the language model, relative to the likeliest one's."""

    def save(self, run: Path) -> None:
        """Write it to the folder of a run."""
        write_file(run / _FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, run: Path) -> RunDecoding:
        """That of a finished run; the default where none was written.

        Raises:
            FileError: the file is damaged.
        """
        if not (run / _FILE).is_file():
            return cls()
        fields = Fields.read(run / _FILE, remedy="train again")
        min_p = None if fields.content.get("min_p") is None else fields.take("min_p", float)
        return cls(fields.take("include_logits", bool), min_p)


def methods_of(model: SavedModel) -> tuple[Method, ...]:
    """Ways to decode without a weight of action values that are worth a row in a table."""
    return ("best_of", "greedy") if _ranks_utterances(model) else ("sample", "greedy")


def build_policy(
    model: SavedModel,
    control: ControlTokens,
    action_length: int,
    decoding: RunDecoding,
    *,
    beta: float = 0.0,
    method: Method = "sample",
    target_return: float | None = None,
    **options: Any,
) -> TensorDictModuleBase:
    """The policy of a saved model.

    Args:
        model: with its heads.
        control: of its tokenizer.
        action_length: number of tokens of an utterance.
        decoding: of the run.
        beta: weight of its action values.
        method: of decoding.
        target_return: what a decision transformer is asked for; default what its training chose.
        **options: of :class:`~torchrl_lang.modules.UtteranceActor`.

    Raises:
        ValueError: the model has no such values, or reads no returns.
    """
    heads = model.heads
    if beta and "target_qvalue" not in heads:
        raise ValueError(f"This run learned no values, so beta={beta} has nothing to weigh: leave beta at 0.")
    actor, returns = language_actor(model.lm), heads.get("returns")
    if isinstance(returns, ReturnEmbedding):
        condition_on_returns(actor, returns)
        policy = UtteranceActor(actor, control, action_length, method=method, **options)
        return ReturnConditionedActor(policy, target_return)
    if target_return is not None:
        raise ValueError(f"Only a decision transformer is asked for a return, got target_return={target_return}.")
    if "target_chai_qvalue" in heads and method == "best_of":
        candidates = options.pop("candidates", 8)
        return CHAIActor(
            UtteranceActor(actor, control, action_length, **options),
            heads["target_chai_qvalue"],
            candidates=candidates,
        )
    guidance, ranking = _guidance(model, decoding, beta, method)
    if not decoding.include_logits and decoding.min_p is not None:
        ranking["min_p"] = decoding.min_p
    return UtteranceActor(actor, control, action_length, guidance=guidance, method=method, **{**ranking, **options})


def _guidance(
    model: SavedModel, decoding: RunDecoding, beta: float, method: Method
) -> tuple[ValueGuidance | None, dict[str, Any]]:
    """The values that guide or rank, and how candidates are ranked."""
    by_value = {"end_value_weight": 1.0, "log_prob_weight": 0.0} if method == "best_of" else {}
    if "target_utterance_qvalue" in model.heads and by_value:
        return UtteranceValueGuidance(model.heads["target_utterance_qvalue"]), by_value
    if "target_qvalue" in model.heads and (beta or by_value):
        qvalue = model.heads["target_qvalue"]
        return ValueGuidance(qvalue, beta=beta, include_logits=decoding.include_logits or not beta), by_value
    return None, {}


def _ranks_utterances(model: SavedModel) -> bool:
    return not {"target_utterance_qvalue", "target_chai_qvalue"}.isdisjoint(model.heads)
