"""Where an index on disk is made: a folder beside the final one with finished runs, locked, moved at the end."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from turngym.retrieval.core import RetrievalError
from turngym.retrieval.lucene.analysis import ANALYSIS
from turngym.retrieval.lucene.files import is_index
from turngym.retrieval.lucene.parts import VERSION
from turngym.retrieval.lucene.runs import Run

_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Expected:
    """A run that an earlier build left: documents up to its end, and their content hash."""

    documents: int
    content: str


class Workshop:
    """`<target>.building`; a context manager. What a killed build left in it is offered run by run.

    Raises:
        RetrievalError: the target holds something that is no index, or another process builds it.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.with_name(target.name + ".building")
        self.runs: list[Path] = []
        """Runs of this build, in order."""
        self._left: list[Expected] = []
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Workshop:
        if self.target.exists() and not _replaceable(self.target):
            raise RetrievalError(f"{self.target} exists and is no BM25 index; name an empty or a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder / "lock")
        self._left = self._read_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()
        # Only a build that was cut off is worth going on with; bad input would be bad again.
        if kind is None or issubclass(kind, RetrievalError) or not self._left + self._done():
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def expected(self) -> Expected | None:
        """The next run that an earlier build left."""
        return self._left[len(self.runs)] if len(self.runs) < len(self._left) else None

    def accept(self) -> None:
        """The documents are those of the expected run: keep it."""
        self.runs.append(self._run(len(self.runs)))

    def forget(self) -> None:
        """The documents differ: drop the expected run and those after it."""
        del self._left[len(self.runs) :]
        self._write_state()

    def save(self, run: Run, documents: int, content: str) -> None:
        """Write the next run."""
        path = self._run(len(self.runs))
        shutil.rmtree(path, ignore_errors=True)
        run.save(path)
        self.runs.append(path)
        self._left.append(Expected(documents, content))
        self._write_state()

    def fresh(self) -> Path:
        """An empty folder for the final files."""
        path = self.folder / "final"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def publish(self) -> None:
        """Put the final files in place of whatever index was there."""
        old = self.folder / "old"
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        (self.folder / "final").rename(self.target)

    def _run(self, number: int) -> Path:
        return self.folder / f"run-{number:05d}"

    def _done(self) -> list[Expected]:
        return self._left[: len(self.runs)]

    def _write_state(self) -> None:
        state = {"made_by": [VERSION, ANALYSIS], "runs": [[run.documents, run.content] for run in self._left]}
        scratch = self.folder / f"{_STATE}.new"
        scratch.write_text(json.dumps(state), encoding="utf-8")
        os.replace(scratch, self.folder / _STATE)

    def _read_state(self) -> list[Expected]:
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
            if state["made_by"] != [VERSION, ANALYSIS]:
                return []
            return [Expected(int(documents), str(content)) for documents, content in state["runs"]]
        except (OSError, ValueError, LookupError, TypeError):
            return []


def _replaceable(target: Path) -> bool:
    return target.is_dir() and (is_index(target) or not any(target.iterdir()))


def _locked(path: Path) -> IO[bytes]:
    file = path.open("wb")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError:
        file.close()
        raise RetrievalError(f"{path.parent}: another process is building this index; wait for it") from None
    return file
