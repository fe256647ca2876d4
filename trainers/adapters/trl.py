"""Our environments for TRL's GRPOTrainer (tried with TRL 1.16.0), in two ways.

`rollout_func` plays the episodes here, with token ids in and out. `environment_factory` leaves sampling, function calls
and ids to TRL.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turngym.agents.playing.episode_session import EpisodeSession, SessionPool
from turngym.core.errors import TurngymError
from turngym.core.protocols import Policy
from turngym.core.redaction import excerpt
from turngym.core.tools import Tool
from turngym.trainers.adapters.token_session import Trajectory, play

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]


def rows(task_ids: Iterable[str]) -> list[dict[str, str]]:
    """Rows of a data set for `rollout_func`: the prompt names the task."""
    return [{"prompt": task_id} for task_id in task_ids]


def rollout_func(sessions: SessionPool, policy_of: Callable[[Any], Policy], *, seed: int = 0) -> RolloutFunc:
    """A `rollout_func` that plays one episode per prompt, all that wait sampled in one batch.

    TRL repeats a prompt `num_generations` times; each copy is another attempt at the same task. The random streams
    depend on `seed`, the training step, the process and the number of the attempt.

    Args:
        sessions: with a tokenizer, at the trainer's temperature.
        policy_of: gives the engine, from the trainer: `lambda trainer: engine` where it shares the trained model.
        seed: of the random streams; step k of the training plays with `seed` + k.

    The result has, besides TRL's own fields, `turngym_reward` (None where the environment or the engine failed, so that
    TRL leaves the attempt out), `turngym_success`, `turngym_turns` and `turngym_status` for reward functions.

    Raises TurngymError where the trainer's settings would falsify the result: another temperature than the sessions',
    or `mask_truncated_completions`.
    """
    calls: Counter[tuple[int, int]] = Counter()

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        _check(sessions, trainer)
        step, rank = int(trainer.state.global_step), int(trainer.accelerator.process_index)
        # TRL may ask several times at one global_step: while gradients accumulate, and for each batch of an evaluation
        calls[step, rank] += 1
        seen: Counter[str] = Counter()
        opened = []
        for prompt in prompts:
            task = _task_id(prompt)
            # no number twice at one step: not within a call, not between processes, not between calls
            attempt = seen[task] + len(prompts) * (rank + trainer.accelerator.num_processes * (calls[step, rank] - 1))
            opened.append(sessions.open(task, seed=seed + step, sample=attempt))
            seen[task] += 1
        episodes = play(opened, policy_of(trainer))
        # an episode that failed before its first turn has no tokens, and TRL cannot take an empty row
        blank = int(trainer.processing_class.eos_token_id)
        return fields([Trajectory.of(episode).filled(blank) for episode in episodes])

    return roll


def fields(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """What a `rollout_func` returns, one entry per trajectory. Log-probabilities are nats, 0 outside the mask."""
    unknown = [t.task_id for t in trajectories if t.logprobs is None]
    if unknown:
        raise TurngymError(f"TRL needs the sampler's log-probabilities; unknown for {', '.join(unknown[:3])}")
    lists = [trajectory.lists() for trajectory in trajectories]
    return {
        "prompt_ids": [row["prompt_ids"] for row in lists],
        "completion_ids": [row["response_ids"] for row in lists],
        "logprobs": [row["logprobs"] for row in lists],
        "env_mask": [row["response_mask"] for row in lists],
        "turngym_reward": [None if t.failed else t.reward for t in trajectories],
        "turngym_success": [t.success for t in trajectories],
        "turngym_turns": [len(t.turn_spans) for t in trajectories],
        "turngym_status": [t.status.value for t in trajectories],
    }


def episode_reward(completions: list[Any], turngym_reward: list[float | None], **_: Any) -> list[float | None]:
    """A TRL reward function: the return of each episode."""
    return turngym_reward


def _task_id(prompt: Any) -> str:
    """The task that a row names: its prompt as text, or the content of its last message."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1].get("content"), str):
        return str(prompt[-1]["content"])
    raise TurngymError(
        f"a prompt must name a task, as text or as the content of a message; got {excerpt(prompt, 200)!r}"
    )


