"""The policy of a finished run: what its algorithm prescribes, read from the heads that were saved with the model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tensordict.nn import TensorDictModuleBase
from transformers import PreTrainedModel

from torchrl_lang._files import Fields, write_file
from torchrl_lang.modules import (
    CHAIActor,
    LikelihoodGuidance,
    ReturnConditionedActor,
    ReturnEmbedding,
    SavedModel,
    UtteranceActor,
    UtteranceValueGuidance,
    ValueGuidance,
    condition_on_returns,
)
from torchrl_lang.modules.save import saved_actor, saved_value_actor, saved_value_trunk
from torchrl_lang.schema import ControlTokens

__all__ = [
    "Method",
    "RunDecoding",
    "build_policy",
    "likelihoods_of",
    "methods_of",
]

Method = Literal["sample", "greedy", "beam", "best_of"]

_FILE = "decoding.json"
_KINDS: dict[str, type] = {
    "include_logits": bool,
    "min_p": float,
    "log_prob_weight": float,
    "likelihood_ratio": bool,
    "guidance_clip": float,
}


@dataclass(frozen=True)
class RunDecoding:
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
        given = {name: kind for name, kind in _KINDS.items() if fields.content.get(name) is not None}
        return cls(**{name: fields.take(name, kind) for name, kind in given.items()})


def methods_of(model: SavedModel) -> tuple[Method, ...]:
    """Ways to decode without a weight of action values that are worth a row in a table."""
    return ("best_of", "greedy") if _ranks_utterances(model) else ("sample", "greedy")


def likelihoods_of(model: SavedModel) -> PreTrainedModel | None:
    """The second language model of Q-SFT, whose token probabilities are values, if the model has one."""
    return None if "target_qvalue" in model.heads else model.value_lm


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
    if beta and "target_qvalue" not in heads and likelihoods_of(model) is None:
        raise ValueError(f"This run learned no values of tokens, so beta={beta} has nothing to weigh: leave beta at 0.")
    actor, returns = saved_actor(model), heads.get("returns")
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
    guidance, chosen = _guidance(model, decoding, beta, method)
    return UtteranceActor(actor, control, action_length, guidance=guidance, method=method, **{**chosen, **options})


def _guidance(
    model: SavedModel, decoding: RunDecoding, beta: float, method: Method
) -> tuple[ValueGuidance | None, dict[str, Any]]:
    """The values that guide or rank, and the options of decoding that go with them."""
    likelihoods = likelihoods_of(model)
    if likelihoods is not None and beta:
        ratio = decoding.likelihood_ratio
        values = LikelihoodGuidance(saved_value_actor(model), beta=beta, ratio=ratio)
        return values, {"min_p": decoding.min_p if ratio else None}
    ranks = method == "best_of"
    chosen = {"end_value_weight": 1.0, "log_prob_weight": decoding.log_prob_weight} if ranks else {}
    if "target_utterance_qvalue" in model.heads and ranks:
        return UtteranceValueGuidance(model.heads["target_utterance_qvalue"]), chosen
    if "target_qvalue" not in model.heads or not (beta or ranks):
        return None, {}
    replaces_logits = bool(beta) and not decoding.include_logits
    qvalue = model.heads["target_qvalue"]
    trunk = saved_value_trunk(model, qvalue)
    guidance = ValueGuidance(
        qvalue,
        model.heads["value"] if decoding.guidance_clip is not None else None,
        beta=beta,
        clip=decoding.guidance_clip,
        include_logits=not replaces_logits,
        value_trunk=trunk,
    )
    return guidance, {**chosen, "min_p": decoding.min_p} if replaces_logits else chosen


def _ranks_utterances(model: SavedModel) -> bool:
    return not {"target_utterance_qvalue", "target_chai_qvalue"}.isdisjoint(model.heads)
