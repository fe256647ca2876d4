"""Sessions that ended, judged in the background and handed to a trainer when there is enough for a step."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turngym.envs.episode import Episode
from turngym.envs.protocols import CollectRequest

Judge = Callable[[Sequence[Episode]], list[Episode]]
"""The episodes with what a judge says about their turns, in order."""


class SessionSource:
    """Implements `Collect` over live sessions; safe for several threads.

    A step takes whole sessions, oldest first, until they hold `batch_turns` turns that can be trained on. From then
    until `updated` the engine rests, so weights change under nobody's hands; it rests from the start, too, until the
    trainer asks for the first time (a resumed run loads its weights before).

    Args:
        judge: called in a thread of its own; an exception costs the sessions it was given, counted and kept in
            `error`. None hands sessions on as they are.
        usable: how many turns of a judged episode can be trained on; episodes with none are counted and left out.
        rest, work: stop the engine (returns when it is idle), and let it go on.
        new_version: told the number of the weights, while the engine rests.
        written: told ("judged" | "trained" | "unused", step or 0, episodes) for records and traces.
        backlog: most sessions that wait for the trainer; the oldest are dropped and counted.
    """

    def __init__(
        self,
        *,
        judge: Judge | None,
        usable: Callable[[Episode], int],
        rest: Callable[[], None],
        work: Callable[[], None],
        new_version: Callable[[int], None],
        written: Callable[[str, int, Sequence[Episode]], None],
        batch_turns: int = 16,
        backlog: int = 4096,
        judge_batch: int = 16,
    ) -> None:
        self._judge, self._usable, self._written = judge, usable, written
        self._rest, self._work, self._new_version = rest, work, new_version
        self._batch_turns, self._backlog, self._judge_batch = batch_turns, backlog, judge_batch
        self._changed = threading.Condition()
        self._inbox: deque[Episode] = deque()
        self._ready: deque[tuple[Episode, int]] = deque()
        self._ready_turns = 0
        self._judging = 0
        self._resting = True
        self._closed = False
        self.counts: Counter[str] = Counter()
        self.error = ""
        """Of the judge, the last one."""
        self._rest()
        self._thread = threading.Thread(target=self._judge_all, name="proxy-judge", daemon=True)
        self._thread.start()

    def put(self, episode: Episode) -> None:
        """A session has ended."""
        with self._changed:
            self._inbox.append(episode)
            self._drop(self._inbox)
            self._changed.notify_all()

    def put_judged(self, episodes: Iterable[Episode]) -> None:
        """Add sessions whose turns carry a judge's votes already."""
        for episode in episodes:
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

    def __call__(self, request: CollectRequest) -> list[Episode]:
        """Wait for a step's sessions, at most `request.episodes`; the engine rests when this returns.

        Raises KeyboardInterrupt, which the training loop takes as the wish to save and stop, once closed.
        """
        if self._resting:
            self._new_version(request.step - 1)
            self.let_work()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._enough(request.episodes))
            if self._closed:
                raise KeyboardInterrupt
            taken = self._take(request.episodes)
        self._written("trained", request.step, taken)
        self._rest()
        self._resting = True
        return taken

    def updated(self, step: int) -> None:
        """The weights of `step` are in place; the engine goes on."""
        self._new_version(step)
        self.let_work()

    def close(self) -> None:
        """The trainer is told to stop when it next asks; the judge after what it is doing. Nothing is lost: what was
        not trained on is in the records."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(10.0)
        self.let_work()

    def as_json(self) -> dict[str, Any]:
        with self._changed:
            return {
                "to_judge": len(self._inbox) + self._judging,
                "ready_sessions": len(self._ready),
                "ready_turns": self._ready_turns,
                **dict(sorted(self.counts.items())),
                **({"judge_error": self.error} if self.error else {}),
            }

    def let_work(self) -> None:
        """The engine goes on, if it rests for the trainer's sake."""
        if self._resting:
            self._resting = False
            self._work()

    def _enough(self, most: int) -> bool:
        return self._ready_turns >= self._batch_turns or len(self._ready) >= most

    def _take(self, most: int) -> list[Episode]:
        taken: list[Episode] = []
        turns = 0
        while self._ready and turns < self._batch_turns and len(taken) < most:
            episode, more = self._ready.popleft()
            taken.append(episode)
            turns += more
        self._ready_turns -= turns
        self.counts["sessions_trained"] += len(taken)
        self.counts["turns_trained"] += turns
        return taken

    def _drop(self, queue: deque[Episode]) -> None:
        while len(queue) > self._backlog:
            queue.popleft()
            self.counts["dropped_for_age"] += 1

    def _judge_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._inbox)
                if self._closed:
                    return
                batch = [self._inbox.popleft() for _ in range(min(len(self._inbox), self._judge_batch))]
                self._judging = len(batch)
            try:
                judged = batch if self._judge is None else self._judge(batch)
                self._written("judged", 0, judged)
                self.put_judged(judged)
            except Exception as error:  # a judge is other people's code and other people's servers
                with self._changed:
                    self.counts["judge_failed"] += len(batch)
                    self.error = f"{type(error).__name__}: {error}"
            finally:
                with self._changed:
                    self._judging = 0
