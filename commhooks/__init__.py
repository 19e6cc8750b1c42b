"""Gradient-compression communication hooks for PyTorch DistributedDataParallel."""

from commhooks.algorithms.cast import CastState
from commhooks.algorithms.powersgd import PowerSGDState
from commhooks.algorithms.randomk import RandomKState
from commhooks.algorithms.topk import TopKState
from commhooks.checkpoint import reshard
from commhooks.hooks import allreduce_hook, bf16_hook, fp16_hook, powersgd_hook, randomk_hook, topk_hook
from commhooks.registration import register
from commhooks.replicas import ReplicaError, check_replicas
from commhooks.state import HookState

__version__ = "0.1.0"

__all__ = [
    "CastState",
    "HookState",
    "PowerSGDState",
    "RandomKState",
    "ReplicaError",
    "TopKState",
    "allreduce_hook",
    "bf16_hook",
    "check_replicas",
    "fp16_hook",
    "powersgd_hook",
    "randomk_hook",
    "register",
    "reshard",
    "topk_hook",
]
