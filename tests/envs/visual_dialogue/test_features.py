"""Features are read row by row from HDF5 or .npy, normalised or not."""

import pickle

import numpy as np
import pytest
import torch

from tests.envs.visual_dialogue.real_files import FEATURES, raw_features, write_dialogues, write_hdf5
from torchrl_lang._files import FileError
from torchrl_lang.envs.visual_dialogue import VisualDialogues
from torchrl_lang.envs.visual_dialogue.features import ImageFeatures


@pytest.fixture(params=["hdf5", "npy"])
def written(request, tmp_path):
    """A file of features by split, and what it holds."""
    raw = raw_features(7)
    if request.param == "hdf5":
        pytest.importorskip("h5py")
        return write_hdf5(tmp_path / "data_img.h5", train=raw_features(3), val=raw), raw
    np.save(tmp_path / "images_val.npy", raw)
    return tmp_path / "images_val.npy", raw


def test_rows_in_any_order(written):
    path, raw = written
    features = ImageFeatures(path, "val")
    assert (len(features), features.feature_size) == (7, FEATURES)
    found = features.rows([5, 0, 5, 2])
    expected = raw[[5, 0, 5, 2]] / np.sqrt((raw[[5, 0, 5, 2]] ** 2).sum(1, keepdims=True))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    assert features.rows([]).shape == (0, FEATURES)


def test_without_normalisation(written):
    path, raw = written
    np.testing.assert_array_equal(ImageFeatures(path, "val", normalize=False).rows([1, 3]).numpy(), raw[[1, 3]])


def test_all_rows_in_blocks(written):
    path, _ = written
    features = ImageFeatures(path, "val")
    assert [len(block) for block in features.blocks(3)] == [3, 3, 1]
    assert torch.equal(torch.cat(list(features.blocks(3))), features.all())
    assert torch.equal(features.all(), features.rows(range(7)))


def test_rows_out_of_range(written):
    path, _ = written
    for rows in ([7], [-1]):
        with pytest.raises(IndexError, match="has images 0 to 6"):
            ImageFeatures(path, "val").rows(rows)


def test_a_copy_in_another_process_opens_the_file_again(written):
    features = ImageFeatures(written[0], "val")
    copy = pickle.loads(pickle.dumps(features))  # noqa: S301 (as a data loader sends it to its workers)
    assert torch.equal(copy.rows([3]), features.rows([3]))


@pytest.mark.parametrize(
    ("row", "found"), [(np.zeros(FEATURES), "with the norm 0.0"), (np.full(FEATURES, np.nan), "with the norm nan")]
)
def test_rows_without_a_direction(tmp_path, row, found):
    raw = raw_features(5)
    raw[3] = row
    np.save(tmp_path / "images_val.npy", raw)
    features = ImageFeatures(tmp_path / "images_val.npy", "val")
    assert features.rows([0, 4]).isfinite().all()
    with pytest.raises(FileError, match="row 3") as caught:
        features.rows([4, 3])
    assert found in str(caught.value)


@pytest.mark.parametrize("array", [np.ones(5), np.ones((5, 4), dtype=int), np.ones((0, 4)), np.ones((2, 3, 4))])
def test_wrong_shapes_and_dtypes(tmp_path, array):
    np.save(tmp_path / "images_val.npy", array)
    with pytest.raises(FileError, match=r"expected floating-point numbers \[images, features\]"):
        ImageFeatures(tmp_path / "images_val.npy", "val")


def test_pickled_arrays_are_not_read(tmp_path):
    np.save(tmp_path / "images_val.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileError, match=r"is not a \.npy file of numbers"):
        ImageFeatures(tmp_path / "images_val.npy", "val")


def test_hdf5_files_that_are_none_or_have_no_such_split(tmp_path):
    pytest.importorskip("h5py")
    path = write_hdf5(tmp_path / "data_img.h5", train=raw_features(2))
    with pytest.raises(FileError, match=r'has no dataset "images_val", it has \[\'images_train\'\]'):
        ImageFeatures(path, "val")
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(FileError, match="is not an HDF5 file"):
        ImageFeatures(path, "train")
    with pytest.raises(FileError, match="is missing"):
        ImageFeatures(tmp_path / "other.h5", "train")


def test_features_and_dialogues_are_aligned(tmp_path):
    np.save(tmp_path / "images_val.npy", raw_features(3))
    dialogues = write_dialogues(tmp_path / "visdial_0.5_val.json", 2)
    with pytest.raises(FileError, match=r"images_val\.npy holds 3 images, but .*val\.json holds 2 dialogues"):
        VisualDialogues(dialogues, tmp_path / "images_val.npy", "val")
