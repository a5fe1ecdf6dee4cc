"""Guesser and answerer: masks against plain loops, the same numbers in any batch, greedy decoding, files, learning."""

import re

import pytest
import torch

from tests.sealed import reseal
from torchrl_lang._files import FileError
from torchrl_lang.envs.visual_dialogue import (
    LocalDialogueModels,
    VisualDialogues,
    generate_visual_dialogues,
    train_dialogue_models,
)
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
from torchrl_lang.envs.visual_dialogue.generate import ATTRIBUTES
from torchrl_lang.envs.visual_dialogue.models import TrainedModels, rank_percentile
from torchrl_lang.envs.visual_dialogue.networks import (
    BEGIN,
    END,
    LONGEST_ANSWER,
    PAD,
    UNKNOWN,
    DialogueBatch,
    Whitening,
    WordIndex,
    join_words,
    split_words,
)
from torchrl_lang.envs.visual_dialogue.rewards import is_yes_no

SIZE = 16
DIALOGUES = [
    Dialogue("a dog at the beach", (Round("is it red?", "no"), Round("what colour is it?", "white"))),
    Dialogue("a cat"),
    Dialogue("there is a very small horse in the picture", (Round("is it sunny?", "i can't tell"),) * 5),
    Dialogue("", (Round("", ""),)),
]
QUESTIONS = ["is it sunny?", "what colour is it?", "red?", "a zebra or what is it in the picture?"]


@pytest.fixture(scope="module")
def words():
    return WordIndex.of_texts([each.caption + " ".join(sum(each.rounds, ())) for each in DIALOGUES])


@pytest.fixture
def saved(words):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        saved = TrainedModels.untrained(words, feature_size=SIZE, width=24, embedding=8)
        return saved._replace(guesser=saved.guesser.eval(), answerer=saved.answerer.eval())


@pytest.fixture(scope="module")
def pool():
    raw = torch.randn(30, SIZE, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.normalize(raw, dim=-1)


@pytest.fixture
def models(saved, pool):
    return LocalDialogueModels(saved, pool)


def test_numbers_do_not_depend_on_the_batch(models, pool):
    features = pool[[3, 1, 4, 1]]
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 0, 0, 1, 3, 2]]
    for order in orders:
        some, rows = [DIALOGUES[k] for k in order], features[order]
        for place, k in enumerate(order):
            one, row = [DIALOGUES[k]], features[[k]]
            far, alone = models.distances(some, rows)[place], models.distances(one, row)[0]
            torch.testing.assert_close(far, alone, rtol=1e-6, atol=0)
            assert models.percentiles(some, rows)[place] == models.percentiles(one, row)[0]
            asked = [QUESTIONS[each] for each in order]
            assert models.answers(some, asked, rows)[place] == models.answers(one, [QUESTIONS[k]], row)[0]


def test_values_by_round_are_those_of_prefixes(models, pool):
    features = pool[[3, 1, 4, 1]]
    found = models.by_round(DIALOGUES, features)
    for dialogue, feature, (distances, percentiles) in zip(DIALOGUES, features, found, strict=True):
        parts = [dialogue._replace(rounds=dialogue.rounds[:end]) for end in range(len(dialogue.rounds) + 1)]
        repeated = feature.expand(len(parts), -1)
        assert percentiles == models.percentiles(parts, repeated).double().tolist()
        assert distances == pytest.approx(models.distances(parts, repeated).double().tolist(), rel=1e-6)


def test_percentiles_by_hand():
    def rank_of(predicted, true, pool):
        return rank_percentile(predicted, true, pool, pool.square().sum(-1))

    pool = torch.eye(4)
    predicted = torch.tensor([[0.9, 0.5, 0.3, 0.1]]).expand(4, -1)
    assert rank_of(predicted, pool, pool).tolist() == pytest.approx([0.8, 0.6, 0.4, 0.2])
    # An image that is not in the pool, behind all of it, and two copies of one image.
    assert rank_of(predicted[:1], -torch.ones(1, 4), pool).item() == 0.0
    assert rank_of(predicted[:1], pool[:1], torch.cat([pool[:1], pool[:1]])).item() == pytest.approx(2 / 3)


def test_guesser_loss_averages_the_rounds_that_exist(saved, words, pool):
    found = saved.guesser.loss(DialogueBatch.of(DIALOGUES, words), pool[:4])
    errors = []
    for dialogue, feature in zip(DIALOGUES, pool, strict=False):
        predicted = saved.guesser(DialogueBatch.of([dialogue], words))[0]
        errors += [((each - feature) ** 2).sum() for each in predicted]
    assert len(errors) == 3 + 1 + 6 + 2
    torch.testing.assert_close(found, torch.stack(errors).mean())


