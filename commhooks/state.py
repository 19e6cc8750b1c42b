"""What every hook's state has: the process group, the exact warm-up, the counters, and steps that count or do not."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed as dist
from typing_extensions import TypedDict

from commhooks import checkpoint, ops
from commhooks.bucket import Bucket
from commhooks.comm import AllReduce, Collective
from commhooks.feedback import ErrorFeedback
from commhooks.memory import ParameterMemory
from commhooks.tracking import CompressionErrors
from commhooks.verdict import Verdict

logger = logging.getLogger("commhooks")

ExecutorName = Literal["auto", "inline", "pipelined"]
LossScale = torch.amp.GradScaler | Callable[[], float]


class CommonOptions(TypedDict, total=False):
    """The keywords of `HookState` that every state takes."""

    executor: ExecutorName
    check_replicas_every: int
    track_error: bool
    grad_scaler: LossScale | None


class HookOptions(CommonOptions, total=False):
    """And those for which `PowerSGDState` has torch's names."""

    start_iter: int
    stats_logging_frequency: int


class HookState:
    """The state of a communication hook. One state serves one DDP model.

    A step in which a rank had a number that is not finite leaves it as it was before, on every rank.

    Args:
        process_group: the group to reduce over; None is the DDP model's own. Another one must have the same ranks.
        start_iter: number of first steps that reduce exactly, without compression.
        executor: how collectives overlap with backward. "inline" finishes a bucket inside its hook call: the host
            blocks on gloo, on a GPU a side stream waits. "pipelined" starts a bucket's first collective and goes
            on with it in the hook calls of later buckets; what all buckets send may be in memory at once. "auto" is
            "inline" on a GPU, "pipelined" elsewhere.
        stats_logging_frequency: every so many steps, log `metrics()` (logger "commhooks", level INFO); 0 is never.
        check_replicas_every: every so many steps, before anything is sent, `commhooks.check_replicas`; 0 is never.
            Not under `Join`, where a rank without inputs rightly lags behind.
        track_error: measure what compression leaves out of each parameter: one bucket a step, in turn. It is in
            `compression_error()` and `metrics()`. Needs error feedback.
        grad_scaler: a `torch.amp.GradScaler`, or a function that returns the loss scale: residuals are kept as if the
            loss had not been scaled. Without it a new scale meets residuals of the old one.

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
        check_replicas_every: int = 0,
        track_error: bool = False,
        grad_scaler: LossScale | None = None,
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group is {process_group!r}; it must be a ProcessGroup or None")
        if not (grad_scaler is None or isinstance(grad_scaler, torch.amp.GradScaler) or callable(grad_scaler)):
            raise TypeError(f"grad_scaler is {grad_scaler!r}; it must be a GradScaler, a function or None")
        self.process_group = process_group
        self.start_iter = checked_int("start_iter", start_iter, least=0)
        self.executor = checked_choice("executor", executor, get_args(ExecutorName))
        self.stats_logging_frequency = checked_int("stats_logging_frequency", stats_logging_frequency, least=0)
        self.check_replicas_every = checked_int("check_replicas_every", check_replicas_every, least=0)
        self.track_error = track_error
        self.grad_scaler = grad_scaler
        self.binding: Any = None  # commhooks.binding.Binding, from the first hook call or commhooks.register on
        self.spares_unused = False  # for a model with find_unused_parameters: see commhooks.unused
        # What is kept from step to step: each rank's own, in units of the gradient; and what all ranks have alike.
        self.own: dict[str, ParameterMemory] = {}
        self.common: dict[str, ParameterMemory] = {}
        self.feedback: ErrorFeedback | None = None
        self.errors = CompressionErrors()
        self._step = 0
        self._worst: list[Tensor] = []
        self._verdict: Verdict | None = None  # on the last step
        self._scale: float | Tensor = 1.0  # of the loss, that `own` has now
        self._model: checkpoint.Model | None = None
        self._loaded: checkpoint.StateDict | None = None  # until the model is known
        self._bytes_sent = 0.0
        self._dense_bytes = 0.0
        if track_error and type(self) is HookState:
            raise ValueError("track_error is True; for a HookState, which compresses nothing, it must be False")

    def feed_back(self, use_error_feedback: bool) -> None:
        """Keep residuals, or do not."""
        self.use_error_feedback = use_error_feedback
        if use_error_feedback:
            self.feedback = self.own["residual"] = ErrorFeedback()
        elif self.track_error:
            raise ValueError("track_error is True; with use_error_feedback=False it must be False")

    def config(self) -> dict[str, object]:
        """The options that results depend on: the same on every rank, and after a resume."""
        return {"start_iter": self.start_iter}

    @property
    def step(self) -> int:
        """How many steps have counted."""
        self._settle()
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._verdict = None
        self._step = step

    def reduces_exactly(self, bucket: Bucket) -> bool:
        """True in the warm-up, and for gradients that no compressor here takes: sparse and complex ones."""
        buffer = bucket.buffer
        return self.step < self.start_iter or buffer.layout != torch.strided or not buffer.is_floating_point()

    def residual(self, bucket: Bucket) -> Tensor | None:
        """The bucket's residual, to be added to its gradient. None without error feedback."""
        return None if self.feedback is None else self.feedback.flat(bucket)

    def next_residual(self, bucket: Bucket) -> Tensor | None:
        """Where what is not sent of the sum is to be written."""
        return None if self.feedback is None else self.feedback.next(bucket)

    @property
    def has_something_to_lose(self) -> bool:
        """Does it matter whether this step counts?"""
        return bool(self.own or self.common or self.step < self.start_iter)

    def received(self, worst: Tensor) -> None:
        """An algorithm tells the largest magnitude that it received for a bucket; if not finite, the step is void."""
        self._worst.append(worst)

    def received_result(self, result: Tensor) -> None:
        """Likewise a half-precision result, which may overflow where what it was rounded from did not."""
        if result.dtype in (torch.float16, torch.bfloat16):
            self.received(ops.largest(result))

    def metrics(self) -> dict[str, float]:
        """Plain numbers for a logger, all since the start and for this rank.

        `steps` that have counted; `dense_bytes` and `bytes_sent`: bytes that uncompressed all-reduces would have sent,
        and that were sent; `ratio`: their quotient (1 before the first byte); with `track_error` also
        `compression_error`: the norm of what was not sent over the norm of what there was to send.
        """
        numbers = {
            "steps": self.step,
            "dense_bytes": self._dense_bytes,
            "bytes_sent": self._bytes_sent,
            "ratio": self._dense_bytes / self._bytes_sent if self._bytes_sent else 1.0,
        }
        return numbers | ({"compression_error": self.errors.overall()} if self.track_error else {})

    def compression_error(self) -> dict[str, float]:
        """With `track_error`, by parameter: ||what was not sent|| / ||gradient + residual|| when last looked at."""
        return self.errors.by_parameter()

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, and what else has the gradient's unit, by `factor`.

        A residual becomes an update with the learning rate of the step that sends it. When that changes from a to b,
        `rescale(a / b)` keeps the update that was owed.
        """
        if not 0 <= factor < float("inf"):
            raise ValueError(f"factor is {factor}; it must be at least 0 and finite")
        self._settle()
        for memory in self.own.values():
            memory.mul_(factor)

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's part of what a resume needs: residuals, factors, step and configuration, by parameter name.

        Every rank saves its own. `torch.load` reads it with its defaults; `torch.distributed.checkpoint` takes the
        state itself. Residuals are in units of the unscaled loss.

        Raises:
            RuntimeError: the model is not known yet, so neither are its parameters' names.
        """
        if self._model is None:
            raise RuntimeError(
                f"this {type(self).__name__} does not know its model: register the hook with commhooks.register"
            )
        self._settle()
        return checkpoint.save(self, self._model)

    def load_state_dict(self, state_dict: checkpoint.StateDict) -> None:
        """Go on where `state_dict` was saved. Before the first step, or instead of what was. All ranks must call it.

        Raises:
            ValueError: on every rank, if on any it is another hook's, another model's, another number of ranks' or
                another step's than the others', or has other options. The message lists the differences. Without a
                known model they are found when it is registered, or at the first hook call.
        """
        problem = None
        try:
            checkpoint.check(self, state_dict)
            self._loaded = state_dict
            if self._model is not None:
                self.attach(self._model)
        except ValueError as error:
            problem = str(error)
        if self.binding is not None and self.binding.is_alive():
            self.binding.agree(problem)
        elif problem:
            raise ValueError(problem)

    def attach(self, model: checkpoint.Model) -> None:
        """From now on the state serves this model."""
        if self._model is not None and self._model is not model:
            for memory in (self.own | self.common).values():
                memory.hand_over(self._model.parameters)
        self._model = model
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            checkpoint.load(self, model, loaded)

    @property
    def is_loading(self) -> bool:
        """Is a state dict still waiting for the model?"""
        return self._loaded is not None

    # For checkpoint.

    @property
    def loss_scale(self) -> float | Tensor:
        """Of which `own` has the units."""
        return self._scale

    def counters(self) -> dict[str, float]:
        return {"bytes_sent": self._bytes_sent, "dense_bytes": self._dense_bytes}

    def resume_at(self, step: int, counters: Mapping[str, float]) -> None:
        """The memories are those after `step` steps, of an unscaled loss."""
        self.step, self._scale = step, 1.0
        self._bytes_sent, self._dense_bytes = counters["bytes_sent"], counters["dense_bytes"]

    # For whoever runs the algorithm.

    def wants_replicas_checked(self) -> bool:
        """Is it time to, before this step?"""
        return bool(self.check_replicas_every and self.step and self.step % self.check_replicas_every == 0)

    def begin_step(self, device: torch.device) -> None:
        """Before the first bucket. What a backward that died half-way has written does not count."""
        self._settle()
        self._worst.clear()
        self.errors.discard()
        for memory in (self.own | self.common).values():
            memory.discard()
        if self.grad_scaler is not None:
            self._follow(self.grad_scaler, device)

    def begin_bucket(self, bucket: Bucket, world_size: int) -> None:
        """Count what an uncompressed all-reduce of the bucket would send."""
        self._dense_bytes += AllReduce(bucket.buffer).bytes_sent(world_size)

    def count(self, collective: Collective, world_size: int) -> None:
        """Count the bytes of a collective."""
        self._bytes_sent += collective.bytes_sent(world_size)

    def end_step(self) -> None:
        """All buckets of this backward are done. On the stream that they were computed on."""
        if not self._worst:
            self._commit()
            return
        self._verdict = Verdict(self._worst)
        self._worst.clear()
        if self._verdict.is_in:
            self._settle()

    def _settle(self) -> None:
        """The last step counts, or has not been."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None and verdict.is_finite():
            self._commit()

    def _commit(self) -> None:
        for memory in (self.own | self.common).values():
            memory.commit()
        self.errors.commit()
        self._step += 1
        if self.stats_logging_frequency and self._step % self.stats_logging_frequency == 0:
            logger.info("%s: %s", type(self).__name__, self.metrics())

    def _follow(self, grad_scaler: LossScale, device: torch.device) -> None:
        """Bring what has the gradient's unit to the loss scale of this backward."""
        scale: float | Tensor
        if isinstance(grad_scaler, torch.amp.GradScaler):
            one = grad_scaler.scale(torch.ones((), device=device))
            scale = one if one.is_cuda else float(one)  # the host does not wait for a GPU's
        else:
            scale = float(grad_scaler())
            if not 0 < scale < float("inf"):
                raise ValueError(f"grad_scaler returned {scale}; a loss scale must be positive and finite")
        ratio = scale / self._scale
        if isinstance(ratio, Tensor) or ratio != 1:
            for memory in self.own.values():
                memory.mul_(ratio)
        self._scale = scale


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
