"""The judge that a name stands for, and judged episodes kept to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode
from turngym.envs.protocols import CollectRequest, Judge, Sampling
from turngym.envs.suggest import did_you_mean
from turngym.envs.trace import TraceWriter

KINDS = ("auto", "rules", "expert", "model:FOLDER", "http://... or https://...")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Who judges the turns of prm-rl and opd-hints."""

    judge: str = "auto"
    """`rules` (verdicts and rewards of the environment), `expert` (plays each episode again and asks --expert, which by
    default sees the hidden state), `model:FOLDER`, or the url of an OpenAI-compatible endpoint with its version
    (http://127.0.0.1:8000/v1; the key comes from TURNGYM_JUDGE_KEY). auto: rules for prm-rl, expert for opd-hints."""
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
    judge_every: int = 10
    """Steps between those whose judged episodes are kept as traces in OUT/judged; 0 keeps none."""


def make_judge(
    options: JudgeOptions,
    kind: Literal["score", "hint"],
    *,
    make_env: Callable[[], Any],
    expert: str = "expert",
    seed: int = 0,
    device: str = "auto",
) -> Judge:
    """The judge that `options.judge` names. Raises TurngymError where there is none of that name."""
    name, _, argument = options.judge.partition(":")
    if name == "auto":
        name = "rules" if kind == "score" else "expert"
    if name == "rules":
        from turngym.agents.judges.rules import RuleJudge

        return RuleJudge()
    if name == "expert":
        from turngym.agents.judges.expert import ExpertJudge
        from turngym.agents.scripted import named_player

        if options.judge_repeats is not None and options.judge_repeats < 1:
            raise TurngymError(f"--judge-repeats is {options.judge_repeats}; a hint is given at least once")
        strict, repeats = options.judge_strict, options.judge_repeats
        return ExpertJudge(make_env=make_env, expert=named_player(expert), strict=strict, repeats=repeats)
    if name in ("http", "https"):
        from turngym.agents.judges.http import HttpJudge

        return HttpJudge(
            url=options.judge,
            model=options.judge_model,
            votes=options.judge_votes,
            temperature=options.judge_temperature,
            max_tokens=options.judge_max_tokens,
            seed=seed,
        )
    if name == "model" and argument:
        return _model_judge(options, argument, seed, device)
    hint = did_you_mean(name, ["rules", "expert", "model"])
    raise TurngymError(f"unknown judge {options.judge!r}; judges are: {', '.join(KINDS)}.{hint}")


def _model_judge(options: JudgeOptions, folder: str, seed: int, device: str) -> Judge:
    from turngym.agents.judges.local import PolicyJudge
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.agents.models import load_policy
    from turngym.agents.rendering.chat_settings import ChatSettings
    from turngym.agents.rendering.chat_template import ChatTemplate

    settings = ChatSettings.load(folder)
    model, tokenizer = load_policy(folder, device, "float32")
    return PolicyJudge(
        policy=LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context),
        template=ChatTemplate(tokenizer, thinking=settings.thinking),
        votes=options.judge_votes,
        sampling=Sampling(temperature=options.judge_temperature, max_new_tokens=options.judge_max_tokens),
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class JudgedTraces:
    """Keeps the judged episodes of every so many steps in `folder/step_K.jsonl`, to read; of several processes each
    keeps its share, in `step_K_process_I.jsonl`."""

    folder: Path
    every: int = 10

    def __call__(self, request: CollectRequest, episodes: Sequence[Episode]) -> None:
        if not self.every or (request.step - 1) % self.every:
            return
        process, processes = request.share
        share = f"_process_{process}" if processes > 1 else ""
        path = self.folder / f"step_{request.step:06d}{share}.jsonl"
        path.unlink(missing_ok=True)  # a resumed run collects its step again
        with TraceWriter(path) as writer:
            for episode in episodes:
                writer.write(episode)
