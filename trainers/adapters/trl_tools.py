"""Our environments for TRL's `environment_factory`: TRL samples, reads function calls and writes the ids itself.

Tried with TRL 1.16.0. The environment's action is the one tool. Three things follow from TRL's loop: a response without
a function call ends the episode and the environment never sees it; after the last turn the model speaks once more; and
`max_tool_calling_iterations` is the limit of turns. `turngym.trainers.adapters.trl` has none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from turngym.envs.core import ToolSpec, TurngymError
from turngym.trainers.adapters.session import TokenSession, TokenSessions

OVER = "The episode is over."


def rows(sessions: TokenSessions, task_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a data set: the system message, an empty user message that `reset` fills, and the task."""
    session = sessions.open()
    opening = [message for message in session.messages if message["role"] == "system"]
    session.close()
    # TRL appends what reset() says to the last user message, so there must be one
    return [{"prompt": [*opening, {"role": "user", "content": ""}], "task_id": task_id} for task_id in task_ids]


def environment_factory(sessions: TokenSessions, *, seed: int = 0) -> type:
    """A class for `GRPOTrainer(environment_factory=...)` whose one tool is the environment's.

    The sessions' channel must be `tool`. A row's `task_id` says what is played, its `seed` replaces `seed`.
    """

    class TurngymEnvironment:
        """One episode, reset for every rollout. The reward is the return so far when TRL stops."""

        def __init__(self) -> None:
            self._session: TokenSession | None = None
            self._return: float | None = 0.0

        def reset(self, **row: Any) -> str:
            self._close()
            self._session = sessions.open(
                row.get("task_id"), seed=int(seed if row.get("seed") is None else row["seed"])
            )
            if self._session.done:
                self._return = None
                return OVER
            self._return = 0.0
            return self._session.messages[-1]["content"]

        def get_reward(self) -> float | None:
            """The return; None where the environment failed, so that TRL leaves the attempt out."""
            return self._return

        def _act(self, action: Any) -> str:
            session = self._session
            if session is None:
                raise TurngymError("the environment was called before reset()")
            if session.done:
                return OVER
            # a model may call the tool with another argument or another type: like a response that holds no action
            stepped = session.step_action(action) if isinstance(action, str) else session.step_text("")
            if stepped.verdict is None:
                self._return = None
                return OVER
            self._return = (self._return or 0.0) + stepped.reward
            return stepped.observation

        def _close(self) -> None:
            if self._session is not None:
                self._session.close()

    # TRL takes every method without an underscore, but reset and get_reward, for a tool, and its name for the tool's
    setattr(TurngymEnvironment, sessions.tool.name, _method(sessions.tool))
    return TurngymEnvironment


def _method(tool: ToolSpec) -> Any:
    """The tool as a method that TRL describes to the model: named, typed and documented as the tool is."""

    def act(self: Any, **arguments: str) -> str:
        return str(self._act(arguments.get(tool.argument)))

    return describe(act, tool)


def describe(function: Any, tool: ToolSpec) -> Any:
    """Give `function` the signature and the docstring from which transformers makes the tool's schema."""
    import inspect

    argument = inspect.Parameter(tool.argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    function.__name__ = function.__qualname__ = tool.name
    function.__signature__ = inspect.Signature([itself, argument])
    function.__annotations__ = {tool.argument: str}
    function.__doc__ = f"{tool.description}\n\nArgs:\n    {tool.argument}: {tool.argument_description}\n"
    return function
