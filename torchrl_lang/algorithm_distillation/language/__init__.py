"""Learning histories as text: templates, rows for causal language models, a policy and metrics."""

from torchrl_lang.algorithm_distillation.language.block_rows import (
    PackedBlocks,
    completion_rows,
    pack_blocks,
    read_blocks,
)
from torchrl_lang.algorithm_distillation.language.block_template import Block, BlockTemplate
from torchrl_lang.algorithm_distillation.language.history_dataset import HistoryDataset
from torchrl_lang.algorithm_distillation.language.history_policy import LanguageHistoryPolicy
from torchrl_lang.algorithm_distillation.language.language_metrics import (
    next_token_metrics,
    rank_correlation,
    reward_accuracy,
)
from torchrl_lang.algorithm_distillation.language.quantizers import Bins, Decimals, Levels, Quantizer
from torchrl_lang.algorithm_distillation.language.run_logs import RunLogs, read_run_logs
from torchrl_lang.algorithm_distillation.language.run_texts import run_texts
from torchrl_lang.algorithm_distillation.language.step_rows import TOKEN_KIND, StepRows
from torchrl_lang.algorithm_distillation.language.step_template import StepTemplate, TokenKind
from torchrl_lang.algorithm_distillation.language.step_text import parse_steps, steps_to_text
from torchrl_lang.algorithm_distillation.language.step_tokens import StepTokens, template_tokenizer
from torchrl_lang.algorithm_distillation.language.text_history import (
    TextHistory,
    group_episodes,
    in_epoch_order,
    read_text_history,
    write_text_history,
)
from torchrl_lang.algorithm_distillation.language.text_split import TextSplit, split_texts

__all__ = [
    "TOKEN_KIND",
    "Bins",
    "Block",
    "BlockTemplate",
    "Decimals",
    "HistoryDataset",
    "LanguageHistoryPolicy",
    "Levels",
    "PackedBlocks",
    "Quantizer",
    "RunLogs",
    "StepRows",
    "StepTemplate",
    "StepTokens",
    "TextHistory",
    "TextSplit",
    "TokenKind",
    "completion_rows",
    "group_episodes",
    "in_epoch_order",
    "next_token_metrics",
    "pack_blocks",
    "parse_steps",
    "rank_correlation",
    "read_blocks",
    "read_run_logs",
    "read_text_history",
    "reward_accuracy",
    "run_texts",
    "split_texts",
    "steps_to_text",
    "template_tokenizer",
    "write_text_history",
]
