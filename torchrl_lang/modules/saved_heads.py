"""Value heads on disk: weights in ``heads.safetensors``, constructor arguments in a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang._files import Record, file_errors, read_weights, write_weights
from torchrl_lang.modules.features import FeatureEmbedding
from torchrl_lang.modules.heads import ActionValueHead, QValueHead, TiedQValueHead, UtteranceQValueHead, ValueHead
from torchrl_lang.modules.hugging_face import is_adapter
from torchrl_lang.modules.returns import ReturnEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS = "heads.safetensors"
"""Name of the file of weights."""

Head = ActionValueHead | UtteranceQValueHead | ValueHead | ReturnEmbedding | FeatureEmbedding
"""A module of this library that is saved beside the language model."""

_OWN = (QValueHead, TiedQValueHead, UtteranceQValueHead, ValueHead, ReturnEmbedding, FeatureEmbedding)
_KINDS: dict[str, Callable[..., Head]] = {kind.__name__: kind for kind in _OWN}


class HeadRecord(Record):
    """The class of a head and its constructor's arguments."""

    kind: str
    options: dict[str, Any] = {}
    embedding: Literal["input", "output"] | None = None
    """That of a tied head."""
    module: str | None = None
    """Name of a class that is not this library's, and its keys."""
    in_keys: tuple[str, ...] | None = None
    out_keys: tuple[str, ...] | None = None


def own_head(head: nn.Module) -> nn.Module:
    """A head of this library without the module of tensordicts around it; other heads as they are."""
    module = _weights_of(head)
    return module if isinstance(module, Head) else head


def describe_heads(heads: Mapping[str, nn.Module], lm: PreTrainedModel) -> dict[str, HeadRecord]:
    """The records of heads; ``lm`` is the model whose embedding a tied head reads."""
    if empty := [name for name, head in heads.items() if not _weights_of(head).state_dict()]:
        raise ValueError(f"The heads {empty} have no weights: give a network, such as loss.target_qvalue_network().")
    return {name: _describe(name, head, lm) for name, head in heads.items()}


def _describe(name: str, head: Any, lm: PreTrainedModel) -> HeadRecord:
    kind: Any = type(head).__name__
    if _KINDS.get(kind) is type(head):
        tied = _tie(name, head, lm) if isinstance(head, TiedQValueHead) else None
        return HeadRecord(kind=kind, options=head.config(), embedding=tied)
    wrapped = type(head) is TensorDictModule
    keys: Any = {key: tuple(getattr(head, key)) for key in ("in_keys", "out_keys")} if wrapped else {}
    return HeadRecord(kind="custom", module=type(_weights_of(head)).__name__, **keys)


def _weights_of(head: nn.Module) -> nn.Module:
    """The module whose weights are saved."""
    wrapped: Any = head
    return wrapped.module if type(head) is TensorDictModule else head


def write_heads(path: Path, heads: Mapping[str, nn.Module]) -> None:
    """Write the weights of heads as ``<name>.<parameter>``."""
    weights = _named({name: _weights_of(head) for name, head in heads.items()})
    write_weights(path, weights, "head")


def _named(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, one in modules.items() for key, value in one.state_dict().items()}


def read_heads(
    path: Path, records: Mapping[str, HeadRecord], lm: PreTrainedModel, given: Mapping[str, nn.Module], *, remedy: str
) -> dict[str, Any]:
    """The heads that :func:`describe_heads` described, with the weights in ``path``, in evaluation mode on the CPU.

    The modules in ``given`` are those of other classes than this library's, which are filled in place.
    """
    custom = {name: record.module for name, record in records.items() if record.kind == "custom"}
    if custom.keys() != given.keys():
        needed = f"{path.parent} needs modules for the heads {custom} of classes that are not this library's"
        raise ValueError(f"{needed}: give heads={{name: module}} of these and no other, got heads={[*given]}.")
    heads: dict[str, Any] = {}
    for name, record in records.items():
        if name not in custom:
            heads[name] = _build(name, record, lm, path.parent, remedy)
        elif isinstance(given[name], TensorDictModuleBase) or record.in_keys is None:
            heads[name] = given[name]
        else:
            heads[name] = TensorDictModule(given[name], list(record.in_keys), list(record.out_keys or ()))
    modules = {name: _weights_of(head) for name, head in heads.items()}
    if custom:
        remedy = f"give heads= modules of the shapes that were saved, or {remedy}"
    weights = read_weights(path, _named(modules), "heads'", remedy=remedy)
    for name, head in modules.items():
        own = {key: weights[f"{name}.{key}"].clone() for key in head.state_dict()}
        head.load_state_dict(own, assign=name not in custom)
        head.eval()
    return heads


def _build(name: str, record: HeadRecord, lm: PreTrainedModel, folder: Path, remedy: str) -> Head:
    """A head on the meta device, so that sizes from a file cannot exhaust the memory."""
    tied = {} if record.embedding is None else {"embedding": _embedding(lm, record.embedding)}
    misfits, found = (ValueError, RuntimeError, TypeError, KeyError), f'describes no head as "heads.{name}"'
    options = {key: value for key, value in record.options.items() if key != "dropout"}  # of earlier versions
    with file_errors(folder, found, remedy, *misfits), torch.device("meta"):
        return _KINDS[record.kind](**options, **tied)


def _tie(name: str, head: TiedQValueHead, lm: PreTrainedModel) -> Literal["input", "output"]:
    """The embedding of the language model that a tied head reads."""
    which: Literal["input", "output"]
    for which in ("output", "input"):
        embedding = _embedding(lm, which)
        if getattr(embedding, "weight", None) is head.embedding.weight and not is_adapter(embedding):
            return which
    raise ValueError(f"Head {name!r} is tied to an embedding that is not in the language model, or adapters change it.")


def _embedding(lm: PreTrainedModel, which: str) -> nn.Module:
    return lm.get_input_embeddings() if which == "input" else lm.get_output_embeddings()
