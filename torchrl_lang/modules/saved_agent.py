"""Save and load whole agents: model, heads, tokenizer with its row format, guidance, decoding options and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrl_lang._files import FileError
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.stop_strings import StopStrings
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.saved_guidance import read_guidance, read_options, saved_guidance
from torchrl_lang.modules.saved_heads import Head, own_head
from torchrl_lang.modules.saved_readers import FEATURES_HEAD, saved_actor
from torchrl_lang.modules.saving import MANIFEST, read_model, write_model
from torchrl_lang.modules.trunk import trunk_of
from torchrl_lang.text.tokenizer_config import tokenizer_from_config
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["SavedAgent", "load_agent", "push_agent", "save_agent"]

_OF_DECODER: Mapping[str, type] = {
    "beams": int,
    "candidates": int,
    "advantage_weight": float,
    "end_value_weight": float,
    "log_prob_weight": float,
    "diagnostics": bool,
}
_OF_RULE: Mapping[str, type] = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "vocab_size": int}
_DECODING: Mapping[str, type] = {"method": str, "forbidden": list, **_OF_DECODER, **_OF_RULE}


class SavedAgent(NamedTuple):
    """The result of :func:`load_agent`."""

    policy: UtteranceActor
    """Decodes as the saved policy did."""
    tokenizer: Tokenizer
    """Writes rows in the saved row format."""
    task: dict[str, Any]
    """The description of the task that was saved."""


def save_agent(
    folder: str | Path,
    policy: UtteranceActor,
    tokenizer: Tokenizer,
    *,
    task: Mapping[str, Any] | None = None,
    data: str | None = None,
    results: Sequence[Mapping[str, Any]] = (),
    command: str | None = None,
) -> Path:
    """Write a policy and all that it needs to ``folder``, atomically, with a model card (``README.md``).

    The folder is one of :func:`save_language_model`: ``transformers`` alone loads its model and tokenizer. Its manifest
    also has the length of an utterance, the decoding options and the strength of the guidance. The heads of the
    guidance and of ``value=`` and the projector of features (:func:`~torchrl_lang.modules.with_features`) are saved
    with it. PEFT adapters are merged. A seed is not saved.

    Args:
        folder: as for :func:`save_language_model`.
        policy: over a Hugging Face model; its guidance may be a :class:`~torchrl_lang.modules.LikelihoodGuidance`. A
            value trunk of its own, with its projector of features, is saved as a second model. Of heads that are not of
            this library the weights are saved; loading needs modules to fill, ``load_agent(folder, heads={"qvalue":
            module})``.
        tokenizer: the environment's, of any kind that :func:`~torchrl_lang.text.tokenizer_from_config` reads.
        task: a description of the task as JSON, for :attr:`SavedAgent.task` and the card.
        data: what the agent learned from, for the card.
        results: rows of a table for the card, each with the same keys.
        command: the command that trained the agent, for the card.

    Raises:
        ValueError: the guidance has a trunk that cannot be saved, or the trunk reads returns;
            otherwise as :func:`save_language_model`.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.modules import (
        ...     QValueHead, UtteranceActor, ValueGuidance, causal_lm, language_actor, load_agent, save_agent
        ... )
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> guidance = ValueGuidance(QValueHead(8, tokenizer.vocab_size), beta=4.0)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, guidance=guidance, method="greedy")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     agent = load_agent(save_agent(folder, policy, tokenizer, task={"name": "letters"}))
        >>> agent.policy.method, agent.policy.decoder.rule.guidance.beta, agent.task
        ('greedy', 4.0, {'name': 'letters'})
    """
    decoder, rule = policy.decoder, policy.decoder.rule
    guidance = saved_guidance(rule.guidance)
    trunk = trunk_of(split_actor(decoder.actor).trunk)
    if trunk is not None and trunk.returns is not None:
        raise ValueError(
            "The policy is asked for returns, which save_agent cannot write: save its language model with "
            "save_language_model and the head 'returns'."
        )
    decoding = {name: getattr(decoder, name) for name in _OF_DECODER} | {name: getattr(rule, name) for name in _OF_RULE}
    decoding |= {"method": policy.method, "forbidden": rule.forbidden.tolist()}
    stop = None if decoder.stop is None else list(decoder.stop.texts)
    heads = {"state_value": decoder.value, FEATURES_HEAD: None if trunk is None else trunk.features}
    kept = guidance.heads | {name: head for name, head in heads.items() if head is not None}
    agent = {
        "action_length": decoder.action_length,
        "decoding": decoding,
        "stop": stop,
        "guidance": guidance.options,
        "task": dict(task or {}),
    }
    described = {"tokenizer": tokenizer.config(), "agent": agent}
    custom = [name for name, head in kept.items() if not isinstance(own_head(head), Head)]
    card = _card(task or {}, data, results, command, custom)
    return write_model(folder, decoder.actor, kept, described, card=card, value_lm=guidance.value_lm)


def load_agent(
    folder: str | Path,
    *,
    heads: Mapping[str, nn.Module] | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> SavedAgent:
    """Load an agent that :func:`save_agent` wrote. The process needs nothing of what trained it.

    Args:
        folder: the agent's folder.
        heads: modules by name for the saved heads of classes that are not this library's, filled in place.
        seed: seed of its random generator; default from the operating system.
        device: device of the model; default the CPU.
        **kwargs: ``trust_remote_code``, and arguments of ``AutoModelForCausalLM.from_pretrained`` such as ``dtype``.

    Raises:
        FileNotFoundError: there is no such folder.
        FileError: a file is missing or damaged, or the folder holds a model without an agent.
        ValueError: ``heads`` are not those that the folder needs; the message names them.
    """
    saved, manifest = read_model(folder, heads, **kwargs)
    remedy = "save it with save_agent, or read it with load_language_model"
    if manifest is None or "agent" not in manifest.content or saved.tokenizer is None:
        raise FileError(Path(folder) / MANIFEST, "describes no agent", remedy)
    agent = manifest.object("agent")
    try:
        tokenizer = tokenizer_from_config(saved.tokenizer)
    except ValueError as error:
        raise FileError(Path(folder), f"has no tokenizer that can be read ({error})", remedy) from error
    for part in (saved.lm, *saved.heads.values(), *([] if saved.value_lm is None else [saved.value_lm])):
        part.to(device)
    stop = agent.take("stop", list) if agent.content.get("stop") else None
    policy = UtteranceActor(
        saved_actor(saved),
        tokenizer.control,
        agent.take("action_length", int),
        guidance=read_guidance(saved, agent),
        value=saved.heads.get("state_value"),
        seed=seed,
        stop=None if stop is None else StopStrings(stop, tokenizer),
        **read_options(agent.object("decoding"), _DECODING),
    )
    return SavedAgent(policy, tokenizer, agent.take("task", dict))


def push_agent(
    folder: str | Path,
    repository: str,
    *,
    heads: Mapping[str, nn.Module] | None = None,
    private: bool = True,
    **kwargs: Any,
) -> str:
    """Upload a saved agent to the Hugging Face hub, in a repository that is created if it does not exist.

    Args:
        folder: the agent's folder, which is read and checked first.
        repository: ``"user/name"``.
        heads: as for :func:`load_agent`, to check the folder with.
        private: whether only you can read a new repository.
        **kwargs: passed to ``huggingface_hub.HfApi``, such as ``token`` and ``endpoint``.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import HfApi  # a local import, because it takes a second

    read_model(folder, heads)
    api = HfApi(**kwargs)
    api.create_repo(repository, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload an agent"))


def _card(
    task: Mapping[str, Any],
    data: str | None,
    results: Sequence[Mapping[str, Any]],
    command: str | None,
    custom: Sequence[str],
) -> str:
    """A model card in Markdown."""
    given = ", ".join(f'"{name}": …' for name in custom)
    heads = f", heads={{{given}}}" if custom else ""
    name = task.get("name") or task.get("task") or "a language task"
    parts = [
        "---\nlibrary_name: torchrl_lang\npipeline_tag: text-generation\ntags:\n- reinforcement-learning\n---",
        f"# Agent for {name}",
        "A language model with its value heads, tokenizer, row format and decoding options.",
        f'```python\nfrom torchrl_lang.modules import load_agent\n\nagent = load_agent("this folder"{heads})\n```',
    ]
    if task:
        parts.append("## Task\n\n" + "\n".join(f"- {key}: {value}" for key, value in task.items()))
    if data is not None:
        parts.append(f"## Data\n\n{data}")
    if results:
        head = list(results[0])
        lines = [head, ["---"] * len(head), *([str(row[key]) for key in head] for row in results)]
        parts.append("## Results\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    if command is not None:
        parts.append(f"## Training\n\n```bash\n{command}\n```")
    return "\n\n".join(parts) + "\n"
