"""The cost model: what a collective takes on a link, what a hook sends, and how much of it a step waits for.

    seconds = alpha * rounds + max(beta * bytes, share * (bytes * 8 / rate - idle))

`rounds` and `bytes` follow from the collective and the number of ranks. alpha is the latency of a round, beta the time
that the processors take for a byte, `share` how often the link's time for the bytes is needed (1 is perfect use of it).
`idle` is the time that a rate-limited link lends after a pause: the bucket of the rig's token bucket.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from statistics import median

import numpy as np
import torch

from commhooks import CastState, HookState, PowerSGDState, RandomKState, TopKState
from commhooks.algorithms.powersgd import FULL_STEPS
from commhooks.algorithms.selection import BlockSelection
from commhooks.bucket import Layout
from commhooks.comm import AllGather, AllReduce, AllToAll, Broadcast, Collective

KINDS: dict[str, type[Collective]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "broadcast": Broadcast,
}
ON_THE_LINK = 1e-3  # seconds of wire time from which a sample says something about `share`
BACKWARD = 0.6  # of a step without communication; forward and optimizer have the rest


def nothing(nbytes: float) -> torch.Tensor:
    """A tensor of so many bytes, without them."""
    return torch.empty(round(nbytes), dtype=torch.uint8, device="meta")


def rounds(kind: str, world_size: int) -> int:
    """Messages one after the other: a ring's, or of a broadcast a binomial tree's."""
    if kind == "broadcast":
        return ceil(log2(world_size))
    return (2 if kind == "all_reduce" else 1) * (world_size - 1)


def bytes_on_link(kind: str, nbytes: float, world_size: int) -> float:
    """Bytes through the busiest link: what each rank sends, but of a broadcast the root's, which sends to log2 W."""
    if kind == "broadcast":
        return rounds(kind, world_size) * nbytes
    return KINDS[kind](nothing(nbytes)).bytes_sent(world_size)


@dataclass(frozen=True)
class Link:
    """`rate` in bit/s, None is unlimited; `idle` in seconds, see the module."""

    rate: float | None
    idle: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return 0.0 if self.rate is None else max(0.0, nbytes * 8 / self.rate - self.idle)


@dataclass(frozen=True)
class Cost:
    """Of one kind of collective."""

    alpha: float
    beta: float
    share: float = 1.0

    def seconds(self, kind: str, nbytes: float, world_size: int, link: Link) -> float:
        return self.alpha * rounds(kind, world_size) + self.transfer(kind, nbytes, world_size, link)

    def transfer(self, kind: str, nbytes: float, world_size: int, link: Link) -> float:
        """Without the latency."""
        on_link = bytes_on_link(kind, nbytes, world_size)
        return max(self.beta * on_link, self.share * link.seconds(on_link))


@dataclass(frozen=True)
class Sample:
    """One measured collective."""

    kind: str
    nbytes: int
    world_size: int
    link: Link
    seconds: float


def fit(samples: Iterable[Sample]) -> Cost:
    """Alpha and beta of unlimited links by least squares of relative errors; then the share, of limited ones.

    All samples are of one kind, and some of either sort.

    Raises:
        ValueError: one sort is missing.
    """
    samples = list(samples)
    free = [x for x in samples if x.link.rate is None]
    limited = [x for x in samples if x.link.seconds(bytes_on_link(x.kind, x.nbytes, x.world_size)) > ON_THE_LINK]
    if len(free) < 2 or not limited:
        raise ValueError(f"{len(free)} samples without a limit and {len(limited)} with one; needed are 2 and 1")
    rows = [
        (rounds(x.kind, x.world_size) / x.seconds, bytes_on_link(x.kind, x.nbytes, x.world_size) / x.seconds)
        for x in free
    ]
    (alpha, beta), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    alpha, beta = max(0.0, float(alpha)), max(0.0, float(beta))
    shares = [
        (x.seconds - alpha * rounds(x.kind, x.world_size))
        / x.link.seconds(bytes_on_link(x.kind, x.nbytes, x.world_size))
        for x in limited
    ]
    return Cost(alpha, beta, median(shares))


def hierarchical(costs: dict[str, Cost], nbytes: float, nodes: int, ranks_per_node: int, link: Link) -> float:
    """An all-reduce in each node, among nodes, and back: of a ring among all ranks only the part among nodes is slow.

    On the rig the ranks of a node talk over loopback, which is not free: there and back, like two broadcasts.
    """
    inside = costs["broadcast"].seconds("broadcast", nbytes, ranks_per_node, Link(None))
    return 2 * inside + costs["all_reduce"].seconds("all_reduce", nbytes, nodes, link)


