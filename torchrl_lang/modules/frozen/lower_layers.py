"""Runs the lower layers that policy and reference share once for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang.modules.eval_mode import applies_dropout
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.freezing import outside_parameters, transformer_blocks
from torchrl_lang.modules.frozen.fingerprint import defining_weights
from torchrl_lang.modules.trunk import Trunk

__all__ = ["SharedLowerLayers", "shared_depth"]

States = Tensor | tuple[Tensor, ...]


def shared_depth(policy: Trunk, reference: Trunk) -> int:
    """Number of leading blocks that two trunks share: frozen, with the same parameter objects.

    Zero where the embeddings are not shared, or where the blocks of a model cannot be found.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor, split_actor
        >>> from torchrl_lang.modules.freezing import train_top_layers
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
    if not _same(*(outside_parameters(trunk, norm=False) for trunk in (policy, reference))):
        return 0
    if not _same(*(_further_parameters(trunk) for trunk in (policy, reference))):
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
        >>> from torchrl_lang.modules import causal_lm, language_actor, split_actor
        >>> from torchrl_lang.modules.freezing import train_top_layers
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
            raise ValueError(
                f"Policy and reference must split their batches alike, got length_groups={policy.length_groups} and "
                f"{reference.length_groups}."
            )
        self.policy = policy
        self.reference = reference
        self.eval_mode = eval_mode

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
    if not depth:
        yield outputs
        return
    block = transformer_blocks(trunk)[depth - 1]
    with block.register_forward_hook(lambda _, args, output: outputs.append(_detached(output))):
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


def _further_parameters(trunk: Trunk) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of the embeddings of returns and features, which the first block reads."""
    parts = {"returns": trunk.returns, "features": trunk.features}
    return (
        (f"{name}.{key}", p) for name, part in parts.items() if part is not None for key, p in part.named_parameters()
    )


def _same(weights: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor]]) -> bool:
    mine, its = dict(weights), dict(others)
    return mine.keys() == its.keys() and all(its[name] is w and not w.requires_grad for name, w in mine.items())


def _applies_dropout(trunk: Trunk, depth: int) -> bool:
    """Whether the first ``depth`` blocks, or the modules below them, would apply dropout now."""
    if not depth or not trunk.training:
        return False
    above = {id(module) for block in transformer_blocks(trunk)[depth:] for module in block.modules()}
    return applies_dropout(module for module in trunk.modules() if id(module) not in above)
