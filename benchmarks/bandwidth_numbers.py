"""What follows from the slots that were measured: medians, spreads, floors; which is faster, and up to which rate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Any, Literal

from benchmarks.bandwidth_rank import NO_SYNC, PHASES
from benchmarks.records import Record

Verdict = Literal["faster", "slower", "no difference"]


def spread(rounds: Sequence[float]) -> float:
    return max(rounds) - min(rounds)


def verdict(rounds: Sequence[float], base: Sequence[float]) -> Verdict:
    """How step times compare with a base line's, measured in the same rounds.

    A difference of the medians that is not larger than the spread of either one's rounds is none.
    """
    difference = median(rounds) - median(base)
    if abs(difference) <= max(spread(rounds), spread(base)):
        return "no difference"
    return "slower" if difference > 0 else "faster"


def summarize(slots: Iterable[dict[str, Any]], link_rate: float) -> dict[str, dict[str, Any]]:
    """Every variant's numbers, from all slots of one launch and the link's measured bit/s.

    Times are in ms; `floor_ms` is the longer of a step without communication and of the bytes over the measured rate;
    `exposed_ms` is the step less the one without communication, round by round.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for slot in slots:
        found.setdefault(slot["variant"], []).append(slot)
    alone = [slot["step_ms"] for slot in found[NO_SYNC]]
    return {name: _summary(ours, alone, link_rate) for name, ours in found.items()}


def _summary(slots: list[dict[str, Any]], alone: list[float], link_rate: float) -> dict[str, Any]:
    rounds = [slot["step_ms"] for slot in slots]
    sent = median(slot["tx_bytes_per_step"] for slot in slots)
    phases = [slot["phases_ms"] for slot in slots if slot["phases_ms"]]
    counted = [slot["metric_bytes_per_step"] for slot in slots if slot["metric_bytes_per_step"] is not None]
    return {
        "steps": slots[0]["steps"],
        "rounds_ms": rounds,
        "step_ms": median(rounds),
        "spread_ms": spread(rounds),
        "tx_bytes_per_step": sent,
        "metric_bytes_per_step": median(counted) if counted else None,
        "floor_ms": max(median(alone), sent * 8 / link_rate * 1e3),
        "exposed_ms": median(step - control for step, control in zip(rounds, alone, strict=True)),
        "phases_ms": {phase: median(x[phase] for x in phases) for phase in PHASES} if phases else None,
    }


@dataclass(frozen=True)
class Crossover:
    """Up to which link rate a hook is faster than a base line: from measured rates, in bit/s.

    `pays_to`: the highest rate at which it was faster; None if it never was. `stops_at`: the next rate measured, where
    it was not; None if there is none. `estimate`: where the two curves cross between them, if they do.
    """

    pays_to: float | None
    stops_at: float | None
    estimate: float | None


def crossover(launches: Sequence[Record], hook: str, base: str) -> Crossover | None:
    """Of launches that differ in their rate alone. None if the two were not measured together."""
    both = [x["measured"] for x in launches if {hook, base} <= x["measured"]["variants"].keys()]
    both.sort(key=lambda measured: measured["link_rate"])
    points = [(x["link_rate"], x["variants"][hook], x["variants"][base]) for x in both]
    if not points:
        return None
    faster = [i for i, (_, x, y) in enumerate(points) if verdict(x["rounds_ms"], y["rounds_ms"]) == "faster"]
    if not faster:
        return Crossover(None, points[0][0], None)
    last = points[faster[-1]]
    if faster[-1] + 1 == len(points):
        return Crossover(last[0], None, None)
    following = points[faster[-1] + 1]
    return Crossover(last[0], following[0], _crossing(last, following))


def _crossing(before: tuple[float, Any, Any], after: tuple[float, Any, Any]) -> float | None:
    """Where the ratio of step times is 1: a straight line between two rates, all in logarithms."""
    low, high = (log(x["step_ms"] / y["step_ms"]) for _, x, y in (before, after))
    if high <= 0:
        return None
    share = low / (low - high)
    return exp(log(before[0]) + share * (log(after[0]) - log(before[0])))


def fastest(variants: dict[str, Any]) -> list[str]:
    """Names of the variants that are not slower than the one with the shortest step, which comes first."""
    racing = {name: found for name, found in variants.items() if name != NO_SYNC}
    order = sorted(racing, key=lambda name: racing[name]["step_ms"])
    best = racing[order[0]]["rounds_ms"]
    return [name for name in order if verdict(racing[name]["rounds_ms"], best) != "slower"]
