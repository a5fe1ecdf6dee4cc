"""Fingerprints of weights: equal bytes give equal fingerprints, in any process and on any device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # elements copied to the CPU at a time


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
    """BLAKE2b-256 (RFC 7693) over name, dtype, shape and bytes of each tensor, in the given order.

    Any dtype, device and memory layout; about a second for each gigabyte of weights.

    Args:
        tensors: names and tensors, e.g. ``module.named_parameters()``.

    Returns:
        uint8 ``[32]`` on the CPU.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.frozen.fingerprint import fingerprint
        >>> weight = torch.arange(6.0).reshape(2, 3)
        >>> same = fingerprint([("weight", weight.T.contiguous().T)])
        >>> torch.equal(fingerprint([("weight", weight)]), same), torch.equal(fingerprint([("bias", weight)]), same)
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in tensors:
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode() + b"\n")
        flat = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().reshape(-1)
        for chunk in flat.split(_CHUNK):
            digest.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def defining_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of ``module`` by name, each once.

    Non-persistent buffers are left out: they follow from the configuration.
    """
    yield from module.named_parameters()
    derived = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set
    }
    for name, buffer in module.named_buffers():
        if name not in derived:
            yield name, buffer
