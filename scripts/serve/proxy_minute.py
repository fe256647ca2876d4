"""One line per minute on standard output: what a proxy serves, judges and learns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

EVERY = 60.0
"""Seconds."""


def minute_line(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """What /healthz says `now`, and what has come since `before`."""
    turns, engine = now["turns"], now["engine"]
    earlier = before.get("turns", {"main": 0, "side": 0})
    parts = [
        f"served {turns['main'] - earlier['main']} main and {turns['side'] - earlier['side']} side turns, "
        f"{now['sessions']['open']} sessions open, {engine['waiting']} requests waiting"
    ]
    training, former = now.get("training"), before.get("training", {})
    if training is not None:
        judged = training.get("turns_judged", 0) - former.get("turns_judged", 0)
        failed = training.get("judge_failed", 0) - former.get("judge_failed", 0)
        error = f" ({training['judge_error']})" if failed and training.get("judge_error") else ""
        trained = training.get("turns_trained", 0) - former.get("turns_trained", 0)
        parts.append(f"judged {judged} turns, {failed} failed{error}, {training.get('to_judge', 0)} wait")
        parts.append(
            f"learned from {trained} turns, {training['ready_turns']} ready, "
            f"step {training['step']} {training['state']}"
        )
    return "; ".join(parts)


def every_minute(
    health: Callable[[], Mapping[str, Any]], over: threading.Event, say: Callable[[str], None], seconds: float = EVERY
) -> threading.Thread:
    """Say it in a thread of its own until `over` is set."""

    def run() -> None:
        before: Mapping[str, Any] = {}
        while not over.wait(seconds):
            now = health()
            say(minute_line(now, before))
            before = now

    thread = threading.Thread(target=run, name="proxy-minute", daemon=True)
    thread.start()
    return thread
