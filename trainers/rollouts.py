"""Judged episodes kept as traces, to read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turngym.agents.collect import SharedEnv, write_step
from turngym.agents.demonstrations import Demonstrations
from turngym.agents.evaluation.evaluate import TOLD, PanelEvaluation, check_panel, eval_note
from turngym.agents.executor.options import Playing
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.workers import CancellableRollout, open_workers
from turngym.agents.judges.hints import HintPrompts
from turngym.agents.judges.judges import make_judge
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.playing.environments import env_maker
from turngym.agents.playing.rollout import MakeEnv, PlayJobs
from turngym.agents.presets import Preset, find_preset
from turngym.agents.rendering.chat_settings import FILE, ChatSettings, describe, resolved
from turngym.agents.sglang.open_servers import teacher_scorer, train_policy
from turngym.agents.sglang.policy import SglangScorer
from turngym.agents.sglang.weights import SyncedPolicy
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.protocols import Collect, CollectRequest, Judge, Scorer
from turngym.envs.core.settings import json_object
from turngym.envs.core.task import Task
from turngym.envs.core.trace import read_episodes
from turngym.envs.panels import Panel, assert_disjoint, load_panel
from turngym.trainers.collecting import Collecting, DemonstrationStage, open_demonstrations, text_writer
from turngym.trainers.train_config import PlayConfig, PlayedModel, RolloutConfig, RolloutProvider, StudentRun


def eval_make(panel: Panel, preset: str | None, given: Mapping[str, Any], run: StudentRun) -> dict[str, Any]:
    """Arguments of `gym.make` for evaluations of `run` on `panel`; `given` are those for training.

    The limit of turns is --max-turns where that was given, else the preset's, the panel's, the run's.
    """
    found = find_preset(preset, panel.env_id)
    told = {name: value for name, value in given.items() if name in TOLD}
    if found is None:
        kwargs = {"max_turns": run.max_turns, **told, **panel.make_kwargs}
    else:
        kwargs = {**panel.make_kwargs, **found.make(told)}
    if run.explicit_turns:
        kwargs["max_turns"] = run.max_turns
    return kwargs


@dataclass(frozen=True, slots=True)
class JudgedTraces:
    """Keeps the judged episodes of every so many steps in `folder`, to read."""

    folder: Path
    every: int = 10

    def __call__(self, request: CollectRequest, episodes: Sequence[Episode]) -> None:
        if self.every and (request.step - 1) % self.every == 0:
            write_step(self.folder, request, episodes)


# The environments of a training run: what it trains on and is evaluated on, from its settings.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironments:
    """Makes the environments of `run` as `play` and its preset say."""

    play: PlayConfig
    run: StudentRun

    @property
    def preset(self) -> Preset | None:
        return find_preset(self.play.preset, self.play.env)

    @property
    def given(self) -> dict[str, Any]:
        """--env-kwargs."""
        return json_object("--env-kwargs", self.play.env_kwargs)

    def settings(self, settings: ChatSettings) -> ChatSettings:
        """`settings` with what the preset says on top."""
        return settings if self.preset is None else self.preset.settings(settings, self.given)

    def maker(self, **more: Any) -> MakeEnv:
        """Makes what is trained on."""
        preset = {} if self.preset is None else self.preset.make()
        kwargs = {**preset, "split": self.play.split, "max_turns": self.run.max_turns, **self.given, **self._data}
        return env_maker(self.play.env, **kwargs, **more)

    def evaluation(self, panel: Panel) -> dict[str, Any]:
        """Arguments of `gym.make` for evaluations on `panel`, but for the data."""
        return eval_make(panel, self.play.preset, self.given, self.run)

    def evaluation_maker(self, panel: Panel, **more: Any) -> MakeEnv:
        """Makes what evaluations on `panel` play."""
        return env_maker(panel.env_id, **{**self.evaluation(panel), **more, **self._data})

    @property
    def _data(self) -> dict[str, Any]:
        return {} if self.play.data is None else {"data": self.play.data}


# What a resumed run must share of its rollout side.


def rollout_identity(config: RolloutConfig, run: StudentRun, settings: ChatSettings) -> dict[str, Any]:
    """Flat and JSON-able. Who plays (workers, slots) is not in it: episodes do not depend on it."""
    play = config.play
    found: dict[str, Any] = {"env": play.env, "split": play.split, "env_kwargs": play.env_kwargs}
    found["chat"] = settings.identity
    if play.rollout_dtype is not None:
        found["rollout_dtype"] = play.rollout_dtype
    names = ("expert", "mistakes", "players", "loop_after", "loop_slips", "hints")
    found |= {f"collect.{name}": getattr(play, name) for name in names}
    # lists, as JSON gives them back; names alone, for folders may have moved
    found |= {"collect.noise": list(play.noise), "collect.traces": [path.name for path in play.traces]}
    if run.judge is not None:
        # how often judged episodes are kept to read changes nothing that is learned
        judging = asdict(config.judging)
        # nor when to give it up
        del judging["judge_unread"]
        found["judge"] = {**judging, "judge_every": None, "expert": play.expert}
    return found


# What `--workers auto` is told of a training run.


def played_here(config: RolloutConfig, run: StudentRun) -> Playing:
    """The episodes of the whole run, if its student plays them, and in this process."""
    elsewhere = config.servers.policy_server or config.play.traces or run.collects != "student"
    model = None if elsewhere else run.learner.model
    return Playing(episodes=run.episodes, model=model, ahead=run.actor is not None)


# Plays for trainers: rollouts of a student in training, its evaluations, and judges of its turns.


class StudentRollouts:
    """Implements `Rollouts`: a student in training plays an environment, here, in workers or on servers."""

    def __init__(self, config: RolloutConfig, run: StudentRun) -> None:
        self.config, self.run = config, run
        self._envs = RunEnvironments(play=config.play, run=run)
        self.settings = config.chat.applied(self._envs.settings(ChatSettings.load(run.folder)))
        if run.judge in ("hint", "both") and self.settings.memory != "all":
            raise TurngymError(
                f"--memory {self.settings.memory}: hints are read in the whole conversation; an algorithm that teaches "
                "by hints needs --memory all"
            )
        self._closing = ExitStack()
        playing = played_here(config, run)
        self.players = str(config.workers.choice(playing))
        self._play: PlayJobs = self._closing.enter_context(open_workers(config.workers, playing))
        self._cancel: Any = None
        if run.actor is not None:
            if not isinstance(self._play, ParallelRollout):
                self._play = CancellableRollout()
            self._cancel = self._play.cancel
        self._env = SharedEnv(self._envs.maker())
        self.settings = resolved(self.settings, run.learner.tokenizer, self._env.env.unwrapped.tool)
        if not (Path(run.folder) / FILE).exists():
            print(describe(self.settings), file=sys.stderr)
        self._open_players()
        self._panel = self._open_panel()
        self._record = JudgedTraces(run.out / "judged", config.judging.judge_every)
        self._teacher_name: str | None = None
        self._shown: Demonstrations | None = None
        self._shown_identity: dict[str, Any] = {}

    def _open_players(self) -> None:
        run = self.run
        # with an actor the learner only evaluates, in this process
        self._learner, self._servers = self._player(run.learner, served=run.actor is None)
        self._actor = self._learner
        if run.actor is not None:
            self._actor, self._servers = self._player(run.actor, served=True)
        if isinstance(self._play, ParallelRollout):
            # now: where several processes train, the model is soon divided among them and cannot be copied any more
            for player in {id(player): player for player in (self._learner, self._actor)}.values():
                self._play.prepare(player.engine)

    def _player(self, played: PlayedModel, *, served: bool) -> tuple[ModelPlayer, SyncedPolicy | None]:
        servers, length = self.config.servers, self.settings.max_context
        engine = None
        if served and servers.policy_server:
            model, words, weights = played.model, played.tokenizer, played.weights
            engine = train_policy(servers, model, words, length, self.run.out, weights=weights)
        tool, play = self._env.env.unwrapped.tool, self.config.play
        how: dict[str, Any] = {"slots": play.slots, "dtype": play.rollout_dtype, "engine": engine}
        player = ModelPlayer.of(played.model, played.tokenizer, self.settings, tool, **how)
        return player, engine

    def _open_panel(self) -> Panel | None:
        play = self.config.play
        if play.panel is None:
            return None
        panel = load_panel(play.panel)
        check_panel(panel, self._envs.evaluation(panel), play.env, self._env.env.unwrapped.tool)
        return panel

    @property
    def identity(self) -> dict[str, Any]:
        found = rollout_identity(self.config, self.run, self.settings) | self._shown_identity
        if self._envs.preset is not None:
            found |= self._envs.preset.identity
        if self._teacher_name is not None:
            found["teacher"] = self._teacher_name
        return found

    @property
    def servers(self) -> SyncedPolicy | None:
        return self._servers

    @property
    def judge_unread(self) -> float:
        return self.config.judging.judge_unread

    @property
    def next_role(self) -> str:
        return self.settings.observation_role

    @property
    def evaluate(self) -> PanelEvaluation | None:
        if self._panel is None:
            return None
        play, panel = self.config.play, self._panel
        return PanelEvaluation(
            panel=panel,
            player=self._learner,
            make_env=self._envs.evaluation_maker(panel, channel=self.settings.channel),
            folder=self.run.out / "eval",
            samples=play.eval_samples,
            temperature=play.eval_temperature,
            seed=self.run.seed,
            slots=play.slots,
            limit=play.eval_limit,
            play=self._play,
            settings=eval_note(panel, play.preset, self._envs.evaluation(panel)),
        )

    @property
    def _held_out(self) -> Sequence[Task]:
        return () if self._panel is None else self._panel.tasks

    def teacher(self, size: int, temperature: float) -> tuple[Scorer, int] | None:
        servers = self.config.servers
        if not servers.teacher_server:
            return None
        found: tuple[SglangScorer, int] = teacher_scorer(
            servers, self.run.teacher, self.run.learner.tokenizer, size, temperature
        )
        if self.run.teacher is None:
            self._teacher_name = found[0].fleet.servers[0].model
        return found

    def recorded(self) -> list[Episode] | None:
        traces = self.config.play.traces
        if not traces:
            return None
        episodes = [episode for path in traces for episode in read_episodes(path)]
        assert_disjoint([episode.task for episode in episodes], self._held_out)
        # what another agent said is text; this student's ids are made of it
        return text_writer(self._actor)(episodes)

    def collect(self, teacher: Any, share: float, *, guided: bool = False) -> Collect:
        how = Collecting(
            play=self.config.play,
            by=self._play,
            actor=self._actor,
            tokenizer=self.run.learner.tokenizer,
            make_env=self._envs.maker(channel=self.settings.channel),
            env=self._env,
            task_ids=self._task_ids(),
            seed=self.run.seed,
            folder=self.run.out,
            held_out=self._held_out,
            demonstrations=self._demonstrations,
        )
        if self.run.collects == "student":
            return how.student(teacher, share, guided=guided)
        if self.config.demonstrations.demonstrations is not None:
            return how.demonstrated()
        return how.expert()

    def _demonstrations(self) -> Demonstrations:
        """Opened once, where somebody asks: a model that demonstrates is loaded for it."""
        if self._shown is None:
            stage = DemonstrationStage(
                make_env=lambda channel: self._envs.maker(channel=channel),
                env=self._env.env.unwrapped,
                play=self._play,
                held_out=self._held_out,
            )
            self._shown, self._shown_identity = open_demonstrations(self.config, self.run, self._actor, stage)
        return self._shown

    def _task_ids(self) -> Sequence[str]:
        known: Sequence[str] = self._env.env.unwrapped.task_ids()
        return self._demonstrations().tasks(known) if self.config.demonstrations.demonstrated_tasks else known

    def judge(self) -> Judge:
        if self.run.judge is None:
            raise TurngymError("the algorithm of this run asks no judge")
        return make_judge(
            self.config.judging,
            self.run.judge,
            make_env=self._envs.maker(channel=self.settings.channel),
            expert=self.config.play.expert,
            seed=self.run.seed,
            device=self.run.device,
        )

    def add_hints(self, episodes: Sequence[Episode]) -> list[Episode]:
        player = self._actor
        limit = player.engine.max_length
        hints = HintPrompts(renderer=player.renderer, position=self.run.hint_position, max_context=limit)
        return hints(episodes)

    def keep_judged(self, request: CollectRequest, episodes: Sequence[Episode]) -> None:
        self._record(request, episodes)

    def learner_changed(self, version: int) -> None:
        self._learner.engine.weights_changed(version)

    def actor_changed(self, version: int) -> None:
        self._actor.engine.weights_changed(version)

    def cancel(self) -> None:
        if self._cancel is not None:
            self._cancel()

    def save_settings(self, folder: Path) -> None:
        self.settings.save(folder)

    def close(self) -> None:
        self._closing.close()


# `ROLLOUTS` is what `turngym train` and `turngym.trainers.train` find here by name; they import nothing of agents.


def open_rollouts(config: RolloutConfig, run: StudentRun) -> StudentRollouts:
    """The rollout side of `run`. Raises TurngymError for an environment, panel or server that does not fit."""
    return StudentRollouts(config, run)


def preset_turns(config: RolloutConfig) -> int | None:
    """The limit of turns that the preset brings along; None without a preset."""
    preset = find_preset(config.play.preset, config.play.env)
    return None if preset is None else preset.max_turns


ROLLOUTS = RolloutProvider(
    config=RolloutConfig,
    open=open_rollouts,
    max_turns=preset_turns,
    has_teacher=lambda config: bool(config.servers.teacher_server),
    has_traces=lambda config: bool(config.play.traces),
    env_id=lambda config: str(config.play.env),
)
"""What trainers find here by name."""
