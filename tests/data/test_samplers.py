from __future__ import annotations

import json

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from torchrl_lang.data.replay import BucketSampler, EpochSampler

LENGTHS = torch.randint(1, 50, (103,), generator=torch.Generator().manual_seed(0))


def epoch_sampler(**kwargs):
    return EpochSampler(**kwargs)


def bucket_sampler(**kwargs):
    return BucketSampler(LENGTHS, 10, pool=3, **kwargs)


def buffer(sampler, rows=103):
    made = TensorDictReplayBuffer(storage=LazyMemmapStorage(200), sampler=sampler, batch_size=10)
    made.extend(TensorDict(x=torch.arange(rows), batch_size=[rows]))
    return made


both = pytest.mark.parametrize("make", [epoch_sampler, bucket_sampler])


@both
def test_each_row_once_an_epoch(make):
    made = buffer(make(seed=1))
    orders = []
    for _ in range(3):
        epoch = [batch["x"] for batch in made]
        assert [len(x) for x in epoch] == [10] * 10 + [3]
        orders.append(torch.cat(epoch).tolist())
        assert sorted(orders[-1]) == list(range(103))
    assert orders[0] != orders[1] != orders[2]


@both
def test_sampling_and_iterating_agree(make):
    sampled = buffer(make(seed=1))
    expected = [batch["x"].tolist() for _ in range(2) for batch in buffer_epochs(make)]
    assert [sampled.sample()["x"].tolist() for _ in range(11)] == expected[:11]
    assert [len(sampled.sample()["x"]) for _ in range(11)] == [10] * 10 + [3]


def buffer_epochs(make):
    yield from buffer(make(seed=1))


@both
def test_drop_last_leaves_out_other_rows_each_time(make):
    made = buffer(make(seed=1, drop_last=True))
    left_out = set()
    for _ in range(3):
        epoch = [batch["x"] for batch in made]
        assert [len(x) for x in epoch] == [10] * 10
        seen = torch.cat(epoch).tolist()
        assert len(set(seen)) == 100
        left_out.add(frozenset(set(range(103)) - set(seen)))
    assert len(left_out) == 3


@both
@pytest.mark.parametrize("batches", [0, 4, 11, 15])
def test_a_resumed_sampler_gives_the_same_batches(make, batches, tmp_path):
    whole = buffer(make(seed=1))
    for _ in range(batches):
        whole.sample()
    whole.sampler.dumps(tmp_path)
    state = json.loads(json.dumps(whole.sampler.state_dict()))
    expected = [whole.sample()["x"].tolist() for _ in range(25)]
    resumed, from_disk = buffer(make(seed=9)), buffer(make(seed=9))
    resumed.sampler.load_state_dict(state)
    from_disk.sampler.loads(tmp_path)
    assert [resumed.sample()["x"].tolist() for _ in range(25)] == expected
    assert [from_disk.sample()["x"].tolist() for _ in range(25)] == expected


@both
def test_no_global_stream_is_moved_or_read(make):
    torch.manual_seed(0)
    first = [batch["x"].tolist() for batch in buffer(make(seed=1))]
    before = torch.random.get_rng_state()
    second = [batch["x"].tolist() for batch in buffer(make(seed=1))]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first == second
    assert first != [batch["x"].tolist() for batch in buffer(make(seed=2))]


def test_buckets_waste_little_and_still_mix():
    plain, bucketed = EpochSampler(seed=0), BucketSampler(LENGTHS, 10, seed=0, pool=5)

    def padding(sampler, epoch):
        batches = LENGTHS[sampler.order(103, epoch)][:100].view(10, 10)
        return (batches.amax(-1, keepdim=True) - batches).sum() / batches.amax(-1).sum() / 10

    assert padding(plain, 0) > 0.4
    assert padding(bucketed, 0) < 0.15
    companions = [
        frozenset(next(batch for batch in bucketed.order(103, epoch)[:100].view(10, 10).tolist() if 0 in batch))
        for epoch in (0, 1, 2)
        if 0 in bucketed.order(103, epoch)[:100]
    ]
    assert len(set(companions)) == len(companions) > 1
    order = LENGTHS[bucketed.order(103, 0)][:100].view(10, 10).float().mean(-1)
    assert not torch.equal(order, order.sort().values), "batches come in the order of their lengths"


def test_a_growing_storage_joins_the_next_epoch():
    made = buffer(EpochSampler(seed=0), rows=20)
    made.sample()
    made.extend(TensorDict(x=torch.arange(20, 30), batch_size=[10]))
    assert max(made.sample()["x"]) < 20
    assert sorted(torch.cat([batch["x"] for batch in made]).tolist()) == list(range(30))
    made.empty()
    with pytest.raises(RuntimeError, match="empty"):
        made.sample()


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="use a smaller batch"):
        buffer(EpochSampler(drop_last=True), rows=9).sample()
    with pytest.raises(ValueError, match="holds 50 rows, but the sampler has 103 lengths"):
        buffer(bucket_sampler(), rows=50).sample()
    with pytest.raises(ValueError, match="built for 10"):
        bucket_sampler().sample(buffer(bucket_sampler()).storage, 7)
    with pytest.raises(ValueError, match="seed"):
        EpochSampler(seed=-1)
