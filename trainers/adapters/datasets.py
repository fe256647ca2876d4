"""Recorded episodes as Parquet and as Hugging Face data sets: one row per trajectory, ids as sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from turngym.core.episode import Episode, Status
from turngym.core.errors import TurngymError
from turngym.core.plugins import need
from turngym.core.task import Task
from turngym.core.user_files import must_be_new
from turngym.core.whole_files import written_whole
from turngym.trainers.adapters.token_session import Trajectory

_ROWS_PER_WRITE = 500
_TEXT_ONLY = dict.fromkeys(
    [
        *("prompt_ids", "response_ids", "response_mask", "logprobs", "policy_versions"),
        *("turn_starts", "turn_stops", "turn_rewards"),
    ]
)
"""What a row of an episode without tokens has of them."""


def rows(episodes: Iterable[Episode]) -> Iterator[dict[str, Any]]:
    """One row per token segment; a row without ids for an episode that has no tokens.

    `messages` (role, content) is the conversation, as supervised trainers read it.
    """
    for episode in episodes:
        task, messages = episode.task, [("system", episode.system)] if episode.system else []
        for turn in episode.turns:
            messages += [("user", turn.observation), ("assistant", turn.response)]
        # text-only episodes have no segments, and still become a row
        for segment, trajectory in enumerate(Trajectory.segments_of(episode) or [None]):
            yield {
                **{name: getattr(task, name) for name in ("env_id", "task_id", "split", "category")},
                "task_sha": task.sha256,
                **{name: getattr(episode, name) for name in ("seed", "sample", "group", "success", "score")},
                "segment": segment,
                "status": episode.status.value,
                "reward": episode.episode_return,
                "turn_verdicts": [turn.verdict.value for turn in episode.turns if turn.segment == segment],
                "messages": [{"role": role, "content": content} for role, content in messages],
                **_TEXT_ONLY,
                **({} if trajectory is None else _tokens(trajectory)),
            }


def _tokens(trajectory: Trajectory) -> dict[str, Any]:
    return trajectory.lists() | {
        "response_mask": trajectory.response_mask.tolist(),
        "turn_starts": [start for start, _ in trajectory.turn_spans],
        "turn_stops": [stop for _, stop in trajectory.turn_spans],
        "turn_rewards": list(trajectory.turn_rewards),
    }


def trajectory_of(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `rows` made this row from. Raises TurngymError for a row without token ids."""
    if row["prompt_ids"] is None:
        raise TurngymError(f"the row of {row['task_id']} sample {row['sample']} has no token ids: text-only episode")
    logprobs = row["logprobs"]
    return Trajectory(
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        response_ids=np.array(row["response_ids"], np.int32),
        response_mask=np.array(row["response_mask"], np.bool_),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        policy_versions=np.array(row["policy_versions"], np.int32),
        turn_spans=tuple(zip(row["turn_starts"], row["turn_stops"], strict=True)),
        turn_rewards=tuple(row["turn_rewards"]),
        reward=row["reward"],
        status=Status(row["status"]),
        success=row["success"],
        **{name: row[name] for name in ("task_id", "task_sha", "seed", "sample", "group")},
    )


def to_dataset(episodes: Iterable[Episode]) -> Any:
    """A `datasets.Dataset` in memory; needs `pip install 'turngym[datasets]'`."""
    datasets = need("datasets", "to_dataset()", "datasets")
    import pyarrow as pa

    # the schema is given: pyarrow infers type null for a column without any value
    return datasets.Dataset(pa.Table.from_pylist(list(rows(episodes)), schema=_schema(pa)))


def write_parquet(episodes: Iterable[Episode], path: str | Path) -> int:
    """Write a Parquet file, a few hundred rows at a time; the number of rows. Needs `pip install 'turngym[parquet]'`.

    Raises TurngymError where the file exists already.
    """
    pa = need("pyarrow", "write_parquet()", "parquet")
    return write_table(rows(episodes), path, _schema(pa))


def write_table(table: Iterable[Mapping[str, Any]], path: str | Path, schema: Any) -> int:
    """Write rows as a Parquet file of a pyarrow `schema`, a few hundred at a time; their number.

    Raises TurngymError where the file exists already.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    total, waiting = 0, iter(table)
    must_be_new(Path(path), TurngymError)
    # a Parquet file without its footer, which comes last, cannot be read at all
    with (
        written_whole(path) as scratch,
        scratch.open("wb") as file,
        pq.ParquetWriter(file, schema) as writer,
    ):
        while chunk := list(islice(waiting, _ROWS_PER_WRITE)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
            total += len(chunk)
    return total


def _schema(pa: Any) -> Any:
    text, number, real, ids = pa.string(), pa.int64(), pa.float64(), pa.list_(pa.int32())
    return pa.schema(
        [
            *((name, text) for name in ("env_id", "task_id", "task_sha", "split", "category")),
            *((name, number) for name in ("seed", "sample", "group", "segment")),
            *[("status", text), ("success", pa.bool_()), ("reward", real), ("score", real)],
            *[("prompt_ids", ids), ("response_ids", ids), ("response_mask", pa.list_(pa.bool_()))],
            *[("logprobs", pa.list_(pa.float32())), ("policy_versions", ids)],
            *[("turn_starts", ids), ("turn_stops", ids), ("turn_rewards", pa.list_(real))],
            *[("turn_verdicts", pa.list_(text)), ("messages", pa.list_(_message(pa)))],
        ]
    )


def _message(pa: Any) -> Any:
    return pa.struct([("role", pa.string()), ("content", pa.string())])


# Tasks as rows of a data set that verl-style trainers read: the first prompt, and which task our agent loop plays.

AGENT = "turngym"
"""The agent loop's name in verl's configuration (docs/adapters.md)."""


def prompt_row(task: Task, system: str, observation: str, *, index: int, seed: int = 0) -> dict[str, Any]:
    """One row: `prompt` is what the policy reads first; `task_id`, `seed` and `agent_name` are for our agent loop.

    The reward comes from the environment; `ground_truth` names the task for those who look it up.
    """
    system_messages = [("system", system)] if system else []
    return {
        "data_source": task.env_id,
        "prompt": [{"role": role, "content": text} for role, text in (*system_messages, ("user", observation))],
        "ability": task.category,
        "reward_model": {"style": "rule", "ground_truth": task.task_id},
        "extra_info": {
            "split": task.split,
            "index": index,
            "task_id": task.task_id,
            "task_sha": task.sha256,
            "category": task.category,
        },
        "agent_name": AGENT,
        "task_id": task.task_id,
        "seed": seed,
    }


def write_prompt_rows(rows: Iterable[dict[str, Any]], path: str | Path) -> int:
    """Write rows of `prompt_row` as Parquet; their number. Needs `pip install 'turngym[parquet]'`.

    Raises TurngymError where the file exists already.
    """
    pa = need("pyarrow", "write_prompt_rows()", "parquet")
    return write_table(rows, path, _prompt_schema(pa))


def _prompt_schema(pa: Any) -> Any:
    text, number = pa.string(), pa.int64()
    info = [("split", text), ("index", number), ("task_id", text), ("task_sha", text), ("category", text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(_message(pa))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(info)),
            ("agent_name", text),
            ("task_id", text),
            ("seed", number),
        ]
    )