def test_answerer_loss_against_a_plain_loop(saved, words, pool):
    some, answerer = DIALOGUES[:3], saved.answerer
    rows = torch.tensor([2, 0])
    found = answerer.loss(DialogueBatch.of(some, words).rows(rows), pool[rows])
    terms = []
    for row in rows.tolist():
        for number, (question, answer) in enumerate(some[row].rounds):
            before = DialogueBatch.of([Dialogue(some[row].caption, some[row].rounds[:number])], words)
            start = answerer.start(answerer.encoder(before)[:, -1], words.ids([question]), pool[[row]])
            ids = torch.tensor([[BEGIN, *words.ids([answer])[0].tolist(), END]])
            log_prob = answerer(start, ids[:, :-1]).log_softmax(-1)[0]
            terms += [-log_prob[place, word] for place, word in enumerate(ids[0, 1:].tolist())]
    torch.testing.assert_close(found, torch.stack(terms).mean())


def test_answers_are_the_most_probable_words(saved, words, pool):
    answerer, batch = saved.answerer, DialogueBatch.of(DIALOGUES, words)
    history = answerer.encoder(batch)[torch.arange(4), batch.rounds]
    start = answerer.start(history, words.ids(QUESTIONS), pool[:4])
    found = answerer.answer(start)
    for row in range(4):
        ids = [BEGIN]
        while ids[-1] != END and len(ids) <= LONGEST_ANSWER:
            logits = answerer(start[[row]], torch.tensor([ids]))[0, -1].tolist()
            ids.append(max((k for k in range(len(words)) if k not in (PAD, UNKNOWN, BEGIN)), key=logits.__getitem__))
        assert found[row].tolist()[: len(ids) - 1] == ids[1:]
        assert set(found[row].tolist()[len(ids) - 1 :]) <= {END}


def test_whitened_features_have_similar_deviations():
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([20.0, 5.0, 2.0, 0.01, 0.01])
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=generator)).Q
    features = torch.randn(2000, 5, generator=generator) * scales @ rotation + 7.0
    whitening = Whitening(5, 4)
    whitening.fit(features)
    found = whitening(features)
    torch.testing.assert_close(found.mean(0), torch.zeros(4), rtol=0, atol=1e-3)
    covariance = (found.T @ found / len(found)).abs()
    torch.testing.assert_close(covariance[:3, :3], torch.eye(3), rtol=0, atol=0.01)
    assert covariance[3, 3] < 1e-4  # below a twentieth of the largest deviation it is noise


def test_saved_models_are_the_same(models, saved, pool, tmp_path):
    saved.save(tmp_path / "models")
    assert {path.suffix for path in (tmp_path / "models").iterdir()} == {".json", ".safetensors"}
    stream = torch.random.get_rng_state()
    loaded = LocalDialogueModels(tmp_path / "models", pool)
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert torch.equal(loaded.distances(DIALOGUES, pool[:4]), models.distances(DIALOGUES, pool[:4]))
    assert loaded.answers(DIALOGUES, QUESTIONS, pool[:4]) == models.answers(DIALOGUES, QUESTIONS, pool[:4])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda c: c.update(width=1 << 20), "does not hold the guesser's tensors"),  # 13 TB of weights
        (lambda c: c.update(feature_size=0), '"feature_size"'),
        (lambda c: c.update(words=[]), 'config.json has [] as "words"'),
        (lambda c: c["words"].append("zebra"), "does not hold the guesser's tensors"),
        (lambda c: c.update(version=1), "has version 1, but this release reads version 2"),
    ],
)
def test_configurations_that_do_not_fit(saved, tmp_path, change, found):
    """Also where someone has updated digests and checksums."""
    folder = tmp_path / "models"
    saved.save(folder)
    reseal(folder / "config.json", change)
    with pytest.raises(FileError, match=re.escape(found)):
        TrainedModels.load(folder)


@pytest.fixture
def data(tmp_path):
    generate_visual_dialogues(tmp_path / "data", {"train": 12}, feature_size=64, npy=True)
    return VisualDialogues.in_folder(tmp_path / "data", "train")


TINY = {"guesser_epochs": 2, "answerer_epochs": 1, "batch_size": 5, "width": 8, "embedding": 8}


def test_training_repeats_and_leaves_the_random_stream(data):
    before, seen = torch.get_rng_state(), []
    first = train_dialogue_models(data.dialogues, data.features, **TINY, report=lambda *each: seen.append(each))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    again = train_dialogue_models(data.dialogues, data.features, **TINY)
    for part in ("guesser", "answerer"):
        one, two = getattr(first, part).state_dict(), getattr(again, part).state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert [each[:2] for each in seen] == [("guesser", 1), ("guesser", 2), ("answerer", 1)]
    assert seen[1][2] < seen[0][2]


