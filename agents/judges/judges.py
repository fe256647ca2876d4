"""What a judge is and how `--judge` names one; each judges with hindsight of what came next.

A judge (`core.protocols.Judge`) writes votes about turns: a score (was the response good?) or a hint (what should
the policy have been told beforehand?). `make_judge` opens the one that `--judge` names: a model (`model_judges`), one
that knows the environment (`env_judges`), one that looks for words, or one of another package.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from turngym.agents.judges.judge_settings import AnyJudge, ModelJudge, OwnJudge, UrlJudge
from turngym.agents.judges.model_judges import KEY, HttpJudge, PolicyJudge
from turngym.agents.models import find_model, load_policy
from turngym.agents.playing.timed_calls import TimedCalls
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.chat_template import ChatTemplate
from turngym.agents.rendering.skills import SKILLS_PREFIX
from turngym.agents.rendering.text_encoder import TextEncoder
from turngym.core.clean_keys import key_of
from turngym.core.errors import AgentError
from turngym.core.plugins import find
from turngym.core.protocols import Judge, JudgeRequest, Judgment, Question, Sampling, joined, judgments
from turngym.core.redaction import first_letters


def hint_vote(hint: str | None) -> str:
    """A vote that gives `hint`, or says that there is none."""
    return "\\boxed{-1}" if hint is None else f"[HINT_START]{hint}[HINT_END] \\boxed{{1}}"


def expert_hint(action: str) -> str:
    return f"The best action here is: {action}"


def is_plain(hint: str, encoder: TextEncoder) -> bool:
    """Whether `hint` has no control characters and spells no control token of the tokenizer."""
    if any(unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t" for char in hint):
        return False
    return encoder.spells_control(hint) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class BothQuestions:
    """A `Judge` for requests of kind `both`: its vote v is the score's and the hint's vote v, `joined`.

    A vote fails if both answers do.
    """

    one: Judge
    """Asked for a score and for a hint, once with all requests."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        scores = [replace(request, kind="score") for request in requests]
        hints = [replace(request, kind="hint") for request in requests]
        judged = self.one.judge([*scores, *hints])
        return [
            Judgment(
                votes=tuple(joined(*pair) for pair in zip_longest(score.votes, hint.votes)),
                error=score.error or hint.error,
                cut=score.cut + hint.cut,
            )
            for score, hint in zip(judged[: len(scores)], judged[len(scores) :], strict=True)
        ]


