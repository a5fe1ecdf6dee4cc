"""Utterances that a policy draws in the states of games, without playing them, as ArCHer learns from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn.functional import pad

from torchrl_lang import schema
from torchrl_lang._checks import Count, checked
from torchrl_lang.functional.decisions import utterance_states
from torchrl_lang.modules.chai import check_sampling_policy
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.schema import ACTION, AGENT_MASK, ATTENTION_MASK, TERMINATED, TOKEN_LOG_PROB, TOKENS, entry


@torch.no_grad()
@checked
def draw_utterances(
    policy: UtteranceActor, rows: TensorDictBase, number: Count | None = None, *, rows_at_a_time: Count = 256
) -> TensorDict:
    """Rows that end with an utterance which the policy draws now, in a state of other rows (ArCHer, arXiv 2402.19446).

    A state is a position of a row before an utterance of the agent. The new row is the old one up to there and the new
    utterance, which nothing follows: no reward and no reply. Its ``agent_mask`` is True on the new utterance alone, so
    a loss reads all before it as given.

    Args:
        policy: samples the utterances, with ``method="sample"``; it has the random stream.
        rows: ``[N]`` on the policy's device, with the features that its language model reads, if it reads some.
        number: ``M``, of states chosen at random from all that the rows have, with replacement; by default all of
            them, once and in their order.
        rows_at_a_time: utterances that are drawn together.

    Returns:
        ``[M]``, without states after which the model has no positions for an utterance; none where there is no state.
        ``tokens``, ``attention_mask``, ``agent_mask``, ``token_log_prob`` (of the new tokens) and
        ``token_reward`` (zero) ``[M, T']``, with ``T' >= T`` where an utterance may need it; ``terminated`` and
        ``drawn`` (both True) ``[M, 1]``; and the features.

    Raises:
        ValueError: the policy is of another kind, or steps of a rollout came instead of rows.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.modules import UtteranceActor, causal_lm, draw_utterances, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, seed=0)
        >>> rows = to_rows([Episode([Turn("a", 0.0), Turn("b"), Turn("cc", 1.0)], True)], tokenizer, 12)
        >>> drawn = draw_utterances(policy, rows)
        >>> [tokenizer.decode(row["tokens"][: row["agent_mask"].int().argmax()]) for row in drawn]
        ['<a>', '<a>a</a>b</s>']
    """
    check_sampling_policy("draw_utterances", policy)
    schema.refuse_steps(rows)
    tokens, attention = entry(rows, TOKENS).long(), entry(rows, ATTENTION_MASK)
    decoder, features = policy.decoder, policy.decoder.features("draw_utterances", rows, tokens.shape[:-1])
    begins = utterance_states(attention, entry(rows, AGENT_MASK), tokens, decoder.control.end_of_action)
    if (limit := decoder.room(features)) is not None:
        begins = begins & (torch.arange(tokens.shape[-1], device=tokens.device) + 1 + decoder.action_length <= limit)
    row, position = begins.nonzero(as_tuple=True)
    if number is not None and len(row):
        index = (decoder.stream.uniform((number,)) * len(row)).long().to(row.device)
        row, position = row[index], position[index]
    width = max(tokens.shape[-1], int(position.max()) + 1 + decoder.action_length if len(row) else 0)
    place = torch.arange(width, device=tokens.device)
    before = place <= position[:, None]
    given = torch.where(before, pad(tokens, (0, width - tokens.shape[-1]))[row], decoder.control.pad)
    own = None if features is None else features.select(row)
    found = [
        decoder.generate(given[part], before[part], features=None if own is None else own.select(part))
        for part in torch.arange(len(row), device=row.device).split(rows_at_a_time)
    ]
    action, log_prob = (torch.cat([getattr(one, key) for one in found]) for key in (ACTION, TOKEN_LOG_PROB))
    is_end = action == decoder.control.end_of_action
    real = (is_end.cumsum(-1) - is_end.long()) == 0  # up to and including the first end
    at = position[:, None] + 1 + torch.arange(action.shape[-1], device=action.device)
    agent, none = torch.zeros_like(before).scatter(-1, at, real), torch.zeros(before.shape, device=before.device)
    once = torch.ones_like(before[:, :1])
    entries = {
        TOKENS: given.scatter(-1, at, action.masked_fill(~real, decoder.control.pad)),
        ATTENTION_MASK: before | agent,
        AGENT_MASK: agent,
        schema.TOKEN_REWARD: none,
        TOKEN_LOG_PROB: none.scatter(-1, at, log_prob.masked_fill(~real, 0).to(none.dtype)),
        TERMINATED: once,  # nothing is read behind the utterance
        schema.DRAWN: once.clone(),
    }
    if own is not None:
        entries |= own.entries()
    return TensorDict(entries, batch_size=[len(row)], device=rows.device)


def with_drawn(rows: TensorDictBase, drawn: TensorDictBase) -> TensorDictBase:
    """Rows that were played and rows of :func:`draw_utterances` as one batch, which ``drawn`` distinguishes.

    Args:
        rows: ``[N]``; entries that drawn rows do not have are left out.
        drawn: ``[M]``.

    Returns:
        ``[N + M]``, as wide as the wider ones.

    Raises:
        KeyError: the second rows have no ``drawn``, as rows that were played.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.modules import UtteranceActor, causal_lm, draw_utterances, language_actor, with_drawn
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, seed=0)
        >>> rows = to_rows([Episode([Turn("a", 0.0), Turn("b"), Turn("cc", 1.0)], True)], tokenizer, 12)
        >>> with_drawn(rows, draw_utterances(policy, rows))["drawn"].squeeze(-1)
        tensor([False,  True,  True])
    """
    schema.find_entry(
        "with_drawn", schema.DRAWN, "The rows of draw_utterances come second, after those that were played.", drawn
    )
    played = rows.select(*(key for key in drawn.keys() if key in rows.keys()))
    played.set(schema.DRAWN, torch.zeros_like(played.get(TERMINATED)))
    return joined_rows([played, drawn.select(*played.keys())])


def joined_rows(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate rows ``[N_i]`` with the same entries; they become as wide as the widest."""
    width = max(part.get(TOKENS).shape[-1] for part in parts)
    rows: TensorDictBase = torch.cat([_widened(part, width) for part in parts])
    return rows


def _widened(rows: TensorDictBase, width: int) -> TensorDictBase:
    """Rows with the entries of their tokens padded with zeros to ``width``."""
    shape, out = rows.get(TOKENS).shape, rows.copy()
    for key, value in rows.items():
        if value.shape == shape and key != schema.FEATURES_MASK:
            out.set(key, pad(value, (0, width - shape[-1])))
    return out
