"""`turngym serve proxy` in this process, over the tiny policy, and an agent that plays through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy_http import ServedProxy
from servers import until

from turngym.agents.playing.env_maker import env_maker
from turngym.trainers.live.proxy_options import AnyProxy, proxy_config
from turngym.trainers.live.run import build

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ROOT / "agents" / "worlds" / "checkpoints" / "alfworld" / "student"


# with this seed the first turns are not all judged alike: they would teach nothing
SERVES: dict[str, Any] = {"student": STUDENT, "port": 0, "device": "cpu", "threads": 1, "seed": 1}
LEARNS: dict[str, Any] = {
    "batch_turns": 6,
    "serve_from": "copy",
    "run": {"steps": 100, "tracker": None},
    "optimizer": {"lr": 1e-3},
}


def options(out: Path, algorithm: str | None = "prm-rl", **more: Any) -> Any:
    """Settings of a proxy over the tiny policy; one without an algorithm only records."""
    learns = {} if algorithm is None else LEARNS
    settings = {"out": out, "proxy": {"max_waiting": 8, "name": "tiny"}, **SERVES, **learns, **more}
    return proxy_config(algorithm, [("test", settings)])


class Running(ServedProxy):
    """What `serve` does, in this process and without signals."""

    def __init__(self, config: AnyProxy, before: Callable[[Any], None] | None = None) -> None:
        self.service, self.training = build(config)
        if before is not None:
            before(self)
        super().__init__(self.service, more_health=None if self.training is None else self.training.health)
        if self.training is not None:
            self.training.start(on_failure=self.server.stop)

    def ask(self, messages: list[Any], session: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post("/chat/completions", json={"messages": messages, "session_id": session, **body})
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    def until_step(self, step: int) -> None:
        def there() -> bool:
            assert self.training is not None
            assert not self.training.error, self.training.error
            return self.training.step >= step and not self.service.engine.paused

        until(there, 60)

    def stop_if_running(self) -> None:
        if self.site.thread.is_alive():
            self.stop()

    def stop(self) -> None:
        self.http.close()
        self.site.stop()
        if self.training is not None:
            self.training.stop()
        self.service.close()


def play(ask: Any, sessions: int, turns: int, first: int = 0) -> None:
    """An agent from outside plays a generated house through nothing but chat messages."""
    env = env_maker("turngym/ALFWorld-v0", split="generated", config="small", channel="text")()
    for number in range(first, first + sessions):
        observation, _ = env.reset(seed=number)
        messages: list[Any] = [{"role": "system", "content": "You are in a house. Do the task."}]
        for turn in range(turns):
            messages.append({"role": "user", "content": observation})
            messages.append(ask(messages, f"house {number}", session_done=turn == turns - 1))
            observation = env.step(messages[-1]["content"])[0]
    env.close()
