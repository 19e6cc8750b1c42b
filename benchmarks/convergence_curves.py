"""From held-out curves to the steps, bytes and seconds that a hook needs to reach a loss. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SMOOTHING = 5  # evaluations averaged for a point: this one and those before it

Curve = dict[str, list[float]]  # of benchmarks.convergence_rank.train: one value an evaluation


@dataclass(frozen=True)
class Reached:
    """What a run had spent when it reached a loss."""

    step: float
    sent: float  # bytes, by one rank
    seconds: float | None  # None without a step time


def smooth(values: Sequence[float]) -> list[float]:
    """Means of the last SMOOTHING values, of fewer at the start: what lies ahead is never looked at.

    The first value, of the untrained model, is in no mean but its own.

    >>> smooth([4.0, 2.0, 3.0, 1.0])
    [4.0, 2.0, 2.5, 2.0]
    """
    windows = [values[max(1, i + 1 - SMOOTHING) : i + 1] for i in range(1, len(values))]
    return [*values[:1], *(sum(window) / len(window) for window in windows)]


def first_at_most(target: float, values: Sequence[float]) -> float | None:
    """The place, as a fraction between two indices, where a curve first comes down to the target. None: it never does.

    >>> first_at_most(2.5, [4.0, 3.0, 2.0])
    1.5
    """
    for i, value in enumerate(values):
        if value <= target:
            return 0.0 if i == 0 else i - (target - value) / (values[i - 1] - value)
    return None


def at(place: float, values: Sequence[float]) -> float:
    """The value at such a place."""
    i = min(int(place), len(values) - 2)
    return values[i] + (place - i) * (values[i + 1] - values[i])


def final_loss(curve: Curve) -> float:
    return smooth(curve["loss"])[-1]


def at_step(step: float, curve: Curve, name: str) -> float:
    """A smoothed quantity of the curve after so many steps; its last value if the run was shorter."""
    reached = first_at_most(-step, [-x for x in curve["step"]])
    values = smooth(curve[name])
    return values[-1] if reached is None else at(reached, values)


def seconds_on_link(curve: Curve, step_seconds: float, rate: float) -> list[float]:
    """Training time up to each evaluation, derived: steps times what one was measured to take on a link.

    A run that sends more at its start, as in a warm-up, waits for the surplus besides.

    Args:
        step_seconds: of a step as the last ones of the run.
        rate: of the link, bit/s.
    """
    steps, sent = curve["step"], curve["bytes"]
    steady = (sent[-1] - sent[-2]) / (steps[-1] - steps[-2])
    return [n * step_seconds + max(0.0, b - n * steady) * 8 / rate for n, b in zip(steps, sent, strict=True)]


def reach(target: float, curve: Curve, seconds: list[float] | None) -> Reached | None:
    """When the smoothed held-out loss first is at most the target. None if it never is: nothing is extrapolated."""
    place = first_at_most(target, smooth(curve["loss"]))
    if place is None:
        return None
    return Reached(at(place, curve["step"]), at(place, curve["bytes"]), at(place, seconds) if seconds else None)


@dataclass(frozen=True)
class Spread:
    """Several seeds' values: median, least and largest; None where not all seeds have one."""

    middle: float
    least: float
    most: float

    def __format__(self, spec: str) -> str:
        middle, least, most = (format(x, spec) for x in (self.middle, self.least, self.most))
        return middle if least == most else f"{middle} ({least} to {most})"


def spread(values: Sequence[float | None]) -> Spread | None:
    known = [x for x in values if x is not None]
    if not known or len(known) < len(values):
        return None
    return Spread(median(known), min(known), max(known))


def verdict(ratios: Spread) -> str:
    """What ratios to bf16's time allow to say: nothing, if they lie on both sides of 1."""
    if ratios.most < 1:
        return "faster"
    return "slower" if ratios.least > 1 else "no difference beyond the spread"


def plain_numbers(curve: dict[str, Any]) -> Curve:
    """Rounded, to be kept: a step's loss has no ten digits."""
    return {name: [round(x, 6) for x in values] for name, values in curve.items()}
