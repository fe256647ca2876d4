"""Packing: one row of arithmetic per column, then what must hold for any episodes."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.core.episode import Status
from turngym.core.errors import TurngymError
from turngym.core.task import Verdict
from turngym.trainers import batch as batch_module
from turngym.trainers.batch import BatchError, RolloutBatch, pack, was_refused
from turngym.trainers.microbatch import micro_batches, passes
from turngym.trainers.ranks import SINGLE, Ranks
from turngym.trainers.token_weights import trajectory_weights

repeatable = settings(derandomize=True)


def test_two_ragged_episodes_by_hand(ragged):
    batch = pack(ragged)
    # row 0:     1 2 3 [10 11] 4 [12] 9      row 1: 5 6 [20 21]
    # index in M 0 1 2   3  4  5   6  7             8 9  10 11
    assert batch.input_ids_M.tolist() == [1, 2, 3, 10, 11, 4, 12, 9, 5, 6, 20, 21]
    assert batch.row_M.tolist() == [0] * 8 + [1] * 4
    assert batch.position_M.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert batch.row_offsets.tolist() == [0, 8, 12]
    assert batch.predictor_N.tolist() == [2, 3, 5, 9, 10]
    assert batch.label_N.tolist() == [10, 11, 12, 20, 21]
    assert batch.turn_N.tolist() == [0, 0, 1, 0, 0]
    assert batch.episode_N.tolist() == [0, 0, 0, 1, 1]
    assert batch.row_N.tolist() == [0, 0, 0, 1, 1]
    assert batch.response_N.tolist() == [0, 0, 1, 2, 2]
    np.testing.assert_array_equal(batch.behavior_logp_N, np.array([-0.5, -1, -2, np.nan, np.nan], np.float32))
    assert batch.off_policy_N.tolist() == [False] * 5
    assert (batch.reward_E.tolist(), batch.success_E.tolist()) == ([0.0, 1.0], [False, True])
    assert (batch.depth_E.tolist(), batch.group_E.tolist()) == ([2, 1], [7, 8])
    assert (batch.task_ids, batch.source_E.tolist(), batch.excluded) == (("task/0", "task/1"), [0, 1], 0)
    assert (batch.tokens, batch.rows, batch.episodes) == (5, 2, 2)


def test_the_drawn_batch_is_what_packing_gives(ragged):
    lines = {line.split()[0]: line for line in (batch_module.__doc__ or "").splitlines() if line.startswith("    ")}
    batch = pack(ragged)
    drawn = {name: line.replace("|", " ").split()[1:] for name, line in lines.items() if name in vars_of(batch)}
    assert len(drawn) == 12
    for name, cells in drawn.items():
        column = getattr(batch, name)
        wanted = [str(value) for value in column.tolist()]
        if column.dtype != np.bool_:
            cells, wanted = [float(cell) for cell in cells], column.astype(float).tolist()
        np.testing.assert_array_equal(cells, wanted, err_msg=name)
    shares = [Fraction(cell) for cell in lines["weight_N"].replace("|", " ").split()[1:]]
    np.testing.assert_allclose([float(share) for share in shares], trajectory_weights(batch))
    # every N column stands below the token that is its label
    ends = [match.end() for match in re.finditer(r"\S+", lines["input_ids_M"].replace("|", " "))][1:]
    wanted = [ends[predictor + 1] for predictor in batch.predictor_N]
    for name in ("label_N", "predictor_N", "turn_N", "episode_N", "row_N", "behavior_logp_N", "weight_N"):
        assert [match.end() for match in re.finditer(r"\S+", lines[name].replace("|", " "))][1:] == wanted, name


def vars_of(batch: RolloutBatch) -> set[str]:
    return set(type(batch).__dataclass_fields__)


def test_columns_have_the_documented_types(ragged):
    batch = pack(ragged)
    for name in RolloutBatch.__dataclass_fields__:
        value = getattr(batch, name)
        if isinstance(value, np.ndarray):
            float_64 = dict.fromkeys(("reward_E", "temperature_N"), np.float64)
            wanted = {"behavior_logp_N": np.float32, **float_64}.get(name, np.int64)
            wanted = np.bool_ if name in ("off_policy_N", "success_E", "truncated_E", "short_E") else wanted
            assert value.dtype == wanted, name


def test_error_episodes_are_left_out_and_counted(ragged, make_episode):
    broken = make_episode([([1], [2, 3])], number=2, status=Status.ERROR_ENGINE)
    batch = pack([broken, *ragged])
    assert (batch.excluded, batch.episodes) == (1, 2)
    assert batch.source_E.tolist() == [1, 2]
    np.testing.assert_array_equal(batch.label_N, pack(ragged).label_N)


def test_a_depth_cap_is_a_truncation_that_trains(make_episode):
    capped = make_episode([([1], [2])], status=Status.TRUNCATED_DEPTH)
    own_limit = make_episode([([1], [3])], status=Status.TRUNCATED_TURNS)
    batch = pack([capped, own_limit])
    assert batch.truncated_E.tolist() == [True, False]
    assert batch.label_N.tolist() == [2, 3]


def test_only_the_asked_origins_are_supervised_and_noise_never(make_episode):
    episode = make_episode(
        [([1], [2, 3]), ([4], [5]), ([6], [7])], origins=["demonstration", "noise", "policy"], logprobs=None
    )
    assert pack([episode]).label_N.tolist() == [7]
    both = pack([episode], origins=("policy", "demonstration"))
    assert both.label_N.tolist() == [2, 3, 7]
    assert both.off_policy_N.tolist() == [True, True, False]
    assert both.input_ids_M.tolist() == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(BatchError, match=r"'noise'.*policy.*demonstration"):
        pack([episode], origins=("noise",))


def test_a_response_that_a_demonstrator_began_is_told_apart_token_by_token(make_episode):
    plain = make_episode([([1, 2], [10, 11, 12]), ([4], [5])], logprobs=[[-9.0, -0.5, -1.0], [-2.0]])
    episode = replace(plain, turns=(replace(plain.turns[0], begun=1), plain.turns[1]))
    both = pack([episode], origins=("policy", "demonstration"))
    assert both.label_N.tolist() == [10, 11, 12, 5]
    assert both.predictor_N.tolist() == [1, 2, 3, 5]
    assert both.off_policy_N.tolist() == [True, False, False, False]
    assert both.turn_N.tolist() == [0, 0, 0, 1]
    assert both.behavior_logp_N.tolist() == [-9.0, -0.5, -1.0, -2.0]
    own = pack([episode])
    assert (own.label_N.tolist(), own.predictor_N.tolist()) == ([11, 12, 5], [2, 3, 5])
    assert not own.off_policy_N.any()
    for begun in (4, -1):
        with pytest.raises(TurngymError, match=f"{begun} ids .* a response of 3 tokens"):
            replace(plain, turns=(replace(plain.turns[0], begun=begun), plain.turns[1]))


def test_each_segment_with_supervised_tokens_is_a_row(make_episode):
    episode = make_episode(
        [([1], [2]), ([3, 4], [5]), ([6], [7])], segments=[0, 1, 2], origins=["policy", "noise", "policy"]
    )
    batch = pack([episode])
    assert batch.input_ids_M.tolist() == [1, 2, 6, 7]
    assert batch.row_N.tolist() == [0, 1]
    assert batch.predictor_N.tolist() == [0, 2]
    assert batch.turn_N.tolist() == [0, 2]


def test_rows_of_one_episode_are_told_apart_from_episodes(ragged, make_episode):
    """The second episode has two rows, so that rows and episodes are numbered differently."""
    two = make_episode([([1, 2], [3]), ([4], [5, 6])], segments=[0, 1])
    batch = pack([ragged[1], two])
    assert (batch.row_N.tolist(), batch.episode_N.tolist()) == ([0, 0, 1, 2, 2], [0, 0, 1, 1, 1])
    (micro,) = micro_batches(batch, 100, SINGLE)
    assert micro.tokens.tolist() == [0, 1, 2, 3, 4]
    assert micro.passed.ids_RL.tolist() == [[5, 6, 20, 21], [1, 2, 3, 0], [4, 5, 6, 0]]
    # the tokens before 20 and 21, before 3, and before 5 and 6
    assert micro.predictor_n.tolist() == [1, 2, 5, 8, 9]


def test_a_row_is_that_of_the_segment_that_is_trained_on(make_episode):
    pieces, origins = [([1], [2]), ([3, 4], [5]), ([6], [7])], ["noise", "policy", "policy"]
    for segments in ([0, 1, 1], [0, 1, 2]):
        batch = pack([make_episode([([8], [9])]), make_episode(pieces, segments=segments, origins=origins)])
        np.testing.assert_array_equal(batch.input_ids_M, [8, 9, 3, 4, 5, 6, 7])
        np.testing.assert_array_equal(batch.input_ids_M[batch.predictor_N + 1], [9, 5, 7])
        assert batch.row_N.tolist() == ([0, 1, 1] if segments[2] == 1 else [0, 1, 2])


def test_a_demonstration_that_was_refused_is_no_example_but_an_own_mistake_is(make_episode):
    plain = make_episode([([1], [2]), ([3], [4]), ([5], [6])], origins=["demonstration", "demonstration", "policy"])
    turns = [replace(turn, verdict=Verdict.INADMISSIBLE) if turn.index else turn for turn in plain.turns]
    assert [was_refused(turn) for turn in turns] == [False, True, False]
    both = pack([replace(plain, turns=tuple(turns))], origins=("policy", "demonstration"))
    assert both.label_N.tolist() == [2, 6]


def test_nothing_to_train_on_is_an_error(make_episode):
    with pytest.raises(BatchError, match="0 episodes"):
        pack([])
    silent = make_episode([([1], [2])], origins=["noise"])
    failed = make_episode([([1], [2])], status=Status.ERROR_ENV)
    with pytest.raises(BatchError, match="2 episodes, 1 of them errors, 0 whose first prompt"):
        pack([silent, failed])
    full = replace(silent, segments=(), turns=(), status=Status.TRUNCATED_TOKENS)
    later = replace(silent, status=Status.TRUNCATED_TOKENS)
    with pytest.raises(BatchError, match="3 episodes, 0 of them errors, 1 whose first prompt"):
        pack([silent, full, later])


def test_a_response_that_nothing_precedes_is_an_error(make_episode):
    with pytest.raises(BatchError, match=r"task/3 sample 0, turn 0.*position 0"):
        pack([make_episode([([], [2])], number=3)])


def test_an_episode_without_responses_still_counts_as_played(ragged, make_episode):
    batch = pack([*ragged, make_episode([([1], [])], number=2)])
    assert batch.episodes == 3
    assert batch.depth_E.tolist() == [2, 1, 1]
    assert batch.rows == 2


def test_passes_of_padded_rows_by_hand(ragged):
    batch = pack(ragged)
    one, two = micro_batches(batch, 8, SINGLE)
    assert (one.passed.ids_RL.tolist(), one.tokens.tolist()) == ([[1, 2, 3, 10, 11, 4, 12, 9]], [0, 1, 2])
    assert (two.passed.ids_RL.tolist(), two.tokens.tolist()) == ([[5, 6, 20, 21]], [3, 4])
    assert (one.predictor_n.tolist(), two.predictor_n.tolist()) == ([2, 3, 5], [1, 2])
    (both,) = micro_batches(batch, 16, SINGLE)
    assert both.passed.ids_RL.tolist() == [[1, 2, 3, 10, 11, 4, 12, 9], [5, 6, 20, 21, 0, 0, 0, 0]]
    assert (both.passed.position_RL, both.passed.line) == (None, None)
    assert both.predictor_n.tolist() == [2, 3, 5, 9, 10]
    # a row longer than the budget comes alone
    assert [micro.tokens.tolist() for micro in micro_batches(batch, 1, SINGLE)] == [[0, 1, 2], [3, 4]]


def test_rows_share_a_line_by_hand(ragged):
    (packed,) = micro_batches(pack(ragged), 12, SINGLE, packed=True)
    assert packed.passed.ids_RL.tolist() == [[1, 2, 3, 10, 11, 4, 12, 9, 5, 6, 20, 21]]
    assert packed.passed.position_RL.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert packed.predictor_n.tolist() == [2, 3, 5, 9, 10]  # of 10 11 12 and of 20 21
    assert len(micro_batches(pack(ragged), 11, SINGLE, packed=True)) == 2


def test_a_process_without_rows_runs_the_model_on_a_token_in_which_nothing_is_predicted(ragged):
    shares = [micro_batches(pack(ragged), 100, Ranks(rank, 3)) for rank in range(3)]
    assert [[micro.tokens.tolist() for micro in share] for share in shares] == [[[0, 1, 2]], [[3, 4]], [[]]]
    assert (shares[2][0].passed.ids_RL.tolist(), shares[2][0].predictor_n.tolist()) == ([[0]], [])


def test_rows_are_taken_longest_first_and_in_order(make_episode):
    (part,) = passes([np.arange(size) for size in (3, 4, 4, 4)], 1000, packed=False)
    assert part.rows == (1, 2, 3, 0)
    batch = pack([make_episode([([1], [2, 3])]), *(make_episode([([1], [2, 3, 4])]) for _ in range(20))])
    (whole,) = micro_batches(batch, 1000, SINGLE)
    assert whole.passed.rows == (*range(1, 21), 0)
    assert whole.tokens.tolist() == [*range(2, 62), 0, 1]


turns = st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.lists(st.integers(0, 50), max_size=4))
games = st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=6)


@repeatable
@given(games, st.integers(1, 60))
def test_every_label_is_the_sampled_id_behind_its_predictor(make_episode, pieces, budget):
    episodes = [make_episode(piece, number=number) for number, piece in enumerate(pieces)]
    sampled = [int(i) for piece in pieces for _, response in piece for i in response]
    if not sampled:
        with pytest.raises(BatchError):
            pack(episodes)
        return
    batch = pack(episodes)
    assert batch.label_N.tolist() == sampled
    np.testing.assert_array_equal(batch.input_ids_M[batch.predictor_N + 1], batch.label_N)
    np.testing.assert_array_equal(batch.row_M[batch.predictor_N], batch.row_N)
    np.testing.assert_array_equal(batch.row_M[batch.predictor_N + 1], batch.row_N)
    seen_rows, seen_tokens = [], []
    for micro in micro_batches(batch, budget, SINGLE):
        assert micro.passed.ids_RL.size <= budget or len(micro.passed.rows) == 1
        flat = micro.passed.ids_RL.reshape(-1)
        np.testing.assert_array_equal(flat[micro.predictor_n + 1], batch.label_N[micro.tokens])
        seen_rows += micro.passed.rows
        seen_tokens += micro.tokens.tolist()
    assert sorted(seen_rows) == list(range(batch.rows))
    assert sorted(seen_tokens) == list(range(batch.tokens))


def test_each_label_has_the_temperature_at_which_it_was_drawn(ragged):
    """As its episode says, or its turn; NaN where nobody says."""
    first, second = ragged
    batch = pack([replace(first, meta={"temperature": 0.5}), second])
    np.testing.assert_array_equal(batch.temperature_N, [0.5, 0.5, 0.5, np.nan, np.nan])
    batch = pack([replace(first, meta={"temperatures": [0, 0.75]}), replace(second, meta={"temperature": 2})])
    np.testing.assert_array_equal(batch.temperature_N, [0.0, 0.0, 0.75, 2.0, 2.0])
