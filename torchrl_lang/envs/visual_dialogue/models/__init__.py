"""Models of visual dialogues: an answerer and an image guesser, and how they are trained and saved."""

from torchrl_lang.envs.visual_dialogue.models.answerer import Answerer
from torchrl_lang.envs.visual_dialogue.models.batch import DialogueBatch
from torchrl_lang.envs.visual_dialogue.models.encoder import DialogueEncoder
from torchrl_lang.envs.visual_dialogue.models.folder import (
    SavedDialogueModels,
    load_dialogue_models,
    save_dialogue_models,
)
from torchrl_lang.envs.visual_dialogue.models.guesser import ImageGuesser, rank_percentile
from torchrl_lang.envs.visual_dialogue.models.local import LocalDialogueModels
from torchrl_lang.envs.visual_dialogue.models.training import DialogueTraining, train_dialogue_models
from torchrl_lang.envs.visual_dialogue.models.words import WordIndex

__all__ = [
    "Answerer",
    "DialogueBatch",
    "DialogueEncoder",
    "DialogueTraining",
    "ImageGuesser",
    "LocalDialogueModels",
    "SavedDialogueModels",
    "WordIndex",
    "load_dialogue_models",
    "rank_percentile",
    "save_dialogue_models",
    "train_dialogue_models",
]
