"""Makers of datasets of visual dialogues."""

from torchrl_lang.envs.visual_dialogue.makers.generator import generate_visual_dialogues

__all__ = ["generate_visual_dialogues"]
