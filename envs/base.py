"""TextEnv: what every benchmark environment shares, so that a new one writes only its tasks and its rules."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import gymnasium as gym
import numpy as np

from turngym.envs.channels import Channel
from turngym.envs.core.errors import TaskError, TurngymError, did_you_mean
from turngym.envs.core.task import Task, ToolSpec, Verdict
from turngym.envs.spaces import UnicodeText, printable

_NAME = re.compile(r"[A-Za-z0-9_./-]+")


class ResetNeeded(TurngymError, gym.error.ResetNeeded):
    """`step()` before the first `reset()`, or after the episode ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one action did."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    verdict: Verdict = Verdict.OK


class Player(Protocol):
    """Chooses actions in the environment that it was made for."""

    def observe(self, action: str) -> None:
        """Called after every played action, the player's own or another one."""

    def act(self) -> str | None:
        """The next action from the present state; None where it knows none."""


class TextEnv(gym.Env[str, str], ABC):
    """A text environment: subclasses give tasks and rules, this class gives the Gymnasium interface.

    A subclass sets `env_id`, `tool`, `instructions` and writes `task_ids`, `_begin`, `_apply`, `task`, `success`,
    `_get_state`, `_set_state`; `admissible` (closed action spaces) or `check` (open ones), `score` and
    `expert_action` where it can. Randomness may only come from `self.np_random`.

    Any `str` is a legal action: one that makes no sense is answered and judged, never an exception. Exceptions are for
    callers (`ResetNeeded`, `TaskError`, a non-string action) and for failed back ends (`EnvBackendError`).

    A closed environment is reset (or given a snapshot) like a new one: what `_close` released, `_reopen` takes again.
    Pickling (and copying) keeps the arguments that an object was made with and a snapshot of its episode: elsewhere it
    is made anew, from the data there.
    """

    # Gymnasium's environment checker warns without render_fps, though text has no frame rate
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # type: ignore[misc]
    env_id: ClassVar[str]
    tool: ClassVar[ToolSpec]
    instructions: ClassVar[str]
    """What the environment is and how to act in it; goes into the system message."""
    invalid_observation: ClassVar[str] = "Nothing happens."
    """The environment's own answer to an action it does not know."""
    players: ClassVar[tuple[str, ...]] = ()
    """Names of the scripted players that `make_player` knows, baselines and further experts."""
    on_invalid: ClassVar[Literal["reject", "penalize", "noop", "terminate"]] = "reject"
    """What the guard does with an invalid action unless it is told otherwise (see `ActionGuard`)."""

    @classmethod
    def options_within(cls, max_turns: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor, given the guard's limit of turns: for environments whose rules depend on it."""
        return dict(options)

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._made_with = (args, kwargs)
        return made

    def __init__(self, *, render_mode: str | None = None) -> None:
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise TurngymError(f"{self.env_id}: render_mode {render_mode!r} is not one of {', '.join(modes)} or None")
        self.render_mode = render_mode
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._phase = "new"
        self._env_steps = 0
        self._frame = ""
        self._ids: tuple[Collection[str] | None, frozenset[str]] = (None, frozenset())

    # --- what a subclass writes

    @abstractmethod
    def task_ids(self) -> Sequence[str]:
        """Every task, in a fixed order; may be a lazy sequence with its own `__contains__`."""

    @abstractmethod
    def _begin(self, task_id: str) -> str:
        """Load the (existing) task and return the first observation."""

    @abstractmethod
    def _apply(self, action: str) -> Outcome:
        """Play one action in canonical form; an inadmissible one is an `Outcome` that says so."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """The task being played."""

    @property
    @abstractmethod
    def success(self) -> bool:
        """Whether the task is solved, right now."""

    @property
    def statement(self) -> str | None:
        """The task alone, in the words of the first observation; None where that cannot be taken apart."""
        return None

    @property
    def score(self) -> float:
        """Graded success in [0, 1]; by default 1.0 or 0.0."""
        return 1.0 if self.success else 0.0

    def admissible(self) -> tuple[str, ...] | None:
        """Everything that may be done now; None where any text may be (then `check` judges)."""
        return None

    def check(self, action: str) -> str | None:
        """Why a canonical action is not possible now, as a clause for the agent to read; None when it is possible."""
        admissible = self.admissible()
        if admissible is None or action in admissible:
            return None
        return f"{quote(action)} is not possible now"

    def canonical(self, action: str) -> str:
        """The form in which actions are judged and played: stripped; subclasses may add aliases."""
        return action.strip()

    def speak_through(self, channel: Channel | None) -> None:
        """How the agent's actions travel (None: bare), told by the guard: for answers that say how to act."""

    def rename_tool(self, name: str | None = None, argument: str | None = None) -> None:
        """Publish the tool of this object under another name, with another argument; None keeps what is there."""
        for what, text in (("tool_name", name), ("tool_argument", argument)):
            if text is not None and not _NAME.fullmatch(text):
                raise TurngymError(
                    f"{self.env_id}: {what} is {text!r}; valid: letters, digits, '_', '-', '.' and '/', for example "
                    "'search_r1/search'"
                )
        named = replace(self.tool, name=name or self.tool.name, argument=argument or self.tool.argument)
        self.tool = named  # type: ignore[misc]

    def on_response(self, response: str) -> None:
        """The agent's whole response, before it is judged: for rewards that read more than the action."""

    def on_refusal(self) -> None:
        """That response was not played: the guard answers it as invalid."""

    def expert_action(self) -> str | None:
        """The next action of an expert from the present state; None where there is no expert or no way."""
        return None

    def sample_action(self, rng: np.random.Generator) -> str | None:
        """A random action that may be played now; by default uniform over `admissible`, None where that is open."""
        choices = self.admissible()
        return choices[int(rng.integers(len(choices)))] if choices else None

    def make_player(self, name: str) -> Player:
        """The scripted player called `name` for the episode that has just begun. Raises TurngymError if unknown."""
        known = ", ".join(self.players) or "none"
        hint = did_you_mean(name, self.players)
        raise TurngymError(f"{self.env_id} has no player {name!r} now; its players are: {known}.{hint}")

    def plausible_mistake(self, rng: np.random.Generator) -> str | None:
        """A plausible mistake in the present state, possible or not: noise for demonstrations; None where unknown."""
        return None

    @abstractmethod
    def _get_state(self) -> Any:
        """An exact copy of all that playing has changed since `_begin`, of what JSON knows: dict, list, str, numbers.

        A tuple comes back from JSON as a list: `_set_state` must read both.
        """

    @abstractmethod
    def _set_state(self, state: Any) -> None:
        """Restore what `_get_state` returned; the same task has just begun."""

    # --- the Gymnasium interface

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin `options["task"]`, or else a task drawn with `self.np_random`. Raises TaskError for unknown ids."""
        super().reset(seed=seed)
        task_id = self._chosen_task(options or {})
        self._open_again()
        observation = self._begin(task_id)
        self._phase = "playing"
        self._env_steps = 0
        if self.render_mode is not None:
            self.show(observation)
        return observation, self.describe()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play `action`; the verdict on it is in `info`. Never truncates: limits of turns belong to the guard."""
        if self._phase != "playing":
            raise ResetNeeded(f"{self.env_id}: step() {_TOO_EARLY[self._phase]}; call reset() first")
        if not isinstance(action, str):
            raise TurngymError(f"{self.env_id}: step() takes a str, not {type(action).__name__} {action!r}")
        # a str of NumPy's is one too, and would stay one in `info`
        action = self.canonical(str.__str__(action))
        outcome = self._apply(action)
        self._env_steps += 1
        if outcome.terminated:
            self._phase = "over"
        if self.render_mode is not None:
            self.show(outcome.observation, action)
        info = self.describe(outcome.verdict, action)
        return outcome.observation, outcome.reward, outcome.terminated, False, info

    def render(self) -> str | None:  # type: ignore[override]
        """The last action and observation (ansi); human mode has printed them already and returns None."""
        if self.render_mode is None:
            gym.logger.warn(f"{self.env_id}: render() needs render_mode='ansi' or 'human' when the environment is made")
        return self._frame if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Release what the environment holds; closing twice is fine, and `reset` opens it again (see `_close`)."""
        if self._phase != "closed":
            self._phase = "closed"
            self._close()

    def _close(self) -> None:
        """Release files, processes and connections; called once, and again only after `_reopen`."""

    def _reopen(self) -> None:
        """Take again what `_close` released: a closed environment is about to play."""

    def _open_again(self) -> None:
        if self._phase == "closed":
            self._reopen()
            self._phase = "new"

    # --- for wrappers and panels

    def describe(self, verdict: Verdict = Verdict.OK, action: str | None = None) -> dict[str, Any]:
        """A fresh `info`: plain str, int, float, bool, list of str and None only, with the same keys every time."""
        task = self.task
        admissible = self.admissible()
        return {
            "task_id": task.task_id,
            "task_sha": task.sha256,
            "category": task.category,
            "turn": self._env_steps,
            "env_steps": self._env_steps,
            "verdict": verdict.value,
            "action": action,
            "admissible_actions": None if admissible is None else list(admissible),
            "success": self.success,
            "score": self.score,
        }

    def show(self, observation: str, action: str | None = None) -> None:
        """Make this the frame that `render()` shows; prints it in human mode."""
        self._frame = observation if action is None else f"> {action}\n{observation}"
        if self.render_mode == "human":
            print(printable(self._frame), flush=True)

    def get_state(self) -> dict[str, Any]:
        """An exact snapshot that JSON can hold: a restored episode continues byte for byte, random draws included."""
        if self._phase not in ("playing", "over"):
            raise ResetNeeded(f"{self.env_id}: get_state() {_TOO_EARLY[self._phase]}; call reset() first")
        return {
            "task": self.task.task_id,
            "sha256": self.task.sha256,
            "phase": self._phase,
            "env_steps": self._env_steps,
            "frame": self._frame,
            "rng": copy.deepcopy(self.np_random.bit_generator.state),
            "rng_seed": self._np_random_seed,
            "inner": self._get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state()`, also in another object or process; a snapshot that is refused changes nothing.

        Raises:
            TaskError: the task is unknown, or another one than in the snapshot.
            TurngymError: this is no snapshot, or not one of this environment.
        """
        check(state, ENVIRONMENT, self.env_id)
        self._require_task(state["task"])
        closed = self._phase == "closed"
        kept = SnapshotGuard(self, self.get_state() if self._phase in ("playing", "over") else None)
        try:
            self._open_again()
            self._restore(state)
        except BaseException as error:
            if closed and self._phase != "closed":
                self._close()
            kept.put_back(self._restore)
            if isinstance(error, WRONG_CONTENT) and not isinstance(error, TurngymError):
                what = f"{type(error).__name__}: {error}"
                raise TurngymError(f"{self.env_id}: the snapshot cannot be restored here ({what})") from error
            raise

    def _restore(self, state: dict[str, Any]) -> None:
        self._begin(state["task"])
        if self.task.sha256 != state["sha256"]:
            raise TaskError(
                f"{self.env_id}: the snapshot was taken in task {state['task']!r} with sha256 {state['sha256']}, "
                f"but here that task has sha256 {self.task.sha256}; restore it with the same data"
            )
        self._set_state(state["inner"])
        self._phase, self._env_steps, self._frame = state["phase"], state["env_steps"], state["frame"]
        # not through the property: Gymnasium's setter of np_random forgets the seed
        bits = np.random.PCG64()
        bits.state = copy.deepcopy(state["rng"])
        self._np_random, self._np_random_seed = np.random.Generator(bits), state["rng_seed"]

    def __reduce__(self) -> tuple[Any, ...]:
        snapshot = self.get_state() if self._phase in ("playing", "over") else None
        names = ("_np_random", "_np_random_seed", "spec", "tool")
        kept = {name: vars(self)[name] for name in names if name in vars(self)}
        return _made_again, (type(self), *self._made_with), (self._phase, snapshot, kept)

    def __setstate__(self, state: tuple[str, dict[str, Any] | None, dict[str, Any]]) -> None:
        phase, snapshot, kept = state
        vars(self).update(kept)
        if snapshot is not None:
            self.set_state(snapshot)
        elif phase == "closed":
            self.close()

    def _chosen_task(self, options: dict[str, Any]) -> str:
        for name in options:
            if name != "task":
                hint = did_you_mean(str(name), ["task"])
                raise TurngymError(f"{self.env_id}: reset() has no option {name!r}; options are: 'task'.{hint}")
        if options.get("task") is not None:
            return self._require_task(options["task"])
        ids = self.task_ids()
        if not len(ids):
            raise TaskError(f"{self.env_id}: there is no task to draw from")
        return ids[int(self.np_random.integers(len(ids)))]

    def _require_task(self, task_id: str) -> str:
        ids = self.task_ids()
        known: Collection[str] = ids
        # `in` walks through a tuple; a lazy sequence has a quick one of its own and is never walked through
        if isinstance(ids, (tuple, list)):
            # the list is kept beside its set, so that its identity cannot pass to another list
            if self._ids[0] is not ids:
                self._ids = (ids, frozenset(ids))
            known = self._ids[1]
        if isinstance(task_id, str) and task_id in known:
            return str.__str__(task_id)
        raise TaskError(
            f"{self.env_id}: unknown task {task_id!r} ({len(ids)} are known).{did_you_mean(str(task_id), ids)}"
        )


def _made_again(made: type[TextEnv], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TextEnv:
    return made(*args, **kwargs)


_TOO_EARLY = {
    "new": "was called before reset()",
    "over": "was called after the episode ended",
    "closed": "was called on a closed environment",
}


def quote(text: str, limit: int = 120) -> str:
    """`text` in quotation marks on one line of at most `limit` characters, safe to encode."""
    # cut first: responses may have megabytes
    line = " ".join(printable(text[: limit + 1]).split())
    return f'"{line}"' if len(text) <= limit else f'"{line[:limit]}..."'


# Snapshots of environments: what one must hold, and how an environment stays as it was when one is refused.

ENVIRONMENT: Mapping[str, tuple[type, ...]] = {
    "task": (str,),
    "sha256": (str,),
    "phase": (str,),
    "env_steps": (int,),
    "frame": (str,),
    "rng": (dict,),
    "rng_seed": (int, type(None)),
    "inner": (object,),
}
"""Keys of `TextEnv.get_state()`, and the types of their values."""
GUARD: Mapping[str, tuple[type, ...]] = {"turn": (int,), "over": (bool,), "env": (dict,)}
"""Keys of `ActionGuard.get_state()`."""
WRONG_CONTENT = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What reading a snapshot raises that another environment took, or that was changed."""


def check(state: Any, keys: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Raise TurngymError unless `state` has these keys with values of these types."""
    if not isinstance(state, Mapping):
        raise TurngymError(
            f"{where}: set_state() takes what get_state() gave, not {type(state).__name__} {state!r:.80}"
        )
    missing = [key for key in keys if key not in state]
    if missing:
        # a guard's snapshot has the environment's inside
        inside = " (this looks like a guard's: its item 'env' is the environment's)" if "env" in state else ""
        outside = " (this looks like an environment's, not its guard's)" if "inner" in state else ""
        raise TurngymError(
            f"{where}: the snapshot lacks {', '.join(missing)}; give what get_state() gave{inside or outside}"
        )
    for key, types in keys.items():
        if not isinstance(state[key], types):
            names = " or ".join(kind.__name__ for kind in types)
            raise TurngymError(f"{where}: the snapshot's {key} is {state[key]!r:.80}; it must be {names}")
    if "phase" in keys and state["phase"] not in ("playing", "over"):
        hint = did_you_mean(state["phase"], ("playing", "over"))
        raise TurngymError(
            f"{where}: the snapshot's phase is {state['phase']!r}; it must be 'playing' or 'over'.{hint}"
        )


class SnapshotGuard:
    """How an object stands, to be put back: its attributes, and the snapshot of the episode that it is in."""

    def __init__(self, target: Any, snapshot: Any) -> None:
        self._target = target
        self._snapshot = snapshot
        self._attributes = dict(vars(target))
        # the one attribute that is changed in place by merely beginning a task
        self._attributes["_np_random"] = copy.deepcopy(target._np_random)

    def put_back(self, restore: Callable[[Any], None]) -> None:
        """As it stood; `restore` continues the snapshot's episode."""
        vars(self._target).clear()
        vars(self._target).update(self._attributes)
        if self._snapshot is not None:
            restore(self._snapshot)
