from __future__ import annotations

import json

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from torchrl_lang.data import TrimRows, load_dataset, row_buffer, write_dataset
from torchrl_lang.data.replay import BucketSampler, EpochSampler
from torchrl_lang.schema import ROW_KEYS, check_row
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

WORDS = CharTokenizer.from_alphabet("abc")


@pytest.fixture
def rows():
    return to_rows([Episode([Turn("a" * n, float(n)), Turn("c")], True) for n in range(1, 24)], WORDS, 40)


@pytest.fixture
def dataset(rows, tmp_path):
    return write_dataset(tmp_path / "data", rows, WORDS)


def by_reward(batches):
    """Rows of many batches, put in their old order and padded to their old width."""
    out = {}
    for row in (row for batch in batches for row in batch.unbind(0)):
        padded = {key: torch.nn.functional.pad(row[key], (0, 40 - row["tokens"].shape[-1])) for key in ROW_KEYS}
        padded["tokens"][~padded["attention_mask"]] = WORDS.control.pad
        out[float(row["token_reward"].sum())] = TensorDict(padded, batch_size=[])
    return torch.stack([out[key] for key in sorted(out)])


@pytest.mark.parametrize("bucket", [False, 2])
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_epoch_is_the_data_set_without_its_padding(dataset, rows, bucket, on_disk):
    buffer = row_buffer(dataset if on_disk else rows, 4, bucket=bucket)
    batches = list(buffer)
    for batch in batches:
        check_row(batch)
        assert batch["tokens"].dtype == torch.int64
        assert batch["attention_mask"][:, -1].any()
        assert batch["terminated"].shape == (batch.shape[0], 1)
    assert (by_reward(batches) == rows.select(*ROW_KEYS)).all()


def test_buckets_of_pairs_go_by_the_longer_row(rows):
    pairs = rows[torch.tensor([[0, 20], [16, 18], [12, 10], [2, 8]])]
    width = [int(rows["attention_mask"][row].sum()) for row in (20, 12)]
    assert sorted(batch["tokens"].shape[-1] for batch in row_buffer(pairs, 2, bucket=True)) == sorted(width)


def test_the_data_is_neither_copied_nor_changed(dataset):
    buffer = row_buffer(dataset, 4, trim=False)
    batch = buffer.sample()
    assert batch["tokens"].shape == (4, 40)
    assert buffer.storage._storage["tokens"].data_ptr() == dataset.rows["tokens"].data_ptr()
    batch["token_reward"].fill_(7.0)
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        buffer.extend(batch)
    load_dataset(dataset.folder, verify=True)


def test_trimming_cuts_only_what_is_padding_everywhere(rows, talk):
    before = rows.clone()
    batch = TrimRows()(rows[[0, 4, 2]].set("index", torch.arange(3)))
    assert batch["tokens"].shape == (3, 10)  # <a> aaaaa </a> c </s> </eod>
    for key in ROW_KEYS:
        assert torch.equal(batch[key], rows[[0, 4, 2]][key][:, :10])
    assert batch["index"].tolist() == [0, 1, 2]
    assert (rows == before).all()
    with pytest.raises(RuntimeError, match="put it in a replay buffer"):
        talk(seed=0, batch_size=[2]).append_transform(TrimRows()).rollout(2)


def test_rows_are_checked_and_may_lack_rewards(rows):
    with pytest.raises(ValueError, match="a real token right of padding"):
        row_buffer(rows.clone().set("attention_mask", rows["attention_mask"].flip(-1)), 2)
    assert len(row_buffer(rows.exclude("token_reward"), 2).sample()) == 2  # enough to clone behaviour


@pytest.mark.parametrize("options", [{"bucket": True}, {"drop_last": True, "trim": False}, {"prefetch": 1}], ids=str)
def test_no_rows_give_empty_batches(letters, options):
    rows = to_rows([Episode([Turn("hi", 1.0)], True)], letters, 12)[:0]
    buffer = row_buffer(rows, 2, **options)
    for _ in range(3):
        batch = buffer.sample()
        assert batch.shape == (0,)
        assert batch["tokens"].dtype == torch.int64
    assert all(len(batch) == 0 for batch in buffer)


LENGTHS = torch.randint(1, 50, (103,), generator=torch.Generator().manual_seed(0))


def bucket_sampler(**kwargs):
    return BucketSampler(LENGTHS, 10, pool=3, **kwargs)


def buffer(sampler, rows=103):
    made = TensorDictReplayBuffer(storage=LazyMemmapStorage(200), sampler=sampler, batch_size=10)
    made.extend(TensorDict(x=torch.arange(rows), batch_size=[rows]))
    return made


both = pytest.mark.parametrize("make", [EpochSampler, bucket_sampler])


@both
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_row_once_an_epoch_or_others_left_out_each_time(make, drop_last):
    made = buffer(make(seed=1, drop_last=drop_last))
    orders = []
    for _ in range(3):
        epoch = [batch["x"] for batch in made]
        assert [len(x) for x in epoch] == [10] * 10 + [3] * (not drop_last)
        orders.append(torch.cat(epoch).tolist())
        assert len({*orders[-1]}) == len(orders[-1])
    assert orders[0] != orders[1] != orders[2]
    assert len({frozenset(order) for order in orders}) == (3 if drop_last else 1)


@both
@pytest.mark.parametrize("batches", [4, 11])  # within the first epoch, and at its end
def test_a_resumed_sampler_gives_the_same_batches(make, batches, tmp_path):
    whole, resumed, from_disk = buffer(make(seed=1)), buffer(make(seed=9)), buffer(make(seed=9))
    for _ in range(batches):
        whole.sample()
    whole.sampler.dumps(tmp_path)
    resumed.sampler.load_state_dict(json.loads(json.dumps(whole.sampler.state_dict())))
    from_disk.sampler.loads(tmp_path)
    for _ in range(25):
        expected = whole.sample()["x"].tolist()
        assert resumed.sample()["x"].tolist() == from_disk.sample()["x"].tolist() == expected


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
    assert made.sampler.epoch == -1
    made.sample()
    made.extend(TensorDict(x=torch.arange(20, 30), batch_size=[10]))
    assert max(made.sample()["x"]) < 20
    assert sorted(torch.cat([batch["x"] for batch in made]).tolist()) == list(range(30))
    for wrong, message in (
        (made.empty() or made, "drawn of 0 with"),
        (buffer(EpochSampler(drop_last=True), rows=9), "drawn of 9 with"),
        (buffer(bucket_sampler(), rows=50), "holds 50 rows, but the sampler has 103 lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.sample()
    assert made.sampler.epoch == -1
    with pytest.raises(ValueError, match="built for 10"):
        bucket_sampler().sample(made.storage, 7)
