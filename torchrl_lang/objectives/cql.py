"""Conservative Q-learning (CQL, arXiv 2006.04779) for rows of tokens."""

from __future__ import annotations

from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from torchrl_lang._checks import finite, positive
from torchrl_lang.functional import cql_term
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.objectives.base import TransitionBatch
from torchrl_lang.objectives.qbackup_base import QBackupLoss, StateTables
from torchrl_lang.objectives.qvalues import QValues

__all__ = ["CQLLoss"]


class CQLLoss(QBackupLoss):
    r"""Conservative Q-learning over rows of tokens, the baseline of the ILQL paper.

    Q-learning with a term that lowers the values of tokens that the data do not take (arXiv 2006.04779, eq. 4)::

        y_j         = r_j + gamma (1 - d_{j+1}) max_a Qt(s_{j+1}, a)
        loss_qvalue = qvalue_weight * mean_j sum_k (y_j - Q_k(s_j, a_j))^2
        loss_cql    = cql_weight    * mean_j sum_k CE(Q_k(s_j, .) / T, a_j)
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    Unlike :class:`~torchrl_lang.objectives.ILQLLoss`, whose V stays within the values of tokens in the data, the
    maximum is over all tokens that the policy can write, and only the CQL term keeps it from trusting those that the
    data never take. The policy is decoded as that of ILQL, ``ValueGuidance(loss.target_qvalue_network(), beta=...)``.

    Args:
        actor_network, qvalue_network: see :class:`~torchrl_lang.objectives.QBackupLoss`.

    Keyword Args:
        cql_weight: the paper's ``alpha``.
        cql_temperature: ``T``.
        **options: see :class:`~torchrl_lang.objectives.QBackupLoss`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.objectives import SoftUpdate
        >>> from torchrl_lang.modules import QValueHead, causal_lm, language_actor, qvalue_module
        >>> from torchrl_lang.objectives import CQLLoss
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = CQLLoss(actor, qvalue_module(QValueHead(16, 12)), gamma=0.9)
        >>> target = SoftUpdate(loss, tau=0.005)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     terminated=torch.tensor([[True]]),
        ...     batch_size=[1],
        ... )
        >>> out = loss(rows)
        >>> sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        >>> target.step()
    """

    out_keys = ["loss_qvalue", "loss_cql", "loss_actor", "qvalue", "td_target"]

    def __init__(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        qvalue_network: nn.Module,
        *,
        cql_weight: float = 0.1,
        cql_temperature: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        finite("cql_weight", cql_weight)
        positive("cql_temperature", cql_temperature)
        self.cql_weight, self.cql_temperature = cql_weight, cql_temperature

    def _backup(self, tables: StateTables) -> Tensor:
        return tables.target().amax(-1)

    def _regularizers(self, batch: TransitionBatch, qvalues: QValues) -> dict[str, Tensor]:
        if not self.cql_weight:
            return {}
        term = self._vocabulary_term(cql_term, batch, qvalues, temperature=self.cql_temperature)
        return {"loss_cql": self.cql_weight * term}
