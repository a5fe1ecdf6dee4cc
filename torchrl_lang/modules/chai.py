"""CHAI (arXiv 2204.08426): features of sampled utterances, and the policy that plays the best of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from torchrl_lang import schema
from torchrl_lang._checks import Count, checked
from torchrl_lang.functional import turn_end_mask
from torchrl_lang.functional.decisions import UtteranceSpans, find_utterances, row_length, running_mean
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.model_runner import read_rows
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.head_values import UTTERANCE_VALUE, apply_head, check_writes, read_keys
from torchrl_lang.modules.hugging_face import eval_mode, is_stochastic
from torchrl_lang.modules.trunk import HIDDEN
from torchrl_lang.schema import ACTION, ACTION_LOG_PROB, ATTENTION_MASK, DONE, TOKEN_LOG_PROB, TOKENS, entry

# Tokens that the model reads at a time: with 768 numbers each, 400 MB of states and their running means.
_TOKENS_AT_ONCE = 2**16


@torch.no_grad()
def utterance_features(
    trunk: TensorDictModuleBase,
    tokens: Tensor,
    length: Tensor,
    position: Tensor,
    row_features: RowFeatures | None = None,
) -> Tensor:
    """The feature ``f(s, u)`` of utterances: the mean of the hidden states up to their last decisions.

    The mean is over all positions from the row's first token to the utterance's last decision, the position in which
    its end is written and which has read all its words. This is the only definition of the feature: the utterances of a
    dataset, candidates in it and candidates in play all have theirs from here.

    Args:
        trunk: writes ``hidden`` ``[B, T, H]``.
        tokens: int64 ``[N, T]``, right-padded.
        length: int64 ``[N]``, the number of tokens to read of each row.
        position: int64 ``[N, U]``, last decisions, each below its row's ``length``.
        row_features: features of the rows, which a trunk may read before the tokens; the mean is over tokens only.

    Returns:
        float ``[N, U, H]``, at least float32.
    """
    parts, size = [], max(_TOKENS_AT_ONCE // max(tokens.shape[-1], 1), 1)
    with eval_mode(trunk):
        for part in torch.arange(tokens.shape[0], device=tokens.device).split(size):
            rows, read, place = tokens[part], length[part], position[part]
            own = None if row_features is None else row_features.select(part)
            width = max(int(read.max()), 1) if read.numel() else 1
            attention = torch.arange(width, device=rows.device) < read[:, None]
            mean = running_mean(read_rows(trunk, rows[:, :width], attention, own)[HIDDEN])
            parts.append(mean.gather(1, place.unsqueeze(-1).expand(-1, -1, mean.shape[-1])))
    return torch.cat(parts)


def candidate_features(
    policy: UtteranceActor, tokens: Tensor, length: Tensor, action: Tensor, row_features: RowFeatures | None = None
) -> Tensor:
    """Features of utterances that were sampled to continue rows.

    Args:
        policy: of whose language model the features are.
        tokens: int64 ``[N, T]``.
        length: int64 ``[N]``, the number of tokens of each row.
        action: int64 ``[N * C, K]``, the candidates of each row one after the other, each with its end.
        row_features: features of the rows, for language models that read some.

    Returns:
        float ``[N, C, H]``.
    """
    copies = action.shape[0] // tokens.shape[0]
    of = torch.arange(tokens.shape[0], device=tokens.device).repeat_interleave(copies)
    tokens, length, row_features = tokens[of], length[of], None if row_features is None else row_features.select(of)
    rows = torch.cat([tokens, torch.zeros_like(action)], -1)
    slot = torch.arange(action.shape[-1], device=action.device)
    rows = rows.scatter(-1, length[:, None] + slot, action)
    # The first word is written in the last state of the row_features, so the end, word e, in the state length - 1 + e.
    end = (action == policy.decoder.control.end_of_action).int().argmax(-1)
    last_decision = length - 1 + end
    trunk = split_actor(policy.decoder.actor).trunk
    features = utterance_features(trunk, rows, last_decision + 1, last_decision[:, None], row_features)
    return features.squeeze(1).unflatten(0, (-1, copies))


def check_sampling_policy(user: str, policy: UtteranceActor) -> None:
    """Raise ValueError unless ``policy`` samples utterances with ends."""
    if policy.method != "sample" or policy.decoder.stop is not None:
        raise ValueError(f"{user} needs a policy with method='sample' and no stop=, got method={policy.method!r}.")


class CandidateSampler:
    """Adds features of utterances, and of candidates sampled in their place, to rows (CHAI, arXiv 2204.08426).

    The states of a row are those of its utterances and the one that follows the last. ``candidates`` utterances are
    sampled in each, but not in the last state of a terminated row, nor where the model has too few positions for
    another utterance. The columns, for rows with up to ``U`` states in the whole dataset:

    ======================  =======================  ==================================================
    key                     dtype, shape             meaning
    ======================  =======================  ==================================================
    ``state_position``      int64 ``[*B, U]``        positions of the row's states
    ``state_mask``          bool ``[*B, U]``         True for states that the row has
    ``utterance_feature``   float32 ``[*B, U, H]``   of the utterance that the row has there; zero in the last
    ``candidate_mask``      bool ``[*B, U]``         True for states with candidates
    ``candidate_feature``   float32 ``[*B,U,C,H]``   of the candidates; zero without
    ``candidate_log_prob``  float32 ``[*B, U, C]``   of the candidates under the policy that sampled them
    ======================  =======================  ==================================================

    They take about ``4 U H (C + 1)`` bytes a row: 10 000 rows of 8 states with 8 candidates and ``H = 768`` are 2.2 GB.
    The rest of the memory does not grow with the dataset.

    Args:
        policy: samples the candidates; an :class:`UtteranceActor` with ``method="sample"`` over the frozen language
            model. Its seed is that of the candidates.
        candidates: ``C``.
        rows_at_a_time: rows whose candidates are sampled together.
        progress: called with the number of rows done and of all.

    Raises:
        ValueError: the policy is of another kind.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.modules import CandidateSampler, UtteranceActor, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, seed=0)
        >>> rows = to_rows([Episode([Turn("a", 0.0), Turn("b"), Turn("cc", 1.0)], True)], tokenizer, 12)
        >>> rows = CandidateSampler(policy, 5)(rows)
        >>> rows["candidate_feature"].shape, rows["candidate_mask"]
        (torch.Size([1, 3, 5, 8]), tensor([[ True,  True, False]]))
    """

    @checked
    def __init__(
        self,
        policy: UtteranceActor,
        candidates: Count,
        *,
        rows_at_a_time: Count = 64,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        check_sampling_policy("CandidateSampler", policy)
        self.policy, self.candidates = policy, candidates
        self.rows_at_a_time, self.progress = rows_at_a_time, progress

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        """A shallow copy of rows ``[*B]`` with the columns; ``terminated`` is read beside the entries of a row.

        Rows have the features that the policy's language model reads, if it reads some.
        """
        schema.refuse_steps(rows)
        names = (TOKENS, ATTENTION_MASK, schema.AGENT_MASK, schema.TERMINATED)
        given = {name: entry(rows, name) for name in names}
        shape = given[TOKENS].shape[:-1]
        flat = {name: value.reshape(shape.numel(), value.shape[-1]) for name, value in given.items()}
        total, device = shape.numel(), next(self.policy.decoder.actor.parameters()).device
        starts = range(0, max(total, 1), self.rows_at_a_time)
        blocks = [{name: value[i : i + self.rows_at_a_time] for name, value in flat.items()} for i in starts]
        counts = [self._spans(block).row.bincount() for block in blocks]
        states = max([1, *(int(count.max()) for count in counts if count.numel())])
        row_features = self.policy.decoder.features(type(self).__name__, rows, shape)
        parts = []
        for start, block in zip(starts, blocks, strict=True):
            done = min(start + self.rows_at_a_time, total)
            part = torch.arange(start, done, device=flat[TOKENS].device)
            own = None if row_features is None else row_features.select(part).to(device)
            parts.append(self._columns(states, block, device, own))
            if self.progress is not None:
                self.progress(done, total)
        return rows.copy().update(torch.cat(parts).reshape(shape).to(flat[TOKENS].device))

    def _spans(self, block: Mapping[str, Tensor]) -> UtteranceSpans:
        """The utterances of a block of rows, on the CPU."""
        tokens, attention, agent, terminated = (value.cpu() for value in block.values())
        ends = turn_end_mask(attention, agent, tokens, self.policy.decoder.control.end_of_action)
        return find_utterances(attention, agent, ends, terminated.squeeze(-1))

    def _columns(
        self, states: int, block: Mapping[str, Tensor], device: torch.device, row_features: RowFeatures | None
    ) -> TensorDict:
        """The columns of a block of rows, ``states`` states each, on the CPU."""
        tokens, spans = block[TOKENS].long().to(device), self._spans(block)
        # Each state's slot is its number among the states of its row.
        slot = torch.arange(len(spans.row)) - torch.searchsorted(spans.row, spans.row)
        row, of_utterance = spans.row[spans.state], slot[spans.state]
        end = torch.zeros(tokens.shape[0], states, dtype=torch.int64)
        end[row, of_utterance] = spans.end
        trunk, there = split_actor(self.policy.decoder.actor).trunk, end.to(device)
        feature = utterance_features(trunk, tokens, there.amax(-1) + 1, there, row_features).float().cpu()
        is_utterance = torch.zeros_like(end, dtype=torch.bool).index_put((row, of_utterance), torch.tensor(True))
        out = TensorDict(
            {
                schema.STATE_POSITION: torch.zeros_like(end).index_put((spans.row, slot), spans.position),
                schema.STATE_MASK: torch.zeros_like(is_utterance).index_put((spans.row, slot), torch.tensor(True)),
                schema.UTTERANCE_FEATURE: feature.masked_fill(~is_utterance.unsqueeze(-1), 0),
                schema.CANDIDATE_MASK: torch.zeros_like(is_utterance),
                schema.CANDIDATE_FEATURE: torch.zeros(*end.shape, self.candidates, feature.shape[-1]),
                schema.CANDIDATE_LOG_PROB: torch.zeros(*end.shape, self.candidates),
            },
            batch_size=tokens.shape[:1],
        )
        is_last = torch.ones_like(spans.row, dtype=torch.bool)
        is_last[spans.state] = False
        wanted = ~(is_last & block[schema.TERMINATED].squeeze(-1).cpu()[spans.row])
        if (limit := self.policy.decoder.room(row_features)) is not None:
            wanted &= spans.position + 1 + self.policy.decoder.action_length <= limit
        chosen = wanted.nonzero().squeeze(-1)
        row, slot, read = spans.row[chosen], slot[chosen], spans.position[chosen] + 1
        order = read.argsort()  # prefixes of similar length are read and continued together
        for part in order.split(self.rows_at_a_time) if len(order) else ():
            of = row[part].to(device)
            own = None if row_features is None else row_features.select(of)
            features, log_prob = self._sample(tokens[of], read[part].to(device), own)
            place = row[part], slot[part]
            out[schema.CANDIDATE_MASK][place] = True
            out[schema.CANDIDATE_FEATURE][place] = features.float().cpu()
            out[schema.CANDIDATE_LOG_PROB][place] = log_prob.cpu()
        return out

    def _sample(self, tokens: Tensor, length: Tensor, row_features: RowFeatures | None) -> tuple[Tensor, Tensor]:
        """Features ``[M, C, H]`` and log-probabilities ``[M, C]`` of candidates for prefixes ``[M, T]``."""
        tokens = tokens[:, : int(length.max())]
        attention = torch.arange(tokens.shape[-1], device=tokens.device) < length[:, None]
        drawn = self.policy.decoder.generate(tokens, attention, candidates=self.candidates, features=row_features)
        features = candidate_features(self.policy, tokens, length, drawn.action, row_features)
        return features, drawn.token_log_prob.sum(-1).unflatten(0, (-1, self.candidates))


class CHAIActor(TensorDictModuleBase):
    """Plays, of ``candidates`` sampled utterances, the one with the highest ``min_k Q_k`` (CHAI, arXiv 2204.08426).

    It reads and writes what the ``policy`` does: ``tokens``, ``attention_mask`` and, if it is there, ``done``;
    ``action``, ``action_log_prob`` and ``token_log_prob``. The log-probabilities are those of sampling, without the
    choice. Values read :func:`~torchrl_lang.modules.chai.candidate_features`, the features that
    :class:`CandidateSampler` computes for training. With ``set_exploration_type(ExplorationType.DETERMINISTIC)`` the
    language model decodes greedily.

    Args:
        policy: samples the candidates; an :class:`UtteranceActor` with ``method="sample"``, which has the seed.
        qvalue: usually with the target parameters: a :class:`UtteranceQValueHead`, or a TensorDictModule with one input
            that writes ``utterance_value`` ``[N, n_q]``.
        candidates: number of samples.

    Raises:
        ValueError: the policy or the head is of another kind.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.modules import CHAIActor, UtteranceActor, UtteranceQValueHead, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, seed=0)
        >>> best = CHAIActor(policy, UtteranceQValueHead(8), candidates=5)
        >>> rows = TensorDict(tokens=torch.full((2, 6), tokenizer.control.begin_action),
        ...                   attention_mask=torch.arange(6).expand(2, 6) < 1, batch_size=[2])
        >>> best(rows)["action"].shape
        torch.Size([2, 4])
    """

    @checked
    def __init__(self, policy: UtteranceActor, qvalue: nn.Module, *, candidates: Count = 8) -> None:
        super().__init__()
        check_sampling_policy("CHAIActor", policy)
        check_writes("qvalue", qvalue, UTTERANCE_VALUE)
        self.policy, self.qvalue, self.candidates = policy, qvalue, candidates
        self.in_keys, self.out_keys = list(policy.in_keys), [ACTION, ACTION_LOG_PROB, TOKEN_LOG_PROB]

    @dispatch(auto_batch_size=False)
    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row into ``tensordict``."""
        if not is_stochastic():
            return self.policy(tensordict)
        tokens, attention = entry(tensordict, TOKENS), entry(tensordict, ATTENTION_MASK)
        done, batch, decoder = tensordict.get(DONE, None), tokens.shape[:-1], self.policy.decoder
        features = decoder.features(type(self).__name__, tensordict, batch)
        drawn = decoder.generate(tokens, attention, done=done, candidates=self.candidates, features=features)
        rows, length = tokens.reshape(batch.numel(), -1).long(), row_length(attention).flatten()
        active = torch.ones_like(length, dtype=torch.bool) if done is None else ~done.flatten()
        choice = torch.zeros_like(length)
        if bool(active.any()):  # an utterance may not fit after rows that are done
            action = drawn.action.unflatten(0, (-1, self.candidates))[active].flatten(0, 1)
            longest = int(length[active].max())
            own = None if features is None else features.select(active)
            values = self._values(rows[active][:, :longest], length[active], action, own)
            choice[active] = values.argmax(-1)
        found = drawn.select(torch.arange(len(choice), device=choice.device) * self.candidates + choice)
        return found.write(tensordict)

    def _values(self, tokens: Tensor, length: Tensor, action: Tensor, row_features: RowFeatures | None) -> Tensor:
        """``min_k Q_k`` of candidates, ``[N, C]``."""
        features = candidate_features(self.policy, tokens, length, action, row_features)
        states = dict.fromkeys(read_keys(self.qvalue), features.flatten(0, 1))
        with eval_mode(self.qvalue):
            values = apply_head(self.qvalue, states, UTTERANCE_VALUE)
        return values.amin(-1).unflatten(0, features.shape[:2])
