"""Rollout sources for training: who plays which tasks at a step, live or as an expert."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turngym.agents.demonstrations import USED, DemonstrationPlan, Demonstrations, LiveDemonstrator, noted
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import Job, MakeEnv, PlayJobs, rollout
from turngym.agents.playing.scripted import ExpertAgent, MixedAgent, PlayerMix, named_player
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.protocols import RolloutSource
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.task import Task
from turngym.core.trace import TraceWriter
from turngym.envs.panels import assert_disjoint, task_order


class SharedEnv:
    """An environment that stays open as long as somebody holds this.

    Rollouts open environments and close them again, step by step; what all environments of a process share (a shop, an
    index) is built once as long as one of them is open.
    """

    def __init__(self, make_env: MakeEnv) -> None:
        self.env = make_env()
        # unlike __del__ this also runs when the interpreter ends; it holds the environment, not self
        weakref.finalize(self, self.env.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSource:
    """Base of the sources that play. (seed, step) determines the tasks. Evaluation tasks are refused."""

    make_env: MakeEnv
    task_ids: Sequence[str]
    seed: int = 0
    slots: int = 64
    held_out: Sequence[Task] = ()
    """Tasks that must not be trained on."""
    expert: str = "expert"
    """Who demonstrates."""
    play: PlayJobs = rollout
    """Where episodes are played."""
    shared: SharedEnv | None = None

    def played(
        self, jobs: Sequence[Job], agent: Agent, request: RolloutRequest, system: str | None, **meta: Any
    ) -> list[Episode]:
        episodes = self.play(
            jobs, self.make_env, agent, slots=self.slots, max_turns=request.max_turns, system=system, meta=meta
        )
        assert_disjoint([episode.task for episode in episodes], self.held_out)
        return episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSource(PlayedSource):
    """Implements `RolloutSource`: the student plays."""

    player: ModelPlayer
    demonstrations: Demonstrations | None = None
    """What the first turns are, where a curriculum or a prefix asks for them; None: the expert's actions."""
    guided: Callable[[float], ModelPlayer] | None = None
    """Who plays where a teacher takes a share of the turns; None: requests ask for none."""

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        jobs = request.own(step_jobs(self.task_ids, self.seed, request))
        plan = request.plan
        plans: dict[int, DemonstrationPlan] = {}
        if plan.states:
            jobs = [replace(job, states=True) for job in jobs]
        if plan.demonstration_turns is not None:
            jobs, plans = self._demonstrated(jobs, plan.demonstration_turns)
        if plan.prefix_ratios:
            jobs, plans = self._prefixed(jobs, request.group, plan)
        player = self.player if self.guided is None else self.guided(plan.teacher_turns)
        agent, meta = player.agent(request.temperature), {"temperature": request.temperature, "step": request.step}
        episodes = self.played(jobs, agent, request, self.player.settings.system, **meta)
        return [
            noted(episode, plans[index].reason, exact=plans[index].exact) if index in plans else episode
            for index, episode in enumerate(episodes)
        ]

    def _prefixed(
        self, jobs: Sequence[Job], group: int, plan: PlayPlan
    ) -> tuple[list[Job], dict[int, DemonstrationPlan]]:
        """Returns the jobs, the first of each group with a part of a demonstration, and the plans by index."""
        chosen = {
            index: ratio
            for index, job in enumerate(jobs)
            # step_jobs numbers samples through the whole step
            if (member := job.sample % group) < len(plan.prefix_ratios[job.group])
            and (ratio := plan.prefix_ratios[job.group][member]) > 0
        }
        demonstrations = self._demonstrations()
        plans = dict(zip(chosen, demonstrations.plans([jobs[index] for index in chosen]), strict=True))
        begun = [
            demonstrations.begun(job, plans[index], chosen[index], plan.prefix_unit) if index in chosen else job
            for index, job in enumerate(jobs)
        ]
        return begun, plans

    def _demonstrated(self, jobs: Sequence[Job], turns: int) -> tuple[list[Job], dict[int, DemonstrationPlan]]:
        """The jobs with all but the last `turns` turns of a demonstration played beforehand, and their plans."""
        plans = self._demonstrations().plans(jobs)
        begun = [
            # max: a plan shorter than `turns` would be cut from its end by a negative stop
            replace(job, demonstration=plan.turns[: max(0, len(plan.turns) - turns)], sha256=plan.sha256)
            for job, plan in zip(jobs, plans, strict=True)
        ]
        return begun, dict(enumerate(plans))

    def _demonstrations(self) -> Demonstrations:
        if self.demonstrations is not None:
            return self.demonstrations
        agent = ExpertAgent(expert=named_player(self.expert))
        return Demonstrations(
            source=LiveDemonstrator(agent=agent, make_env=self.make_env, slots=self.slots, play=self.play)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSource(PlayedSource):
    """Implements `RolloutSource`: an expert plays, with noise, and writes what it does as the student's tokens."""

    renderer: ChatRenderer
    settings: ChatSettings
    noise: tuple[float, float] = (0.0, 0.0)
    mistakes: float = 0.0
    max_context: int | None = None
    """Most ids of a segment: the student's."""
    players: PlayerMix | None = None
    """Who else plays; None: the noisy expert alone."""

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        plays: Any = {"expert": named_player(self.expert), "noise": self.noise, "mistakes": self.mistakes}
        plays["max_context"] = self.max_context
        mix, renderer = self.players, self.renderer
        agent = ExpertAgent(renderer, **plays) if mix is None else MixedAgent(mix, renderer, **plays)
        jobs = request.own(step_jobs(self.task_ids, self.seed, request))
        return self.played(jobs, agent, request, self.settings.system)


def step_jobs(task_ids: Sequence[str], seed: int, request: RolloutRequest) -> list[Job]:
    """The jobs of a step: tasks go by in epochs, each a permutation, and every step has random streams of its own.

    Samples are numbered through the step, so that two groups that happen to play one task differ in their streams. A
    later round of a step has tasks, numbers and streams of its own.
    """
    if not len(task_ids):
        raise TurngymError("the training split has no tasks")
    caps = [cap if cap < request.max_turns else None for cap in request.depth_caps()]
    leave_loops = request.loops_left()
    later, groups = request.plan.round, request.episodes // request.group
    # no two (seed, step, round) meet as long as a run has fewer than a million steps and seeds
    step = request.step + later * 10**12
    places = task_order(len(task_ids), seed=seed, step=step, batch=groups)
    return [
        Job(
            task_id=task_ids[index],
            sample=later * request.episodes + number * request.group + member,
            group=later * groups + number,
            seed=seed * 1_000_003 + step,
            max_turns=caps[number * request.group + member],
            leave_loops=leave_loops[number * request.group + member],
        )
        for number, index in enumerate(places)
        for member in range(request.group)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSource:
    """The episodes of `source`; keeps the episodes of the `last` steps as traces in `folder`."""

    source: RolloutSource
    folder: Path
    last: int

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        episodes = self.source(request)
        write_step(self.folder, request, episodes)
        for path in sorted(self.folder.glob("step_*.jsonl")):
            if int(path.stem.split("_")[1]) <= request.step - self.last:
                path.unlink()
        return episodes


def write_step(folder: Path, request: RolloutRequest, episodes: Sequence[Episode]) -> None:
    """Writes a step's episodes to `folder/step_K.jsonl`; each of several processes to `step_K_process_I.jsonl`."""
    process, processes = request.share
    share = f"_process_{process}" if processes > 1 else ""
    path = folder / f"step_{request.step:06d}{share}.jsonl"
    if not request.plan.round:
        path.unlink(missing_ok=True)  # a resumed run collects its step again
    with TraceWriter(path) as writer:
        for episode in episodes:
            writer.write(episode)


# A rollout source for imitation: somebody demonstrates the tasks of a step, and the student learns what was said.


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSource:
    """A rollout source: demonstrations of a step's tasks as the student's ids, with origin `demonstration`.

    Episodes that a filter leaves out still count in the step's metrics, but none of their turns is trained on. Raises
    TurngymError if a step has no demonstration at all.
    """

    demonstrations: Demonstrations
    task_ids: Sequence[str]
    seed: int = 0
    held_out: Sequence[Task] = ()
    shared: SharedEnv | None = None

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        jobs = request.own(step_jobs(self.task_ids, self.seed, request))
        demonstrated = self.demonstrations.episodes(jobs)
        episodes = [
            self._written(job, episode, reason)
            for job, (episode, reason) in zip(jobs, demonstrated, strict=True)
            if episode is not None
        ]
        assert_disjoint([episode.task for episode in episodes], self.held_out)
        if not any(episode.meta["demonstration"] == USED for episode in episodes):
            raise TurngymError(
                f"step {request.step}: none of its {len(jobs)} tasks has a demonstration that counts; filter less "
                "(--demonstration-success, --demonstration-reward), or name who knows more of the tasks"
            )
        return episodes

    def _written(self, job: Job, episode: Episode, reason: str) -> Episode:
        named = replace(episode, seed=job.seed, sample=job.sample, group=job.group)
        if reason != USED or self.demonstrations.writer is None:
            turns = tuple(replace(turn, excluded=f"demonstration: {reason}") for turn in named.turns)
            return noted(replace(named, turns=turns), reason)
        plan = [self.demonstrations.writer.shown(episode, turn).exact for turn in episode.turns]
        written = self.demonstrations.writer.rewrite(named)
        # noise stays noise
        turns = tuple(
            turn if turn.origin == "noise" else replace(turn, origin="demonstration") for turn in written.turns
        )
        return noted(replace(written, turns=turns), reason, exact=all(plan))
