"""Offline training on a JSONL file of dialogues, without an environment: from the file to an answer of the model."""

import csv
import io
import json
from importlib.metadata import version

import pytest
import torch
import yaml

from tests.data.chat_templates import EXACT, FIRST_PROMPT_ONLY, tokenizer_of
from tests.recipes.commands import refused
from torchrl_lang.__main__ import main
from torchrl_lang._files import file_digest, folder_lock, read_tensors
from torchrl_lang.data import dataset_from_jsonl, load_dataset
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
from torchrl_lang.envs.visual_dialogue.prepare import run_questioner
from torchrl_lang.envs.visual_dialogue.protocol import RequestError
from torchrl_lang.evaluation.plots import read_columns
from torchrl_lang.modules import TiedQValueHead, load_agent
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.offline import longest_utterance
from torchrl_lang.recipes.tasks import find_task
from torchrl_lang.text import CharTokenizer
from torchrl_lang.text.tokenizers import UNKNOWN

MODEL = ["--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "8", "--eval-games", "4"]
TINY = [*MODEL, "--steps", "4", "--eval-every", "2", "--log-every", "1"]
NAME = "tests.recipes.games:length_env"


def dialogue(number):
    first, second = (("big", "tiny"), ("hot", "cold"), ("in", "out"))[number % 3]
    turns = [{"role": "user", "text": first}, {"role": "assistant", "text": second, "reward": number % 2}]
    if number % 5 == 0:
        turns += [{"role": "user", "text": "why"}, {"role": "assistant", "text": "so", "reward": -1}]
    return {"turns": turns}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "dialogues.jsonl").write_text("\n".join(json.dumps(dialogue(number)) for number in range(40)))
    return folder


@pytest.fixture(scope="module")
def runs(home):
    """BC on the dialogues, and ILQL from its model."""
    assert main(train("bc", home, home / "bc")) == 0
    assert main(train("ilql", home, home / "ilql", "--start", str(home / "bc"))) == 0
    return home


def train(recipe, home, out, *more):
    return ["train", recipe, "--data", str(home / "dialogues.jsonl"), "--out", str(out), *TINY, *more]


def test_rows_have_the_characters_of_the_file_and_the_length_of_the_longest_dialogue(runs):
    dataset = load_dataset(runs / "bc" / "data")
    assert len(dataset) == 40
    assert [turn.text for turn in dataset.episode(5).turns] == ["in", "out", "why", "so"]
    letters = {letter for number in range(40) for turn in dialogue(number)["turns"] for letter in turn["text"]}
    assert set(dataset.tokenizer.symbols) - set(CharTokenizer.DEFAULT_CONTROL.values()) == letters | {UNKNOWN}
    row = dataset[0]["attention_mask"]
    assert row.all()  # "big", "tiny", "why", "so" with their ends and the two ends of the row
    assert len(row) == 18
    assert longest_utterance(dataset.rows) == 5


def test_rows_are_written_until_the_run_has_a_checkpoint_and_then_kept(home, tmp_path, monkeypatch):
    """A run that failed after its rows were written may begin with other rows."""
    run, written = tmp_path / "run", []

    def counted(*args, **options):
        written.append(args)
        return dataset_from_jsonl(*args, **options)

    monkeypatch.setattr("torchrl_lang.recipes.datasets.dataset_from_jsonl", counted)
    assert main(train("bc", home, run, "--kind", "nonsense", "--row-length", "30")) == 2
    assert load_dataset(run / "data").rows["tokens"].shape == (40, 30)
    assert main(train("bc", home, run)) == 0
    assert load_dataset(run / "data").rows["tokens"].shape == (40, 18)
    assert main(train("bc", home, run)) == 0
    assert len(written) == 2


def test_a_resumed_run_needs_the_same_dialogues(home, tmp_path, capsys):
    file, run = tmp_path / "dialogues.jsonl", tmp_path / "run"
    file.write_text((home / "dialogues.jsonl").read_text())
    assert main(train("bc", tmp_path, run)) == 0
    file.write_text(file.read_text().replace("tiny", "tidy"))
    assert f"{run} holds a run with other options: dialogues" in refused(capsys, *train("bc", tmp_path, run))
    assert "--row-length was None and is 30" in refused(capsys, *train("bc", home, run, "--row-length", "30"))
    file.rename(tmp_path / "moved.jsonl")
    assert "dialogues.jsonl: No such file" in refused(capsys, *train("bc", tmp_path, run))
    assert main([*train("bc", home, run), "--data", str(home / "dialogues.jsonl")]) == 0  # the same content elsewhere


