"""Runs algorithms' coroutines to Futures, performing the collectives that they await.

Ranks must issue collectives in the same order. So they are issued only from inside hook calls, which DDP makes in the
same order on every rank; never from a Future's callback, never from a thread.
"""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, distributed as dist
from torch.futures import Future
from torch.profiler import record_function

from commhooks.bucket import Bucket
from commhooks.comm import AllGather, AllReduce, AllToAll, Broadcast, Collective, Comm
from commhooks.state import HookState
from commhooks.tracking import Algorithm, start

# torch 2.13 warns of the older name.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Inline:
    """Runs a bucket's coroutine to its end inside the hook call.

    On a GPU every wait is a wait of a side stream: the host goes on, and backward with it.
    """

    def __init__(self, state: HookState, group: dist.ProcessGroup, device: torch.device) -> None:
        self.state = state
        self._group = group
        self._comm = Comm(dist.get_rank(group), dist.get_world_size(group))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: list[_Task] = []  # in flight, the newest first: it has the most collectives still to launch

    def run(self, algorithm: Algorithm, bucket: Bucket) -> Future[Tensor]:
        """Start the bucket's coroutine and take all coroutines as far as this executor does in one hook call.

        Raises:
            Whatever an algorithm or a collective raises, with a note that names the bucket it happened in.
        """
        device = bucket.buffer.device
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
            for x in _strided_parts(bucket.buffer):
                x.record_stream(self._stream)
        if bucket.index == 0:
            self._abandon()  # of a backward that died half-way
            with torch.no_grad(), _on(self._stream):
                self.state.begin_step(device)
        self.state.begin_bucket(bucket, self._comm.world_size)
        task = _Task(algorithm, bucket, self.state, self._comm, self._group, self._stream)
        self._schedule(task)
        if bucket.is_last:
            self._drain()
            with torch.no_grad(), _on(self._stream):
                self.state.end_step()
        return task.future

    def _schedule(self, task: "_Task") -> None:
        self._tasks = [task]
        self._drain()

    def _drain(self) -> None:
        while not all(task.awaits_its_last for task in self._tasks):
            self._advance()
        for task in reversed(self._tasks):  # the oldest first: so they arrive
            task.advance()
        self._tasks = []

    def _advance(self) -> None:
        """Take every task one collective further, but for those that launch no other one."""
        for task in self._tasks:
            if not task.awaits_its_last:
                task.advance()
        self._tasks = [task for task in self._tasks if not task.done]

    def _abandon(self) -> None:
        for task in self._tasks:
            task.close()
        self._tasks = []


class Pipelined(Inline):
    """Each hook call starts its bucket's first collective and takes the older buckets one collective further.

    The last bucket's call finishes all. So a bucket's collectives have the time of backward to arrive in, also where
    waiting blocks the host, as on gloo. A bucket's last collective is not waited for before: what follows it is done in
    the first hook call that finds it there. That may be another one on each rank, for it launches nothing.
    """

    def _schedule(self, task: "_Task") -> None:
        self._tasks = [task, *self._tasks]
        self._advance()
        for arrived in [x for x in reversed(self._tasks) if x.awaits_its_last and x.has_arrived()]:
            arrived.advance()
            self._tasks.remove(arrived)


class _Task:
    """One bucket's coroutine, between two of its collectives."""

    def __init__(
        self,
        algorithm: Algorithm,
        bucket: Bucket,
        state: HookState,
        comm: Comm,
        group: dist.ProcessGroup,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.future: Future[Tensor] = Future(devices=[bucket.buffer.device] if stream else None)
        self.done = False
        self._coroutine = start(algorithm, state, bucket, comm)
        self._group, self._stream = group, stream
        self._state, self._world_size = state, comm.world_size
        self.awaits_its_last = False  # the pending collective is the last one
        self._work: dist.Work | None = None
        self._arriving: Tensor | None = None  # what the pending collective will have filled
        self._phase = "compress"
        self._algorithm, self._bucket, self._step = algorithm, bucket, state.step

    def advance(self) -> None:
        """Wait for the pending collective, resume the coroutine, and launch the collective it awaits next."""
        try:
            with torch.no_grad(), _on(self._stream):
                self._resume()
        except BaseException as error:
            self.close()
            _annotate(error, self._describe())
            raise

    def has_arrived(self) -> bool:
        return self._work is not None and self._work.is_completed()

    def _resume(self) -> None:
        if self._work is not None:
            with self._range("wait"):
                self._work.wait()
            self._phase = "decompress"
        try:
            with self._range(self._phase):
                collective = self._coroutine.send(self._arriving)  # type: ignore[arg-type]  # the first is None
        except StopIteration as stop:
            self.done = True
            self.future.set_result(stop.value)
        else:
            if self.awaits_its_last:
                raise RuntimeError(f"{self._algorithm.__name__} awaited {collective!r} after its last collective")
            self.awaits_its_last = collective.last
            self._state.count(collective, self._world_size)
            with self._range("launch"):
                self._work, self._arriving = _launch(collective, self._group)

    def _range(self, phase: str) -> record_function:
        """For a profiler's trace. What follows the first collective is "decompress", a second compression too."""
        return record_function(f"commhooks.{self._algorithm.__name__}.{phase} bucket {self._bucket.index}")

    def close(self) -> None:
        self.done = True
        self._coroutine.close()

    def _describe(self) -> str:
        names = ", ".join(x.name for x in self._bucket.layout.slices)
        where = f"step {self._step}, bucket {self._bucket.index} (parameters: {names})"
        return f"in commhooks {self._algorithm.__name__}, {where}"


def _strided_parts(x: Tensor) -> list[Tensor]:
    return [x] if x.layout == torch.strided else [x._indices(), x._values()]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _launch(collective: Collective, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
    x = collective.tensor
    match collective:
        case AllReduce():
            return dist.all_reduce(x, group=group, async_op=True), x
        case AllGather():
            gathered = x.new_empty(dist.get_world_size(group) * x.numel())
            work = all_gather_single(gathered, x.flatten(), group=group, async_op=True)
            return work, gathered.view(-1, *x.shape)
        case AllToAll():
            received = torch.empty_like(x)
            return dist.all_to_all_single(received, x, group=group, async_op=True), received
        case Broadcast():
            return dist.broadcast(x, group=group, group_src=collective.root, async_op=True), x
    raise TypeError(f"an algorithm awaited {collective!r}, which is not a collective")


def _annotate(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)
