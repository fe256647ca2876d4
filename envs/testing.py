"""EnvContract: what every registered environment must do, as tests that a subclass inherits.

    class TestALFWorld(EnvContract):
        env_id = "turngym/ALFWorld-v0"

The methods are plain functions with assertions: pytest collects them, and nothing here needs pytest.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from turngym.core.errors import TaskError, TurngymError
from turngym.core.redaction import brief
from turngym.core.task import Verdict, plain_id
from turngym.core.tools import ToolSet, tool_call
from turngym.core.user_files import json_of
from turngym.envs.base import ResetNeeded, TextEnv
from turngym.envs.guard import ActionGuard, guard_of

_MODES: Mapping[str, dict[str, Any]] = {
    "sync": {},
    # shared memory needs items of a fixed size, which texts do not have
    "async": {"vector_kwargs": {"shared_memory": False}},
    "vector_entry_point": {},
}
INFO_TYPES: Mapping[str, tuple[type, ...]] = {
    "task_id": (str,),
    "task_sha": (str,),
    "category": (str,),
    "turn": (int,),
    "env_steps": (int,),
    "verdict": (str,),
    "action": (str, type(None)),
    "admissible_actions": (list, type(None)),
    "success": (bool,),
    "score": (float,),
}
"""The keys of `info` and their exact types, at reset and at every step."""
NONSENSE = ("", " ", "\n", "\x00", "no such action", "LOOK!", "<action>", "</action>", "{", '{"name": 1}', "[" * 5000)
HARD_TEXT = ("Ünïcödé 漢字 🚪", "\ud800", "a\u2028b", "e\u0301", "{0} %s \\n", "x" * 200_000, "\r\n\t")


def expect(error: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """Asserts that `call(*args)` raises `error`, and returns its text."""
    try:
        result = call(*args)
    except error as caught:
        return str(caught)
    raise AssertionError(f"expected {error.__name__}, got the result {brief(result, 200)}")


def check_info(info: dict[str, Any]) -> None:
    """Asserts that `info` has the keys and exact types of the interface and can be written as JSON."""
    for key, types in INFO_TYPES.items():
        assert key in info, f"info lacks {key!r}"
        assert type(info[key]) in types, f"info[{key!r}] is {type(info[key]).__name__}, not one of {types}"
    assert all(type(action) is str for action in info["admissible_actions"] or ()), "admissible actions must be str"
    assert 0.0 <= info["score"] <= 1.0, f"score {info['score']} is outside 0..1"
    Verdict(info["verdict"])
    json.dumps(info)


class EnvContract:
    """Subclass it, set `env_id` (and `make_kwargs`), let pytest run it. Override `choose` for open action spaces."""

    env_id: ClassVar[str]
    """Gymnasium id; with its module if nothing has imported that yet, `package:space/Name-v0`."""
    make_kwargs: ClassVar[Mapping[str, Any]] = {}
    tasks_checked: ClassVar[int] = 3
    """How many tasks the tests play; they are spread over the environment's list."""
    expert_turns: ClassVar[int] = 200
    """Turns within which the expert must win."""

    # --- what a subclass may override

    def make(self, **overrides: Any) -> gym.Env[str, str]:
        """One environment, as `gym.make` gives it."""
        return gym.make(self.env_id, **{"max_turns": None, **self.make_kwargs, **overrides})

    def choose(self, guard: ActionGuard, rng: np.random.Generator) -> str:
        """An action that may be played now: a random admissible one, else the expert's, else an example."""
        admissible = guard.admissible()
        if admissible:
            return admissible[int(rng.integers(len(admissible)))]
        return guard.expert_action() or guard.tool.examples[0]

    # --- helpers

    def guard(self, **overrides: Any) -> ActionGuard:
        return guard_of(self.make(**overrides))

    def some_tasks(self, guard: ActionGuard) -> list[str]:
        ids = guard.task_ids()
        indices = np.linspace(0, len(ids) - 1, min(self.tasks_checked, len(ids))).astype(int)
        return [ids[int(index)] for index in indices]

    def play(self, guard: ActionGuard, seed: int, turns: int) -> list[Any]:
        """The results of `turns` chosen actions, with those of resets where an episode ends."""
        rng = np.random.default_rng(seed)
        seen: list[Any] = []
        for _ in range(turns):
            step = guard.step(self.choose(guard, rng))
            seen.append(step)
            if step[2] or step[3]:
                seen.append(guard.reset())
        return seen

    # --- the contract: snapshots, closing, pickling

    def test_snapshots_continue_byte_for_byte(self) -> None:
        guard = self.guard()
        for before in range(6):
            guard.reset(seed=11)
            self.play(guard, 5, before)
            guard.step("no such action")
            state = json.dumps(guard.get_state())
            info = guard.describe()
            future = [*self.play(guard, before, 8), guard.reset()]
            for target, env in (("the same object", guard), ("a new object", self.guard())):
                env.set_state(json_of(state))
                assert json.dumps(env.get_state()) == state, f"restored in {target}, the snapshot is another one"
                assert env.describe() == info, f"restored in {target}, the state is another one"
                again = [*self.play(env, before, 8), env.reset()]
                assert again == future, f"restored in {target} after {before} steps, the episode went another way"

    def test_refused_snapshots_change_nothing(self) -> None:
        guard, second = self.guard(), self.guard()
        tasks = self.some_tasks(guard)
        second.reset(seed=2, options={"task": tasks[-1]})
        self.play(second, 3, 1)
        good = second.get_state()
        strange = [{}, None, good["env"], {**good, "turn": "1"}, {**good, "env": {}}]
        changes: list[dict[str, Any]] = [{"sha256": "0" * 64}, {"task": "no such task"}, {"rng": {}}, {"phase": "gone"}]
        strange += [{**good, "env": {**good["env"], **change}} for change in changes]
        guard.reset(seed=1, options={"task": tasks[0]})
        self.play(guard, 2, 3)
        before = json.dumps(guard.get_state()), guard.describe()
        for state in strange:
            expect(TurngymError, guard.set_state, state)
            after = json.dumps(guard.get_state()), guard.describe()
            assert after == before, f"a refused snapshot ({brief(state, 80)}) left the environment in another state"
        twin = self.guard()
        twin.reset(seed=1, options={"task": tasks[0]})
        self.play(twin, 2, 3)
        assert self.play(guard, 4, 5) == self.play(twin, 4, 5), "after refused snapshots the episode went another way"
        fresh = self.guard()
        for state in strange:
            expect(TurngymError, fresh.set_state, state)
            expect(ResetNeeded, fresh.step, "anything")

    def test_a_closed_environment_opens_again(self) -> None:
        guard, neighbor, twin = self.guard(), self.guard(), self.guard()
        neighbor.reset(seed=4)
        for seed in range(3):
            guard.reset(seed=seed)
            state = guard.get_state()
            future = self.play(guard, seed, 4)
            for _ in range(2):
                guard.close()
                expect(ResetNeeded, guard.step, "anything")
                expect(ResetNeeded, guard.get_state)
            opened = guard.reset(seed=seed)
            assert opened == twin.reset(seed=seed), "reset after close begins another episode"
            assert self.play(guard, seed, 4) == future == self.play(twin, seed, 4), "after close it plays differently"
            guard.close()
            expect(TurngymError, guard.set_state, {**state, "env": {**state["env"], "sha256": "0" * 64}})
            expect(ResetNeeded, guard.step, "anything")
            guard.set_state(state)
            assert self.play(guard, seed, 4) == future, "restored after close it plays differently"
            guard.close()
        fresh = self.guard()
        fresh.reset(seed=4)
        assert self.play(neighbor, 6, 8) == self.play(fresh, 6, 8), "closing one environment changed another"

    def test_environments_can_be_pickled(self) -> None:
        guard = self.guard(channel="text")
        new = pickle.loads(pickle.dumps(guard))
        assert new.reset(seed=5) == guard.reset(seed=5), "pickled before its first reset, it plays differently"
        for turns in (0, 3):
            self.play(guard, 1, turns)
            moved = pickle.loads(pickle.dumps(guard))
            assert moved.get_state() == guard.get_state(), "pickled during an episode, it is in another state"
            assert (moved.spec, moved.tool) == (guard.spec, guard.tool)
            guard_went, moved_went = self.play(guard, 2, 5), self.play(moved, 2, 5)
            assert moved_went == guard_went, "pickled during an episode, it plays differently"
        guard.close()
        moved = pickle.loads(pickle.dumps(guard))
        expect(ResetNeeded, moved.step, "anything")
        assert moved.reset(seed=5)[1]["task_id"] == new.reset(seed=5)[1]["task_id"]

    # --- the contract: calls

    def test_calls_are_judged_before_they_are_played(self) -> None:
        guard = self.guard(on_invalid="reject")
        tools = guard.tool
        if not isinstance(tools, ToolSet):
            return
        guard.reset(seed=0)
        before, expert = guard.base.describe(), guard.expert_action()
        for action in (*(guard.admissible() or ()), *tools.examples, *(() if expert is None else (expert,))):
            assert tools.refuse(action) is None, f"{action} is no valid call: {tools.refuse(action)}"
            assert tools.canonical(action) == action, f"{action} is not canonical, which is {tools.canonical(action)}"
        for tool in tools.tools:
            wrong: list[dict[str, Any]] = [{"no_such_argument": 1}, *({item.name: []} for item in tool.arguments)]
            for arguments in wrong:
                info = guard.step(tool_call(tool.name, **arguments))[4]
                assert (info["verdict"], info["env_steps"]) == ("inadmissible", 0), f"{info['action']} was played"
                assert guard.base.describe() == before, f"{info['action']} changed the environment"
        guard.step(tool_call("no_such_tool"))
        assert guard.base.describe() == before, "a call of no tool changed the environment"

    # --- the contract: everything else

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
        task_ids = [self.guard().reset(seed=seed)[1]["task_id"] for seed in range(12)]
        assert len(self.guard().task_ids()) == 1 or len(set(task_ids)) > 1, "the seed does not choose the task"

    def test_tasks_are_chosen_by_option(self) -> None:
        guard, twin = self.guard(), self.guard()
        for task_id in self.some_tasks(guard):
            first = guard.reset(seed=1, options={"task": task_id})
            assert first[1]["task_id"] == task_id == guard.task.task_id, f"reset did not begin the task {task_id}"
            again = twin.reset(seed=1, options={"task": task_id})
            assert first == again, f"{task_id} begins differently in a second object"
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
            drawn = [env.action_space.sample() for _ in range(20)]
            for text in (*NONSENSE, *HARD_TEXT, np.str_("no such action"), *drawn):
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
        played = {}
        for mode, mode_kwargs in _MODES.items():
            envs = gym.make_vec(self.env_id, 2, vectorization_mode=mode, **mode_kwargs, **self.make_kwargs)
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
            played[mode] = rounds
        for number in range(2):
            guard = self.guard()
            alone, info = guard.reset(seed=4 + number)
            first = played["sync"][0]
            assert (first[0][number], first[1][number]) == (alone, info["task_id"]), "a batch plays another episode"
        assert played["sync"] == played["vector_entry_point"], "our vector environment differs from SyncVectorEnv"
        assert played["sync"] == played["async"], "AsyncVectorEnv(shared_memory=False) differs from SyncVectorEnv"


def check_contract(env_id: str, **make_kwargs: Any) -> None:
    """Runs the whole contract without pytest, for example in a notebook; a broken promise is an AssertionError."""
    chosen = {"env_id": env_id, "make_kwargs": make_kwargs}
    contract: Any = type("Contract", (EnvContract,), chosen)()
    for name in sorted(dir(EnvContract)):
        if name.startswith("test_"):
            getattr(contract, name)()
