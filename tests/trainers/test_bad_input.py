"""Bad input to training is a clear error or a counted drop, never silent zeros. The rest of the list is tested here:

- a teacher with the wrong number of log-probabilities: `test_algorithms` (top-K), `test_teacher_reward` (sampled ids),
  `test_opd_hints` (hinted prompts)
- a judge that answers rubbish: `test_judge_votes` (text), `tests/agents/test_judge_models` (an endpoint's body)
- a hint with control tokens: `test_hints_that_forge_turns_or_do_not_fit_are_refused` in
  `tests/agents/test_judge_hints`, counted as `judge/hints_refused`
- malformed chat requests: `tests/agents/test_proxy_request`, over HTTP `tests/agents/test_proxy_http`
- a client that disconnects mid-stream: `tests/agents/test_proxy_http`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_run as toy

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.task import Verdict
from turngym.trainers.algorithm import Scorers
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import grpo, luffy
from turngym.trainers.algorithms.luffy import PrefixSchedule
from turngym.trainers.batch import BatchError, pack
from turngym.trainers.group_advantage import AdvantageError, SplitAdvantage
from turngym.trainers.run_config import RunConfig
from turngym.trainers.step_metrics import rollout_row
from turngym.trainers.train_loop import TrainError

Make = Callable[..., Episode]
NOBODY = Scorers(student=None)  # type: ignore[arg-type]


@pytest.fixture
def group(make_episode: Make) -> list[Episode]:
    """Four attempts at one task: an expert's and three of the policy, one of them won."""
    pieces = [([1], [2, 3]), ([4], [5])]
    shown = make_episode(pieces, number=0, success=True, origins=["demonstration", "demonstration"])
    return [shown, *(make_episode(pieces, number=n, success=n == 1) for n in (1, 2, 3))]


def test_episodes_that_are_no_whole_groups(tmp_path: Path) -> None:
    run = RunConfig(steps=1, episodes=10, max_turns=6, tracker=None)
    made = toy.trainer(tmp_path / "run", algorithm=grpo.build(grpo.GrpoConfig(n=4), BuildContext(run=run)), run=run)
    with pytest.raises(TrainError, match="10 episodes per step are not whole groups of 4"):
        made.train()
    assert not (tmp_path / "run").exists()


def test_groups_without_anything_to_compare() -> None:
    with pytest.raises(SettingsError, match="n is 1"):
        grpo.build(grpo.GrpoConfig(n=1), BuildContext(run=RunConfig()))
    with pytest.raises(SettingsError, match="needs at least 1 without a prefix"):
        luffy.LuffyConfig(n=2, prefix=PrefixSchedule(count=2))


def test_a_group_of_demonstrations_alone_has_no_baseline(group: list[Episode]) -> None:
    alone = [group[0], replace(group[0], sample=1)]
    with pytest.raises(AdvantageError, match="none of them on-policy: there is no baseline"):
        SplitAdvantage()(pack(alone, origins=("policy", "demonstration")), alone, NOBODY)


def test_a_demonstration_that_is_not_admissible_is_dropped_and_counted(group: list[Episode]) -> None:
    origins: Any = ("policy", "demonstration")
    assert rollout_row(group, pack(group, origins=origins))["off/refused"] == 0
    turns = tuple(replace(t, verdict=Verdict.INADMISSIBLE) if t.index == 0 else t for t in group[0].turns)
    bad = [replace(group[0], turns=turns), *group[1:]]
    batch = pack(bad, origins=origins)
    assert batch.turn_N[batch.off_policy_N].tolist() == [1]  # of two tokens at turn 0 and one at turn 1
    assert batch.tokens == pack(group, origins=origins).tokens - 2
    assert rollout_row(bad, batch)["off/refused"] == 1
    # the policy's own refused actions are trained on: they are what it must unlearn
    own = [replace(e, turns=tuple(replace(t, verdict=Verdict.MALFORMED) for t in e.turns)) for e in group[1:]]
    assert pack(own).tokens == 9
    every = replace(group[0], turns=tuple(replace(t, verdict=Verdict.MALFORMED) for t in group[0].turns))
    with pytest.raises(BatchError):
        pack([every], origins=("demonstration",))
