"""EnvContract: what every registered environment must do, as tests that a subclass inherits.

    class TestALFWorld(EnvContract):
        env_id = "turngym/ALFWorld-v0"

The methods are plain functions with assertions: pytest collects them, and nothing here needs pytest.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from turngym.envs.base import ResetNeeded, TextEnv
from turngym.envs.checks import HARD_TEXT, NONSENSE, check_info, expect
from turngym.envs.contract.states import StateContract
from turngym.envs.core import TaskError, TurngymError, Verdict, plain_id
from turngym.envs.guard import guard_of

__all__ = ["EnvContract", "check_contract"]

_MODES: Mapping[str, dict[str, Any]] = {
    "sync": {},
    # shared memory needs items of a fixed size, which texts do not have
    "async": {"vector_kwargs": {"shared_memory": False}},
    "vector_entry_point": {},
}


class EnvContract(StateContract):
    """Subclass, set `env_id` (and `make_kwargs`), and let pytest run it. Override `choose` for open action spaces."""

    # --- the contract

    def test_check_env_is_clean(self) -> None:
        guard = self.guard()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("error")
            check_env(guard.unwrapped)
            # Gymnasium complains of every wrapped environment
            warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
            check_env(guard)
        guard.close()

    def test_same_seed_gives_the_same_episode(self) -> None:
        runs = []
        for _ in range(2):
            guard = self.guard()
            runs.append([guard.reset(seed=7), *self.play(guard, 1, 20)])
        assert runs[0] == runs[1], "two environments with the same seed and actions differ"
        other = [self.guard().reset(seed=seed)[1]["task_id"] for seed in range(12)]
        assert len(self.guard().task_ids()) == 1 or len(set(other)) > 1, "the seed does not choose the task"

    def test_tasks_are_chosen_by_option(self) -> None:
        guard, twin = self.guard(), self.guard()
        for task_id in self.some_tasks(guard):
            first = guard.reset(seed=1, options={"task": task_id})
            assert first[1]["task_id"] == task_id == guard.task.task_id, f"reset did not begin the task {task_id}"
            assert first == twin.reset(seed=1, options={"task": task_id}), (
                f"{task_id} begins differently in a second object"
            )
            assert guard.task == twin.task, f"{task_id} has two identities"
            assert guard.task.env_id == plain_id(self.env_id)
            assert len(guard.task.sha256) == 64, "sha256 must be 64 hex digits"
            assert set(guard.task.sha256) <= set("0123456789abcdef"), "sha256 must be 64 hex digits"
            assert first[1]["task_sha"] == guard.task.sha256

    def test_unknown_tasks_and_options_are_errors(self) -> None:
        guard = self.guard()
        guard.reset(seed=0)
        wrong = guard.task_ids()[0] + "x"
        text = expect(TaskError, lambda: guard.reset(options={"task": wrong}))
        assert wrong in text, f"the error does not name the wrong task: {text}"
        expect(TaskError, lambda: guard.reset(options={"task": 3}))
        expect(TurngymError, lambda: guard.reset(options={"tsak": wrong}))

    def test_misuse_is_an_error(self) -> None:
        for env in (self.guard(), self.guard().base):
            expect(ResetNeeded, env.step, "anything")
            env.reset(seed=0)
            expect(TurngymError, env.step, 3)
            env.close()
            env.close()
            expect(ResetNeeded, env.step, "anything")
        guard = self.guard(max_turns=1)
        guard.reset(seed=0)
        guard.step("no such action")
        expect(ResetNeeded, guard.step, "anything")
        numbers: dict[str, tuple[Any, ...]] = {"max_turns": (0, 2.5, "5", True), "penalty": ("x", None, float("nan"))}
        for name, values in numbers.items():
            for value in values:
                expect(TurngymError, lambda chosen: self.make(**chosen), {name: value})
        expect(TurngymError, lambda: self.make(on_invalid="ignore"))
        expect(TurngymError, lambda: self.make(render_mode="rgb_array"))

    def test_any_text_is_data(self) -> None:
        for env in (self.guard(), self.guard(channel="text"), self.guard(channel="tool"), self.guard().base):
            env.reset(seed=0)
            env.action_space.seed(0)
            for text in (
                *NONSENSE,
                *HARD_TEXT,
                np.str_("no such action"),
                *(env.action_space.sample() for _ in range(20)),
            ):
                observation, reward, terminated, truncated, info = env.step(text)
                check_info(info)
                observation.encode("utf-8")
                assert isinstance(reward, float), f"reward {reward!r} is no float"
                assert (type(terminated), type(truncated)) == (bool, bool)
                if terminated or truncated:
                    env.reset()

    def test_info_is_complete_fresh_and_plain(self) -> None:
        guard = self.guard()
        _, info = guard.reset(seed=3)
        check_info(info)
        assert (info["turn"], info["env_steps"], info["verdict"], info["action"]) == (0, 0, "ok", None)
        if info["admissible_actions"] is not None:
            assert info["admissible_actions"] == list(guard.admissible() or ())
            info["admissible_actions"].clear()
            assert guard.admissible(), "changing info changed the environment"
        for step in self.play(guard, 2, 10):
            check_info(step[-1])
            assert step[-1]["success"] == (step[-1]["score"] == 1.0), "score 1.0 must mean success, and only it"
        assert type(guard.success) is bool

    def test_expert_wins(self) -> None:
        guard = self.guard(max_turns=self.expert_turns)
        for task_id in self.some_tasks(guard):
            _, info = guard.reset(options={"task": task_id})
            assert not info["success"], f"{task_id} is won before it begins"
            done = False
            while not done:
                action = guard.expert_action()
                # without an expert there is no promise to keep; one that gives up breaks its own
                if action is None and type(guard.base).expert_action is TextEnv.expert_action:
                    return
                assert action is not None, f"{task_id}: the expert knows no way at turn {info['turn']}"
                _, _, terminated, truncated, info = guard.step(action)
                assert Verdict(info["verdict"]).valid, f"{task_id}: the expert's {action!r} is {info['verdict']}"
                done = terminated or truncated
            assert info["success"], f"{task_id}: the expert did not win in {self.expert_turns} turns"
            assert info["score"] == 1.0

    def test_invalid_action_policies(self) -> None:
        for policy, reward, ends in (
            ("reject", 0.0, False),
            ("penalize", -0.25, False),
            ("noop", 0.0, False),
            ("terminate", 0.0, True),
        ):
            guard = self.guard(on_invalid=policy, penalty=-0.25, max_turns=3)
            guard.reset(seed=0)
            before = guard.base.describe()
            observation, got, terminated, truncated, info = guard.step("no such \n action")
            assert (got, terminated, truncated) == (reward, ends, False), f"{policy} gave {got, terminated, truncated}"
            assert info["verdict"] == "inadmissible"
            assert (info["turn"], info["env_steps"]) == (1, 0), f"{policy} stepped the environment or lost the turn"
            assert guard.base.describe() == before, f"{policy} changed the environment"
            assert (observation == guard.base.invalid_observation + guard.listing()) == (policy == "noop")
            if not ends:
                ends_at = [guard.step("")[3] for _ in range(2)]
                assert ends_at == [False, True], f"{policy}: max_turns=3 did not truncate at the third turn"

    def test_rendering(self) -> None:
        guard = self.guard(render_mode="ansi")
        observation, _ = guard.reset(seed=0)
        assert observation in str(guard.render()), "ansi rendering lacks the observation"
        observation = guard.step("no such action")[0]
        assert observation in str(guard.render()), "ansi rendering lacks the answer to an invalid action"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            guard = self.guard(render_mode="human")
            observation, _ = guard.reset(seed=0)
            assert guard.render() is None
        assert printed.getvalue().count(observation) == 1, "human rendering must print each observation once"

    def test_gymnasium_wrappers(self) -> None:
        env = RecordEpisodeStatistics(TimeLimit(self.make(), 3))
        for _ in range(2):
            env.reset(seed=0)
            steps = [env.step("no such action") for _ in range(3)]
            assert [step[3] for step in steps] == [False, False, True]
            assert steps[-1][-1]["episode"]["l"] == 3
        assert guard_of(env).env_id == plain_id(self.env_id)

    def test_spaces_travel(self) -> None:
        env = self.make()
        for space in (env.observation_space, env.action_space):
            assert pickle.loads(pickle.dumps(space)) == space
            assert "any text\n漢字" in space
            assert 3 not in space
            space.seed(5)
            first = [space.sample() for _ in range(5)]
            space.seed(5)
            assert first == [space.sample() for _ in range(5)], "samples do not follow the seed"

    def test_vector_environments_agree(self) -> None:
        seen = {}
        for mode, extra in _MODES.items():
            envs = gym.make_vec(self.env_id, 2, vectorization_mode=mode, **extra, **self.make_kwargs)
            texts, infos = envs.reset(seed=4)
            rounds = [(texts, infos["task_id"].tolist(), infos["admissible_actions"].tolist())]
            for number in range(3):
                admissible = rounds[-1][2]
                actions = tuple((choices or ["no such action"])[number % len(choices or [0])] for choices in admissible)
                texts, rewards, terminated, truncated, infos = envs.step(actions)
                assert texts in envs.observation_space, f"{mode}: the batch of texts is not in the space"
                assert (rewards.shape, terminated.dtype, truncated.dtype) == ((2,), np.bool_, np.bool_)
                rounds.append((texts, infos["verdict"].tolist(), infos["admissible_actions"].tolist()))
            envs.close()
            envs.close()
            seen[mode] = rounds
        for number in range(2):
            guard = self.guard()
            alone, info = guard.reset(seed=4 + number)
            first = seen["sync"][0]
            assert (first[0][number], first[1][number]) == (alone, info["task_id"]), "a batch plays another episode"
        assert seen["sync"] == seen["vector_entry_point"], "our vector environment differs from SyncVectorEnv"
        assert seen["sync"] == seen["async"], "AsyncVectorEnv(shared_memory=False) differs from SyncVectorEnv"


def check_contract(env_id: str, **make_kwargs: Any) -> None:
    """Run the whole contract without pytest, in a notebook say; the first broken promise is an AssertionError."""
    chosen = {"env_id": env_id, "make_kwargs": make_kwargs}
    contract: Any = type("Contract", (EnvContract,), chosen)()
    for name in sorted(dir(EnvContract)):
        if name.startswith("test_"):
            getattr(contract, name)()
