"""Where a step's episodes come from: the student plays them, or an expert or demonstrator whom it imitates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turngym.agents.demonstrations import Demonstrations
from turngym.agents.playing.rollout import MakeEnv
from turngym.agents.playing.scripted import PlayerMix, named_player
from turngym.agents.rendering.skills import SKILLS_PREFIX, read_skills
from turngym.agents.rollout_sources import DemonstrationSource, ExpertSource, KeptSource, LiveSource
from turngym.core.errors import TurngymError
from turngym.core.protocols import RolloutSource
from turngym.envs.base import tasks_of
from turngym.trainers.algorithm import ExpertPlay
from turngym.trainers.student_player import RunEnv, StudentPlayer


def played_source(
    env: RunEnv,
    demonstrations: Demonstrations | None,
    *,
    teacher: Any = None,
    share: float = 0.0,
    guided: bool = False,
) -> RolloutSource:
    """Returns who plays the episodes of a step: the student, or an expert whom it imitates.

    Args:
        env: the environment, with the student that plays it and the panel that is never trained on.
        demonstrations: from `open_demonstrations`. An algorithm that imitates takes them as its episodes; None: an
            expert plays these (`ExpertPlay`). Of other algorithms' episodes some begin with a part of one, as the step
            asks.
        teacher: the teacher's model if it is in this process, else None. It plays only if `share` is above 0 or with
            `guided`.
        share: share of the student's tokens that `teacher` chooses, 0 to 1.
        guided: whether `teacher` plays whole turns, as many as each request says.
    """
    config, run, student = env.config, env.info, env.student
    play, slots, expert_play = config.play, config.play.slots, run.imitates
    task_ids: Sequence[str] = tasks_of(student.env)
    if config.part("demonstrations").demonstrated_tasks and demonstrations is not None:
        task_ids = demonstrations.tasks(task_ids)
    tasks: dict[str, Any] = {"task_ids": task_ids, "seed": run.seed, "held_out": env.held_out, "shared": student.shared}
    playing: dict[str, Any] = {"slots": slots, "expert": config.part("expert"), "play": student.play}
    source: RolloutSource
    if expert_play is None:
        player, guide = student.actor, None
        if share or guided:
            from turngym.agents.mixed_policy import guided_player, mixed_player

            with_teacher: dict[str, Any] = {"slots": slots, "play": student.play}
            if guided:
                guide = guided_player(player, teacher, run.learner.tokenizer, **with_teacher)
            player = mixed_player(player, share, teacher, run.learner.tokenizer, **with_teacher)
        source = LiveSource(
            player=player,
            make_env=student.make_env,
            demonstrations=demonstrations,
            guided=guide,
            **tasks,
            **playing,
        )
    elif demonstrations is not None:
        source = DemonstrationSource(demonstrations=demonstrations, **tasks)
    else:
        mix = None
        if expert_play.players:
            mix = PlayerMix.parse(
                expert_play.players, loop_after=expert_play.loop_after, loop_slips=expert_play.loop_slips
            )
        source = ExpertSource(
            renderer=student.actor.renderer,
            settings=student.actor.settings,
            make_env=_told_while_played(student, expert_play, config.part("expert")),
            noise=expert_play.noise,
            mistakes=expert_play.mistakes,
            max_context=student.actor.engine.max_length,
            players=mix,
            **tasks,
            **playing,
        )
    if play.keep_rollouts:
        return KeptSource(source=source, folder=run.out / "rollouts", last=play.keep_rollouts)
    return source


def _told_while_played(student: StudentPlayer, expert_play: ExpertPlay, expert: str) -> MakeEnv:
    """Makes environments that say what a student is to learn to read."""
    make_env = student.make_env
    if not (expert_play.hints or expert_play.told):
        return make_env
    from turngym.agents.judges import hinted_prompts

    if expert_play.hints:
        hints = expert_play.hints, named_player(expert)
        make_env = hinted_prompts.WrappedEnv(make_env, hinted_prompts.HintedObservations, hints)
    if expert_play.told:
        if not expert_play.told.startswith(SKILLS_PREFIX):
            raise TurngymError(f"--sft.told is {expert_play.told!r}; valid: {SKILLS_PREFIX}FOLDER")
        skills = read_skills(expert_play.told.removeprefix(SKILLS_PREFIX))
        hinted_prompts.refuse_control_tokens(skills, student.actor.renderer.template.encoder)
        texts = (sorted(skills.texts),)
        make_env = hinted_prompts.WrappedEnv(make_env, hinted_prompts.PrivilegedObservations, texts)
    return make_env
