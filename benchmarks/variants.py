"""The hooks and options that benchmarks compare: ours, torch's own, and DDP without any."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks


@dataclass(frozen=True)
class Variant:
    """A hook with its options. `register` takes the model and PowerSGD's rank; it gives back a state of ours.

    `hook`: the hook of ours that must pass its tests first; None for DDP's and torch's own.
    """

    label: str
    register: Callable[[DDP, int], commhooks.HookState | None]
    bucket_cap_mb: float = 1
    hook: str | None = None


def _ours(hook: Callable[..., Any], state: Callable[..., commhooks.HookState], **options: Any) -> Callable[..., Any]:
    def register(ddp: DDP, _: int) -> commhooks.HookState:
        return commhooks.register(ddp, hook, state(**options))

    return register


def _cast(hook: Callable[..., Any]) -> Variant:
    return Variant(hook.__name__, _ours(hook, commhooks.CastState), hook=hook.__name__.removesuffix("_hook"))


def _powersgd(label: str, **options: Any) -> Variant:
    def register(ddp: DDP, rank: int) -> commhooks.HookState:
        chosen: dict[str, Any] = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 0} | options
        state = commhooks.PowerSGDState(wire_dtype=torch.bfloat16, **chosen)
        return commhooks.register(ddp, commhooks.powersgd_hook, state)

    return Variant(f"powersgd_hook, {label}bf16 wire", register, bucket_cap_mb=5, hook="powersgd")


def _topk(label: str, **options: Any) -> Variant:
    register = _ours(commhooks.topk_hook, commhooks.TopKState, **options)
    return Variant(f"topk_hook, {label}", register, bucket_cap_mb=5, hook="topk")


def _torch_fp16(ddp: DDP, _: int) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _torch_bf16(ddp: DDP, _: int) -> None:
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)


def _torch_powersgd(ddp: DDP, rank: int) -> None:
    state = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, torch_powersgd.powerSGD_hook)


VARIANTS = {
    "plain": Variant("plain DDP", lambda *_: None),
    "bf16": _cast(commhooks.bf16_hook),
    "fp16": _cast(commhooks.fp16_hook),
    "powersgd": _powersgd(""),
    "powersgd-alternating": _powersgd("alternating, ", alternating=True),
    "powersgd-8": _powersgd("rank 8, ", matrix_approximation_rank=8),
    "powersgd-8-alternating": _powersgd("rank 8, alternating, ", matrix_approximation_rank=8, alternating=True),
    "topk": _topk("1 %"),
    "topk-warmup": _topk("to 1 % in 150 steps", warmup_steps=150),
    "topk-leader": _topk("1 %, leader", aggregation="leader"),
    "topk-balanced": _topk("1 %, balanced", aggregation="balanced"),
    "randomk": Variant(
        "randomk_hook, 1 %", _ours(commhooks.randomk_hook, commhooks.RandomKState), bucket_cap_mb=5, hook="randomk"
    ),
    "torch-fp16": Variant("torch fp16_compress_hook", _torch_fp16),
    "torch-bf16": Variant("torch bf16_compress_hook", _torch_bf16),
    "torch-powersgd": Variant("torch powerSGD_hook, one bucket", _torch_powersgd, bucket_cap_mb=100),
}
