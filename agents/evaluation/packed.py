"""Results that prove themselves: an evaluation packed into one small file, which anyone can check by playing it again.

`pack_result` writes what an evaluation was (panel, preset, model fingerprint, versions, settings), its table, and every
episode. `check_result` plays the recorded responses in the environment and compares what comes back, recomputes the
table, and names what differs.

What a check proves: these actions, in these tasks, had these outcomes, and the table is theirs. Only somebody who has
the named model can show that it chose the actions (`play_again`): the same seed gives the same episodes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turngym.agents.endpoint.options import KEY
from turngym.agents.evaluation.compare import rescore, trace_of
from turngym.agents.evaluation.departures import panel_of
from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.evaluation.packed_file import PackedResult, flat, read_result
from turngym.agents.evaluation.results import EACH, token_counts
from turngym.agents.evaluation.rules import stated
from turngym.agents.evaluation.scores import EvaluationError, Scores, score
from turngym.agents.evaluation.statistics import alike
from turngym.agents.named_agent import weights_of
from turngym.agents.play_spec import (
    Compute,
    EvalSpec,
    ExampleFile,
    Model,
    OnPanel,
    OpenAI,
    PartOfPanel,
    Published,
    RecordedAgent,
    Servers,
    part_of,
)
from turngym.agents.playing.agent import reset_seed
from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.timed_calls import lent
from turngym.core.episode import LENIENT, Episode, Status, Turn
from turngym.core.errors import TurngymError
from turngym.core.nested import differing
from turngym.core.provenance import CONFIG_FILE, loaded_versions
from turngym.core.redaction import excerpt
from turngym.core.settings import read_toml
from turngym.core.spec import changed
from turngym.core.task import Verdict, plain_id
from turngym.core.user_files import json_object
from turngym.envs.guard import guard_of
from turngym.envs.panels import Panel, load_panel, shipped_panel

MOST_NAMED = 1000
"""So many missing episodes are named; more, as in a file that asks for 10^9 samples, are counted."""
PLAYED = ("index", "observation", "response", "action", "verdict", "reward", "finish", "origin", "progress", "excluded")
"""What is packed of a turn."""
BROKEN_OFF = "broken off"
"""`Turn.excluded` of a last response that the environment never saw."""


def packed(run: str | Path) -> PackedResult:
    """Makes the content of the file that `pack_result` writes, of the evaluation in the folder or trace `run`.

    Raises EvaluationError if there is none, if episodes are missing, or if it was not played on a panel.
    """
    result = rescore(run)
    tasks = result.spec.play.tasks
    if not isinstance(tasks, OnPanel):
        raise EvaluationError(f"{run} was not played on a panel, so nobody else could know its tasks")
    if isinstance(tasks.sampling, Published):
        raise EvaluationError(
            f"{run} was played with --sampling published:{tasks.sampling.harness}: its tasks are draws, not the "
            "panel's, and only results of a whole panel are packed; play it again without --sampling"
        )
    if result.missing:
        raise EvaluationError(f"{run} lacks {result.missing} episodes: let the evaluation finish first")
    if result.twice:
        raise EvaluationError(
            f"{run} holds {result.twice} episodes more than once although none ended in an error, as if traces of "
            "several evaluations were joined: pack the trace of one"
        )
    written = Path(run) / "results.json"
    about = json_object(written, EvaluationError) if written.is_file() else _of_training(trace_of(run))
    spec = shared(result.spec)
    if (weights := about.get("weights")) is not None and isinstance(spec.agent, Model):
        spec = changed(spec, agent=changed(spec.agent, weights=weights))
    return PackedResult(
        spec=spec,
        agent=result.agent,
        versions=about.get("versions", loaded_versions()),
        date=about.get("date", ""),
        seconds=round(result.seconds, 3),
        tokens=token_counts(result.outcomes),
        scores=json.loads(json.dumps(result.scores.to_json())),
        episodes=tuple(_stripped(episode) for episode in result.episodes),
    )


def shared(spec: EvalSpec) -> EvalSpec:
    """Removes from `spec` what belongs to one machine: who computed, addresses, and the folders of files, which are
    known by their hashes."""
    agent: Any = spec.agent
    if isinstance(agent, Model):
        local = agent.engine if isinstance(agent.engine, Servers) else changed(agent.engine, device="auto", threads=0)
        engine = changed(local, policy_server=local.server) if isinstance(local, Servers) else local
        folder = agent.folder if "@" in agent.folder else Path(agent.folder).name
        agent = changed(agent, folder=folder, engine=engine)
    elif isinstance(agent, OpenAI):
        agent = changed(agent, endpoint=changed(agent.endpoint, base_url="", key_env=KEY))
    elif isinstance(agent, RecordedAgent):
        agent = changed(agent, trace=Path(agent.trace).name)
    examples = getattr(agent.chat, "examples", None)
    if isinstance(examples, ExampleFile):
        named = changed(examples, file=Path(examples.file).name)
        agent = changed(agent, chat=changed(agent.chat, examples=named))
    return changed(spec, agent=agent, compute=Compute())


def _of_training(trace: Path) -> dict[str, Any]:
    """Date, versions and the hash of the weights of RUN/eval/step_000100.jsonl, as far as RUN knows them."""
    run = trace.absolute().parent.parent
    if trace.parent.name != "eval" or not (run / CONFIG_FILE).is_file():
        return {}
    about = read_toml(run / CONFIG_FILE, provenance=True)["provenance"]
    model = run / "checkpoints" / trace.stem / "model"
    facts = {"date": about["started"], "versions": {"python": about["python"], **about["packages"]}}
    if model.is_dir():
        facts["weights"] = weights_of(model)
    return facts


def pack_result(
    run: str | Path,
    out: str | Path,
    *,
    panel: str | None = None,
    data: str | Path | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> PackedResult:
    """Packs the evaluation in the folder or trace `run` into the file `out`, after a check that it can be replayed
    (`check_result` explains the other arguments).

    Raises EvaluationError as `packed` does, and if the check fails. An evaluation whose plain settings change the
    scoring is packed, too. It is no result of its panel, as checks and tables say.
    """
    result = packed(run)
    if problems := check_result(result, panel=panel, data=data, env_kwargs=env_kwargs, other_rules=True):
        raise EvaluationError(f"{run} does not come out the same when it is played again: {problems[0]}")
    result.write(out)
    return result


def _stripped(episode: Episode) -> Episode:
    """Reduces an episode to what a replay needs and a reader wants to see."""
    turns = tuple(Turn(admissible=None, **{name: getattr(turn, name) for name in PLAYED}) for turn in episode.turns)
    meta = {name: value for name, value in episode.meta.items() if name in EACH}
    return replace(episode, segments=(), turns=turns, timings={}, meta=meta, spec="")


def check_result(
    result: str | Path | PackedResult,
    *,
    panel: str | None = None,
    data: str | Path | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    other_rules: bool = False,
) -> list[str]:
    """Replays the episodes of a packed result, and returns all differences from what it states; [] if there are none.

    Args:
        panel: the panel, if it is not shipped with turngym: `my_package:name`, or the path of its manifest. A file is
            not trusted to say where its panel lies.
        env_kwargs: arguments of gym.make that are not taken from a file, such as the address of a retriever.
        other_rules: whether settings that change what scores may differ from the panel's.

    Raises:
        EvaluationError: the file is damaged.
        TurngymError: the panel or the environment's data are not there.
    """
    result = result if isinstance(result, PackedResult) else read_result(result)
    problems = list(result.broken)
    known_panel = _panel(result, panel)
    problems += _tasks(result, known_panel)
    arguments = {**(env_kwargs or {}), **({} if data is None else {"data": data})}
    deviating = stated(result.spec.play, known_panel, arguments)
    if barred := deviating.differences(other_rules=other_rules):
        # in another game most turns would differ, and nothing that a file names is opened
        return [*problems, *barred, *_table(result)]
    channel = result.spec.agent.chat.channel
    channels = {} if channel == "none" else {"channel": channel}
    made = {**known_panel.make_kwargs, **deviating.playable, **channels, **arguments}
    with lent(env_maker(known_panel.env_id, **made)) as env:
        scoring = differing(result.spec.play.scoring, guard_of(env).base.scoring)
        problems += [f"settings: {_said(name, *values)}" for name, values in scoring.items()]
        for episode in result.episodes:
            where = f"{episode.task.task_id} sample {episode.sample}"
            problems += [f"{where}, {line}" for line in _replayed(episode, env)]
    return [*problems, *_table(result)]


def inconsistencies(result: PackedResult) -> list[str]:
    """Checks a file without playing: its seal, its tasks if its panel comes with turngym, and its table."""
    panel = panel_of(result.spec.play)
    return [*result.broken, *(() if panel is None else _tasks(result, panel)), *_table(result)]


def _panel(result: PackedResult, panel: str | None) -> Panel:
    """Loads the panel called `panel`; for None, the shipped one that a result names."""
    tasks = result.spec.play.tasks
    return load_panel(panel) if panel is not None else shipped_panel(tasks.panel if isinstance(tasks, OnPanel) else "")


def _tasks(result: PackedResult, panel: Panel) -> Iterator[str]:
    """Differences from the panel: every task as often as the settings say, with the panel's hash and the seed."""
    play, tasks = result.spec.play, result.spec.play.tasks
    if not isinstance(tasks, OnPanel) or isinstance(tasks.sampling, Published):
        yield "settings: its tasks are not a panel's"
        return
    ours = {"sha256": tasks.sha256, "env.id": plain_id(play.env.id), "size": tasks.size}
    theirs = {"sha256": panel.sha256, "env.id": plain_id(panel.env_id), "size": len(panel.tasks)}
    for name, (value, expected) in differing(ours, theirs).items():
        yield f"settings: {name} is {value!r}, the panel {panel.full_name} has {expected!r}"
    chosen = {task.task_id: task for task in part_of(panel.tasks, tasks.sampling)}
    samples = play.samples
    played = Counter((episode.task.task_id, episode.sample) for episode in result.episodes)
    wanted = {(task_id, sample) for task_id, sample in played if task_id in chosen and 0 <= sample < samples}
    lacking = len(chosen) * samples - len(wanted)
    if lacking > MOST_NAMED:
        yield f"{lacking} episodes are missing"
    for task_id in sorted(chosen) if 0 < lacking <= MOST_NAMED else ():
        for sample in range(samples):
            if (task_id, sample) not in wanted:
                yield f"{task_id} sample {sample}: the episode is missing"
    for task_id, sample in sorted(key for key, count in played.items() if key not in wanted or count > 1):
        yield f"{task_id} sample {sample}: one episode too many"
    for episode in result.episodes:
        task, where = chosen.get(episode.task.task_id), f"{episode.task.task_id} sample {episode.sample}"
        # an episode that failed before its first observation knows only the id of its task
        if task is not None and task != episode.task and not (episode.status.is_error and not episode.turns):
            yield f"{where}: its task has sha256 {episode.task.sha256[:12]}, the panel says {task.sha256[:12]}"
        if episode.seed != play.seed:
            yield f"{where}: played with seed {episode.seed}, the settings say {play.seed}"


