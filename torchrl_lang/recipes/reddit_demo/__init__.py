"""The Reddit demo: copies of the data and ILQL with and without noise in the reward, on parents of test comments."""

from torchrl_lang.recipes.reddit_demo.main import RedditDemo, main

__all__ = ["RedditDemo", "main"]