def test_wrong_arguments(data, models, saved, pool):
    rows, features = data.dialogues, data.features
    for call, noun in (
        (lambda: models.distances(DIALOGUES, pool[:3]), r"features must have shape \[4, 16\], got \[3, 16\]"),
        (lambda: LocalDialogueModels(saved, torch.zeros(3, 5)), r"pool must have shape \[3, 16\]"),
        (lambda: train_dialogue_models(rows[1:], features, **TINY), "got 11 dialogues, 12 features"),
        (lambda: train_dialogue_models([Dialogue("a")] * 12, features, **TINY), "a dialogue with rounds"),
        (lambda: train_dialogue_models(rows, features, guesser_rate=0.0), "guesser_rate"),
    ):
        with pytest.raises(ValueError, match=noun):
            call()


def test_splitting_and_joining():
    texts = {
        "can't": ["ca", "n't"],
        "I don\N{RIGHT SINGLE QUOTATION MARK}t think so": ["i", "do", "n't", "think", "so"],
        "is it red?": ["is", "it", "red", "?"],
        "it's 10, maybe.": ["it", "'s", "10", ",", "maybe", "."],
        "  ": [],
    }
    for text, words in texts.items():
        assert split_words(text) == split_words(join_words(words)) == words
    words = ["ca", "n't", "see", "it", ",", "is", "it", "the", "dog", "'s", "?"]
    assert join_words(words) == "can't see it, is it the dog's?"
    assert join_words(["?", "n'tx", "a", "-", "b"]) == "? n'tx a - b"


def test_ids_of_words_and_of_unknown_ones():
    words = WordIndex.of_texts(["dog a", "a"])
    assert words.words == ("a", "dog")
    assert words.ids(["a red dog", "", "dog"]).tolist() == [[4, UNKNOWN, 5], [PAD, PAD, PAD], [5, PAD, PAD]]
    assert words.ids(["a " * 50]).tolist() == [[4] * 40]
    assert words.ids([""]).shape == (1, 1)
    assert words.text([4, UNKNOWN, 5, END, 5]) == "a dog"
    assert words.text([]) == ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models, held-out dialogues and the features of their images."""
    home = tmp_path_factory.mktemp("learned")
    generate_visual_dialogues(home / "data", {"train": 800, "val": 150}, npy=True, seed=3)
    train, val = (VisualDialogues.in_folder(home / "data", split) for split in ("train", "val"))
    options = {"guesser_epochs": 13, "answerer_epochs": 10, "batch_size": 32, "width": 64}
    options |= {"guesser_rate": 3e-3, "answerer_rate": 8e-3}
    train_dialogue_models(train.dialogues, train.features, **options).save(home / "models")
    pool = val.features.all()
    return LocalDialogueModels(home / "models", pool), val.dialogues, pool


def prefixes(dialogues, rounds):
    return [each._replace(rounds=each.rounds[:rounds]) for each in dialogues]


@pytest.mark.slow
def test_captions_are_not_informative_and_rounds_help(trained):
    models, dialogues, pool = trained
    mean = torch.stack([models.percentiles(prefixes(dialogues, rounds), pool).mean() for rounds in (0, 3, 6, 10)])
    assert 0.6 < mean[0] < 0.75
    assert (mean.diff() > 0.01).all()
    assert mean[-1] > mean[0] + 0.1
    closed = [[each for each in dialogue.rounds if is_yes_no(each.answer, "conservative")] for dialogue in dialogues]
    only_closed = [each._replace(rounds=tuple(rounds)) for each, rounds in zip(dialogues, closed, strict=True)]
    assert models.percentiles(only_closed, pool).mean() < mean[-1] - 0.1


@pytest.mark.slow
def test_answers_are_right(trained):
    """Nine of ten to open questions; to those with yes or no, of three forms each, more than the half that guesses."""
    models, dialogues, pool = trained
    right = {True: [], False: []}
    for rounds in range(10):
        asked = [each.rounds[rounds] for each in dialogues]
        answers = models.answers(prefixes(dialogues, rounds), [each.question for each in asked], pool)
        for got, each in zip(answers, asked, strict=True):
            right[is_yes_no(each.answer, "conservative")].append(got == each.answer)
    assert min(map(len, right.values())) > 700
    assert sum(right[False]) / len(right[False]) > 0.9
    assert sum(right[True]) / len(right[True]) > 0.65


@pytest.mark.slow
def test_asking_the_models_reaches_the_image(trained):
    models, dialogues, pool = trained
    asked = [Dialogue(each.caption) for each in dialogues]
    for attribute in ATTRIBUTES[:10]:
        question = f"{attribute.open_questions[0][0]}?"
        answers = models.answers(asked, [question] * len(asked), pool)
        asked = [each.then(question, answer) for each, answer in zip(asked, answers, strict=True)]
    assert models.percentiles(asked, pool).mean() > 0.85
