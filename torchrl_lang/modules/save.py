"""Save and load language models, value heads and whole agents as a Hugging Face folder, without pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn

from torchrl_lang import __version__
from torchrl_lang._files import CHECKSUMS, FileError, Record, RecordFolder, file_errors, non_finite
from torchrl_lang.modules.actor import language_actor, split_actor, with_features
from torchrl_lang.modules.decoding.guidance import LikelihoodGuidance, UtteranceValueGuidance, ValueGuidance
from torchrl_lang.modules.decoding.next_token import StopStrings
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.heads import TiedQValueHead
from torchrl_lang.modules.hugging_face import base_module, inner_linear, merged_copy
from torchrl_lang.modules.language_model import load_causal_lm, quiet_transformers
from torchrl_lang.modules.reply import chat, dialogue_of, replies
from torchrl_lang.modules.saved_heads import HEADS, Head, HeadRecord, describe_heads, own_head, read_heads, write_heads
from torchrl_lang.modules.trunk import Trunk, trunk_of, unwrapped
from torchrl_lang.text.chat_template import Message
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.messages import Dialogue
from torchrl_lang.text.tokenizer_files import tokenizer_from_config, write_tokenizer
from torchrl_lang.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEATURES_HEAD = "features"
"""Name of the head that projects features for the language model, see :func:`~torchrl_lang.modules.with_features`."""
VALUE_FEATURES_HEAD = "value_features"
"""Likewise for the model of values."""

_CARD, _VALUE_LM = "README.md", "value_lm"
_REMEDY = "save the model again, or copy the folder again"


# What is saved of an UtteranceActor, and of its guidance.
_DECODING = (
    *("method", "forbidden", "beams", "candidates", "advantage_weight", "end_value_weight", "log_prob_weight"),
    *("diagnostics", "temperature", "top_k", "top_p", "min_p", "vocab_size"),
)
_GUIDANCE = ("beta", "weighting", "clip", "include_logits", "value_min", "value_max", "ratio")
_KINDS = {"likelihoods": LikelihoodGuidance, "utterances": UtteranceValueGuidance, "tokens": ValueGuidance}


class AgentRecord(Record):
    """An agent beside its model."""

    action_length: int
    decoding: dict[str, Any]
    stop: tuple[str, ...] | None
    guidance: dict[str, Any] | None
    task: dict[str, Any]


class ModelRecord(Record):
    """Content of ``torchrl_lang.json``: heads, tokenizer and agent of a model."""

    VERSION: ClassVar[int] = 3

    heads: dict[str, HeadRecord]
    tokenizer: dict[str, Any] | None = None
    value_lm: bool = False
    agent: AgentRecord | None = None
    history: dict[str, Any] | None = None


_FOLDER = RecordFolder(ModelRecord, "torchrl_lang.json", (HEADS,), remedy=_REMEDY)


class SavedModel(NamedTuple):
    """The result of :func:`load_language_model`."""

    lm: PreTrainedModel
    """The language model."""
    heads: dict[str, Any]
    """Value heads, embeddings of returns and of features, by the names of saving; tied ones are tied to ``lm``."""
    tokenizer: dict[str, Any] | None
    """Configuration of the tokenizer, if one was saved."""
    value_lm: PreTrainedModel | None = None
    """A second model: the one whose states the heads read, or whose token probabilities are values (Q-SFT)."""


def save_language_model(
    folder: str | Path,
    lm: PreTrainedModel | ProbabilisticTensorDictSequential | Any,
    heads: Mapping[str, nn.Module] | None = None,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    value_lm: PreTrainedModel | None = None,
) -> Path:
    """Write a language model and its value heads to ``folder``, atomically.

    The language model is written by ``save_pretrained`` and the tokenizer as one of transformers, so other programs can
    load both, see ``write_tokenizer``. The heads are written to ``heads.safetensors``, their
    shapes and the tokenizer's configuration to ``torchrl_lang.json``, and the SHA-256 of every file to
    ``checksums.json``.

    PEFT adapters are merged, in a copy, into the weights: the folder contains a plain model that computes the same.

    Args:
        folder: created if it does not exist. A saved model is replaced when the new one is complete; other folders are
            not changed. One process at a time may write it.
        lm: a language model, with or without PEFT's ``PeftModel`` around it, or an actor over one.
        heads: value heads by name, such as ``{"qvalue": …, "target_qvalue": …, "value": …}``; likewise a
            :class:`~torchrl_lang.modules.ReturnEmbedding` or a :class:`~torchrl_lang.modules.FeatureEmbedding`. Of a
            module of another class the weights are written; loading needs one to fill, ``heads={name: module}``.
        tokenizer: ``tokenizer.config()``.
        value_lm: a second model, written to a folder within, whose states the heads read in place of those of ``lm``;
            without heads one whose token probabilities are values.

    Raises:
        ValueError: the actor's trunk is not a Hugging Face model, so there is no plain format for it; a head is tied to
            the embedding of another model; or some weights are not finite.
        FileExistsError: ``folder`` contains other files than a saved model's.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.modules import ValueHead, causal_lm, load_language_model, save_language_model
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = load_language_model(save_language_model(folder, lm, {"value": ValueHead(8)}))
        >>> sorted(saved.heads), saved.lm.config.vocab_size
        (['value'], 11)
    """
    return write_model(folder, lm, heads, tokenizer=tokenizer and dict(tokenizer), value_lm=value_lm)


def write_model(
    folder: str | Path,
    lm: PreTrainedModel | ProbabilisticTensorDictSequential | Any,
    heads: Mapping[str, nn.Module] | None = None,
    *,
    value_lm: PreTrainedModel | None = None,
    card: str | None = None,
    **described: Any,
) -> Path:
    """Write a model, its heads, fields of its :class:`ModelRecord` and a model card."""
    own = {name: own_head(head) for name, head in (heads or {}).items()}
    model = language_model_of(lm) if isinstance(lm, ProbabilisticTensorDictSequential) else unwrapped(lm)
    models = {"": model} if value_lm is None else {"": model, _VALUE_LM: unwrapped(value_lm)}
    record = ModelRecord(heads=describe_heads(own, [*models.values()][-1]), value_lm=value_lm is not None, **described)
    models = {place: merged_copy(each) for place, each in models.items()}
    if wrong := [name for each in models.values() for name in non_finite(each.named_parameters())]:
        raise ValueError(f"Weights are not finite, such as {', '.join(wrong[:3])}: the model is not saved.")
    # A link stays: the folder that it points to is replaced.
    with _FOLDER.write(Path(folder).resolve(), record, replace=True) as new, quiet_transformers():
        for place, each in models.items():
            each.save_pretrained(new / place)
        if record.tokenizer is not None:
            write_tokenizer(record.tokenizer, new)
        write_heads(new / HEADS, own)
        if card is not None:
            (new / _CARD).write_text(card, encoding="utf-8")
    return Path(folder)


def load_language_model(
    folder: str | Path, *, heads: Mapping[str, nn.Module] | None = None, trust_remote_code: bool = False, **kwargs: Any
) -> SavedModel:
    """Load a model that :func:`save_language_model` wrote, on the CPU and in evaluation mode.

    All files are compared with their checksums first, which takes about a second per gigabyte. Other Hugging Face
    folders, without heads and checksums, can be loaded, too; see :func:`~torchrl_lang.modules.load_causal_lm` for the
    checks.

    Args:
        folder: the model's folder.
        heads: modules by name for the saved heads of classes that are not this library's, filled in place.
        trust_remote_code: run code that comes with the model, with all rights of this process. Read that code first.
        **kwargs: passed to ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        FileNotFoundError: there is no such folder.
        FileError: a file is missing or damaged, or is not what was saved.
        ValueError: ``heads`` are not those that the folder needs; the message names them.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> from torchrl_lang.modules import causal_lm, load_language_model, save_language_model
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save = save_language_model(folder, lm, {"qvalue": nn.Linear(8, 11)})
        ...     saved = load_language_model(folder, heads={"qvalue": nn.Linear(8, 11)})
        >>> saved.heads["qvalue"]
        Linear(in_features=8, out_features=11, bias=True)
    """
    return read_model(folder, heads, trust_remote_code=trust_remote_code, **kwargs)[0]


def read_model(
    folder: str | Path, given: Mapping[str, nn.Module] | None = None, **kwargs: Any
) -> tuple[SavedModel, ModelRecord | None]:
    """The model in a folder, see :func:`load_language_model`, and its record, if this library saved the folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no model in {folder}: it is not a folder.")
    if not (folder / _FOLDER.config).exists() and not (folder / CHECKSUMS).exists():
        return SavedModel(load_causal_lm(folder, **kwargs), {}, None), None
    record = _FOLDER.read(folder)
    lm = load_causal_lm(folder, **kwargs)
    value_lm = load_causal_lm(folder / _VALUE_LM, **kwargs) if record.value_lm else None
    heads = read_heads(folder / HEADS, record.heads, value_lm or lm, given or {}, remedy=_REMEDY)
    return SavedModel(lm, heads, record.tokenizer, value_lm), record


