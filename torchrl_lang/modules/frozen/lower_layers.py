"""Freeze the lower layers of a language model, and run those that policy and reference share once for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.frozen.frozen_copy import defining_weights
from torchrl_lang.modules.trunk import FINAL_NORMS, Trunk, unwrapped


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
    frozen = [parameter for block in blocks[: len(blocks) - layers] for parameter in block.parameters()]
    frozen += [parameter for _, parameter in outside_parameters(model, norm=layers == 0)]
    ids = {id(parameter) for parameter in frozen}
    training = sum(p.numel() for p in actor.parameters() if p.requires_grad and id(p) not in ids)
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
        raise ValueError(
            f"{type(headless).__name__} has no single list of its {depth} blocks, found {len(found)} such lists."
        )
    return found[0]


def outside_parameters(model: nn.Module, *, norm: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the headless model outside its blocks, by name: the embeddings and, with ``norm``, the norm."""
    headless = _headless(model)
    within = {id(parameter) for parameter in transformer_blocks(headless).parameters()}
    for name, parameter in headless.named_parameters():
        if id(parameter) not in within and (norm or not set(name.split(".")) & set(FINAL_NORMS)):
            yield name, parameter


def _lists_of(module: nn.Module, length: int) -> Iterator[nn.ModuleList]:
    """Outermost lists of that length: a block may contain lists, e.g. of experts."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) == length:
            yield child
        else:
            yield from _lists_of(child, length)


def _headless(module: nn.Module) -> PreTrainedModel:
    for child in unwrapped(module).modules():
        if isinstance(child, Trunk):
            return child.model
        if isinstance(child, PreTrainedModel):
            return child.base_model
    raise ValueError(f"{type(module).__name__} holds neither a Trunk nor a Hugging Face model: nothing to freeze.")


States = Tensor | tuple[Tensor, ...]


def shared_depth(policy: Trunk, reference: Trunk) -> int:
    """Number of leading blocks that two trunks share: frozen, with the same parameter objects.

    Zero where the embeddings are not shared, or where the blocks of a model cannot be found.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.modules.actor import split_actor
        >>> from torchrl_lang.modules.frozen.lower_layers import train_top_layers
        >>> from torchrl_lang.modules.frozen.frozen_copy import frozen_copy
        >>> from torchrl_lang.modules.frozen.lower_layers import shared_depth
        >>> actor = language_actor(causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16))
        >>> _ = train_top_layers(actor, 1)
        >>> reference = frozen_copy(actor)
        >>> shared_depth(split_actor(actor).trunk.module, split_actor(reference.actor).trunk.module)
        2
    """
    try:
        pairs = list(zip(transformer_blocks(policy), transformer_blocks(reference), strict=True))
    except ValueError:
        return 0
    first, second = (chain(outside_parameters(trunk, norm=False), _further(trunk)) for trunk in (policy, reference))
    if not _same(first, second):
        return 0
    depth = 0
    for block, twin in pairs:
        if type(block) is not type(twin) or not _same(defining_weights(block), defining_weights(twin)):
            break
        depth += 1
    return depth


class SharedLowerLayers:
    """States of policy and reference on the same rows, with the shared lower blocks run once.

    While the policy applies dropout in those blocks the reference runs them itself, without dropout.

    Args:
        policy: the policy's trunk.
        reference: the reference's, e.g. that of :func:`~torchrl_lang.transforms.frozen_copy`.
        eval_mode: returns the context for the reference, :meth:`FrozenActor.eval_mode` of a reference.

    Raises:
        ValueError: the trunks have different ``length_groups``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.modules.actor import split_actor
        >>> from torchrl_lang.modules.frozen.lower_layers import train_top_layers
        >>> from torchrl_lang.modules.frozen.frozen_copy import frozen_copy
        >>> from torchrl_lang.modules.frozen.lower_layers import SharedLowerLayers
        >>> actor = language_actor(causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16))
        >>> _ = train_top_layers(actor, 1)
        >>> frozen = frozen_copy(actor)
        >>> trunk, reference = split_actor(actor).trunk.module, split_actor(frozen.actor).trunk.module
        >>> both = SharedLowerLayers(trunk, reference, eval_mode=frozen.eval_mode)
        >>> mine, its = both.states(torch.zeros(2, 5, dtype=torch.int64))
        >>> both.depth, torch.equal(mine, its), mine.requires_grad, its.requires_grad
        (2, True, True, False)
    """

    def __init__(
        self,
        policy: Trunk,
        reference: Trunk,
        *,
        eval_mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    ) -> None:
        if policy.length_groups != reference.length_groups:
            raise ValueError("Policy and reference must have the same length_groups.")
        self.policy, self.reference, self.eval_mode = policy, reference, eval_mode

    @property
    def depth(self) -> int:
        """Number of shared blocks."""
        return shared_depth(self.policy, self.reference)

    def states(
        self, tokens: Tensor, attention_mask: Tensor | None = None, features: RowFeatures | None = None
    ) -> tuple[States, States]:
        """The outputs of both trunks for ``tokens``, int64 ``[N, T]``, and ``attention_mask``, bool ``[N, T]``.

        Trunks that read features get those of the rows. Gradients flow through the policy's only, if enabled.
        """
        depth = self.depth
        # A compiled trunk ignores that a block was replaced.
        depth = 0 if self.policy.compiled or self.reference.compiled or _applies_dropout(self.policy, depth) else depth
        with _recording(self.policy, depth) as outputs:
            mine = _run(self.policy, tokens, attention_mask, features)
        with self.eval_mode(), _replaying(self.reference, depth, outputs):
            return mine, _run(self.reference, tokens, attention_mask, features)


def _run(trunk: Trunk, tokens: Tensor, mask: Tensor | None, features: RowFeatures | None) -> States:
    return trunk(tokens, mask, *(() if features is None or trunk.features is None else features))


class _RecordedBlock(nn.Module):
    """Replaces a block: returns the recorded outputs one after the other, whatever its input."""

    def __init__(self, block: nn.Module, outputs: list[Any]) -> None:
        super().__init__()
        vars(self)["block"] = block  # no submodule: only for the attributes that a model reads from its blocks
        self.recorded = iter(outputs)

    def forward(self, *_: Any, **__: Any) -> Any:
        return next(self.recorded)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["block"], name)


@contextmanager
def _recording(trunk: Trunk, depth: int) -> Iterator[list[Any]]:
    """Collect what the last of ``depth`` blocks returns, once for each run of the model."""
    outputs: list[Any] = []
    last = transformer_blocks(trunk)[depth - 1] if depth else nn.Identity()
    with last.register_forward_hook(lambda _, args, output: outputs.append(_detached(output))):
        yield outputs


@contextmanager
def _replaying(trunk: Trunk, depth: int, outputs: list[Any]) -> Iterator[None]:
    """Let the first ``depth`` blocks return what was recorded instead of computing it."""
    blocks = transformer_blocks(trunk) if depth else nn.ModuleList()
    originals = list(blocks[:depth])
    try:
        for index, block in enumerate(originals):
            blocks[index] = _RecordedBlock(block, outputs)
        yield
    finally:
        for index, block in enumerate(originals):
            blocks[index] = block


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return tuple(_detached(part) for part in output) if isinstance(output, tuple) else output


def _further(trunk: Trunk) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the embeddings of returns and features, which the first block reads."""
    return (item for item in trunk.named_parameters() if item[0].startswith(("returns.", "features.")))


def _same(weights: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor]]) -> bool:
    mine, its = dict(weights), dict(others)
    return mine.keys() == its.keys() and all(its[name] is w and not w.requires_grad for name, w in mine.items())


def _applies_dropout(trunk: Trunk, depth: int) -> bool:
    """Whether the first ``depth`` blocks, or the modules below them, would apply dropout now."""
    if not depth or not trunk.training:
        return False
    above = {id(module) for block in transformer_blocks(trunk)[depth:] for module in block.modules()}
    return applies_dropout(module for module in trunk.modules() if id(module) not in above)


def applies_dropout(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules, without those inside it, would apply dropout now."""
    training = [module for module in modules if module.training]
    # Attention keeps its rate as a number, as in self.attention_dropout; so do routers that jitter.
    rates = [rate for module in training for name, rate in vars(module).items() if "drop" in name or "jitter" in name]
    rates += [module.p for module in training if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
