"""The loops that decode utterances token by token: sampling, greedy and beam search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lang.functional.kl import categorical_entropy
from torchrl_lang.modules.decoding.model_runner import LanguageModelRunner
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution, StopStrings
from torchrl_lang.modules.decoding.prefix_cache import compaction
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.head_values import STATE_VALUE, States, apply_head
from torchrl_lang.schema import ACTION, ACTION_LOG_PROB, TOKEN_LOG_PROB, TOKENS, ControlTokens


class Prompt(NamedTuple):
    """Rows to continue."""

    tokens: Tensor
    """int64 ``[N, P]``, right-padded, ``P`` the longest row."""
    length: Tensor
    """int64 ``[N]``, at least 1."""
    features: RowFeatures | None = None
    """Of the rows, for models that read some."""


class Utterances(NamedTuple):
    """Decoded utterances. The last slot is the end-of-action token if none came before. It has probability one, so its
    log-probability and entropy are zero, as on padding; its state is never computed.
    """

    action: Tensor
    """int64 ``[N, K]``."""
    token_log_prob: Tensor
    """float32 ``[N, K]``, under the distribution that was sampled from."""
    behavior_log_prob: Tensor
    """float32 ``[N, K]``, under the language model alone; zero unless requested."""
    token_entropy: Tensor
    """float32 ``[N, K]``, of the distribution that was sampled from; zero unless requested."""
    advantage: Tensor
    """float32 ``[N]``, sum of ``A = min_k Q_k - V`` over the tokens; zero unless requested."""
    end_value: Tensor
    """float32 ``[N]``, ``min_k Q_k`` of the end in each utterance's last state; zero unless requested."""
    state_value: Tensor
    """float32 ``[N, K]``, V of the state in which each token was generated; zero on padding and unless requested, NaN
    in a forced last slot."""

    @classmethod
    def empty(cls, n: int, k: int, control: ControlTokens, device: torch.device) -> Utterances:
        """``n`` empty utterances: an end of action, then padding."""
        action = torch.full((n, k), control.pad, dtype=torch.int64, device=device)
        action[:, 0] = control.end_of_action
        zeros = torch.zeros(n, k, device=device)
        totals = zeros[:, 0]
        return cls(action, zeros, zeros.clone(), zeros.clone(), totals.clone(), totals.clone(), zeros.clone())

    def select(self, rows: Tensor) -> Utterances:
        """The rows ``rows``, int64 ``[M]``, in this order."""
        return Utterances(*(values.index_select(0, rows) for values in self))

    def write(self, tensordict: TensorDictBase, keys: Iterable[str] = (ACTION, TOKEN_LOG_PROB)) -> TensorDictBase:
        """Write these entries and the log-probability of each utterance into rows ``[*B]``."""
        batch = tensordict.get(TOKENS).shape[:-1]
        for key in keys:
            value = getattr(self, key)
            tensordict.set(key, value.reshape(*batch, value.shape[-1]))
        return tensordict.set(ACTION_LOG_PROB, self.token_log_prob.sum(-1).reshape(batch))

    def place(self, rows: Tensor, other: Utterances) -> Utterances:
        """A copy with ``other`` at the rows ``rows``, int64 ``[M]``."""
        return Utterances(*(ours.index_put((rows,), theirs) for ours, theirs in zip(self, other, strict=True)))


def pick(log_prob: Tensor, uniform: Tensor | None) -> Tensor:
    """Sample a token for each row by inverting the distribution function at ``uniform``; without it the most likely.

    The caller draws one number per token, so a row's utterance does not depend on which other rows are active.

    Args:
        log_prob: float ``[N, V]``.
        uniform: float ``[N]`` in ``[0, 1)``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.sampling import pick
        >>> log_prob = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
        >>> pick(log_prob, torch.tensor([0.2, 0.3])), pick(log_prob, None)
        (tensor([0, 1]), tensor([1, 1]))
    """
    if uniform is None:
        return log_prob.argmax(-1)
    cumulative = log_prob.exp().cumsum(-1)
    total = cumulative[:, -1]
    # Rounding must not raise the threshold to the total, which no token exceeds.
    threshold = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)