def language_model_of(actor: ProbabilisticTensorDictSequential) -> PreTrainedModel:
    """The Hugging Face model of an actor, which shares its weights.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.modules.save import language_model_of
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> language_model_of(language_actor(lm)).get_input_embeddings() is lm.get_input_embeddings()
        True
    """
    parts = split_actor(actor)
    trunk, head = trunk_of(parts.trunk), inner_linear(getattr(parts.head, "module", None))
    if trunk is None or not isinstance(base_module(head), nn.Linear):
        raise ValueError(f"Only an actor of a Trunk and a linear head is a Hugging Face model, got {parts}.")
    return _model_around(trunk, head)


def _model_around(trunk: Trunk, head: nn.Module | None = None) -> PreTrainedModel:
    """The Hugging Face model of a trunk and a head, which shares their weights; by default of its embeddings."""
    from transformers import AutoModelForCausalLM

    if trunk.model.is_remote_code():
        raise ValueError(f"{type(trunk.model).__name__} is code of the model: pass the language model, not an actor.")
    config = deepcopy(trunk.model.config)
    if head is None:
        config.tie_word_embeddings = True
    # An empty model on the meta device, whose two parts are then replaced.
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    setattr(lm, lm.base_model_prefix, trunk.model)
    if head is not None:
        lm.set_output_embeddings(head)
        return lm
    output: Any = lm.get_output_embeddings()
    output.weight = trunk.model.get_input_embeddings().weight
    if output.bias is not None:
        output.bias = nn.Parameter(torch.zeros(output.bias.shape))
    return lm


