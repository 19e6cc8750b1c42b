"""`commhooks.register`: as `ddp.register_comm_hook`, with the checks that DDP cannot make."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from commhooks.algorithms.powersgd import PowerSGDState
from commhooks.binding import bind
from commhooks.hooks import HOOKS, MADE_FOR_NONE
from commhooks.state import HookState


def register(ddp: DDP, hook: Callable[..., Any], state: HookState | None = None) -> HookState:
    """Register a hook of this package on `ddp`, after checking that it can work. All ranks of the model must call it.

    Args:
        ddp: the model.
        hook: `allreduce_hook`, `bf16_hook`, `fp16_hook` or `powersgd_hook`.
        state: the hook's state; None makes one with the default options, except for `powersgd_hook`.

    Returns:
        The state, for `state.metrics()`.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel model.
        ValueError: on every rank, if any rank has a wrong hook or state for it, a state already in use or with another
            process group than the model's, a model that has a hook, or options that differ from rank 0's.
            The message names the ranks and what is wrong there.
    """
    if not isinstance(ddp, DDP):
        raise TypeError(f"ddp is a {type(ddp).__name__}; it must be a DistributedDataParallel model")
    problem, config = None, {}
    try:
        state = _prepare(ddp, hook, state)
        config = {"hook": hook.__name__, "state": type(state).__name__} | state.config()
    except (TypeError, ValueError) as error:
        problem = str(error)
    _agree(ddp, problem, config)
    assert state is not None
    if isinstance(state, PowerSGDState) and not any(state.rank_of(tuple(p.shape)) for p in ddp.parameters()):
        warnings.warn(_nothing_compressed(state, ddp), stacklevel=2)
    ddp.register_comm_hook(state, hook)
    return state


def _prepare(ddp: DDP, hook: Callable[..., Any], state: HookState | None) -> HookState:
    if hook not in HOOKS:
        names = ", ".join(known.__name__ for known in HOOKS)
        raise TypeError(f"hook is {getattr(hook, '__name__', hook)!r}; it must be one of {names}")
    state_type = HOOKS[hook]
    if state is None and state_type in MADE_FOR_NONE:
        state = state_type()
    if not isinstance(state, state_type):
        raise TypeError(f"state is {state!r}; {hook.__name__} takes a {state_type.__name__}")
    if ddp._comm_hooks:
        raise ValueError(f"the model has a hook already: {ddp._comm_hooks[0][0].__name__}")
    bind(state, ddp)
    return state


def _agree(ddp: DDP, problem: str | None, config: dict[str, object]) -> None:
    """Raise on all ranks what is wrong on any."""
    group = ddp.process_group
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (problem, config), group=group)
    wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]
    if not wrong:
        first = everyone[0][1]
        wrong = [
            f"{name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}"
            for rank, (_, other) in enumerate(everyone)
            for name in sorted(first.keys() | other.keys())
            if first.get(name) != other.get(name)
        ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _nothing_compressed(state: PowerSGDState, ddp: DDP) -> str:
    largest = tuple(max(ddp.parameters(), key=lambda p: p.numel()).shape)
    return (
        f"PowerSGD at matrix_approximation_rank={state.matrix_approximation_rank} and "
        f"min_compression_rate={state.min_compression_rate} compresses no parameter of this model "
        f"(its largest has shape {largest}): all will be sent as they are"
    )
