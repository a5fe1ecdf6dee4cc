"""Check that an environment is a correct language environment; extends TorchRL's ``check_env_specs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_lang import schema
from torchrl_lang.text.chat_tokenizer import encode_action

_KEYS = (*schema.ROW_KEYS, schema.DONE, schema.TERMINATED, schema.TRUNCATED)


class LanguageEnvError(AssertionError):
    """An environment breaks a rule of language environments; ``rule`` is its name."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule


def check_language_env(
    env: EnvBase, make_env: Callable[[int], EnvBase] | None = None, *, utterances: Sequence[str] = (), seed: int = 0
) -> None:
    """Step an environment with random utterances and raise an error if it breaks a rule.

    ==================  ================================================================================================
    rule                meaning
    ==================  ================================================================================================
    ``specs``           TorchRL's ``check_env_specs`` passes
    ``row``             every observation is a well-formed row (``check_row``), with padding tokens on padding
    ``fresh``           after a reset nothing is done, and the rows have no reward and no token of the agent
    ``growth``          every step appends tokens to a row that is not done (so its episode ends some time) and does not
                        change earlier tokens
    ``flags``           ``done`` is ``terminated`` or ``truncated``, all bool ``[*B, 1]``; a row with control tokens
                        ends in ``end_of_dialogue`` if and only if its task has terminated
    ``reward``          ``reward`` is float32 ``[*B, 1]``, and ``token_reward`` sums to the rewards of the turns
    ``latch``           stepping a row that is done changes nothing and has reward 0
    ``mask``            a row that a ``"_step"`` mask excludes does not change and has reward 0
    ``seed``            the same seed gives the same episodes
    ``batch``           and so it does for any batch size (if ``make_env`` is given)
    ``global stream``   resets and steps do not use torch's global random generator
    ``stepping``        a step does not change tensors that were returned before, nor its action
    ``aliasing``        changing returned or passed tensors in place does not affect the environment
    ``partial reset``   resetting some rows does not change the others
    ``state``           ``reset(observation, set_state=True)`` returns the same observation, or raises an error
    ==================  ================================================================================================

    The check seeds the environment and leaves it in the middle of an episode. It does not use torch's global random
    generator.

    Args:
        env: a :class:`~torchrl_lang.envs.LanguageEnv` or :class:`~torchrl_lang.envs.TokenEnv`, without transforms or
            with transforms that write their rewards to the row, such as :class:`~torchrl_lang.transforms.LivingCost`.
            The rules about some rows of a batch need a batch of at least 2.
        make_env: makes an equal environment of a given batch size.
        utterances: texts that are meaningful in this task, used for half of the turns; the others are random tokens.
        seed: seed of the environment and of the utterances.

    Raises:
        LanguageEnvError: a rule is broken. It is an ``AssertionError`` whose ``rule`` is the name in the table.

    Examples:
        >>> from torchrl_lang.envs import check_language_env
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> check_language_env(CorridorEnv(batch_size=[3]), lambda n: CorridorEnv(batch_size=[n]), utterances="lr")
    """
    on_gpu = env.device is not None and env.device.type == "cuda"
    with torch.random.fork_rng(devices=[env.device] if on_gpu else []):
        try:
            check_env_specs(env, seed=seed)
        except Exception as error:
            raise LanguageEnvError("specs", f"check_env_specs raised {type(error).__name__}: {error}") from error
        _apply_rules(env, make_env, utterances, seed)


def _apply_rules(env: Any, make_env: Callable[[int], EnvBase] | None, texts: Sequence[str], seed: int) -> None:
    actions = _random_actions(env, texts, seed)
    game = _play(env, seed, actions)
    _inspect(env, game)
    _same("seed", game, _play(env, seed, actions), "played twice with one seed and the same actions")
    scribbled = _play(env, seed, actions, scribble=True)
    _same("aliasing", game, scribbled, "played again, with tensors changed in place outside")
    if env.batch_size.numel() > 1:
        _partial_reset(env, seed, actions, game)
        _mask(env, seed, actions, game)
    _state(env, seed, actions, game)
    if make_env is None:
        return
    # Episode k of a seed is the k-th row to be reset: row k of three, or the k-th reset of one row.
    three, one = make_env(3), make_env(1)
    actions = _random_actions(three, texts, seed)
    together = _play(three, seed, actions)
    one.set_seed(seed)
    for row in range(3):
        alone = [one.reset().clone()]
        for action in actions[: len(together) - 1]:
            alone.append(_step(one, alone[-1], action[row : row + 1]).clone())
        _same("batch", [t[row : row + 1] for t in together], alone, f"episode {row}, alone and in a batch")


# -- playing -----------------------------------------------------------------------------------------------------------


