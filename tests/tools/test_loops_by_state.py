"""Two detectors of loops on the same episodes: places by hand, and the divergence recomputed from whole softmaxes."""

from __future__ import annotations

from dataclasses import replace

import loops_by_state
import numpy as np
import pytest
import torch

from tests.support.toy_run import PROMPT, RESPONSE, VOCAB, episode, tiny
from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ReplayAgent
from turngym.core.episode import Episode, Status
from turngym.core.errors import TurngymError
from turngym.core.loops import loop_end
from turngym.envs.guard import guard_of
from turngym.trainers.batch import pack
from turngym.trainers.scorer import LocalScorer

pytestmark = pytest.mark.long
STATES = (list("abcdef"), list("ababab"), list("abaa"))
"""Never the same state thrice; the third a before the fifth turn, and before the fourth."""


def played() -> list[Episode]:
    rng = np.random.default_rng(1)
    found = []
    for number, states in enumerate(STATES):
        ids = rng.integers(0, VOCAB, len(states) * (PROMPT + RESPONSE))
        one = episode(ids, np.full((len(states), RESPONSE), -1.0), number, Status.COMPLETED)
        turns = tuple(replace(turn, observation=f"page {turn.index}") for turn in one.turns)
        found.append(replace(one, turns=turns))
    return found


def test_a_loop_of_states_is_the_third_time_in_one() -> None:
    assert [loops_by_state.state_end(states) for states in STATES] == [None, 5, 4]


def test_states_are_those_of_the_environment_where_no_turn_comes_twice() -> None:
    make_env = env_maker("turngym/ALFWorld-v0")
    env = make_env()
    env.reset(seed=0)
    task = guard_of(env).task
    said = ["inventory", "look", "inventory", "look", "go to desk 1"]
    script = ReplayAgent(said)
    one = rollout([Job(task_id=task.task_id, seed=0)], make_env, script, max_turns=len(said))[0]
    states = loops_by_state.states_of(one, make_env)
    assert len(states) == len(said)
    assert len(set(states[:4])) == 1
    assert loops_by_state.state_end(states) == 3
    assert loop_end(one.turns) is None
    with pytest.raises(TurngymError, match="goes otherwise in turngym/ALFWorld-v0"):
        loops_by_state.states_of(one, env_maker("turngym/ALFWorld-v0", show_admissible=True))


def test_the_divergence_behind_a_loop_is_that_of_the_whole_softmaxes() -> None:
    episodes, models = played(), [tiny(seed, 3.0) for seed in (0, 1)]
    batch = pack(episodes)
    found = loops_by_state.divergence(batch, *(LocalScorer(model=model) for model in models))
    wanted = []
    for one in episodes:
        ids = torch.from_numpy(one.segments[0].astype(np.int64))[None]
        with torch.no_grad():
            p, q = (model(input_ids=ids).logits[0].double().softmax(-1) for model in models)
        for turn in one.turns:
            for place in range(*turn.response_span):
                best = p[place - 1].topk(50).indices
                both = [torch.cat([x[place - 1][best], 1 - x[place - 1][best].sum(0, keepdim=True)]) for x in (p, q)]
                wanted.append(float((both[0] * (both[0] / both[1]).log()).sum()))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    ends = {"turns": [None] * 3, "states": [loops_by_state.state_end(states) for states in STATES]}
    rows = loops_by_state.compare(episodes, ends, batch, found)
    assert [row[:4] for row in rows] == [["turns", "0 of 3", "0", "0%"], ["states", "2 of 3", "1", "6%"]]
    # of the second episode the last turn, of the third none
    behind = np.arange(len(found)) // RESPONSE == 11
    assert rows[1][4:6] == [f"{found[behind].mean():.3f}", f"{found[~behind].mean():.3f}"]
