"""TextVectorEnv: several text environments stepped together in one process; observations are a tuple of str."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from turngym.core.errors import TurngymError

Texts = tuple[str, ...]
Bools = NDArray[np.bool_]
Infos = list[dict[str, Any]]
Finals = dict[int, dict[str, Any]]
"""`final_obs` and `final_info`, by the number of the environment."""
_NUMBERS, _OBJECTS = {int, float, bool}, {str, list, tuple, type(None)}


class TextVectorEnv(SyncVectorEnv):
    """The `vector_entry_point` of text environments.

    Observations are a tuple of `num_envs` whole strings; rewards are float64 [num_envs]; terminations and truncations
    are bool [num_envs]; infos have Gymnasium's vector form, with strings and lists in object arrays (never cut).
    Gymnasium's AsyncVectorEnv with shared memory cannot carry text. This one needs no processes, because text
    environments are far quicker than the models that play them.

    It is Gymnasium's SyncVectorEnv with a task for each environment, quicker infos, and `step_lists`. Autoreset is
    Gymnasium's: `NextStep` (default; the action after an end is ignored and resets), `SameStep` (the last observation
    is in `infos["final_obs"]`), or `Disabled` (use `reset(options={"reset_mask": bool [num_envs]})`).
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[str, str]]],
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if not env_fns:
            raise TurngymError("TextVectorEnv needs at least one environment; num_envs is 0")
        super().__init__(env_fns, autoreset_mode=autoreset_mode)
        self._ended = [False] * self.num_envs
        self._all = np.ones(self.num_envs, dtype=np.bool_)
        self._texts: list[str] = [""] * self.num_envs

    def reset(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Texts, dict[str, Any]]:
        """Resets all environments, or those in `options["reset_mask"]`.

        `seed` is an int (environment i gets seed + i) or one per environment. `options["task"]` is one id for all, or a
        list with one id (or None) per environment.
        """
        # a copy, because the options of the batch are taken out: an environment refuses those that it does not know
        options = dict(options or {})
        mask = self._mask(options.pop("reset_mask", None))
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + index for index in range(self.num_envs)]
        seeds = self._each("seeds", seed)
        tasks = self._each("tasks", options.pop("task", None))
        infos: dict[str, Any] = {}
        for index in np.flatnonzero(mask).tolist():
            chosen = options if tasks[index] is None else {**options, "task": tasks[index]}
            self._add_info(infos, self._reset_one(index, seeds[index], chosen), index)
        return tuple(self._texts), infos

    def step(  # type: ignore[override]
        self, actions: Sequence[str]
    ) -> tuple[Texts, NDArray[np.float64], Bools, Bools, dict[str, Any]]:
        """Plays one action in every environment; the class's docstring says what happens after an end."""
        self._require_one_each(actions)
        texts, rewards, terminations, truncations, infos, finals = self._play(actions)
        batched = self._batched(infos)
        for index, final in finals.items():
            batched = self._add_info(batched, final, index)
        ends = np.array(terminations, np.bool_), np.array(truncations, np.bool_)
        return tuple(texts), np.array(rewards, np.float64), *ends, batched

    def step_lists(
        self, actions: Sequence[str]
    ) -> tuple[list[str], list[float], list[bool], list[bool], list[dict[str, Any]]]:
        """Steps as `step` does, but in plain lists of `num_envs` with every environment's own info, for callers that
        loop.

        With `SameStep`, the infos of ended environments have `final_obs` and `final_info` too.
        """
        self._require_one_each(actions)
        texts, rewards, terminations, truncations, infos, finals = self._play(actions)
        return texts, rewards, terminations, truncations, [info | finals.get(i, {}) for i, info in enumerate(infos)]

    def _play(self, actions: Sequence[str]) -> tuple[list[str], list[float], list[bool], list[bool], Infos, Finals]:
        """One step of all environments, and the last observation and info of episodes that another replaced at once."""
        rewards, terminations, truncations = [0.0] * self.num_envs, [False] * self.num_envs, [False] * self.num_envs
        infos: Infos = []
        finals: Finals = {}
        next_step = self.autoreset_mode is AutoresetMode.NEXT_STEP
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        for index, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            if next_step and self._ended[index]:
                infos.append(self._reset_one(index))
                continue
            text, reward, terminated, truncated, info = env.step(action)
            self._texts[index], rewards[index] = text, float(reward)
            terminations[index], truncations[index] = terminated, truncated
            self._ended[index] = ended = terminated or truncated
            if ended and same_step:
                finals[index] = {"final_obs": text, "final_info": info}
                info = self._reset_one(index)
            infos.append(info)
        return list(self._texts), rewards, terminations, truncations, infos, finals

    def _batched(self, infos: Infos) -> dict[str, Any]:
        """Infos of all environments in Gymnasium's vector form."""
        batched: dict[str, Any] = {}
        keys = list(infos[0])
        # column by column if all have the same keys, which is several times as fast as Gymnasium's way below
        if all(list(info) == keys for info in infos):
            for key, values in zip(keys, zip(*map(dict.values, infos), strict=True), strict=True):
                if (column := _column(values)) is None:
                    break
                # a copy for every key, because callers may write into it; np.ones costs several times as much
                batched[key], batched[f"_{key}"] = column, self._all.copy()
            else:
                return batched
        batched = {}
        for index, info in enumerate(infos):
            batched = self._add_info(batched, info, index)
        return batched

    def _reset_one(self, index: int, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
        self._texts[index], info = self.envs[index].reset(seed=seed, options=options)
        self._ended[index] = False
        return info

    def _require_one_each(self, actions: Sequence[str]) -> None:
        if isinstance(actions, str) or len(actions) != self.num_envs:
            count = "one string" if isinstance(actions, str) else f"{len(actions)} actions"
            raise TurngymError(
                f"TextVectorEnv.step() got {count} for {self.num_envs} environments; give one action each"
            )

    def _mask(self, mask: Any) -> Bools:
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        if not (
            isinstance(mask, np.ndarray) and mask.shape == (self.num_envs,) and mask.dtype == np.bool_ and mask.any()
        ):
            raise TurngymError(
                f"reset_mask must be a bool array [{self.num_envs}] with at least one True, not {mask!r}"
            )
        return mask

    def _each(self, setting: str, values: Any) -> Sequence[Any]:
        """Returns one value per environment: the same one for all, or those of a sequence."""
        if values is None or isinstance(values, str):
            return [values] * self.num_envs
        if len(values) != self.num_envs:
            raise TurngymError(f"reset() got {len(values)} {setting} for {self.num_envs} environments")
        return list(values)


def _column(values: tuple[Any, ...]) -> NDArray[Any] | None:
    """The array that Gymnasium would make of one value per environment; None if types alone do not decide that."""
    kind = type(values[0])
    # Gymnasium takes the first one's type for all
    if kind in _OBJECTS:
        # not np.array, which would make a matrix of lists of one length, and cut texts
        return np.fromiter(values, dtype=object, count=len(values))
    return np.array(values, dtype=kind) if kind in _NUMBERS and {*map(type, values)} == {kind} else None
