"""TextEnv: what all environments share, so that a new one writes only its tasks and its rules.

The least code for an environment is the list of methods in the docstring of `TextEnv`. An exact snapshot of an episode
is `get_state()`; a snapshot that `set_state()` refuses leaves the environment as it was. What is valid, and when the
turns are over, is decided by the guard around it (envs/guard.py).
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import gymnasium as gym
import msgspec
import numpy as np

from turngym.core.errors import EnvBackendError, TaskError, TurngymError, did_you_mean, nearest
from turngym.core.numbers import Number, Seed
from turngym.core.plugin_values import checked_flag, checked_number, checked_text, checked_verdict, failures_of, unique
from turngym.core.redaction import brief, first_letters
from turngym.core.task import Task, Verdict
from turngym.core.tools import Tools, ToolSpec
from turngym.envs.channels import Channel
from turngym.envs.lookalikes import alike, shown
from turngym.envs.spaces import UnicodeText, printable

_NAME = re.compile(r"[A-Za-z0-9_./-]+")
_TOO_EARLY = {
    "new": "was called before reset()",
    "over": "was called after the episode ended",
    "closed": "was called on a closed environment",
}


class ResetNeeded(TurngymError, gym.error.ResetNeeded):
    """`step()` was called before the first `reset()`, or after the episode ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one action did."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    verdict: Verdict = Verdict.OK

    def __post_init__(self) -> None:
        # every step makes one; what a text or a number may be, the guard and the player look at
        kinds = type(self.observation), type(self.reward), type(self.terminated), type(self.verdict)
        if kinds == (str, float, bool, Verdict):
            return
        checked_text("the observation", self.observation)
        checked_number("the reward", self.reward)
        checked_flag("terminated", self.terminated)
        checked_verdict(self.verdict)


class Player(Protocol):
    """Chooses actions in the environment that it was made for."""

    def observe(self, action: str) -> None:
        """Is called after every played action, its own or another one."""

    def act(self) -> str | None:
        """The next action from the present state; None if it knows none."""


@runtime_checkable
class ReadingPlayer(Player, Protocol):
    """A player that minds what it is told beside the first observation."""

    def read(self, text: str) -> None:
        """Is called before the first action where something is told."""


class ActingPlayer:
    """A player that chooses by the environment's state, so that it has nothing to learn from actions."""

    def __init__(self, act: Callable[[], str | None]) -> None:
        self.act = act

    def observe(self, action: str) -> None:
        """Does nothing."""


