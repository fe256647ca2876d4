"""ActionGuard: what each policy answers, counts and leaves alone."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.core.errors import EnvBackendError, TurngymError
from turngym.envs.base import ResetNeeded
from turngym.envs.channels import TextChannel
from turngym.envs.guard import ActionGuard, guard_of, listed
from turngym.envs.testing import check_contract, expect

TOY, OPEN = "turngym-test/Toy-v0", "turngym-test/Open-v0"


def toy(env_id: str = TOY, **kwargs: Any) -> ActionGuard:
    guard = guard_of(gym.make(env_id, **kwargs))
    guard.reset(seed=0, options={"task": "corridor/3"})
    return guard


def test_reject_gives_reason_nearest_action_and_list() -> None:
    observation, reward, terminated, truncated, info = toy().step("go rihgt")
    assert observation == (
        'Invalid action: "go rihgt" is not possible now. Nothing was done. Did you mean "go right"?\n'
        "Possible actions: go right, wave."
    )
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert (info["verdict"], info["action"], info["turn"], info["env_steps"]) == ("inadmissible", "go rihgt", 1, 0)


def test_the_list_is_optional() -> None:
    assert toy(list_admissible=False).step("go rihgt")[0].endswith('Did you mean "go right"?')
    assert "Did you mean" not in toy(list_admissible=False).step("xyzzy")[0]


def test_nothing_to_read_is_malformed() -> None:
    for text in ("", " \n\t"):
        observation, _, _, _, info = toy().step(text)
        assert observation.startswith("No action could be read: the action is empty. Nothing was done.")
        assert (info["verdict"], info["action"], info["turn"]) == ("malformed", None, 1)


def test_a_valid_action_is_not_penalized() -> None:
    assert toy(on_invalid="penalize", penalty=-0.3).step("wave")[1] == 0.0


def test_a_terminated_guard_needs_a_reset() -> None:
    guard = toy(on_invalid="terminate")
    assert "not possible" in guard.step("fly")[0]
    with pytest.raises(ResetNeeded):
        guard.step("go right")
    guard.reset(options={"task": "corridor/3"})
    assert guard.step("go right")[4]["turn"] == 1


def test_turns_count_everything_and_steps_only_what_was_played() -> None:
    guard = toy(max_turns=4)
    seen = [guard.step(text) for text in ("fly", "go right", "", "go right")]
    assert [step[4]["turn"] for step in seen] == [1, 2, 3, 4]
    assert [step[4]["env_steps"] for step in seen] == [0, 1, 1, 2]
    assert [step[3] for step in seen] == [False, False, False, True]


def test_winning_at_the_limit_is_no_truncation() -> None:
    guard = toy(max_turns=3)
    *_, last = [guard.step("go right") for _ in range(3)]
    assert (last[1], last[2], last[3], last[4]["success"]) == (1.0, True, False, True)


def test_whole_responses_through_a_channel() -> None:
    for channel in ("text", TextChannel()):
        guard = toy(channel=channel)
        assert guard.step("<think>right!</think><action>go right</action>")[4]["action"] == "go right"
        observation, *_, info = guard.step("go right")
        assert (info["verdict"], info["action"]) == ("malformed", None)
        assert observation.startswith("No action could be read: the response has no <action>...</action>.")
    guard = toy(channel="tool")
    guard.step('<tool_call>{"name": "toy_step", "arguments": {"action": "go right"}}</tool_call>')
    assert guard.describe()["env_steps"] == 1


def test_open_action_spaces_are_judged_by_the_environment() -> None:
    guard = toy(OPEN)
    assert guard.step("say anything")[4]["verdict"] == "ok"
    observation, *_, info = guard.step("shout")
    assert observation == 'Invalid action: actions begin with "say ". Nothing was done.'
    assert (info["verdict"], info["admissible_actions"]) == ("inadmissible", None)


def test_a_failed_back_end_is_no_verdict(toy_class: type[Any]) -> None:
    def fail(self: Any, action: str) -> None:
        raise EnvBackendError("the server is gone")

    guard = ActionGuard(type("Dead", (toy_class,), {"_apply": fail})())
    guard.reset(seed=0)
    with pytest.raises(EnvBackendError, match="server is gone"):
        guard.step("go right")


def test_snapshots_hold_the_turns_of_the_agent() -> None:
    guard = toy(max_turns=3)
    guard.step("fly")
    state = guard.get_state()
    guard.step("go right")
    guard.set_state(state)
    assert (guard.describe()["turn"], guard.describe()["env_steps"]) == (1, 0)
    assert [guard.step("wave")[3] for _ in range(2)] == [False, True]
    fresh = toy(max_turns=3)
    fresh.set_state(guard.get_state())
    with pytest.raises(ResetNeeded):
        fresh.step("wave")


def test_bad_settings_are_errors(toy_class: type[Any]) -> None:
    assert "Did you mean 'penalize'" in expect(TurngymError, lambda: toy(on_invalid="penalizes"))
    assert "max_turns is 0; it must be at least 1" in expect(TurngymError, lambda: toy(max_turns=0))
    assert "unknown channel 'json'" in expect(TurngymError, lambda: toy(channel="json"))
    assert "not CartPoleEnv" in expect(TurngymError, ActionGuard, gym.make("CartPole-v1"))


def test_made_again_from_its_spec() -> None:
    guard = toy(on_invalid="noop", max_turns=5)
    twin = guard_of(gym.make(guard.spec))
    assert (twin.on_invalid, twin.max_turns) == ("noop", 5)
    assert twin.env is twin.unwrapped, "the guard must not be applied twice"


@given(st.lists(st.one_of(st.sampled_from(["go right", "go left", "wave", "fly"]), st.text(max_size=6)), max_size=15))
def test_noop_equals_leaving_the_invalid_actions_out(texts: list[str]) -> None:
    noisy, clean = toy(on_invalid="noop", max_turns=None), toy(max_turns=None)
    for text in texts:
        valid = text.strip() in (clean.admissible() or ())
        step = noisy.step(text)
        if valid:
            assert clean.step(text)[:3] == step[:3]
        if step[2]:
            break
        assert noisy.admissible() == clean.admissible()


# --- observations that end with the list of what is admissible

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
    with pytest.raises(TurngymError, match="show_admissible is True, but turngym/Search-v0"):
        made("turngym/Search-v0", config="tiny", split="eval", show_admissible=True)


@pytest.mark.parametrize("env_id", ENVS)
def test_the_contract_holds(env_id: str) -> None:
    check_contract(env_id, show_admissible=True)
