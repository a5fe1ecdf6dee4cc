"""Freeze the lower layers of a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from torchrl_lang.modules.trunk import FINAL_NORMS, Trunk, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train_top_layers(actor: nn.Module, layers: int) -> int:
    """Freeze embeddings and all but the last ``layers`` transformer blocks, in place.

    The last blocks, the final norm and an untied language-model head stay trainable; a head tied to the embeddings is
    frozen with them. ``layers=0`` freezes the whole trunk including its final norm, so only modules that read its
    states train. Parameters that were frozen before stay frozen, and modules outside the trunk, such as value heads,
    do not change.

    :func:`~torchrl_lang.transforms.frozen_copy` of such an actor copies only the trained blocks.

    Args:
        actor: a language actor, an utterance actor or a Hugging Face model; its first trunk is used.
        layers: number of trainable blocks.

    Returns:
        The number of trainable parameters of ``actor``.

    Raises:
        ValueError: there is no trunk or its blocks are not found, ``layers`` is out of range, or nothing would train.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.modules.frozen.lower_layers import train_top_layers
        >>> lm = causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16)
        >>> whole = sum(p.numel() for p in lm.parameters())
        >>> block = sum(p.numel() for p in lm.model.layers[2].parameters())
        >>> train_top_layers(language_actor(lm), 1) == block + 8 + 11 * 8  # with the final norm and the head
        True
    """
    model = _headless(actor)
    blocks = transformer_blocks(model)
    if not 0 <= layers <= len(blocks):
        raise ValueError(f"Cannot train {layers} of the model's {len(blocks)} layers: give a number up to that.")
    trains, within = set(blocks[len(blocks) - layers :].parameters()), set(blocks.parameters())
    if layers:  # the final norm by its name, because the embeddings are outside of the blocks, too
        outside = {name: p for name, p in model.named_parameters() if p not in within}
        trains |= {p for name, p in outside.items() if set(name.split(".")) & set(FINAL_NORMS)}
    frozen = set(model.parameters()) - trains
    training = sum(p.numel() for p in actor.parameters() if p.requires_grad and p not in frozen)
    if not training:
        raise ValueError(f"With layers={layers} nothing would train: the head is frozen. Train at least one block.")
    for parameter in frozen:
        parameter.requires_grad_(False)
    return training


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """The transformer blocks of a trunk or a Hugging Face model: its one list of ``num_hidden_layers`` modules.

    Raises:
        ValueError: there is no such list, or more than one.

    Examples:
        >>> from torchrl_lang.modules import causal_lm
        >>> from torchrl_lang.modules.frozen.lower_layers import transformer_blocks
        >>> lm = causal_lm(vocab_size=11, layers=2, width=8, heads=2, max_length=16)
        >>> transformer_blocks(lm) is lm.transformer.h
        True
    """
    headless = _headless(model)
    depth = headless.config.num_hidden_layers
    found = list(_lists_of(headless, depth))
    if len(found) != 1:
        raise ValueError(f"{type(headless).__name__} has {len(found)} lists of {depth} modules, expected one.")
    return found[0]


def _lists_of(module: nn.Module, length: int) -> Iterator[nn.ModuleList]:
    """Outermost lists of that length: a block may contain lists, e.g. of experts."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) == length:
            yield child
        else:
            yield from _lists_of(child, length)


def _headless(module: nn.Module) -> PreTrainedModel:
    from transformers import PreTrainedModel  # a local import, because it takes a second

    for child in unwrapped(module).modules():
        if isinstance(child, Trunk):
            return child.model
        if isinstance(child, PreTrainedModel):
            return child.base_model
    raise ValueError(f"{type(module).__name__} holds neither a Trunk nor a Hugging Face model: nothing to freeze.")
