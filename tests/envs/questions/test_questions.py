"""Twenty questions and guess my city: the tables, the rules, the optima against all plans, and the players."""

import json
import random
from functools import cache
from importlib.resources import files
from itertools import chain
from types import SimpleNamespace

import pytest

from tests.envs.helpers import in_letters, play
from tests.recipes.commands import from_own_notes
from torchrl_lang._files import FileError
from torchrl_lang.envs import check_language_env
from torchrl_lang.envs.questions import BestQuestions, MyopicPlayer, Questions, QuestionTable
from torchrl_lang.envs.questions.table import plain
from torchrl_lang.envs.questions.task import QuestionsTask
from torchrl_lang.recipes.tasks.questions import QuestionsData

SUBJECTS = ("things", "cities")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_facts_are_answers_and_phrases_are_clear(subject):
    """Each fact is an answer to one question and no thing has two answers; no two questions or answers sound alike."""
    content = json.loads((files("torchrl_lang.envs.questions") / f"{subject}.json").read_text())
    answers = {key: list(question.get("answers", {"yes": 0})) for key, question in content["questions"].items()}
    facts = {word: key for key, words in answers.items() for word in ([key] if words == ["yes"] else words)}
    for group in content["groups"]:
        for name, more in group["things"].items():
            about = [facts[word] for word in [*group["have"].split(), *more.split()]]
            assert len(set(about)) == len(about), name
            assert "kitchen" not in about or "house" in about, name
    table = QuestionTable(subject)
    for ways in (chain(*table.questions), *(chain(*question) for question in table.answers)):
        ways = [plain(way) for way in ways]
        assert len(set(ways)) == len(ways)
    for question in table.sets:
        assert sum(question) == table.all
    assert all(table.read(f"Is it {name}?") == ("guess", place) for place, name in enumerate(table.names))
    assert all(table.read(way) == ("ask", i) for i, ways in enumerate(table.questions) for way in ways)


def test_facts_that_a_person_can_check():
    things, cities = QuestionTable("things"), QuestionTable("cities")

    def reply(table, question, name):
        number = table.names.index(name)
        return table.answers[table.read(question)[1]][table.answer(table.read(question)[1], number)][0]

    fly = [reply(things, "Can it fly?", name) for name in ("an owl", "a penguin", "an airplane")]
    assert fly == ["Yes.", "No.", "Yes."]
    assert reply(cities, "What language do you speak there?", "Montreal") == "We speak French."
    assert reply(cities, "On which side do you drive?", "Tokyo") == "We drive on the left."
    assert reply(cities, "On which side do you drive?", "Paris") == "We drive on the right."
    assert reply(cities, "Is it south of the equator?", "Lima") == "Yes."
    assert things.names[things.read("scissors")[1]] == "a pair of scissors"
    assert cities.names[cities.read("Is it São Paulo?")[1]] == "Sao Paulo"
    assert things.names[things.read("Is it bigger than a cat?")[1]] == "a cat"


def test_the_rules():
    game = Questions(QuestionTable("things"))
    assert "20" in game.reset(233 + 15)
    assert game.table.names[game.thing] == "a cow" == game.table.names[15]  # the seeds play the things in turn
    assert game.step("IS IT ALIVE")[0].startswith(("Yes", "That is right"))
    assert game.step("A dog, perhaps? Or a cow?")[1:] == (-1.0, False)  # the first thing that it names
    assert game.step("Is it nice?")[1:] == (-1.0, False)
    game.reset(15)
    assert game.step("I say cow.")[1:] == (0.0, True)
    game.reset(15)
    turns = [game.step("")[1:] for _ in range(20)]
    assert turns == [(-1.0, False)] * 19 + [(-1.0, True)]
    game.reset(15)
    assert [game.step(text)[1:] for text in [""] * 19 + ["cow"]][-1] == (0.0, True)


def brute_force(facts, things, answers):
    """The least cost of all plans."""

    @cache
    def cost(left):
        if len(left) < 2:
            return 0
        guesses = [len(left) - 1 + cost(left - {thing}) for thing in left]
        divided = [[frozenset(i for i in left if of[i] == value) for value in range(answers)] for of in facts]
        return min(guesses + [len(left) + sum(map(cost, parts)) for parts in divided if left not in parts])

    return cost(things)


@pytest.mark.parametrize("answers", [2, 3])
def test_the_fewest_questions_against_all_plans(answers):
    rng = random.Random(answers)
    for things in (1, 2, 3, 5, 7, 8, 9):
        for _ in range(12):
            facts = [[rng.randrange(answers) for _ in range(things)] for _ in range(rng.randrange(1, 5))]
            sets = [[sum(1 << i for i in range(things) if of[i] == value) for value in range(answers)] for of in facts]
            names = [str(number) for number in range(things)]
            table = SimpleNamespace(names=names, sets=sets, questions=[["?"]] * len(sets), all=(1 << things) - 1)

            assert BestQuestions(table).cost(table.all) == brute_force(facts, frozenset(range(things)), answers)


@pytest.mark.parametrize(("subject", "optimum", "myopic"), [("things", -7.464, -7.700), ("cities", -3.464, -3.600)])
def test_players_reach_what_they_should(subject, optimum, myopic):
    table = QuestionTable(subject)
    best, game, seeds = BestQuestions(table), Questions(table), range(len(table.names))
    played = [play(game, best, seed) for seed in seeds]
    assert sum(total for _, total in played) / len(played) == pytest.approx(best.mean_return)
    assert best.mean_return == pytest.approx(optimum, abs=5e-4)
    assert max(len(texts) // 2 for texts, _ in played) <= 12

    skills = [MyopicPlayer(table, skill=skill) for skill in (1.0, 0.7, 0.4, 0.0)]
    found = [sum(play(game, player, seed)[1] for seed in seeds) / len(seeds) for player in skills]
    assert found[0] == pytest.approx(myopic, abs=0.06)  # guesses of equal things are drawn
    assert best.mean_return > found[0] > found[1] > found[2] > found[3] == -20


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_language_task_in_which_all_texts_are_words(subject):
    task = QuestionsTask(subject)

    def make(n=4):
        return task.env(n, seed=0)

    check_language_env(make(), make, utterances=["Is it alive?", "Is it Paris?", "none"])
    letters = in_letters(lambda: Questions(QuestionTable(subject)), row_length=900, action_length=60)
    assert letters.rollout(2)["tokens"].shape[-1] == 900
    played = {name: task.evaluate(task.player(name, 0).policy, games=30, seed=0) for name in task.baselines}
    best, records = played["optimal"]
    assert best.win_rate == 1
    assert abs(best.metrics["regret"]) < 4 * best.return_error
    assert set(best.metrics) == set(task.metric_meanings)
    assert (records.returns == 1 - records.turns.float()).all()
    assert played["random"][0].win_rate == 0
    letters = {task.tokenizer().symbols[token] for token in records.rows["tokens"].unique().tolist()}
    assert {symbol for symbol in letters if len(symbol) == 1 and symbol.isalpha()} <= {*"IAas"}  # of "Let's", and alone


def test_the_data_and_notes(tmp_path):
    task = QuestionsTask("cities")
    options = QuestionsData(out=tmp_path, subject="cities", skill=0.5)
    found = task.evaluate(task.behavior_policy(options).policy, games=200, seed=0)[0]
    assert found.mean_return == pytest.approx(-6.2, abs=4 * found.return_error)
    assert options.notes()["skill"] == 0.5
    assert from_own_notes(task) == task
    with pytest.raises(FileError):
        from_own_notes(task, subject="people")
