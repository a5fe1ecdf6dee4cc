"""Steps of TorchRL's chat environments as rows, and rows as such steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack, pad_sequence, unravel_key
from torch import Tensor, nn
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Tokens

from torchrl_lang import schema
from torchrl_lang._files import shorten
from torchrl_lang.functional import shift_left
from torchrl_lang.text import ChatTokenizer, Tokenizer, from_row, to_messages

_PROMPT, _RESPONSE, _LOG_PROB = ("tokens", "prompt"), ("tokens", "response"), ("log_probs", "response")


def rows_from_chat(steps: TensorDictBase, *, reward_key: NestedKey = schema.REWARD) -> TensorDict:
    """Rows ``[N]`` of the conversations in steps ``[*B, time]`` of TorchRL's ``ChatEnv`` with a wrapper as its policy.

    A row is a prompt, the response to it, what the next prompt adds, the next response, and so on until the step that
    is done or the last one; then what its own next prompt adds, if there is one. Ids are those of the steps, which read
    and wrote them: nothing is encoded again. Where a chat template writes the history in other tokens than it was
    generated in, no single row holds both; then ``rows_from_chat(steps.unsqueeze(-1))`` makes a row of each step.

    TorchRL removes tokens that equal the padding token, so the wrapper's tokenizer needs one that ends no turn. With
    several conversations its ``generate_kwargs`` need this ``"pad_token_id"``: without, transformers fills responses
    that end first with end tokens, which rows have as tokens of the agent.

    Args:
        steps: with ``("tokens", "prompt")`` and ``("tokens", "response")`` int64, as a wrapper with ``generate=True``
            and ``pad_output=False`` writes them, ``("next", "done")`` and ``("next", "terminated")``.
        reward_key: the reward under ``"next"``, one number a step, which the last token of the response earns; zero
            where steps lack the default entry.

    Returns:
        The entries of a row, ``terminated`` and ``truncated``, which is True where the last step is not done. With
        ``("log_probs", "response")`` also ``token_log_prob`` float32 ``[N, T]``, zero on other tokens; but not those
        that TorchRL's ``TransformersWrapper`` has computed, which are 0 for the first token of each response: write
        ``rows["token_log_prob"] = row_log_prob(language_actor(wrapper.model), rows)``.

    Raises:
        KeyError: the steps hold no tokens or ends, or lack the reward that was named.
        ValueError: there are no steps or no dimension of time, tokens are padded, a response is empty, a reward is not
            one number, or a prompt does not begin with the tokens of the steps before it.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.data import rows_from_chat
        >>> end = torch.ones(1, 2, 1, dtype=torch.bool)
        >>> tokens = {"prompt": torch.tensor([[[5, 6], [5, 6]]]), "response": torch.tensor([[[7], [8]]])}
        >>> steps = TensorDict(tokens=tokens, next={"done": end, "terminated": end}, batch_size=[1, 2])
        >>> rows_from_chat(steps)["tokens"]
        tensor([[5, 6, 7],
                [5, 6, 8]])
    """
    if not steps.ndim or not steps.batch_size.numel():
        advice = "pass [*B, time], steps.unsqueeze(0) for a single step"
        raise ValueError(f"There is no step or no dimension of time in steps of shape {list(steps.shape)}: {advice}.")
    needed = [_PROMPT, _RESPONSE, ("next", schema.DONE), ("next", schema.TERMINATED)]
    needed += [] if reward_key == schema.REWARD else [unravel_key(("next", reward_key))]
    missing = [key for key in needed if key not in steps.keys(True)]
    if missing:
        advice = "Pass steps of a ChatEnv whose policy wrote tokens. A History alone is text, which to_rows encodes: "
        advice += "to_rows([from_messages(messages_from_history(history), tokenizer)], tokenizer, row_length)."
        raise schema.missing_entry("A row", missing, steps, advice)
    rows: list[TensorDictBase] = []
    for line in _flat(steps, 1):
        row: Any = None
        for number, step in enumerate(line.unbind(0), start=1):
            row = _continued(row, step, reward_key)
            ended = step.get(("next", schema.DONE))
            if ended.any() or number == len(line):
                terminated = step.get(("next", schema.TERMINATED))
                truncated = step.get(("next", schema.TRUNCATED), ~terminated) | ~ended
                ends = {schema.TERMINATED: terminated, schema.TRUNCATED: truncated}
                after: Any = step.get(("next", *_PROMPT), None)  # with what the environment wrote last
                if after is not None and torch.equal(after[: len(row)], row.get(schema.TOKENS)):
                    row = torch.cat([row, _part(after[len(row) :], 0, torch.zeros(0), torch.zeros(0))])
                rows.append(TensorDict({**row, **ends}))
                row = None
    out = pad_sequence(rows).auto_batch_size_(1)
    agent = out.get(schema.AGENT_MASK)
    if not out.get(schema.TOKEN_LOG_PROB)[agent & ~agent.roll(1, -1)].any():
        out.pop(schema.TOKEN_LOG_PROB)
    schema.check_row(out)
    return out


def rows_of_responses(steps: TensorDictBase) -> TensorDictBase:
    """A row for each of the steps ``[*B]`` in order, ``[N]``: the prompt that was read and the response to it."""
    return pad_sequence([_continued(None, step, schema.REWARD) for step in _flat(steps, 0)]).auto_batch_size_(1)


def _flat(steps: TensorDictBase, ndim: int) -> list[TensorDictBase]:
    """The parts of ``ndim`` dimensions, in order: steps of unequal sizes cannot be reshaped."""
    return [steps] if steps.ndim == ndim else [part for each in steps.unbind(0) for part in _flat(each, ndim)]


def _continued(row: TensorDictBase | None, step: TensorDictBase, reward_key: NestedKey) -> TensorDictBase:
    """A row without padding, ``[T]``, followed by what a step's prompt adds and by its response."""
    prompt, response, before = step.get(_PROMPT), step.get(_RESPONSE), 0 if row is None else len(row)
    if getattr(step.get("tokens"), "padded", False):
        raise ValueError("The tokens of these steps are padded: build the wrapper with pad_output=False.")
    if row is not None and not torch.equal(prompt[:before], row.get(schema.TOKENS)):
        advice = "make a row of each step, steps.unsqueeze(-1)"
        raise ValueError(f"A prompt does not begin with the {before} tokens of the steps before it: {advice}.")
    reward = step.get(("next", reward_key), torch.zeros(1)).flatten().float()
    if not len(response) or len(reward) != 1:
        raise ValueError(f"A response of {len(response)} tokens has {len(reward)} rewards: it needs a token and one.")
    part = _part(torch.cat([prompt[before:], response]), len(response), reward, step.get(_LOG_PROB, torch.zeros(1)))
    return part if row is None else torch.cat([row, part])


