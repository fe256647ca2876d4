"""The reference engine: TextWorld's PDDL environment with alfworld's wrappers, kept alive and given other games.

Needs the extra `turngym[alfworld]`. Every TextWorld environment loads its own copy of a 33.8 MB library and never
unloads it, so objects are kept and given other games (`acquire`, `release`), never made anew per episode. TextWorld is
not safe to use from several threads.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turngym.core.errors import EnvBackendError, TurngymError
from turngym.envs.alfworld.game import read_game_file
from turngym.envs.alfworld.pddl import GameError


class Reference:
    """One play of a game in TextWorld, with the interface of `NativeEngine` as far as TextWorld can offer it.

    TextWorld has no snapshots: `get_state` is the list of commands, `set_state` plays them again.
    """

    def __init__(self) -> None:
        self._environment, self._demangler = _make()
        self._state: Any = None
        self._history: list[str] = []

    def load(self, source: str | Path | Mapping[str, Any], *, shuffle: int | None = None) -> None:
        """Load another game; `shuffle` numbers the entities as alfworld does after `random.seed(shuffle)`."""
        name = "game" if isinstance(source, Mapping) else str(source)
        data = source if isinstance(source, Mapping) else read_game_file(source)
        # before the load, in which alfworld's wrapper hands out the numbers
        self._demangler.shuffle = shuffle is not None
        random_state = random.getstate()
        try:
            # alfworld shuffles with Python's global generator; it is put back as it was.
            random.seed(0 if shuffle is None else shuffle)
            self._environment.load(data)
        except Exception as error:
            raise GameError(f"{name}: TextWorld cannot load this game: {type(error).__name__}: {error}") from error
        finally:
            random.setstate(random_state)
        self._state = None
        self._history = []

    def reset(self) -> str:
        """Back to the start; returns the first observation."""
        self._state = self._guarded("reset")
        self._history = []
        return str(self._state.feedback)

    def step(self, command: str) -> tuple[str, bool]:
        """Play `command`; returns the observation and whether the game is won."""
        self._state, _, _ = self._guarded("step", command)
        self._history.append(command)
        return str(self._state.feedback), self.won

    def admissible(self) -> tuple[str, ...]:
        """Every command that is possible now, sorted, each once."""
        return tuple(self._state["admissible_commands"])

    @property
    def won(self) -> bool:
        """Whether the goal holds right now."""
        return bool(self._state["won"])

    def get_state(self) -> tuple[str, ...]:
        """The commands played since `reset`."""
        return tuple(self._history)

    def set_state(self, state: tuple[str, ...]) -> None:
        """Play the commands of `get_state` again from the start (slow: TextWorld has no snapshots)."""
        self.reset()
        for command in state:
            self.step(command)

    def _guarded(self, name: str, *arguments: str) -> Any:
        try:
            return getattr(self._environment, name)(*arguments)
        except Exception as error:
            raise EnvBackendError(f"TextWorld failed in {name}{arguments}: {type(error).__name__}: {error}") from error


def acquire() -> Reference:
    """A Reference for one user at a time: one that was released, else a new one."""
    return _FREE.pop() if _FREE else Reference()


def release(reference: Reference) -> None:
    """Give a Reference back for the next user."""
    _FREE.append(reference)


_FREE: list[Reference] = []


def _make() -> tuple[Any, Any]:
    """TextWorld with alfworld's wrappers, and the wrapper that hands out the numbers."""
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
        from textworld.envs.pddl import PddlEnv
    except ImportError as error:
        raise TurngymError(
            f"engine='textworld' needs TextWorld and alfworld ({error}): pip install 'turngym[alfworld]'"
        ) from error
    infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    demangler = AlfredDemangler(PddlEnv(infos))
    return AlfredInfos(demangler), demangler
