"""Judged episodes kept as traces, to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turngym.envs.episode import Episode
from turngym.envs.protocols import CollectRequest
from turngym.envs.trace import TraceWriter


@dataclass(frozen=True, slots=True)
class JudgedTraces:
    """Keeps the judged episodes of every so many steps in `folder/step_K.jsonl`, to read; of several processes each
    keeps its share, in `step_K_process_I.jsonl`."""

    folder: Path
    every: int = 10

    def __call__(self, request: CollectRequest, episodes: Sequence[Episode]) -> None:
        if not self.every or (request.step - 1) % self.every:
            return
        process, processes = request.share
        share = f"_process_{process}" if processes > 1 else ""
        path = self.folder / f"step_{request.step:06d}{share}.jsonl"
        path.unlink(missing_ok=True)  # a resumed run collects its step again
        with TraceWriter(path) as writer:
            for episode in episodes:
                writer.write(episode)
