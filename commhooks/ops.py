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
    next_factor_,
    orthogonalize_,
    project,
    project_t,
    reconstruct_,
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
    "next_factor_",
    "orthogonalize_",
    "project",
    "project_t",
    "reconstruct_",
    "uncast_",
]