def test_an_earlier_checkpoint_with_a_lower_loss_becomes_the_model(home, tmp_path, monkeypatch, capsys):
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr("torchrl_lang.recipes.models.imitation_loss", lambda *_: next(losses))
    assert main(train("bc", home, tmp_path / "run", "--steps", "6")) == 0
    assert "run: best at step 4, held-out loss 1.000; model in" in capsys.readouterr().out
    saved = read_tensors(tmp_path / "run" / "model" / "model.safetensors", remedy="")["transformer.wpe.weight"]
    same = {}
    for step in (4, 6):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:09d}"
        tensors = read_tensors(folder / "tensors.safetensors", remedy="").values()
        same[step] = any(torch.equal(saved, tensor) for tensor in tensors if tensor.shape == saved.shape)
    assert same == {4: True, 6: False}


def test_values_are_reported_and_the_next_steps_are_shown(runs, capsys, tmp_path):
    report = json.loads((runs / "ilql" / "values.json").read_text())
    assert report["tokens"] == int(load_dataset(runs / "ilql" / "data")[36:]["agent_mask"].sum())
    assert "qvalue_fit" in read_columns(runs / "ilql" / "log.csv")
    assert main(train("ilql", runs, runs / "ilql", "--start", str(runs / "bc"))) == 0
    shown = capsys.readouterr().out
    code = [line.strip() for line in shown.splitlines() if line.startswith("    ")]
    assert len(code) == 4
    space = {}
    exec("\n".join(code), space)
    assert isinstance(space["run"].reply("big", beta=2.0), str)
    assert isinstance(space["run"].reply(), str)
    assert len(space["run"].reply("big", "tiny", "why", method="sample", seed=0)) <= 5


def test_bc_learns_the_dialogues(home, tmp_path):
    options = ["--steps", "60", "--lr", "0.02", "--eval-every", "60", "--transition-weight", "0"]
    assert main(train("bc", home, tmp_path / "run", *options)) == 0
    run = load_run(tmp_path / "run")
    assert [run.reply(text) for text in ("big", "hot", "in")] == ["tiny", "cold", "out"]
    assert run.reply("big", "tiny", "why") == "so"
    assert run.replies([["in"], ["big", "tiny", "why"], ["hot"]]) == ["out", "so", "cold"]
    ask = run_questioner(tmp_path / "run")
    assert ask([Dialogue("in"), Dialogue("big", (Round("tiny", "why"),))]) == ["out", "so"]
    assert len(ask([Dialogue("in"), Dialogue("ß", (Round("tiny", "😀"),))])) == 2
    for unreadable in (Dialogue("big", (Round("ß", "why"),)), Dialogue("in" * 400)):  # what it cannot ask; too long
        with pytest.raises(RequestError, match="too long for the questioner, or has a character") as error:
            ask([Dialogue("in"), unreadable])
        assert error.value.status == 422  # a client does not send it again


def test_a_dataset_that_names_no_task_is_trained_on_in_the_same_way(home, tmp_path):
    tokenizer = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz")
    dataset_from_jsonl(home / "dialogues.jsonl", tmp_path / "data", tokenizer, 20)
    assert main(["train", "bc", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *TINY]) == 0
    assert load_run(tmp_path / "run").action_length == 6  # one more than the longest


def test_an_environment_evaluates_a_policy_trained_on_dialogues(home, tmp_path, capsys):
    given = ["--task", NAME, "--option", "row_length=26"]
    run, task = tmp_path / "run", find_task(NAME)
    assert main(train("bc", home, run, *given)) == 0
    assert "best at step 2, mean return" in capsys.readouterr().out.replace("step 4", "step 2")
    assert load_dataset(run / "data").rows["tokens"].shape == (40, 26)
    notes = json.loads((run / "config.json").read_text())["notes"]
    assert notes == {"task": NAME, "options": {"row_length": 26}}
    assert main(["evaluate", "--run", str(run), "--games", "4", "--task", NAME]) == 0
    # Its weights and tokenizer can be used without its task.
    alone = ["--start", str(run), "--row-length", "26", "--lr", "1e-12", "--weight-decay", "0"]
    assert main(train("bc", home, tmp_path / "bc", *alone)) == 0
    before, after = (
        load_run(folder, kind).model.lm.state_dict() for folder, kind in ((run, task), (tmp_path / "bc", None))
    )
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


