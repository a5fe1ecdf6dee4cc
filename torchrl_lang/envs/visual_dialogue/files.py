"""Read the files of visual dialogues: dialogues, caches of rewards and further scenes in JSON, and image features."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from torchrl_lang._checks import needs_extra
from torchrl_lang._files import FileError, file_errors, one_line, read_text, regular_file
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round

ROUNDS = 10
"""Rounds of a dialogue in the files."""

_MAX_BYTES = 1 << 33
"""Dialogues with a hundred candidate answers a round have more than a gigabyte."""
_DIALOGUES = 'give a list of {"caption": ..., "image_id": ..., "dialog": [10 times {"question": ..., "answer": ...}]}'
_NUMBERED = (
    "give a file of train or val as VisDial 0.9 and 1.0 have them (the test split of 1.0 has no answers to its last "
    "questions): split test dialogues off from one of these"
)
_REWARDS = f"give a list with {1 + ROUNDS} numbers for each dialogue, or compute the cache again"
_SCENES = 'give a list of {"caption": ..., "image": row, "dialog": [...], "rewards": [1 + number of rounds numbers]}'


class SplitFiles(NamedTuple):
    """The files of a split of the dataset.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.files import SplitFiles
        >>> SplitFiles.in_folder("data", "val").rank_rewards.name
        'val_rank_reward_cache1.json'
    """

    dialogues: Path
    features: Path
    """HDF5 with ``images_<split>``, or ``images_<split>.npy``."""
    rank_rewards: Path
    """Initial percentile and its change in each round."""
    distance_rewards: Path
    """Initial distance and its decrease in each round."""

    @classmethod
    def in_folder(cls, folder: str | Path, split: str) -> SplitFiles:
        """The files of a split in one folder, by the names that the ILQL paper's code gives them.

        Where there is no ``visdial_0.5_<split>.json``, one of version 1.0 or 0.9 takes its place, and where there is no
        ``data_img.h5``, ``images_<split>.npy``.
        """
        folder = Path(folder)
        names = [folder / f"visdial_{version}_{split}.json" for version in ("0.5", "1.0", "0.9")]
        hdf5 = folder / "data_img.h5"
        return cls(
            next((name for name in names if name.exists()), names[0]),
            hdf5 if hdf5.exists() else folder / f"images_{split}.npy",
            folder / f"{split}_rank_reward_cache1.json",
            folder / f"{split}_reward_cache2.json",
        )


class Scene(NamedTuple):
    """A dialogue of any length with the rewards of its rounds."""

    dialogue: Dialogue
    image: int
    """Row of its image in the features."""
    rewards: tuple[float, ...]
    """``[1 + rounds]``: the percentile or distance after the caption, then its change in each round."""
    stopped: bool = False
    """Whether the agent wrote ``<stop>`` after the last round."""

    @property
    def initial(self) -> float:
        """Percentile or distance after the caption."""
        return self.rewards[0]

    @property
    def progress(self) -> tuple[float, ...]:
        """Its change in each round."""
        return self.rewards[1:]

    def first(self, rounds: int, *, stopped: bool = False) -> Scene:
        """The scene up to a number of rounds."""
        return Scene(self.dialogue.first(rounds), self.image, self.rewards[: 1 + rounds], stopped)


class _Part(BaseModel):
    """A part of a file; fields that are not read, such as candidate answers, may have any content."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Texts(_Part):
    question: str
    answer: str


class _Numbers(_Part):
    question: Annotated[int, Field(ge=0)]
    answer: Annotated[int, Field(ge=0)]


R = TypeVar("R", bound=_Part)


class _Item(_Part, Generic[R]):
    caption: str
    image_id: int | str | None = None
    dialog: Annotated[list[R], Field(min_length=ROUNDS, max_length=ROUNDS)]


class _NumberedData(_Part):
    questions: list[str]
    answers: list[str]
    dialogs: Annotated[list[_Item[_Numbers]], Field(min_length=1)]


class _Numbered(_Part):
    data: _NumberedData