BAD = re.compile(
    r"\berrors?\b|\bexception\b|\btraceback\b|\bfailed\b|\bfailure\b|\bnot found\b|\binvalid\b|\bdenied\b|"
    r"\bnothing happens\b|\bnot possible\b|\bcannot\b|\bcan't\b|\bno such\b|\bunknown\b|"
    r"\bredo\b|\bwrong\b|\bincorrect\b|\brephrase\b|\btry again\b|\bonce more\b|\bcorrect (?:this|that|it)\b|"
    r"\bnot what i\b|\bthat'?s not\b|\bfix (?:this|that|it)\b",
    re.IGNORECASE,
)
"""Words of failure, and of a user who is not content."""
GOOD = re.compile(
    # a bare `correct` is not praise, since `correct this` asks for more
    r"\bthanks?\b|\bthank you\b|\bperfect\b|\bgreat\b|\bwell done\b|\bcorrect[.!]|\byou won\b|"
    r"\bsuccess(?:ful(?:ly)?)?\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordJudge:
    r"""A `Judge` that looks for words of failure, displeasure or thanks in what came next. One vote per request.

    The score is -1 if the next message has words of failure or displeasure, else 1 if it has words of success or
    thanks, or if a tool answered, else 0. The hint repeats the first line with a failure, else it is
    `\boxed{-1}`. It needs no model and suits tests and first steps; a judge model sees more.
    """

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [Judgment(votes=(self._vote(request),)) for request in requests]

    def _vote(self, request: JudgeRequest) -> str:
        state = request.next_state
        failure = BAD.search(state)
        if request.kind == "hint":
            if failure is None:
                return "Nothing went wrong. \\boxed{-1}"
            line = next(line for line in state.splitlines() if BAD.search(line))
            return hint_vote(f"What you are about to do leads to this: {first_letters(line.strip(), 200)}")
        if failure is not None:
            return f"It says {failure.group()!r}. \\boxed{{-1}}"
        pleased = GOOD.search(state)
        if pleased is not None:
            return f"It says {pleased.group()!r}. \\boxed{{1}}"
        good = request.next_role == "tool" and bool(state.strip())
        return f"Nothing went wrong. \\boxed{{{int(good)}}}"


# The judge that a name stands for.

JUDGE_KINDS = ("model:FOLDER", "http://... or https://...")
SKILLS = f"{SKILLS_PREFIX}FOLDER"
"""The built-in judge that a folder of skills stands for."""
HINTS_ONLY = ("attempts", "episode", "nothing", SKILLS)
"""Judges that say what a turn should have been told, and never how good it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeContext:
    """What a judge may be made of."""

    kind: Question
    """What it will be asked: was a turn good (`score`), what should the policy have been told beforehand (`hint`), or
    both, in requests of their own."""
    options: AnyJudge
    make_env: Callable[[], Any]
    """Opens the environment that is played, to look or to play again; not all who judge need it."""
    expert: str = "expert"
    seed: int = 0
    device: str = "auto"


MakeJudge = Callable[[JudgeContext], Judge]
"""A judge; from another package as `--judge package.module:name`, or a name in its entry points `turngym.judges`."""
WORDS: Mapping[str, MakeJudge] = {"words": lambda _: WordJudge()}
"""The judges of `make_judge` where people and tools answer, who know no rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedJudge:
    """A `Judge` of another package; if it raises, or takes more than `timeout` seconds a request, its votes fail."""

    inner: Judge
    timeout: float

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        calls = TimedCalls(self.timeout * max(len(requests), 1), f"the judge, asked {len(requests)} times,")
        outcome = calls.call(lambda: judgments(self.inner.judge(requests), len(requests), AgentError))
        calls.close()
        if outcome.failure:
            return [Judgment(votes=(None,), error=f"{request.name}: {outcome.failure}") for request in requests]
        return outcome.value  # type: ignore[no-any-return]


def make_judge(
    options: AnyJudge,
    kind: Question,
    built_in: Mapping[str, MakeJudge],
    *,
    make_env: Callable[[], Any],
    expert: str = "expert",
    seed: int = 0,
    device: str = "auto",
) -> Judge:
    """The judge that `options` name; for `both` one that asks it twice about each turn.

    Raises TurngymError where there is none of that name.

    Args:
        built_in: judges that need no model: `WORDS`, or `env_judges.ENV_JUDGES`.
    """
    context = JudgeContext(kind=kind, options=options, make_env=make_env, expert=expert, seed=seed, device=device)
    named = SKILLS if options.name.startswith(SKILLS_PREFIX) else options.name
    if named == SKILLS and SKILLS not in built_in:
        raise AgentError(f"--judge {options.name}: skills are told by the tasks of an environment, and none is played")
    if kind != "hint" and named in HINTS_ONLY and named in built_in:
        scoring = ", ".join(sorted(built_in.keys() - set(HINTS_ONLY)))
        raise AgentError(f"--judge {options.name} gives hints, and this algorithm asks for scores; valid: {scoring}")
    judge: Judge
    if isinstance(options, UrlJudge):
        # before anything is played: each vote would fail for it
        key_of(KEY, AgentError)
        judge = HttpJudge(options=options, seed=seed)
    elif isinstance(options, ModelJudge):
        judge = _model_judge(context, options)
    else:
        make: MakeJudge = find("turngym.judges", named, built_in, known=JUDGE_KINDS)
        judge = make(context)
        if isinstance(options, OwnJudge):
            judge = TimedJudge(inner=judge, timeout=options.judge_timeout)
    return BothQuestions(one=judge) if kind == "both" else judge


def _model_judge(context: JudgeContext, options: ModelJudge) -> Judge:
    # imported here, since only this judge needs torch
    from turngym.agents.local_engine.engine import LocalEngine

    path = find_model(options.folder)
    settings = ChatSettings.load(path)
    model, tokenizer = load_policy(path, context.device, "float32")
    return PolicyJudge(
        policy=LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context),
        template=ChatTemplate(tokenizer, thinking=settings.thinking),
        votes=options.judge_votes,
        sampling=Sampling(temperature=options.judge_temperature, max_new_tokens=options.judge_max_tokens),
        seed=context.seed,
    )
