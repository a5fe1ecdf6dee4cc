"""Damage of every kind: each mutator changes one file, or the files around it, and nothing where no place fits."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

HUGE = (10**400, 2**63, 1e308, 10**18, 2**31)
NAMES = ("../../../etc/passwd", "/etc/passwd", "../manifest.json", "a\0b", "", "rows/../../x", "C:\\x", "x" * 5000)
WORDS = ("", "nonsense", "torch.float64", "gpt2", "__class__", "os.system", "0", "é\u202e", "true", "../x")

Apply = Callable[[Path, Random], object]
Place = tuple[Any, Any]
"""A container and the key or index of a value in it."""


@dataclass(frozen=True)
class Mutator:
    """One way to damage a file, and whether a file of a path can be damaged so."""

    name: str
    fits: Callable[[Path], bool]
    apply: Apply


class Nothing(Exception):
    """No place of the file fits."""


MUTATORS: dict[str, Mutator] = {}


def anything(path: Path) -> bool:
    return True


def add(name: str, apply: Apply, fits: Callable[[Path], bool] = anything) -> None:
    MUTATORS[name] = Mutator(name, fits, apply)


def one(random: Random, items: Any) -> Any:
    if not items:
        raise Nothing
    return random.choice(items)


def suffix(name: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix == name


# -- JSON: fields dropped, renamed, of other types and values; text that is no JSON any more --------------------------


def places(content: Any, wanted: Callable[[Any], bool] = lambda value: True) -> list[Place]:
    """Every value below ``content`` that is wanted. Long lists take part with a few items only."""
    found: list[Place] = []
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items)[:200]:
        if wanted(value):
            found.append((content, key))
        found += places(value, wanted)
    return found


def fields(content: Any) -> list[Place]:
    return [place for place in places(content) if isinstance(place[0], dict)]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def other_type(random: Random, value: Any) -> Any:
    """A value of another type, often one that a careless reader takes for the same."""
    choices: list[Any] = [str(value), [value], {"value": value}, 1.5, True, []]
    if is_number(value):
        choices += [str(value), bool(value), float(value) + 0.5]
    if isinstance(value, list):
        choices += [dict(enumerate(map(str, value))), "".join(map(str, value)), len(value)]
    return random.choice([choice for choice in choices if type(choice) is not type(value)])


def add_json(name: str, change: Callable[[Any, Random], object], fits: Callable[[Path], bool] | None = None) -> None:
    """A mutator of the content, or of the text where it returns one."""

    def apply(path: Path, random: Random) -> None:
        content = json.loads(path.read_text())
        text = change(content, random)
        path.write_text(text if isinstance(text, str) else json.dumps(content))

    add(f"json_{name}", apply, fits or suffix(".json"))


def put(wanted: Callable[[Any], bool], new: Callable[[Random, Any], Any]) -> Callable[[Any, Random], None]:
    """Puts another value in place of one."""

    def change(content: Any, random: Random) -> None:
        container, key = one(random, places(content, wanted))
        container[key] = new(random, container[key])

    return change


def drop_field(content: Any, random: Random) -> None:
    container, key = one(random, places(content))
    del container[key]


def rename_field(content: Any, random: Random) -> None:
    container, key = one(random, fields(content))
    container[random.choice([key.upper(), f"{key}s", f"{key} ", f"_{key}", *NAMES[:3]])] = container.pop(key)


def add_field(content: Any, random: Random) -> None:
    containers = [content, *(container[key] for container, key in places(content, lambda v: isinstance(v, dict)))]
    name = random.choice(["custom_generate", "trust_remote_code", "quantization_config", "more", "__class__", "dtype"])
    random.choice(containers)[name] = random.choice([1, "x", {"load_in_4bit": True}, None])


def swap_values(content: Any, random: Random) -> None:
    found = places(content, lambda value: not isinstance(value, (dict, list)))
    (left, i), (right, j) = random.sample(found, 2) if len(found) > 1 else one(random, ())
    left[i], right[j] = right[j], left[i]


def swap_siblings(content: Any, random: Random) -> None:
    """Two values of one container, which mostly are of one type."""
    containers = [content, *(container[key] for container, key in places(content))]
    container = one(random, [c for c in containers if isinstance(c, (dict, list)) and len(c) > 1])
    i, j = random.sample(list(container) if isinstance(container, dict) else range(len(container)), 2)
    container[i], container[j] = container[j], container[i]


def duplicate_key(content: Any, random: Random) -> str:
    container, key = one(random, fields(content))
    container["<again>"] = other_type(random, container[key]) if random.random() < 0.5 else container[key]
    return json.dumps(content).replace('"<again>"', json.dumps(key))


def other_model(content: Any, random: Random) -> None:
    """Another architecture, whose weights have other names."""
    if "model_type" not in content:
        raise Nothing
    content["model_type"] = random.choice(["bert", "gpt_neox", "opt", "bloom", "t5"])


VALUES: dict[str, tuple[Callable[[Any], bool], Callable[[Random, Any], Any]]] = {
    "other_type": (lambda value: True, other_type),
    "other_number": (
        is_number,
        lambda random, value: random.choice([value + 1, value - 1, value * 2 + 3, 0 if value else 7]),
    ),
    "huge_number": (is_number, lambda random, value: random.choice(HUGE)),
    "negative_number": (is_number, lambda random, value: -abs(value) - 1),
    "not_finite": (is_number, lambda random, value: random.choice([float("nan"), float("inf"), -float("inf")])),
    "other_text": (lambda value: isinstance(value, str), lambda random, value: random.choice(WORDS)),
    "file_name": (lambda value: isinstance(value, str), lambda random, value: random.choice(NAMES)),
    "flip_flag": (lambda value: isinstance(value, bool), lambda random, value: not value),
    "null": (lambda value: value is not None, lambda random, value: None),
}
TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "byte_order_mark": lambda text: b"\xef\xbb\xbf" + text,
    "not_utf8": lambda text: text[:-10] + b"\xff\xfe" + text[-10:],
    "utf16": lambda text: text.decode().encode("utf-16"),
    "deep_nesting": lambda text: b"[" * 200_000,
    "a_list": lambda text: b"[" + text + b"]",
    "comma": lambda text: text.rstrip()[:-1] + b",}",
    "long_text": lambda text: b'{"a": "' + b"x" * 5_000_000 + b'"}',
}


def add_bytes(name: str, change: Callable[[bytes, Random], bytes], fits: Callable[[Path], bool] = anything) -> None:
    add(name, lambda path, random: path.write_bytes(change(path.read_bytes(), random)), fits)


for _name, _how in VALUES.items():
    add_json(_name, put(*_how))
for _change in (drop_field, rename_field, add_field, swap_values, swap_siblings, duplicate_key):
    add_json(_change.__name__, _change)
add_json("other_model", other_model, lambda path: path.name == "config.json")
for _name, _text in TEXTS.items():
    add_bytes(f"json_{_name}", lambda text, random, change=_text: change(text), suffix(".json"))  # type: ignore[misc]


# -- files of any kind: bits, lengths, and what stands in a file's place ----------------------------------------------


def flip_bit(content: bytes, random: Random) -> bytes:
    position, bit = one(random, range(len(content))), random.randrange(8)
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def cut(content: bytes, random: Random) -> bytes:
    if not content:
        raise Nothing
    return content[: random.choice([len(content) - 1, len(content) // 2, random.randrange(len(content)), 8])]


def zero_block(content: bytes, random: Random) -> bytes:
    start = random.randrange(max(1, len(content)))
    end = start + random.choice([4, 64, 4096])
    return content[:start] + bytes(len(content[start:end])) + content[end:]


def link_out(path: Path, random: Random) -> None:
    """To a file of another folder, with the same content or with another's."""
    outside = path.parents[1] / f"outside-{path.name}"
    shutil.copyfile("/etc/passwd" if random.random() < 0.5 else path, outside)
    path.unlink()
    path.symlink_to(outside)


