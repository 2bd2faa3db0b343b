"""Overheads and rates from times: lines through them, of errors that are relative."""

from collections.abc import Mapping, Sequence

import numpy as np

LEAST_S = 1e-7  # the least overhead or latency: nothing that a rank starts takes less
Points = Sequence[tuple[float, float, float]]  # x, y, and the scale of an error of y


class Unreliable(Exception):
    """Measurements that must not be kept; raised alike on all ranks."""


def line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Bandwidth and latency from times by number of bytes. Raises Unreliable."""
    latency, per_byte = affine([(num_bytes, t, t) for num_bytes, t in seconds.items()])
    if per_byte <= LEAST_S / max(seconds):
        times = ", ".join(f"{num_bytes}: {t * 1e6:.0f} us" for num_bytes, t in seconds.items())
        raise Unreliable(f"more bytes must take more time, got {times}")
    return 1 / per_byte, latency


def affine(points: Points) -> tuple[float, float]:
    """a and b of y = a + b x, fitted by least squares of the errors, each relative to its point's third number.

    a is at least LEAST_S, and so is b times the largest x.
    """
    x, y, scale = np.array(points).T
    weights, least = scale**-2, LEAST_S / float(x.max())
    b, a = np.polyfit(x, y, 1, w=1 / scale) if np.ptp(x) else (0.0, 0.0)
    if b < least:
        return max(float(np.average(y, weights=weights)), LEAST_S), least
    if a < LEAST_S:
        return LEAST_S, max(float((weights * x * y).sum() / (weights * x * x).sum()), least)
    return float(a), float(b)
