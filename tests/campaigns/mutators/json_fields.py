"""Damage to JSON files: fields dropped, renamed, of other types and values; text that is no JSON any more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.campaigns.mutators.base import Mutator, with_suffix

HUGE = (10**400, 2**63, 1e308, 10**18, 2**31)
NAMES = ("../../../etc/passwd", "/etc/passwd", "../manifest.json", "a\0b", "", "rows/../../x", "C:\\x", "x" * 5000)
WORDS = ("", "nonsense", "torch.float64", "gpt2", "__class__", "os.system", "0", "é\u202e", "true", "../x")

Place = tuple[Any, Any]
"""A container and the key or index of a value in it."""


def places(content: Any, wanted: Callable[[Any], bool] = lambda value: True) -> list[Place]:
    """Every value below ``content`` that is wanted. Long lists take part with a few items only."""
    found: list[Place] = []
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items)[:200]:
        if wanted(value):
            found.append((content, key))
        found += places(value, wanted)
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def replace_value(wanted: Callable[[Any], bool], new: Callable[[Random, Any], Any]) -> Callable[[Path, Random], str]:
    """A mutator that puts another value in place of one."""

    def apply(path: Path, random: Random) -> str:
        content = json.loads(path.read_text())
        found = places(content, wanted)
        if not found:
            return ""
        container, key = random.choice(found)
        old = container[key]
        container[key] = new(random, old)
        path.write_text(json.dumps(content))
        return f"{key!r}: {shown(old)} -> {shown(container[key])}"

    return apply


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of so many digits
        text = "an integer of many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def other_type(random: Random, value: Any) -> Any:
    """A value of another type, often one that a careless reader takes for the same."""
    choices: list[Any] = [str(value), [value], {"value": value}, 1.5, True, []]
    if is_number(value):
        choices += [str(value), bool(value), float(value) + 0.5]
    if isinstance(value, list):
        choices += [dict(enumerate(map(str, value))), "".join(map(str, value)), len(value)]
    return random.choice([choice for choice in choices if type(choice) is not type(value)])


def other_number(random: Random, value: Any) -> Any:
    return random.choice([value + 1, value - 1, value * 2 + 3, 0 if value else 7])


def drop_field(path: Path, random: Random) -> str:
    content = json.loads(path.read_text())
    container, key = random.choice(places(content))
    del container[key]
    path.write_text(json.dumps(content))
    return f"{key!r} dropped"


def rename_field(path: Path, random: Random) -> str:
    content = json.loads(path.read_text())
    container, key = random.choice([place for place in places(content) if isinstance(place[0], dict)])
    name = random.choice([key.upper(), f"{key}s", f"{key} ", f"_{key}", *NAMES[:3]])
    container[name] = container.pop(key)
    path.write_text(json.dumps(content))
    return f"{key!r} renamed to {shown(name)}"


def add_field(path: Path, random: Random) -> str:
    content = json.loads(path.read_text())
    containers = [content, *(container[key] for container, key in places(content, lambda v: isinstance(v, dict)))]
    name = random.choice(["custom_generate", "trust_remote_code", "quantization_config", "more", "__class__", "dtype"])
    random.choice(containers)[name] = random.choice([1, "x", {"load_in_4bit": True}, None])
    path.write_text(json.dumps(content))
    return f"{name!r} added"


def swap_values(path: Path, random: Random) -> str:
    content = json.loads(path.read_text())
    found = places(content, lambda value: not isinstance(value, (dict, list)))
    if len(found) < 2:
        return ""
    (left, i), (right, j) = random.sample(found, 2)
    left[i], right[j] = right[j], left[i]
    path.write_text(json.dumps(content))
    return f"{i!r} and {j!r} swapped"


def swap_siblings(path: Path, random: Random) -> str:
    """Two values of one container, which mostly are of one type."""
    content = json.loads(path.read_text())
    containers = [content, *(container[key] for container, key in places(content))]
    containers = [c for c in containers if isinstance(c, (dict, list)) and len(c) > 1]
    container = random.choice(containers)
    i, j = random.sample(list(container) if isinstance(container, dict) else range(len(container)), 2)
    container[i], container[j] = container[j], container[i]
    path.write_text(json.dumps(content))
    return f"{i!r} and {j!r} swapped"


def duplicate_key(path: Path, random: Random) -> str:
    content = json.loads(path.read_text())
    container, key = random.choice([place for place in places(content) if isinstance(place[0], dict)])
    container["<again>"] = other_type(random, container[key]) if random.random() < 0.5 else container[key]
    path.write_text(json.dumps(content).replace('"<again>"', json.dumps(key)))
    return f"{key!r} stands twice"


def other_model(path: Path, random: Random) -> str:
    """Another architecture, whose weights have other names."""
    content = json.loads(path.read_text())
    if "model_type" not in content:
        return ""
    old, content["model_type"] = content["model_type"], random.choice(["bert", "gpt_neox", "opt", "bloom", "t5"])
    path.write_text(json.dumps(content))
    return f"model_type {old!r} -> {content['model_type']!r}"


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Random], str]:
    """A mutator of the text as a whole."""

    def apply(path: Path, random: Random) -> str:
        path.write_bytes(change(path.read_bytes()))
        return name

    return apply


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "byte_order_mark": lambda text: b"\xef\xbb\xbf" + text,
    "not_utf8": lambda text: text[:-10] + b"\xff\xfe" + text[-10:],
    "utf16": lambda text: text.decode().encode("utf-16"),
    "deep_nesting": lambda text: b"[" * 200_000,
    "a_list": lambda text: b"[" + text + b"]",
    "comma": lambda text: text.rstrip()[:-1] + b",}",
    "long_text": lambda text: b'{"a": "' + b"x" * 5_000_000 + b'"}',
}

VALUES: dict[str, tuple[Callable[[Any], bool], Callable[[Random, Any], Any]]] = {
    "other_type": (lambda value: True, other_type),
    "other_number": (is_number, other_number),
    "huge_number": (is_number, lambda random, value: random.choice(HUGE)),
    "negative_number": (is_number, lambda random, value: -abs(value) - 1),
    "not_finite": (is_number, lambda random, value: random.choice([float("nan"), float("inf"), -float("inf")])),
    "other_text": (lambda value: isinstance(value, str), lambda random, value: random.choice(WORDS)),
    "file_name": (lambda value: isinstance(value, str), lambda random, value: random.choice(NAMES)),
    "flip_flag": (lambda value: isinstance(value, bool), lambda random, value: not value),
    "null": (lambda value: value is not None, lambda random, value: None),
}

JSON = [
    *(Mutator(f"json_{name}", with_suffix(".json"), replace_value(*how)) for name, how in VALUES.items()),
    *(
        Mutator(f"json_{change.__name__}", with_suffix(".json"), change)
        for change in (drop_field, rename_field, add_field, swap_values, swap_siblings, duplicate_key)
    ),
    Mutator("json_other_model", lambda path: path.name == "config.json", other_model),
    *(Mutator(f"json_{name}", with_suffix(".json"), rewrite(name, change)) for name, change in TEXTS.items()),
]
