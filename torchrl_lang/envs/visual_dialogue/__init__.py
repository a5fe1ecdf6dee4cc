"""Questions about an image that a guesser has to find: the visual dialogue task (ILQL, arXiv 2206.11871, section 6)."""

from torchrl_lang.envs.visual_dialogue.client import RemoteModels
from torchrl_lang.envs.visual_dialogue.data import SceneRows, VisualDialogues
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels, Round
from torchrl_lang.envs.visual_dialogue.env import VisualDialogueEnv
from torchrl_lang.envs.visual_dialogue.files import SplitFiles
from torchrl_lang.envs.visual_dialogue.generate import generate_visual_dialogues
from torchrl_lang.envs.visual_dialogue.models.local import LocalDialogueModels, save_dialogue_models
from torchrl_lang.envs.visual_dialogue.models.training import DialogueTraining, train_dialogue_models
from torchrl_lang.envs.visual_dialogue.play import QuestionPlayer, played_rounds, yes_no_rate
from torchrl_lang.envs.visual_dialogue.rewards import DialogueRewards, PercentileCutoff
from torchrl_lang.envs.visual_dialogue.scoring import compute_reward_caches
from torchrl_lang.envs.visual_dialogue.server import DialogueServer

__all__ = [
    "Dialogue",
    "DialogueModels",
    "DialogueRewards",
    "DialogueServer",
    "DialogueTraining",
    "LocalDialogueModels",
    "PercentileCutoff",
    "QuestionPlayer",
    "RemoteModels",
    "Round",
    "SceneRows",
    "SplitFiles",
    "VisualDialogueEnv",
    "VisualDialogues",
    "compute_reward_caches",
    "generate_visual_dialogues",
    "played_rounds",
    "save_dialogue_models",
    "train_dialogue_models",
    "yes_no_rate",
]
