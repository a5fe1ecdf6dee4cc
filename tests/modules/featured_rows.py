"""Features in front of toy rows, and a plain loop that reads them with a model of Hugging Face itself."""

from __future__ import annotations

import torch

from tests.modules.toys import WIDTH, rows, tiny_lm
from torchrl_lang.modules import FeatureEmbedding, language_actor, with_features

P, F = 3, 5
MASKS = {"all": None, "some": [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 0]]}


def projector(seed=0, scale=1.0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        embedding = FeatureEmbedding(F, WIDTH, **options).double()
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.mul_(scale)
    return embedding


def reading(kind="gpt2", *, lm=None, positions=True, hidden=0, scale=1.0, **options):
    """A language actor in double precision whose trunk reads features."""
    lm = (tiny_lm(kind) if lm is None else lm).double()
    return with_features(language_actor(lm, **options), projector(positions=positions, hidden=hidden, scale=scale))


def featured(batch, mask="some", seed=0):
    """The rows with features; a mask of seven rows is repeated."""
    generator = torch.Generator().manual_seed(seed)
    n = batch.shape[0]
    batch = batch.clone().set("features", torch.randn(n, P, F, generator=generator, dtype=torch.float64))
    if MASKS[mask] is not None:
        whole = torch.tensor(MASKS[mask]).bool().repeat(-(-n // 7), 1)
        batch["features_mask"] = whole[:n]
    return batch


def feature_rows(mask="some", **options):
    return featured(rows(**options), mask)


def real(batch, row):
    """The real features of a row, ``[n, F]``."""
    return (
        batch["features"][row] if "features_mask" not in batch else batch["features"][row][batch["features_mask"][row]]
    )


def states_one_by_one(trunk, batch):
    """The states of each row's real tokens, by the model alone on its projected features and embedded tokens."""
    model, found = trunk.model, []
    for row in range(batch.shape[0]):
        projected = trunk.features(real(batch, row))
        tokens = batch["tokens"][row][batch["attention_mask"][row]]
        n, width = len(projected), len(projected) + len(tokens)
        embedded = torch.cat([projected, model.get_input_embeddings()(tokens)])[None]
        options = {}
        if not trunk.features.positions:
            place = torch.cat([torch.zeros(n), torch.arange(len(tokens))]).long()
            causal = torch.full((width, width), -1e9, dtype=torch.float64).triu(1)
            options = {"position_ids": place[None], "attention_mask": causal[None, None]}
            if hasattr(model, "wpe"):  # the features get no position: its embedding is taken off before
                embedded = torch.cat([embedded[:, :n] - model.wpe.weight[0], embedded[:, n:]], 1)
        found.append(model(inputs_embeds=embedded, **options).last_hidden_state[0, n:])
    return found