def _part(tokens: Tensor, written: int, reward: Tensor, log_prob: Tensor) -> TensorDictBase:
    """A part of a row, of which the agent wrote the last tokens; reward and log-probabilities are theirs."""
    values = {schema.TOKEN_REWARD: reward, schema.TOKEN_LOG_PROB: log_prob.float()}
    new = {key: nn.functional.pad(x.to(tokens.device), (len(tokens) - len(x), 0)) for key, x in values.items()}
    new[schema.AGENT_MASK] = torch.arange(len(tokens), device=tokens.device) >= len(tokens) - written
    new |= {schema.TOKENS: tokens, schema.ATTENTION_MASK: torch.ones_like(tokens).bool()}
    return TensorDict(new, batch_size=tokens.shape)


def chat_from_rows(rows: TensorDictBase, tokenizer: Tokenizer | None = None, *, system: str | None = None) -> Any:
    """Steps ``[M]`` as TorchRL's ``ChatEnv`` and wrappers write them, one for each utterance of rows ``[N]``, in order.

    The step of an utterance has the row up to it as ``("tokens", "prompt")``, the utterance as
    ``("tokens", "response")`` and both as ``("tokens", "full")``, int64 and without padding; ``("masks",
    "all_attention_mask")`` and ``("masks", "all_assistant_mask")``, bool like ``full``; and under ``"next"`` the next
    prompt, ``reward`` float32 ``[1]``, ``done``, ``terminated`` and ``truncated`` bool ``[1]``. Rows with
    ``token_log_prob`` give ``("log_probs", "response")`` and ``("log_probs", "full")``, zero on tokens of the
    environment. :func:`rows_from_chat` makes the same rows of the steps again, token by token; without
    ``token_log_prob`` where it is exactly 0 at the first token of all utterances. Other entries are left out.

    The last step of a row, of ``steps[steps["next", "done"].squeeze(-1)]``, holds all of it for TorchRL's ``SFTLoss``
    with ``set_keys(history="tokens")``; what the environment wrote after the last utterance is in its next prompt. A
    loss that reads the History instead has the template's tokens, so leave the row's masks out,
    ``steps.exclude("masks")``.

    Args:
        rows: ``[N]``, at least one, with ``terminated`` and ``truncated``. A row that is neither becomes truncated.
        tokenizer: of the rows, to write the conversation as :class:`~torchrl.data.llm.History`, too. A History is text
            that the chat template turns into tokens, so it is refused where the template gives another text than the
            row has.
        system: the system prompt that the tokenizer's row format was made with, the first message of each History.

    Raises:
        KeyError: an entry is missing.
        TypeError: ``tokenizer`` is none of this library.
        ValueError: these are no rows ``[N]`` or steps of a rollout, ``system`` comes without a tokenizer, a row has no
            utterance, rewards within an utterance, or other texts than a History would give.

    Examples:
        >>> from torchrl_lang.data import chat_from_rows
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("hioy")
        >>> rows = to_rows([Episode([Turn("hi"), Turn("yo", 1.0)], terminated=True)], tokenizer, row_length=10)
        >>> steps = chat_from_rows(rows, tokenizer)
        >>> tokenizer.decode(steps[0]["tokens"].prompt), tokenizer.decode(steps[0]["tokens"].response)
        ('<s>hi</s>', 'yo</a>')
        >>> list(steps[0]["history"].full.content), steps[0]["next", "reward"]
        (['hi', 'yo'], tensor([1.]))
    """
    schema.check_row(rows)
    schema.refuse_steps(rows)
    if rows.ndim != 1 or not len(rows):
        raise ValueError(f"It takes at least one row, [N], got rows of shape {list(rows.shape)}.")
    if not isinstance(tokenizer, Tokenizer | None):
        advice = "ChatTokenizer(source, RowFormat.from_chat_template(source)) makes one of a Hugging Face tokenizer"
        raise TypeError(f"It takes the Tokenizer of the rows, got {type(tokenizer).__name__}: {advice}.")
    if tokenizer is None and system is not None:
        raise ValueError("A system prompt is the first message of a History: give the tokenizer of the rows, too.")
    agent, reward = schema.entry(rows, schema.AGENT_MASK), schema.entry(rows, schema.TOKEN_REWARD)
    last = agent & ~shift_left(agent)
    for wrong, what in (
        (~agent.any(-1), "no utterance of the agent: select rows[rows['agent_mask'].any(-1)]"),
        ((reward != 0).logical_and(~last).any(-1), "rewards within an utterance: a step has one, of its last token"),
    ):
        if wrong.any():
            raise ValueError(f"Row {int(wrong.nonzero()[0])} has {what}.")
    every = (_steps(number, row, tokenizer, system) for number, row in enumerate(rows.unbind(0)))
    return lazy_stack([step for steps in every for step in steps])