def _random_actions(env: Any, texts: Sequence[str], seed: int) -> list[Tensor]:
    """One action per token of a row, after which every episode is over."""
    generator, control = torch.Generator().manual_seed(seed), env.tokenizer.control
    tokens = env.observation_spec[schema.TOKENS]
    by_token = env.action_spec.shape == env.batch_size
    width, steps = env.env.action_length if by_token else env.action_spec.shape[-1], tokens.shape[-1]

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    def utterance() -> list[int]:
        if texts and draw(2):
            ids = encode_action(env.tokenizer, texts[draw(len(texts))])
        else:
            ids = [draw(tokens.n) for _ in range(draw(width) + 1)]
        ids = [*ids, control.end_of_action][:width]  # the environment ends an utterance of the full width
        return ids if by_token else [*ids, *[control.pad] * (width - len(ids))]

    rows = []
    for _ in range(env.batch_size.numel()):
        said = [utterance() for _ in range(steps)]
        rows.append([token for ids in said for token in ids][:steps] if by_token else said)
    return list(torch.tensor(rows, device=env.device).transpose(0, 1).reshape(steps, *env.action_spec.shape).unbind(0))


def _step(env: EnvBase, moment: TensorDictBase, action: Tensor, **entries: Tensor) -> TensorDictBase:
    """Step with a copy of everything that was returned, because transforms may read it, and the action."""
    given = moment.exclude(schema.REWARD).clone().update({schema.ACTION: action.clone(), **entries})
    return env.step(given).get("next")


def _play(env: EnvBase, seed: int, actions: Sequence[Tensor], *, scribble: bool = False) -> list[TensorDictBase]:
    """Copies of what the reset and each step return, until all rows are done and two steps longer."""
    env.set_seed(seed)
    stream = torch.get_rng_state()
    returned = [env.reset()]
    copies = [returned[0].clone()]
    for action in actions:
        given = copies[-1].exclude(schema.REWARD).clone().set(schema.ACTION, action.clone())
        if scribble:
            _scribble(returned[-1])
        returned.append(env.step(given).get("next"))
        copies.append(returned[-1].clone())
        _hold("stepping", torch.equal(given.get(schema.ACTION), action), "a step changed the action that it was given")
        if scribble:
            _scribble(given.exclude("next"))
        if len(copies) > 2 and copies[-3][schema.DONE].all():
            break
    _hold("global stream", torch.equal(stream, torch.get_rng_state()), "torch's global random stream has moved")
    if not scribble:
        _same("stepping", copies, returned, "returned by an earlier step, before and after later steps")
    return copies


def _scribble(tensordict: TensorDictBase) -> None:
    for value in tensordict.values(True, True):
        if isinstance(value, Tensor):
            value.logical_not_() if value.dtype == torch.bool else value.add_(1)


# -- the rules ---------------------------------------------------------------------------------------------------------


def _hold(rule: str, holds: Tensor | bool, message: str) -> None:
    """Raise an error if a rule does not hold."""
    if not holds:
        raise LanguageEnvError(rule, message)


def _same(rule: str, one: Sequence[TensorDictBase], two: Sequence[TensorDictBase], what: str, rows: Any = ...) -> None:
    """Compare two sequences of observations in all rows, or where ``rows`` (bool ``[*B]``) is True."""
    for step, (a, b) in enumerate(zip(one, two, strict=False)):
        for key in (key for key in (*_KEYS, schema.REWARD) if key in a.keys() and key in b.keys()):
            _hold(rule, torch.equal(a[key][rows], b[key][rows]), f"'{key}' differs at step {step}: {what}")


def _inspect(env: EnvBase, game: Sequence[TensorDictBase]) -> None:
    first = game[0]
    idle = ~(first[schema.DONE].any() | first[schema.AGENT_MASK].any() | (first[schema.TOKEN_REWARD] != 0).any())
    _hold("fresh", idle & first[schema.ATTENTION_MASK][..., 0].all(), "a reset returned empty rows or rows with a past")
    earned = torch.zeros_like(first[schema.TOKEN_REWARD].sum(-1, keepdim=True))
    _row_and_flags(env, first)
    for step, (before, after) in enumerate(pairwise(game)):
        _row_and_flags(env, after)
        over, real = before[schema.DONE], before[schema.ATTENTION_MASK]
        for key in (*_KEYS, schema.REWARD):
            past = 0 if key == schema.REWARD else before[key]
            stays = ((after[key] == past) | ~over).all()
            _hold("latch", stays, f"step {step} changed '{key}' of a row that was done")
        grown = after[schema.ATTENTION_MASK].sum(-1, keepdim=True) > real.sum(-1, keepdim=True)
        _hold("growth", (grown | over).all(), f"step {step} appended nothing to a row")
        for key in schema.ROW_KEYS:
            kept = ((after[key] == before[key]) | ~real).all()
            _hold("growth", kept, f"step {step} changed '{key}' at tokens that were written before")
        _typed("reward", env, after[schema.REWARD], torch.float32)
        earned = earned + after[schema.REWARD]
        total = after[schema.TOKEN_REWARD].sum(-1, keepdim=True)
        sums = f"{total.flatten().tolist()}, the rewards of the turns to {earned.flatten().tolist()}"
        close = torch.allclose(total, earned, rtol=1e-4, atol=1e-4)
        _hold("reward", close, f"after step {step} the rows' token_reward sum to {sums}")


