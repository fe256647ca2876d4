"""The page on published tables: its tables are what the script makes, and its figures are computed again by hand."""

from __future__ import annotations

from math import comb

import published_tables
import pytest
from published_tables import PAGE, counts, difference, draws, fisher, fits, logs_that_fit, parts_of, rows, with_tables


def test_the_tables_of_the_page_are_what_the_script_makes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(published_tables.TABLES) == {found[2] for found in published_tables.MARKED.finditer(text)}
    assert with_tables(text) == text, "run python tests/tools/published_tables.py --write"


def test_fisher_of_108_and_96_of_128_by_hand() -> None:
    # given 204 of 256 won, one side wins 102 + d with the probability of 102 - d: by symmetry twice the upper tail
    upper = sum(comb(128, k) * comb(128, 204 - k) for k in range(108, 129)) / comb(256, 204)
    assert fisher(108, 128, 96, 128) == pytest.approx(2 * upper)
    assert fisher(108, 128, 96, 128) == pytest.approx(0.08686, abs=5e-6)
    assert fisher(3, 3, 0, 3) == pytest.approx(0.1)  # 2 of the 20 ways to choose three of six
    assert f"{fisher(102, 128, 69, 128):.0e}" == "2e-05"


def test_84_4_and_80_4_are_whole_numbers_of_128_and_84_2_is_not() -> None:
    assert counts(84.4, 128) == (108,)  # 84.375, rounded
    assert counts(80.4, 128) == (103,)  # 80.469, cut off
    assert counts(84.2, 128) == ()  # 107 are 83.594


def test_an_interval_of_a_difference_adds_the_squares_of_clopper_and_pearsons_distances() -> None:
    # 10 of 10 is [0.6915, 1], 0 of 10 is [0, 0.3085]: both ends by 0.025^(1/10)
    apart, low, high = difference(10, 0, 10)
    assert (apart, high) == (100, 100)
    assert low == pytest.approx(100 - 2**0.5 * 100 * (1 - 0.025**0.1), abs=1e-4)


def test_a_row_fits_the_games_of_its_validation_only() -> None:
    # 33/34, 5/8, 26/26, 13/21, 15/20, 16/19: 108 of 128
    row = published_tables.find("SDAR", "3B", "SDAR")
    assert draws("seen")[30] == (34, 8, 26, 21, 20, 19)
    assert parts_of(row) == [97.1, 62.5, 100.0, 61.9, 75.0, 84.2]
    assert [number for number, games in enumerate(draws("seen")) if fits(row, games)] == [30]


def test_validations_of_the_logs_play_the_games_that_the_library_draws() -> None:
    assert logs_that_fit() == (770, 770)


def test_rows_of_others_fit_no_validation() -> None:
    control = rows(paper="UCOB", benchmark="alfworld")
    assert len(control) == 15
    assert [row for row in control if published_tables.validations_of(row)] == []


def test_updates_that_the_index_of_the_logs_names_are_found_from_the_rows_alone() -> None:
    found = {
        model: published_tables.validations_of(published_tables.find("ADRS", model, "ADRS"))
        for model in ("3B", "7B", "1.7B")
    }
    assert found == {"3B": [30], "7B": [30], "1.7B": [25]}


def test_a_search_average_is_that_of_its_sets() -> None:
    """Cells were read from pictures: a slip would move the mean of seven."""
    found = [row for paper in ("SDAR", "OPID", "UCOB") for row in rows(paper=paper, benchmark="search")]
    assert len(found) == 47
    assert [row for row in found if abs(sum(parts_of(row)) / 7 - float(row["value"])) > 0.16] == []


def test_a_number_that_is_no_count_is_not_taken_for_one() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        published_tables.won_of(published_tables.find("OPID", "7B", "OPID"))  # 90.0: 115 are 89.8