def test_a_run_on_dialogues_plays_in_an_environment_that_is_given(runs, tmp_path, capsys):
    given = ["--task", NAME, "--option", "row_length=18"]
    for call in (["evaluate", "--run"], ["train", "ppo", "--out", tmp_path / "ppo", "--start"]):
        assert "has no games: give an environment with --task package.module:" in refused(capsys, *call, runs / "bc")
    assert main(["evaluate", "--run", str(runs / "bc"), "--games", "4", *given]) == 0
    assert main(["play", NAME, "--watch", str(runs / "bc"), "--games", "1", *given[2:]]) == 0
    online = ["--iterations", "1", "--games", "4", "--turns", "1", "--batch-size", "4", "--eval-games", "4"]
    ppo = ["train", "ppo", "--start", str(runs / "bc"), "--out", str(tmp_path / "ppo"), *online, "--value-warmup", "0"]
    assert main([*ppo, *given]) == 0
    other = ["--task", "torchrl_lang.envs.games:CorridorEnv"]
    assert "was made with another tokenizer" in refused(capsys, "evaluate", "--run", runs / "bc", *other)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder with a tokenizer that has a chat template, as Hugging Face writes it."""
    folder = tmp_path_factory.mktemp("chat_model")
    tokenizer_of(EXACT["chatml"]).save_pretrained(folder)
    return folder


def test_rows_of_a_hugging_face_tokenizer_and_of_its_chat_template(home, tmp_path, chat_model):
    tokenizer = ["--tokenizer", str(chat_model)]
    plain, chat = tmp_path / "plain", tmp_path / "chat"
    assert main(train("bc", home, plain, *tokenizer)) == 0
    assert main(train("bc", home, chat, *tokenizer, "--system", "Short.")) == 0
    row = load_dataset(plain / "data")[1]
    text = load_dataset(plain / "data").tokenizer.decode(row["tokens"][row["attention_mask"]])
    assert text == "<s>hot</s>cold</a></eod>"
    row = load_dataset(chat / "data")[1]
    assert load_dataset(chat / "data").tokenizer.decode(row["tokens"][row["attention_mask"]]) == (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nhot<|im_end|>\n<|im_start|>assistant\ncold<|im_end|>"
    )
    assert isinstance(load_run(chat).reply("hot", method="sample", seed=0), str)


def test_values_are_tied_to_the_embedding_of_a_large_vocabulary(home, tmp_path, chat_model, monkeypatch):
    """And the saved run has them."""
    monkeypatch.setattr("torchrl_lang.modules.heads.LARGE_VOCABULARY", 100)
    assert main(train("ilql", home, tmp_path / "run", "--tokenizer", str(chat_model), "--chat", "--steps", "2")) == 0
    run = load_run(tmp_path / "run")
    assert isinstance(run.model.heads["target_qvalue"], TiedQValueHead)
    assert isinstance(run.reply("hot", beta=2.0), str)


def test_the_reward_of_messages_has_a_key_of_its_own(tmp_path, chat_model):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    lines = [json.dumps({"messages": messages, "score": score}) for score in (2.0, 1)]
    (tmp_path / "dialogues.jsonl").write_text("\n".join(lines))
    options = ["--tokenizer", str(chat_model), "--chat", "--reward", "score"]
    assert main(train("bc", tmp_path, tmp_path / "run", *options)) == 0
    dataset = load_dataset(tmp_path / "run" / "data")
    assert [dataset.episode(index).total_reward for index in range(2)] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--chat"], "--chat and --system need the tokenizer of a chat model: give --tokenizer NAME"),
        (["--pretrained", "gpt2"], "--pretrained gpt2 needs its own: give --tokenizer gpt2"),
        (["--tokenizer", "no/such/folder"], "There is no readable tokenizer in 'no/such/folder'"),
        (
            ["--row-length", "12"],
            "holds at least 5 bad lines (lines 1, 11, 16: the dialogue has 18 tokens, row_length is 12",
        ),
        (["--option", "a=1"], "is for an environment factory: give it as --task package.module:name"),
    ],
)
def test_options_that_do_not_fit(home, more, message, capsys, tmp_path):
    assert message in refused(capsys, *train("bc", home, tmp_path / "run", *more))


def test_options_of_dialogues_are_refused_for_a_dataset(runs, tmp_path, capsys):
    call = ["train", "bc", "--data", runs / "bc" / "data", "--out", tmp_path / "run", *TINY]
    message = "is no file of dialogues: leave out --row-length, --on-error"
    assert message in refused(capsys, *call, "--row-length", "30", "--on-error", "skip")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds no dialogue: give one JSON object per line"),
        ('{"turns": [{"role": "user", "text": "hi"}]}', "has no turn of the agent to learn from"),
        ('{"turns": [{"role": "agent", "text": "a\\ud800"}]}', "line 1: '\\ud800' at position 1 of 'a\\ud800' is not"),
    ],
)
def test_files_without_dialogues_to_learn_from(lines, message, tmp_path, capsys):
    (tmp_path / "dialogues.jsonl").write_text(lines)
    assert message in refused(capsys, *train("bc", tmp_path, tmp_path / "run"))


def test_bad_lines_can_be_left_out(home, tmp_path, recwarn):
    text = (home / "dialogues.jsonl").read_text() + "\n{}\n" + json.dumps({**dialogue(1), "id": 7})
    (tmp_path / "dialogues.jsonl").write_text(text)
    assert main(train("bc", tmp_path, tmp_path / "run", "--on-error", "skip", "--ignore", "id")) == 0
    assert len(load_dataset(tmp_path / "run" / "data")) == 41
    assert sum("1 bad line" in str(warning.message) for warning in recwarn) == 1


def test_only_one_process_writes_the_rows_of_a_run(home, tmp_path, capsys):
    with folder_lock(tmp_path / "run", "trains"):
        assert "Another process trains in" in refused(capsys, *train("bc", home, tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


def test_chai_keeps_its_last_checkpoint(home, runs, tmp_path, capsys):
    """Its language model does not change, and a low loss of its values is no sign of a good policy."""
    assert main(train("chai", home, tmp_path / "run", "--start", str(runs / "bc"))) == 0
    assert "run: last checkpoint at step 4, as no figure was measured to choose by" in capsys.readouterr().out


def chat_lines(number):
    asked = [{"role": "system", "content": "Short."}, {"role": "user", "content": dialogue(number)["turns"][0]["text"]}]
    return json.dumps({"messages": [*asked, {"role": "assistant", "content": "yes", "reward": number % 2}]})


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory, chat_model):
    """ILQL on messages with a system prompt each."""
    home = tmp_path_factory.mktemp("chat_run")
    (home / "dialogues.jsonl").write_text("\n".join(map(chat_lines, range(20))))
    model = ["--tokenizer", str(chat_model), "--chat", "--beta", "2", "--row-length", "120"]
    assert main(train("ilql", home, home / "run", *model)) == 0
    return home / "run"


ASKED = [{"role": "system", "content": "Other."}, {"role": "user", "content": "big"}]


def test_a_run_becomes_an_agent_that_decodes_as_its_algorithm_does(chat_run, tmp_path, capsys):
    run = load_run(chat_run)
    assert main(["export", str(chat_run), "--out", str(tmp_path / "agent")]) == 0
    assert f"{tmp_path / 'agent'}: agent, with a card in README.md" in capsys.readouterr().out
    agent = load_agent(run.save_agent(tmp_path / "strong", beta=4.0, method="sample", temperature=0.5))
    decoder = agent.policy.decoder
    assert (decoder.rule.guidance.beta, agent.policy.method, decoder.rule.temperature) == (4.0, "sample", 0.5)
    agent = load_agent(tmp_path / "agent")
    assert (agent.policy.decoder.rule.guidance.beta, agent.policy.method) == (2.0, "greedy")
    answers = agent.replies([ASKED, ASKED[1:]])
    assert answers == run.replies([ASKED, ASKED[1:]], beta=2.0)
    assert run.reply(messages=ASKED, beta=2.0) == answers[0]
    assert answers[0]["role"] == "assistant"


def test_the_card_says_how_an_agent_was_trained_and_evaluated(chat_run, tmp_path):
    folder = load_run(chat_run).save_agent(tmp_path / "agent")
    text = (folder / "README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert (header["library_name"], header["pipeline_tag"]) == ("torchrl_lang", "text-generation")
    (result,) = header["model-index"][0]["results"]
    (metric,) = result["metrics"]
    with open(chat_run / "log.csv", newline="") as file:
        losses = [float(row["held_out_loss"]) for row in csv.DictReader(file) if row["held_out_loss"]]
    assert metric["value"] == pytest.approx(min(losses), abs=1e-4)
    digest = file_digest(chat_run.parent / "dialogues.jsonl")
    assert f"dialogues.jsonl: 20 episodes, SHA-256 of the file {digest}." in text
    command = next(line for line in text.splitlines() if line.startswith("python -m torchrl_lang train"))
    for words in ("train ilql", "--data dialogues.jsonl", "--out run", "--chat", "--beta 2.0", "--row-length 120"):
        assert words in command
    assert str(chat_run.parent) not in text
    assert "--tau" not in command  # as by default
    for package in ("torchrl_lang", "torch", "torchrl", "tensordict", "transformers"):
        assert f"{package} {version(package)}" in text
    assert "agent.reply([{" in text
    assert "An answer has at most" in text


def test_the_card_has_the_commands_of_the_runs_before(chat_run, chat_model, tmp_path):
    home = chat_run.parent
    more = ("--tokenizer", str(chat_model), "--chat", "--row-length", "120")
    assert main(train("ilql", home, home / "next", "--start", str(chat_run), *more)) == 0
    text = (load_run(home / "next").save_agent(tmp_path / "agent") / "README.md").read_text()
    commands = [line for line in text.splitlines() if line.startswith("python -m torchrl_lang train")]
    assert [" --start run" in command for command in commands] == [False, True]
    assert [" --out run " in command for command in commands] == [True, False]


def test_a_chat_with_a_run_and_with_an_agent_in_the_terminal(chat_run, tmp_path, capsys, monkeypatch):
    said = load_run(chat_run).reply(ASKED, beta=2.0)["content"]
    agent = load_run(chat_run).save_agent(tmp_path / "agent")
    capsys.readouterr()
    for folder in (chat_run, agent):
        monkeypatch.setattr("sys.stdin", io.StringIO("/system Other.\nbig\n"))
        assert main(["chat", str(folder)]) == 0
        assert capsys.readouterr().out.replace("> ", "").splitlines()[1:] == ["A new dialogue.", *said.splitlines()]
    assert "There is no model in" in refused(capsys, "chat", tmp_path / "nothing")
    monkeypatch.setattr("sys.stdin", None)
    assert "Standard input is closed" in refused(capsys, "chat", chat_run)


def test_a_thinking_model_learns_each_utterance_in_a_row_of_its_own(home, tmp_path):
    tokenizer_of(FIRST_PROMPT_ONLY["qwen3"]).save_pretrained(tmp_path / "model")
    assert main(train("ilql", home, tmp_path / "run", "--tokenizer", str(tmp_path / "model"), "--chat")) == 0
    dataset = load_dataset(tmp_path / "run" / "data")
    assert len(dataset) == 40 + 8  # every fifth dialogue has two utterances
    assert dataset[:3]["token_reward"].sum(-1).tolist() == [-1.0, -1.0, 1.0]
    run = load_run(tmp_path / "run")
    said = run.reply(
        [{"role": "user", "content": "big"}, {"role": "assistant", "content": "<think>a</think>b"}, ASKED[1]]
    )
    assert said == run.reply([{"role": "user", "content": "big"}, {"role": "assistant", "content": "b"}, ASKED[1]])


def test_policies_that_no_agent_holds(home, runs, tmp_path, capsys):
    for recipe, more in (("dt", []), ("chai", ["--start", str(runs / "bc")])):
        assert main(train(recipe, home, tmp_path / recipe, *more)) == 0
        found = refused(capsys, "export", tmp_path / recipe, "--out", tmp_path / "agent")
        assert "An agent holds an UtteranceActor, not a" in found
    assert main(["export", str(tmp_path / "chai"), "--out", str(tmp_path / "agent"), "--method", "greedy"]) == 0


def test_preferences_are_learned_from_pairs_of_their_own_line(tmp_path, capsys):
    """Each prompt stands in many lines; "tiny" is the better answer in one and the worse one in another."""
    told = [("big", "tiny", "big"), ("hot", "cold", "hot"), ("big", "so", "tiny")]
    lines = [dict(zip(("prompt", "chosen", "rejected"), told[number % 3], strict=True)) for number in range(60)]
    (tmp_path / "dialogues.jsonl").write_text("\n".join(map(json.dumps, lines)))
    more = ["--lr", "1e-2", "--steps", "40", "--eval-every", "20", "--held-out", "12"]
    assert main(train("bc", tmp_path, tmp_path / "bc")) == 0
    for recipe in ("dpo", "kto"):
        assert main(train(recipe, tmp_path, tmp_path / recipe, "--start", str(tmp_path / "bc"), *more)) == 0
    printed = capsys.readouterr().out
    assert "dpo: 54 pairs of 108 episodes" in printed  # twelve are held out
    assert "kto: 54 of 108 episodes are desirable, above 0.5" in printed
    assert read_columns(tmp_path / "dpo" / "log.csv")["held_out_accuracy"][-1] == 1
    assert read_columns(tmp_path / "kto" / "log.csv")["held_out_margin"][-1] > 0.1
