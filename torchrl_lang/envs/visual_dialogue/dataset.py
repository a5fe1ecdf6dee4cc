"""Visual dialogues with the features of their images and the rewards of their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrl_lang._files import FileError
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.features import ImageFeatures
from torchrl_lang.envs.visual_dialogue.files import (
    SceneRecord,
    read_additional_scenes,
    read_dialogues,
    read_reward_cache,
)
from torchrl_lang.envs.visual_dialogue.rewards import DialogueRewards
from torchrl_lang.envs.visual_dialogue.scenes import Scene, scene_episode, scenes_of, whole_scene
from torchrl_lang.text.episodes import Episode

__all__ = ["VisualDialogues"]


class VisualDialogues:
    """The dialogues of a split, the features of their images, and the rewards of their rounds.

    Dialogue ``i`` is about image ``i`` of the features.

    Args:
        dialogues: the file of dialogues, see :func:`read_dialogues`.
        features: the file of image features, see :class:`ImageFeatures`.
        split: "train", "val" or "test": the features ``images_<split>`` of an HDF5 file.
        rewards: a cache of rewards, see :func:`read_reward_cache`; scenes need it.
        additional: a file of further scenes, see :func:`read_additional_scenes`.
        normalize: L2-normalise the features.

    Raises:
        FileError: a file is missing, damaged or does not fit the others; the message names file, item and field.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.visual_dialogue import SplitFiles, VisualDialogues, generate_visual_dialogues
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_visual_dialogues(home, {"val": 5}, feature_size=64, npy=True)
        ...     files = SplitFiles.in_folder(home, "val", npy=True)
        ...     data = VisualDialogues(files.dialogues, files.features, "val")
        ...     len(data), data.features.rows([4]).shape
        (5, torch.Size([1, 64]))
    """

    def __init__(
        self,
        dialogues: str | Path,
        features: str | Path,
        split: str,
        *,
        rewards: str | Path | None = None,
        additional: str | Path | None = None,
        normalize: bool = True,
    ) -> None:
        self.dialogues: Sequence[Dialogue]
        self.dialogues, self.image_ids = read_dialogues(dialogues)
        self.features = ImageFeatures(features, split, normalize=normalize)
        if len(self.features) != len(self.dialogues):
            found = f"holds {len(self.features)} images, but {dialogues} holds {len(self.dialogues)} dialogues"
            raise FileError(features, found, "give the features of the same split, in the same order")
        self.rewards = None if rewards is None else read_reward_cache(rewards, len(self.dialogues))
        self.additional = [] if additional is None else read_additional_scenes(additional, len(self.features))
        self._additional_path = additional

    def __len__(self) -> int:
        """Number of dialogues, without additional scenes."""
        return len(self.dialogues)

    def scenes(self, rewards: DialogueRewards) -> list[Scene]:
        """The dialogues cut where they end, in order, then the additional scenes; see :func:`scenes_of`.

        Raises:
            ValueError: there is no cache of rewards.
            FileError: an additional scene does not end.
        """
        records = map(self.record, range(len(self)))
        return [scene for record in records for scene in scenes_of(record, rewards)] + self._additional(rewards)

    def record(self, number: int) -> SceneRecord:
        """A dialogue with all its rounds and their rewards.

        Raises:
            ValueError: there is no cache of rewards.
        """
        if self.rewards is None:
            raise ValueError(
                "Scenes need a cache of rewards: give rewards, for instance train_rank_reward_cache1.json."
            )
        return SceneRecord(self.dialogues[number], number, self.rewards[number])

    def episodes(self, rewards: DialogueRewards) -> list[Episode]:
        """The scenes as episodes with rewards, see :func:`scene_episode`."""
        return [scene_episode(scene, rewards) for scene in self.scenes(rewards)]

    def _additional(self, rewards: DialogueRewards) -> list[Scene]:
        scenes = []
        for number, record in enumerate(self.additional):
            try:
                scenes.append(whole_scene(record, rewards))
            except ValueError as error:
                assert self._additional_path is not None
                remedy = "leave it out, or use another mode or cutoff rule"
                raise FileError(self._additional_path, f"has a wrong item {number} ({error})", remedy) from error
        return scenes
