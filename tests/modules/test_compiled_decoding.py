from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.modules.toys import CONTROL, heads, tiny_lm
from torchrl_lang.modules import UtteranceActor, ValueGuidance, language_actor

N, T, K, TURNS = 5, 24, 5, 3


pytestmark = pytest.mark.slow


def actor_of(lm, **options):
    trunk_options = {} if "backend" not in options else {"backend": options.pop("backend")}
    language = language_actor(lm)
    if trunk_options:
        language[0].module.compile(**trunk_options)
    return UtteranceActor(language, CONTROL, K, seed=0, **options)


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


@pytest.mark.parametrize(
    ("kind", "method", "reuse", "backend"),
    [
        ("gpt2", "sample", True, "aot_eager"),
        ("llama", "sample", True, "eager"),
        ("gpt2", "sample", False, "eager"),
        ("gpt2", "beam", True, "eager"),
        ("gpt2", "best_of", True, "eager"),
    ],
)
def test_compiled_decoding_says_the_same(kind, method, reuse, backend):
    lm, guidance = tiny_lm(kind, layers=1), ValueGuidance(heads()[0], beta=2.0)
    options = {"method": method, "reuse_prefix": reuse, "guidance": guidance}
    expected = play(actor_of(lm, **options))
    for plain, compiled in zip(expected, play(actor_of(lm, backend=backend, **options)), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


def test_one_graph_serves_all_steps_of_all_turns():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    actor = actor_of(tiny_lm(layers=1), backend=backend, method="greedy")
    play(actor)
    assert len(graphs) == 1
    play(actor)
    assert len(graphs) == 1


def test_language_actor_compiles_its_trunk():
    trunk = language_actor(tiny_lm(), compile=True)[0].module
    assert trunk.compiled
    assert not language_actor(tiny_lm())[0].module.compiled