def _check(sessions: SessionPool, trainer: Any) -> None:
    ours, theirs = sessions.sampling.temperature, float(trainer.args.temperature)
    if not math.isclose(ours, theirs):
        raise TurngymError(
            f"the sessions sample at temperature {ours:g}, but GRPOConfig says {theirs:g}: give both the same, or the "
            "log-probabilities that TRL compares are not of one distribution"
        )
    if trainer.args.mask_truncated_completions:
        raise TurngymError(
            "GRPOConfig(mask_truncated_completions=True) would leave episodes out by their last token, which is the "
            "agent's and not the end of a text: set it to False"
        )


# Our environments for TRL's `environment_factory`: TRL samples, reads function calls and writes the ids itself.
#
# The environment's tools are the tools. Three things follow from TRL's loop: a response without a function call ends
# the episode and the environment never sees it; after the last turn the model speaks once more; and
# `max_tool_calling_iterations` is the limit of turns. `rollout_func` has none of them.

OVER = "The episode is over."


def tool_rows(sessions: SessionPool, task_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a data set: the system message, an empty user message that `reset` fills, and the task."""
    session = sessions.open()
    opening = [message for message in session.messages if message["role"] == "system"]
    session.close()
    # TRL appends what reset() says to the last user message, so there must be one
    return [{"prompt": [*opening, {"role": "user", "content": ""}], "task_id": task_id} for task_id in task_ids]


def environment_factory(sessions: SessionPool, *, seed: int = 0) -> type:
    """A class for `GRPOTrainer(environment_factory=...)` whose tools are the environment's.

    The sessions' channel must be `tool`. A row's `task_id` says what is played, its `seed` replaces `seed`.
    """

    class TurngymEnvironment:
        """One episode, reset for every rollout. The reward is the return so far when TRL stops."""

        def __init__(self) -> None:
            self._session: EpisodeSession | None = None
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
            return self._session.outside(self._session.messages[-1]["content"])

        def get_reward(self) -> float | None:
            """The return; None where the environment failed, so that TRL leaves the attempt out."""
            return self._return

        def _act(self, tool: str, arguments: dict[str, Any]) -> str:
            session = self._session
            if session is None:
                raise TurngymError("the environment was called before reset()")
            if session.done:
                return OVER
            stepped = session.step_call(tool, arguments)
            if stepped.verdict is None:
                self._return = None
                return OVER
            self._return = (self._return or 0.0) + stepped.reward
            return session.outside(stepped.observation)

        def _close(self) -> None:
            if self._session is not None:
                self._session.close()

    # TRL takes every method without an underscore, but reset and get_reward, for a tool, and its name for the tool's
    for tool in sessions.tool.tools:
        if hasattr(TurngymEnvironment, tool.name):
            raise TurngymError(f"{sessions.env_id}: {tool.name!r} is a method of TRL's own; rename the tool")
        setattr(TurngymEnvironment, tool.name, _method(tool))
    return TurngymEnvironment


PYTHON = {"string": str, "integer": int, "number": float, "boolean": bool}


def _method(tool: Tool) -> Any:
    """The tool as a method: with the name, the signature and the docstring from which TRL makes the tool's schema."""
    import inspect

    def act(self: Any, /, **arguments: Any) -> str:
        return str(self._act(tool.name, arguments))

    method: Any = act
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    lines = [tool.description, "", "Args:"]
    # an argument that may be left out may stand before one that may not, which Python forbids to a signature
    for argument in sorted(tool.arguments, key=lambda argument: not argument.required):
        default = inspect.Parameter.empty if argument.required else None
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(argument.name, kind, annotation=PYTHON[argument.type], default=default))
        choices = f" (choices: {json.dumps(argument.choices)})" if argument.choices else ""
        lines.append(f"    {argument.name}: {argument.description}{choices}")
    method.__name__ = method.__qualname__ = tool.name
    method.__signature__ = inspect.Signature(parameters)
    method.__annotations__ = {argument.name: PYTHON[argument.type] for argument in tool.arguments}
    method.__doc__ = "\n".join((*lines, ""))
    return method
