"""The dialogues of the files as rows of a dataset, with rewards and image features."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_lang.data.generate import GameMaker
from torchrl_lang.envs.visual_dialogue.dataset import VisualDialogues
from torchrl_lang.envs.visual_dialogue.rewards import DialogueRewards
from torchrl_lang.envs.visual_dialogue.scenes import scene_episode, scenes_of
from torchrl_lang.schema import FEATURES, FEATURES_MASK
from torchrl_lang.text.rows import to_rows
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["SceneRows"]


class SceneRows(GameMaker):
    """Makes the rows of dialogues: one for each, in mode "agent_stops" eleven; see :func:`scenes_of`.

    Game ``i`` is dialogue ``i``, whatever the seed.

    Args:
        data: with a cache of rewards.
        tokenizer: the tokenizer of the rows.
        row_length: ``T``.
        rewards: ends and rewards of the dialogues.
        image: add ``features`` float32 ``[N, 1, F]``, the feature of the image, and ``features_mask`` bool ``[N, 1]``.

    Raises:
        ValueError: there is no cache of rewards; on calls, a dialogue does not fit a row or cannot be encoded.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.text import word_tokenizer
        >>> from torchrl_lang.envs.visual_dialogue import DialogueRewards, SceneRows, SplitFiles, VisualDialogues
        >>> from torchrl_lang.envs.visual_dialogue import generate_visual_dialogues
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_visual_dialogues(home, {"train": 5}, feature_size=64, npy=True)
        ...     files = SplitFiles.in_folder(home, "train", npy=True)
        ...     _ = files.rank_rewards.write_text(json.dumps([[0.5, 0.125, 0.125] + [0] * 8] * 5))
        ...     data = VisualDialogues(files.dialogues, files.features, "train", rewards=files.rank_rewards)
        ...     rows = SceneRows(data, word_tokenizer([]), 400, rewards=DialogueRewards())(range(3), seed=0)
        >>> rows["features"].shape, rows["token_reward"].sum(-1)
        (torch.Size([3, 1, 64]), tensor([-1., -1., -1.]))
    """

    def __init__(
        self,
        data: VisualDialogues,
        tokenizer: Tokenizer,
        row_length: int,
        *,
        rewards: DialogueRewards,
        image: bool = True,
    ) -> None:
        super().__init__(tokenizer, row_length)
        self.data, self.rewards, self.image = data, rewards, image

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See :meth:`GameMaker.__call__`."""
        scenes = [scene for number in numbers for scene in scenes_of(self.data.record(number), self.rewards)]
        rows = to_rows([scene_episode(scene, self.rewards) for scene in scenes], self.tokenizer, self.row_length)
        if self.image:
            rows[FEATURES] = self.data.features.rows([scene.image for scene in scenes])[:, None]
            rows[FEATURES_MASK] = torch.ones(len(scenes), 1, dtype=torch.bool)
        return rows
