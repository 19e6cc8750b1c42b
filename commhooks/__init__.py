"""Gradient-compression communication hooks for PyTorch DistributedDataParallel."""

from commhooks.algorithms.cast import CastState
from commhooks.algorithms.powersgd import PowerSGDState
from commhooks.hooks import allreduce_hook, bf16_hook, fp16_hook, powersgd_hook
from commhooks.registration import register
from commhooks.state import HookState

__version__ = "0.1.0"

__all__ = [
    "CastState",
    "HookState",
    "PowerSGDState",
    "allreduce_hook",
    "bf16_hook",
    "fp16_hook",
    "powersgd_hook",
    "register",
]
