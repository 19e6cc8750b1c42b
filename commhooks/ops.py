"""One name for each tensor operation of the hooks. Every device runs the torch reference."""

from commhooks.triton_kernels.reference import (
    Factors,
    Matrix,
    Plan,
    add,
    cast,
    compute_dtype,
    is_finite,
    keep_,
    orthogonalize_,
    project,
    project_t,
    reconstruct_,
    refill_,
    uncast_,
)

__all__ = [
    "Factors",
    "Matrix",
    "Plan",
    "add",
    "cast",
    "compute_dtype",
    "is_finite",
    "keep_",
    "orthogonalize_",
    "project",
    "project_t",
    "reconstruct_",
    "refill_",
    "uncast_",
]
