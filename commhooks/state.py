"""What every hook's state has: the process group, the exact warm-up, the step count and the byte counters."""

import logging
from typing import Any, Literal, get_args

import torch
from torch import distributed as dist

from commhooks.bucket import Bucket
from commhooks.comm import AllReduce, Collective

logger = logging.getLogger("commhooks")

ExecutorName = Literal["auto", "inline", "pipelined"]


class HookState:
    """The state of a communication hook. One state serves one DDP model.

    Args:
        process_group: the group to reduce over; None is the DDP model's own. Another one must have the same ranks.
        start_iter: number of first steps that reduce exactly, without compression.
        executor: how collectives overlap with backward. "inline" finishes a bucket inside its hook call: the host
            blocks on gloo, on a GPU a side stream waits. "pipelined" starts a bucket's first collective and goes
            on with it in the hook calls of later buckets. "auto" is "inline" on a GPU, "pipelined" elsewhere.
        stats_logging_frequency: every so many steps, log `metrics()` (logger "commhooks", level INFO); 0 is never.

    Raises:
        ValueError, TypeError: an option is out of its range; the message names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        start_iter: int = 0,
        executor: ExecutorName = "auto",
        stats_logging_frequency: int = 0,
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group is {process_group!r}; it must be a ProcessGroup or None")
        self.process_group = process_group
        self.start_iter = checked_int("start_iter", start_iter, least=0)
        self.executor = checked_choice("executor", executor, get_args(ExecutorName))
        self.stats_logging_frequency = checked_int("stats_logging_frequency", stats_logging_frequency, least=0)
        self.step = 0
        self.binding: Any = None  # commhooks.binding.Binding, from the first hook call or commhooks.register on
        self._bytes_sent = 0.0
        self._dense_bytes = 0.0

    def config(self) -> dict[str, object]:
        """The options that must be the same on every rank."""
        return {"start_iter": self.start_iter, "executor": self.executor}

    def reduces_exactly(self, bucket: Bucket) -> bool:
        """True in the warm-up, and for gradients that no compressor here takes: sparse and complex ones."""
        buffer = bucket.buffer
        return self.step < self.start_iter or buffer.layout != torch.strided or not buffer.is_floating_point()

    def begin_bucket(self, bucket: Bucket, world_size: int) -> None:
        """Count what an uncompressed all-reduce of the bucket would send. Called by whoever runs the algorithm."""
        self._dense_bytes += AllReduce(bucket.buffer).bytes_sent(world_size)

    def count(self, collective: Collective, world_size: int) -> None:
        """Count the bytes of a collective. Called by whoever performs it."""
        self._bytes_sent += collective.bytes_sent(world_size)

    def end_step(self) -> None:
        """All buckets of this backward are done. Called by whoever runs the algorithm."""
        self.step += 1
        if self.stats_logging_frequency and self.step % self.stats_logging_frequency == 0:
            logger.info("%s: %s", type(self).__name__, self.metrics())

    def metrics(self) -> dict[str, float]:
        """Plain numbers for a logger, all since the start and for this rank.

        `steps`; `dense_bytes` and `bytes_sent`: bytes that uncompressed all-reduces would have sent, and that were
        sent; `ratio`: their quotient (1 before the first byte).
        """
        return {
            "steps": self.step,
            "dense_bytes": self._dense_bytes,
            "bytes_sent": self._bytes_sent,
            "ratio": self._dense_bytes / self._bytes_sent if self._bytes_sent else 1.0,
        }


def checked_int(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return value


def checked_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value
