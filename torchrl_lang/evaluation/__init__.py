"""Evaluate policies on games: summaries, tables, transcripts and plots."""

from torchrl_lang.evaluation.imitation import imitation_loss
from torchrl_lang.evaluation.metrics import Summary, solved, summarize, unanswered
from torchrl_lang.evaluation.play import play_games
from torchrl_lang.evaluation.plots import plot_guess_histogram, plot_learning_curves, read_columns
from torchrl_lang.evaluation.rank_accuracy import KnownValues, rank_accuracy
from torchrl_lang.evaluation.records import GameRecords
from torchrl_lang.evaluation.tables import format_table
from torchrl_lang.evaluation.transcripts import TILES, format_transcript, transcript_turns, write_transcripts
from torchrl_lang.evaluation.value_report import ValueReport, value_report

__all__ = [
    "TILES",
    "GameRecords",
    "KnownValues",
    "Summary",
    "ValueReport",
    "format_table",
    "format_transcript",
    "imitation_loss",
    "play_games",
    "plot_guess_histogram",
    "plot_learning_curves",
    "rank_accuracy",
    "read_columns",
    "solved",
    "summarize",
    "transcript_turns",
    "unanswered",
    "value_report",
    "write_transcripts",
]
