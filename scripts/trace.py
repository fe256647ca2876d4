"""Read recorded episodes: print, filter, verify, export to Parquet, view in a browser, or one HTML page of a few.

Examples:
    turngym trace print runs/a/eval.jsonl --outcome lost
    turngym trace view before=runs/a/eval.jsonl after=runs/b/eval.jsonl
    turngym trace records runs/live --turns
    turngym trace html runs/a/eval.jsonl --out lost.html --outcome lost --tokenizer runs/a/student
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode, Turn
from turngym.envs.spaces import printable
from turngym.envs.trace import TraceWriter
from turngym.scripts.traces.records import Records, records
from turngym.scripts.traces.select import Select, require_traces, selected
from turngym.scripts.traces.verify import Verify, verify
from turngym.scripts.traces.view import View, view

Files = tyro.conf.Positional[tuple[Path, ...]]
Flat = Annotated[Select, tyro.conf.arg(name="")]

_ROWS_PER_WRITE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """Print a line per episode, or with --turns everything that was said."""

    files: Files
    """Trace files (JSON lines)."""
    select: Flat
    turns: bool = False
    """Print every turn: observation, response, verdict, reward."""
    width: int = 2000
    """Longest text printed of one observation or response, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Copy the chosen episodes into a new trace file."""

    files: Files
    """Trace files (JSON lines)."""
    out: Path
    """The new file; must not exist."""
    select: Flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet:
    """Write a Parquet file (needs `pip install 'turngym[parquet]'`)."""

    files: Files
    """Trace files (JSON lines)."""
    out: Path
    """The Parquet file; must not exist."""
    select: Flat
    rows: Literal["turns", "trajectories"] = "turns"
    """`turns`: one row per turn, to look at; `trajectories`: one per episode with token ids, mask and
    log-probabilities, to train on with other trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Html:
    """Write one self-contained page for reading episodes turn by turn in a browser."""

    files: Files
    """Trace files (JSON lines)."""
    out: Path
    """The page; must not exist unless --overwrite is given."""
    select: Flat
    tokenizer: str | None = None
    """Folder or name of the tokenizer, to show the text of each token beside its log-probability."""
    title: str = "Episodes"
    """Heading of the page."""
    overwrite: bool = False
    """Replace an existing page."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym trace` with `argv` (without the verb itself)."""
    verbs: Any = Annotated[
        Annotated[Print, tyro.conf.subcommand(name="print")]
        | Annotated[Filter, tyro.conf.subcommand(name="filter")]
        | Annotated[Parquet, tyro.conf.subcommand(name="parquet")]
        | Annotated[Html, tyro.conf.subcommand(name="html")]
        | Annotated[Verify, tyro.conf.subcommand(name="verify")]
        | Annotated[View, tyro.conf.subcommand(name="view")]
        | Annotated[Records, tyro.conf.subcommand(name="records")],
        tyro.conf.arg(name=""),
    ]
    command = tyro.cli(verbs, args=list(argv), prog="turngym trace", description=(__doc__ or "").split("\n")[0])
    actions: dict[type, Callable[[Any], int]] = {
        Print: _print,
        Filter: _filter,
        Parquet: _parquet,
        Html: _html,
        Verify: verify,
        View: view,
        Records: records,
    }
    return actions[type(command)](command)


def _print(command: Print) -> int:
    episodes = won = 0
    for episode in selected(command.files, command.select):
        print(printable(episode_line(episode)))
        if command.turns:
            print(printable("\n".join(turn_lines(episode, command.width))))
        episodes += 1
        won += episode.success
    print(f"{episodes} episodes, {won} won")
    return 0


def _filter(command: Filter) -> int:
    _must_be_new(command.out)
    require_traces(command.files)
    count = 0
    with TraceWriter(command.out) as writer:
        for episode in selected(command.files, command.select):
            writer.write(episode)
            count += 1
    print(f"{count} episodes in {command.out}")
    return 0


