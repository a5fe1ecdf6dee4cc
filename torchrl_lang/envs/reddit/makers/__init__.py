"""Makers of datasets of Reddit comments."""

from torchrl_lang.envs.reddit.makers.generator import GeneratedComment, generate_reddit_comments, generated_comments

__all__ = ["GeneratedComment", "generate_reddit_comments", "generated_comments"]