@dataclass(frozen=True)
class Transfer:
    """A collective that a hook awaits: the bytes of this rank's tensor."""

    kind: str
    nbytes: float

    def bytes_sent(self, world_size: int) -> float:
        return KINDS[self.kind](nothing(self.nbytes)).bytes_sent(world_size)


def transfers(state: HookState | None, layout: Layout, gradient_bytes: int, world_size: int) -> list[Transfer]:
    """The collectives of one bucket in one step of a hook, from shapes alone. A state of None is plain DDP.

    Of alternating half steps, which differ a little, the mean. Selection is by blocks, gradients are not of float64.

    Raises:
        TypeError: a state of another hook.
    """
    numel = sum(x.numel for x in layout.slices)
    match state:
        case None:
            return [Transfer("all_reduce", numel * gradient_bytes)]
        case CastState():
            return [Transfer("all_reduce", numel * 2)]
        case PowerSGDState():
            return _powersgd(state, layout)
        case TopKState():
            return _topk(state, layout, world_size)
        case RandomKState():
            return _randomk(state, layout)
    raise TypeError(f"state is {state!r}; it must be a CastState, PowerSGDState, TopKState, RandomKState or None")


def _powersgd(state: PowerSGDState, layout: Layout) -> list[Transfer]:
    plan = state.plan(layout)
    itemsize = state.wire_dtype.itemsize if state.wire_dtype else 4
    vectors = sum(numel for _, numel in plan.vectors)
    if not plan.matrices:
        return [Transfer("all_reduce", vectors * itemsize)]
    if state.alternating:
        return [Transfer("all_reduce", ((plan.p.numel + plan.q.numel) / 2 + vectors) * itemsize)]
    return [
        Transfer("all_reduce", (plan.p.numel + vectors) * itemsize),
        Transfer("all_reduce", plan.q.numel * itemsize),
    ]


def _topk(state: TopKState, layout: Layout, world_size: int) -> list[Transfer]:
    packing = state.packings[layout]
    if not packing.packed:
        return [Transfer("all_reduce", sum(x.numel for x in layout.slices) * 4)]
    selection, aggregation = state.select_from(packing.numel), state.aggregation_among(world_size)
    riding = sum(x.numel for x in packing.riders)
    if aggregation == "balanced" and isinstance(selection, BlockSelection):
        part = selection.part(world_size).nbytes + 4 * ceil(riding / world_size)
        return [Transfer("all_to_all", world_size * part), Transfer("all_gather", part)]
    if aggregation == "leader" and isinstance(selection, BlockSelection):
        values = (selection.slots + riding + 1) * selection.wire_dtype.itemsize
        return [Transfer("broadcast", selection.index_nbytes), Transfer("all_reduce", values)]
    return [Transfer("all_gather", selection.nbytes + 4 * riding)]


def _randomk(state: RandomKState, layout: Layout) -> list[Transfer]:
    packing = state.packings[layout]
    if not packing.packed:
        return [Transfer("all_reduce", sum(x.numel for x in layout.slices) * 4)]
    entries = sum(max(1, round(state.density * x.numel)) for x, _ in packing.packed)
    riding = sum(x.numel for x in packing.riders)
    return [Transfer("all_reduce", (entries + riding + 1) * state.wire_dtype.itemsize)]


def settle(state: HookState) -> HookState:
    """The state as after its warm-up, when steps are alike."""
    state.step = state.start_iter + max(FULL_STEPS, getattr(state, "warmup_steps", 0))
    return state


def exposed(buckets: Sequence[Sequence[float]], ready: Sequence[float]) -> float:
    """Seconds that a step waits for communication: the pipelined executor's order, played through.

    Args:
        buckets: for each bucket, in DDP's order, the seconds on the link of its collectives, one after the other.
        ready: the seconds of backward after the bucket before it until a bucket's gradients are there.
    """
    clock = link = 0.0
    flying: list[list[float]] = []  # the newest first: when the pending collective arrives, then those still to come

    def launch(rest: Sequence[float]) -> list[float]:
        nonlocal link
        link = max(link, clock) + rest[0]
        return [link, *rest[1:]]

    def advance() -> None:
        nonlocal clock, flying
        still = []
        for arrival, *rest in flying:
            if rest:
                clock = max(clock, arrival)
            still.append(launch(rest) if rest else [arrival])
        flying = still

    for bucket, seconds in zip(buckets, ready, strict=True):
        clock += seconds
        newest = launch(bucket)
        advance()
        flying = [newest, *flying]
    while any(rest for _, *rest in flying):
        advance()
    clock = max([clock, *(arrival for (arrival,) in flying)])
    return clock - sum(ready)
