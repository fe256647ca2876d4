"""Build, inspect, verify and plan retrieval indexes; find the nouns of a shop's titles.

Examples:
    turngym index build --corpus wiki.jsonl --kind bm25 --out wiki-bm25
    turngym index build --corpus wiki.jsonl --kind dense --encoder hf:models/e5-base-v2 --factory IVF4096,SQ8 --out wiki
    turngym index verify wiki
    turngym index plan --passages 21000000 --dim 768
    turngym index nouns --profile full-human --data ~/webshop
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turngym.core.files import locked_file
from turngym.core.numbers import Count
from turngym.core.setting import Positional
from turngym.core.spec import Spec, Unread, needing
from turngym.core.tables import print_table
from turngym.envs.webshop.nouns import SPACY_MODEL, record_nouns
from turngym.retrieval.encoders import is_built_in
from turngym.retrieval.index import BuildPlan, build_index, check_files, describe_index, read_manifest
from turngym.retrieval.index_costs import plan_table
from turngym.scripts.options import run_verb


class Build(Spec):
    """Build an index folder from a corpus; after a kill the same command goes on where it was."""

    plan: BuildPlan
    restart: bool = False
    """Throw an unfinished build away instead of going on with it."""
    force: bool = False
    """Replace the folder if it exists, once the new index is complete."""

    def unread(self) -> Unread:
        encoder = self.plan.encoder
        if self.plan.kind == "bm25":
            vectors = ("encoder", "style", "passage_model", "device", "dtype", "dim", "factory", "parameters")
            yield from needing("--kind dense or hybrid", *(f"plan.{name}" for name in vectors), "plan.shard_rows")
        if encoder == "hashing" or not is_built_in(encoder):
            yield from needing("--encoder hf:MODEL", "plan.style", "plan.passage_model", "plan.dtype")
        if encoder == "hashing":
            yield from needing("an --encoder that is a model", "plan.device")
        else:
            yield from needing("--encoder hashing", "plan.dim")


class Inspect(Spec):
    """Show what an index was built from and compare the sizes of its files; status 1 if any differs."""

    folder: Positional[Path]
    """Folder of the index."""


class Verify(Spec):
    """Does what `inspect` does, and compares the hash of every file; status 1 if any differs."""

    folder: Positional[Path]
    """Folder of the index."""


class Plan(Spec):
    """What to choose for a corpus of a given size: memory, disk and time, from measured slopes."""

    passages: Count = 21_000_000
    """Passages of the corpus."""
    dim: Count = 768
    """Dimensions of the encoder."""


class Nouns(Spec):
    """Find the nouns of all titles of a WebShop once, as the original's reward does, so that its scores are exact.
    After a kill the same command goes on where it was."""

    profile: str
    """The shop, for example `full-human`. The nouns of the original's 1,000 products come with turngym."""
    data: Path | None = None
    """Folder of the shop's files; by default $WEBSHOP_DATA."""
    model: str = SPACY_MODEL
    """spaCy's model, by name or folder; its version becomes part of every result."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym index` with `argv` (without the verb itself)."""
    verbs: dict[type, Callable[[Any], int]] = {Build: _build, Inspect: _inspect, Verify: _inspect, Plan: _plan}
    verbs |= {Nouns: _nouns}
    return run_verb(verbs, argv, prog="turngym index", about=__doc__)


def _build(options: Build) -> int:
    with locked_file(options.plan.out), _bars() as progress:
        build_index(options.plan, progress=progress, restart=options.restart, force=options.force)
    return _inspect(Inspect(folder=options.plan.out))


def _inspect(options: Inspect | Verify) -> int:
    manifest = read_manifest(options.folder)
    rows = [["index", str(options.folder)], *describe_index(manifest)]
    # Lines, not a table: hashes and fingerprints must not be cut to the width of the terminal.
    print("\n".join(f"{name:<{max(len(row[0]) for row in rows)}}  {value}" for name, value in rows))
    verify = isinstance(options, Verify)
    problems = check_files(options.folder, manifest, contents=verify)
    for problem in problems:
        print(f"{options.folder}: {problem}", file=sys.stderr)
    if verify and not problems:
        print(f"all {len(manifest.files)} files are as built")
    return 1 if problems else 0


def _plan(options: Plan) -> int:
    table, notes = plan_table(options.passages, options.dim)
    print_table(table, title=f"{options.passages:,} passages, {options.dim} dimensions")
    print("\n".join(notes))
    return 0


def _nouns(options: Nouns) -> int:
    with _bars() as progress:
        table = record_nouns(
            options.profile,
            options.data,
            model=options.model,
            progress=lambda stage, done: progress(stage, done, None),
        )
    print(f"the nouns of {len(table):,} titles by {table.name}; results of {options.profile} are scored with them")
    return 0


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
