"""What options and methods of AgileRL's ILQL do when they are called, release 2.58: each is run by a probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["FINDINGS", "Finding"]

Answer = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A statement about AgileRL and the probe that confirms it."""

    name: str
    probe: str
    """Of ``agilerl_terms_worker.py``."""
    text: str
    holds: Callable[[Answer], bool]
    """Whether the probe's answer confirms it."""


def _nothing(answer: Answer) -> bool:
    return answer.get("number") == 0


def _something(answer: Answer) -> bool:
    return answer.get("number", 0) > 1e-6


def _raises(kind: str) -> Callable[[Answer], bool]:
    return lambda answer: answer.get("raised", "").startswith(kind)


FINDINGS = (
    Finding("per_token", "per_token", "is stored and never read", _nothing),
    Finding("batch_size", "batch_size", "is stored and never read by the losses", _nothing),
    Finding("index", "index", "is a number for a population's members", _nothing),
    Finding("mutation", "mutation", "is a name for a population's log", _nothing),
    Finding("attn_mask", "attn_mask", "does not reach the transformers unless there is a prefix mask", _nothing),
    Finding(
        "prefix_embs",
        "prefix_embs",
        "the prefix is not removed from the states, so all positions are those of earlier tokens",
        lambda answer: answer.get("number") == 3,
    ),
    Finding("prefix_attn_mask", "prefix_attn_mask", "raises: positions are not integers", _raises("RuntimeError")),
    Finding(
        "remove_prefix_position_embs",
        "remove_prefix_position_embs",
        "raises: it needs the prefix mask, which raises",
        _raises("AssertionError"),
    ),
    Finding(
        "qv_kwargs={'output_attentions': True}",
        "qv_kwargs_output_attentions",
        "raises: the transformer has no such option",
        _raises("TypeError"),
    ),
    Finding(
        "qv_kwargs={'is_causal': False}",
        "qv_kwargs_is_causal",
        "lets tokens read those after them; ILQL_Policy reads prompts so",
        _something,
    ),
    Finding("get_qvs(qv_kwargs=...)", "get_qvs_qv_kwargs", "is not passed on", _nothing),
    Finding(
        "skip_policy_on_train",
        "skip_policy_on_train",
        "logits are zeros, so the log shows the logarithm of the vocabulary's size times a share of the tokens",
        _something,
    ),
    Finding("detach_full_policy", "detach_full_policy", "the policy gets no gradient", _nothing),
    Finding("clone", "clone", "computes the same", _nothing),
    Finding("clone, its optimizer", "optimizer_of_a_clone", "is empty", _nothing),
    Finding(
        "save_checkpoint, second Q head", "saved_q2", "holds the first Q head in its place: it is lost", _something
    ),
    Finding(
        "load_checkpoint, then a training step",
        "training_after_load",
        "changes nothing: the optimizer holds the networks from before",
        _nothing,
    ),
    Finding("test", "test", "does not exist", _raises("AttributeError")),
    Finding("learn", "learn", "does not exist", _raises("AttributeError")),
    Finding("evolvable_attributes", "evolvable_attributes", "does not exist", _raises("AttributeError")),
)
