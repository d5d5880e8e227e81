"""The Wilson score interval of a success rate (Wilson 1927)."""

from math import sqrt

Z_95 = 1.959963984540054


def wilson_interval(num_passed: int, num_graded: int, z: float = Z_95) -> tuple[float, float]:
    """Bounds of the rate's confidence interval, in [0, 1]; `ValueError` where nothing is graded."""
    if num_graded <= 0:
        raise ValueError("no interval without a graded episode")
    rate = num_passed / num_graded
    centre = rate + z * z / (2 * num_graded)
    spread = z * sqrt(rate * (1 - rate) / num_graded + z * z / (4 * num_graded * num_graded))
    scale = 1 + z * z / num_graded
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
