"""The report of the demo: tables, transcripts with captions, and the questions that values find best and worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrl_lang._files import read_json, write_file, write_json
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.evaluation import format_seed_table, format_table, text_advantages
from torchrl_lang.evaluation.tables import format_columns
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.offline import held_out_rows
from torchrl_lang.recipes.visual_dialogue_demo.comparison import Comparison, Row, cross_rewards
from torchrl_lang.recipes.visual_dialogue_demo.players import DialoguePlayer

__all__ = ["advantages", "format_advantages", "format_comparison", "format_cross_rewards", "write_dialogues"]

_HELD_OUT = 500
_SHOWN = 10
"""Questions of the highest and of the lowest advantage."""


def format_comparison(comparison: Comparison, task: VisualDialogueTask) -> str:
    """The table of one reward; with several seeds also the returns of each; and the returns by weight of the values."""
    penalty = comparison.penalty
    summaries = [row.summary(task, penalty) for row in comparison.rows]
    parts = [f"Reward {penalty!r}, {summaries[0].games} dialogues about test scenes", format_table(summaries)]
    trained = [row for row in comparison.rows if row.decodings]
    if any(len(row.plays) > 1 for row in trained):
        seeds = [row.over_seeds(penalty) for row in trained]
        parts.append(format_seed_table(seeds, title=f"return, {penalty}"))
    for title, curve in comparison.curves.items():
        means = ", ".join(f"{beta}: {sum(found) / len(found):.2f}" for beta, found in curve.items())
        parts.append(f"{title}, return by beta on validation scenes: {means}")
    return "\n\n".join(parts)


def format_cross_rewards(comparisons: Sequence[Comparison], task: VisualDialogueTask) -> str:
    """For each trained player a line for each reward of training (of BC: of the choice of its decoding)."""
    titles = dict.fromkeys(row.title for each in comparisons for row in each.rows if row.decodings)
    names = [str(each.penalty) for each in comparisons]
    lines = [["player", "trained on", *(f"return, {name}" for name in names)]]
    for title in titles:
        for trained, returns in cross_rewards(comparisons, task, title).items():
            cells = [returns[name] for name in names]
            shown = [f"{mean:.2f}" + ("" if error is None else f" ± {error:.2f}") for mean, error in cells]
            lines.append([title, trained, *shown])
    return f"All rewards of the same dialogues\n{format_columns(lines, '<' * len(lines[0]))}"


def write_dialogues(
    path: Path, comparison: Comparison, task: VisualDialogueTask, titles: Sequence[str], *, scenes: int = 5
) -> None:
    """Write the dialogues of some players about the first test scenes, with rewards, captions and percentiles."""
    rows = [row for title in titles if (row := comparison.row(title)) is not None]
    captions = [dialogue.caption for dialogue in task.data("test").dialogues[:scenes]]
    blocks = []
    for scene, caption in enumerate(captions[: len(comparison.rows[0].plays[0])]):
        blocks.append(f"scene {scene}: {caption}")
        blocks += [_dialogue(row, scene, comparison) for row in rows]
    write_file(path, "\n\n".join(blocks) + "\n")


def _dialogue(row: Row, scene: int, comparison: Comparison) -> str:
    play = row.plays[0]
    rewards, percentiles = play.question_rewards(comparison.penalty)[scene], play.progress[scene].cumsum(-1).tolist()
    lines = [f"{row.name}: return {sum(rewards):g}, percentile {percentiles[0]:.3f} after the caption"]
    for each, reward, percentile in zip(play.rounds[scene], rewards, percentiles[1:], strict=False):
        lines += [f"> {each.question or '(nothing)'}  ({reward:g})", f"< {each.answer}  [{percentile:.3f}]"]
    return "\n".join(lines)


def advantages(player: DialoguePlayer, data: Path) -> Mapping[str, Any]:
    """The held-out questions of the highest and of the lowest learned advantage, kept in the folder of an ILQL run."""
    path = player.folder / "advantages.json"
    if not path.exists():
        model, tokenizer = player.finished.model, player.finished.tokenizer
        rows = held_out_rows(load_dataset(data), _HELD_OUT)
        heads: Any = model.heads
        scored = (saved_actor(model), heads["target_qvalue"], heads["value"], rows)
        found = text_advantages(*scored, tokenizer, min_count=max(1, len(rows) // 100))
        parts = {"highest": found[:_SHOWN], "lowest": found[::-1][:_SHOWN]}
        write_json(path, {name: [asdict(one) for one in part] for name, part in parts.items()})
    return read_json(path, remedy="delete it: it is computed again")


def format_advantages(penalty: str, found: Mapping[str, Any]) -> str:
    """The questions as text."""
    lines = [f"Advantages of questions that ILQL learned under {penalty!r}"]
    for name, part in found.items():
        lines.append(name)
        lines += [f"  {one['advantage']:+.2f}  {one['text']}  ({one['count']} times)" for one in part]
    return "\n".join(lines)
