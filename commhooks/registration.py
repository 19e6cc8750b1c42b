"""`commhooks.register`: as `ddp.register_comm_hook`, with the checks that DDP cannot make."""

import warnings
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel as DDP

from commhooks.agreement import agree, configuration
from commhooks.algorithms.powersgd import PowerSGDState
from commhooks.binding import bind, find_models, one_model_only
from commhooks.hooks import HOOKS, MADE_FOR_NONE
from commhooks.state import HookState


def register(ddp: DDP, hook: Callable[..., Any], state: HookState | None = None) -> HookState:
    """Register a hook of this package on `ddp`, after checking that it can work. All ranks of the model must call it.

    Args:
        ddp: the model.
        hook: one of this package's hooks, such as `powersgd_hook`.
        state: the hook's state. For `allreduce_hook`, `bf16_hook` and `fp16_hook`, None makes one with the default
            options.

    Returns:
        The state, for `state.metrics()`.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel model. This rank alone can tell, so it alone is told.
        ValueError: on every rank, if any rank has a wrong hook or state for it, a state already in use or with another
            process group than the model's, or a model that has a hook; or if the ranks differ in the hook, its
            options, DDP's, or the parameters' names, shapes, dtypes or requires_grad. The message lists what is wrong
            and on which ranks.
        RuntimeError: another rank did not call it within the process group's timeout, or has ended.
    """
    if not isinstance(ddp, DDP):
        raise TypeError(f"ddp is a {type(ddp).__name__}; it must be a DistributedDataParallel model")
    bound, problem, config = None, None, {}
    try:
        bound = _prepare(ddp, hook, state)
        config = {"hook": hook.__name__} | configuration(bound)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
        problem = str(error) or repr(error)
    try:
        _agree(ddp, config, problem)
    except BaseException:
        if bound is not None:
            bound.binding = None  # free for another try
        raise
    assert bound is not None  # else there is a problem
    if isinstance(bound, PowerSGDState) and not any(bound.rank_of(tuple(p.shape)) for p in ddp.parameters()):
        warnings.warn(_nothing_compressed(bound, ddp), stacklevel=2)
    ddp.register_comm_hook(bound, hook)
    return bound


def _prepare(ddp: DDP, hook: Callable[..., Any], state: HookState | None) -> HookState:
    """The state, bound to the model."""
    if not any(hook is known for known in HOOKS):
        names = ", ".join(known.__name__ for known in HOOKS)
        raise TypeError(f"hook is {getattr(hook, '__name__', hook)!r}; it must be one of {names}")
    state_type = HOOKS[hook]
    if state is None and state_type in MADE_FOR_NONE:
        state = state_type()
    if not isinstance(state, state_type):
        given = f"a {type(state).__name__}" if isinstance(state, HookState) else repr(state)
        raise TypeError(f"state is {given}; {hook.__name__} takes a {state_type.__name__}")
    registered = ddp._get_ddp_logging_data().get("comm_hook")  # also torch's builtin ones, which _comm_hooks lacks
    if registered:
        raise ValueError(f"the model has a hook already: {registered}")
    if find_models(lambda other: any(s is state for _, s in other._comm_hooks)):
        raise ValueError(one_model_only(state))
    bind(state, ddp)
    return state


def _agree(ddp: DDP, config: dict[str, object], problem: str | None) -> None:
    try:
        agree(ddp, config, problem)
    except RuntimeError as error:
        raise RuntimeError(
            "commhooks.register: a rank of the model has ended, or has not called it within the group's timeout"
        ) from error


def _nothing_compressed(state: PowerSGDState, ddp: DDP) -> str:
    largest = tuple(max(ddp.parameters(), key=lambda p: p.numel()).shape)
    return (
        f"PowerSGD at matrix_approximation_rank={state.matrix_approximation_rank} and "
        f"min_compression_rate={state.min_compression_rate} compresses no parameter of this model "
        f"(its largest has shape {largest}): all will be sent as they are"
    )
