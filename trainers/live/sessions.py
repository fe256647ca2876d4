"""From judged sessions to a training step: they wait in a `SessionBuffer` until there are enough turns.

`select_turns` says which turns of a session are trained on and why the others are not; the records get both.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turngym.agents.proxy.engine_queue import EngineQueue
from turngym.agents.proxy.turn_records import usage_record
from turngym.core.episode import Episode
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.algorithm import EpisodeFilter, TurnFilter
from turngym.trainers.batch import is_trainable

BACKLOG = 1024
"""Most sessions that wait for the judge, and most that wait for the trainer; one of 3,400 ids takes 31 kB. Where
clients are faster than the trainer, the oldest go: their turns would be many versions old."""
STALE, TEMPERATURE = "too old", "sampled at another temperature"
NOTHING_DRAWN = "nothing was drawn"


def select_turns(episode: Episode, select: EpisodeFilter | None) -> tuple[tuple[int, ...], dict[int, str]]:
    """The turns of a judged session that the filter `select` keeps, and why others are left out: by index."""
    chosen = [episode] if select is None else select([episode])
    if chosen:
        turns = chosen[0].turns
        trained = tuple(turn.index for turn in turns if is_trainable(turn))
        reasons = {turn.index: turn.excluded for turn in turns}
    else:
        # a filter that drops a session does not say why, turn by turn, unless it is asked
        trained = ()
        turn_reasons = select.reasons(episode) if isinstance(select, TurnFilter) else {}
        reasons = {turn.index: turn.excluded or turn_reasons.get(turn.index) for turn in episode.turns}
    left_out = {turn.index: reasons[turn.index] or NOTHING_DRAWN for turn in episode.turns if turn.index not in trained}
    return trained, left_out


def without_stale(episode: Episode, version: int, most: int | None) -> Episode:
    """`episode` without the turns whose oldest ids are more than `most` versions behind `version`. None keeps all."""
    if most is None:
        return episode
    turns = tuple(
        replace(turn, excluded=f"{version - turn.policy_version} versions old")
        if turn.excluded is None and version - turn.policy_version > most
        else turn
        for turn in episode.turns
    )
    return replace(episode, turns=turns)


def reason_name(why: str) -> str:
    """`why` without its numbers, to be counted by."""
    if why.endswith("versions old"):
        return STALE
    return TEMPERATURE if why.startswith("sampled at temperature") else why


class SessionBuffer:
    """Implements `RolloutSource` over live sessions; safe for several threads.

    A step takes whole sessions, oldest first, until they hold `batch_turns` turns that can be trained on. From then
    until `updated` the engine is paused, so that no answer is sampled while the weights change, unless it answers with
    a copy of them (`live`). It is paused from the start, too, until the trainer asks for the first time (a resumed run
    loads its weights before that).

    Args:
        engine: the queue that is paused; pausing returns when nothing is generated.
        publish: called with the version of the weights, while the engine is paused; with `live` whenever there are
            new ones, which it has to give to the engine.
        select: the algorithm's filter. Sessions of which it keeps no turn are counted and left out.
        record: writes a record of what was trained on and what was not.
        batch_turns: turns that can be trained on that a step waits for.
        live: whether the engine answers with a copy of the weights, so that it need not be paused while they change.
        staleness: most versions that a turn may be behind the student when it is trained on; older ones are excluded.
        newest_first: a step takes the sessions that came last, not those that wait longest.
        now: seconds since 1970, to say how old the turns are that a step trained on.
    """

    def __init__(
        self,
        *,
        engine: EngineQueue,
        publish: Callable[[int], None],
        select: EpisodeFilter | None,
        record: Callable[[Mapping[str, Any]], object],
        batch_turns: int = 16,
        live: bool = False,
        staleness: int | None = None,
        newest_first: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._publish, self._select, self._record, self._now = engine, publish, select, record, now
        self._batch_turns, self._live = batch_turns, live
        self._staleness, self._newest_first = staleness, newest_first
        self._version = 0
        self._changed = threading.Condition()
        self._ready: deque[tuple[Episode, int]] = deque()
        """Each with the number of turns that can be trained on."""
        self._ready_turns = 0
        self._paused = True
        self._closed = False
        self.counts: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._ages: dict[str, float] = {}
        engine.pause()

    def put_judged(self, episodes: Iterable[Episode]) -> None:
        """Add sessions whose turns carry a judge's votes already."""
        for judged in episodes:
            episode = without_stale(judged, self._version, self._staleness)
            turns = len(select_turns(episode, self._select)[0])
            if not turns:
                self._use("unused", 0, [episode])
            with self._changed:
                if turns:
                    self._ready.append((episode, turns))
                    self._ready_turns += turns
                    while len(self._ready) > BACKLOG:
                        self._ready_turns -= self._ready.popleft()[1]
                        self.counts["dropped_for_age"] += 1
                else:
                    self.counts["nothing_to_train_on"] += 1
                self._changed.notify_all()

    def amend(self, key: str, change: Callable[[Episode], Episode]) -> bool:
        """Change a session that waits for the trainer. Returns False if none with this key does."""
        with self._changed:
            for index, (episode, turns) in enumerate(self._ready):
                if episode.task.task_id == key:
                    changed = change(episode)
                    self._ready[index] = changed, len(select_turns(changed, self._select)[0])
                    self._ready_turns += self._ready[index][1] - turns
                    self._changed.notify_all()
                    return True
        return False

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        """Wait for a step's sessions, at most `request.episodes`; the engine is then paused, unless `live`.

        Raises KeyboardInterrupt once closed: the training loop then saves and stops.
        """
        if self._paused:
            self._publish(request.step - 1)
            self.resume()
        # a new version of the student may make waiting turns too old
        with self._changed:
            self._version = request.step - 1
            waiting: list[tuple[Episode, int]] = []
            if self._staleness is not None:
                waiting, self._ready, self._ready_turns = list(self._ready), deque(), 0
        self.put_judged(episode for episode, _ in waiting)
        most, turns = request.episodes, 0
        episodes: list[Episode] = []
        with self._changed:
            # ends: sessions come, or `close` says so
            self._changed.wait_for(
                lambda: self._closed or self._ready_turns >= self._batch_turns or len(self._ready) >= most
            )
            if self._closed:
                raise KeyboardInterrupt
            while self._ready and turns < self._batch_turns and len(episodes) < most:
                episode, new_turns = self._ready.pop() if self._newest_first else self._ready.popleft()
                episodes.append(episode)
                turns += new_turns
            self._ready_turns -= turns
            self.counts["sessions_trained"] += len(episodes)
            self.counts["turns_trained"] += turns
        # before the update: a run resumed from an older checkpoint takes back what later steps used
        self._use("trained", request.step, episodes)
        if not self._live:
            self._engine.pause()
            self._paused = True
        return episodes

    def updated(self, step: int) -> None:
        """The weights of `step` are in place: resume the engine."""
        self._publish(step)
        self.resume()

    def close(self) -> None:
        """Stop the trainer when it next asks. Nothing is lost: sessions that were not trained on are in the records."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.resume()

    def resume(self) -> None:
        """Resume the engine if it was paused for the trainer."""
        if self._paused:
            self._paused = False
            self._engine.resume()

    def left_out_counts(self) -> dict[str, int]:
        """How many turns were left out, by reason."""
        with self._changed:
            return dict(sorted(self._left_out.items()))

    def as_json(self) -> dict[str, Any]:
        """The sessions that wait, those trained on, and the ages of the last step's turns."""
        with self._changed:
            return {
                "ready_sessions": len(self._ready),
                "ready_turns": self._ready_turns,
                **dict(sorted(self.counts.items())),
                **self._ages,
            }

    def _use(self, kind: str, step: int, episodes: Sequence[Episode]) -> None:
        """Count and write down what becomes of the turns of sessions that are `trained` on or `unused`."""
        selections = [select_turns(episode, self._select) for episode in episodes]
        behind: list[float] = []
        seconds: list[float] = []
        for episode, (trained, _) in zip(episodes, selections, strict=True):
            behind += [step - 1 - episode.turns[turn].policy_version for turn in trained]
            times = episode.meta.get("at", ())
            seconds += [self._now() - times[turn] for turn in trained if turn < len(times) and times[turn]]
        ages = {
            f"{name}_{statistic}": round(value, 3)
            for name, values in (("versions_behind", behind), ("age_s", seconds))
            if values
            for statistic, value in (("mean", sum(values) / len(values)), ("max", max(values)))
        }
        with self._changed:
            self._left_out.update(reason_name(why) for _, left_out in selections for why in left_out.values())
            self._ages = ages if kind == "trained" else self._ages
        turns = {
            episode.task.task_id: {
                "trained": list(trained),
                "left_out": {str(turn): why for turn, why in left_out.items()},
            }
            for episode, (trained, left_out) in zip(episodes, selections, strict=True)
        }
        self._record({**usage_record(kind, step, episodes), "turns": turns, **ages})
