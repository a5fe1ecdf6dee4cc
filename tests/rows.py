"""Single rows of episodes."""

from torchrl_lang.text import to_rows

UNUSUAL = "aZ0 \n\t\r\0\x7f'\"\\é\u0301ßǆ日\u200b\u2028\ufffd\ue000🙂\U0010ffff"
"""Characters of all kinds. Hypothesis makes tables of all of Unicode, for seconds, where it is given none."""


def to_row(episode, tokenizer, row_length, **options):
    """The row of an episode, batch size ``[]``."""
    return to_rows([episode], tokenizer, row_length, **options)[0]
