"""Evaluate policies on games: summaries, tables, transcripts and plots."""

from torchrl_lang.evaluation.metrics import (
    Summary,
    distinct_n,
    imitation_loss,
    ngram_entropy,
    perplexity,
    solved,
    summarize,
)
from torchrl_lang.evaluation.play import GameRecords, play_games
from torchrl_lang.evaluation.tables import SeedSummary, format_seed_table, format_table, over_seeds
from torchrl_lang.evaluation.transcripts import format_transcript
from torchrl_lang.evaluation.utterance_values import (
    Comparison,
    KnownValues,
    preference_rates,
    rank_accuracy,
    text_advantages,
)
from torchrl_lang.evaluation.value_report import value_report

__all__ = [
    "Comparison",
    "GameRecords",
    "KnownValues",
    "SeedSummary",
    "Summary",
    "distinct_n",
    "format_seed_table",
    "format_table",
    "format_transcript",
    "imitation_loss",
    "ngram_entropy",
    "over_seeds",
    "perplexity",
    "play_games",
    "preference_rates",
    "rank_accuracy",
    "solved",
    "summarize",
    "text_advantages",
    "value_report",
]
