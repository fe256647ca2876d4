"""The part of the contract about snapshots: exact, refused without a trace, across closing and pickling."""

from __future__ import annotations

import json
import pickle
from typing import Any

from turngym.envs.base import ResetNeeded
from turngym.envs.checks import expect
from turngym.envs.contract.played import Played
from turngym.envs.core import TurngymError


class StateContract(Played):
    """What an environment's state must be able to do."""

    def test_snapshots_continue_byte_for_byte(self) -> None:
        guard = self.guard()
        for before in range(6):
            guard.reset(seed=11)
            self.play(guard, 5, before)
            guard.step("no such action")
            state = json.dumps(guard.get_state())
            info = guard.describe()
            future = [*self.play(guard, before, 8), guard.reset()]
            for place, env in (("the same object", guard), ("a new object", self.guard())):
                env.set_state(json.loads(state))
                assert json.dumps(env.get_state()) == state, f"restored in {place}, the snapshot is another one"
                assert env.describe() == info, f"restored in {place}, the state is another one"
                again = [*self.play(env, before, 8), env.reset()]
                assert again == future, f"restored in {place} after {before} steps, the episode went another way"

    def test_refused_snapshots_change_nothing(self) -> None:
        guard, other = self.guard(), self.guard()
        tasks = self.some_tasks(guard)
        other.reset(seed=2, options={"task": tasks[-1]})
        self.play(other, 3, 1)
        good = other.get_state()
        strange = [{}, None, good["env"], {**good, "turn": "1"}, {**good, "env": {}}]
        inside: tuple[dict[str, Any], ...] = (
            {"sha256": "0" * 64},
            {"task": "no such task"},
            {"rng": {}},
            {"phase": "gone"},
        )
        strange += [{**good, "env": {**good["env"], **change}} for change in inside]
        guard.reset(seed=1, options={"task": tasks[0]})
        self.play(guard, 2, 3)
        before = json.dumps(guard.get_state()), guard.describe()
        for state in strange:
            expect(TurngymError, guard.set_state, state)
            after = json.dumps(guard.get_state()), guard.describe()
            assert after == before, f"a refused snapshot ({state!r:.80}) left the environment in another state"
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
