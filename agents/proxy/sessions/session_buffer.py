"""A buffer of judged sessions, handed to the trainer when a step has enough turns."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turngym.agents.proxy.sessions.freshness import without_stale
from turngym.envs.episode import Episode
from turngym.envs.protocols import CollectRequest


class SessionBuffer:
    """Implements `Collect` over live sessions; safe for several threads.

    A step takes whole sessions, oldest first, until they hold `batch_turns` turns that can be trained on. From then
    until `updated` the engine is paused, so that no answer is sampled while the weights change, unless it answers with
    a copy of them (`live`). It is paused from the start, too, until the trainer asks for the first time (a resumed run
    loads its weights before that).

    Args:
        count_trainable: number of turns of a judged episode that can be trained on; episodes with none are counted and
            left out.
        pause_engine, resume_engine: pausing returns when the engine is idle.
        set_version: called with the version of the weights, while the engine is paused; with `live` whenever there are
            new ones, which it has to give to the engine.
        on_sessions: called with ("trained" | "unused", step or 0, episodes) for the records.
        staleness: most versions that a turn may be behind the student when it is trained on; older ones are excluded.
        newest_first: a step takes the sessions that came last, not those that wait longest.
        backlog: most sessions that wait for the trainer; the oldest are dropped and counted.
    """

    def __init__(
        self,
        *,
        count_trainable: Callable[[Episode], int],
        pause_engine: Callable[[], None],
        resume_engine: Callable[[], None],
        set_version: Callable[[int], None],
        on_sessions: Callable[[str, int, Sequence[Episode]], None],
        batch_turns: int = 16,
        backlog: int = 4096,
        live: bool = False,
        staleness: int | None = None,
        newest_first: bool = False,
    ) -> None:
        self._usable, self._written = count_trainable, on_sessions
        self._pause_engine, self._resume_engine, self._set_version = pause_engine, resume_engine, set_version
        self._batch_turns, self._backlog = batch_turns, backlog
        self._live, self._staleness, self._newest_first = live, staleness, newest_first
        self._version = 0
        self._changed = threading.Condition()
        self._ready: deque[tuple[Episode, int]] = deque()
        self._ready_turns = 0
        self._paused = True
        self._closed = False
        self.counts: Counter[str] = Counter()
        self._pause_engine()

    def put_judged(self, episodes: Iterable[Episode]) -> None:
        """Add sessions whose turns carry a judge's votes already."""
        for given in episodes:
            episode = without_stale(given, self._version, self._staleness)
            turns = self._usable(episode)
            if not turns:
                self._written("unused", 0, [episode])
            with self._changed:
                if turns:
                    self._ready.append((episode, turns))
                    self._ready_turns += turns
                    while len(self._ready) > self._backlog:
                        self._ready_turns -= self._ready.popleft()[1]
                        self.counts["dropped_for_age"] += 1
                else:
                    self.counts["nothing_to_train_on"] += 1
                self._changed.notify_all()

    def amend(self, key: str, change: Callable[[Episode], Episode]) -> bool:
        """Change a session that waits for the trainer; False where none of this key does."""
        with self._changed:
            for place, (episode, turns) in enumerate(self._ready):
                if episode.task.task_id == key:
                    changed = change(episode)
                    self._ready[place] = changed, self._usable(changed)
                    self._ready_turns += self._ready[place][1] - turns
                    self._changed.notify_all()
                    return True
        return False

    def __call__(self, request: CollectRequest) -> list[Episode]:
        """Wait for a step's sessions, at most `request.episodes`; the engine is then paused, unless `live`.

        Raises KeyboardInterrupt, which the training loop takes as the wish to save and stop, once closed.
        """
        if self._paused:
            self._set_version(request.step - 1)
            self.resume()
        self._grow_old(request.step - 1)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._step_ready(request.episodes))
            if self._closed:
                raise KeyboardInterrupt
            taken = self._next_step(request.episodes)
        # before the update: a run resumed from an older checkpoint takes back what later steps used
        self._written("trained", request.step, taken)
        if not self._live:
            self._pause_engine()
            self._paused = True
        return taken

    def updated(self, step: int) -> None:
        """The weights of `step` are in place: resume the engine."""
        self._set_version(step)
        self.resume()

    def close(self) -> None:
        """The trainer is told to stop when it next asks. Nothing is lost: what was not trained on is in the records."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.resume()

    def as_json(self) -> dict[str, Any]:
        with self._changed:
            return {
                "ready_sessions": len(self._ready),
                "ready_turns": self._ready_turns,
                **dict(sorted(self.counts.items())),
            }

    def resume(self) -> None:
        """Resume the engine if it was paused for the trainer."""
        if self._paused:
            self._paused = False
            self._resume_engine()

    def _grow_old(self, version: int) -> None:
        """The student has another version: what waits is looked at again."""
        with self._changed:
            self._version = version
            if self._staleness is None:
                return
            waiting, self._ready, self._ready_turns = list(self._ready), deque(), 0
        self.put_judged(episode for episode, _ in waiting)

    def _step_ready(self, most: int) -> bool:
        return self._ready_turns >= self._batch_turns or len(self._ready) >= most

    def _next_step(self, most: int) -> list[Episode]:
        taken: list[Episode] = []
        turns = 0
        while self._ready and turns < self._batch_turns and len(taken) < most:
            episode, more = self._ready.pop() if self._newest_first else self._ready.popleft()
            taken.append(episode)
            turns += more
        self._ready_turns -= turns
        self.counts["sessions_trained"] += len(taken)
        self.counts["turns_trained"] += turns
        return taken
