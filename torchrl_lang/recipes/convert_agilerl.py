"""Make a finished run of an agent that AgileRL's ILQL trained: `evaluate`, `play` and `train --start` then take it."""

from __future__ import annotations

from pathlib import Path

from torchrl_lang._files import refuse_content
from torchrl_lang.data import load_dataset
from torchrl_lang.modules import read_agilerl, save_language_model
from torchrl_lang.recipes.algorithms.finished import ConvertAgileRL
from torchrl_lang.recipes.datasets import check_place, open_task
from torchrl_lang.recipes.offline import OfflineData
from torchrl_lang.recipes.records import write_options


def main(options: ConvertAgileRL) -> Path:
    """Write the run: its policy, and the target Q heads on their own transformer, as values that guide it.

    The online values stay in ``source``, see :func:`~torchrl_lang.objectives.agilerl_loss`.

    Raises:
        FileExistsError: there is something in ``out``.
        ValueError: the agent has another number of tokens than the dataset, or positions for less than its rows.
    """
    check_place(options.out)
    refuse_content(options.out)
    agent, dataset = read_agilerl(options.source), load_dataset(options.data)
    data = OfflineData(dataset, open_task(dataset, options.given_task()), options.data)
    config, rows = agent.policy.config, dataset.rows["tokens"].shape[-1]
    sizes = f"vocabulary of {config.vocab_size}, positions for {config.max_position_embeddings}"
    if config.vocab_size != dataset.tokenizer.vocab_size or config.max_position_embeddings < rows:
        expected = f"the vocabulary of {dataset.tokenizer.vocab_size} and rows of {rows} tokens of the dataset"
        raise ValueError(f"The agent has a {sizes}, which do not fit {expected}: give one of the agent's task.")
    save_language_model(
        options.out / "model",
        agent.policy,
        {"target_qvalue": agent.target_qvalue},
        tokenizer=dataset.tokenizer.config(),
        value_lm=agent.target,
    )
    write_options(options.out / "config.json", options, notes=data.notes(), agilerl=agent.options)
    print(f"{options.out.name}: converted; model in {options.out / 'model'}", flush=True)
    return options.out
