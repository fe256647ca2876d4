"""An episode as one line of JSON, exactly and with a checksum; docs/traces.md names the fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.envs.common.sealed_line import check_seal, seal
from turngym.envs.core import Task, TurngymError, Verdict
from turngym.envs.episode import Episode, Span, Status, TopK, Turn

SCHEMA = 1
"""Version of the line format; a reader refuses newer ones."""


class TraceError(TurngymError):
    """A trace file that cannot be read at all, or an episode that cannot be written."""


def episode_to_json(episode: Episode) -> str:
    """One line of ASCII JSON without a newline; equal episodes give equal lines. Raises TraceError for bad `meta`."""
    record = {
        "schema": SCHEMA,
        "task": {name: getattr(episode.task, name) for name in _TASK_FIELDS},
        "seed": int(episode.seed),
        "sample": int(episode.sample),
        "group": int(episode.group),
        "status": episode.status.value,
        "success": bool(episode.success),
        "ret": _number(episode.episode_return),
        "score": _number(episode.score),
        "system": episode.system,
        "segments": [segment.tolist() for segment in episode.segments],
        "turns": [_turn_to_record(turn) for turn in episode.turns],
        "final_observation": episode.final_observation,
        "timings": {name: _number(value) for name, value in episode.timings.items()},
        "meta": dict(episode.meta),
    }
    try:
        # ASCII keeps lone surrogates, which UTF-8 cannot encode, and no torn line ends inside a character
        return seal(json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":")))
    except (TypeError, ValueError) as error:
        where = f"task {episode.task.task_id}, sample {episode.sample}"
        raise TraceError(
            f"an episode ({where}) cannot be written as JSON: {error}; its meta is {episode.meta!r}"
        ) from None


def episode_from_json(line: str) -> Episode:
    """The episode of one line. Raises TraceError for a newer schema, ValueError, KeyError or TypeError for damage.

    A line with a checksum that is not its own is damaged; lines of older versions have none.
    """
    check_seal(line.encode("utf-8", "surrogatepass"))
    record = json.loads(line)
    if not isinstance(record, Mapping) or "schema" not in record:
        raise ValueError('not an episode: there is no "schema"')
    version = record["schema"]
    if isinstance(version, int) and version > SCHEMA:
        raise TraceError(f"schema version {version}; this turngym reads up to version {SCHEMA}: upgrade turngym")
    if version != SCHEMA:
        raise ValueError(f"schema version {version!r} is not a number from 1 to {SCHEMA}")
    return Episode(
        task=Task(**record["task"]),
        seed=record["seed"],
        sample=record["sample"],
        group=record["group"],
        status=Status(record["status"]),
        success=record["success"],
        episode_return=float(record["ret"]),
        score=float(record["score"]),
        system=record["system"],
        segments=tuple(np.array(segment, dtype=np.int32) for segment in record["segments"]),
        turns=tuple(_turn_from_record(turn) for turn in record["turns"]),
        final_observation=record["final_observation"],
        timings={name: float(value) for name, value in record["timings"].items()},
        meta=record["meta"],
    )


_TASK_FIELDS = ("env_id", "task_id", "sha256", "split", "category")


def _turn_to_record(turn: Turn) -> dict[str, Any]:
    teacher = turn.teacher
    return {
        "index": int(turn.index),
        "observation": turn.observation,
        "admissible": None if turn.admissible is None else list(turn.admissible),
        "response": turn.response,
        "action": turn.action,
        "verdict": turn.verdict.value,
        "reward": _number(turn.reward),
        "segment": int(turn.segment),
        "prompt_span": [int(end) for end in turn.prompt_span],
        "response_span": [int(end) for end in turn.response_span],
        "logprobs": None if turn.logprobs is None else _floats(turn.logprobs),
        "finish": turn.finish,
        "policy_version": int(turn.policy_version),
        "origin": turn.origin,
        "judge_scores": None if turn.judge_scores is None else [_number(score) for score in turn.judge_scores],
        "hint": turn.hint,
        "teacher": None
        if teacher is None
        else {"k": teacher.ids.shape[1], "ids": teacher.ids.ravel().tolist(), "logp": _floats(teacher.logp.ravel())},
        **_later_fields(turn),
    }


def _later_fields(turn: Turn) -> dict[str, Any]:
    """Fields that schema 1 got later: written only where they are known, so that older lines stay as they were."""
    ids, votes = turn.hint_prompt_ids, turn.judge_votes
    values = {
        "progress": None if turn.progress is None else _number(turn.progress),
        "judge_votes": None if votes is None else list(votes),
        "judge_cut": turn.judge_cut or None,
        "hint_prompt_ids": None if ids is None else ids.tolist(),
        "excluded": turn.excluded,
        "begun": turn.begun or None,
        "version_spans": [list(span) for span in turn.version_spans] or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _turn_from_record(record: Mapping[str, Any]) -> Turn:
    admissible, scores, logprobs = record["admissible"], record["judge_scores"], record["logprobs"]
    progress, votes, hint_ids = (record.get(name) for name in ("progress", "judge_votes", "hint_prompt_ids"))
    return Turn(
        index=record["index"],
        observation=record["observation"],
        admissible=None if admissible is None else tuple(admissible),
        response=record["response"],
        action=record["action"],
        verdict=Verdict(record["verdict"]),
        reward=float(record["reward"]),
        segment=record["segment"],
        prompt_span=_span(record["prompt_span"]),
        response_span=_span(record["response_span"]),
        logprobs=None if logprobs is None else _float_array(logprobs),
        finish=record["finish"],
        policy_version=record["policy_version"],
        origin=record["origin"],
        judge_scores=None if scores is None else tuple(float(score) for score in scores),
        progress=None if progress is None else float(progress),
        judge_votes=None if votes is None else tuple(votes),
        judge_cut=record.get("judge_cut", 0),
        hint=record["hint"],
        hint_prompt_ids=None if hint_ids is None else np.array(hint_ids, dtype=np.int32),
        excluded=record.get("excluded"),
        begun=record.get("begun", 0),
        version_spans=tuple((version, start, end) for version, start, end in record.get("version_spans", ())),
        teacher=_teacher(record["teacher"]),
    )


def _teacher(record: Mapping[str, Any] | None) -> TopK | None:
    if record is None:
        return None
    shape = (-1, record["k"])
    ids = np.array(record["ids"], dtype=np.int32).reshape(shape)
    return TopK(ids=ids, logp=_float_array(record["logp"]).reshape(ids.shape))


def _span(pair: list[int]) -> Span:
    start, stop = pair
    return start, stop


def _number(value: float) -> float | str:
    # JSON has no infinities; float() reads these strings back
    return float(value) if math.isfinite(value) else str(float(value))


def _floats(values: NDArray[np.float32]) -> list[float | str]:
    # NumPy's shortest decimal form of a float32 is half as long as the same number as a float64, and as exact
    return [_number(float(text)) for text in np.asarray(values, dtype=np.float32).astype(str)]


def _float_array(values: list[float | str]) -> NDArray[np.float32]:
    return np.array([float(value) for value in values], dtype=np.float32)
