"""N ranks in lockstep in one process: algorithms without processes, sockets or DDP.

    ranks = Simulation(powersgd, lambda: PowerSGDState(start_powerSGD_iter=0), world_size=4)
    means = ranks.step(gradients)     # one {name: gradient} dict a rank in, one a rank out

The coroutines are the ones that training runs; only the collectives are performed here, on all ranks' tensors at once.
A sum is taken in rank order, in the tensor's dtype.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from commhooks.bucket import Bucket, Layout, lay_out
from commhooks.checkpoint import Model
from commhooks.comm import AllGather, AllReduce, AllToAll, Broadcast, Collective, Comm
from commhooks.state import HookState
from commhooks.tracking import start

S = TypeVar("S", bound=HookState)


class Simulation(Generic[S]):
    """An algorithm on `world_size` ranks.

    Args:
        algorithm: a coroutine function of commhooks.algorithms.
        make_state: makes one rank's state.
        world_size: number of ranks.
    """

    def __init__(
        self,
        algorithm: Callable[[S, Bucket, Comm], Coroutine[Collective, Tensor, Tensor]],
        make_state: Callable[[], S],
        world_size: int,
    ) -> None:
        self.algorithm = algorithm
        self.states = [make_state() for _ in range(world_size)]
        self.comms = [Comm(rank, world_size) for rank in range(world_size)]
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._attached = False

    def step(
        self, gradients: Sequence[Mapping[str, Tensor]], buckets: Sequence[Sequence[str]] | None = None
    ) -> list[dict[str, Tensor]]:
        """One backward.

        Args:
            gradients: for each rank, every parameter's gradient by name. They are not changed.
            buckets: which parameters lie in which bucket; all in one by default.

        Returns:
            For each rank, every parameter's mean gradient by name.

        Raises:
            RuntimeError: the ranks awaited different collectives: in training they would hang.
        """
        buckets = buckets or [list(gradients[0])]
        self._attach(gradients[0])
        for state in self.states:
            state.begin_step(torch.device("cpu"))
        results: list[dict[str, Tensor]] = [{} for _ in self.states]
        for index, names in enumerate(buckets):
            layout = self._layout(index, names, gradients[0])
            shards = [
                Bucket(layout, torch.cat([rank[name].flatten() for name in names]), is_last=index == len(buckets) - 1)
                for rank in gradients
            ]
            for result, mean in zip(results, self._run(shards), strict=True):
                result |= {x.name: x.of(mean).view(x.shape) for x in layout.slices}
        for state in self.states:
            state.end_step()
        return results

    def _attach(self, gradients: Mapping[str, Tensor]) -> None:
        """What a binding does for a model: the states know its parameters."""
        if self._attached:
            return
        self._attached = True
        slices = lay_out(0, [(name, name, tuple(x.shape)) for name, x in gradients.items()]).slices
        dtypes = {name: x.dtype for name, x in gradients.items()}
        strides = {name: x.stride() for name, x in gradients.items()}
        for state, comm in zip(self.states, self.comms, strict=True):
            state.attach(Model(slices, dtypes, strides, torch.device("cpu"), comm.rank, comm.world_size))

    def _layout(self, index: int, names: Sequence[str], gradients: Mapping[str, Tensor]) -> Layout:
        parameters = [(name, name, tuple(gradients[name].shape)) for name in names]
        return self._layouts.setdefault((index, *parameters), lay_out(index, parameters))

    def _run(self, buckets: list[Bucket]) -> list[Tensor]:
        """One bucket of every rank, to the end."""
        world_size = len(buckets)
        for state, bucket in zip(self.states, buckets, strict=True):
            state.begin_bucket(bucket, world_size)
        coroutines = [
            start(self.algorithm, state, bucket, comm)
            for state, bucket, comm in zip(self.states, buckets, self.comms, strict=True)
        ]
        answers: list[Tensor | None] = [None] * world_size
        while True:
            awaited: list[Collective] = []
            ended: list[Tensor] = []
            for coroutine, answer in zip(coroutines, answers, strict=True):
                try:
                    with torch.no_grad():
                        awaited.append(coroutine.send(answer))  # type: ignore[arg-type]  # the first is None
                except StopIteration as stop:
                    ended.append(stop.value)
            if len(ended) == world_size:
                return ended
            _check_same(awaited, world_size)
            for state, collective in zip(self.states, awaited, strict=True):
                state.count(collective, world_size)
            answers = list(perform(awaited))


def bytes_sent(
    algorithm: Callable[[S, Bucket, Comm], Coroutine[Collective, Tensor, Tensor]],
    state: S,
    layout: Layout,
    dtype: torch.dtype,
    world_size: int,
) -> float:
    """Bytes that each of `world_size` ranks would send for a bucket in the state's next step: one rank's work, not W.

    No other rank is there: each collective gives back this rank's tensor, or copies of it.
    """
    bucket = Bucket(layout, torch.zeros(sum(x.numel for x in layout.slices), dtype=dtype), is_last=True)
    state.begin_step(bucket.buffer.device)
    state.begin_bucket(bucket, world_size)
    before = state.metrics()["bytes_sent"]
    coroutine = algorithm(state, bucket, Comm(0, world_size))
    answer: Tensor | None = None
    with torch.no_grad():
        while True:
            try:
                collective = coroutine.send(answer)  # type: ignore[arg-type]  # the first is None
            except StopIteration:
                break
            state.count(collective, world_size)
            x = collective.tensor
            answer = x.expand(world_size, *x.shape) if isinstance(collective, AllGather) else x
    state.end_step()
    return state.metrics()["bytes_sent"] - before


def perform(collectives: Sequence[Collective]) -> list[Tensor]:
    """The same collective of every rank, in rank order: what each rank gets."""
    tensors = [collective.tensor for collective in collectives]
    match collectives[0]:
        case AllReduce():
            total = tensors[0].clone()
            for x in tensors[1:]:
                total += x
            return [x.copy_(total) for x in tensors]
        case AllGather():
            return [torch.stack(tensors) for _ in tensors]
        case AllToAll():
            return [torch.stack([x[rank] for x in tensors]) for rank in range(len(tensors))]
        case Broadcast(root=root):
            return [x.copy_(tensors[root]) for x in tensors]
    raise TypeError(f"{collectives[0]!r} is not a collective")


def _check_same(awaited: list[Collective], world_size: int) -> None:
    kinds = {(type(x).__name__, tuple(x.tensor.shape), x.tensor.dtype) for x in awaited}
    if len(awaited) != world_size or len(kinds) != 1:
        raise RuntimeError(f"{len(awaited)} of {world_size} ranks await a collective, of these kinds: {kinds}")
