"""Both formats of histories are trained, saved and played by the same commands."""

import pytest
import torch

from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation import evaluate_in_context
from torchrl_lang.algorithm_distillation.language.template import parse_steps
from torchrl_lang.modules import load_language_model
from torchrl_lang.recipes.algorithm_distillation.formats import FORMATS, LanguageFormat, Wording
from torchrl_lang.recipes.algorithm_distillation.histories import TaskFamily, history_windows
from torchrl_lang.recipes.algorithm_distillation.options import AD, Distill, FormatOptions

TINY = {"width": 8, "heads": 2, "layers": 1, "context_episodes": 2, "streams": 2}
FAMILIES = [
    {"env": "dark_room", "size": 4, "episode_length": 6},
    {"env": "dark_key_door", "size": 3, "episode_length": 9, "tasks": 12, "history_episodes": 30, "skip_episodes": 5},
    {"env": "bandit", "arms": 3, "episode_length": 4, "tasks": 12},
]
LONGEST = {"compact": 4, "spelled": 8, "sparse": 6}
"""Tokens of the longest step in a room: ``r1 c1 up 1/``, ``at r1 c1 go up got 1 stopped``, and so on."""


def language(template="compact", **family):
    return FormatOptions(format="language", template=template, **{**FAMILIES[0], **family}, **TINY)


def new(options):
    torch.manual_seed(0)
    return FORMATS[options.format].new(options, TaskFamily(options))


def windows_of(options, batch_size=8):
    length = options.context_episodes * TaskFamily(options).episode_length
    return history_windows(options, length=length, batch_size=batch_size, seed=0).sample()


@pytest.mark.parametrize(("template", "family"), [*zip(LONGEST, FAMILIES, strict=True)])
def test_rows_are_the_steps_without_loss(template, family):
    options = language(template, **family)
    format, windows = new(options), windows_of(options)
    rows = format.batch(windows)
    assert rows["tokens"].shape[1] <= format.model.config.max_position_embeddings
    for row, steps in zip(rows, windows, strict=True):
        text = format.rows.tokenizer.decode(row["tokens"][row["attention_mask"]][1:].tolist())
        found = parse_steps(text, format.rows.template)
        for key in ("observation", "action", "reward", "done", "terminated"):
            assert found[key].flatten().tolist() == steps[key].flatten().tolist()
        actions = row["tokens"][row["agent_mask"]].tolist()
        assert format.rows.tokenizer.decode(actions).split() == [format.wording.action[a] for a in steps["action"]]


def test_lengths_of_rows():
    # 12 steps of two episodes; of a compact step the end is part of the reward's word.
    assert Wording(template="compact", observation=(("a",), ("b",)), action=("c",)).tokens(12, 2) == 1 + 12 * 4
    assert Wording(template="spelled", observation=(("a",), ("b",)), action=("c",)).tokens(12, 2) == 1 + 12 * 7 + 2
    assert Wording(template="sparse", observation=(("a",), ("b",)), action=("c",)).tokens(12, 2) == 1 + 12 * 5 + 2


@pytest.mark.parametrize("template", LONGEST)
def test_a_context_holds_the_episodes_of_a_window(template):
    options = language(template)
    format = new(options)
    policy, env = format.policy(1.0), TaskFamily(options).env(TaskFamily(options).split.test, 2)
    evaluate_in_context(env, policy, episodes=4)
    found = [parse_steps(policy.text(stream), policy.template) for stream in range(env.batch_size.numel())]
    episodes = {int(steps["done"].sum()) for steps in found}
    assert episodes == {2}
    assert all(len(steps) % 6 == 0 for steps in found)


@pytest.mark.parametrize("format", ["rl", "language"])
def test_a_saved_model_plays_the_same(format, tmp_path):
    options = FormatOptions(format=format, **FAMILIES[0], **TINY)
    saved, family = new(options), TaskFamily(options)
    saved.save(tmp_path / "model", {"steps": 3})
    loaded = FORMATS[format].load(tmp_path / "model")
    env = family.env(family.split.test, 4)
    played = [evaluate_in_context(env, each.policy(1.0), episodes=4) for each in (saved, loaded)]
    assert torch.equal(*played)
    env = family.env(family.split.test, 1)
    most_likely = [evaluate_in_context(env, loaded.policy(0.0), episodes=3, seed=seed) for seed in (0, 1)]
    assert torch.equal(*most_likely), "nothing is sampled at temperature 0"


def test_a_prompt_is_an_episode_that_was_truncated():
    options = language()
    policy, windows = new(options).policy(1.0), windows_of(options, batch_size=3)[:, :3]
    policy.begin(3)
    policy.prompt(windows)
    for stream, steps in enumerate(windows):
        found = parse_steps(policy.text(stream), policy.template)
        assert found["observation"].tolist() == steps["observation"].tolist()
        assert found["done"].flatten().tolist() == [False, False, True]
        assert not found["terminated"].any()
    with pytest.raises(RuntimeError, match="must follow begin"):
        policy.prompt(windows)
    policy.begin(2)
    with pytest.raises(ValueError, match=r"A prompt has shape \[2, L\], got \[3, 3\]"):
        policy.prompt(windows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "compact"}, "template=compact is for text: give --format language, or no template."),
        ({"format": "language", "reward_weight": 1.0}, "reward_weight are for the RL format's loss: leave them out."),
    ],
)
def test_options_that_do_not_go_together(options, message, tmp_path):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        AD(out=tmp_path, **options)
    assert str(raised.value) == message


def test_defaults_of_the_language_format(tmp_path):
    given = {"out": tmp_path, "format": "language"}
    assert AD.from_given(given).optimizer == "muon"
    assert AD.from_given({**given, "optimizer": "adamw"}).optimizer == "adamw"
    assert AD.from_given({"out": tmp_path}).optimizer == "adamw"
    steps = [Distill.from_given({"quick": True, **more}).steps for more in ({}, {"format": "language"}, {"steps": 7})]
    assert steps == [400, 1000, 7]


def test_a_folder_with_another_model_is_refused(tmp_path):
    format = new(language())
    format.save(tmp_path / "model", {})
    tokens = torch.arange(4)[None]
    loaded = load_language_model(tmp_path / "model")
    assert torch.equal(loaded.lm(tokens).logits, format.model.eval()(tokens).logits)
    format.model.save_pretrained(tmp_path / "plain")
    with pytest.raises(FileError, match="holds no model of histories"):
        LanguageFormat.load(tmp_path / "plain")
    format.wording = Wording(template="compact", observation=(("a",), ("b",)), action=("c",))
    format.save(tmp_path / "other", {})
    with pytest.raises(FileError, match=r"describes \d+ words"):
        LanguageFormat.load(tmp_path / "other")
