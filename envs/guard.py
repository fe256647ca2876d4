"""ActionGuard: what happens to an agent's text before the environment sees it, and how its turns are counted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import gymnasium as gym
import msgspec
from gymnasium.utils import RecordConstructorArgs

from turngym.core.errors import EnvBackendError, TurngymError, checked_choice, checked_int
from turngym.core.numbers import Number
from turngym.core.plugin_values import checked_number, checked_text
from turngym.core.redaction import brief, said_by
from turngym.core.task import MAX_TURNS, Task, Verdict
from turngym.core.tools import Tools
from turngym.envs.base import ResetNeeded, TextEnv, check_snapshot, quote, tasks_of
from turngym.envs.channels import Channel, Parsed, make_channel
from turngym.envs.lenient_reading import Reading, read_action, refusal
from turngym.envs.lookalikes import alike
from turngym.envs.spaces import printable

OnInvalid = Literal["reject", "penalize", "noop", "terminate"]
Step = tuple[str, float, bool, bool, dict[str, Any]]


class _Snapshot(msgspec.Struct):
    """What `ActionGuard.get_state()` gives."""

    turn: Number
    over: bool
    env: dict[str, Any]


class ActionGuard(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Takes the agent's text: the whole response if there is a `channel`, else the bare action.

    An action that cannot be read (`malformed`) or is not possible now (`inadmissible`) costs a turn but does not reach
    the environment. `on_invalid` decides what the agent gets for it:

    - `reject`: the reason, the nearest possible action and (with `list_admissible`) all of them; reward 0
    - `penalize`: the same, with reward `penalty`
    - `noop`: the environment's own "Nothing happens."; reward 0. This is the rule of ALFWorld and WebShop themselves.
      An action that was read although the response has not the channel's form (`Parsed.reason`) is played
    - `terminate`: the reason, and the episode ends; reward 0

    `info["turn"]` counts the agent's turns, `info["env_steps"]` the actions that reached the environment. With another
    `reading` than `strict`, `info["reading"]` says by which reading the action was found, None before the first turn.

    Args:
        channel: how responses are written, or the name of the channel; None: they are bare actions.
        max_turns: turns of the agent after which the episode is truncated; None: no limit.
        penalty: reward of an invalid action with `penalize`; the other policies ignore it.
        list_admissible: whether refusals of `reject` and `penalize` list all possible actions.
        show_admissible: whether every observation that waits for an answer ends with the list of possible actions, one
            a line; refusals then do not list them again. Environments with open actions have no such list.
        reading: how much a response is forgiven (`turngym.envs.lenient_reading`).
        invalid_cost: taken from the reward of every turn whose response is malformed; 0 or more.
    """

    def __init__(
        self,
        env: gym.Env[str, str],
        on_invalid: OnInvalid = "reject",
        channel: Channel | str | None = None,
        max_turns: int | None = MAX_TURNS,
        penalty: float = -0.1,
        list_admissible: bool = True,
        show_admissible: bool = False,
        reading: Reading = "strict",
        invalid_cost: float = 0.0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "env", "__class__")}
        RecordConstructorArgs.__init__(self, **arguments)
        gym.Wrapper.__init__(self, env)
        base = env.unwrapped
        if not isinstance(base, TextEnv):
            raise TurngymError(f"ActionGuard wraps environments that extend TextEnv, not {type(base).__name__}")
        if show_admissible and type(base).admissible is TextEnv.admissible:
            raise TurngymError(
                f"show_admissible is True, but {base.env_id} takes any text and has no list of admissible actions; "
                "leave it False"
            )
        self.base = base
        self.on_invalid: OnInvalid = checked_choice("on_invalid", on_invalid, get_args(OnInvalid))
        self.channel = make_channel(channel, base.tool) if isinstance(channel, str) else channel
        self.max_turns = limit_of_turns(max_turns)
        # checked even if it is not used, so that a mistake does not wait for another policy
        penalty = checked_number("penalty", penalty, error=TurngymError)
        self.penalty = penalty if on_invalid == "penalize" else 0.0
        self.invalid_cost = checked_number("invalid_cost", invalid_cost, least=0.0, error=TurngymError)
        self.list_admissible = list_admissible
        self.show_admissible = show_admissible
        self.reading: Reading = checked_choice("reading", reading, get_args(Reading))
        base.speak_through(self.channel)
        self._turn = 0
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode; `options={"task": id}` chooses the task."""
        begun: Any = self.env.reset(seed=seed, options=options)
        if not isinstance(begun, tuple) or len(begun) != 2:
            raise EnvBackendError(f"a reset gave {brief(begun, 80)}; it must be (observation, info)")
        observation = checked_text("the first observation", begun[0])
        self._turn = 0
        self._over = False
        return observation + self._shown(), self._noted(begun[1], None)

    def step(self, action: str) -> Step:
        """Judges one response and plays its action if that is valid. Raises ResetNeeded outside an episode."""
        if self._over:
            raise ResetNeeded(f"{self.base.env_id}: step() was called outside an episode; call reset() first")
        if not isinstance(action, str):
            raise TurngymError(f"{self.base.env_id}: step() takes a str, not {type(action).__name__} {action!r}")
        action = str.__str__(action)
        # before it is parsed, because a reward may judge the form of malformed responses too
        self.base.on_response(action)
        parsed, reading = read_action(action, self.channel, self.base, self.reading)
        if parsed.action is None:
            return self._answer(Verdict.MALFORMED, None, f"No action could be read: {parsed.reason}.", None)
        canonical = self.base.canonical(parsed.action)
        malformed = parsed.reason is not None
        if malformed and self.on_invalid != "noop":
            return self._answer(Verdict.MALFORMED, canonical, f"Malformed: {parsed.reason}.", reading)
        reason = refusal(self.base, canonical)
        if reason is not None:
            verdict = Verdict.MALFORMED if malformed else Verdict.INADMISSIBLE
            return self._answer(verdict, canonical, f"Invalid action: {reason}.", reading)
        observation, reward, terminated, truncated, info = self.env.step(canonical)
        paid = checked_number("the reward", reward)
        if malformed:
            info["verdict"] = Verdict.MALFORMED.value
            paid -= self.invalid_cost
        return self._count(observation, paid, terminated, truncated, self._noted(info, reading))

    def close(self) -> None:
        """Closes the environment. Twice is fine, stepping it afterwards is not. One that fails at it loses nothing."""
        self._over = True
        try:
            self.env.close()
        except KeyboardInterrupt:
            raise
        # a panic of Rust is no Exception
        except BaseException as error:
            reason = f"{type(error).__name__}: {said_by(error)}"
            warnings.warn(f"{type(self.base).__name__} failed as it was closed: {reason}", stacklevel=2)

    def read(self, response: str) -> Parsed:
        """The action in the agent's text, as `step` would read it now."""
        return read_action(response, self.channel, self.base, self.reading)[0]

    def render(self) -> str | None:  # type: ignore[override]
        """The environment's frame, and the list of admissible actions if that is shown."""
        frame: Any = self.env.render()
        return frame + self.listing() if isinstance(frame, str) else None

    def listing(self) -> str:
        """The list of admissible actions that ends the present observation; "" if it is not shown."""
        if not self.show_admissible or self._over:
            return ""
        return listed(self.base.admissible() or ())

    def get_state(self) -> dict[str, Any]:
        """An exact snapshot of the environment and of the guard's counters."""
        return {"turn": self._turn, "over": self._over, "env": self.base.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `get_state()`. A refused snapshot changes nothing."""
        check_snapshot(state, _Snapshot, self.env_id)
        self.base.set_state(state["env"])
        self._turn, self._over = state["turn"], state["over"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # unpickling made the environment from its arguments, which do not hold what the guard told it
        self.base.speak_through(self.channel)

    def describe(self) -> dict[str, Any]:
        """A fresh `info` for the present state, as `reset` gives it."""
        return self._noted(self.base.describe() | {"turn": self._turn}, None)

    def task_ids(self) -> Sequence[str]:
        return tasks_of(self.base)

    def admissible(self) -> tuple[str, ...] | None:
        return self.base.admissible()

    def expert_action(self) -> str | None:
        return self.base.expert_action()

    @property
    def env_id(self) -> str:
        return self.base.env_id

    @property
    def task(self) -> Task:
        return self.base.task

    @property
    def tool(self) -> Tools:
        return self.base.tool

    @property
    def instructions(self) -> str:
        return self.base.instructions

    @property
    def success(self) -> bool:
        return self.base.success

    @property
    def score(self) -> float:
        return self.base.score

    def _noted(self, info: dict[str, Any], reading: Reading | None) -> dict[str, Any]:
        return info if self.reading == "strict" else info | {"reading": reading}

    def _answer(self, verdict: Verdict, action: str | None, reason: str, reading: Reading | None) -> Step:
        # first, because the environment may change what is admissible next
        self.base.on_refusal()
        info = self._noted(self.base.describe(verdict, action), reading)
        observation = self.base.invalid_observation if self.on_invalid == "noop" else self._advice(reason, action)
        if self.base.render_mode is not None:
            self.base.show(observation, action or "")
        cost = self.invalid_cost if verdict is Verdict.MALFORMED else 0.0
        return self._count(observation, self.penalty - cost, self.on_invalid == "terminate", False, info)

    def _shown(self) -> str:
        """Returns `listing`, and prints it if the environment prints its frames."""
        listing = self.listing()
        if listing and self.base.render_mode == "human":
            print(printable(listing[1:]), flush=True)
        return listing

    def _advice(self, reason: str, action: str | None) -> str:
        admissible = self.base.admissible()
        if not admissible:
            return f"{reason} Nothing was done."
        near = self.base.suggestion(action) if action else None
        hint = "" if near is None else f" Did you mean {quote(near)}?"
        # a difference that cannot be seen, unlike one of letter case, must be shown
        if near is not None and action and action.casefold() != near.casefold() and alike(action, [near]):
            hint = f" Did you mean {quote(near, beside=action)}, not {quote(action, beside=near)}?"
        lines = [f"{reason} Nothing was done.{hint}"]
        if self.list_admissible and not self.show_admissible:
            lines.append(f"Possible actions: {', '.join(admissible)}.")
        return "\n".join(lines)

    def _count(self, observation: str, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]) -> Step:
        self._turn += 1
        info["turn"] = self._turn
        # a win on the last turn is an end, not a truncation
        if self.max_turns is not None and self._turn >= self.max_turns and not terminated:
            truncated = True
        self._over = terminated or truncated
        return observation + self._shown(), reward, terminated, truncated, info


def limit_of_turns(max_turns: object) -> int | None:
    """Returns `max_turns` if it is None or a whole number of at least 1. Raises TurngymError for anything else."""
    return None if max_turns is None else checked_int("max_turns", max_turns, 1, none="no limit")


def listed(actions: Sequence[str]) -> str:
    """The list of admissible actions as text: a headline and one action a line; "" for none."""
    return "".join(("\nAdmissible actions:", *(f"\n- {action}" for action in actions))) if actions else ""


def guard_of(env: gym.Env[Any, Any]) -> ActionGuard:
    """The guard inside `env`, whichever wrappers (TimeLimit, RecordEpisodeStatistics, ...) are around it."""
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, ActionGuard):
            return layer
        layer = layer.env
    raise TurngymError(f"{env} has no ActionGuard; make it with gym.make, or wrap the environment: ActionGuard(env)")
