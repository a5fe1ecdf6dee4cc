"""Single rows of episodes."""

from torchrl_lang.text import to_rows


def to_row(episode, tokenizer, row_length, **options):
    """The row of an episode, batch size ``[]``."""
    return to_rows([episode], tokenizer, row_length, **options)[0]