def swap_with_sibling(path: Path, random: Random) -> None:
    """With a file of the same kind in the same folder, or in one beside it."""
    near = [other for other in path.parents[1].rglob(f"*{path.suffix}") if other != path and other.is_file()]
    other = one(random, sorted(near))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def rename_file(path: Path, random: Random) -> None:
    path.rename(path.with_name(random.choice([f"{path.name}.bak", path.name.upper(), f" {path.name}"])))


add_bytes("file_flip_bit", flip_bit)
add_bytes("file_cut", cut)
add_bytes("file_extend", lambda old, random: old + random.choice([b"\0", b"x", b"\0" * 4096, old]))
add_bytes("file_zero_block", zero_block)
add_bytes("file_shuffle_bytes", lambda old, random: bytes(random.sample(old, len(old))))
add_bytes("file_make_empty", lambda old, random: b"")
add("file_delete", lambda path, random: path.unlink())
INSTEAD: dict[str, Callable[[Path], object]] = {
    "make_folder": Path.mkdir,
    "make_pipe": os.mkfifo,
    "link_to_nothing": lambda path: path.symlink_to("nowhere"),
    "link_to_itself": lambda path: path.symlink_to(path),
    "link_to_device": lambda path: path.symlink_to("/dev/zero"),
}
for _name, _make in INSTEAD.items():
    add(f"file_{_name}", lambda path, random, make=_make: (path.unlink(), make(path)))  # type: ignore[misc]