class TextEnv(gym.Env[str, str], ABC):
    """A text environment. Subclasses give tasks and rules, this class gives the Gymnasium interface.

    A subclass must set `env_id`, `tool` and `instructions`, and write `task_ids`, `_begin`, `_apply`, `task`,
    `success`, `_get_state` and `_set_state`. It may write `admissible` (closed action spaces) or `check` (open ones),
    `score` and `expert_action`. Randomness may only come from `self.np_random`.

    Any `str` is a legal action: one that makes no sense is answered and judged, and is never an exception. Exceptions
    are for callers (`ResetNeeded`, `TaskError`, an action that is no string) and for failed back ends
    (`EnvBackendError`).

    A closed environment can be reset, or given a snapshot, like a new one: `_reopen` takes back what `_close` gave up.
    Pickling and copying keep the constructor's arguments and a snapshot of the episode; the copy is made anew from
    them, with the data of the place where it is.
    """

    # Gymnasium's environment checker warns without render_fps, though text has no frame rate
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # type: ignore[misc]
    env_id: ClassVar[str]
    tool: ClassVar[Tools]
    instructions: ClassVar[str]
    """What the environment is and how to act in it; goes into the system message."""
    invalid_observation: ClassVar[str] = "Nothing happens."
    """The environment's own answer to an action it does not know."""
    players: ClassVar[tuple[str, ...]] = ()
    """Names of the scripted players that `make_player` knows: baselines and further experts."""
    on_invalid: ClassVar[Literal["reject", "penalize", "noop", "terminate"]] = "reject"
    """What the guard does with an invalid action by default (see `ActionGuard`)."""
    told_by: ClassVar[frozenset[str]] = frozenset()
    """Arguments of the constructor that change what an agent is told, not the tasks nor what scores. Results on a panel
    may differ in them, and tables name them. Their values are plain: numbers, texts, true or false."""
    scored_by: ClassVar[frozenset[str]] = frozenset()
    """Arguments of the constructor, plain values, by which actions and scores are judged: a result that was played with
    others than its panel's is none of that panel. All other arguments are taken from a panel or a person alone."""

    @classmethod
    def options_within(cls, max_turns: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constructor's arguments; overridden where the rules depend on the guard's limit of turns."""
        return dict(options)

    __made_with: tuple[tuple[Any, ...], dict[str, Any]]
    __phase = "new"
    __env_steps = 0
    __frame = ""
    # of this class alone: a subclass may well keep its ids as `_ids`
    __ids: tuple[Collection[str] | None, frozenset[str]] = (None, frozenset())

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # not in the constructor, which a subclass may forget to call
        env = super().__new__(cls)
        env.__made_with = (args, kwargs)
        env.observation_space = UnicodeText()
        env.action_space = UnicodeText()
        return env

    def __init__(self, *, render_mode: str | None = None) -> None:
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise TurngymError(f"{self.env_id}: render_mode {render_mode!r} is not one of {', '.join(modes)} or None")
        self.render_mode = render_mode

    # --- what a subclass writes

    @abstractmethod
    def task_ids(self) -> Sequence[str]:
        """Every task, in a fixed order; may be a lazy sequence with its own `__contains__`."""

    @abstractmethod
    def _begin(self, task_id: str) -> str:
        """Loads a task that exists and returns the first observation."""

    @abstractmethod
    def _apply(self, action: str) -> Outcome:
        """Plays one action in canonical form; the `Outcome` says so if it is inadmissible. Calls of a `ToolSet` are
        valid here."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """The task being played."""

    def task_of(self, task_id: str) -> Task:
        """The task with an id, for panels. By default it is begun; overridden where that is not needed."""
        self.reset(options={"task": task_id})
        return self.task

    @property
    @abstractmethod
    def success(self) -> bool:
        """Whether the task is solved, right now."""

    @property
    def statement(self) -> str | None:
        """The part of the first observation that states the task; None if it cannot be separated."""
        return None

    @property
    def score(self) -> float:
        """Graded success in [0, 1]; by default 1.0 or 0.0."""
        return 1.0 if self.success else 0.0

    @property
    def scoring(self) -> dict[str, str]:
        """The facts besides the task on which scores depend: `scored_with`, a name with its version, and, if scores
        only approximate the benchmark's, `approximate`, which says why and what would make them exact."""
        return {}

    def admissible(self) -> tuple[str, ...] | None:
        """All actions that are possible now; None in open action spaces, where `check` judges."""
        return None

    def check(self, action: str) -> str | None:
        """Says why a canonical action is not possible now, as a clause for the agent; None if it is possible."""
        admissible = self.admissible()
        if admissible is None or action in admissible:
            return None
        return f"{quote(action)} is not possible now"

    def suggestion(self, action: str) -> str | None:
        """The possible action that is most like an impossible one; None if none is near."""
        possible = self.admissible() or ()
        near = alike(action, possible) or nearest(action, possible)
        return near[0] if near else None

    def canonical(self, action: str) -> str:
        """The form in which actions are judged and played, as `tool` says; subclasses may add aliases."""
        return self.tool.canonical(action)

    def speak_through(self, channel: Channel | None) -> None:
        """The guard tells how the agent's actions travel (None: bare), for observations that say how to act."""

    def rename_tool(self, name: str | None = None, argument: str | None = None) -> None:
        """Publishes this object's tool with another name or argument; None keeps the present one."""
        for setting, text in (("tool_name", name), ("tool_argument", argument)):
            if text is not None and not _NAME.fullmatch(text):
                raise TurngymError(
                    f"{self.env_id}: {setting} is {text!r}; valid: letters, digits, '_', '-', '.' and '/', for example "
                    "'search_r1/search'"
                )
        if not isinstance(self.tool, ToolSpec):
            raise TurngymError(
                f"{self.env_id} offers {self.tool.named}, which keep their names; leave tool_name and tool_argument out"
            )
        named = replace(self.tool, name=name or self.tool.name, argument=argument or self.tool.argument)
        self.tool = named  # type: ignore[misc]

    def on_response(self, response: str) -> None:
        """Receives the agent's whole response before it is judged, for rewards that read more than the action."""

    def on_refusal(self) -> None:
        """Is called if that response is invalid, so that the guard answers it and it is not played."""

    def expert_action(self) -> str | None:
        """An expert's next action from the present state; None if there is no expert or no way to win."""
        return None

    def sample_action(self, rng: np.random.Generator) -> str | None:
        """A random action that is possible now, uniform over `admissible`; None if that is open or empty."""
        choices = self.admissible()
        return choices[int(rng.integers(len(choices)))] if choices else None

    def make_player(self, name: str) -> Player:
        """Makes the scripted player `name` for the episode that has just begun. Raises TurngymError if unknown."""
        names = ", ".join(self.players) or "none"
        hint = did_you_mean(name, self.players)
        raise TurngymError(f"{self.env_id} has no player {name!r} now; its players are: {names}.{hint}")

    def plausible_mistake(self, rng: np.random.Generator) -> str | None:
        """A plausible mistake in the present state, possible or not, as noise for demonstrations; None if unknown."""
        return None

    @abstractmethod
    def _get_state(self) -> Any:
        """An exact copy of everything that playing changed since `_begin`, in types of JSON.

        A tuple comes back from JSON as a list, so `_set_state` must read both.
        """

    @abstractmethod
    def _set_state(self, state: Any) -> None:
        """Restores what `_get_state` returned; the same task has just begun.

        A state that could not be played on must be refused here (`require_shape`), with a ValueError or TypeError.
        """

    # --- the Gymnasium interface

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins `options["task"]`, or a task drawn with `self.np_random`. Raises TaskError for unknown ids."""
        super().reset(seed=seed)
        for name in options or {}:
            if name != "task":
                hint = did_you_mean(str(name), ["task"])
                raise TurngymError(f"{self.env_id}: reset() has no option {name!r}; options are: 'task'.{hint}")
        chosen = (options or {}).get("task")
        ids = tasks_of(self)
        if chosen is None and not len(ids):
            raise TaskError(f"{self.env_id}: there is no task to draw from")
        if chosen is None:
            task_id = checked_text("one of task_ids()", ids[int(self.np_random.integers(len(ids)))])
        else:
            task_id = self.__require_task(chosen)
        self.__open_again()
        observation = self._begin(task_id)
        self.__phase = "playing"
        self.__env_steps = 0
        if self.render_mode is not None:
            self.show(observation)
        return observation, self.describe()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays `action`; `info` has the verdict on it. Never truncates, for the guard limits the turns."""
        if self.__phase != "playing":
            raise ResetNeeded(f"{self.env_id}: step() {_TOO_EARLY[self.__phase]}; call reset() first")
        if not isinstance(action, str):
            raise TurngymError(f"{self.env_id}: step() takes a str, not {type(action).__name__} {action!r}")
        # makes a plain str of NumPy's, which would otherwise stay in `info`
        action = self.canonical(str.__str__(action))
        if self.tool.refuse(action) is None:
            outcome = self._apply(action)
            if not isinstance(outcome, Outcome):
                raise EnvBackendError(f"_apply() gave {brief(outcome, 80)}; it must be an Outcome")
        else:
            outcome = Outcome(observation=self.invalid_observation, verdict=Verdict.INADMISSIBLE)
        self.__env_steps += 1
        if outcome.terminated:
            self.__phase = "over"
        if self.render_mode is not None:
            self.show(outcome.observation, action)
        info = self.describe(outcome.verdict, action)
        return outcome.observation, outcome.reward, outcome.terminated, False, info

    def render(self) -> str | None:  # type: ignore[override]
        """The last action and observation in ansi mode; None in human mode, which has printed them already."""
        if self.render_mode is None:
            gym.logger.warn(f"{self.env_id}: render() needs render_mode='ansi' or 'human' when the environment is made")
        return self.__frame if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Releases what the environment holds. Closing twice is fine, and `reset` opens it again."""
        if self.__phase != "closed":
            self.__phase = "closed"
            self._close()

    def _close(self) -> None:
        """Releases files, processes and connections; called once, and again only after `_reopen`."""

    def _reopen(self) -> None:
        """Takes again what `_close` released, because a closed environment is about to play."""

    def __open_again(self) -> None:
        if self.__phase == "closed":
            self._reopen()
            self.__phase = "new"

    # --- for wrappers and panels

    def describe(self, verdict: Verdict = Verdict.OK, action: str | None = None) -> dict[str, Any]:
        """A fresh `info` of str, int, float, bool, list of str and None, always with the same keys."""
        task = self.task
        admissible = self.admissible()
        return {
            "task_id": task.task_id,
            "task_sha": task.sha256,
            "category": task.category,
            "turn": self.__env_steps,
            "env_steps": self.__env_steps,
            "verdict": Verdict(verdict).value,
            "action": action,
            "admissible_actions": None if admissible is None else list(admissible),
            "success": self.success,
            "score": self.score,
        }

    def show(self, observation: str, action: str | None = None) -> None:
        """Makes this the frame that `render()` shows, and prints it in human mode."""
        self.__frame = observation if action is None else f"> {action}\n{observation}"
        if self.render_mode == "human":
            print(printable(self.__frame), flush=True)

    def get_state(self) -> dict[str, Any]:
        """An exact snapshot in types of JSON: a restored episode continues byte for byte, random draws included."""
        if self.__phase not in ("playing", "over"):
            raise ResetNeeded(f"{self.env_id}: get_state() {_TOO_EARLY[self.__phase]}; call reset() first")
        return {
            "task": self.task.task_id,
            "sha256": self.task.sha256,
            "phase": self.__phase,
            "env_steps": self.__env_steps,
            "frame": self.__frame,
            "rng": copy.deepcopy(self.np_random.bit_generator.state),
            "rng_seed": self._np_random_seed,
            "inner": _as_json_has_it(self._get_state()),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `get_state()`, also in another object or process. A refused snapshot changes nothing.

        Raises:
            TaskError: the task is unknown, or has another hash than in the snapshot.
            TurngymError: this is no snapshot, or not one of this environment.
        """
        check_snapshot(state, _Snapshot, self.env_id)
        self.__require_task(state["task"])
        closed = self.__phase == "closed"
        # beginning a task changes the last of these attributes in place
        attributes = {**vars(self), "_np_random": copy.deepcopy(self._np_random)}
        before = self.get_state() if self.__phase in ("playing", "over") else None
        try:
            self.__open_again()
            self.__restore(state)
        except BaseException as error:
            if closed and self.__phase != "closed":
                self._close()
            vars(self).clear()
            vars(self).update(attributes)
            if before is not None:
                self.__restore(before)
            # what reading a snapshot raises that was changed, or that another environment took
            wrong = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
            if isinstance(error, wrong) and not isinstance(error, TurngymError):
                problem = f"{type(error).__name__}: {error}"
                raise TurngymError(f"{self.env_id}: the snapshot cannot be restored here ({problem})") from error
            raise

    def __restore(self, state: dict[str, Any]) -> None:
        self._begin(state["task"])
        if self.task.sha256 != state["sha256"]:
            raise TaskError(
                f"{self.env_id}: the snapshot was taken in task {state['task']!r} with sha256 {state['sha256']}, "
                f"but here that task has sha256 {self.task.sha256}; restore it with the same data"
            )
        self._set_state(state["inner"])
        self.__phase, self.__env_steps, self.__frame = state["phase"], state["env_steps"], state["frame"]
        # not through the property: Gymnasium's setter of np_random forgets the seed
        bits = np.random.PCG64()
        bits.state = copy.deepcopy(state["rng"])
        self._np_random, self._np_random_seed = np.random.Generator(bits), state["rng_seed"]

    def __reduce__(self) -> tuple[Any, ...]:
        snapshot = self.get_state() if self.__phase in ("playing", "over") else None
        names = ("_np_random", "_np_random_seed", "spec", "tool")
        attributes = {name: vars(self)[name] for name in names if name in vars(self)}
        args, kwargs = self.__made_with
        return partial(type(self), *args, **kwargs), (), (self.__phase, snapshot, attributes)

    def __setstate__(self, state: tuple[str, dict[str, Any] | None, dict[str, Any]]) -> None:
        phase, snapshot, attributes = state
        vars(self).update(attributes)
        if snapshot is not None:
            self.set_state(snapshot)
        elif phase == "closed":
            self.close()

    def __require_task(self, task_id: str) -> str:
        ids = tasks_of(self)
        valid_ids: Collection[str] = ids
        # `in` walks through a tuple; a lazy sequence has a quick one of its own and is never walked through
        if isinstance(ids, (tuple, list)):
            # the list is kept beside its set, so that its identity cannot pass to another list
            if self.__ids[0] is not ids:
                unique(f"{self.env_id}: task_ids()", ids)
                self.__ids = (ids, frozenset(ids))
            valid_ids = self.__ids[1]
        if isinstance(task_id, str) and task_id in valid_ids:
            return str.__str__(task_id)
        hint = did_you_mean(str(task_id), map(str, ids))
        raise TaskError(f"{self.env_id}: unknown task {task_id!r} ({len(ids)} are known).{hint}")


def tasks_of(env: TextEnv) -> Sequence[str]:
    """Every task of an environment. Raises EnvBackendError, in a line, where it fails to say or says no list."""
    with failures_of(f"{type(env).__name__}.task_ids()", env, EnvBackendError):
        ids = env.task_ids()
        # an array has no quick `in`, and a table's looks among the labels of its rows
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
    # a mapping has no order to draw by, and bytes hold numbers
    if isinstance(ids, (str, bytes, Mapping)) or not (hasattr(ids, "__len__") and hasattr(ids, "__getitem__")):
        raise EnvBackendError(f"{type(env).__name__}.task_ids() gave {brief(ids, 80)}; it must be a list of texts")
    return ids


_BLANKS = re.compile(r"[ \t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
"""Blanks, tabs and ends of lines; other white space is shown as what it is."""


def quote(text: str, limit: int = 120, *, beside: str | None = None) -> str:
    """`text` in quotation marks on one line of about `limit` characters, safe to encode.

    Characters that cannot be seen are escaped (`\\xa0`), runs of blanks are one. With `beside`, a text that looks the
    same, runs stay and whatever that text lacks is escaped, too, so that the two are never quoted alike.
    """
    # cut first, because responses may have megabytes
    line = printable(first_letters(text, limit + 1))
    line = shown(_BLANKS.sub(" ", line).strip() if beside is None else line, beside)
    return f'"{line}"' if len(text) <= limit else f'"{first_letters(line, limit)}..."'


class _Snapshot(msgspec.Struct):
    """What `TextEnv.get_state()` gives."""

    task: str
    sha256: str
    phase: Literal["playing", "over"]
    env_steps: Number
    frame: str
    rng: dict[str, Any]
    rng_seed: Seed | None
    inner: Any


def check_snapshot(state: Any, kind: type[msgspec.Struct], where: str) -> None:
    """Raises TurngymError unless `state` has the fields of `kind`, with values of their types."""
    try:
        msgspec.convert(state, kind)
    # half a surrogate pair in a key is a ValueError, too
    except ValueError as error:
        raise TurngymError(
            f"{where}: this is no snapshot that get_state() gave: {error} (that of an environment is the item 'env' of "
            "its guard's)"
        ) from error


def require_shape(value: Any, shape: Any, what: str = "the state") -> None:
    """Raises TypeError, naming the place, unless `value`, of types of JSON, has this shape.

    A type, or a tuple of types, is a value of it; `[shape]` a list of any length, `[shape, shape, ...]` one item of
    each; `{"name": shape}` an object with exactly these names. `bool` is no `int`.
    """
    if isinstance(shape, dict):
        if not isinstance(value, Mapping) or value.keys() != shape.keys():
            raise TypeError(f"{what} is {brief(value, 80)}; it must be an object of {', '.join(shape)}")
        for name, inner in shape.items():
            require_shape(value[name], inner, f"{what}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, (list, tuple)) or (len(shape) > 1 and len(value) != len(shape)):
            size = f" of {len(shape)}" if len(shape) > 1 else ""
            raise TypeError(f"{what} is {brief(value, 80)}; it must be a list{size}")
        for index, item in enumerate(value):
            require_shape(item, shape[index] if len(shape) > 1 else shape[0], f"{what}[{index}]")
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{what} is {brief(value, 80)}; it must be {' or '.join(kind.__name__ for kind in kinds)}")


def _as_json_has_it(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json_has_it(item) for name, item in value.items()}
    return [_as_json_has_it(item) for item in value] if isinstance(value, list | tuple) else value
