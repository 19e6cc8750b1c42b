"""The operations of the hooks in plain torch: the meaning that every kernel is held to.

Tensors are flat unless a shape says otherwise. Arithmetic is float32, float64 where the gradient is float64
(`compute_dtype`). No function here waits for a GPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# A column of P shorter than this fraction of its former length, once the columns before it are projected out of it,
# is rounding noise of the float32 product that made it (2^-24 an operation), and counts as linearly dependent.
DEPENDENT = 1e-6


@dataclass(frozen=True)
class Matrix:
    """Where a gradient matrix M (rows, cols) and its factors lie in their flat tensors.

    The factors are kept transposed, one row a rank: P^T (rank, rows) and Q^T (rank, cols). So every product below
    streams M along its rows, and a column of P is contiguous.
    """

    offset: int
    rows: int
    cols: int
    rank: int
    p: int
    q: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.rows * self.cols].view(self.rows, self.cols)

    def p_of(self, flat: Tensor) -> Tensor:
        return flat[self.p : self.p + self.rank * self.rows].view(self.rank, self.rows)

    def q_of(self, flat: Tensor) -> Tensor:
        return flat[self.q : self.q + self.rank * self.cols].view(self.rank, self.cols)


@dataclass(frozen=True)
class Plan:
    """How a bucket is factorized: its matrices, and the (offset, numel) ranges that stay as they are."""

    matrices: tuple[Matrix, ...]
    vectors: tuple[tuple[int, int], ...]

    @property
    def p_numel(self) -> int:
        return sum(x.rank * x.rows for x in self.matrices)

    @property
    def q_numel(self) -> int:
        return sum(x.rank * x.cols for x in self.matrices)

    def ps(self, flat: Tensor) -> list[Tensor]:
        return [x.p_of(flat) for x in self.matrices]

    def qs(self, flat: Tensor) -> list[Tensor]:
        return [x.q_of(flat) for x in self.matrices]

    def vectors_of(self, flat: Tensor) -> list[Tensor]:
        return [flat[offset : offset + numel] for offset, numel in self.vectors]


class Factors(NamedTuple):
    """A factorized bucket: packed P^T, packed Q^T, and the packed vectors."""

    p: Tensor
    q: Tensor
    vectors: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are computed with: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_finite(*tensors: Tensor) -> Tensor:
    """A boolean scalar on the tensors' device: is every element finite? (aminmax keeps NaN; one read, no mask.)"""
    extremes = [extreme for x in tensors if x.numel() for extreme in torch.aminmax(x)]
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=tensors[0].device)
    return torch.isfinite(torch.stack([x.to(torch.float64) for x in extremes])).all()


def keep_(kept: Tensor, new: Tensor, ok: Tensor) -> None:
    """`kept` becomes `new` where the scalar `ok` is true, and stays as it is elsewhere."""
    if kept.device.type == "cpu":
        if ok:
            kept.copy_(new)
    else:  # asking a GPU tensor for its truth would wait for the GPU
        torch.where(ok, new, kept, out=kept)


def add(gradient: Tensor, residual: Tensor | None) -> Tensor:
    """M = gradient + residual in the compute dtype: in place in `gradient` where that has it, else a new tensor."""
    if gradient.dtype != compute_dtype(gradient.dtype):
        gradient = gradient.to(compute_dtype(gradient.dtype))
    return gradient if residual is None else gradient.add_(residual)


