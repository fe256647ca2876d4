"""What training needs from the other rooms: rollouts of the student, experts, recorded episodes, evaluations."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.model_agent import ModelAgent
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rollout import Job, PlayJobs, rollout
from turngym.agents.scripted import ExpertAgent, named_player
from turngym.envs.channels import make_channel
from turngym.envs.core import Task, ToolSpec, TurngymError
from turngym.envs.episode import Episode
from turngym.envs.panels import Panel, assert_disjoint
from turngym.envs.protocols import CollectRequest, Policy, Sampling
from turngym.scripts.wiring import renderer_of
from turngym.trainers.run.offline_rollouts import draw
from turngym.trainers.trainer import EvalPoint

MakeEnv = Callable[[], Any]


class Engine(Policy, Protocol):
    """A policy that follows a model in training."""

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""

    def weights_changed(self, version: int) -> None:
        """The model has new weights: what is generated from now on is theirs, as `version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A model as rollouts and evaluations see it: it has the trainer's weights, in this process or on servers."""

    engine: Engine
    renderer: ChatRenderer
    settings: ChatSettings
    tool: ToolSpec

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Any,
        settings: ChatSettings,
        tool: ToolSpec,
        *,
        batch: int = 64,
        engine: Engine | None = None,
    ) -> Player:
        """`settings` say how the model was trained to be spoken to; `batch` requests are generated at a time.

        Without `engine` the model itself plays, in this process.
        """
        if engine is None:
            engine = LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context, max_batch=batch)
        renderer = renderer_of(model, tokenizer, settings, tool)
        return cls(engine=engine, renderer=renderer, settings=settings, tool=tool)

    def agent(self, temperature: float, name: str = "student") -> ModelAgent:
        return ModelAgent(
            self.engine,
            self.renderer,
            make_channel(self.settings.channel, self.tool),
            Sampling(temperature=temperature, max_new_tokens=self.settings.max_new_tokens),
            max_context=self.engine.max_length,
            name=name,
        )


class OpenRoom:
    """An environment that stays open as long as somebody holds this.

    Rollouts open environments and close them again, step by step; what all environments of a process share (a shop, an
    index) is built once as long as one of them is open.
    """

    def __init__(self, make_env: MakeEnv) -> None:
        self.env = make_env()
        weakref.finalize(self, self.env.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCollect:
    """Implements `Collect`: the student plays tasks that (seed, step) fix. Evaluation tasks are refused."""

    player: Player
    make_env: MakeEnv
    task_ids: Sequence[str]
    seed: int = 0
    slots: int = 64
    held_out: Sequence[Task] = ()
    """Tasks that must not be trained on."""
    expert: str = "expert"
    """Who plays the first turns when a curriculum asks for demonstrations."""
    play: PlayJobs = rollout
    """Where episodes are played."""
    room: OpenRoom | None = None

    def __call__(self, request: CollectRequest) -> list[Episode]:
        jobs = request.own(step_jobs(self.task_ids, self.seed, request))
        if request.demonstration_turns is not None:
            jobs = self._demonstrated(jobs, request.demonstration_turns)
        if request.prefix_ratios:
            jobs = self._prefixed(jobs, request)
        agent = self.player.agent(request.temperature)
        episodes = self.play(
            jobs,
            self.make_env,
            agent,
            slots=self.slots,
            max_turns=request.max_turns,
            system=self.player.settings.system,
            meta={"temperature": request.temperature, "step": request.step},
        )
        assert_disjoint([episode.task for episode in episodes], self.held_out)
        return episodes

    def _prefixed(self, jobs: Sequence[Job], request: CollectRequest) -> list[Job]:
        """The first jobs of each group begin with their share of the expert's turns, at least one where it is not 0."""
        chosen = {
            place: ratio
            for place, job in enumerate(jobs)
            if (member := job.sample % request.group) < len(request.prefix_ratios[job.group])
            and (ratio := request.prefix_ratios[job.group][member]) > 0
        }
        shown = self.play([jobs[place] for place in chosen], self.make_env, self._demonstrator(), slots=self.slots)
        plans = dict(zip(chosen, shown, strict=True))
        return [
            replace(job, demonstration=_share(plans[place], chosen[place])) if place in chosen else job
            for place, job in enumerate(jobs)
        ]

    def _demonstrator(self) -> ExpertAgent:
        return ExpertAgent(expert=named_player(self.expert))

    def _demonstrated(self, jobs: Sequence[Job], turns: int) -> list[Job]:
        """The jobs with all but the expert's last `turns` actions played beforehand."""
        shown = self.play(jobs, self.make_env, self._demonstrator(), slots=self.slots)
        plans = [[turn.action or "" for turn in episode.turns] for episode in shown]
        return [
            replace(job, demonstration=tuple(plan[: max(0, len(plan) - turns)]))
            for job, plan in zip(jobs, plans, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCollect:
    """Implements `Collect`: an expert plays, with noise, and writes what it does as the student's tokens."""

    renderer: ChatRenderer
    settings: ChatSettings
    make_env: MakeEnv
    task_ids: Sequence[str]
    seed: int = 0
    slots: int = 64
    held_out: Sequence[Task] = ()
    expert: str = "expert"
    noise: tuple[float, float] = (0.0, 0.0)
    mistakes: float = 0.0
    play: PlayJobs = rollout
    room: OpenRoom | None = None

    def __call__(self, request: CollectRequest) -> list[Episode]:
        agent = ExpertAgent(self.renderer, expert=named_player(self.expert), noise=self.noise, mistakes=self.mistakes)
        jobs = request.own(step_jobs(self.task_ids, self.seed, request))
        episodes = self.play(
            jobs,
            self.make_env,
            agent,
            slots=self.slots,
            max_turns=request.max_turns,
            system=self.settings.system,
        )
        assert_disjoint([episode.task for episode in episodes], self.held_out)
        return episodes


def _share(episode: Episode, ratio: float) -> tuple[str, ...]:
    """The first `ratio` of the expert's actions, rounded down but never to none."""
    actions = [turn.action for turn in episode.turns if turn.action is not None]
    return tuple(actions[: max(1, int(len(actions) * ratio))])


def step_jobs(task_ids: Sequence[str], seed: int, request: CollectRequest) -> list[Job]:
    """The jobs of a step: tasks go by in epochs, each a permutation, and every step has random streams of its own.

    Samples are numbered through the step, so that two groups that happen to play one task differ in their streams.
    """
    if not len(task_ids):
        raise TurngymError("the training split has no tasks")
    places = draw(len(task_ids), seed=seed, step=request.step, batch=request.episodes // request.group)
    return [
        Job(
            task_id=task_ids[place],
            sample=number * request.group + member,
            group=number,
            seed=seed * 1_000_003 + request.step,
        )
        for number, place in enumerate(places)
        for member in range(request.group)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelEvaluation:
    """Avg@n on a panel, as the training loop asks for it; every episode is kept as a trace to read."""

    panel: Panel
    player: Player
    make_env: MakeEnv
    folder: Path
    samples: int = 4
    temperature: float = 0.85
    seed: int = 0
    slots: int = 64
    limit: int | None = None
    """Play only the first so many tasks."""
    play: PlayJobs = rollout

    @property
    def tasks(self) -> Panel | tuple[Task, ...]:
        return self.panel if self.limit is None else self.panel.tasks[: self.limit]

    def __call__(self, step: int) -> EvalPoint:
        self.folder.mkdir(parents=True, exist_ok=True)
        result = evaluate(
            self.tasks,
            self.make_env,
            self.player.agent(self.temperature),
            samples=self.samples,
            temperature=self.temperature,
            seed=self.seed,
            slots=self.slots,
            trace=self.folder / f"step_{step:06d}.jsonl",
            system=self.player.settings.system,
            play=self.play,
        )
        scores = result.scores
        extra = {f"pass@{k}": value for k, value in scores.overall.pass_at.items()}
        extra |= {"turns": scores.turns, "invalid_rate": scores.invalid_rate, "errors": float(scores.errors)}
        extra |= {f"category/{row.name}": row.avg.mean for row in scores.categories}
        average = scores.overall.avg
        return EvalPoint(avg=average.mean, low=average.low, high=average.high, extra=extra)


def weights_hash(folder: str | Path) -> str:
    """16 hex digits over the configuration and weight files of a model folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*")):
        if path.suffix in (".safetensors", ".bin") or path.name == "config.json":
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
