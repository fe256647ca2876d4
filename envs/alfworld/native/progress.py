"""Whether a goal holds in a state, and how much of it."""

from __future__ import annotations

from turngym.envs.alfworld.native.goal import LookGoal, PlaceGoal
from turngym.envs.alfworld.native.problem import Problem
from turngym.envs.alfworld.native.state import State


def won(problem: Problem, state: State) -> bool:
    """Whether the goal holds."""
    goal = problem.goal
    if isinstance(goal, LookGoal):
        return _holding(problem, goal, state) and _lit(problem, goal, state)
    wanted = _with_flags(goal, state, problem.goal_objects)
    return _most_in_one_place(problem, goal, state, wanted) >= goal.count


def goal_rate(problem: Problem, state: State) -> float:
    """Share of goal conditions that hold, in [0, 1], counted as ALFRED does.

    Place: object in receptacle (1). Clean / heat / cool: some object in place, some object treated, one object both
    (3). Two: how many of them share a receptacle (2). Look: object in hand, lamp on at the agent's location (2).
    Source: [alfred] section 5; docs/algorithms.md#goal-conditions.
    """
    goal = problem.goal
    if isinstance(goal, LookGoal):
        return (_holding(problem, goal, state) + _lit(problem, goal, state)) / 2
    things = problem.goal_objects
    placed = _most_in_one_place(problem, goal, state, things)
    if not goal.flags:
        return min(placed, goal.count) / goal.count
    treated = _with_flags(goal, state, things)
    met = (placed > 0) + bool(treated) + (_most_in_one_place(problem, goal, state, treated) >= goal.count)
    return met / 3


def _with_flags(goal: PlaceGoal, state: State, things: frozenset[int]) -> frozenset[int]:
    for flag in goal.flags:
        things = things & getattr(state, flag)
    return things


def _most_in_one_place(problem: Problem, goal: PlaceGoal, state: State, things: frozenset[int]) -> int:
    if not things:
        return 0
    return max((len(things.intersection(state.contents[r])) for r in problem.goal_receptacles), default=0)


def _holding(problem: Problem, goal: LookGoal, state: State) -> bool:
    return state.held >= 0 and problem.object_types[state.held] == goal.object_type


def _lit(problem: Problem, goal: LookGoal, state: State) -> bool:
    here = problem.receptacles_at[state.location]
    kinds, lamps = problem.object_types, problem.unary["toggleable"]
    return any(
        kinds[lamp] == goal.lamp_type and lamp in lamps and any(lamp in state.contents[r] for r in here)
        for lamp in state.toggled
    )