for _file in (link_out, swap_with_sibling, rename_file):
    add(f"file_{_file.__name__}", _file)


# -- entries of a dataset, every file's length kept -------------------------------------------------------------------


def add_items(name: str, dtype: str, files: tuple[str, ...], change: Callable[[Any, Random], Any]) -> None:
    """A mutator of the items of files whose names contain a text; it changes them, or returns others."""

    def apply(path: Path, random: Random) -> None:
        items = np.fromfile(path, dtype or ("u1" if "mask" in path.name or "ated" in path.name else "i4"))
        changed = change(items, random)
        (items if changed is None else changed.astype(items.dtype)).tofile(path)

    add(f"rows_{name}", apply, lambda path: any(part in path.name for part in files))


def swap(items: Any, random: Random) -> None:
    i, j = random.sample(range(len(items)), 2)
    items[i], items[j] = items[j], items[i]


def poke(*values: float) -> Callable[[Any, Random], None]:
    """Writes one of ``values`` over one item."""

    def change(items: Any, random: Random) -> None:
        items[random.randrange(len(items))] = random.choice(values)

    return change


TOKENS, REWARD, FLAGS = ("tokens.memmap",), ("reward.memmap",), ("mask.memmap", "ated.memmap")
add_items("token_poked", "i4", TOKENS, poke(0, 1, 2, 3, 4, 5))
add_items("token_out_of_range", "i4", TOKENS, poke(-1, 35, 1000, 2**31 - 1, -(2**31)))
add_items("tokens_zeroed", "i4", TOKENS, lambda items, random: items * 0)
add_items("reward_poked", "f4", REWARD, poke(1.0, -3.5, 1e30))
add_items("reward_not_finite", "f4", REWARD, poke(np.nan, np.inf))
add_items("rewards_zeroed", "f4", REWARD, lambda items, random: items * 0)
add_items("rewards_negated", "f4", REWARD, lambda items, random: -items)
add_items("flag_of_two", "u1", FLAGS, poke(2, 255, 128))
add_items("flags_inverted", "u1", FLAGS, lambda items, random: 1 - items)
add_items("items_swapped", "", (".memmap",), swap)


# -- CSV files: rows and cells ----------------------------------------------------------------------------------------

Cells = list[list[str]]


def add_table(name: str, change: Callable[[Cells, Random], object]) -> None:
    """A mutator of a table, its header included."""

    def apply(path: Path, random: Random) -> None:
        cells = [line.split(",") for line in path.read_text().splitlines()]
        change(cells, random)
        path.write_text("".join(",".join(row) + "\n" for row in cells))

    add(f"table_{name}", apply, suffix(".csv"))


