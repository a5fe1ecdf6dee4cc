from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.data import DatasetWriter, TrimRows, load_dataset, row_buffer, write_dataset
from torchrl_lang.envs.language_env import LanguageEnv
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
    for batch in batches:
        for row in batch.unbind(0):
            width = row["tokens"].shape[-1]
            full = {key: torch.zeros(40, dtype=row[key].dtype) for key in ROW_KEYS}
            full["tokens"].fill_(WORDS.control.pad)
            for key in ROW_KEYS:
                full[key][:width] = row[key]
            out[float(row["token_reward"].sum())] = TensorDict(full, batch_size=[])
    return torch.stack([out[key] for key in sorted(out)])


@pytest.mark.parametrize("bucket", [False, True, 2])
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


def test_the_data_is_neither_copied_nor_changed(dataset):
    buffer = row_buffer(dataset, 4, trim=False)
    batch = buffer.sample()
    assert batch["tokens"].shape == (4, 40)
    assert buffer.storage._storage["tokens"].data_ptr() == dataset.rows["tokens"].data_ptr()
    batch["token_reward"].fill_(7.0)
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        buffer.extend(batch)
    load_dataset(dataset.folder, verify=True)


def test_a_training_resumes_to_the_same_batches(dataset):
    whole = row_buffer(dataset, 4, seed=3, bucket=True)
    for _ in range(8):
        whole.sample()
    state = whole.sampler.state_dict()
    resumed = row_buffer(load_dataset(dataset.folder), 4, seed=0, bucket=True)
    resumed.sampler.load_state_dict(state)
    for _ in range(10):
        assert torch.equal(whole.sample()["tokens"], resumed.sample()["tokens"])


def test_a_further_transform_sees_trimmed_rows(rows):
    seen = []

    class Look(TrimRows):
        def forward(self, tensordict):
            seen.append(tensordict["tokens"].shape)
            return tensordict

    batch = row_buffer(rows, 4, transform=Look()).sample()
    assert seen == [batch["tokens"].shape]
    assert seen[0][-1] < 40


def test_trimming_cuts_only_what_is_padding_everywhere(rows):
    before = rows.clone()
    batch = TrimRows()(rows[[0, 4, 2]].set("index", torch.arange(3)))
    assert batch["tokens"].shape == (3, 10)  # <a> aaaaa </a> c </s> </eod>
    for key in ROW_KEYS:
        assert torch.equal(batch[key], rows[[0, 4, 2]][key][:, :10])
    assert batch["index"].tolist() == [0, 1, 2]
    assert (rows == before).all()


@pytest.mark.parametrize(("multiple_of", "width"), [(1, 10), (8, 16), (64, 40)])
def test_widths_can_be_rounded_up(rows, multiple_of, width):
    assert TrimRows(multiple_of=multiple_of)(rows[[0, 4]])["tokens"].shape[-1] == width


def test_any_batch_shape_and_empty_rows(rows):
    steps = torch.stack([rows[:3], rows[3:6]], 1)
    assert TrimRows()(steps)["tokens"].shape == (3, 2, 11)
    nothing = TensorDict(tokens=torch.zeros(2, 5).int(), attention_mask=torch.zeros(2, 5).bool(), batch_size=[2])
    assert TrimRows()(nothing)["tokens"].shape == (2, 1)


def test_trimming_is_not_for_environments(talk):
    env = talk(seed=0, batch_size=[2])
    assert isinstance(env, LanguageEnv)
    with pytest.raises(RuntimeError, match="put it in a replay buffer"):
        env.append_transform(TrimRows()).rollout(2)


def test_rows_come_flat(rows):
    with pytest.raises(ValueError, match="flatten them first"):
        row_buffer(rows[:4].view(2, 2), 2)


def test_tokens_are_int64_without_trimming_too(dataset, rows):
    for transform in (None, TrimRows(multiple_of=64)):
        batch = row_buffer(dataset, 23, trim=False, transform=transform).sample()
        check_row(batch)
        assert batch["tokens"].dtype == torch.int64
    assert (by_reward([batch]) == rows.select(*ROW_KEYS)).all()


def test_a_missing_mask_is_told(rows):
    with pytest.raises(KeyError, match="A row needs 'attention_mask'"):
        TrimRows()(rows.exclude("attention_mask"))


def test_reading_ahead_gives_the_same_batches(dataset):
    plain, ahead = row_buffer(dataset, 4, bucket=True), row_buffer(dataset, 4, bucket=True, prefetch=1)
    for _ in range(12):
        assert (plain.sample() == ahead.sample()).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sampling_a_data_set_reads_only_the_pages_that_it_needs(rows, tmp_path):
    block = rows[torch.arange(20_000) % rows.shape[0]]
    with DatasetWriter(tmp_path / "data", WORDS, 40) as writer:
        for _ in range(8):
            writer.extend(block)
    buffer = row_buffer(load_dataset(tmp_path / "data"), 4)
    path = tmp_path / "data" / "rows" / "tokens.memmap"
    assert path.stat().st_size == 8 * 20_000 * 40 * 4
    buffer.sample()
    # A page that is read brings its neighbours, up to a megabyte.
    assert 0 < _resident(path) < path.stat().st_size / 3


def _resident(path) -> int:
    """Bytes of a mapped file that this process has read."""
    sizes, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and not line.split(" ")[0].endswith(":"):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            sizes.append(int(line.split()[1]) * 1024)
    return sum(sizes)


def test_malformed_rows_do_not_enter(letters):
    rows = to_rows([Episode([Turn("hi"), Turn("yo", 1.0)], True)] * 3, letters, 12)
    for key, value, message in (
        ("attention_mask", rows["attention_mask"].flip(-1), "a real token right of padding"),
        ("token_reward", torch.where(rows["agent_mask"], torch.nan, 0.0), "a reward that is not finite"),
        ("tokens", rows["tokens"] - 40, "a token id out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            row_buffer(rows.clone().set(key, value), 2)
    with pytest.raises(TypeError, match="tokens must be int64"):
        row_buffer(rows.clone().set("tokens", rows["tokens"].float()), 2)
    assert len(row_buffer(rows.exclude("token_reward"), 2).sample()) == 2  # enough to clone behaviour


@pytest.mark.parametrize(
    "options", [{}, {"bucket": True}, {"drop_last": True}, {"trim": False}, {"prefetch": 1}], ids=str
)
def test_no_rows_give_empty_batches(letters, options):
    rows = to_rows([Episode([Turn("hi", 1.0)], True)], letters, 12)[:0]
    buffer = row_buffer(rows, 2, **options)
    for _ in range(3):
        batch = buffer.sample()
        assert batch.shape == (0,)
        assert batch["tokens"].dtype == torch.int64
    assert all(len(batch) == 0 for batch in buffer)