def _parquet(command: Parquet) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise TurngymError("Parquet needs pyarrow: pip install 'turngym[parquet]'") from error
    _must_be_new(command.out)
    require_traces(command.files)
    if command.rows == "trajectories":
        from turngym.trainers.adapters.datasets import write_parquet

        print(f"{write_parquet(selected(command.files, command.select), command.out)} trajectories in {command.out}")
        return 0
    command.out.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([(name, _arrow_type(pa, kind)) for name, kind in COLUMNS.items()])
    total = 0
    with pq.ParquetWriter(command.out, schema) as writer:
        for rows in _chunks(turn_row(episode, turn) for episode, turn in _all_turns(command)):
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            total += len(rows)
    print(f"{total} turns in {command.out}")
    return 0


def _html(command: Html) -> int:
    from turngym.scripts.traces.html import load_decoder, write_page

    if not command.overwrite:
        _must_be_new(command.out)
    decode = None if command.tokenizer is None else load_decoder(command.tokenizer)
    episodes = selected(command.files, command.select)
    count, size = write_page(command.out, episodes, title=command.title, decode=decode)
    print(f"{count} episodes in {command.out} ({size / 1e6:.1f} MB); open it in a browser")
    return 0


def episode_line(episode: Episode) -> str:
    """`won  completed  12 turns  return 1.00  heat  task sample 0`."""
    outcome = "won " if episode.success else "lost"
    head = f"{outcome} {episode.status.value:<16} {episode.depth:>3} turns  return {episode.episode_return:+.2f}"
    return f"{head}  {episode.task.category:<8} {episode.task.task_id} sample {episode.sample}"


def turn_lines(episode: Episode, width: int) -> list[str]:
    """Everything that was said in an episode, as lines for a terminal."""
    lines: list[str] = []
    for turn in episode.turns:
        lines.append(_block(f"[{turn.index}] environment", turn.observation, width))
        verdict = f"{turn.verdict.value}, reward {turn.reward:g}, {turn.finish}"
        lines.append(_block(f"[{turn.index}] {turn.origin} ({verdict})", turn.response, width))
    return [*lines, _block("end", episode.final_observation, width), ""]


COLUMNS: dict[str, str] = {
    **dict.fromkeys(("env_id", "task_id", "task_sha", "split", "category"), "string"),
    **dict.fromkeys(("seed", "sample", "group", "depth"), "int64"),
    "status": "string",
    "success": "bool_",
    **dict.fromkeys(("return", "score"), "float64"),
    "turn": "int64",
    **dict.fromkeys(("observation", "response", "action", "verdict"), "string"),
    "reward": "float64",
    "segment": "int64",
    "response_ids": "list int32",
    "logprobs": "list float32",
    **dict.fromkeys(("finish", "origin"), "string"),
    "policy_version": "int64",
    "judge_scores": "list float64",
    "hint": "string",
}
"""Columns of the Parquet export; one row is one turn."""


def turn_row(episode: Episode, turn: Turn) -> dict[str, Any]:
    """One turn with the facts of its episode, under the names of COLUMNS; what is unknown is None."""
    task = episode.task
    ids = episode.response_ids(turn).tolist() if turn.response_length else None
    values = (
        *(task.env_id, task.task_id, task.sha256, task.split, task.category),
        *(episode.seed, episode.sample, episode.group, episode.depth),
        *(episode.status.value, episode.success, episode.episode_return, episode.score),
        *(turn.index, turn.observation, turn.response, turn.action, turn.verdict.value, turn.reward),
        *(turn.segment, ids, None if turn.logprobs is None else turn.logprobs.tolist()),
        *(turn.finish, turn.origin, turn.policy_version),
        *(None if turn.judge_scores is None else list(turn.judge_scores), turn.hint),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _all_turns(command: Parquet) -> Iterator[tuple[Episode, Turn]]:
    for episode in selected(command.files, command.select):
        for turn in episode.turns:
            yield episode, turn


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _ROWS_PER_WRITE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _arrow_type(pa: Any, kind: str) -> Any:
    words = kind.split()
    inner = getattr(pa, words[-1])()
    return pa.list_(inner) if len(words) == 2 else inner


def _block(head: str, text: str, width: int) -> str:
    shown = text if len(text) <= width else f"{text[:width]}... ({len(text)} characters)"
    return f"  {head}\n" + "\n".join(f"    {line}" for line in shown.splitlines() or [""])


def _must_be_new(path: Path) -> None:
    if path.exists():
        raise TurngymError(f"{path} exists already and is kept as it is; choose another --out")
