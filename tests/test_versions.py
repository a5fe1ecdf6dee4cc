"""The ranges of `pyproject.toml`: they admit what is tested, and the classifiers list the Pythons that are tried."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_range_admits_the_pinned_version():
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pins = {name.lower(): version for name, version in pins.items()}
    asked = [Requirement(one) for one in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])]
    pinned = [one for one in asked if one.name.lower() in pins]
    assert {Requirement(one).name for one in PROJECT["dependencies"]} <= {one.name for one in pinned}
    assert [str(one) for one in pinned if pins[one.name.lower()] not in one.specifier] == []


def test_lower_bounds_can_be_pinned():
    """`make test-versions` reads them from these lines."""
    assert [one for one in PROJECT["dependencies"] if not re.fullmatch(r"[a-z]+>=[\d.]+(,<[\d.]+)?", one)] == []


def test_the_pythons_of_the_classifiers_are_those_that_are_tried():
    listed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={listed[0]}"
    assert re.search(r"minor in ([\d ]+);", (ROOT / "Makefile").read_text())[1].split() == [v[2:] for v in listed]
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow.partition("matrix:")[2]) == listed