class _Scene(_Part):
    model_config = ConfigDict(extra="forbid")
    caption: str
    image: Annotated[int, Field(ge=0)]
    dialog: Annotated[list[_Texts], Field(max_length=ROUNDS)]
    rewards: list[float]


_ITEMS = TypeAdapter(Annotated[list[_Item[_Texts]], Field(min_length=1)])
_NUMBERED_ITEMS = TypeAdapter(_Numbered)
_SCENE_LIST = TypeAdapter(list[_Scene])
_Row = Annotated[list[float], Field(min_length=1 + ROUNDS, max_length=1 + ROUNDS)]
_CACHE = TypeAdapter(list[_Row], config=_Part.model_config)


def read_dialogues(path: str | Path) -> tuple[list[Dialogue], list[int | str | None]]:
    """The dialogues of a split, and the ``image_id`` of each (None if it has none).

    Questions in the files have no question mark; it is appended. The file is a list of dialogues, as of VisDial 0.5,
    which the ILQL paper uses, or has the layout of versions 0.9 and 1.0:
    ``{"data": {"questions": texts, "answers": texts, "dialogs": [...]}}``, where dialogues have the numbers of their
    questions and answers.

    Raises:
        FileError: the file cannot be read, or a dialogue does not have a caption and ten rounds with answers, as in the
            test split of VisDial 1.0.
    """
    text = read_text(path, remedy=_DIALOGUES, max_bytes=_MAX_BYTES)
    if not text.lstrip().startswith("{"):
        items = _parsed(_ITEMS, path, _DIALOGUES, text)
        return [_dialogue(item.caption, item.dialog) for item in items], [item.image_id for item in items]
    data = _parsed(_NUMBERED_ITEMS, path, _NUMBERED, text).data
    dialogues = []
    for number, item in enumerate(data.dialogs):
        try:
            rounds = [Round(data.questions[each.question], data.answers[each.answer]) for each in item.dialog]
        except IndexError as error:
            found = f'has a number in "data.dialogs.{number}.dialog" for which there is no text'
            raise FileError(path, found, _NUMBERED) from error
        dialogues.append(_dialogue(item.caption, rounds))
    return dialogues, [item.image_id for item in data.dialogs]


def read_reward_cache(path: str | Path, dialogues: int) -> list[tuple[float, ...]]:
    """For each of a number of dialogues the initial value and its change in each round, 11 numbers.

    Raises:
        FileError: the file cannot be read, or holds another number of dialogues, or does not hold 11 finite numbers for
            one.
    """
    rows = _parsed(_CACHE, path, _REWARDS)
    if len(rows) != dialogues:
        raise FileError(path, f"holds the rewards of {len(rows)} dialogues, expected {dialogues}", _REWARDS)
    return [tuple(row) for row in rows]


def read_additional_scenes(path: str | Path, images: int) -> list[Scene]:
    """Further dialogues about the images of a split, such as those of a policy, with 0 to 10 rounds.

    The ILQL paper's code stores them as pickles, which are never read. Here the file is a JSON list of
    ``{"caption": ..., "image": row of the features, "dialog": [{"question": ..., "answer": ...}, ...],
    "rewards": [initial value, change in each round]}``.

    Raises:
        FileError: the file cannot be read or a scene is not of this form.
    """
    scenes = []
    for number, item in enumerate(_parsed(_SCENE_LIST, path, _SCENES)):
        if item.image >= images or len(item.rewards) != 1 + len(item.dialog):
            found = f"image {item.image} of {images} and {len(item.rewards)} rewards of {len(item.dialog)} rounds"
            raise FileError(path, f"has an item {number} with {found}", _SCENES)
        scenes.append(Scene(_dialogue(item.caption, item.dialog), item.image, tuple(item.rewards)))
    return scenes


def _parsed(expected: TypeAdapter[Any], path: str | Path, remedy: str, text: str | None = None) -> Any:
    with file_errors(path, "", remedy, ValidationError):
        return expected.validate_json(read_text(path, remedy=remedy, max_bytes=_MAX_BYTES) if text is None else text)