def sample_utterances(
    runner: LanguageModelRunner,
    rule: NextTokenDistribution,
    prompt: Prompt,
    control: ControlTokens,
    action_length: int,
    *,
    uniform: Tensor | None = None,
    candidates: int = 1,
    diagnostics: bool = False,
    advantage: bool = False,
    end_value: bool = False,
    value: nn.Module | None = None,
    stop: StopStrings | None = None,
) -> Utterances:
    """Generate one utterance for each prompt, of at most ``action_length`` tokens including its end.

    Finished rows are removed from the batch when they are a quarter of it.

    Args:
        runner: for rows of at least ``P + action_length`` tokens.
        rule: distribution of the next token.
        prompt: ``N`` rows.
        control: ids of the control tokens.
        action_length: ``K``.
        uniform: float ``[N * candidates, K]`` in ``[0, 1)``, one number per token; without it decoding is greedy.
        candidates: utterances per prompt, which is read once. Row ``i`` continues prompt ``i // candidates``.
        diagnostics: also compute ``behavior_log_prob`` and ``token_entropy``.
        advantage: also compute ``advantage``.
        end_value: also compute ``end_value``; utterances of full length cost one more step for it.
        value: also compute ``state_value``, with this head; see :class:`ValueGuidance` for the accepted heads.
        stop: utterances also finish after one of these texts, without an end of the action.
    """
    position, longest = prompt.length, prompt.tokens.shape[-1]
    out = Utterances.empty(position.shape[0] * candidates, action_length, control, position.device)
    if action_length == 1:
        return out if value is None else out._replace(state_value=out.state_value.fill_(torch.nan))
    states = runner.prefill(prompt.tokens, position)
    if candidates > 1:
        copies = torch.arange(position.shape[0], device=position.device).repeat_interleave(candidates)
        runner.reorder(copies)
        states, position = {key: value[copies] for key, value in states.items()}, position[copies]
    row = torch.arange(out.action.shape[0], device=position.device)
    finished = torch.zeros_like(row, dtype=torch.bool)
    records, written = _Records(), prompt.tokens.new_empty((row.shape[0], 0))
    for slot in range(action_length - 1):
        found = _draw(rule, states, None if uniform is None else uniform[:, slot], diagnostics, value)
        token = found["action"]
        records.add(row, slot, finished, found)
        if advantage and rule.guidance is not None:
            gained = rule.guidance.advantage(states, token[:, None]).squeeze(-1).masked_fill(finished, 0.0)
            out.advantage[row] += gained.to(out.advantage.dtype)
        if end_value and rule.guidance is not None:
            ending = (token == control.end_of_action) & ~finished
            _write_where(out.end_value, row, ending, rule.guidance.end_value(states, control.end_of_action))
        finished = finished | (token == control.end_of_action)
        if stop is not None:
            written = torch.cat([written, token[:, None]], -1)
            finished = finished | stop(written)
        if slot == action_length - 2:
            # The last slot is always the end of the action, so only its value may be computed.
            certain = {"action": torch.full_like(token, control.end_of_action)}
            if value is not None:
                certain["state_value"] = torch.full_like(found["state_value"], torch.nan)
            records.add(row, slot + 1, finished, certain)
            if end_value and rule.guidance is not None:
                states = runner.decode(token, position, longest + slot + 1)
                _write_where(out.end_value, row, ~finished, rule.guidance.end_value(states, control.end_of_action))
            break
        active = finished.shape[0] - int(finished.sum())  # the only synchronization with the device
        if active == 0:
            break
        if active <= 0.75 * finished.shape[0]:
            moves = compaction(~finished)
            runner.compact(moves)
            kept = (row, token, position, finished, written)
            row, token, position, finished, written = (x[moves.order] for x in kept)
            uniform = None if uniform is None else uniform[moves.order]
        states = runner.decode(token, position, longest + slot + 1)
        position = position + 1
    records.write(out, control.pad)
    return out


def _draw(
    rule: NextTokenDistribution, states: States, uniform: Tensor | None, diagnostics: bool, value: nn.Module | None
) -> dict[str, Tensor]:
    """The next tokens, int64 ``[M]``, as ``action``, and what is recorded of them, ``[M]`` each."""
    log_prob = rule(states)
    token = pick(log_prob, uniform)
    found = {"action": token, "token_log_prob": gather_token(log_prob, token)}
    if diagnostics:
        found["behavior_log_prob"] = gather_token(rule.behavior(states), token)
        found["token_entropy"] = categorical_entropy(log_prob)
    if value is not None:
        found["state_value"] = apply_head(value, states, STATE_VALUE).squeeze(-1)
    return found


