"""Episodes from samples with one reward each, the form of trlx: a text, or prompts and outputs in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import shorten
from torchrl_lang.schema import AGENT_MASK, GROUP, TOKEN_LOG_PROB, TOKEN_REWARD, ControlTokens, check_row
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import LARGEST_REWARD, Episode, Turn
from torchrl_lang.text.rows import EncodedEpisode, encode_episode, overflow, stack_episodes
from torchrl_lang.text.tokenizers import Tokenizer


def from_samples(samples: Sequence[str | Sequence[str]], rewards: Sequence[float]) -> list[Episode]:
    """One terminated episode for each sample; its reward belongs to the agent's last turn.

    trlx's ILQL subtracts the mean of the rewards and divides by their standard deviation. Here they stay as they are.

    Args:
        samples: each a text of the agent, or texts of prompt and output in turn, ``(prompt, output)`` or
            ``(prompt, output, prompt, output, ...)``. An empty first prompt is omitted: the agent begins.
        rewards: a number for each sample.

    Raises:
        ValueError: a sample has no text, no output after its last prompt or other content than texts, a reward is no
            number, or the numbers of samples and rewards differ.

    Examples:
        >>> from torchrl_lang.data import from_samples
        >>> short, long = from_samples(["ab", ("2 + 2", "4", "right?", "yes")], [0.5, 1.0])
        >>> [(turn.text, turn.reward) for turn in short.turns]
        [('ab', 0.5)]
        >>> [(turn.text, turn.reward) for turn in long.turns]
        [('2 + 2', None), ('4', 0.0), ('right?', None), ('yes', 1.0)]
    """
    if len(samples) != len(rewards):
        raise ValueError(f"Give a reward for each sample, got {len(samples)} samples and {len(rewards)} rewards.")
    return [_episode(n, sample, reward) for n, (sample, reward) in enumerate(zip(samples, rewards, strict=True))]


def _episode(number: int, sample: str | Sequence[str], reward: float) -> Episode:
    texts = ["", sample] if isinstance(sample, str) else list(sample)
    if not texts or len(texts) % 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"Sample {number} must be a text, or prompts and outputs in turn, got {shorten(sample)}.")
    turns = [Turn(text, 0.0 if place % 2 else None) for place, text in enumerate(texts)]
    if not isinstance(reward, SupportsFloat):
        raise ValueError(f"The reward of sample {number} must be one number, got {shorten(reward)}.")
    turns[-1] = Turn(texts[-1], float(reward))
    return Episode(turns if texts[0] else turns[1:], terminated=True)


Content = str | Sequence[int] | Tensor
"""A text, or the ids of its tokens."""

_ROUNDING = 1e-3
"""By how much a log-probability, a difference of two large numbers, may exceed 0."""


@checked
def rows_from_triples(
    queries: Sequence[Content],
    responses: Sequence[Content],
    rewards: Sequence[float | Sequence[float]] | Tensor,
    tokenizer: Tokenizer,
    row_length: Count,
    *,
    log_probs: Sequence[Sequence[float]] | Tensor | None = None,
) -> TensorDict:
    """One terminated row of ``row_length`` tokens for each triple: the query, the response and its reward.

    The rows equal those of a :class:`~torchrl_lang.envs.PromptEnv` in which the agent wrote these responses. Ids are
    never decoded and encoded again: give the ids that the model sampled, because the text of a response may encode to
    others, to which the model would have given other probabilities.

    Args:
        queries: texts, or ids of the text alone; with a :class:`~torchrl_lang.text.ChatTokenizer` ids are the whole
            prompt, as ``apply_chat_template(..., add_generation_prompt=True)`` writes it. Empty: the agent begins.
        responses: texts, or sampled ids, ``[L]``, which may be padded on the right. Ids that end with the
            ``end_of_action`` token are a whole utterance. Without it the response was cut, and the row has the token
            after it as one that the agent did not write. A text is a whole utterance.
        rewards: for each triple a number, earned by the response's last token, or a number for each id, ``[L]``.
        tokenizer: the model's; it also writes what stands around queries and responses.
        row_length: ``T``.
        log_probs: of each id under the policy that sampled it, ``[L]``; values on padding are not read. Otherwise
            compute them with :func:`~torchrl_lang.modules.row_log_prob` before the first update.

    Returns:
        Rows ``[N]`` with ``tokens``, ``attention_mask``, ``agent_mask``, ``token_reward``, ``terminated``,
        ``truncated``, with ``log_probs`` ``token_log_prob`` float32 ``[N, T]``, and ``group`` int64 ``[N]``, equal for
        equal queries, for :func:`~torchrl_lang.functional.group_advantages`.

    Raises:
        ValueError: the numbers of queries, responses, rewards and log-probabilities differ; a response is empty, has
            its end before its last token or does not fit; an id is no token; a reward or log-probability is not a
            finite number, or a response has another number of them than ids; a text cannot be encoded.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import rows_from_triples
        >>> from torchrl_lang.text import CharTokenizer
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> end = tokenizer.control.end_of_action
        >>> sampled = [torch.tensor([1, end]), [2, 2, end], [0, 0, 0]]  # the last one was cut
        >>> rows = rows_from_triples(["ab", "c", "ab"], sampled, [1.0, 0.5, [0.0, 0.0, -1.0]], tokenizer, 10)
        >>> tokenizer.decode(rows["tokens"][2])
        '<s>ab</s>aaa</a></eod><|pad|>'
        >>> rows["token_reward"][2].tolist(), rows["group"].tolist()
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0], [0, 1, 0])
    """
    counts = {"queries": len(queries), "responses": len(responses), "rewards": len(rewards)}
    counts |= {} if log_probs is None else {"log_probs": len(log_probs)}
    if len({*counts.values()}) > 1:
        given = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"Give one of each for every triple, got {given}.")
    pairs = enumerate(zip(queries, responses, strict=True))
    encoded = [_encode(number, query, response, tokenizer) for number, (query, response) in pairs]
    what, longest = overflow(encoded, row_length, "triples")
    if what:
        raise ValueError(f"{what}: give a row_length of {longest}, or leave them out.")
    rows = stack_episodes(encoded, tokenizer.control.pad, row_length)
    check_row(rows, vocab_size=tokenizer.vocab_size)
    written = [sum(layout.agent) for layout in encoded]
    agent = rows.get(AGENT_MASK)
    for key, values in ((TOKEN_REWARD, rewards), (TOKEN_LOG_PROB, log_probs)):
        if values is not None:
            found = [_numbers(key, n, *triple) for n, triple in enumerate(zip(values, responses, written, strict=True))]
            rows.set(key, torch.zeros(agent.shape).masked_scatter(agent, torch.cat([torch.zeros(0), *found])))
    return rows.set(GROUP, _groups(encoded))


def _encode(number: int, query: Content, response: Content, tokenizer: Tokenizer) -> EncodedEpisode:
    """The tokens of a triple; rewards are zero."""
    control = tokenizer.control
    # A chat's prompt has special tokens of its template; that of other rows gets its control tokens here.
    around = (control.pad,) if isinstance(tokenizer, ChatTokenizer) else control.ids()
    asked = Turn(query) if isinstance(query, str) else Turn("", tokens=_ids(f"Query {number}", query, around))
    answered = _response(f"Response {number}", response, control)
    is_asked = bool(asked.text or asked.tokens)
    return encode_episode(Episode([asked, answered] if is_asked else [answered], terminated=True), tokenizer)


def _response(what: str, content: Content, control: ControlTokens) -> Turn:
    if isinstance(content, str):
        turn = Turn(content, 0.0)
        is_empty = not content
    else:
        ids = _ids(what, content)
        ids = ids[: max((place for place, token in enumerate(ids, start=1) if token != control.pad), default=0)]
        is_closed, is_empty = ids[-1:] == (control.end_of_action,), not ids
        turn = Turn("", 0.0, is_closed, _ids(what, ids[: len(ids) - is_closed], (control.pad, control.end_of_action)))
    if is_empty:
        raise ValueError(f"{what} is empty: leave it out, or give the ids [{control.end_of_action}] of no text.")
    return turn


def _ids(what: str, content: Any, forbidden: Sequence[int] = ()) -> tuple[int, ...]:
    ids = torch.as_tensor(content, device="cpu")
    if ids.numel() and (ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool):
        raise ValueError(f"{what} must be a text or ids, int [L], got {shorten(content)}.")
    if bad := sorted({*ids.flatten().tolist()}.intersection(forbidden)):
        advice = "leave them out, or cut a response at its first end"
        raise ValueError(f"{what} contains the control tokens {bad}: {advice}.")
    return tuple(map(int, ids.flatten().tolist()))


def _numbers(key: str, number: int, value: Any, response: Content, written: int) -> Tensor:
    """The rewards or log-probabilities of the tokens that the agent wrote, float32 ``[written]``."""
    is_reward = key == TOKEN_REWARD
    what = f"{'Reward' if is_reward else 'Log-probability'} {number}"
    numbers = torch.as_tensor(value, device="cpu").detach()
    if is_reward and numbers.ndim == 0:
        numbers = torch.cat([torch.zeros(written - 1), numbers[None]])
    elif isinstance(response, str) or numbers.shape != (len(response),):
        found = "a text" if isinstance(response, str) else f"{len(response)} ids"
        raise ValueError(f"{what} has the shape {list(numbers.shape)}, but its response is {found}: give one for each.")
    own, highest = numbers[:written], LARGEST_REWARD if is_reward else _ROUNDING
    if not ((own >= -LARGEST_REWARD) & (own <= highest)).all():  # also for NaN
        raise ValueError(f"{what} is {shorten(own.tolist())}: numbers must be finite, log-probabilities at most 0.")
    if is_reward and numbers[written:].any():
        raise ValueError(f"{what} is {shorten(numbers.tolist())}, not 0 on padding: move it to the last token.")
    return own.float()


def _groups(encoded: Sequence[EncodedEpisode]) -> Tensor:
    """Numbers of the queries in the order of their first appearance, int64 ``[N]``."""
    numbers: dict[tuple[int, ...], int] = {}
    prompts = [tuple(layout.tokens[: layout.agent.index(True)]) for layout in encoded]
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=torch.int64)
