"""One student in several environments: whose episodes a step has, which teacher scores them, how each is evaluated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from turngym.agents.models import hub_folder
from turngym.agents.play_spec import Game
from turngym.agents.resolve_play import full_panel_name
from turngym.agents.servers.server_options import Here
from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.nested import at, put
from turngym.core.protocols import DivisibleEvaluation, EvalPoint, RolloutSource, Scorer
from turngym.core.resolve import Layer, resolve
from turngym.core.rollout_request import RolloutRequest
from turngym.core.spec import to_table
from turngym.core.user_files import json_of, user_path
from turngym.trainers.algorithm import Algorithm, Scorers, TargetFn, Targets
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.scorer import Ids, SplitScorer
from turngym.trainers.targets import given
from turngym.trainers.train_config import TrainConfig
from turngym.trainers.training_layers import training_layers

T = TypeVar("T")
ENVIRONMENT = "environment"
"""Key in `meta` of an episode of a further environment: its name in the run."""
ARGUMENT = "env."
"""Prefix of an argument for gym.make in `--also` (`env.topk=1`)."""
_SETTINGS = ("share", "split", "panel", "data", "teacher")
_PARTS = re.compile(rf",(?=(?:{'|'.join(_SETTINGS)}|{re.escape(ARGUMENT)}[^,=]*)=)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherEnv:
    """An environment that a run plays beside its `--env`."""

    env: str
    share: float = 1.0
    """Share of a step's tasks, relative to that of `--env`, which is 1, and the other environments."""
    split: str = "train"
    panel: str | None = None
    data: str | None = None
    teacher: Path | None = None
    """Who scores its episodes; None: the run's teacher."""
    make: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for gym.make; those of `--env` are not meant for it."""

    @property
    def name(self) -> str:
        """`WebShop-v0` of `package:turngym/WebShop-v0`: its folder in the run, and its metrics."""
        return self.env.rpartition("/")[2]

    def played(self, config: TrainConfig) -> TrainConfig:
        """The settings of a run for this environment: its own preset, with the run's explicit settings on top."""
        # what is not as the run's own environment and preset have it was asked for
        panel = None if config.evaluation is None else config.evaluation.panel
        usual, run_table = to_table(_in_env(config, {"env": {"id": config.play.env.id}}, panel)), to_table(config)
        asked_values = {
            f"{table}.{name}": value
            for table in ("chat", "evaluation")
            for name, value in (run_table[table] or {}).items()
            if value != at(usual, f"{table}.{name}") and name not in ("panel", "game")
        }
        env_table = {"env": {"id": self.env, "split": self.split}, "env_kwargs": dict(self.make), "data": self.data}
        return _in_env(config, env_table, self.panel if panel else None, asked_values)


