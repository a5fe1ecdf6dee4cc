"""Damage to safetensors files that keeps them whole: names, types, shapes and numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.campaigns.mutators.base import Mutator, with_suffix

Header = dict[str, Any]


def edit(change: Callable[[Header, bytearray, Random], str]) -> Callable[[Path, Random], str]:
    """A mutator of the header and of the numbers behind it."""

    def apply(path: Path, random: Random) -> str:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
        if not [name for name in header if name != "__metadata__"]:
            return ""
        done = change(header, data, random)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return done

    return apply


def pick(header: Header, random: Random, *dtypes: str) -> str:
    """The name of a tensor, of one of ``dtypes`` where there is one."""
    names = [name for name in header if name != "__metadata__"]
    return random.choice([name for name in names if header[name]["dtype"] in dtypes] or names)


def pick_floats(header: Header, random: Random) -> tuple[str, int, int]:
    """A float32 tensor and where its numbers lie; they end where they start if there is no such tensor."""
    name = pick(header, random, "F32")
    start, end = header[name]["data_offsets"]
    return name, start, end if header[name]["dtype"] == "F32" else start


def drop_tensor(header: Header, data: bytearray, random: Random) -> str:
    """Its numbers go, too, so that the file is whole."""
    name = pick(header, random)
    start, end = header.pop(name)["data_offsets"]
    del data[start:end]
    for entry in (entry for key, entry in header.items() if key != "__metadata__"):
        if entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - start) for offset in entry["data_offsets"]]
    return f"{name!r} dropped"


def rename_tensor(header: Header, data: bytearray, random: Random) -> str:
    name = pick(header, random)
    new = random.choice([f"{name}x", name.upper(), name.replace(".", "_"), f"base_layer.{name}"])
    header[new] = header.pop(name)
    return f"{name!r} renamed to {new!r}"


def swap_tensors(header: Header, data: bytearray, random: Random) -> str:
    left = pick(header, random)
    same = [name for name in header if name not in (left, "__metadata__") and _alike(header[name], header[left])]
    if not same:
        return ""
    right = random.choice(same)
    header[left], header[right] = header[right], header[left]
    return f"{left!r} and {right!r} swapped"


def _alike(left: Header, right: Header) -> bool:
    return (left["dtype"], left["shape"]) == (right["dtype"], right["shape"])


def change_dtype(header: Header, data: bytearray, random: Random) -> str:
    name = pick(header, random)
    sizes = {"F32": ["I32", "U32"], "I64": ["F64", "U64"], "U8": ["I8", "BOOL"], "BOOL": ["U8", "I8"]}
    entry = header[name]
    new = random.choice(sizes.get(entry["dtype"], ["F16"]) + ["NONE"])
    header[name] = {**entry, "dtype": new}
    return f"{name!r} is {new}"


def change_shape(header: Header, data: bytearray, random: Random) -> str:
    name = pick(header, random)
    shape = header[name]["shape"]
    new = random.choice([[*shape, 1], list(reversed(shape)), [1, *shape], [2**40, 2**40], [-1], [1.5], shape[:-1]])
    header[name] = {**header[name], "shape": new}
    return f"{name!r} has shape {new}"


def change_offsets(header: Header, data: bytearray, random: Random) -> str:
    name = pick(header, random)
    start, end = header[name]["data_offsets"]
    new = random.choice([[end, start], [start, end + 4], [0, 2**62], [start + 4, end + 4], [-4, end]])
    header[name] = {**header[name], "data_offsets": new}
    return f"{name!r} lies at {new}"


def nan_weight(header: Header, data: bytearray, random: Random) -> str:
    name, start, end = pick_floats(header, random)
    if start == end:
        return ""
    value = random.choice([float("nan"), float("inf"), -float("inf")])
    data[start : start + 4] = struct.pack("<f", value)
    return f"{name!r} holds {value}"


def change_weight(header: Header, data: bytearray, random: Random) -> str:
    name, start, end = pick_floats(header, random)
    if start == end:
        return ""
    where = start + 4 * random.randrange((end - start) // 4)
    data[where : where + 4] = struct.pack("<f", random.gauss(0, 1))
    return f"one number of {name!r} replaced"


def huge_header(path: Path, random: Random) -> str:
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", random.choice([2**63, 10**9, 0, len(raw)])) + raw[8:])
    return "the header's length is wrong"


TENSORS = [
    *(
        Mutator(f"tensor_{change.__name__}", with_suffix(".safetensors"), edit(change))
        for change in (
            drop_tensor,
            rename_tensor,
            swap_tensors,
            change_dtype,
            change_shape,
            change_offsets,
            nan_weight,
            change_weight,
        )
    ),
    Mutator("tensor_huge_header", with_suffix(".safetensors"), huge_header),
]