def _steps(number: int, row: TensorDictBase, tokenizer: Tokenizer | None, system: str | None) -> Iterator[TensorDict]:
    real = row.get(schema.ATTENTION_MASK)
    tokens, agent, reward = (row.get(key)[real] for key in (schema.TOKENS, schema.AGENT_MASK, schema.TOKEN_REWARD))
    tokens = tokens.long()  # datasets on disk have int32
    log_prob: Any = row.get(schema.TOKEN_LOG_PROB, None)
    terminated, truncated = (schema.entry(row, key).reshape(1) for key in (schema.TERMINATED, schema.TRUNCATED))
    edge = nn.functional.pad(agent.int(), (1, 1)).diff()
    begins, ends = (edge == 1).nonzero().squeeze(-1).tolist(), (edge == -1).nonzero().squeeze(-1).tolist()
    chat, places = None, [0] * len(ends)
    if tokenizer is not None:
        chat, places = _history(number, row, tokens[: begins[-1]], len(ends), tokenizer, system)
    for turn, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        is_last = turn == len(ends) - 1
        after = tokens if is_last else tokens[: begins[turn + 1]]
        step = TensorDict(
            tokens=Tokens(prompt=tokens[:begin], response=tokens[begin:end], full=tokens[:end], padded=False),
            masks=Masks(real[real][:end], agent[:end], padded=False),
            next=TensorDict(
                tokens=Tokens(prompt=after, padded=False),
                reward=reward[end - 1 : end],
                done=torch.full_like(terminated, is_last),
                terminated=terminated & is_last,
                truncated=(truncated | ~terminated) & is_last,
            ),
        )
        if log_prob is not None:
            own = log_prob[real]
            step["log_probs"] = LogProbs(response=own[begin:end], full=own[:end], padded=False)
        if chat is not None:
            place = places[turn]
            full, following = chat[: place + 1], chat if is_last else chat[: places[turn + 1]]
            step["history"] = ChatHistory(prompt=chat[:place], response=chat[place : place + 1], full=full)
            step["next", "history"] = ChatHistory(prompt=following)
        yield step


def _history(
    number: int, row: TensorDictBase, prompt: Tensor, turns: int, tokenizer: Tokenizer, system: str | None
) -> tuple[History, list[int]]:
    """The messages of a row, and which of them are the utterances; ``prompt`` has the tokens before the last."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    own = ("role", "content", "tool_calls")
    messages += [{key: m[key] for key in own if key in m} for m in to_messages(from_row(row, tokenizer), tokenizer)]
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    advice = "Leave tokenizer= out for steps of tokens alone"
    if len(places) != turns:
        raise ValueError(f"Row {number} has {len(places)} utterances, but tokens of {turns}. {advice}.")
    if isinstance(tokenizer, ChatTokenizer):
        text = tokenizer.render(messages[: places[-1]], add_generation_prompt=True)
        if text != (held := tokenizer.decode(prompt.tolist())):
            what = f"The chat template writes the messages of row {number} as {shorten(text)}, it has {shorten(held)}"
            raise ValueError(f"{what}. {advice}, or give the row format's system prompt as system=.")
    return History.from_chats(messages), places
