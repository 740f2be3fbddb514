"""Smoothing does not lag; thinning keeps extremes."""

import math

import pytest

from mkd.report.curves import smooth, thin


@pytest.mark.parametrize("window", [1, 2, 5, 50, 500])
def test_a_straight_line_stays_what_it_is(window: int) -> None:
    line = [8.0 - 0.01 * i for i in range(200)]
    assert smooth(line, window) == pytest.approx(line, abs=1e-9)


def test_a_step_is_smoothed_around_its_own_place() -> None:
    smoothed = smooth([1.0] * 100 + [0.0] * 100, 20)
    assert smoothed[99] + smoothed[100] == pytest.approx(1.0)
    assert smoothed[80] == pytest.approx(1.0) and smoothed[120] == pytest.approx(0.0, abs=1e-9)


def test_the_interior_is_a_centered_mean() -> None:
    values = [float((7 * i) % 11) for i in range(60)]
    smoothed = smooth(values, 6)
    assert smoothed[3:-3] == pytest.approx([sum(values[i - 3 : i + 4]) / 7 for i in range(3, 57)])


def test_noise_shrinks_everywhere() -> None:
    values = [(-1.0) ** i for i in range(400)]
    assert max(map(abs, smooth(values, 40))) < 0.25


def test_values_that_are_not_finite_are_left_out() -> None:
    smoothed = smooth([math.nan, 2.0, math.inf, 4.0, math.nan, math.nan, math.nan], 2)
    assert smoothed[:5] == pytest.approx([2.0, 2.0, 3.0, 4.0, 4.0])
    assert math.isnan(smoothed[5]) and math.isnan(smoothed[6])
    assert smooth([], 9) == [] and smooth([1.0, math.inf], 1) == [1.0, math.inf]


def test_large_offsets_lose_no_precision() -> None:
    values = [1e9 + (i % 2) for i in range(1000)]
    assert smooth(values, 100)[500] == pytest.approx(1e9 + 0.5, abs=0.01)


def test_thinning_keeps_extremes_and_ends() -> None:
    y = [float(i == 777) - float(i == 333) for i in range(5000)]
    kept = dict(thin([float(i) for i in range(5000)], y, 100))
    assert kept[777.0] == 1.0 and kept[333.0] == -1.0 and 0.0 in kept and 4999.0 in kept
    assert len(kept) <= 102
