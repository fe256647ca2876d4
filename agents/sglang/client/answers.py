"""Parses the JSON answers of /generate into arrays and checks that ids, log-probabilities and versions agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.sglang.client.requests import SCORE_TEMPERATURE
from turngym.agents.sglang.errors import BadAnswer, ServerError

VersionSpan = tuple[str, int, int]
"""A weight version and the half-open range of response ids that it drew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedPart:
    """One answer of /generate: ids int32 [R], log-probabilities float32 [R], and the weights that sampled them."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str
    """`stop`, `length` or `abort`."""
    spans: tuple[VersionSpan, ...]
    """Cover 0..R in order; one for an answer without ids, too."""
    cached: int
    """Prompt ids whose keys and values the server had."""
    reason: str = ""
    """Why the server aborted."""
    status: int | None = None
    """HTTP status that goes with `reason`, where the server gives one."""


def read_generation(answer: Any, where: str, asked: int) -> GeneratedPart:
    """Read the answer to a request for at most `asked` ids.

    Raises BadAnswer where ids, log-probabilities and version spans do not belong together.
    """
    meta = _meta(answer, where)
    ids = np.asarray(answer.get("output_ids") or [], np.int32)
    logprobs, named = _pairs(meta.get("output_token_logprobs") or [], where)
    if len(logprobs) != len(ids):
        raise BadAnswer(
            f"{where}: {len(ids)} ids came with {len(logprobs)} log-probabilities; both must be of one length"
        )
    if not np.array_equal(ids, named):
        first = int(np.flatnonzero(ids != named)[0])
        raise BadAnswer(f"{where}: id {first} is {ids[first]}, but its log-probability is of id {named[first]}")
    if len(ids) > asked:
        raise BadAnswer(f"{where}: {len(ids)} ids came, {asked} were asked for")
    if not np.isfinite(logprobs).all():
        raise BadAnswer(f"{where}: a log-probability is {logprobs[~np.isfinite(logprobs)][0]}; it must be finite")
    finish, reason, status = _finish(meta, where)
    return GeneratedPart(
        ids=ids,
        logprobs=logprobs,
        finish=finish,
        spans=_spans(meta, len(ids), where),
        cached=int(meta.get("cached_tokens") or 0),
        reason=reason,
        status=status,
    )


def read_scores(
    answer: Any, ids: NDArray[np.int32], start: int, where: str, *, last: int
) -> tuple[NDArray[np.float32], str]:
    """Log-probabilities of `ids[start:]`, each given the ids before it, float32 [len(ids) - start]; weight version.

    `start` is what `logprob_start_len` was. The first entry is null; it becomes nan. `last` is the largest id of the
    vocabulary, which a server calls 0 (its log-probability is right).
    Raises BadAnswer where the entries are not those of `ids`.
    """
    meta = _meta(answer, where)
    logprobs, named = _pairs(meta.get("input_token_logprobs") or [], where)
    _aligned(named, ids[start:], where, last)
    return logprobs, str(meta.get("weight_version"))


def check_temperature(answer: Any, temperature: float, where: str) -> None:
    """Raises ServerError where scores were asked for at a temperature and the answer does not say that it has it."""
    if temperature != 1.0 and _meta(answer, where).get(SCORE_TEMPERATURE) != temperature:
        raise ServerError(
            f"{where}: this server scores at temperature 1, not at {temperature:g} (releases with "
            f"{SCORE_TEMPERATURE} can): take --distill.temperature 1, or load the teacher into this process with "
            "--teacher, without --teacher-server"
        )


def read_top(
    answer: Any, name: str, start: int, positions: NDArray[np.int64], k: int, where: str
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Rows of `meta_info[name]` (`input_top_logprobs` or `input_token_ids_logprobs`) at `positions`: ids, logp [P, K].

    Entry i of the list belongs to position `start` + i. Raises BadAnswer where one is missing or not K long.
    """
    rows = _meta(answer, where).get(name) or []
    ids, logp = np.empty((len(positions), k), np.int32), np.empty((len(positions), k), np.float32)
    for line, position in enumerate(positions):
        place = int(position) - start
        row = rows[place] if 0 <= place < len(rows) else None
        if row is None or len(row) != k:
            raise BadAnswer(
                f"{where}: {0 if row is None else len(row)} of {k} log-probabilities came for position {position}"
            )
        for column, entry in enumerate(row):
            logp[line, column], ids[line, column] = entry[0], entry[1]
    if not np.isfinite(logp).all():
        raise BadAnswer(f"{where}: a log-probability is {logp[~np.isfinite(logp)][0]}; it must be finite")
    return ids, logp


def _meta(answer: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping) or not isinstance(answer.get("meta_info"), Mapping):
        raise BadAnswer(f"{where}: an answer of /generate has a meta_info; this one is {str(answer)[:200]!r}")
    meta: Mapping[str, Any] = answer["meta_info"]
    return meta


def _pairs(entries: Sequence[Any], where: str) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities (nan for null) and ids of entries [logprob, id, text]."""
    try:
        logprobs = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)
        return logprobs, np.array([entry[1] for entry in entries], np.int32)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise BadAnswer(f"{where}: log-probabilities must be [logprob, id, text]: {str(entries)[:200]}") from error


def _aligned(named: NDArray[np.int32], wanted: NDArray[np.int32], where: str, last: int) -> None:
    if len(named) != len(wanted):
        raise BadAnswer(f"{where}: {len(named)} log-probabilities came for {len(wanted)} ids")
    wrong = (named != wanted) & ((named != 0) | (wanted != last))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise BadAnswer(f"{where}: row {first} is of id {named[first]}; {wanted[first]} was asked for")


def _finish(meta: Mapping[str, Any], where: str) -> tuple[str, str, int | None]:
    """Type, message and status of the finish reason."""
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if not isinstance(reason, Mapping) or kind not in ("stop", "length", "abort"):
        raise BadAnswer(f"{where}: finish_reason is {reason!r}; it must be of type stop, length or abort")
    status = reason.get("status_code")
    return str(kind), str(reason.get("message") or ""), None if status is None else int(status)


def _spans(meta: Mapping[str, Any], count: int, where: str) -> tuple[VersionSpan, ...]:
    found = meta.get("weight_versions") or []
    if not found:
        return ((str(meta.get("weight_version")), 0, count),)
    spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in found)
    ends = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != count:
        raise BadAnswer(f"{where}: weight_versions {spans} do not cover the {count} ids one after the other")
    return spans
