"""Questions about an image that a guesser has to find: the visual dialogue task (ILQL, arXiv 2206.11871, section 6)."""

from torchrl_lang.envs.visual_dialogue.data import VisualDialogues
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.env import VisualDialogueEnv
from torchrl_lang.envs.visual_dialogue.generate import generate_visual_dialogues
from torchrl_lang.envs.visual_dialogue.models import LocalDialogueModels, train_dialogue_models
from torchrl_lang.envs.visual_dialogue.play import QuestionPlayer, played_rounds
from torchrl_lang.envs.visual_dialogue.protocol import RemoteModels
from torchrl_lang.envs.visual_dialogue.rewards import DialogueRewards
from torchrl_lang.envs.visual_dialogue.scoring import compute_reward_caches
from torchrl_lang.envs.visual_dialogue.server import DialogueServer

__all__ = [
    "Dialogue",
    "DialogueRewards",
    "DialogueServer",
    "LocalDialogueModels",
    "QuestionPlayer",
    "RemoteModels",
    "VisualDialogueEnv",
    "VisualDialogues",
    "compute_reward_caches",
    "generate_visual_dialogues",
    "played_rounds",
    "train_dialogue_models",
]