def saved_actor(saved: SavedModel, **options: Any) -> ProbabilisticTensorDictSequential:
    """The language actor of a saved model, with its embedding of features if it has one.

    Args:
        saved: its weights are shared.
        **options: of :func:`~torchrl_lang.modules.language_actor`.
    """
    return with_features(language_actor(saved.lm, **options), saved.heads.get(FEATURES_HEAD))


def saved_value_actor(saved: SavedModel) -> ProbabilisticTensorDictSequential:
    """The language actor of the model of values of a saved model that has one."""
    return with_features(language_actor(saved.value_lm), saved.heads.get(VALUE_FEATURES_HEAD))


def saved_value_trunk(saved: SavedModel) -> Trunk | None:
    """The trunk of the model of values; None if there is no such model."""
    if saved.value_lm is None:
        return None
    return with_features(Trunk(saved.value_lm), saved.heads.get(VALUE_FEATURES_HEAD))


class SavedAgent(NamedTuple):
    """The result of :func:`load_agent`."""

    policy: UtteranceActor
    """Decodes as the saved policy did."""
    tokenizer: Tokenizer
    """Writes rows in the saved row format."""
    task: dict[str, Any]
    """The description of the task that was saved."""

    def reply(
        self, messages: str | Dialogue = (), *texts: str, tools: Sequence[Any] | None = None, features: Any = None
    ) -> Any:
        """The agent's answer in a dialogue, decoded as the saved policy decodes.

        Args:
            messages: of the dialogue so far, as the chat templates of transformers take them: each has a ``role``
                ("system", "user", "tool" or "assistant") and a ``content``. Or the first text of a dialogue: of the
                user, of the agent, of the user, and so on. Without any the agent takes the first turn.
            *texts: the further texts.
            tools: JSON schemas or documented functions that the chat template describes to the agent; default those
                that it was trained with.
            features: of the dialogue, such as those of an image, float ``[n, F]``, for an agent that reads some.

        Returns:
            The next message, ``{"role": "assistant", "content": ...}``, with ``tool_calls`` where there are some; a
            text where texts were given.

        Raises:
            ValueError: the last message is the agent's, or the chat template or the tokenizer cannot write the
                dialogue.
            KeyError: the agent reads features, and none are given.
        """
        given = None if features is None else [features]
        return self.replies([dialogue_of(messages, texts)], tools=tools, features=given)[0]

    def replies(
        self,
        dialogues: Sequence[Dialogue],
        *,
        tools: Sequence[Any] | None = None,
        features: Sequence[Any] | None = None,
    ) -> list[Any]:
        """The agent's answers in several dialogues, lists of messages or of texts, decoded as one batch.

        See :meth:`reply`.
        """
        length = self.policy.decoder.action_length
        return replies(self.policy, self.tokenizer, length, dialogues, tools=tools, features=features)

    def chat(self, *, tools: Sequence[Any] | None = None, input_fn: Callable[[str], str] = input) -> list[Message]:
        """Talk to the agent in a terminal; see :func:`torchrl_lang.modules.reply.chat`."""
        return chat(lambda messages: self.reply(messages, tools=tools), input_fn=input_fn)


