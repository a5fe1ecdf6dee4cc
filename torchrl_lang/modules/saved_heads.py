"""Value heads on disk: weights in ``heads.safetensors``, constructor arguments in a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_lang._files import Fields, FileError, non_finite, read_tensors
from torchrl_lang.modules.features import FeatureEmbedding
from torchrl_lang.modules.heads import ActionValueHead, QValueHead, UtteranceQValueHead, ValueHead
from torchrl_lang.modules.hugging_face import is_adapter
from torchrl_lang.modules.returns import ReturnEmbedding
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead

__all__ = ["HEADS", "Head", "describe_heads", "own_head", "read_heads", "read_weights", "write_heads"]

HEADS = "heads.safetensors"
"""Name of the file of weights."""

Head = ActionValueHead | UtteranceQValueHead | ValueHead | ReturnEmbedding | FeatureEmbedding
"""A module of this library that is saved beside the language model."""

_CUSTOM = "custom"

_KINDS: dict[str, Callable[..., Head]] = {
    kind.__name__: kind
    for kind in (QValueHead, TiedQValueHead, UtteranceQValueHead, ValueHead, ReturnEmbedding, FeatureEmbedding)
}
_OPTIONS: dict[str, dict[str, type]] = {
    "QValueHead": {"width": int, "vocab_size": int, "n_heads": int, "kind": str, "dropout": float},
    "TiedQValueHead": {"width": int, "n_heads": int, "kind": str, "dropout": float, "detach_embedding": bool},
    "UtteranceQValueHead": {"width": int, "n_heads": int, "kind": str, "dropout": float},
    "ValueHead": {"width": int, "kind": str, "dropout": float},
    "ReturnEmbedding": {"width": int, "low": float, "high": float, "mode": str, "target": float, "n_bins": int},
    "FeatureEmbedding": {"features": int, "width": int, "hidden": int, "positions": bool},
}


def own_head(head: nn.Module) -> nn.Module:
    """A head of this library without the module of tensordicts around it; other heads as they are."""
    module = _weights_of(head)
    return module if isinstance(module, Head) else head


def describe_heads(heads: Mapping[str, nn.Module], lm: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """The constructor arguments of each head as JSON; ``lm`` is the model whose embedding a tied head reads.

    Of a module that is not of this library only the name and the keys are written.
    """
    for name, head in heads.items():
        if not isinstance(head, nn.Module):
            raise TypeError(f"Head {name!r} is a {type(head).__name__}, expected a module.")
        if wrong := non_finite(head.named_parameters()):
            raise ValueError(f"Head {name!r} has weights that are not finite ({', '.join(wrong)}): it is not saved.")
    empty = [name for name, head in heads.items() if not _weights_of(head).state_dict()]
    if empty:
        raise ValueError(
            f"The heads {empty} have no weights: a loss keeps the weights of its networks in tensordicts. Build a head "
            "of the same class from head.config() and load, for instance, "
            "loss.target_qvalue_network_params.get('module').to_dict() into it."
        )
    return {name: _describe(name, head, lm) for name, head in heads.items()}


def _describe(name: str, head: nn.Module, lm: PreTrainedModel) -> dict[str, Any]:
    if _KINDS.get(type(head).__name__) is type(head):
        known: Any = head
        return {"class": type(head).__name__, **known.config(), **_tie(name, head, lm)}
    found: dict[str, Any] = {"class": _CUSTOM, "module": type(_weights_of(head)).__name__}
    if type(head) is TensorDictModule:
        keys: dict[str, Any] = {"in_keys": head.in_keys, "out_keys": head.out_keys}
        if not all(isinstance(key, str) for some in keys.values() for key in some):
            raise ValueError(f"Head {name!r} has nested keys, {keys}: give it plain ones.")
        found |= {which: list(some) for which, some in keys.items()}
    return found


def _weights_of(head: nn.Module) -> nn.Module:
    """The module whose weights are saved."""
    wrapped: Any = head
    return wrapped.module if type(head) is TensorDictModule else head


def write_heads(path: Path, heads: Mapping[str, nn.Module]) -> None:
    """Write the weights of heads as ``<name>.<parameter>``."""
    weights = {
        f"{name}.{key}": value for name, head in heads.items() for key, value in _weights_of(head).state_dict().items()
    }
    save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, path)


def read_heads(
    path: Path, described: Fields, lm: PreTrainedModel, given: Mapping[str, nn.Module], *, remedy: str
) -> dict[str, Any]:
    """The heads that :func:`describe_heads` described, with the weights in ``path``, in evaluation mode on the CPU.

    The modules in ``given`` are those of other classes than this library's, which are filled in place.
    """
    fields = {name: described.object(name) for name in described.content}
    custom = {name: one.take("module", str) for name, one in fields.items() if one.content.get("class") == _CUSTOM}
    if custom.keys() != given.keys():
        raise ValueError(
            f"{path.parent} was saved with the heads {custom} of classes that are not this library's, got "
            f"heads={sorted(given)}: give a module for each of them, heads={{name: module}}, and no other."
        )
    heads = {
        name: _custom_head(one, given[name]) if name in custom else _read_head(one, lm) for name, one in fields.items()
    }
    weights_of = {name: _weights_of(head) for name, head in heads.items()}
    expected = {f"{name}.{key}": value for name, one in weights_of.items() for key, value in one.state_dict().items()}
    if custom:
        remedy = f"give heads= modules of the shapes that were saved, or {remedy}"
    weights = read_weights(path, expected, "heads'", remedy=remedy)
    for name, head in weights_of.items():
        own = {key: weights[f"{name}.{key}"].clone() for key in head.state_dict()}
        head.load_state_dict(own, assign=name not in custom)
        head.eval()
    return heads


def _custom_head(fields: Fields, given: nn.Module) -> nn.Module:
    """The module that the user gave, with the keys of the one that was saved."""
    if isinstance(given, TensorDictModuleBase) or "in_keys" not in fields.content:
        return given
    return TensorDictModule(given, in_keys=fields.list_of("in_keys", str), out_keys=fields.list_of("out_keys", str))


def read_weights(path: Path, expected: Mapping[str, Tensor], owner: str, *, remedy: str) -> dict[str, Tensor]:
    """The weights in a file, if they have the names and shapes of ``expected``, which may be on the meta device.

    Args:
        path: a safetensors file.
        expected: tensors by name.
        owner: what the weights belong to, in the possessive case, for error messages.
        remedy: what the user can do if the file cannot be read, for error messages.

    Raises:
        FileError: the file is damaged, holds other tensors, or some are not finite floating-point numbers.
    """
    weights = read_tensors(path, remedy=remedy)
    shapes = {key: tuple(value.shape) for key, value in expected.items()}
    held = {key: tuple(value.shape) for key, value in weights.items()}
    if differ := sorted(key for key in held.keys() | shapes.keys() if held.get(key) != shapes.get(key)):
        found = ", ".join(f"{key} {held.get(key, 'is missing')}, expected {shapes.get(key, 'none')}" for key in differ)
        raise FileError(path, f"does not hold the {owner} tensors: {found[:300]}", remedy)
    wrong = [key for key, value in weights.items() if value.is_floating_point() < expected[key].is_floating_point()]
    if wrong := wrong or non_finite(weights.items()):
        raise FileError(
            path, f"holds weights that are not finite floating-point numbers: {', '.join(wrong[:3])}", remedy
        )
    return weights


def _read_head(fields: Fields, lm: PreTrainedModel) -> Head:
    """A head on the meta device, so that sizes from a file cannot exhaust the memory."""
    name = fields.take("class", str)
    if name not in _KINDS:
        raise fields.error(f'has the unknown class {name!r} as "{fields.name}", expected one of {sorted(_KINDS)}')
    options: dict[str, Any] = {key: fields.take(key, kind) for key, kind in _OPTIONS[name].items()}
    unknown = sorted(fields.content.keys() - options.keys() - {"class", "embedding"})
    if unknown:
        raise fields.error(f'has the unknown fields {unknown} in "{fields.name}"')
    if name == "TiedQValueHead":
        which = fields.take("embedding", str)
        if which not in ("input", "output"):
            raise fields.error(f'has {which!r} as "{fields.name}.embedding", expected "input" or "output"')
        options["embedding"] = _embedding(lm, which)
    try:
        with torch.device("meta"):
            return _KINDS[name](**options)
    except (ValueError, RuntimeError, TypeError) as error:
        raise fields.error(f'describes no head as "{fields.name}" ({error})') from error


def _tie(name: str, head: nn.Module, lm: PreTrainedModel) -> dict[str, str]:
    """The embedding of the language model that a tied head reads."""
    if not isinstance(head, TiedQValueHead):
        return {}
    for which in ("output", "input"):
        embedding = _embedding(lm, which)
        if getattr(embedding, "weight", None) is head.embedding.weight:
            if is_adapter(embedding):
                raise ValueError(
                    f"Head {name!r} is tied to the {which} embedding, which adapters change: merge them first."
                )
            return {"embedding": which}
    raise ValueError(
        f"Head {name!r} is tied to an embedding that is not in the language model to save: save it with its own model."
    )


def _embedding(lm: PreTrainedModel, which: str) -> nn.Module:
    return lm.get_input_embeddings() if which == "input" else lm.get_output_embeddings()
