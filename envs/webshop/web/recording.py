"""People's episodes in a trace file, numbered so that a task and a sample name one episode."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

from turngym.envs.episode import Episode
from turngym.envs.trace import TraceError, TraceWriter, iter_trace

log = logging.getLogger(__name__)


class Recorder:
    """Appends episodes to a file; sample numbers go on from those that are in it. Safe across threads."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError where the file cannot be written or is of a newer version."""
        self.path = path
        self.failed = 0
        """Episodes that could not be written."""
        self._samples: Counter[str] = Counter()
        if path.is_file():
            for item in iter_trace(path):
                if isinstance(item, Episode):
                    self._samples[item.task.task_id] = max(self._samples[item.task.task_id], item.sample + 1)
        self._writer = TraceWriter(path)
        self._lock = threading.Lock()

    def __call__(self, episode: Episode) -> None:
        """Append one episode. A full disk costs the record, not the person's purchase: it is logged."""
        with self._lock:
            sample = self._samples[episode.task.task_id]
            try:
                self._writer.write(replace(episode, sample=sample))
            except (OSError, ValueError, TraceError) as error:
                self.failed += 1
                log.error("an episode of %s could not be written to %s: %s", episode.task.task_id, self.path, error)
                return
            self._samples[episode.task.task_id] = sample + 1

    def close(self) -> None:
        with self._lock:
            self._writer.close()
