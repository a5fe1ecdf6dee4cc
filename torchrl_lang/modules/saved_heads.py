"""Value heads on disk: weights in ``heads.safetensors``, constructor arguments in a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_lang.modules.action_values import ActionValueHead
from torchrl_lang.modules.merging import is_adapter
from torchrl_lang.modules.prefix_embedding import PrefixEmbedding
from torchrl_lang.modules.qvalue_head import QValueHead
from torchrl_lang.modules.return_embedding import ReturnEmbedding
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead
from torchrl_lang.modules.utterance_qvalue_head import UtteranceQValueHead
from torchrl_lang.modules.value_head import ValueHead
from torchrl_lang.storage import Fields, FileError, non_finite, read_tensors

__all__ = ["HEADS", "Head", "describe_heads", "read_heads", "read_weights", "write_heads"]

HEADS = "heads.safetensors"
"""Name of the file of weights."""

Head = ActionValueHead | UtteranceQValueHead | ValueHead | ReturnEmbedding | PrefixEmbedding
"""A module that is saved beside the language model."""

_KINDS: dict[str, Callable[..., Head]] = {
    kind.__name__: kind
    for kind in (QValueHead, TiedQValueHead, UtteranceQValueHead, ValueHead, ReturnEmbedding, PrefixEmbedding)
}
_OPTIONS: dict[str, dict[str, type]] = {
    "QValueHead": {"width": int, "vocab_size": int, "n_heads": int, "kind": str, "dropout": float},
    "TiedQValueHead": {"width": int, "n_heads": int, "kind": str, "dropout": float, "detach_embedding": bool},
    "UtteranceQValueHead": {"width": int, "n_heads": int, "kind": str, "dropout": float},
    "ValueHead": {"width": int, "kind": str, "dropout": float},
    "ReturnEmbedding": {"width": int, "low": float, "high": float, "mode": str, "target": float, "n_bins": int},
    "PrefixEmbedding": {"features": int, "width": int, "hidden": int, "positions": bool},
}


def describe_heads(heads: Mapping[str, Head], lm: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """The constructor arguments of each head as JSON; ``lm`` is the model whose embedding a tied head reads."""
    for name, head in heads.items():
        if type(head).__name__ not in _KINDS:
            raise ValueError(f"Head {name!r} is a {type(head).__name__}, only {sorted(_KINDS)} can be saved.")
        if wrong := non_finite(head.named_parameters()):
            raise ValueError(f"Head {name!r} has weights that are not finite ({', '.join(wrong)}): it is not saved.")
    empty = [name for name, head in heads.items() if not head.state_dict()]
    if empty:
        raise ValueError(
            f"The heads {empty} have no weights: a loss keeps the weights of its networks in tensordicts. Build a head "
            "of the same class from head.config() and load, for instance, "
            "loss.target_qvalue_network_params.get('module').to_dict() into it."
        )
    return {
        name: {"class": type(head).__name__, **head.config(), **_tie(name, head, lm)} for name, head in heads.items()
    }


def write_heads(path: Path, heads: Mapping[str, Head]) -> None:
    """Write the weights of heads as ``<name>.<parameter>``."""
    weights = {f"{name}.{key}": value for name, head in heads.items() for key, value in head.state_dict().items()}
    save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, path)


def read_heads(path: Path, described: Fields, lm: PreTrainedModel, *, remedy: str) -> dict[str, Head]:
    """The heads that :func:`describe_heads` described, with the weights in ``path``, in evaluation mode on the CPU."""
    heads = {name: _read_head(described.object(name), lm) for name in described.content}
    expected = {f"{name}.{key}": value for name, head in heads.items() for key, value in head.state_dict().items()}
    weights = read_weights(path, expected, "heads'", remedy=remedy)
    for name, head in heads.items():
        own = {key: weights[f"{name}.{key}"].clone() for key in head.state_dict()}
        head.load_state_dict(own, assign=True)
        head.eval()
    return heads


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
    wrong = [key for key, value in weights.items() if not value.is_floating_point()]
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
