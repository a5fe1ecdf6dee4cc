"""The visual dialogue demo: imitation and ILQL under three rewards, on scenes without training dialogues."""

from torchrl_lang.recipes.visual_dialogue_demo.main import VisualDialogueDemo, main

__all__ = ["VisualDialogueDemo", "main"]