def set_cell(*values: str) -> Callable[[Cells, Random], None]:
    def change(cells: Cells, random: Random) -> None:
        row = random.choice(cells[1:])
        row[random.randrange(len(row))] = random.choice(values)

    return change


def rename_column(cells: Cells, random: Random) -> None:
    cells[0][random.randrange(len(cells[0]))] = random.choice(["", "step", "other"])


add_table("cell_of_text", set_cell("nonsense", "1e", '"', "0x10", "\u0661"))
add_table("cell_not_finite", set_cell("nan", "inf"))
add_table("cell_huge", set_cell("9" * 5000, "1e999", "-1"))
add_table("drop_cell", lambda cells, random: random.choice(cells).pop())
add_table("add_cell", lambda cells, random: random.choice(cells).append("1"))
add_table("drop_row", lambda cells, random: cells.pop(random.randrange(len(cells))))
add_table("repeat_row", lambda cells, random: cells.insert(random.randrange(len(cells)), random.choice(cells)[:]))
add_table("swap_rows", swap)
add_table("rename_column", rename_column)


# -- safetensors files that stay whole: names, types, shapes and numbers ----------------------------------------------

Header = dict[str, Any]


def tensors(header: Header) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def of_tensors(change: Callable[[Header, bytearray, Random], object]) -> Apply:
    """A mutator of the header and of the numbers behind it."""

    def apply(path: Path, random: Random) -> None:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
        change(header, data, random)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    return apply


def drop_tensor(header: Header, data: bytearray, random: Random) -> None:
    """Its numbers go, too, so that the file is whole."""
    start, end = header.pop(one(random, tensors(header)))["data_offsets"]
    del data[start:end]
    for other in tensors(header):
        if header[other]["data_offsets"][0] >= end:
            header[other]["data_offsets"] = [offset - (end - start) for offset in header[other]["data_offsets"]]


def rename_tensor(header: Header, data: bytearray, random: Random) -> None:
    name = one(random, tensors(header))
    new = random.choice([f"{name}x", name.upper(), name.replace(".", "_"), f"base_layer.{name}"])
    header[new] = header.pop(name)


def swap_tensors(header: Header, data: bytearray, random: Random) -> None:
    left = one(random, tensors(header))
    alike = [name for name in tensors(header) if all(header[name][k] == header[left][k] for k in ("dtype", "shape"))]
    right = one(random, [name for name in alike if name != left])
    header[left], header[right] = header[right], header[left]


def pick_number(header: Header, random: Random) -> tuple[int, int]:
    """Where the numbers of a float32 tensor lie."""
    entry = header[one(random, [name for name in tensors(header) if header[name]["dtype"] == "F32"])]
    start, end = entry["data_offsets"]
    return (start, end) if start < end else one(random, ())


def change_entry(change: Callable[[Any, Random], object]) -> Callable[[Header, bytearray, Random], None]:
    return lambda header, data, random: change(header[one(random, tensors(header))], random)


SIZES = {"F32": ["I32", "U32"], "I64": ["F64", "U64"], "U8": ["I8", "BOOL"], "BOOL": ["U8", "I8"]}


def offsets(start: int, end: int) -> list[list[int]]:
    return [[end, start], [start, end + 4], [0, 2**62], [start + 4, end + 4], [-4, end]]


def shapes(old: list[int]) -> list[list[float]]:
    return [[*old, 1], old[::-1], [1, *old], [2**40, 2**40], [-1], [1.5], old[:-1]]


