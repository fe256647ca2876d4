"""The judge that a name stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turngym.agents.judges.both import BothQuestions
from turngym.agents.judges.expert import ExpertJudge
from turngym.agents.judges.http import HttpJudge
from turngym.agents.judges.local import PolicyJudge
from turngym.agents.judges.rules import RuleJudge
from turngym.agents.models import load_policy
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.chat_template import ChatTemplate
from turngym.agents.scripted import named_player
from turngym.envs.common.plugins import find
from turngym.envs.common.settings import SettingsError
from turngym.envs.core import TurngymError
from turngym.envs.protocols import Judge, Question, Sampling

KINDS = ("auto", "model:FOLDER", "http://... or https://...")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Who judges the turns of prm-rl, opd-hints, prm-opd and sage-opd."""

    judge: str = "auto"
    """`rules` (verdicts and rewards of the environment), `expert` (plays each episode again and asks --expert, which by
    default sees the hidden state), `model:FOLDER`, the url of an OpenAI-compatible endpoint with its version
    (http://127.0.0.1:8000/v1; the key comes from TURNGYM_JUDGE_KEY), or a judge of yours as `package.module:name`.
    auto: rules for prm-rl and sage-opd, expert for opd-hints and prm-opd."""
    judge_strict: bool = False
    """expert: a possible action that is not the expert's own scores -1, not 0."""
    judge_repeats: int | None = None
    """expert: the same hint at most so many times in a row; by default as often as it applies."""
    judge_votes: int = 3
    """Votes per turn of a model; rules and experts have one."""
    judge_temperature: float = 0.6
    """Sampling temperature of a judge model."""
    judge_max_tokens: int = 1024
    """Most tokens of one vote."""
    judge_model: str = "default"
    """Name of the model behind a url."""
    judge_parallel: int = 16
    """Votes that a judge behind a url is asked for at a time."""
    judge_timeout: float = 120.0
    """Seconds for one attempt at a vote."""
    judge_tries: int = 3
    """Attempts at a vote in a row; the proxy goes on asking later, other runs count a vote that failed so often."""
    judge_unread: float = 0.9
    """Stop when more than this share of the votes holds no valid box in three steps in a row; 1 never stops."""
    judge_every: int = 10
    """Steps between those whose judged episodes are kept as traces in OUT/judged; 0 keeps none."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.judge_unread <= 1.0:
            raise SettingsError(f"judge_unread is {self.judge_unread}; valid: a share, 0 to 1")
        if self.judge_parallel < 1 or self.judge_tries < 1 or not self.judge_timeout > 0:
            raise SettingsError(
                f"judge_parallel is {self.judge_parallel}, judge_tries {self.judge_tries} and judge_timeout "
                f"{self.judge_timeout}; valid: at least 1, at least 1, and more than 0 seconds"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeContext:
    """What a judge may be made of."""

    kind: Question
    """What it will be asked: was a turn good (`score`), what should the policy have been told beforehand (`hint`), or
    both, in requests of their own."""
    options: JudgeOptions
    make_env: Callable[[], Any]
    """Opens the environment that is played, to look or to play again; not all who judge need it."""
    expert: str = "expert"
    seed: int = 0
    device: str = "auto"


MakeJudge = Callable[[JudgeContext], Judge]
"""A judge; from another package as `--judge package.module:name`, or a name in its entry points `turngym.judges`."""


def make_judge(
    options: JudgeOptions,
    kind: Question,
    *,
    make_env: Callable[[], Any],
    expert: str = "expert",
    seed: int = 0,
    device: str = "auto",
) -> Judge:
    """The judge that `options.judge` names; for `both` one that asks it twice about each turn.

    Raises TurngymError where there is none of that name.
    """
    context = JudgeContext(kind=kind, options=options, make_env=make_env, expert=expert, seed=seed, device=device)
    judge = _named_judge(context)
    return BothQuestions(score=judge, hint=judge) if kind == "both" else judge


def _named_judge(context: JudgeContext) -> Judge:
    options = context.options
    name, _, argument = options.judge.partition(":")
    if name in ("http", "https"):
        return _http_judge(context)
    if name == "model" and argument:
        return _model_judge(context, argument)
    name = options.judge
    if name == "auto":
        name = "rules" if context.kind == "score" else "expert"
    built_in = {"rules": _rule_judge, "expert": _expert_judge}
    make: MakeJudge = find("turngym.judges", name, built_in, known=KINDS)
    return make(context)


def _rule_judge(context: JudgeContext) -> Judge:
    return RuleJudge()


def _expert_judge(context: JudgeContext) -> Judge:
    strict, repeats = context.options.judge_strict, context.options.judge_repeats
    if repeats is not None and repeats < 1:
        raise TurngymError(f"--judge-repeats is {repeats}; a hint is given at least once")
    expert = named_player(context.expert)
    return ExpertJudge(make_env=context.make_env, expert=expert, strict=strict, repeats=repeats)


def _http_judge(context: JudgeContext) -> Judge:
    options = context.options
    return HttpJudge(
        url=options.judge,
        model=options.judge_model,
        votes=options.judge_votes,
        temperature=options.judge_temperature,
        max_tokens=options.judge_max_tokens,
        timeout=options.judge_timeout,
        tries=options.judge_tries,
        parallel=options.judge_parallel,
        seed=context.seed,
    )


def _model_judge(context: JudgeContext, folder: str) -> Judge:
    from turngym.agents.local_engine.engine import LocalEngine  # torch, which only this judge needs

    options, settings = context.options, ChatSettings.load(folder)
    model, tokenizer = load_policy(folder, context.device, "float32")
    return PolicyJudge(
        policy=LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context),
        template=ChatTemplate(tokenizer, thinking=settings.thinking),
        votes=options.judge_votes,
        sampling=Sampling(temperature=options.judge_temperature, max_new_tokens=options.judge_max_tokens),
        seed=context.seed,
    )
