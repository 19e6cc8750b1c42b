"""The cost model against measurements that it was not fitted on: collectives, and whole training steps.

A step is predicted as: the same step without communication, what the hook adds to it on an unlimited link, and what of
the link's time does not overlap with backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.architectures import ddp_buckets
from benchmarks.bandwidth_rank import NO_SYNC, RANK
from benchmarks.collectives import HIERARCHICAL
from benchmarks.model_costs import (
    BACKWARD,
    Cost,
    Link,
    Sample,
    bytes_on_link,
    exposed,
    fit,
    hierarchical,
    settle,
    transfers,
)
from benchmarks.records import Record
from benchmarks.variants import VARIANTS
from commhooks import CastState, HookState, PowerSGDState, RandomKState, TopKState
from examples.train_ddp import GPT

RIG_IDLE = 1e-3  # seconds that the rig's token bucket holds
FITTED_RATES = ("100mbit", "none")
FITTED_SHAPES = ((2, 1), (4, 1))
GOAL = 0.15


@dataclass(frozen=True)
class Check:
    """A prediction and what was measured, both in seconds."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def link_of(record: Record) -> Link:
    """A launch's link, at its measured rate."""
    limited = record["case"]["rate"] != "none"
    return Link(record["measured"]["link_rate"], RIG_IDLE) if limited else Link(None)


def samples_of(record: Record) -> list[Sample]:
    """What one launch measured of gloo's own collectives: medians."""
    case = record["case"]
    return [
        Sample(
            x["collective"],
            x["nbytes"],
            case["nodes"] * case["ranks_per_node"],
            link_of(record),
            median(x["seconds"]),
        )
        for x in record["measured"]["samples"]
        if x["collective"] != HIERARCHICAL
    ]


def is_fitted(record: Record) -> bool:
    """Whether the model is fitted on this launch: two of the three rates, one rank a node."""
    case = record["case"]
    return case["rate"] in FITTED_RATES and (case["nodes"], case["ranks_per_node"]) in FITTED_SHAPES


def fit_all(records: Iterable[Record]) -> dict[str, Cost]:
    """The cost of each kind of collective."""
    samples = [x for record in records if is_fitted(record) for x in samples_of(record)]
    return {kind: fit(x for x in samples if x.kind == kind) for kind in dict.fromkeys(x.kind for x in samples)}


def check_collectives(record: Record, costs: dict[str, Cost]) -> list[Check]:
    """Every collective of a launch: what the model says of it."""
    link = link_of(record)
    checks = [
        Check(x.kind, costs[x.kind].seconds(x.kind, x.nbytes, x.world_size, link), x.seconds)
        for x in samples_of(record)
        if x.kind in costs
    ]
    shape = record["case"]["nodes"], record["case"]["ranks_per_node"]
    for x in record["measured"]["samples"]:
        if x["collective"] == HIERARCHICAL:
            predicted = hierarchical(costs, x["nbytes"], *shape, link)
            checks.append(Check(HIERARCHICAL, predicted, median(x["seconds"])))
    return checks


def state_of(variant: str) -> HookState | None:
    """The options that benchmarks.variants gives a hook, as a state that is never registered.

    Raises:
        KeyError: the model knows no such variant.
    """
    bf16: dict[str, Any] = {"start_powerSGD_iter": 0, "wire_dtype": torch.bfloat16}
    states: dict[str, HookState | None] = {
        "plain": None,
        "bf16": CastState(),
        "powersgd": PowerSGDState(matrix_approximation_rank=RANK, **bf16),
        "powersgd-alternating": PowerSGDState(matrix_approximation_rank=RANK, alternating=True, **bf16),
        "powersgd-8": PowerSGDState(matrix_approximation_rank=8, **bf16),
        "powersgd-8-alternating": PowerSGDState(matrix_approximation_rank=8, alternating=True, **bf16),
        "topk": TopKState(),
        "topk-leader": TopKState(aggregation="leader"),
        "topk-balanced": TopKState(aggregation="balanced"),
        "randomk": RandomKState(),
    }
    state = states[variant]
    return settle(state) if state else None


def predict_step(
    variant: str, world_size: int, link: Link, costs: dict[str, Cost], *, alone: float, unlimited: float
) -> float:
    """Seconds of a step of the example's GPT on a link.

    Args:
        alone: seconds of a step without communication, on that link.
        unlimited: seconds that the hook adds to it where the link has no limit: its arithmetic, and the processors'
            part of its collectives.
    """
    shapes = [tuple(x.shape) for x in GPT().parameters()]
    layouts = ddp_buckets(shapes, 4, VARIANTS[variant].bucket_cap_mb)
    state = state_of(variant)
    waits = []
    for layout in layouts:
        found = transfers(state, layout, 4, world_size)
        waits.append([_beyond(costs[x.kind], x.kind, x.nbytes, world_size, link) for x in found])
    numels = [sum(x.numel for x in layout.slices) for layout in layouts]
    ready = [BACKWARD * alone * numel / sum(numels) for numel in numels]
    return alone + unlimited + exposed(waits, ready)


def _beyond(cost: Cost, kind: str, nbytes: float, world_size: int, link: Link) -> float:
    """Of a collective, what the link takes longer than the processors."""
    on_link = bytes_on_link(kind, nbytes, world_size)
    return max(0.0, cost.share * link.seconds(on_link) - cost.beta * on_link)


def check_steps(bandwidth: Sequence[Record], costs: dict[str, Cost]) -> list[tuple[Record, Check]]:
    """Every step time that benchmarks.bandwidth measured on a limited link, beside an unlimited one of the same shape.

    Returns:
        (its case, the check) for each variant that the model knows.
    """
    launches = [x for x in bandwidth if "rate" in x["case"]]
    found = []
    for record in launches:
        shape = record["case"]["nodes"], record["case"]["ranks_per_node"]
        same = [x for x in launches if (x["case"]["nodes"], x["case"]["ranks_per_node"]) == shape]
        free = next((x for x in same if x["case"]["rate"] == "none"), None)
        if record["case"]["rate"] == "none" or free is None:
            continue
        ours, theirs = record["measured"]["variants"], free["measured"]["variants"]
        for variant in ours:
            try:
                state_of(variant)
            except KeyError:
                continue
            if variant in theirs:
                predicted = predict_step(
                    variant,
                    shape[0] * shape[1],
                    link_of(record),
                    costs,
                    alone=ours[NO_SYNC]["step_ms"] / 1e3,
                    unlimited=max(0.0, theirs[variant]["step_ms"] - theirs[NO_SYNC]["step_ms"]) / 1e3,
                )
                found.append((record["case"], Check(variant, predicted, ours[variant]["step_ms"] / 1e3)))
    return found
