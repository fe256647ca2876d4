"""Build, inspect, verify and plan retrieval indexes.

Examples:
    turngym index build --corpus wiki.jsonl --kind bm25 --out wiki-bm25
    turngym index build --corpus wiki.jsonl --kind dense --encoder hf:models/e5-base-v2 --factory IVF4096,SQ8 --out wiki
    turngym index verify wiki
    turngym index plan --passages 21000000 --dim 768 --html plan.html
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import locked_file
from turngym.envs.core.tables import print_table
from turngym.retrieval.core import RetrievalError
from turngym.scripts.options import run_verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Build an index folder from a corpus; after a kill the same command goes on where it was."""

    corpus: Path
    """JSONL, plain or .gz: {"id", "contents"} or {"id", "title", "text"} per line."""
    out: Path
    """Folder of the index; must not exist yet."""
    kind: Literal["bm25", "dense", "hybrid"] = "bm25"
    """Words, vectors, or both by reciprocal rank fusion."""
    encoder: str = "hashing"
    """hashing (no model), hf:MODEL, a folder or hub name, or an encoder of yours as `package.module:name`."""
    style: str | None = None
    """Prefixes and pooling of the model: e5, bge, dpr or plain; by default what its name says."""
    passage_model: str | None = None
    """Second model, where passages have their own (dpr)."""
    device: str = "cpu"
    """Where a Hugging Face encoder runs."""
    dim: int = 1024
    """Dimensions of the hashing encoder."""
    factory: str = "Flat"
    """faiss index: Flat, SQ8, HNSW32, IVF4096,SQ8, ... (`turngym index plan` helps to choose)."""
    set: tuple[str, ...] = ()
    """Search settings to store, for example nprobe=64 or efSearch=128; by default what suits the factory."""
    shard_rows: int = 65_536
    """Passages per shard: what a kill can cost."""
    restart: bool = False
    """Throw an unfinished build away instead of going on with it."""
    force: bool = False
    """Replace the folder if it exists, once the new index is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Show what an index was built from and compare the sizes of its files; status 1 if any differs."""

    folder: tyro.conf.Positional[Path]
    """Folder of the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """As `inspect`, and compare the hash of every file; status 1 if any differs."""

    folder: tyro.conf.Positional[Path]
    """Folder of the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to choose for a corpus of a given size: memory, disk and time, from measured slopes."""

    passages: int = 21_000_000
    """Passages of the corpus."""
    dim: int = 768
    """Dimensions of the encoder."""
    html: Path | None = None
    """Write one self-contained page here instead of printing."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym index` with `argv` (without the verb itself)."""
    verbs: dict[type, Callable[[Any], int]] = {Build: _build, Inspect: _inspect, Verify: _inspect, Plan: _plan}
    try:
        return run_verb(verbs, argv, prog="turngym index", description=(__doc__ or "").split("\n")[0])
    except RetrievalError as error:
        raise TurngymError(str(error)) from error


def _build(options: Build) -> int:
    from turngym.retrieval.index import BuildPlan, build_index

    plan = BuildPlan(
        corpus=options.corpus,
        out=options.out,
        kind=options.kind,
        encoder=options.encoder,
        style=options.style,
        passage_model=options.passage_model,
        device=options.device,
        dim=options.dim,
        factory=options.factory,
        parameters=_settings(options.set),
        shard_rows=options.shard_rows,
    )
    try:
        with locked_file(options.out), _bars() as progress:
            build_index(plan, progress=progress, restart=options.restart, force=options.force)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {options.out}.building", file=sys.stderr)
        return 130
    return _inspect(Inspect(folder=options.out))


def _inspect(options: Inspect | Verify) -> int:
    from turngym.retrieval.index import check_files, describe_index, read_manifest

    manifest = read_manifest(options.folder)
    rows = [["index", str(options.folder)], *describe_index(manifest)]
    # Lines, not a table: hashes and fingerprints must not be cut to the width of the terminal.
    print("\n".join(f"{name:<{max(len(row[0]) for row in rows)}}  {value}" for name, value in rows))
    hashes = isinstance(options, Verify)
    problems = check_files(options.folder, manifest, hashes=hashes)
    for problem in problems:
        print(f"{options.folder}: {problem}", file=sys.stderr)
    if hashes and not problems:
        print(f"all {len(manifest.files)} files are as built")
    return 1 if problems else 0


def _plan(options: Plan) -> int:
    from turngym.retrieval.plan import plan_page, plan_table

    if options.html is not None:
        options.html.write_text(plan_page(options.passages, options.dim), encoding="utf-8")
        print(options.html)
        return 0
    table, notes = plan_table(options.passages, options.dim)
    print_table(table, title=f"{options.passages:,} passages, {options.dim} dimensions")
    print("\n".join(notes))
    return 0


def _settings(pairs: Sequence[str]) -> Mapping[str, float]:
    found = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise TurngymError(f"--set {pair!r}: write NAME=NUMBER, for example nprobe=64") from None
    return found


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """One bar per stage on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    bars: dict[str, TaskID] = {}
    shape = (TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining())
    with Progress(*shape, console=Console(stderr=True)) as progress:

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=total)
            progress.update(bars[stage], completed=done, total=total)

        yield report
