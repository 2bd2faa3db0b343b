"""Overheads and rates from times: lines through them, of errors that are relative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    least = LEAST_S / max(x for x, _, _ in points)
    weights = [1 / scale**2 for _, _, scale in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    moved = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y, _) in zip(weights, points, strict=True))
    b = moved / spread if spread else 0.0
    a = y_mean - b * x_mean
    if b < least:
        return max(y_mean, LEAST_S), least
    if a < LEAST_S:
        square = sum(w * x * x for w, (x, _, _) in zip(weights, points, strict=True))
        return LEAST_S, max(sum(w * x * y for w, (x, y, _) in zip(weights, points, strict=True)) / square, least)
    return a, b