def _in_env(
    config: TrainConfig, env: dict[str, Any], panel: str | None, asked_values: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The settings of a run in another environment: those of `env`, evaluated on `panel`, with `asked_values`
    (by path) on top."""
    table = to_table(config)
    table["play"] = {name: value for name, value in table["play"].items() if name not in Game.__struct_fields__} | env
    table["play"]["also"] = ()
    table["chat"], table["evaluation"] = {}, None if panel is None else {"panel": full_panel_name(panel)}
    for path, value in (asked_values or {}).items():
        if panel is not None or not path.startswith("evaluation."):
            put(table, path, value)
    # every episode of a run has as many turns
    below = training_layers(table, config.play.env.max_turns)
    return resolve(type(config), [*below, Layer(name=f"--also {env['env']['id']}", table=table)]).spec


def further_env(text: str) -> FurtherEnv:
    """Reads `ENV,share=2,split=train,panel=NAME,data=FOLDER,teacher=FOLDER,env.topk=1`.

    `env.NAME=VALUE` is an argument for gym.make: a value of JSON, or else text. Raises SettingsError for anything else.
    """
    env, *parts = _PARTS.split(text)
    # a comma and what is no setting: of a path it is a part, of an environment's id it is not
    env, comma, behind = env.partition(",")
    pairs = [part.partition("=")[::2] for part in ([behind] if comma else []) + parts]
    given: dict[str, str] = dict(pairs)
    if len(given) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise SettingsError(f"--also {text!r}: {name} is given {count} times; valid: once")
    values: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith(ARGUMENT)}
    make = {name.removeprefix(ARGUMENT): json_or_text(given[name]) for name in given if name not in values}
    wrong = sorted(
        name for name, value in given.items() if not value or name == ARGUMENT or name in {*values} - {*_SETTINGS}
    )
    if not env or wrong:
        why = f"{wrong[0]!r} is no setting with a value" if wrong else "no environment"
        valid = f"{', '.join(_SETTINGS)} or {ARGUMENT}ARGUMENT"
        raise SettingsError(f"--also {text!r}: {why}; valid: ENV, then any of {valid} as NAME=VALUE")
    try:
        share = float(values.pop("share", 1.0))
    except ValueError:
        share = 0.0
    if not 0.0 < share < float("inf"):
        raise SettingsError(f"--also {text!r}: share must be a number above 0")
    teacher = values.pop("teacher", None)
    return FurtherEnv(
        env=env, share=share, teacher=None if teacher is None else user_path(teacher), make=make, **values
    )


def with_teacher_folder(text: str) -> str:
    """`text` of `--also` with the folder of its teacher where that is named as on the hub (`ORG/NAME[@REVISION]`)."""
    if further_env(text).teacher is None:
        return text
    parts = (part.partition("=") for part in _PARTS.split(text))
    return ",".join(
        f"teacher={hub_folder(value)}" if name == "teacher" else name + equals + value for name, equals, value in parts
    )


def json_or_text(text: str) -> Any:
    """The value of `text` as JSON, or `text` itself if it is not JSON."""
    try:
        return json_of(text)
    except ValueError:
        return text


def further_envs(config: TrainConfig, algorithm: Algorithm) -> list[FurtherEnv]:
    """The environments of `--also`; SettingsError where they cannot be played in one run."""
    play = config.play
    envs = [further_env(text) for text in play.also]
    if not envs:
        return envs
    names = [play.env.id.rpartition("/")[2], *(item.name for item in envs)]
    if len(set(names)) < len(names):
        raise SettingsError(f"--env and --also name {', '.join(names)}; each environment may stand there once")
    if config.evaluation is None and any(item.panel for item in envs):
        raise SettingsError("--also has a panel and the run has none: name that of --env, too, with --panel")
    refused = {
        "--staleness": config.stale is not None,
        "a policy server": not isinstance(config.engine, Here),
        "a judge": algorithm.judge is not None,
        "demonstrations or an expert": not play.traces
        and (algorithm.prefix is not None or algorithm.imitates is not None),
        "a teacher that plays": bool(algorithm.teacher_mix) or algorithm.guide is not None,
    }
    if wrong := [setting for setting, unusable in refused.items() if unusable]:
        raise SettingsError(f"--also: {algorithm.name} with {wrong[0]} plays a single environment")
    shares = shares_of(envs)
    if not play.traces:
        shared_groups(shares, config.run.episodes // algorithm.group)
    elif set(shares) != {1.0}:
        raise SettingsError(f"share= is given, {shares}, with --traces: a step's tasks are as recorded; leave it out")
    return envs


def shares_of(further: Sequence[FurtherEnv]) -> list[float]:
    """The shares of a step's tasks: that of --env, then those of --also."""
    return [1.0, *(item.share for item in further)]


def shared_groups(shares: Sequence[float], groups: int) -> list[int]:
    """How many of a step's groups each environment plays: whole numbers as near to `shares` as they can be.

    Raises SettingsError where one of them would play none.
    """
    ends = np.rint(np.cumsum(shares) / np.sum(shares) * groups).astype(int)
    counts: list[int] = np.diff(ends, prepend=0).tolist()
    if min(counts) < 1:
        raise SettingsError(
            f"{groups} tasks a step in shares of {list(shares)} leave an environment without one; raise --episodes"
        )
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralSources:
    """Implements `RolloutSource`: every step has episodes of each environment, in fixed shares.

    Of those that the step's plan has stop early (partial probes, loops), each environment has its share, too.
    """

    sources: Mapping[str, RolloutSource]
    """Sources by the environment's name; the run's own has the name ""."""
    shares: Sequence[float]

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        total, first, played = request.episodes // request.group, 0, []
        plan = request.plan
        for (name, source), groups in zip(self.sources.items(), shared_groups(self.shares, total), strict=True):
            short, left = (round(count * groups / total) for count in (plan.short_episodes, plan.leave_loops))
            part = replace(plan, short_episodes=short, leave_loops=left)
            for episode in source(replace(request, episodes=groups * request.group, plan=part)):
                # rounds of a step number their groups on: two environments must not meet in one
                round_number, number = divmod(episode.group, groups)
                meta = {**episode.meta, ENVIRONMENT: name} if name else episode.meta
                played.append(replace(episode, group=round_number * total + first + number, meta=meta))
            first += groups
        return played


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTeachers:
    """Another target function's targets, each row scored by the teacher of its environment."""

    target_fn: TargetFn
    teachers: Mapping[str, Scorer]
    """Teachers by the environment's name, where it has one of its own; the run's scores all others."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        teacher = given(scorers.teacher, "teacher")
        row_E = np.zeros(batch.rows, np.int64)
        row_E[batch.row_N] = batch.episode_N
        names = [episodes[batch.source_E[episode]].meta.get(ENVIRONMENT, "") for episode in row_E]
        by_row = [self.teachers.get(name, teacher) for name in names]
        return self.target_fn(batch, episodes, replace(scorers, teacher=_ByRow(by_row)))


@dataclass(frozen=True, slots=True)
class _ByRow(SplitScorer):
    """The n-th row is scored by the n-th of `scorers`; each of them is asked once, about all of its rows."""

    scorers: Sequence[Scorer]

    def split(self, ids: Ids, ask: Callable[[Scorer, Sequence[int]], Sequence[T]]) -> list[T]:
        answers: dict[int, T] = {}
        for scorer in {id(scorer): scorer for scorer in self.scorers}.values():
            rows = [row for row, own in enumerate(self.scorers) if own is scorer]
            answers.update(zip(rows, ask(scorer, rows), strict=True))
        return [answers[row] for row in range(len(ids))]


@dataclass(frozen=True, slots=True, kw_only=True)
class EachPanel:
    """Implements `DivisibleEvaluation`: every environment on its own panel.

    `eval/avg` is the first environment's, `eval/NAME/avg` that of a further one.
    """

    first: DivisibleEvaluation
    others: Mapping[str, DivisibleEvaluation]

    def __call__(self, step: int) -> EvalPoint:
        return self._joined(self.first(step), {name: evaluation(step) for name, evaluation in self.others.items()})

    def gather(self, step: int) -> None:
        for evaluation in (self.first, *self.others.values()):
            evaluation.gather(step)

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        for evaluation in (self.first, *self.others.values()):
            evaluation.play_share(step, share)

    def finish(self, step: int) -> EvalPoint:
        return self._joined(
            self.first.finish(step), {name: evaluation.finish(step) for name, evaluation in self.others.items()}
        )

    def _joined(self, point: EvalPoint, others: Mapping[str, EvalPoint]) -> EvalPoint:
        extra = dict(point.extra)
        for name, other_point in others.items():
            numbers = {"avg": other_point.avg, "low": other_point.low, "high": other_point.high, **other_point.extra}
            extra |= {f"{name}/{key}": value for key, value in numbers.items()}
        return replace(point, extra=extra)
