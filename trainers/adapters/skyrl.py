"""Our environments for SkyRL: a `skyrl_gym` text environment (tried with skyrl-gym 0.4.0)."""

from __future__ import annotations

from typing import Any

from turngym.agents.playing.episode_session import EpisodeSession, SessionPool, Stepped
from turngym.core.errors import TurngymError
from turngym.core.plugins import need

Message = dict[str, str]


def step_output(session: EpisodeSession, stepped: Stepped) -> dict[str, Any]:
    """What `BaseTextEnv.step` returns. SkyRL appends the observations to the ids it sampled; none at the end."""
    observations = [] if stepped.done else [{"role": "user", "content": session.outside(stepped.observation)}]
    verdict = None if stepped.verdict is None else stepped.verdict.value
    status = session.episode().status.value if stepped.done else None
    return {
        "observations": observations,
        "reward": stepped.reward,
        "done": stepped.done,
        "metadata": {"verdict": verdict, "success": session.success, "status": status},
        "postprocessed_action": None,
    }


def environment(sessions: SessionPool) -> type:
    """A subclass of `skyrl_gym.envs.base_text_env.BaseTextEnv` on `sessions`, to be registered under a name.

    SkyRL makes it as `cls(env_config=..., extras={...})`: `extras["task_id"]` says what is played; `seed` and `sample`
    may be there, too, and draw the task where none is named. The data set's prompt gives way to ours. SkyRL samples and
    tokenizes, so the sessions may be text only; with a tokenizer they keep ids of their own, which `episode()` shows.

    Raises MissingExtra without skyrl-gym.
    """
    base = need("skyrl_gym.envs.base_text_env", "the SkyRL environment", "skyrl").BaseTextEnv

    class TurngymEnv(base):  # type: ignore[misc, valid-type]
        """One episode of a turngym environment as chat messages."""

        def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
            super().__init__()
            self._wanted = {key: value for key, value in (extras or {}).items() if key in ("task_id", "seed", "sample")}
            self._session: EpisodeSession | None = None

        def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
            self.close()
            self._session = sessions.open(**self._wanted)
            self.turns = 0
            if self._session.done:
                raise TurngymError(f"the environment failed: {self._session.episode().meta.get('error')}")
            system, last = self._session.messages[:-1], self._session.messages[-1]
            return [*system, {**last, "content": self._session.outside(last["content"])}], {"success": False}

        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            session = self._playing()
            return step_output(session, session.step_text(action))

        def episode(self) -> Any:
            """Our own record of a finished episode."""
            return self._playing().episode()

        def get_metrics(self) -> dict[str, Any]:
            success = self._session is not None and self._session.success
            return {"success": float(success), "turns": self.turns}

        def close(self) -> None:
            if self._session is not None:
                self._session.close()

        def _playing(self) -> EpisodeSession:
            if self._session is None:
                raise TurngymError("the SkyRL environment was stepped before init(prompt) began an episode")
            return self._session

    return TurngymEnv