def set_weight(new: Callable[[Random], float]) -> Callable[[Header, bytearray, Random], None]:
    def change(header: Header, data: bytearray, random: Random) -> None:
        start, end = pick_number(header, random)
        where = start + 4 * random.randrange((end - start) // 4)
        data[where : where + 4] = struct.pack("<f", new(random))

    return change


TENSORS: dict[str, Callable[[Header, bytearray, Random], None]] = {
    "drop_tensor": drop_tensor,
    "rename_tensor": rename_tensor,
    "swap_tensors": swap_tensors,
    "change_dtype": change_entry(lambda e, r: e.update(dtype=r.choice(SIZES.get(e["dtype"], ["F16"]) + ["NONE"]))),
    "change_shape": change_entry(lambda e, r: e.update(shape=r.choice(shapes(e["shape"])))),
    "change_offsets": change_entry(lambda e, r: e.update(data_offsets=r.choice(offsets(*e["data_offsets"])))),
    "nan_weight": set_weight(lambda random: random.choice([float("nan"), float("inf"), -float("inf")])),
    "change_weight": set_weight(lambda random: random.gauss(0, 1)),
}


for _name, _tensor in TENSORS.items():
    add(f"tensor_{_name}", of_tensors(_tensor), suffix(".safetensors"))
add_bytes(
    "tensor_huge_header",
    lambda raw, random: struct.pack("<Q", random.choice([2**63, 10**9, 0, len(raw)])) + raw[8:],
    suffix(".safetensors"),
)


# -- files that are added, among them such as would run code; whole folders that are damaged --------------------------

TRAP = "TORCHRL_LANG_TRAP"
"""The environment variable that names the file which foreign code leaves where it ran."""

CODE = f"""
import os, pathlib
pathlib.Path(os.environ["{TRAP}"]).touch()
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
class Config(GPT2Config): model_type = "foreign"
class Model(GPT2LMHeadModel): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(*args, **kwargs): pass
"""


class Trap:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (CODE,)


def foreign_code(path: Path, random: Random) -> None:
    """A module beside the file, which ``auto_map`` names; in a model's config also under an unknown model type."""
    (path.parent / "foreign.py").write_text(CODE)
    (path.parent / "custom_generate").mkdir(exist_ok=True)
    (path.parent / "custom_generate" / "generate.py").write_text(CODE)
    content = json.loads(path.read_text())
    content["auto_map"] = {"AutoConfig": "foreign.Config", "AutoTokenizer": ["foreign.Tokenizer"] * 2}
    content["auto_map"] |= dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "foreign.Model")
    if "model_type" in content and random.random() < 0.7:
        content["model_type"] = "foreign"
    path.write_text(json.dumps(content))


def pickled_instead(path: Path, random: Random) -> None:
    """A pickle under the names that older libraries look for; the file itself goes or stays."""
    for name in ("pytorch_model.bin", "model.pt", f"{path.stem}.pkl", "data.pt"):
        (path.parent / name).write_bytes(pickle.dumps(Trap()))
    if random.random() < 0.7:
        path.unlink()


def stray_file(path: Path, random: Random) -> None:
    name = random.choice(["notes.txt", ".hidden", "extra.memmap", "extra.json", "model.safetensors.index.json"])
    (path.parent / name).write_text("{}")


def stray_folder(path: Path, random: Random) -> None:
    """A folder that looks like a newer one of its kind."""
    name = random.choice(["step-000000999", "step-x", "model.old", ".writing-x", "rows2", "step-000000002-1"])
    (path.parent / name).mkdir(exist_ok=True)
    (path.parents[1] / name).mkdir(exist_ok=True)


def copied_folder(path: Path, random: Random) -> None:
    """The file's folder a second time under a name that comes later."""
    name = random.choice([f"{path.parent.name}-1", "step-000000999", f"{path.parent.name}9"])
    shutil.copytree(path.parent, path.parent.with_name(name), dirs_exist_ok=True)


def emptied_folder(path: Path, random: Random) -> None:
    for other in path.parent.iterdir():
        if other.is_file():
            other.unlink()


def folder_is_file(path: Path, random: Random) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("no folder")


add("tree_foreign_code", foreign_code, suffix(".json"))
for _tree in (pickled_instead, stray_file, stray_folder, copied_folder, emptied_folder, folder_is_file):
    add(f"tree_{_tree.__name__}", _tree)
add("tree_pickled_content", lambda path, random: path.write_bytes(pickle.dumps(Trap())))
add("tree_deleted_folder", lambda path, random: shutil.rmtree(path.parent))
add("tree_other_time", lambda path, random: os.utime(path, (10**9, 10**9)))  # only the clock: nothing is damaged
