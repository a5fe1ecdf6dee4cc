"""A stream of one's own, that travels."""

import copy
import pickle

import pytest
import torch

from torchrl_lang._random_stream import RandomStream


def test_numbers_below_are_below_and_uniform():
    n = torch.tensor([0, 1, 2, 7]).repeat(7000, 1)
    drawn = RandomStream(0).below(n)
    assert drawn.dtype == torch.int64
    assert (drawn[:, :2] == 0).all()
    for column, number in ((2, 2), (3, 7)):
        share = drawn[:, column].bincount(minlength=number) / 7000
        assert len(share) == number
        torch.testing.assert_close(share, torch.full((number,), 1 / number), atol=0.03, rtol=0)


@pytest.mark.parametrize("send", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])  # noqa: S301
def test_copies_go_on_if_seeded_and_start_anew_if_not(send):
    state = torch.get_rng_state()
    seeded, free = RandomStream(3), RandomStream()
    seeded.uniform((5,)), free.uniform((5,))
    assert torch.equal(send(seeded).uniform((9,)), seeded.uniform((9,)))
    assert not torch.equal(send(free).uniform((9,)), free.uniform((9,)))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_ones_own_travels_too():
    stream = RandomStream(generator=torch.Generator().manual_seed(4))
    stream.uniform((2,))
    twin = pickle.loads(pickle.dumps(stream))  # noqa: S301
    assert torch.equal(twin.uniform((9,), torch.float32), stream.uniform((9,), torch.float32))
    with pytest.raises(ValueError, match="either seed or generator"):
        RandomStream(1, generator=torch.Generator())


def test_a_choice_is_uniform_among_the_allowed():
    allowed = torch.tensor([[True, False, True, True], [False, True, False, False], [True, True, True, True]])
    drawn = RandomStream(0).choice(allowed.repeat(7000, 1)).view(7000, 3)
    assert drawn.dtype == torch.int64
    for column, row in zip(drawn.unbind(-1), allowed, strict=True):
        share = column.bincount(minlength=4) / 7000
        assert not share[~row].any()
        torch.testing.assert_close(share[row], torch.full_like(share[row], 1 / int(row.sum())), atol=0.03, rtol=0)
