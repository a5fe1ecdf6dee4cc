"""Reward caches: their numbers, and that an interrupted computation continues with the same result."""

import pytest
import torch

from tests.envs.visual_dialogue.word_overlap import WordOverlap, make_batch
from torchrl_lang.envs.visual_dialogue import compute_reward_caches
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round

DIALOGUES, _, FEATURES = make_batch(11)


def features(rows):
    return FEATURES[list(rows)]


class Interrupted(WordOverlap):
    """Fails after some batches."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def percentiles(self, dialogues, features):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("gone")
        return super().percentiles(dialogues, features)


def test_numbers_worked_out_by_hand():
    class Halving:
        """Distance 8 / 2^rounds, percentile 1 - 2^-(rounds + 1)."""

        def distances(self, dialogues, features):
            return torch.tensor([8.0 / 2 ** len(dialogue.rounds) for dialogue in dialogues])

        def percentiles(self, dialogues, features):
            return torch.tensor([1 - 0.5 ** (len(dialogue.rounds) + 1) for dialogue in dialogues])

    dialogues = [Dialogue("a", (Round("b?", "c"),) * 3), Dialogue("a")]
    caches = compute_reward_caches(Halving(), dialogues, features)
    assert caches.distance == [[8.0, 4.0, 2.0, 1.0], [8.0]]
    assert caches.rank == [[0.5, 0.25, 0.125, 0.0625], [0.5]]
    Halving.distances = lambda *_: torch.tensor([8.0, torch.nan])
    with pytest.raises(ValueError, match="a distance that is not finite: nan"):
        compute_reward_caches(Halving(), [Dialogue("a")] * 2, features)


@pytest.mark.parametrize("batches", [0, 2, 3])
def test_an_interrupted_computation_continues(batches, models, tmp_path):
    partial = tmp_path / "partial"
    whole = compute_reward_caches(models, DIALOGUES, features)
    with pytest.raises(ConnectionError):
        compute_reward_caches(Interrupted(batches), DIALOGUES, features, partial=partial, batch_size=3)
    done, options = [], {"partial": partial, "batch_size": 4}
    assert compute_reward_caches(models, DIALOGUES, features, **options, on_batch=done.append) == whole
    assert done[0] == min(3 * batches + 4, 11)
    content = partial.read_bytes()
    for size in range(content.index(b"\n") + 1, len(content), 151):  # a file cut anywhere
        partial.write_bytes(content[:size])
        assert compute_reward_caches(models, DIALOGUES, features, partial=partial) == whole


def test_other_dialogues_models_or_features_are_noticed(models, tmp_path):
    partial = tmp_path / "partial"
    compute_reward_caches(models, DIALOGUES, features, partial=partial)
    with pytest.raises(ValueError, match=r"partial is about other dialogues: delete it"):
        compute_reward_caches(models, DIALOGUES[1:], features, partial=partial)
    with pytest.raises(ValueError, match="other models or features"):
        compute_reward_caches(models, DIALOGUES, lambda rows: features(rows).flip(-1), partial=partial)
    with pytest.raises(ValueError, match="other models or features"):
        compute_reward_caches(WordOverlap(pool=5), DIALOGUES, features, partial=partial)
    for damaged in (b"", b"[]\n", b"{\n", partial.read_bytes().replace(b"[[", b"[[null, ", 1)):
        partial.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"partial is (damaged|about other dialogues): delete it"):
            compute_reward_caches(models, DIALOGUES, features, partial=partial)


def test_other_models_are_noticed_where_distances_are_small(tmp_path):
    """Distances are means over the features: those of 4,096 normalised ones are about 2e-4."""
    small, far = WordOverlap(), WordOverlap.distances

    def caches(factor):
        small.distances = lambda dialogues, features: far(small, dialogues, features) * factor
        return compute_reward_caches(small, DIALOGUES, features, partial=tmp_path / "partial")

    assert caches(1e-4) == caches(1.00001e-4)
    with pytest.raises(ValueError, match="other models or features"):
        caches(1.1e-4)
