"""Curves for plots and reports: smoothing without lag, and thinning."""

from collections.abc import Sequence

import numpy as np


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Smooth a curve: at each point, a straight line fitted to the finite values up to `window // 2` points away.

    In the interior of evenly spaced values this is their centered mean. At the ends, where a mean would look back or
    ahead, the fit keeps the slope, so a smoothed curve never lags: a straight line stays what it is.

    Args:
        values: the curve; points that are not finite are left out of all fits.
        window: points per fit, about; 1 returns the values.

    Returns:
        One value per point; NaN if there is no finite value within reach.
    """
    y = np.asarray(values, dtype=np.longdouble)
    count, half = len(y), max(1, window) // 2
    if half == 0 or count == 0:
        return [float(value) for value in values]
    finite = np.isfinite(y)
    y = np.where(finite, y, 0)
    shift = y.sum() / max(1, finite.sum())  # keeps the sums small
    y = np.where(finite, y - shift, 0)
    x = np.arange(count, dtype=np.longdouble)
    weight = finite.astype(np.longdouble)
    first, end = np.maximum(np.arange(count) - half, 0), np.minimum(np.arange(count) + half + 1, count)

    def window_sums(terms: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0], np.cumsum(terms)])
        return sums[end] - sums[first]

    n, sx, sy = window_sums(weight), window_sums(weight * x), window_sums(y)
    filled = np.maximum(n, 1)
    mean_x, mean_y = sx / filled, sy / filled
    spread = window_sums(weight * x * x) - n * mean_x**2
    slope = np.where(spread > 0.5 - 1e-6, (window_sums(x * y) - n * mean_x * mean_y) / np.maximum(spread, 0.5), 0)
    fitted = mean_y + slope * (x - mean_x) + shift
    return [float(value) for value in np.where(n > 0, fitted, np.nan)]


def thin(x: Sequence[float], y: Sequence[float], most: int) -> list[tuple[float, float]]:
    """At most about `most` points of a curve that show its shape: of each run of points the lowest and the highest.

    Args:
        x, y: the points, in order; those with a value that is not finite are left out.
        most: number of points to keep.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(b)]
    if len(points) <= most:
        return points
    step = -(-2 * len(points) // most)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), step):
        run = range(start, min(start + step, len(points)))
        kept |= {min(run, key=lambda i: points[i][1]), max(run, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]
