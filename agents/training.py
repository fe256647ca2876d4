"""Plays for trainers: rollouts of a student in training, its evaluations, and judges of its turns.

`ROLLOUTS` is what `turngym train` and `turngym.trainers.train` find here by name; trainers import nothing of agents.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turngym.agents.collect import ExpertCollect, KeptRollouts, LiveCollect, SharedEnv
from turngym.agents.demonstrations.collect import DemonstrationCollect
from turngym.agents.demonstrations.opening import (
    DemonstrationStage,
    open_demonstrations,
    text_writer,
)
from turngym.agents.demonstrations.plans import Demonstrations
from turngym.agents.environments import env_maker, json_object
from turngym.agents.evaluation.panel_evaluation import PanelEvaluation, check_panel, eval_make, eval_note
from turngym.agents.executor.cancellable import CancellableRollout
from turngym.agents.executor.open_workers import open_workers
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.judges.hint_prompts import HintPrompts
from turngym.agents.judges.hinted_env import HintedEnv
from turngym.agents.judges.make_judge import make_judge
from turngym.agents.judges.traces import JudgedTraces
from turngym.agents.local_engine.guided_policy import guided_player
from turngym.agents.local_engine.mixed_policy import mixed_player
from turngym.agents.model_player import ModelPlayer
from turngym.agents.players.mix import PlayerMix
from turngym.agents.presets.published import find_preset
from turngym.agents.rendering.chat_settings import FILE, ChatSettings
from turngym.agents.rendering.open_renderer import describe, resolved
from turngym.agents.rollout import MakeEnv, PlayJobs
from turngym.agents.scripted import named_player
from turngym.agents.sglang.open_servers import teacher_scorer, train_policy
from turngym.agents.sglang.scorer import SglangScorer
from turngym.agents.sglang.weights.synced_policy import SyncedPolicy
from turngym.agents.training_options import RolloutConfig
from turngym.envs.common.rollout_side import PlayedModel, RolloutProvider, StudentRun
from turngym.envs.core import Task, TurngymError
from turngym.envs.episode import Episode
from turngym.envs.panels import Panel, assert_disjoint, load_panel
from turngym.envs.protocols import Collect, CollectRequest, Judge, Scorer
from turngym.envs.trace import read_episodes


class StudentRollouts:
    """Implements `Rollouts`: a student in training plays an environment, here, in workers or on servers."""

    def __init__(self, config: RolloutConfig, run: StudentRun) -> None:
        self.config, self.run = config, run
        self._preset = find_preset(config.play.preset, config.play.env)
        self.settings = config.chat.applied(self._by_preset(ChatSettings.load(run.folder)))
        if run.judge in ("hint", "both") and self.settings.memory != "all":
            raise TurngymError(
                f"--memory {self.settings.memory}: hints are read in the whole conversation; an algorithm that teaches "
                "by hints needs --memory all"
            )
        self._closing = ExitStack()
        self._play: PlayJobs = self._closing.enter_context(open_workers(config.workers))
        self._cancel: Any = None
        if run.actor is not None:
            if not isinstance(self._play, ParallelRollout):
                self._play = CancellableRollout()
            self._cancel = self._play.cancel
        self._env = SharedEnv(self._make_env())
        self.settings = resolved(self.settings, run.learner.tokenizer, self._env.env.unwrapped.tool)
        if not (Path(run.folder) / FILE).exists():
            print(describe(self.settings), file=sys.stderr)
        # with an actor the learner only evaluates, in this process
        self._learner, self._servers = self._player(run.learner, served=run.actor is None)
        self._actor = self._learner
        if run.actor is not None:
            self._actor, self._servers = self._player(run.actor, served=True)
        if isinstance(self._play, ParallelRollout):
            # now: where several processes train, the model is soon divided among them and cannot be copied any more
            for player in {id(player): player for player in (self._learner, self._actor)}.values():
                self._play.prepare(player.engine)
        self._panel: Panel | None = None if config.play.panel is None else load_panel(config.play.panel)
        if self._panel is not None:
            made = eval_make(self._panel, config.play.preset, self._given, run)
            check_panel(self._panel, made, config.play.env, self._env.env.unwrapped.tool)
        self._record = JudgedTraces(run.out / "judged", config.judging.judge_every)
        self._teacher_name: str | None = None
        self._shown: Demonstrations | None = None
        self._shown_identity: dict[str, Any] = {}

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

    def _by_preset(self, settings: ChatSettings) -> ChatSettings:
        return settings if self._preset is None else self._preset.settings(settings, self._given)

    @property
    def _given(self) -> dict[str, Any]:
        return json_object("--env-kwargs", self.config.play.env_kwargs)

    def _make_env(self, **more: Any) -> MakeEnv:
        play, preset = self.config.play, {} if self._preset is None else self._preset.make()
        kwargs = {**preset, "split": play.split, "max_turns": self.run.max_turns, **self._given}
        if play.data is not None:
            kwargs["data"] = play.data
        return env_maker(play.env, **kwargs, **more)

    @property
    def identity(self) -> dict[str, Any]:
        play = self.config.play
        found: dict[str, Any] = {"env": play.env, "split": play.split, "env_kwargs": play.env_kwargs}
        found["chat"] = self.settings.identity
        if play.rollout_dtype is not None:
            found["rollout_dtype"] = play.rollout_dtype
        names = ("expert", "mistakes", "players", "loop_after", "loop_slips", "hints")
        found |= {f"collect.{name}": getattr(play, name) for name in names}
        # lists, as JSON gives them back; names alone, for folders may have moved
        found |= {"collect.noise": list(play.noise), "collect.traces": [path.name for path in play.traces]}
        found |= self._shown_identity
        if self._preset is not None:
            found |= self._preset.identity
        if self._teacher_name is not None:
            found["teacher"] = self._teacher_name
        if self.run.judge is not None:
            # how often judged episodes are kept to read changes nothing that is learned
            judging = asdict(self.config.judging)
            # nor when to give it up
            del judging["judge_unread"]
            found["judge"] = {**judging, "judge_every": None, "expert": play.expert}
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
        made = eval_make(panel, play.preset, self._given, self.run)
        kwargs = {**made, "channel": self.settings.channel}
        if play.data is not None:
            kwargs["data"] = play.data
        return PanelEvaluation(
            panel=panel,
            player=self._learner,
            make_env=env_maker(panel.env_id, **kwargs),
            folder=self.run.out / "eval",
            samples=play.eval_samples,
            temperature=play.eval_temperature,
            seed=self.run.seed,
            slots=play.slots,
            limit=play.eval_limit,
            play=self._play,
            settings=eval_note(panel, play.preset, made),
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
        play, settings = self.config.play, self.settings
        words = self.run.learner.tokenizer
        player = mixed_player(self._actor, share, teacher, words, slots=play.slots, play=self._play)
        make_env = self._make_env(channel=settings.channel)
        shared: dict[str, Any] = {
            "make_env": make_env,
            "task_ids": self._task_ids(),
            "seed": self.run.seed,
            "slots": play.slots,
            "held_out": self._held_out,
            "expert": play.expert,
            "play": self._play,
            "shared": self._env,
        }
        if self.run.collects == "student":
            shared["demonstrations"] = self._demonstrations()
            if guided:
                shared["guided"] = guided_player(self._actor, teacher, words, slots=play.slots, play=self._play)
            return self._kept(LiveCollect(player=player, **shared))
        if self.config.demonstrations.demonstrations is not None:
            names = ("task_ids", "seed", "held_out", "shared")
            given = {name: shared[name] for name in names}
            return self._kept(DemonstrationCollect(demonstrations=self._demonstrations(), **given))
        if play.hints:
            shared["make_env"] = HintedEnv(make_env, play.hints, named_player(play.expert))
        expert = ExpertCollect(
            renderer=player.renderer,
            settings=settings,
            noise=play.noise,
            mistakes=play.mistakes,
            players=self._players(),
            **shared,
        )
        return self._kept(expert)

    def _demonstrations(self) -> Demonstrations:
        """Opened once, where somebody asks: a model that demonstrates is loaded for it."""
        if self._shown is None:
            stage = DemonstrationStage(
                make_env=lambda channel: self._make_env(channel=channel),
                env=self._env.env.unwrapped,
                play=self._play,
                held_out=self._held_out,
            )
            self._shown, self._shown_identity = open_demonstrations(self.config, self.run, self._actor, stage)
        return self._shown

    def _task_ids(self) -> Sequence[str]:
        known: Sequence[str] = self._env.env.unwrapped.task_ids()
        return self._demonstrations().tasks(known) if self.config.demonstrations.demonstrated_tasks else known

    def _kept(self, collect: Collect) -> Collect:
        last = self.config.play.keep_rollouts
        return KeptRollouts(collect=collect, folder=self.run.out / "rollouts", last=last) if last else collect

    def _players(self) -> PlayerMix | None:
        play = self.config.play
        if not play.players:
            return None
        return PlayerMix.parse(play.players, loop_after=play.loop_after, loop_slips=play.loop_slips)

    def judge(self) -> Judge:
        if self.run.judge is None:
            raise TurngymError("the algorithm of this run asks no judge")
        return make_judge(
            self.config.judging,
            self.run.judge,
            make_env=self._make_env(channel=self.settings.channel),
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
