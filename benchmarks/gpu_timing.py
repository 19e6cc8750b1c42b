"""How long calls take on a GPU, one by one and in turn. Nothing here knows what is measured.

Before each call copies of a buffer larger than the L2 cache are queued, as many as it takes for the host to be ahead.
So what is measured is the GPU's time, as in a training step whose backward is queued already; and no input lies in the
cache. A copy leaves the cache half full of lines still to be written, as a stream of the measured operations would. A
call that waits for the GPU loses the lead: its time holds what the host then takes to launch the rest.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median, quantiles

import torch
from torch.profiler import ProfilerActivity, profile

WARM_UP = 5  # calls: compilation, tables, the allocator; torch's PowerSGD begins in its third
MOST_FLUSHES = 100
COPY_BYTES = 2**30  # many times any cache
LAUNCHES = 200  # for the interval between two; a stream holds 1024 before the host waits


@dataclass(frozen=True)
class Case:
    """A call to be measured, which may be repeated any number of times; and the bytes that it has to move."""

    operation: str
    implementation: str
    call: Callable[[], object]
    bytes_moved: float


@dataclass
class Measured:
    """Median times in microseconds: the GPU's, the distance between its quartiles, and the host's in the call."""

    us: float = 0.0
    spread_us: float = 0.0
    host_us: float = 0.0
    launches: int | None = None
    memory_operations: int | None = None  # memsets and copies that the driver does
    error: str | None = None


@dataclass
class _Samples:
    flushes: int = 1
    gpu: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class GpuTimer:
    """Times calls on one CUDA device, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._source = torch.ones(max(2**27, 2 * cache) // 4, device=device)
        self._target = torch.empty_like(self._source)
        self.flush(2)
        self.flush_seconds = 0.0
        self.flush_seconds = median(self.timed(lambda: self.flush(10), 1)[0] for _ in range(5)) / 10

    def flush(self, times: int) -> None:
        for _ in range(times):
            self._target.copy_(self._source)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], object], flushes: int) -> tuple[float, float]:
        """The GPU's seconds from the call's first operation to its last, and the host's seconds in the call."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush(flushes)
        start.record()
        before = time.perf_counter()
        call()
        host = time.perf_counter() - before
        stop.record()
        self.synchronize()
        return start.elapsed_time(stop) * 1e-3, host

    def warm_up(self, call: Callable[[], object]) -> int:
        """How many flushes put the host ahead of the GPU in this call."""
        for _ in range(WARM_UP):
            call()
        self.synchronize()
        host = median(self.timed(call, 1)[1] for _ in range(3))
        return min(MOST_FLUSHES, ceil(1.5 * host / self.flush_seconds) + 1)

    def median(self, call: Callable[[], object], repeats: int = 15) -> float:
        flushes = self.warm_up(call)
        return median(self.timed(call, flushes)[0] for _ in range(repeats))

    def count(self, call: Callable[[], object]) -> tuple[int, int] | None:
        """Kernels, and memsets and copies, that one call launches. None where the profiler does not work."""
        self.synchronize()
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                call()
                self.synchronize()
        except (AssertionError, RuntimeError):  # as it says that it finds no device to profile
            return None
        names = [
            event.name
            for event in profiler.events() or []
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        ]
        memory = sum(name.startswith(("Memset", "Memcpy")) for name in names)
        return (len(names) - memory, memory) if names else None


def copy_bandwidth(timer: GpuTimer, size: int = COPY_BYTES) -> float:
    """Bytes a second, read and written, of torch's copy of one large float32 tensor."""
    source = torch.randn(size // 4, device=timer.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.median(lambda: target.copy_(source))


def launch_interval(timer: GpuTimer) -> float:
    """Seconds between two kernels that do next to nothing, in a stream that the host has filled."""
    x = torch.zeros(1, device=timer.device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return timer.median(launches) / LAUNCHES


def measure(cases: Sequence[Case], timer: GpuTimer, repeats: int) -> list[Measured]:
    """All cases in turn, again and again: what disturbs the machine for a while disturbs all alike.

    A case that fails says so in its result; the others are measured.
    """
    results = [Measured() for _ in cases]
    samples = [_Samples() for _ in cases]
    for case, result, sample in zip(cases, results, samples, strict=True):
        try:
            sample.flushes = timer.warm_up(case.call)
            if counted := timer.count(case.call):
                result.launches, result.memory_operations = counted
        except Exception as error:  # noqa: BLE001 - whatever it is, the run on a borrowed GPU goes on
            result.error = f"{type(error).__name__}: {error}"
    for _ in range(repeats):
        for case, result, sample in zip(cases, results, samples, strict=True):
            if result.error is None:
                gpu, host = timer.timed(case.call, sample.flushes)
                sample.gpu.append(gpu * 1e6)
                sample.host.append(host * 1e6)
    for result, sample in zip(results, samples, strict=True):
        if result.error is None:
            low, result.us, high = quantiles(sample.gpu, n=4, method="inclusive")
            result.spread_us = high - low
            result.host_us = median(sample.host)
    return results
