"""Observations that carry what is admissible: the bytes, where they stand, and nothing else that changes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.envs.core.errors import TurngymError
from turngym.envs.guard import ActionGuard, listed
from turngym.envs.testing import check_contract

ENVS = ("turngym/ALFWorld-v0", "turngym/WebShop-v0")


def made(env_id: str, **kwargs: Any) -> ActionGuard:
    env: Any = gym.make(env_id, **kwargs)
    assert isinstance(env, ActionGuard)
    return env


def test_the_bytes_of_a_list() -> None:
    assert listed(("go to shelf 1", "look")) == "\nAdmissible actions:\n- go to shelf 1\n- look"
    assert listed(()) == ""


def test_a_webshop_page_ends_with_its_search_box_or_its_clicks() -> None:
    env = made("turngym/WebShop-v0", show_admissible=True)
    observation, _ = env.reset(seed=0)
    assert observation.endswith("[SEP] Search\nAdmissible actions:\n- search[<your keywords>]")
    observation, *_, info = env.step(env.expert_action() or "")
    assert "\nAdmissible actions:\n- click[back to search]\n- click[next >]\n- click[" in observation
    assert observation.endswith(listed(info["admissible_actions"]))


@pytest.mark.parametrize("env_id", ENVS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_changes_nothing_but_the_end_of_observations(env_id: str, seed: int) -> None:
    shown, plain = made(env_id, show_admissible=True), made(env_id)
    one, info = shown.reset(seed=seed)
    other, _ = plain.reset(seed=seed)
    assert one == other + listed(info["admissible_actions"]) != other
    while True:
        action = plain.expert_action() or ""
        first, second = shown.step(action), plain.step(action)
        over = second[2] or second[3]
        assert first[0] == second[0] + ("" if over else listed(second[4]["admissible_actions"]))
        assert first[1:] == second[1:]
        if over:
            return


def test_refusals_do_not_list_twice() -> None:
    env = made("turngym/ALFWorld-v0", show_admissible=True)
    env.reset(seed=0)
    observation, *_ = env.step("dance")
    assert observation.startswith('Invalid action: "dance" is not possible now. Nothing was done.\nAdmissible actions:')
    assert observation.count("\n- look") == 1
    assert "Possible actions" not in observation
    silent = made("turngym/ALFWorld-v0", show_admissible=True, on_invalid="noop")
    silent.reset(seed=0)
    assert silent.step("dance")[0] == "Nothing happens." + silent.listing()


def test_the_last_observation_has_no_list() -> None:
    env = made("turngym/ALFWorld-v0", show_admissible=True, max_turns=2)
    env.reset(seed=0)
    assert "\n- look" in env.step("look")[0]
    observation, _, _, truncated, _ = env.step("look")
    assert truncated
    assert "Admissible" not in observation


def test_an_open_action_space_has_no_list() -> None:
    with pytest.raises(TurngymError, match=r"show_admissible is True, but turngym/Search-v0 .* leave it False"):
        made("turngym/Search-v0", show_admissible=True)


@pytest.mark.parametrize("env_id", ENVS)
def test_the_contract_holds(env_id: str) -> None:
    check_contract(env_id, show_admissible=True)


def test_it_arrives_in_vector_environments() -> None:
    envs = gym.make_vec("turngym/ALFWorld-v0", 2, show_admissible=True)
    observations, _ = envs.reset(seed=0)
    assert all("\nAdmissible actions:\n- " in text for text in observations)
