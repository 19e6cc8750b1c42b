"""One name for each tensor operation of the hooks: the Triton kernel on a GPU, the torch reference elsewhere.

The environment variable COMMHOOKS_BACKEND, "reference" or "triton", forces one. Triton on a CPU needs its interpreter
(TRITON_INTERPRET=1). float64 is always the reference's.
"""

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from commhooks.triton_kernels import reference, reference_topk
from commhooks.triton_kernels.reference import (
    FLOATS as WIRE_DTYPES,
    Factor,
    Factors,
    Matrix,
    Plan,
    Side,
    compute_dtype,
)
from commhooks.triton_kernels.reference_topk import (
    ALIGNMENT,
    BLOCK_SIZES,
    block_index_dtype,
    blocks,
    exact_index_dtype,
    packed_bytes,
    places,
)

__all__ = [
    "ALIGNMENT",
    "BLOCK_SIZES",
    "WIRE_DTYPES",
    "Factor",
    "Factors",
    "Matrix",
    "Plan",
    "Side",
    "block_index_dtype",
    "blocks",
    "compute_dtype",
    "exact_index_dtype",
    "from_wire_",
    "keep_factor_",
    "largest",
    "magnitudes",
    "orthogonalize",
    "packed_bytes",
    "places",
    "project",
    "project_t",
    "reconstruct_",
    "select_blocks",
    "select_exact",
    "sum_blocks_",
    "sum_sparse_",
    "to_wire",
]

Args = ParamSpec("Args")
Result = TypeVar("Result")
BACKENDS = ("reference", "triton")
BACKEND = os.environ.get("COMMHOOKS_BACKEND")
if BACKEND not in (None, *BACKENDS):
    raise ValueError(f"COMMHOOKS_BACKEND is {BACKEND!r}; it must be one of {', '.join(BACKENDS)}, or not be set")


def _dispatched(operation: Callable[Args, Result], module: str) -> Callable[Args, Result]:
    """`operation` of the reference, or the kernel of that name in `module`, as device, dtypes and BACKEND want it."""

    @wraps(operation)
    def dispatch(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if not _wants_kernels(args):
            return operation(*args, **kwargs)
        # Imported late: triton is not needed, nor always there, without a GPU.
        return getattr(import_module(f"commhooks.triton_kernels.{module}"), operation.__name__)(*args, **kwargs)

    return dispatch


def _wants_kernels(args: tuple[object, ...]) -> bool:
    dtypes = [x if isinstance(x, torch.dtype) else getattr(x, "dtype", None) for x in args]
    if torch.float64 in dtypes:
        return False
    on_gpu = isinstance(args[0], Tensor) and args[0].is_cuda
    return on_gpu if BACKEND is None else BACKEND == "triton"


to_wire = _dispatched(reference.to_wire, "cast")
from_wire_ = _dispatched(reference.from_wire_, "cast")
largest = _dispatched(reference.largest, "factors")
project = _dispatched(reference.project, "powersgd")
project_t = _dispatched(reference.project_t, "powersgd")
orthogonalize = _dispatched(reference.orthogonalize, "factors")
magnitudes = _dispatched(reference.magnitudes, "factors")
keep_factor_ = _dispatched(reference.keep_factor_, "factors")
reconstruct_ = _dispatched(reference.reconstruct_, "powersgd")
select_blocks = _dispatched(reference_topk.select_blocks, "topk")
select_exact = _dispatched(reference_topk.select_exact, "topk")
sum_blocks_ = _dispatched(reference_topk.sum_blocks_, "topk")
sum_sparse_ = _dispatched(reference_topk.sum_sparse_, "topk")