def cast(m: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """m / divisor, rounded to nearest even into `dtype`; NaN stays NaN."""
    return m.div(divisor).to(dtype)


def uncast_(wire: Tensor, divisor: float, out: Tensor) -> None:
    """out = wire / divisor, divided in the compute dtype."""
    if divisor == 1:
        out.copy_(wire)
    else:
        out.copy_(wire.to(compute_dtype(out.dtype)).div_(divisor))


def project(m: Tensor, q: Tensor, plan: Plan) -> Tensor:
    """P = M Q of every matrix, then the vectors: one packed tensor of `plan.p_numel` + vectors elements."""
    packed = m.new_empty(plan.p_numel + sum(numel for _, numel in plan.vectors))
    for x in plan.matrices:
        torch.mm(x.q_of(q), x.of(m).t(), out=x.p_of(packed))
    _pack_vectors(m, plan, packed[plan.p_numel :])
    return packed


def project_t(m: Tensor, p: Tensor, plan: Plan, *, with_vectors: bool = False) -> Tensor:
    """Q = M^T P of every matrix, then, if asked for, the vectors: one packed tensor."""
    vectors = sum(numel for _, numel in plan.vectors) if with_vectors else 0
    packed = m.new_empty(plan.q_numel + vectors)
    for x in plan.matrices:
        torch.mm(x.p_of(p), x.of(m), out=x.q_of(packed))
    if with_vectors:
        _pack_vectors(m, plan, packed[plan.q_numel :])
    return packed


def _pack_vectors(m: Tensor, plan: Plan, out: Tensor) -> None:
    if plan.vectors:
        torch.cat(plan.vectors_of(m), out=out)


def orthogonalize_(factors: Iterable[Tensor], epsilon: float = 0.0) -> None:
    """Orthonormalize the rows of every factor (rank, n) in place, first row first, as Gram-Schmidt does.

    A row that depends on those before it becomes zero; so does a zero row. With `epsilon`, each row is divided by its
    norm plus `epsilon`. NaN and infinity give NaN.

    The method is Cholesky QR: the Gram matrices of all factors are small enough to be treated together. They are
    float64, for they square the condition number (1e5 becomes 1e10, of 1e16) and the magnitude (1e38 becomes 1e76).
    """
    by_rank: dict[int, list[Tensor]] = {}
    for x in factors:
        by_rank.setdefault(x.shape[0], []).append(x)
    for group in by_rank.values():
        rows = [x.double() for x in group]
        gram = torch.stack([x @ x.t() for x in rows])  # (matrices, rank, rank)
        for x, row, transform in zip(group, rows, _inverse_cholesky(gram, epsilon), strict=True):
            x.copy_(transform @ row)


def _inverse_cholesky(gram: Tensor, epsilon: float) -> Tensor:
    """T (batch, rank, rank), lower triangular, for which the rows of T X are orthonormal or zero, from gram = X X^T."""
    rank = gram.shape[-1]
    square_norms = gram.diagonal(dim1=1, dim2=2).clone()  # (batch, rank)
    lower = torch.zeros_like(gram)
    norms = torch.zeros_like(square_norms)
    for j in range(rank):
        pivot = gram[:, j, j]  # the square of what is left of row j
        norms[:, j] = torch.where(pivot <= DEPENDENT**2 * square_norms[:, j], 0.0, pivot.sqrt())
        column = gram[:, :, j] * torch.where(norms[:, j] == 0, 0.0, 1 / norms[:, j])[:, None]
        lower[:, :, j] = column
        gram = gram - column[:, :, None] * column[:, None, :]
    dependent = norms == 0
    lower.diagonal(dim1=1, dim2=2).masked_fill_(dependent, 1.0)  # invertible; its row of the inverse is dropped
    eye = torch.eye(rank, dtype=gram.dtype, device=gram.device)
    transform = torch.linalg.solve_triangular(lower, eye.expand_as(gram), upper=False)
    return transform * torch.where(dependent, 0.0, norms / (norms + epsilon))[:, :, None]


def refill_(factors: Iterable[Tensor], fresh: Iterable[Tensor]) -> None:
    """Replace the zero rows of every factor (rank, n) by the same rows of `fresh`; scale the others to magnitude 1.

    A row is zero once its matrix had too low a rank for it. Multiplying by zero would keep it so for ever.
    """
    for x, new in zip(factors, fresh, strict=True):
        largest = x.abs().amax(1, keepdim=True)  # (rank, 1)
        torch.where(largest > 0, x / largest, new, out=x)


def reconstruct_(
    m: Tensor, plan: Plan, mean: Factors, sent: Factors, out: Tensor, residual: Tensor | None, ok: Tensor
) -> None:
    """out = P Q^T of the mean factors; residual = M - P Q^T of what this rank sent, if `ok`, else as it was.

    `m` is overwritten; it may be `out` itself.
    """
    if residual is not None:
        rest = m.clone()
        for x in plan.matrices:
            x.of(rest).addmm_(x.p_of(sent.p).t(), x.q_of(sent.q), alpha=-1)
        _subtract_vectors(rest, sent.vectors, plan)
        keep_(residual, rest, ok)
    for x in plan.matrices:
        torch.mm(x.p_of(mean.p).t(), x.q_of(mean.q), out=x.of(m))
    if plan.vectors:
        torch._foreach_copy_(plan.vectors_of(m), mean.vectors.split([numel for _, numel in plan.vectors]))
    if out is not m:
        out.copy_(m)


def _subtract_vectors(rest: Tensor, vectors: Tensor, plan: Plan) -> None:
    if plan.vectors:
        torch._foreach_sub_(plan.vectors_of(rest), vectors.split([numel for _, numel in plan.vectors]))
