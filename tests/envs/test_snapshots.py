"""Snapshots, pickles and closing of the three environments, beyond what the contract asks of any."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from turngym.core.errors import TurngymError
from turngym.envs.guard import ActionGuard, guard_of
from turngym.envs.testing import expect

ENVS: dict[str, dict[str, Any]] = {
    "turngym/ALFWorld-v0": {"domain_randomization": True},
    "turngym/WebShop-v0": {"profile": "embedded-small"},
    "turngym/Search-v0": {"config": "tiny"},
}


def made(env_id: str, **options: Any) -> ActionGuard:
    return guard_of(gym.make(env_id, **{**ENVS[env_id], **options}))


def played(guard: ActionGuard, turns: int = 4) -> list[Any]:
    return [guard.step(guard.expert_action() or "") for _ in range(turns) if not guard._over]


@pytest.mark.parametrize("env_id", ENVS)
def test_what_cannot_be_restored_is_one_clear_line(env_id: str) -> None:
    guard = made(env_id)
    guard.reset(seed=0)
    played(guard, 1)
    state = guard.get_state()
    _, other = made(env_id).reset(options={"task": guard.task_ids()[1]})
    inner = {**state["env"], "task": other["task_id"], "sha256": other["task_sha"]}
    for wrong, says in (
        ({}, "no snapshot that get_state() gave"),
        ("state", "no snapshot that get_state() gave"),
        (state["env"], "the item 'env' of its guard's"),
        ({**state, "over": 1}, "$.over"),
        ({**state, "env": {**inner, "inner": None}}, "the snapshot cannot be restored here"),
        ({**state, "env": {**inner, "inner": [[0]] * 6}}, "the snapshot cannot be restored here"),
        ({**state, "env": {**inner, "rng": {"bit_generator": "MT19937"}}}, "the snapshot cannot be restored here"),
        ({**state, "env": {**inner, "phase": "plaing"}}, "$.phase"),
    ):
        text = expect(TurngymError, guard.set_state, wrong)
        assert says in text
        assert "\n" not in text
        assert guard.get_state() == state, f"{says}: the environment has changed"
    assert says in text
    assert "the item 'env' of its guard's" in expect(TurngymError, guard.base.set_state, state)


STRANGE: tuple[Any, ...] = (None, "x", -1, 10**6, [], {}, True, 1.5, [["x"]], [7])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every item inside `value`; of a list, its first three."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, item in items:
        yield (*path, name)
        yield from places(item, (*path, name))


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    state = copy.deepcopy(state)
    inner = state
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return state


@pytest.mark.parametrize("env_id", ENVS)
def test_a_made_up_state_is_refused_or_can_be_played(env_id: str) -> None:
    """Every item of a snapshot, replaced by anything: refused at once, or an episode that goes on without an error."""
    guard = made(env_id, max_turns=None)
    guard.reset(seed=0)
    played(guard, 2)
    state = json.loads(json.dumps(guard.get_state()))
    accepted = 0
    for path in places(state):
        for value in STRANGE:
            try:
                guard.set_state(changed(state, path, value))
            except TurngymError:
                continue
            accepted += 1
            guard.describe()
            if not guard._over and guard.base._TextEnv__phase == "playing":
                played(guard, 2)
            json.dumps(guard.get_state())
    assert accepted < 0.2 * len(STRANGE) * sum(1 for _ in places(state))


@pytest.mark.parametrize("env_id", ENVS)
def test_copies_go_their_own_way(env_id: str) -> None:
    guard = made(env_id)
    guard.reset(seed=2)
    played(guard, 1)
    twin = copy.deepcopy(guard)
    assert twin.base is not guard.base
    state = guard.get_state()
    assert played(twin) != []
    assert guard.get_state() == state
    twin.close()
    assert json.loads(json.dumps(state)) == state
    assert played(guard) != []


def test_a_renamed_tool_and_a_channel_travel() -> None:
    guard = made("turngym/Search-v0", channel="tool", tool_name="find", tool_argument="words")
    moved = pickle.loads(pickle.dumps(guard))
    moved.reset(seed=0)
    assert moved.tool.name == "find"
    # the answer to a malformed response names the tool only where a channel of calls was told to the environment
    assert "I must call the tool find" in moved.step("I wonder")[0]


@pytest.mark.parametrize("env_id", ENVS)
def test_texts_of_numpy_are_texts(env_id: str) -> None:
    guard, twin = made(env_id), made(env_id)
    task = guard.task_ids()[1]
    assert guard.reset(seed=0, options={"task": np.str_(task)}) == twin.reset(seed=0, options={"task": task})
    action = guard.expert_action() or ""
    step = guard.step(np.str_(action))
    assert step == twin.step(action)
    assert type(step[4]["action"]) is type(step[4]["task_id"]) is str


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("max_turns", 2.5, "max_turns is 2.5; it must be a whole number, or None for no limit"),
        ("max_turns", "5", "max_turns is '5'; it must be a whole number, such as 1, or None for no limit"),
        ("max_turns", True, "max_turns is True; it must be a whole number, or None for no limit"),
        ("max_turns", 0, "max_turns is 0; it must be at least 1, or None for no limit"),
        ("penalty", "x", "{env_id}: penalty is 'x'; valid: a number"),
        ("penalty", float("inf"), "penalty is inf; it must be a finite number"),
    ],
)
@pytest.mark.parametrize("env_id", ENVS)
def test_numbers_that_are_none(env_id: str, option: str, value: Any, says: str) -> None:
    assert expect(TurngymError, lambda: made(env_id, **{option: value})) == says.format(env_id=env_id)
    assert made(env_id, max_turns=np.int64(3), penalty=np.float32(-1), on_invalid="penalize").max_turns == 3
