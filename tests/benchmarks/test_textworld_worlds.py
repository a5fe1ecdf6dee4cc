"""Demonstrations with other names: what is exchanged, and what stays."""

import torch
from tensordict import TensorDict

from benchmarks.textworld_worlds import exchanged


def test_each_row_has_names_of_its_own_in_all_places():
    tokens = torch.tensor([[1, 5, 2, 5, 6], [1, 7, 2, 6, 3]]).repeat(100, 1)
    rows = TensorDict(tokens=tokens, terminated=torch.ones(200, 1, dtype=torch.bool), batch_size=[200])
    found = exchanged(rows, torch.tensor([5, 6, 7]), 9, torch.Generator().manual_seed(0))
    others = found["tokens"]
    is_name = (tokens >= 5) & (tokens <= 7)
    assert torch.equal(others[~is_name], tokens[~is_name])
    assert set(others[is_name].tolist()) == {5, 6, 7}
    assert torch.equal(others[::2, 1], others[::2, 3])
    assert (others[::2, 1] != others[::2, 4]).all()
    assert len(others[::2].unique(dim=0)) == 6  # all permutations
    assert torch.equal(rows["tokens"], tokens)
