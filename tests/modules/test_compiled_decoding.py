from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.modules.toys import CONTROL, heads, tiny_lm
from torchrl_lang.modules import UtteranceActor, ValueGuidance, language_actor

N, T, K, TURNS = 5, 24, 5, 3


pytestmark = pytest.mark.slow


def actors_of(lm, *, backend=None):
    """Makes utterance actors of one language actor, whose trunk is compiled if there is a backend."""
    language = language_actor(lm)
    if backend is not None:
        language[0].module.compile(backend=backend)
    return partial(UtteranceActor, language, CONTROL, K, seed=0)


def play(actor):
    """Several turns, each answered by a letter: what was said, and its log-probabilities."""
    tokens, length = torch.full((N, T), CONTROL.pad), torch.ones(N, dtype=torch.int64)
    tokens[:, 0], said, place = CONTROL.begin_action, [], torch.arange(T)
    for turn in range(TURNS):
        rows = actor(TensorDict(tokens=tokens, attention_mask=place < length[:, None], batch_size=[N]))
        said += [rows["action"].clone(), rows["token_log_prob"].clone()]
        for row, action in enumerate(rows["action"]):
            words = action[action != CONTROL.pad]
            end = int(length[row]) + words.shape[0]
            tokens[row, int(length[row]) : end] = words
            tokens[row, end] = turn
            length[row] = end + 1
    return said


WAYS = [("sample", True), ("sample", False), ("beam", True), ("best_of", True)]


@pytest.mark.parametrize(("kind", "backend", "ways"), [("gpt2", "aot_eager", WAYS[:1]), ("llama", "eager", WAYS)])
def test_compiled_decoding_says_the_same(kind, backend, ways):
    lm, guidance = tiny_lm(kind, layers=1), ValueGuidance(heads()[0], beta=2.0)
    plain, compiled = actors_of(lm), actors_of(lm, backend=backend)
    for method, reuse in ways:
        options = {"method": method, "prefix_cache": reuse, "guidance": guidance}
        for expected, found in zip(play(plain(**options)), play(compiled(**options)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_one_graph_serves_all_steps_of_all_turns():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    actor = actors_of(tiny_lm(layers=1), backend=backend)(method="greedy")
    play(actor)
    assert len(graphs) == 1
    play(actor)
    assert len(graphs) == 1
