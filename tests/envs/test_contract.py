"""The contract passes on sound environments and fails, in the right test, on unsound ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turngym.core.errors import TurngymError
from turngym.core.task import content_hash
from turngym.envs.base import Outcome, ResetNeeded
from turngym.envs.guard import ActionGuard, guard_of
from turngym.envs.testing import EnvContract


class TestToy(EnvContract):
    env_id = "turngym-test/Toy-v0"


class TestOpen(EnvContract):
    env_id = "turngym-test/Open-v0"

    def choose(self, guard: ActionGuard, rng: np.random.Generator) -> str:
        return "say right" if rng.random() < 0.3 else f"say {rng.integers(1000)}"


def _unseeded(self: Any) -> str:
    return f"A cat passes at {id(object())} {np.random.default_rng().random()}."


def _crash(self: Any, action: str) -> Outcome:
    raise KeyError(action)


def _forget(self: Any, state: Any) -> None:
    self.place = 0


def _silent(self: Any, task_id: str) -> str:
    if task_id.endswith("x"):
        task_id = task_id[:-1]
    return task_id


def _changing(self: Any) -> Any:
    task = type(self).__mro__[1].task.fget(self)  # type: ignore[attr-defined]
    return type(task)(
        env_id=task.env_id,
        task_id=task.task_id,
        sha256=content_hash({"object": id(self)}),
        split=task.split,
        category=task.category,
    )


def _array_info(self: Any, *args: Any) -> dict[str, Any]:
    info = type(self).__mro__[1].describe(self, *args)  # type: ignore[attr-defined]
    return info | {"admissible_actions": np.array(info["admissible_actions"])}


def _int_info(self: Any, *args: Any) -> dict[str, Any]:
    info = type(self).__mro__[1].describe(self, *args)  # type: ignore[attr-defined]
    return info | {"success": int(info["success"])}


def _both_ways(self: Any) -> str:
    return "go left" if self.place == 1 else "go right"


def _switching(self: Any, state: Any) -> None:
    self._begin(str(state["task"]) if str(state["task"])[-1].isdigit() else "corridor/4")
    type(self).__mro__[1].set_state(self, state)  # type: ignore[attr-defined]


def _closed_for_good(self: Any, **options: Any) -> Any:
    if self._TextEnv__phase == "closed":
        raise ResetNeeded("closed")
    return type(self).__mro__[1].reset(self, **options)  # type: ignore[attr-defined]


def _sets(self: Any) -> Any:
    return {self.place}


BROKEN = {
    "unseeded randomness": ({"_animal": _unseeded}, "test_same_seed_gives_the_same_episode"),
    "check_env sees it too": ({"_animal": _unseeded}, "test_check_env_is_clean"),
    "an exception for a bad action": ({"_apply": _crash}, "test_any_text_is_data"),
    "a state that is not restored": ({"_set_state": _forget}, "test_snapshots_continue_byte_for_byte"),
    "a state that JSON does not know": ({"_get_state": _sets}, "test_snapshots_continue_byte_for_byte"),
    "a state that is refused too late": ({"set_state": _switching}, "test_refused_snapshots_change_nothing"),
    "closed for good": ({"reset": _closed_for_good}, "test_a_closed_environment_opens_again"),
    "a pickle that forgets": ({"__setstate__": _forget}, "test_environments_can_be_pickled"),
    "a forgiven wrong task": ({"_TextEnv__require_task": _silent}, "test_unknown_tasks_and_options_are_errors"),
    "a hash per object": ({"task": property(_changing)}, "test_tasks_are_chosen_by_option"),
    "arrays of strings in info": ({"describe": _array_info}, "test_info_is_complete_fresh_and_plain"),
    "success as an int": ({"describe": _int_info}, "test_info_is_complete_fresh_and_plain"),
    "an expert that walks in circles": ({"expert_action": _both_ways}, "test_expert_wins"),
    "no frame": ({"show": lambda self, *args: None}, "test_rendering"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_contract_finds(fault: str, toy_class: type[Any], register_toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    members, test = BROKEN[fault]
    broken = type("Broken", (toy_class,), {**members, "env_id": "turngym-test/Broken-v0"})
    # where pickle looks for it
    broken.__module__ = __name__
    monkeypatch.setitem(globals(), "Broken", broken)
    register_toy(broken)
    contract = type("Contract", (EnvContract,), {"env_id": broken.env_id})()
    with pytest.raises((AssertionError, UserWarning, KeyError, TypeError, ResetNeeded)):
        getattr(contract, test)()


def test_guard_of_names_the_way_out(toy_class: type[Any]) -> None:
    with pytest.raises(TurngymError, match="has no ActionGuard"):
        guard_of(toy_class())


def test_one_task_is_enough(toy_class: type[Any], register_toy: Any) -> None:
    single = type(
        "Single", (toy_class,), {"task_ids": lambda self: ("corridor/4",), "env_id": "turngym-test/Single-v0"}
    )
    register_toy(single)
    contract = type("Contract", (EnvContract,), {"env_id": single.env_id})()
    contract.test_same_seed_gives_the_same_episode()
    contract.test_expert_wins()