class _Records:
    """Collects values of some rows at each slot, and writes them to the utterances at once."""

    def __init__(self) -> None:
        self._places: list[tuple[Tensor, int, Tensor]] = []
        self._values: dict[str, list[Tensor]] = {}

    def add(self, row: Tensor, slot: int, finished: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add values ``[M]`` of rows ``[M]`` that were not ``finished`` before, by names of entries.

        A name must be present from the first slot on, or never.
        """
        self._places.append((row, slot, finished))
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def write(self, out: Utterances, pad: int) -> None:
        """Write all values, with padding after the ends."""
        k = out.action.shape[1]
        place = torch.cat([row * k + slot for row, slot, _ in self._places])
        ended = torch.cat([finished for _, _, finished in self._places])
        for name, parts in self._values.items():
            entry, values = getattr(out, name), torch.cat(parts)
            n = values.shape[0]  # other entries than the tokens have no values in the last slot
            kept = values.masked_fill(ended[:n], pad if name == "action" else 0).to(entry.dtype)
            entry.view(-1).index_copy_(0, place[:n], kept)


def _write_where(entry: Tensor, row: Tensor, mask: Tensor, values: Tensor) -> None:
    """Write ``values[mask]`` to ``entry[row[mask]]``, without a synchronization with the device."""
    entry[row] = torch.where(mask, values.to(entry.dtype), entry[row])


def gather_token(values: Tensor, token: Tensor) -> Tensor:
    """Each row's value at its token, ``[N, V], int64 [N] -> [N]``."""
    return values.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def beam_search(
    runner: LanguageModelRunner,
    rule: NextTokenDistribution,
    prompt: Prompt,
    control: ControlTokens,
    action_length: int,
    *,
    beams: int,
    diagnostics: bool = False,
) -> tuple[Utterances, Tensor]:
    """The most likely utterances that beam search finds, without length normalisation.

    A finished beam keeps its score and competes with the others. At the first token there is one beam per prompt; with
    width 1 this is greedy decoding.

    The arguments are those of :func:`sample_utterances`, and ``beams``, ``W``.

    Returns:
        ``N * W`` utterances, adjacent for each prompt with the best first, and their summed log-probabilities, float
        ``[N, W]``; ``-inf`` if there are fewer than ``W`` possible utterances.
    """
    n, device = prompt.length.shape[0], prompt.length.device
    out = Utterances.empty(n * beams, action_length, control, device)
    prompt_of = torch.arange(n, device=device).repeat_interleave(beams)  # the prompt of each beam
    first = torch.arange(n, device=device).unsqueeze(-1) * beams  # the first beam of each prompt
    states = {key: value[prompt_of] for key, value in runner.prefill(prompt.tokens, prompt.length).items()}
    runner.reorder(prompt_of)
    position = prompt.length[prompt_of]
    score = torch.full((n, beams), -torch.inf, device=device)
    score[:, 0] = 0.0
    finished = torch.zeros(n * beams, dtype=torch.bool, device=device)
    for slot in range(action_length - 1):
        log_prob = rule(states)
        # A finished beam continues with padding only, which has probability one.
        only_pad = torch.full_like(log_prob[0], -torch.inf)
        only_pad[control.pad] = 0.0
        log_prob = torch.where(finished[:, None], only_pad, log_prob)
        total = score[:, :, None] + log_prob.unflatten(0, (n, beams))
        score, best = total.flatten(1).topk(beams, -1)
        parent = (first + best // log_prob.shape[-1]).flatten()
        token = (best % log_prob.shape[-1]).flatten()
        out = out.select(parent)
        log_prob, finished = log_prob[parent], finished[parent]
        out.action[:, slot] = token
        out.token_log_prob[:, slot] = gather_token(log_prob, token)
        if diagnostics:
            raw = gather_token(rule.behavior(states)[parent], token)
            out.behavior_log_prob[:, slot] = raw.masked_fill(finished, 0.0)
            out.token_entropy[:, slot] = categorical_entropy(log_prob)
        finished = finished | (token == control.end_of_action)
        if slot == action_length - 2 or bool(finished.all()):  # the only synchronization with the device
            break
        runner.reorder(parent)
        states = runner.decode(token, position, prompt.tokens.shape[-1] + slot + 1)
        position = position + 1
    out.action[:, -1] = torch.where(finished, control.pad, control.end_of_action)  # the forced end, as in sampling
    return out, score
