"""Files as versions before checksums wrote them, and readers that compare as those did: what flips find there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from turngym.scripts.bench.faults import targets
from turngym.scripts.bench.faults.targets import Found


def _unsealed_lines(write: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        write(folder)
        path = folder / name
        path.write_text("".join(line.rpartition(',"crc"')[0] + "}\n" for line in path.read_text().splitlines()))

    return written


def _without(path: Path, *names: str) -> dict[str, Any]:
    """A JSON file without some of its fields."""
    content: dict[str, Any] = json.loads(path.read_text())
    content = {name: value for name, value in content.items() if name not in names}
    path.write_text(json.dumps(content))
    return content


def _drop(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.rglob(pattern):
            path.unlink()


def write_index(folder: Path) -> None:
    targets.write_index(folder)
    _drop(folder, "*.crc.npy")
    for path in folder.rglob("passages.json"):
        _without(path, "crc32")
    manifest = folder / "index" / "manifest.json"
    content = _without(manifest, "crc32")
    # their hashes are of what was there before
    files = {name: facts for name, facts in content["files"].items() if (folder / "index" / name).is_file()}
    files = {name: facts for name, facts in files.items() if not name.endswith("passages.json")}
    manifest.write_text(json.dumps({**content, "files": files}))


def read_index(folder: Path) -> Found:
    """Hashes of files were there, and compared by `turngym index verify` alone."""
    with patch("turngym.retrieval.mapped.CHECKED", -1):
        return targets.read_index(folder)


def write_shop(folder: Path) -> None:
    targets.write_shop(folder)
    for path in folder.rglob("manifest.json"):
        if "report" in json.loads(path.read_text()):
            _without(path, "crc32", "files")
    _drop(folder, "products.crc.npy")


def write_model(folder: Path) -> None:
    targets.write_model(folder)
    _drop(folder, "turngym.sums")


def write_checkpoint(folder: Path) -> None:
    targets.write_checkpoint(folder)
    _drop(folder, "turngym.sums")
    for path in folder.rglob("state.json"):
        _without(path, "crc32")


OLDER: dict[str, tuple[Callable[[Path], None], Callable[[Path], Found]]] = {
    "trace": (_unsealed_lines(targets.write_trace, "t.jsonl"), targets.read_trace),
    "proxy records": (_unsealed_lines(targets.write_records, "records.jsonl"), targets.read_records),
    "index": (write_index, read_index),
    "mapped shop": (write_shop, targets.read_shop),
    "model folder": (write_model, targets.read_model),
    "checkpoint": (write_checkpoint, targets.read_checkpoint),
}
"""By the name of the kind in `targets.TARGETS`: what writes, what reads."""
