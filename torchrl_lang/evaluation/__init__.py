"""Evaluate policies on games: summaries, tables, transcripts and plots."""

from torchrl_lang.evaluation.metrics import (
    Summary,
    distinct_n,
    imitation_loss,
    ngram_entropy,
    perplexity,
    solved,
    summarize,
    unanswered,
)
from torchrl_lang.evaluation.play import GameRecords, play_games
from torchrl_lang.evaluation.plots import plot_guess_histogram, read_columns
from torchrl_lang.evaluation.tables import SeedSummary, format_legend, format_seed_table, format_table, over_seeds
from torchrl_lang.evaluation.transcripts import TILES, format_transcript, transcript_turns, write_transcripts
from torchrl_lang.evaluation.utterance_values import (
    Comparison,
    KnownValues,
    preference_rates,
    rank_accuracy,
    text_advantages,
)
from torchrl_lang.evaluation.value_report import value_report

__all__ = [
    "TILES",
    "Comparison",
    "GameRecords",
    "KnownValues",
    "SeedSummary",
    "Summary",
    "distinct_n",
    "format_legend",
    "format_seed_table",
    "format_table",
    "format_transcript",
    "imitation_loss",
    "ngram_entropy",
    "over_seeds",
    "perplexity",
    "play_games",
    "plot_guess_histogram",
    "preference_rates",
    "rank_accuracy",
    "read_columns",
    "solved",
    "summarize",
    "text_advantages",
    "transcript_turns",
    "unanswered",
    "value_report",
    "write_transcripts",
]