def _dialogue(caption: str, rounds: Iterable[_Texts | Round]) -> Dialogue:
    return Dialogue(caption, tuple(Round(f"{each.question.removesuffix('?')}?", each.answer) for each in rounds))


# -- image features ----------------------------------------------------------------------------------------------------

_FEATURES = "give an HDF5 file with a dataset images_<split>, or a .npy file, of shape [images, features]"


class ImageFeatures:
    """The features ``[N, F]`` of the images of a split, in a file: HDF5 dataset ``images_<split>``, or ``.npy``.

    Only the requested rows are read; each is divided by its L2 norm, as the ILQL paper's code does. A pickled copy in
    another process opens the file again.

    Args:
        path: the file.
        split: "train", "val" or "test"; a ``.npy`` file holds one split.

    Raises:
        FileError: the file is missing or damaged, has no such dataset, or its shape or dtype is wrong. Reading raises
            it for a row that is not finite or cannot be normalised because all of it is 0.
    """

    def __init__(self, path: str | Path, split: str) -> None:
        self.path, self.split = Path(path), split
        self._name = "array" if self.path.suffix == ".npy" else f'dataset "images_{split}"'
        self._opened: tuple[int, Any] | None = None
        self._images, self.feature_size = map(int, self._array.shape)

    def __len__(self) -> int:
        """Number of images."""
        return self._images

    def rows(self, rows: Sequence[int] | Tensor) -> Tensor:
        """The features of some images, in any order, float32 ``[n, F]``."""
        wanted = np.asarray(rows, dtype=np.int64).reshape(-1)
        if len(wanted) == 0:
            return torch.empty(0, self.feature_size)
        unique, inverse = np.unique(wanted, return_inverse=True)  # HDF5 reads increasing rows only
        return self._read(unique)[torch.from_numpy(inverse)]

    def blocks(self, size: int = 4096) -> Iterator[Tensor]:
        """All features in order, in blocks of ``size`` rows."""
        for start in range(0, len(self), size):
            yield self._read(np.arange(start, min(start + size, len(self))))

    def all(self) -> Tensor:
        """All features, float32 ``[N, F]``."""
        return torch.cat(list(self.blocks()))

    def _read(self, rows: np.ndarray) -> Tensor:
        """Increasing rows, normalised."""
        consecutive = rows[-1] - rows[0] == len(rows) - 1  # a slice is far faster than a list of rows
        with file_errors(self.path, f"has a damaged {self._name}", _FEATURES, OSError, RuntimeError):
            read = self._array[int(rows[0]) : int(rows[-1]) + 1] if consecutive else self._array[rows]
        found = torch.from_numpy(np.array(read, dtype=np.float32))
        norm = found.norm(dim=-1, keepdim=True)
        bad = ~norm.isfinite() | (norm == 0)
        if bad.any():
            place = int(bad.flatten().nonzero()[0])
            problem = f"has a row {int(rows[place])} in its {self._name} with the norm {float(norm[place])}"
            raise FileError(self.path, problem, "compute the features of this image again")
        return found / norm

    @property
    def _array(self) -> Any:
        """The array of the file, opened once in each process: HDF5 handles do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    def _open(self) -> Any:
        path, found = regular_file(self.path, _FEATURES), f"has no {self._name} of floating-point numbers"
        try:
            if path.suffix == ".npy":
                array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                array = h5py_module().File(path, "r")[f"images_{self.split}"]
            if len(array.shape) == 2 and all(array.shape) and np.issubdtype(array.dtype, np.floating):
                return array
            found += f" [images, features]: its shape is {list(array.shape)}, its dtype {array.dtype}"
        except (OSError, ValueError, EOFError, KeyError, RuntimeError, AttributeError) as error:
            found += f" that can be read ({one_line(error)})"
        raise FileError(path, found, _FEATURES)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def h5py_module() -> Any:
    """The package ``h5py``; without it, an ImportError names the extra."""
    with needs_extra("An HDF5 file of image features", "visdial", ", or use .npy files"):
        import h5py
    return h5py