def save_agent(
    folder: str | Path,
    policy: UtteranceActor,
    tokenizer: Tokenizer,
    *,
    task: Mapping[str, Any] | None = None,
    data: str | None = None,
    results: Sequence[Mapping[str, Any]] = (),
    command: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Write a policy and all that it needs to ``folder``, atomically, with a model card (``README.md``).

    The folder is one of :func:`save_language_model`: ``transformers`` alone loads its model and tokenizer. Its manifest
    also has the length of an utterance, the decoding options and the strength of the guidance. The heads of the
    guidance and of ``value=`` and the projector of features (:func:`~torchrl_lang.modules.with_features`) are saved
    with it. PEFT adapters are merged. A seed is not saved.

    Args:
        folder: as for :func:`save_language_model`.
        policy: over a Hugging Face model; its guidance may be a ``LikelihoodGuidance``. A
            value trunk of its own, with its projector of features, is saved as a second model. Of heads that are not of
            this library the weights are saved; loading needs modules to fill, ``load_agent(folder, heads={"qvalue":
            module})``.
        tokenizer: the environment's, of any kind that ``tokenizer_from_config`` reads.
        task: a description of the task as JSON, for :attr:`SavedAgent.task` and the card.
        data: what the agent learned from, for the card.
        results: rows of a table for the card, each with the same keys, the agent's own first. The card's header has the
            numbers of that row, beside ``games`` and ``seed``, as the hub expects them (``model-index``).
        command: the command that trained the agent, for the card.
        base_model: name on the hub of the model that training began with, for the card.

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
    guidance, heads, value_lm = _describe_guidance(rule.guidance)
    trunk = trunk_of(split_actor(decoder.actor).trunk)
    if trunk is not None and trunk.returns is not None:
        raise ValueError("save_agent cannot write returns: use save_language_model with the head 'returns'.")
    heads |= {"state_value": decoder.value, FEATURES_HEAD: None if trunk is None else trunk.features}
    options = {**vars(rule), **vars(decoder), "method": policy.method, "forbidden": tuple(rule.forbidden.tolist())}
    agent = AgentRecord(
        action_length=decoder.action_length,
        decoding={name: options[name] for name in _DECODING},
        stop=None if decoder.stop is None else decoder.stop.texts,
        guidance=guidance,
        task=dict(task or {}),
    )
    kept = {name: head for name, head in heads.items() if head is not None}
    custom = [name for name, head in kept.items() if not isinstance(own_head(head), Head)]
    card = _card(agent, custom, isinstance(tokenizer, ChatTokenizer), data, results, command, base_model)
    own = {"tokenizer": tokenizer.config(), "agent": agent}
    return write_model(folder, decoder.actor, kept, value_lm=value_lm, card=card, **own)


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
        FileError: a file is missing or damaged, or the folder holds a model without an agent or its tokenizer.
        ValueError: ``heads`` are not those that the folder needs; the message names them.
    """
    saved, record = read_model(folder, heads, **kwargs)
    agent = None if record is None else record.agent
    manifest, remedy = Path(folder) / _FOLDER.config, "save it with save_agent, or read it with load_language_model"
    if agent is None:
        raise FileError(manifest, "describes no agent", remedy)
    for part in (saved.lm, saved.value_lm, *saved.heads.values()):
        if part is not None:
            part.to(device)
    with file_errors(manifest, "describes an agent that cannot be built", _REMEDY, ValueError, TypeError, KeyError):
        tokenizer = tokenizer_from_config(saved.tokenizer or {})
        stop = None if agent.stop is None else StopStrings(agent.stop, tokenizer)
        guidance = None if agent.guidance is None else _read_guidance(saved, **agent.guidance)
        given: Any = {"guidance": guidance, "value": saved.heads.get("state_value"), "seed": seed, "stop": stop}
        policy = UtteranceActor(saved_actor(saved), tokenizer.control, agent.action_length, **given, **agent.decoding)
    return SavedAgent(policy, tokenizer, agent.task)


def _describe_guidance(
    guidance: ValueGuidance | None,
) -> tuple[dict[str, Any] | None, dict[str, nn.Module | None], PreTrainedModel | None]:
    """The record of a guidance, its heads by name, and a model with the weights of the values' own trunk."""
    if guidance is None:
        return None, {}, None
    kind = next(name for name, known in _KINDS.items() if isinstance(guidance, known))
    record = {"values": kind} | {name: getattr(guidance, name, False) for name in _GUIDANCE}
    by_likelihood = kind == "likelihoods"
    heads = {"value": guidance.value, "qvalue": None if by_likelihood else guidance.qvalue}
    if guidance.value_trunk is None:
        return record, heads, None
    trunk = trunk_of(guidance.value_trunk)
    if trunk is None:
        raise ValueError(f"The values' own trunk is a {type(guidance.value_trunk).__name__}: only a Trunk is saved.")
    # The model's head is the layer that reads the states, if one does.
    values: Any = guidance.qvalue
    head: Any = values[0] if by_likelihood else own_head(values)
    layer = inner_linear(head.module) if by_likelihood else None
    if isinstance(head, TiedQValueHead) and head.embedding is not trunk.model.get_input_embeddings():
        layer = head.embedding
    return record, {**heads, VALUE_FEATURES_HEAD: trunk.features}, _model_around(trunk, layer)


def _read_guidance(saved: SavedModel, *, values: str, beta: float, ratio: bool, **options: Any) -> ValueGuidance:
    if values == "likelihoods":
        return LikelihoodGuidance(saved_value_actor(saved), beta=beta, ratio=ratio)
    qvalue, value = saved.heads["qvalue"], saved.heads.get("value")
    trunk = saved_value_trunk(saved)
    if values == "utterances":
        return UtteranceValueGuidance(qvalue, value_trunk=trunk)
    return ValueGuidance(qvalue, value, beta=beta, value_trunk=trunk, **options)


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
    agent: AgentRecord,
    custom: Sequence[str],
    has_chat: bool,
    data: str | None,
    results: Sequence[Mapping[str, Any]],
    command: str | None,
    base_model: str | None,
) -> str:
    """A model card in Markdown, with the header that the hub reads."""
    from huggingface_hub import EvalResult, ModelCardData  # a local import, because it takes a second

    task = agent.task
    name = str(task.get("name") or task.get("task") or "a language task")
    about: Any = {"task_type": "reinforcement-learning", "dataset_type": name, "dataset_name": name}
    figures = {key: value for key, value in (results[0] if results else {}).items() if key not in ("games", "seed")}
    evaluated = [
        EvalResult(**about, metric_type=key.replace(" ", "_"), metric_name=key, metric_value=_figure(value))
        for key, value in figures.items()
        if _figure(value) is not None
    ]
    header = ModelCardData(
        library_name="torchrl_lang",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "torchrl"],
        base_model=base_model,
        model_name=f"agent for {name}" if evaluated else None,
        eval_results=evaluated or None,
    )
    given = ", ".join(f'"{name}": …' for name in custom)
    heads = f", heads={{{given}}}" if custom else ""
    messages = '[{"role": "user", "content": "…"}]' if has_chat else '"…"'
    ours = f'from torchrl_lang.modules import load_agent\n\nagent = load_agent("this folder"{heads})\n'
    theirs = f'from transformers import pipeline\n\nprint(pipeline("text-generation", "this folder")({messages}))'
    unguided = ", without the values that guide it" if agent.guidance else ""
    left_out = {"forbidden", "vocab_size", "diagnostics"}
    if agent.decoding["method"] in ("sample", "greedy"):  # which rank nothing
        left_out |= {"beams", "candidates", "advantage_weight", "end_value_weight", "log_prob_weight"}
    decoding = {key: value for key, value in agent.decoding.items() if key not in left_out}
    settings = {**decoding, "action_length": agent.action_length, "stop": agent.stop, "guidance": agent.guidance}
    versions = [f"{package} {version(package)}" for package in ("torch", "torchrl", "tensordict", "transformers")]
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# Agent for {name}",
        "A language model with the tokenizer, row format, value heads (if it has some) and decoding options of its "
        f"training by reinforcement learning{f' from {base_model}' if base_model else ''}.",
        "## Use\n\n" + _code(f"{ours}print(agent.reply({messages}))"),
        f"An answer has at most {agent.action_length} tokens, its end included; longer ones are cut there.",
        has_chat and f"`transformers` alone generates with the language model{unguided}:\n\n{_code(theirs)}",
        _section("Decoding", {key: value for key, value in settings.items() if value not in (None, False, 0)}),
        task and _section("Task", {key: _without_folder(value) for key, value in task.items()}),
        data is not None and f"## Data\n\n{data}",
        command is not None and f"## Training\n\n{_code(command, 'bash')}",
        results and "## Evaluation\n\n" + _table(results),
        f"Written with {', '.join([f'torchrl_lang {__version__}', *versions])}.",
    ]
    return "\n\n".join(str(part) for part in parts if part) + "\n"


def _figure(value: Any) -> Any:
    """A number of a table as the hub reads it; None for other entries."""
    if isinstance(value, int | float):
        return value
    return value.replace("±", "+/-") if isinstance(value, str) and "±" in value else None


def _without_folder(value: Any) -> Any:
    """An entry of the task; of a path of this machine its name alone."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([str(row[key]) for key in head] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _section(title: str, entries: Mapping[str, Any]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {key}: {value}" for key, value in entries.items())
