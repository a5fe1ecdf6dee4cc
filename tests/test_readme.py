"""The README is a landing page: its code runs as it stands, its links lead somewhere, and it is short."""

import re
from pathlib import Path

from docs import performance_page
from tests.docs.pages import run

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_the_code_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space, printed = run(TEXT, "README.md")
    assert space["returns"].mean() > -2.5
    assert printed[0].startswith("dataset -7.")


def test_every_link_leads_to_a_file():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert len(links) > 20
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_it_is_short_and_has_the_three_commands_at_the_top():
    lines = TEXT.splitlines()
    assert len(lines) <= 120
    assert {"make demo", "make test", "make demo-chat"} <= {line.split("#")[0].strip() for line in lines[:15]}


def test_its_figures_of_speed_are_those_of_the_records():
    page = performance_page.page()
    for recorded, shown in (
        ("| 4 layers, 128 wide: ILQL / plain step | 0.59", "costs 0.59 of"),
        ("| AgileRL's ILQL step / ours | 3.8", "step 3.8 times"),
        ("| BC step, all weights: ours / SFTTrainer | 0.2", "BC step takes a fifth of the time of TRL's"),
        ("| acting, 64 games, turn 4: ours / generate | 6.5", "act 6.5 times as fast as `generate`"),
    ):
        assert (recorded in page, shown in TEXT) == (True, True)
