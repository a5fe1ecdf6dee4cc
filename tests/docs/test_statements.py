"""Numbers and lists that pages state, computed."""

import ast
import inspect
import re
import tomllib
from dataclasses import fields

from tests.docs.pages import DOCS, blocks
from torchrl_lang.envs import WordleEnv
from torchrl_lang.objectives import BCLoss
from torchrl_lang.objectives.base import RowLoss
from torchrl_lang.recipes.algorithms import ALGORITHMS, ILQL
from torchrl_lang.recipes.algorithms.online import OnlineOptions

README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
ONLINE = {name for name, kind in ALGORITHMS.items() if issubclass(kind, OnlineOptions)}
OFFLINE = ALGORITHMS.keys() - ONLINE


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def literals(text, name):
    """The value of ``name = literal`` in a page."""
    return ast.literal_eval(re.search(rf"^{name} = (\{{.*?\}})$", text, re.M | re.S)[1])


def test_the_readme_names_every_extra():
    extras = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.search(r"\(extras: (.*?)\)", README)[1]
    assert set(re.findall("`(.*?)`", named)) == extras.keys()


def test_numbers_of_offline_algorithms():
    assert f"`bc`, `ilql` and {len(OFFLINE) - 2} others" in page("guides/command_line.md")
    table = page("guides/offline_algorithms.md")
    assert not [name for name in OFFLINE if f"`{name}`" not in table]
    tutorial = page("tutorials/offline_family.md")
    trained = set(literals(tutorial, "policies"))
    left_out = set(re.findall("`(.*?)`", re.search(r"\(all but (.*?)\)", tutorial)[1]))
    assert len(trained) == 12
    assert "trains twelve" in tutorial
    assert trained | left_out == OFFLINE


def test_the_online_guide_names_every_online_algorithm():
    assert not [name for name in ONLINE if not re.search(rf"`(train )?{re.escape(name)}`", page("guides/online.md"))]


def test_the_size_of_the_consistent_words():
    env = WordleEnv(consistent="packed", batch_size=[1], seed=0)
    packed, words = env.reset()["consistent"], len(env.words)
    assert f"({packed.shape[-1]} for the {words:,} shipped)" in WordleEnv.__doc__


def test_the_settings_to_begin_with_are_those_of_the_command_line():
    text = page("guides/offline.md")
    defaults = {field.name: field.default for field in fields(ILQL)}
    for name, value in (literals(text, "settings") | literals(text, "clocks")).items():
        assert defaults[name] == value, name
    stated = re.search(r"`--transition-weight (.*?)`, `--tau (.*?)`, `--beta (.*?)`", text).groups()
    assert [float(one) for one in stated] == [defaults[name] for name in ("transition_weight", "tau", "beta")]
    assert "0 in the losses, 1 on the command line" in text
    for loss in (BCLoss, RowLoss):
        assert inspect.signature(loss).parameters["transition_weight"].default == 0
    assert any("ILQLLoss(actor, q, v, **settings, **clocks" in str(block) for block in blocks(text))
