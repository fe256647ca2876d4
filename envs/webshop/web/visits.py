"""Who is in the shop: one environment and its turns per browser, bounded in number, idle time and turns."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from turngym.envs.core import Verdict
from turngym.envs.episode import Episode, Status, Turn
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.shop.shop import Shop

Record = Callable[[Episode], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitLimits:
    """How much the shop holds for people."""

    visits: int = 256
    """Visits at a time; who was away longest makes room."""
    idle: float = 3600.0
    """Seconds without a click after which a visit ends."""
    turns: int = 300
    """Clicks and searches per goal."""


class Visit:
    """One person's shopping for one goal at a time, recorded turn by turn as an agent's is."""

    def __init__(self, env: WebShopEnv, limits: VisitLimits, record: Record, now: float) -> None:
        self.env = env
        self.lock = threading.Lock()
        self.turns: list[Turn] = []
        self.status: Status | None = None
        """How the episode ended; None while it goes on."""
        self.begun = False
        """Whether there is a goal yet."""
        self.seen = now
        """When it was last used, on the clock of its `Visits`."""
        self._limits = limits
        self._record = record
        self._observation = ""
        self._admissible: tuple[str, ...] = ()

    @property
    def under_way(self) -> bool:
        """Whether actions can be played."""
        return self.begun and self.status is None

    def begin(self, task_id: str) -> None:
        """Shop for another goal; what was begun before is recorded as left. Raises TaskError for an unknown task."""
        self.leave()
        self._observation, _ = self.env.reset(options={"task": task_id})
        self._admissible = self.env.admissible()
        self.turns, self.status, self.begun = [], None, True

    def play(self, action: str) -> Verdict:
        """One action on the page that is open. Call only while `under_way`."""
        observation, reward, terminated, _, info = self.env.step(action)
        self.turns.append(
            Turn(
                index=len(self.turns),
                observation=self._observation,
                admissible=self._admissible,
                response=action,
                action=info["action"],
                verdict=Verdict(info["verdict"]),
                reward=reward,
                origin="demonstration",
            )
        )
        self._observation, self._admissible = observation, self.env.admissible()
        if terminated:
            self._end(Status.COMPLETED)
        elif len(self.turns) >= self._limits.turns:
            self._end(Status.TRUNCATED_TURNS)
        return self.turns[-1].verdict

    def leave(self) -> None:
        """Nothing more will come: a visit under way ends as `truncated_depth`, recorded if anything was done."""
        if self.status is None and self.turns:
            self._end(Status.TRUNCATED_DEPTH)
        elif self.status is None:
            self.status = Status.TRUNCATED_DEPTH

    def _end(self, status: Status) -> None:
        self.status = status
        env = self.env
        left = {"error": "the player left"} if status is Status.TRUNCATED_DEPTH else {}
        self._record(
            Episode(
                task=env.task,
                seed=0,
                sample=0,
                group=0,
                segments=(),
                turns=tuple(self.turns),
                status=status,
                success=env.success,
                episode_return=sum(turn.reward for turn in self.turns),
                score=env.score,
                system=env.instructions,
                final_observation=self._observation,
                meta={"agent": "human", "interface": "web", **left},
            )
        )


@dataclass(slots=True)
class Visits:
    """All visits by the random id in the person's cookie. Safe across threads."""

    shop: Shop
    make_env: Callable[[], WebShopEnv]
    record: Record
    limits: VisitLimits = field(default_factory=VisitLimits)
    clock: Clock = time.monotonic
    _open: OrderedDict[str, Visit] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, name: str) -> Visit | None:
        """The visit with that id, now the most recent; None if there is none or it was idle too long."""
        with self._lock:
            gone = self._expired()
            visit = self._open.get(name)
            if visit is not None:
                visit.seen = self.clock()
                self._open.move_to_end(name)
        # without the lock: whoever plays in one of them may hold it for a while
        self._dismiss(gone)
        return visit

    def enter(self, name: str) -> Visit:
        """The visit with that id, a new one if need be; the one away longest makes room."""
        visit = self.get(name)
        if visit is not None:
            return visit
        # made without the lock; another request of the same browser may still be first
        fresh = Visit(self.make_env(), self.limits, self.record, self.clock())
        gone = []
        with self._lock:
            visit = self._open.setdefault(name, fresh)
            while len(self._open) > self.limits.visits:
                gone.append(self._open.popitem(last=False)[1])
        self._dismiss(gone)
        return visit

    def close(self) -> None:
        """End all visits; those under way are recorded."""
        with self._lock:
            gone = list(self._open.values())
            self._open.clear()
        self._dismiss(gone)

    def _expired(self) -> list[Visit]:
        gone, now = [], self.clock()
        while self._open:
            name, oldest = next(iter(self._open.items()))
            # in the order of their last use: behind the first that is recent all are
            if now - oldest.seen <= self.limits.idle:
                break
            gone.append(self._open.pop(name))
        return gone

    @staticmethod
    def _dismiss(gone: list[Visit]) -> None:
        for visit in gone:
            with visit.lock:
                visit.leave()
                visit.env.close()
