"""A rollout source that plays nothing: recorded episodes as a data set, and whether they suit the run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.rendering.renderer import ChatRenderer
from turngym.core.episode import SHORT, Episode, Status, Turn, drawn_at
from turngym.core.errors import TurngymError
from turngym.core.loops import loop_end
from turngym.core.redaction import excerpt
from turngym.core.rollout_request import RolloutRequest
from turngym.core.task import plain_id
from turngym.core.trace import read_episodes, read_specs
from turngym.envs.panels import assert_disjoint, task_order
from turngym.trainers.batch import pack
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.several_envs import ENVIRONMENT
from turngym.trainers.student_player import RunEnv, text_writer
from turngym.trainers.targets import rows
from turngym.trainers.train_config import PlayConfig

PROXY = "proxy"
"""Stands for the environment of sessions that clients had with the proxy."""


def check_recorded(episodes: Sequence[Episode], where: Path, play: PlayConfig, envs: Collection[str]) -> None:
    """Raises TurngymError for episodes of environments other than `envs`, or of another preset than the run's.

    Sessions of the proxy are of no environment: they are taken as they are.
    """
    other_envs = Counter(e.task.env_id for e in episodes if e.task.env_id not in envs and e.task.env_id != PROXY)
    for name, count in other_envs.most_common(1):
        raise TurngymError(
            f"--traces {where}: {count} of its {len(episodes)} episodes are of {name}, the run has {', '.join(envs)}: "
            f"leave --env out to take the recorded one, or name a further one with --also {name}"
        )
    presets = {digits: spec.get("preset") for digits, spec in read_specs(where).items()}
    recorded = (presets.get(episode.spec) for episode in episodes)
    other_presets = Counter(preset for preset in recorded if preset not in (None, play.preset))
    for preset, count in other_presets.most_common(1):
        raise TurngymError(
            f"--traces {where}: {count} of its {len(episodes)} episodes were played with --preset {preset}, the run "
            f"has {play.preset or 'none'}: give it the same one"
        )


def within_limit(episodes: Sequence[Episode], where: str, limit: int) -> list[Episode]:
    """Returns `episodes`; a hint that leaves its response no room is one that nobody reads, as in `HintPrompts`.

    Raises TurngymError for episodes with more ids than the `limit` of the student's context, and its teachers'.
    Episodes of text are cut where they are written as ids. Sampled ones are not: their rewards belong to the whole.
    """
    sizes = [max((len(ids) for ids in episode.segments), default=0) for episode in episodes]
    if longer := sum(size > limit for size in sizes):
        raise TurngymError(
            f"--traces {where}: {longer} of its {len(episodes)} episodes are longer than the {limit:,} ids that the "
            f"student and its teachers can read (up to {max(sizes):,}): leave them out, or record with --max-context "
            f"{limit}"
        )

    def readable(turn: Turn) -> Turn:
        hinted = turn.hint_prompt_ids
        long = hinted is not None and len(hinted) + turn.response_length > limit
        return replace(turn, hint_prompt_ids=None) if long else turn

    return [replace(episode, turns=tuple(map(readable, episode.turns))) for episode in episodes]


def check_tokenizer(episodes: Sequence[Episode], renderer: ChatRenderer, where: str) -> None:
    """Raises TurngymError for episodes whose ids the student's tokenizer decodes to other texts than were recorded.

    Ids of another tokenizer may all be in range, and it may have the same letters and other control tokens. In an
    episode of the student's own most turns can be read; a few may not be, where what answered was cleaned (a call that
    was repaired, spaces).
    """
    misread = []
    for episode in episodes:
        turns = [turn for turn in episode.turns if turn.response_length]
        differing = [texts for turn in turns if (texts := _misread(renderer, episode, turn))]
        if 2 * len(differing) > len(turns):
            misread.append((episode.task.task_id, differing[0]))
    if misread:
        task, (turn, recorded, decoded) = misread[0]
        raise TurngymError(
            f"--traces {where}: the ids of {len(misread)} of its {len(episodes)} episodes are another tokenizer's: "
            f"turn {turn} of {task} has {recorded}, its ids are {excerpt(decoded, 40)!r} to the student. Train the "
            "model that recorded them, or imitate their texts (sft --demonstrations FILE)"
        )


def _misread(renderer: ChatRenderer, episode: Episode, turn: Turn) -> tuple[int, str, str] | None:
    """(turn, recorded text, decoded text) of the first turn whose ids the student's tokenizer decodes to another text,
    white space apart; None if there is none."""
    template, controls = renderer.template, renderer.template.encoder.ids
    size, ids = len(template.tokenizer), episode.segments[turn.segment]
    # the observation with what the template writes around it, and the response
    prompt, response = (
        [token for token in ids[begin:end].tolist() if token < size]
        for begin, end in ((turn.prompt_span[0], turn.response_span[0]), turn.response_span)
    )
    # a response without words says nothing of the letters; the observation before it does
    blank = not turn.response.strip()
    text, decoded = (turn.observation, template.decode(prompt)) if blank else (turn.response, template.decode(response))
    if "".join(text.split()) not in "".join(decoded.split()):
        return turn.index, repr(excerpt(text, 40)), decoded
    # control tokens are in no text: those before an answer must be ones that the template writes
    before = prompt[max(0, len(prompt) - len(template.encode(template.generation_prompt))) :]
    if unwritten := [token for token in before if token in controls and controls[token] not in template.writes]:
        return turn.index, "a control token before its response", template.decode(unwritten)
    # and the one behind it must end an answer, or be part of one
    last = [] if turn.is_cut else response[-1:]
    if any(controls.get(token) not in (None, *template.spoken) and token not in renderer.stop_ids for token in last):
        return turn.index, "an end behind its response", template.decode(last)
    return None


def other_systems(episodes: Sequence[Episode], given: Mapping[str, str]) -> str:
    """A warning if episodes begin with another system message than the student's own; else "".

    `given` has the student's for each environment of the run (`ENVIRONMENT` in `meta`, "" for the run's own).
    """
    count = sum(episode.system != given[str(episode.meta.get(ENVIRONMENT, ""))] for episode in episodes)
    if not count:
        return ""
    return (
        f"--traces: {count} of {len(episodes)} episodes have another system message than the student gets where it "
        "plays: it learns under the recorded one (--system gives it another)"
    )


def recorded_episodes(envs: Mapping[str, RunEnv]) -> list[Episode]:
    """Returns the episodes of `--traces`, written as the student's ids. `envs` are the run's by name; its own is "".

    Raises TurngymError for episodes of an environment that the run has not, or of tasks that it is evaluated on.
    """
    config, run = envs[""].config, envs[""].info
    # of another run's ids those may be none of this run's: where teacher and student are padded to different sizes
    size = run.vocab_size or int(run.learner.model.config.get_text_config().vocab_size)
    name_of = {plain_id(env.config.play.env.id): name for name, env in envs.items()}
    episodes: list[Episode] = []
    for path in config.play.traces:
        recorded = read_episodes(path, size)
        check_recorded(recorded, path, config.play, name_of)
        recorded = within_limit(recorded, str(path), envs[""].student.actor.engine.max_length)
        check_tokenizer(recorded, envs[""].student.actor.renderer, str(path))
        check_logprobs(recorded, run.learner.model, str(path))
        episodes += recorded
    for env in envs.values():
        assert_disjoint([episode.task for episode in episodes], env.held_out)
    # what another agent said is text; this student's ids are made of it, in the words of the episode's environment
    writers = {name: text_writer(env.student.actor) for name, env in envs.items()}
    written = []
    for episode in episodes:
        name = name_of.get(episode.task.env_id, "")
        episode = writers[name].write(episode)
        # an episode's environment has another name, or none, in the run that recorded it
        meta = {key: value for key, value in episode.meta.items() if key != ENVIRONMENT}
        written.append(replace(episode, meta=meta | ({ENVIRONMENT: name} if name else {})))
    if warning := other_systems(written, {name: env.student.system for name, env in envs.items()}):
        print(warning, file=sys.stderr)
    return written


COMPARED = 4
"""How many episodes of a temperature show what its log-probabilities are of; one row of each."""


def check_logprobs(episodes: Sequence[Episode], model: Any, where: str) -> None:
    """Raises TurngymError where recorded log-probabilities are plainly those of `model` at temperature 1, although the
    ids were drawn at another one: many servers give them before the temperature (vLLM by default).

    Where another model drew the ids nothing is plain, and nothing is said. `where` names the episodes.
    """
    with_logprobs = [e for e in episodes if any(t.origin == "policy" and t.logprobs is not None for t in e.turns)]
    by_temperature: dict[float, list[Episode]] = {}
    for episode in with_logprobs:
        temperature = drawn_at(episode, episode.turns[0])
        if temperature is not None and temperature not in (0.0, 1.0) and not episode.status.is_error:
            by_temperature.setdefault(temperature, []).append(episode)
    for temperature, members in by_temperature.items():
        batch = pack(members[:COMPARED])
        ids, places = rows(batch)
        scorers = (LocalScorer(model=model, temperature=value) for value in (temperature, 1.0))
        at_temperature, plain = (np.concatenate(scorer.logprobs(ids, places)) for scorer in scorers)
        comparable = np.isfinite(batch.behavior_logp_N) & (batch.temperature_N == temperature)
        gap, plain_gap = (np.abs(batch.behavior_logp_N - scored)[comparable] for scored in (at_temperature, plain))
        if len(gap) and plain_gap.mean() < 0.5 * gap.mean() and gap.mean() > LEAST_GAP:
            raise TurngymError(
                f"{where}: ids were drawn at temperature {temperature:g}, but their log-probabilities are those at "
                f"temperature 1 (the student's own are {plain_gap.mean():.2g} nats away, at {temperature:g} "
                f"{gap.mean():.2g}): whoever recorded them gave them before the temperature (vLLM's default); record "
                "them with --logprobs-mode processed_logprobs, or at --temperature 1"
            )


LEAST_GAP = 1e-3
"""Nats on average below which two temperatures cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSource:
    """A rollout source that plays nothing: recorded episodes in `task_order`, shuffled epoch by epoch.

    Prefixes and temperatures (`drawn_at`) are as recorded. Where a step wants groups, attempts at one task that follow
    each other are one group; attempts left over are not used.
    """

    episodes: Sequence[Episode]
    seed: int = 0
    cut: bool = False
    """End longer episodes at a step's depth cap, as if they had been played for it."""

    def __post_init__(self) -> None:
        if not self.episodes:
            raise TurngymError("the data set has no episodes; give a trace file with at least one")

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        """Returns `request.episodes` episodes.

        Raises TurngymError without a whole group of one task, or for a curriculum that begins with an expert's turns:
        that needs an environment.
        """
        if request.plan.demonstration_turns is not None:
            raise TurngymError("a curriculum that begins with an expert's turns plays them: it cannot use trace files")
        if request.plan.round:
            raise TurngymError("groups are refilled by playing further tasks: leave --grpo.refill out with trace files")
        groups = [[episode] for episode in self.episodes] if request.group == 1 else self._groups(request.group)
        places = task_order(len(groups), seed=self.seed, step=request.step, batch=request.episodes // request.group)
        chosen = [
            episode if request.group == 1 else replace(episode, group=number)
            for number, index in enumerate(places)
            for episode in groups[index]
        ]
        # an episode that leaves its loop is one whose depth cap is where the loop closed
        caps = [
            min(cap, loop_end(episode.turns) or cap) if leaves else cap
            for episode, cap, leaves in zip(chosen, request.depth_caps(), request.loops_left(), strict=False)
        ]
        capped = request.own(list(zip(chosen, caps, strict=True)))
        return [self._cut(episode, cap, request.max_turns) for episode, cap in capped]

    def _cut(self, episode: Episode, cap: int, full: int) -> Episode:
        """`episode` as if it had been played for this step, marked where its cap lies below that of the step."""
        mark = {SHORT: cap} if self.cut and cap < full else {}
        if mark or SHORT in episode.meta:
            meta = {name: value for name, value in episode.meta.items() if name != SHORT}
            episode = replace(episode, meta={**meta, **mark})
        if not self.cut or episode.depth <= cap:
            return episode
        # as if it had been broken off after `cap` turns
        turns = episode.turns[:cap]
        # later turns overwrite earlier ones: a segment ends with its last response that is kept
        ends = {turn.segment: turn.response_span[1] for turn in turns}
        return replace(
            episode,
            turns=turns,
            segments=tuple(ids[: ends.get(number, 0)] for number, ids in enumerate(episode.segments[: max(ends) + 1])),
            status=Status.TRUNCATED_DEPTH,
            success=False,
            episode_return=float(sum(turn.reward for turn in turns)),
            score=turns[-1].progress or 0.0,
            final_observation=episode.turns[cap].observation,
        )

    def _groups(self, size: int) -> list[list[Episode]]:
        tasks: dict[tuple[str, str], list[Episode]] = {}
        for episode in self.episodes:
            tasks.setdefault((episode.task.env_id, episode.task.task_id), []).append(episode)
        groups = [
            attempts[i : i + size] for attempts in tasks.values() for i in range(0, len(attempts) - size + 1, size)
        ]
        if not groups:
            most = max(len(attempts) for attempts in tasks.values())
            raise TurngymError(
                f"no task of the {len(tasks)} in the data set has {size} episodes to compare, at most {most}; record "
                "more samples per task or make groups smaller"
            )
        return groups