def _replayed(episode: Episode, env: Any) -> Iterator[str]:
    """Differences between `episode` and what its responses give in `env`; after the first in a turn it stops."""
    if episode.status.is_error and not episode.turns:
        return
    try:
        seed, options = reset_seed(episode.task.task_id, episode.seed), {"task": episode.task.task_id}
        observation, _ = env.reset(seed=seed, options=options)
    except TurngymError as error:
        yield f"reset: {error}"
        return
    task = guard_of(env).task
    if task != episode.task:
        yield f"its task has sha256 {episode.task.sha256[:12]}, here {task.sha256[:12]}: other data"
        return
    # the cluster is not part of the task's hash, but intervals for new scenes and products depend on it
    if task.cluster != episode.task.cluster:
        yield _said("cluster", episode.task.cluster, task.cluster)

    # play the recorded responses, turn by turn
    success, total, final, end = False, 0.0, 0.0, None
    goals: float | None = None
    f1: float | None = None
    progress, lenient = 0.0, 0
    for turn in episode.turns:
        if end is not None:
            yield f"turn {turn.index}: the episode is over ({end.value}), but goes on in the file"
            return
        if turn.observation != observation:
            yield f"turn {turn.index}: {_said('observation', turn.observation, observation)}"
            return
        if turn.excluded == BROKEN_OFF:
            if not alike(turn.progress, progress):
                yield f"turn {turn.index}: {_said('progress', turn.progress, progress)}"
            if turn is not episode.turns[-1] or turn.verdict is not Verdict.MALFORMED or turn.reward:
                yield f"turn {turn.index}: an answer that was broken off is the last one, malformed, without a reward"
                return
            break
        observation, reward, terminated, truncated, info = env.step(turn.response)
        goals = None if info.get("goal_rate") is None else float(info["goal_rate"])
        success, final, total = bool(info["success"]), float(info["score"]), total + float(reward)
        lenient, f1 = lenient + (info.get("reading") == "lenient"), info.get("answer_f1")
        progress = final if goals is None else goals
        wrong = [
            _said(name, recorded, replayed)
            for name, recorded, replayed in (
                ("action", turn.action, info["action"]),
                ("verdict", turn.verdict.value, str(info["verdict"])),
                ("reward", turn.reward, float(reward)),
                ("progress", turn.progress, progress),
            )
            if not alike(recorded, replayed)
        ]
        if wrong:
            yield f"turn {turn.index}: {'; '.join(wrong)}"
            return
        end = Status.COMPLETED if terminated else Status.TRUNCATED_TURNS if truncated else None

    # how the episode ended, and what it was worth; older files do not state F1
    recorded_f1 = episode.meta.get("answer_f1")
    stopped = episode.status in (Status.COMPLETED, Status.TRUNCATED_TURNS)
    if episode.status != end if stopped else end is not None:
        yield _said("status", episode.status.value, "unfinished" if end is None else end.value)
    for name, recorded, replayed in (
        ("success", episode.success, success),
        ("score", episode.score, final),
        ("return", episode.episode_return, total),
        ("goal_rate", episode.meta.get("goal_rate"), goals),
        ("answer_f1", recorded_f1, None if recorded_f1 is None else f1),
        (LENIENT, episode.meta.get(LENIENT, 0), lenient),
        ("final observation", episode.final_observation, observation),
    ):
        if not alike(recorded, replayed):
            yield _said(name, recorded, replayed)


