"""The doors: what `ddp.register_comm_hook` takes. A GradBucket in, a Future of the mean gradient out.

    GradBucket -> Bucket -> algorithm (compress, collective, decompress) -> Future

DDP inspects the annotations of a hook, so they must be real objects: no `from __future__ import annotations` here.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed as dist
from torch.futures import Future

from commhooks.algorithms.allreduce import allreduce
from commhooks.algorithms.cast import CastState, bf16, fp16
from commhooks.algorithms.powersgd import PowerSGDState, powersgd
from commhooks.algorithms.randomk import RandomKState, randomk
from commhooks.algorithms.topk import TopKState, topk
from commhooks.binding import find_and_bind, implicit_state
from commhooks.replicas import check_replicas
from commhooks.state import HookState
from commhooks.tracking import Algorithm


def allreduce_hook(state: HookState | dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The exact mean, in the gradients' own dtype.

    Args:
        state: None (the model's group), a process group, or a `HookState`.
        bucket: from DDP.
    """
    return _run(allreduce, HookState, state, bucket)


def bf16_hook(state: CastState | dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of the gradients rounded to bfloat16: half the bytes of float32.

    Args:
        state: None (the model's group), a process group, or a `CastState` with options.
        bucket: from DDP.
    """
    return _run(bf16, CastState, state, bucket)


def fp16_hook(state: CastState | dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of the gradients rounded to float16: half the bytes of float32, finer than bfloat16, overflows at 65504.

    Args:
        state: None (the model's group), a process group, or a `CastState` with options.
        bucket: from DDP.
    """
    return _run(fp16, CastState, state, bucket)


def powersgd_hook(state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of the gradients, large matrices at low rank with error feedback (arXiv:1905.13727).

    Args:
        state: a `PowerSGDState`.
        bucket: from DDP.
    """
    return _run(powersgd, PowerSGDState, state, bucket)


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of every rank's entries of largest magnitude, with error feedback (arXiv:1704.05021).

    Args:
        state: a `TopKState`.
        bucket: from DDP.
    """
    return _run(topk, TopKState, state, bucket)


def randomk_hook(state: RandomKState, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of entries that all ranks draw alike, with error feedback or unbiased (arXiv:1809.07599).

    Args:
        state: a `RandomKState`.
        bucket: from DDP.
    """
    return _run(randomk, RandomKState, state, bucket)


# The state that each hook takes.
HOOKS: dict[Callable[..., Any], type[HookState]] = {
    allreduce_hook: HookState,
    bf16_hook: CastState,
    fp16_hook: CastState,
    powersgd_hook: PowerSGDState,
    topk_hook: TopKState,
    randomk_hook: RandomKState,
}
MADE_FOR_NONE = (HookState, CastState)  # states that are made where a hook is given None or a process group


def _run(
    algorithm: Algorithm, state_type: type[HookState], state: object, grad_bucket: dist.GradBucket
) -> Future[Tensor]:
    hook = f"{algorithm.__name__}_hook"
    if state_type in MADE_FOR_NONE and (state is None or isinstance(state, dist.ProcessGroup)):
        state = implicit_state(state_type, hook, state, grad_bucket)
    if not isinstance(state, state_type):
        raise TypeError(f"{hook} takes a {state_type.__name__}, not {state!r}")
    binding = state.binding
    if binding is None or not binding.is_alive():
        binding = find_and_bind(state, hook, grad_bucket.buffer().device)
    if grad_bucket.index() == 0 and state.wants_replicas_checked() and not binding.is_joining():
        check_replicas(binding.model())
    return binding.executor.run(algorithm, binding.bucket(grad_bucket))
