"""Opens the judge of a run: whom the settings name, where its hints go, and which judged episodes are kept to read."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.agents.judges.env_judges import ENV_JUDGES, ExpertJudge, SkillsJudge
from turngym.agents.judges.hinted_prompts import HintPrompts, refuse_control_tokens
from turngym.agents.judges.judge_settings import AnyJudge, Attempts
from turngym.agents.judges.judges import BothQuestions, make_judge
from turngym.agents.rollout_sources import write_step
from turngym.core.episode import Episode
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.protocols import Judge, Question, RolloutSource
from turngym.core.rollout_request import RolloutRequest
from turngym.envs.base import TextEnv
from turngym.trainers.algorithm import Algorithm, PrivilegedText
from turngym.trainers.judged_episodes import HINTING, JudgedSource, UnreadVotes
from turngym.trainers.student_player import RunEnv, StudentPlayer


def judged_source(source: RolloutSource, env: RunEnv, algorithm: Algorithm) -> RolloutSource:
    """Returns the episodes of `source` with votes and hints, for an `algorithm` that learns from a judge.

    Raises TurngymError for a judge that does not suit `env` or `algorithm`.
    """
    run, student, kind, options = env.info, env.student, algorithm.judge, env.config.part("judge")
    assert kind is not None
    if isinstance(options, Attempts) and algorithm.group < 2:
        raise SettingsError(
            f"--judge attempts tells an attempt what another of its group did, and {algorithm.name} plays groups of "
            f"{algorithm.group}; valid: n of at least 2"
        )
    device = env.config.models.device
    judge = open_judge(options, kind, student, expert=env.config.part("expert"), seed=run.seed, device=device)
    player, position = student.actor, (algorithm.privileged or PrivilegedText()).position
    hints = HintPrompts(renderer=player.renderer, position=position, max_context=player.engine.max_length)

    def keep(request: RolloutRequest, episodes: Sequence[Episode]) -> None:
        """Keeps the judged episodes of every so many steps as traces in the run's folder, to read."""
        every = options.judge_every
        if every and (request.step - 1) % every == 0:
            write_step(run.out / "judged", request, episodes)

    return JudgedSource(
        source=source,
        judge=judge,
        kind=kind,
        next_role=student.settings.observation_role,
        enhance=hints if kind in HINTING else None,
        record=keep,
        unread=UnreadVotes(limit=options.judge_unread),
    )


def open_judge(
    options: AnyJudge, kind: Question, student: StudentPlayer, *, expert: str, seed: int, device: str
) -> Judge:
    """Returns the judge that `options` name. Raises TurngymError for one whose expert the environment lacks."""
    judge = make_judge(options, kind, ENV_JUDGES, make_env=student.make_env, expert=expert, seed=seed, device=device)
    base = student.env
    single = judge.one if isinstance(judge, BothQuestions) else judge
    knows = expert != "expert" or type(base).expert_action is not TextEnv.expert_action
    if isinstance(single, ExpertJudge) and not knows:
        raise TurngymError(f"--judge {options.name} asks an expert, and {base.env_id} has none; valid: another judge")
    if isinstance(judge, SkillsJudge):
        refuse_control_tokens(judge.skills, student.actor.renderer.template.encoder)
    return judge