def _said(name: str, recorded: object, replayed: object) -> str:
    texts = [excerpt(repr(value), 80) for value in (recorded, replayed)]
    return f"{name} is {texts[0]} in the file, {texts[1]} when it is played"


def _table(result: PackedResult) -> Iterator[str]:
    """Differences between the table in the file and that of its episodes."""
    try:
        scores: Scores = score(result.episodes, result.spec.play)
    except TurngymError as error:
        yield f"table: {error}"
        return
    computed = dict(flat("", json.loads(json.dumps(scores.to_json()))))
    recorded = dict(flat("", result.scores))
    for name in sorted(recorded.keys() | computed.keys()):
        # older files do not state pass^k
        if ".pass_all." in name and name not in recorded:
            continue
        if not alike(recorded.get(name), computed.get(name)):
            yield f"table: {name} is {recorded.get(name)!r} in the file, {computed.get(name)!r} of its episodes"


def play_again(
    result: PackedResult,
    agent: str,
    *,
    tasks: int | None = None,
    panel: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[str]:
    """Lets `agent` play the first `tasks` tasks (default: all) and names where it answers otherwise than recorded.

    It plays with the recorded preset, samples, seed and temperature. The same model with the same seed gives the same
    episodes, up to the rounding of another machine.

    Args:
        panel, env_kwargs: as for `check_result`.
        settings: those of `evaluate` that the file does not say, such as the device.
    """
    arguments, play, spec = env_kwargs or {}, result.spec.play, result.spec
    known_panel = _panel(result, panel)
    sampling = play.tasks.sampling if isinstance(play.tasks, OnPanel) else None
    limits = [tasks]
    if isinstance(sampling, PartOfPanel):
        # a recorded choice is made again
        limits.append(sampling.limit)
        settings["spread"] = sampling.spread
    if counts := [count for count in limits if count is not None]:
        settings["limit"] = min(counts)
    if (temperature := getattr(spec.agent, "temperature", None)) is not None:
        settings["temperature"] = temperature
    again = evaluate(
        known_panel,
        agent,
        preset=spec.preset,
        samples=play.samples,
        seed=play.seed,
        env_kwargs={**stated(play, known_panel, arguments).playable, **arguments},
        verify=False,
        **settings,
    )
    differences = []
    was, current = (getattr(player.agent, "weights", "") for player in (spec, again.spec))
    if was and was != current:
        differences.append(f"model: its weights are {current}, the file names {was}")
    recorded = {(episode.task.task_id, episode.sample): episode for episode in result.episodes}
    for episode in again.episodes:
        key = episode.task.task_id, episode.sample
        if key not in recorded:
            differences.append(f"{key[0]} sample {key[1]}: it is not in the file")
        elif (line := first_difference(recorded[key].turns, episode.turns)) is not None:
            differences.append(f"{key[0]} sample {key[1]}, {line}")
    return differences


def first_difference(recorded: Sequence[Turn], now: Sequence[Turn]) -> str | None:
    """The first turn whose responses differ, in words; None if all are equal."""
    for first, second in zip(recorded, now, strict=False):
        if first.response != second.response:
            return f"turn {first.index}: {_said('response', first.response, second.response)}"
    return None if len(recorded) == len(now) else _said("number of turns", len(recorded), len(now))
