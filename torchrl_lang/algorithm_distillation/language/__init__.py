"""Learning histories as text: records of runs, templates, rows for causal language models, a policy and metrics."""

from torchrl_lang.algorithm_distillation.language.block_rows import BlockTemplate, pack_blocks
from torchrl_lang.algorithm_distillation.language.metrics import next_token_metrics, reward_accuracy
from torchrl_lang.algorithm_distillation.language.policy import LanguageHistoryPolicy
from torchrl_lang.algorithm_distillation.language.quantizer import Quantizer
from torchrl_lang.algorithm_distillation.language.records import TextRecord, read_run_logs, split_texts
from torchrl_lang.algorithm_distillation.language.run_recorder import RunRecorder, read_run
from torchrl_lang.algorithm_distillation.language.step_rows import StepRows, template_tokenizer
from torchrl_lang.algorithm_distillation.language.template import StepTemplate, steps_to_text

__all__ = [
    "BlockTemplate",
    "LanguageHistoryPolicy",
    "Quantizer",
    "RunRecorder",
    "StepRows",
    "StepTemplate",
    "TextRecord",
    "next_token_metrics",
    "pack_blocks",
    "read_run",
    "read_run_logs",
    "reward_accuracy",
    "split_texts",
    "steps_to_text",
    "template_tokenizer",
]