def _typed(rule: str, env: EnvBase, value: Tensor, dtype: torch.dtype) -> None:
    shape = (*env.batch_size, 1)
    right = value.shape == shape and value.dtype == dtype
    _hold(rule, right, f"an entry is {value.dtype} {tuple(value.shape)}, expected {dtype} {shape}")


def _row_and_flags(env: Any, moment: TensorDictBase) -> None:
    control, real = env.tokenizer.control, moment[schema.ATTENTION_MASK]
    try:
        schema.check_row(moment, vocab_size=env.observation_spec[schema.TOKENS].n)
    except (KeyError, TypeError, ValueError) as error:
        raise LanguageEnvError("row", str(error)) from error
    tokens = moment[schema.TOKENS]
    padded = torch.where(real, control.pad, tokens) == control.pad
    _hold("row", padded.all(), "something other than the padding token pads a row")
    done, terminated, truncated = (moment[key] for key in (schema.DONE, schema.TERMINATED, schema.TRUNCATED))
    for flag in (done, terminated, truncated):
        _typed("flags", env, flag, torch.bool)
    _hold("flags", torch.equal(done, terminated | truncated), "'done' is not 'terminated' or 'truncated'")
    if control.marks_turns:  # no token of a chat marks its end
        closes = (tokens == control.end_of_dialogue) & real & ~moment[schema.AGENT_MASK]
        closed = closes.any(-1, keepdim=True)
        _hold("flags", (terminated | ~closed).all(), "a row ends in end_of_dialogue but its task is not 'terminated'")
        _hold("flags", (closed | truncated | ~terminated).all(), "'terminated' without end_of_dialogue: 'truncated'?")


def _alternate(env: EnvBase) -> Tensor:
    """True for every other row, bool ``[*B]``."""
    return (torch.arange(env.batch_size.numel(), device=env.device) % 2 == 0).reshape(env.batch_size)


def _partial_reset(env: EnvBase, seed: int, actions: Sequence[Tensor], game: Sequence[TensorDictBase]) -> None:
    again = _alternate(env)
    now = _play(env, seed, actions[:2])[-1]
    came = env.reset(now.exclude(schema.REWARD).clone().set("_reset", again.unsqueeze(-1)))
    past = came[schema.AGENT_MASK].any(-1) | came[schema.DONE].squeeze(-1)
    _hold("partial reset", not (past & again).any(), "rows that were reset still have a past")
    played = [came]
    for action in actions[2 : len(game) - 1]:
        played.append(_step(env, played[-1], action).clone())
    _same("partial reset", game[3:], played[1:], "rows that were not reset, after others were reset", rows=~again)


def _mask(env: EnvBase, seed: int, actions: Sequence[Tensor], game: Sequence[TensorDictBase]) -> None:
    stepped = _alternate(env)
    start = _play(env, seed, [])[-1]
    after = _step(env, start, actions[0], _step=stepped.unsqueeze(-1))
    _same("mask", [start], [after], "rows that the mask excludes", rows=~stepped)
    _same("mask", [game[1]], [after], "rows that the mask steps", rows=stepped)
    _hold("mask", (after[schema.REWARD][~stepped] == 0).all(), "a row that the mask excludes has a reward")


def _state(env: EnvBase, seed: int, actions: Sequence[Tensor], game: Sequence[TensorDictBase]) -> None:
    state = game[0] if game[1][schema.DONE].any() else game[1]
    _play(env, seed + 1, actions[:1])
    given = state.select(*_KEYS).clone()
    named = {key: given.get(key) for key in schema.ROW_KEYS} if isinstance(env, TransformedEnv) else {}
    try:
        came = env.reset(given, set_state=True, **named)
    except (KeyError, ValueError, NotImplementedError):
        return
    _same("state", [state.exclude(schema.REWARD)], [came], "passed to reset and returned by it")
    after = _step(env, came, actions[1])
    kept = ((after[schema.TOKENS] == state[schema.TOKENS]) | ~state[schema.ATTENTION_MASK]).all()
    _hold("state", kept, "a step after reset(observation, set_state=True) continued from other rows")
