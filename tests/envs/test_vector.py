"""TextVectorEnv: whole texts, per-environment seeds and tasks, the three autoreset modes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from turngym.core.errors import TurngymError
from turngym.envs.testing import expect
from turngym.envs.vector import TextVectorEnv

TOY = "turngym-test/Toy-v0"


def make(num_envs: int = 2, mode: str = "NextStep", **kwargs: Any) -> TextVectorEnv:
    envs = gym.make_vec(TOY, num_envs, autoreset_mode=mode, **kwargs)
    assert isinstance(envs, TextVectorEnv)
    return envs


def test_each_environment_has_its_own_seed_or_task() -> None:
    envs = make(3)
    texts, infos = envs.reset(seed=10)
    for number in range(3):
        alone = gym.make(TOY)
        assert (texts[number], infos["task_id"][number]) == (lambda r: (r[0], r[1]["task_id"]))(
            alone.reset(seed=10 + number)
        )
    envs.reset(seed=[5, None, 5])
    assert envs.np_random_seed[0] == envs.np_random_seed[2] == 5
    _, infos = envs.reset(options={"task": ["corridor/5", "corridor/3", None]})
    assert infos["task_id"][:2].tolist() == ["corridor/5", "corridor/3"]
    assert envs.reset(options={"task": "corridor/4"})[1]["task_id"].tolist() == ["corridor/4"] * 3


def won(envs: TextVectorEnv) -> Any:
    envs.reset(seed=0, options={"task": ["corridor/3", "corridor/5"]})
    for _ in range(2):
        envs.step(["go right", "go right"])
    return envs.step(["go right", "go right"])


def test_disabled_waits_for_a_masked_reset() -> None:
    envs = make(mode="Disabled")
    won(envs)
    with pytest.raises(gym.error.ResetNeeded):
        envs.step(["wave", "wave"])
    texts, infos = envs.reset(options={"reset_mask": np.array([True, False]), "task": "corridor/4"})
    assert texts[0].startswith("You are in a corridor of 4")
    assert texts[1].startswith("You are at step 3.")
    assert infos["_task_id"].tolist() == [True, False]
    assert envs.step(["wave", "wave"])[4]["turn"].tolist() == [1, 4]


def test_metadata_call_and_close() -> None:
    envs = make(2)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    envs.reset(seed=0)
    assert envs.call("expert_action") == ("go right", "go right")
    assert envs.get_attr("max_turns") == (50, 50)
    envs.set_attr("max_turns", [3, 4])
    assert envs.get_attr("max_turns") == (3, 4)
    envs.close()
    envs.close()
    with pytest.raises(gym.error.ResetNeeded):
        envs.step(["wave", "wave"])


def test_wrong_numbers_are_errors() -> None:
    envs = make(2)
    envs.reset(seed=0)
    assert "1 actions for 2 environments" in expect(TurngymError, envs.step, ["wave"])
    assert "got one string" in expect(TurngymError, envs.step, "wa")
    assert "3 seeds for 2" in expect(TurngymError, lambda: envs.reset(seed=[1, 2, 3]))
    assert "1 tasks for 2" in expect(TurngymError, lambda: envs.reset(options={"task": ["corridor/3"]}))
    mask = {"reset_mask": np.array([1, 0])}
    assert "reset_mask must be a bool array" in expect(TurngymError, lambda: envs.reset(options=mask))
    assert "at least one" in expect(TurngymError, TextVectorEnv, [])


class Uneven(gym.Wrapper[str, str, str, str]):
    """Infos whose keys and types differ from turn to turn, as another package's may."""

    turns = 0

    def step(self, action: str) -> Any:
        self.turns += 1
        *most, info = self.env.step(action)
        info |= {"mixed": 1 if self.turns % 2 else 0.5, "deep": {"turn": self.turns}, "row": np.arange(2)}
        return *most, info | ({"rare": "x"} if action == "fly" else {})


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("wrap", [None, Uneven])
def test_every_info_is_gymnasiums(mode: str, wrap: Any) -> None:
    def env() -> Any:
        return wrap(gym.make(TOY, max_turns=5)) if wrap else gym.make(TOY, max_turns=5)

    ours, theirs = (kind([env] * 3, autoreset_mode=AutoresetMode(mode)) for kind in (TextVectorEnv, SyncVectorEnv))
    rng = np.random.default_rng(0)
    for number in range(60):
        # most go right, so that some episodes are won before they are truncated
        actions = rng.choice(["go right"] * 4 + ["go left", "wave", "fly", "", "y" * 5000], size=3).tolist()
        found, wanted = (envs.step(actions) if number else envs.reset(seed=3) for envs in (ours, theirs))
        assert found[0] == wanted[0]
        for mine, other in zip(found[1:-1], wanted[1:-1], strict=True):
            assert (mine.dtype, mine.tolist()) == (other.dtype, other.tolist())
        same_infos(found[-1], wanted[-1])


def same_infos(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        if isinstance(column, dict):
            same_infos(found[name], column)
        else:
            assert (name, found[name].dtype, found[name].tolist()) == (name, column.dtype, column.tolist())
            assert type(found[name].flat[0]) is type(column.flat[0])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_lists_hold_what_arrays_hold(mode: str) -> None:
    arrays, lists = make(2, mode, max_turns=2), make(2, mode, max_turns=2)
    for envs in (arrays, lists):
        envs.reset(seed=0, options={"task": "corridor/3"})
    for number in range(4 if mode != "Disabled" else 2):
        actions = ["fly", "wave" if number else "go right"]
        *most, infos = arrays.step(actions)
        *found, each = lists.step_lists(actions)
        assert found == [list(column) for column in most]
        assert [type(column[0]) for column in found] == [str, float, bool, bool]
        for index, info in enumerate(each):
            for name, value in info.items():
                if name != "final_info":
                    assert (name, infos[name][index], infos[f"_{name}"][index]) == (name, value, True)
            assert ("final_obs" in info) == (mode == "SameStep" and number % 2 == 1)
    with pytest.raises(TurngymError, match="1 actions for 2 environments"):
        lists.step_lists(["wave"])


def test_infos_are_put_together_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium's way costs as much for every environment as playing a turn does."""
    envs = make(8)
    envs.reset(seed=0)
    monkeypatch.setattr(TextVectorEnv, "_add_info", lambda *given: pytest.fail("one environment at a time"))
    infos = envs.step(["wave"] * 8)[-1]
    infos["_verdict"][0] = False
    assert infos["_turn"].all()
    assert envs.step(["wave"] * 8)[-1]["_turn"].all()
