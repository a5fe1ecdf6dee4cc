"""The algorithms that learn from a dataset: their options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.recipes.algorithms.training import PRETRAINED, HeadOptions, LoopOptions, RunOptions
from torchrl_lang.recipes.options import Options, dashed, option, required, with_defaults


@dataclass(frozen=True, kw_only=True)
class DialogueOptions(Options, group="data"):
    """Options for --data FILE.jsonl, in the order of :func:`~torchrl_lang.data.dataset_from_jsonl`."""

    tokenizer: str | None = option(
        None, "of dialogues: name or folder of a Hugging Face tokenizer; none: the characters of the file"
    )
    chat: bool = option(False, "write dialogues as the chat template of --tokenizer does")
    system: str | None = option(None, "system prompt of the chat template; implies --chat")
    history: Literal["exact", "kept"] = option(
        "exact",
        "of chat templates that change earlier messages: exact: a row for each utterance; kept: rows keep the messages",
    )
    row_length: int | None = option(
        None, "tokens of a row of dialogues; none: those of the longest dialogue, or of the environment", ge=1
    )
    on_error: Literal["raise", "skip"] = option("raise", "skip: leave out lines that hold no valid dialogue")
    on_overflow: Literal["error", "truncate"] = option("error", "truncate: cut dialogues longer than --row-length")
    ignore: tuple[str, ...] = option((), "keys to ignore in the lines of dialogues")
    reward: str = option("reward", "key of the lines of dialogues that holds their reward")

    def given_of_dialogues(self) -> list[str]:
        """The names of these options that were given, as the command line writes them."""
        fields = dataclasses.fields(DialogueOptions)
        return [f"--{dashed(field.name)}" for field in fields if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class SizeOptions(Options, group="model"):
    """Sizes of a model from scratch."""

    layers: int = option(3, "transformer blocks of a model from scratch", ge=1)
    width: int = option(64, "hidden size of a model from scratch", ge=1)
    heads: int = option(4, "attention heads of a model from scratch", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(f"--width must be a multiple of --heads {self.heads}, got {self.width}.")

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by name."""
        return {name: getattr(self, name) for name in ("layers", "width", "heads")}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SizeOptions):
    """Options of a new model that offline training begins with, and of its computation."""

    kind: str = option("gpt2", "Hugging Face model type of a model from scratch")
    features_hidden: int = option(
        0, "width of a hidden layer of a new projector of the rows' features; 0: a linear one", ge=0
    )
    feature_positions: bool = option(True, "let features take positions of the model, in front of the tokens")
    length_groups: int | None = option(
        None, "groups of similar length that a batch is split into to reduce padding; none: automatic", ge=1
    )
    compile: bool = option(False, "compile the model (needs a C++ compiler; slow to start; pays on GPUs)")
    checkpointing: bool = option(False, "recompute activations in the backward pass: slower, much less memory")


@dataclass(frozen=True, kw_only=True)
class OfflineOptions(
    DialogueOptions,
    ModelOptions,
    LoopOptions,
    RunOptions,
    group="data",
    task_from=("data", "manifest.json"),
    of_pretrained={**PRETRAINED, "lr": 5e-5, "steps": 200, "log_every": 5, "held_out": 64, "transition_weight": 0.0},
):
    """Options of all offline recipes."""

    data: Path = required("folder of a dataset, see `generate`, or a JSONL file of dialogues")
    fraction: float = option(1.0, "share of episodes to learn from, those with the best return", gt=0, le=1)
    bottom_fraction: float = option(
        1.0, "share of episodes that --fraction chooses from, those with the worst return", gt=0, le=1
    )
    held_out: int = option(
        500, "last episodes of the dataset, at most a tenth, that are not trained on but check what was learned", ge=0
    )
    transition_weight: float = option(1.0, "weight of environment tokens in the policy's loss", group="loss", ge=0)


@dataclass(frozen=True, kw_only=True)
class BC(OfflineOptions, algorithm="bc", preset="bc", place="imitation:train_bc"):
    """Behaviour cloning on a dataset, or with --fraction below 1 on its best episodes."""


@dataclass(frozen=True, kw_only=True)
class DT(OfflineOptions, group="loss", algorithm="dt", preset="bc", place="imitation:train_dt"):
    """Decision transformer on a dataset (arXiv 2106.01345), which imitates given the return."""

    mode: Literal["constant", "decremented"] = option(
        "constant", "condition on the return of the whole episode, or at each turn on the return to go"
    )
    target_return: float | Literal["best"] = option(
        "best", "return that the policy is asked for at play; best: mean return of the best tenth of the episodes"
    )


