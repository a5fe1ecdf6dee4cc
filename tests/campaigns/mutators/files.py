"""Damage to files of any kind: bits, lengths, and what stands in a file's place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

from tests.campaigns.mutators.base import Mutator


def flip_bit(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    position, bit = random.randrange(len(content)), random.randrange(8)
    content[position] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {position}"


def cut(path: Path, random: Random) -> str:
    content = path.read_bytes()
    if not content:
        return ""
    length = random.choice([len(content) - 1, len(content) // 2, random.randrange(len(content)), 8])
    path.write_bytes(content[:length])
    return f"cut from {len(content)} to {length} bytes"


def extend(path: Path, random: Random) -> str:
    more = random.choice([b"\0", b"x", b"\0" * 4096, path.read_bytes()])
    with path.open("ab") as file:
        file.write(more)
    return f"{len(more)} bytes longer"


def zero_block(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    start = random.randrange(max(1, len(content)))
    block = content[start : start + random.choice([4, 64, 4096])]
    content[start : start + len(block)] = bytes(len(block))
    path.write_bytes(content)
    return f"bytes {start} to {start + len(block)} zeroed"


def shuffle_bytes(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    random.shuffle(content)
    path.write_bytes(content)
    return "bytes shuffled"


def make_empty(path: Path, random: Random) -> str:
    path.write_bytes(b"")
    return "empty"


def delete(path: Path, random: Random) -> str:
    path.unlink()
    return "deleted"


def make_folder(path: Path, random: Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def make_pipe(path: Path, random: Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a pipe"


def link_to_nothing(path: Path, random: Random) -> str:
    path.unlink()
    path.symlink_to("nowhere")
    return "a link to nothing"


def link_to_itself(path: Path, random: Random) -> str:
    path.unlink()
    path.symlink_to(path)
    return "a link to itself"


def link_to_device(path: Path, random: Random) -> str:
    path.unlink()
    path.symlink_to("/dev/zero")
    return "a link to /dev/zero"


def link_out(path: Path, random: Random) -> str:
    """To a file of another folder, with the same content or with another's."""
    outside = path.parents[1] / f"outside-{path.name}"
    shutil.copyfile("/etc/passwd" if random.random() < 0.5 else path, outside)
    path.unlink()
    path.symlink_to(outside)
    return f"a link to {outside}"


def swap_with_sibling(path: Path, random: Random) -> str:
    """With a file of the same kind in the same folder, or in one beside it."""
    near = [other for other in path.parents[1].rglob(f"*{path.suffix}") if other != path and other.is_file()]
    if not near:
        return ""
    other = random.choice(sorted(near))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"swapped with {other.name}"


def rename_file(path: Path, random: Random) -> str:
    name = random.choice([f"{path.name}.bak", path.name.upper(), f" {path.name}"])
    path.rename(path.with_name(name))
    return f"renamed to {name!r}"


FILES = [
    Mutator(f"file_{change.__name__}", lambda path: True, change)
    for change in (
        flip_bit,
        cut,
        extend,
        zero_block,
        shuffle_bytes,
        make_empty,
        delete,
        make_folder,
        make_pipe,
        link_to_nothing,
        link_to_itself,
        link_to_device,
        link_out,
        swap_with_sibling,
        rename_file,
    )
]