@dataclass(frozen=True, kw_only=True)
class ValueOptions(HeadOptions, OfflineOptions, group="loss", preset="ilql"):
    """Base of the options of the recipes that learn values."""

    value_lr: float | None = option(
        None, "peak learning rate of value heads; none: --lr", group="optimisation", gt=0, le=1
    )


@dataclass(frozen=True, kw_only=True)
class DiscountOptions(ValueOptions):
    """Options of the recipes with a target network that follows the values of tokens."""

    gamma: float = option(1.0, "discount factor per token inside an utterance", ge=0, le=1)
    turn_gamma: float = option(0.99, "discount factor from an utterance to the next", ge=0, le=1)
    tau: float = option(0.02, "soft update rate of the target", gt=0, le=1)


@dataclass(frozen=True, kw_only=True)
class ActionValueOptions(DiscountOptions):
    """Options of the recipes with values of tokens."""

    qvalue_weight: float = option(0.5, "weight of Q's loss; the policy's has weight 1", ge=0)


@dataclass(frozen=True, kw_only=True)
class ILQL(ActionValueOptions, algorithm="ilql", place="token_values:train_ilql"):
    """Implicit language Q-learning on a dataset (arXiv 2206.11871).

    The defaults are the settings to begin with; those of the paper's code for Wordle are paper-ilql's.
    """

    beta: float = option(4.0, "weight of the values in the policy that is evaluated during training", ge=0)
    expectile: float = option(0.8, "expectile of Q that V regresses on; 0.5: the mean", gt=0, lt=1)
    value_weight: float = option(0.5, "weight of V's loss; the policy's has weight 1", ge=0)
    guidance_clip: float | None = option(
        None, "upper bound of beta * (Q - V) in decoding; 0: values only make tokens less likely; none: no bound", ge=0
    )
    advantage_temperature: float = option(
        0.0, "beta of the weights exp(beta * (Q - V)) of the policy's loss; 0: behaviour cloning", ge=0
    )
    weight_clip: float | None = option(None, "upper bound of these weights; none: no bound", gt=0)
    actor_normalizer: Literal["all", "action"] = option(
        "action", "what the policy's loss is divided by: the number of the agent's tokens (action) or of all real ones"
    )
    cql_weight: float = option(0.01, "weight of the CQL term", ge=0)
    target: Literal["td", "mc", "lambda"] = option(
        "lambda", "what V regresses on: td (target Q), mc (rewards to go) or lambda-returns"
    )
    lmbda: float = option(1.0, "lambda of the lambda-returns inside an utterance", ge=0, le=1)
    turn_lmbda: float = option(0.0, "lambda of the lambda-returns at its end", ge=0, le=1)
    qvalue_lmbda: float = option(0.0, "lambda of Q's TD(lambda) targets; 0: one step", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class CQL(ActionValueOptions, algorithm="cql", place="token_values:train_cql"):
    """Conservative Q-learning on a dataset (arXiv 2006.04779)."""

    beta: float = option(4.0, "weight of the values in the policy that is evaluated during training", ge=0)
    cql_weight: float = option(0.1, "weight of the CQL term, the paper's alpha", ge=0)


@dataclass(frozen=True, kw_only=True)
class BCQ(ActionValueOptions, algorithm="bcq", place="token_values:train_bcq"):
    """Discrete batch-constrained Q-learning on a dataset (arXiv 1910.01708)."""

    threshold: float = option(
        0.3, "least probability of a token relative to the likeliest one's, the paper's tau", ge=0, le=1
    )


@dataclass(frozen=True, kw_only=True)
class Psi(ActionValueOptions, algorithm="psi", place="token_values:train_psi"):
    """Psi-learning (KL control) on a dataset (arXiv 1611.02796)."""

    prior: Path | None = option(
        None, "folder of a finished run with the same tokens whose policy is the prior; none: the policy, as it learns"
    )
    reward_scale: float = option(1.0, "reward that is worth one nat of divergence from the prior", gt=0)
    threshold: float = option(
        0.05,
        "least probability of a token relative to the likeliest one's; 0: as in the papers, which suits data that take "
        "every token at every state",
        ge=0,
        le=1,
    )


# All values begin at the greatest return, and what is less has to travel back through the target: a fast one.
@with_defaults(tau=0.2)
class QSFT(DiscountOptions, algorithm="qsft", defining=("beta", "tau"), place="token_values:train_qsft"):
    """Q-SFT on a dataset (arXiv 2411.05193): Q-learning by weighted fine-tuning, without heads; needs --start."""

    beta: float = option(64.0, "weight of the values in the policy that is evaluated during training", ge=0)
    guide: Literal["ratio", "likelihood"] = option(
        "likelihood",
        "what guides the policy: the likelihood p, as in the paper, or the value, which is the ratio p / pi",
    )
    rest: Literal["padding", "all"] = option(
        "padding", "tokens that get the probability that is left: padding, which the agent never writes, or all alike"
    )
    threshold: float = option(
        0.3,
        "least probability of a token relative to the likeliest one's, in the backup and where the ratio guides; 0: as "
        "in the paper",
        ge=0,
        le=1,
    )
    value_min: float | None = option(None, "return to go that is the value 0; none: the data's least")
    value_max: float | None = option(None, "return to go that is the value 1; none: the data's greatest")


@dataclass(frozen=True, kw_only=True)
class OREO(ValueOptions, algorithm="oreo", defining=("value_weight",), place="token_values:train_oreo"):
    """OREO on a dataset (arXiv 2412.16145): path consistency of a policy and its values; needs --start."""

    reward_scale: float = option(
        0.1, "reward that is worth one nat of divergence from the reference, the paper's beta", gt=0
    )
    kl_weight: float = option(
        0.3,
        "weight of the divergence from the reference, the paper's alpha (0.01 there): keeps tokens without data rare",
        ge=0,
    )
    value_weight: float = option(1.0, "weight of V's loss; the policy's has weight 1", ge=0)
    level: Literal["token", "utterance", "row"] = option(
        "token", "what an action is: a token, an utterance, or all of a row"
    )


# Few small steps: the losses still fall when the returns of the policy have long begun to fall as well.
@with_defaults(transition_weight=0.0, optimizer="adamw", lr=1e-4, steps=300)
class PreferenceOptions(OfflineOptions, group="loss", preset="bc", defining=("transition_weight",)):
    """Base of the options of the recipes that learn which episodes are better; they need --start."""

    reward_scale: float = option(
        0.5,
        "reward that is worth one nat of divergence from the start, the papers' beta (IPO: tau; 0.1 is usual for texts "
        "that a model answers with)",
        gt=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transition_weight:
            raise ValueError(f"{self.algorithm} learns nothing from the environment's tokens: no --transition-weight.")


@dataclass(frozen=True, kw_only=True)
class PairOptions(PreferenceOptions):
    """Options of the recipes that learn from pairs of episodes that begin alike, a better and a worse one."""

    pairs: int | None = option(
        None,
        "pairs of episodes that begin alike (of one group, where the data have groups): the best with the worst, the "
        "second best with the second worst, ...; none: as many as there are",
        ge=1,
    )
    per_token: bool = option(False, "compare the means over the agent's tokens of an episode, not the sums")


@dataclass(frozen=True, kw_only=True)
class DPO(PairOptions, algorithm="dpo", place="preference:train_dpo"):
    """Direct preference optimisation on a dataset (arXiv 2305.18290): better episodes likelier than worse ones."""

    label_smoothing: float = option(
        0.2,
        "probability that the worse episode of a pair is the better one, by luck (conservative DPO); 0: plain DPO",
        ge=0,
        lt=0.5,
    )


@with_defaults(reward_scale=0.3)
class IPO(PairOptions, algorithm="ipo", place="preference:train_ipo"):
    """Identity preference optimisation on a dataset (arXiv 2310.12036): better episodes likelier by a fixed margin."""


@with_defaults(reward_scale=1.0)
class KTO(PreferenceOptions, algorithm="kto", place="preference:train_kto"):
    """Kahneman-Tversky optimisation on a dataset (arXiv 2402.01306): episodes are desirable or not."""

    threshold: float | None = option(None, "return above which an episode is desirable; none: the data's mean return")
    desirable_weight: float = option(1.0, "weight of desirable episodes", ge=0)
    undesirable_weight: float = option(1.0, "weight of the others", ge=0)
    baseline: Literal["mismatched", "rows"] = option(
        "mismatched",
        "episodes whose likelihood estimates the divergence from the start: beginnings with the rests of others, as in "
        "the paper, or those of the batch as they are (two passes less; the same where all begin alike)",
    )


@dataclass(frozen=True, kw_only=True)
class UtteranceOptions(ValueOptions):
    """Options of the recipes whose policy ranks sampled utterances by their values."""

    gamma: float = option(0.99, "discount factor from an utterance to the next", ge=0, le=1)
    tau: float = option(0.02, "soft update rate of the target Q", gt=0, le=1)
    candidates: int = option(8, "utterances that the policy samples to play the best one", ge=1)


@with_defaults(optimizer="adamw")  # the heads have no linear layer for Muon
class CHAI(UtteranceOptions, algorithm="chai", place="utterance_values:train_chai"):
    """CHAI (arXiv 2204.08426): values of utterances of a language model that stays as it is; needs --start."""

    cql_weight: float = option(0.1, "weight of the CQL term over the proposed utterances", ge=0)
    proposals: int = option(5, "utterances that are sampled in each state of the dataset", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("--top-layers", self.top_layers), ("--lora-rank", self.lora_rank)):
            if value is not None:
                raise ValueError(f"chai trains no block of the language model: leave out {name} {value}.")


@dataclass(frozen=True, kw_only=True)
class UtteranceILQL(UtteranceOptions, algorithm="utterance-ilql", place="utterance_values:train_utterance_ilql"):
    """Implicit Q-learning with one value for each utterance (arXiv 2206.11871), on a dataset."""

    expectile: float = option(0.8, "expectile of Q that V regresses on; 0.5: the mean", gt=0, lt=1)
    value_weight: float = option(0.5, "weight of V's loss; the policy's has weight 1", ge=0)
    qvalue_weight: float = option(0.5, "weight of Q's loss", ge=0)
    log_prob_weight: float = option(0.0, "weight of a candidate's log-probability beside its value", ge=0)


@with_defaults(fraction=0.1)
class PercentBC(BC, algorithm="percent-bc", defining=("fraction",)):
    """Behaviour cloning on the best tenth of the episodes (%BC)."""


@with_defaults(expectile=0.5)
class SingleStep(ILQL, algorithm="single-step", defining=("expectile",)):
    """Single-step RL: values of the policy that made the data (SARSA), which is ILQL with the mean of Q as V.

    All else is as in ilql, its CQL term included: --cql-weight 0 leaves it out.
    """


@with_defaults(expectile=0.5, target="mc", qvalue_lmbda=1.0)
class MonteCarlo(ILQL, algorithm="monte-carlo", defining=("expectile", "target", "qvalue_lmbda")):
    """Monte-Carlo returns: Q and V regress on the rewards to go instead of on learned values.

    Q of a truncated episode bootstraps from V of its last state; V takes the rewards that the episode holds. All
    else is as in ilql, its CQL term included: --cql-weight 0 leaves it out.
    """


@with_defaults(beta=0.0, advantage_temperature=4.0, weight_clip=20.0)
class AWAC(ILQL, algorithm="awac", defining=("beta", "advantage_temperature", "weight_clip")):
    """Advantage-weighted actor-critic (arXiv 2006.09359): values weigh the policy's loss, and do not guide decoding.

    The values are those of ilql, its CQL term included: --cql-weight 0 leaves it out.
    """


@with_defaults(
    optimizer="adamw",
    lr=1e-5,
    warmup=0,
    final_lr=1.0,
    weight_decay=0.0,
    max_grad_norm=None,
    batch_size=1024,
    layers=12,
    width=768,
    heads=12,
    gamma=0.99,
    expectile=0.7,
    value_weight=1.0,
    qvalue_weight=1.0,
    cql_weight=1e-4,
    target="td",
    tau=0.005,
    transition_weight=0.0,
    actor_normalizer="all",
    beta=16.0,
    guidance_clip=0.0,
)
class PaperILQL(ILQL, algorithm="paper-ilql", preset="", of_pretrained={}):
    """ILQL with the paper's settings for Wordle (arXiv 2206.11871): GPT-2's size, small steps; meant for a GPU.

    The settings are those of the paper's code. Unlike there, policy, values and target values share one trunk in place
    of three, models from scratch have no dropout, and the checkpoint is chosen by its games rather than its loss.
    """
