"""The operations of the hooks in plain torch: the meaning that every kernel is held to.

Tensors are flat unless a shape says otherwise. Arithmetic is float32, float64 where the gradient is float64
(`compute_dtype`). No function here waits for a GPU: where a CPU may look at a value and branch, a GPU selects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

# A row shorter than this fraction of its former length, once the rows before it are projected out of it, is rounding
# noise of the float32 products that made it (2^-24 an operation), and counts as linearly dependent.
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
        return _view(flat, self.offset, self.rows, self.cols)

    def p_of(self, flat: Tensor) -> Tensor:
        return _view(flat, self.p, self.rank, self.rows)

    def q_of(self, flat: Tensor) -> Tensor:
        return _view(flat, self.q, self.rank, self.cols)


def _view(flat: Tensor, offset: int, rows: int, cols: int) -> Tensor:
    return flat.as_strided((rows, cols), (cols, 1), flat.storage_offset() + offset)


@dataclass(frozen=True)
class Plan:
    """How a bucket is factorized: its matrices, and the (offset, numel) ranges that stay as they are."""

    matrices: tuple[Matrix, ...]
    vectors: tuple[tuple[int, int], ...]

    @cached_property
    def p_numel(self) -> int:
        return sum(x.rank * x.rows for x in self.matrices)

    @cached_property
    def q_numel(self) -> int:
        return sum(x.rank * x.cols for x in self.matrices)

    @cached_property
    def vectors_numel(self) -> int:
        return sum(numel for _, numel in self.vectors)

    def ps(self, flat: Tensor) -> list[Tensor]:
        return [x.p_of(flat) for x in self.matrices]

    def qs(self, flat: Tensor) -> list[Tensor]:
        return [x.q_of(flat) for x in self.matrices]

    def vectors_of(self, flat: Tensor) -> list[Tensor]:
        return [flat[offset : offset + numel] for offset, numel in self.vectors]

    def split_vectors(self, packed: Tensor) -> list[Tensor]:
        return list(packed.split([numel for _, numel in self.vectors]))


class Factors(NamedTuple):
    """A factorized bucket: packed P^T, packed Q^T, and the packed vectors."""

    p: Tensor
    q: Tensor
    vectors: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are computed with: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_finite(x: Tensor) -> Tensor:
    """A boolean scalar on x's device: is every element finite? One read, no mask."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    smallest, largest = torch.aminmax(x)  # NaN if any element is
    return smallest * 0 == largest * 0  # infinity times 0 is NaN, which equals nothing


def keep_(kept: Tensor, new: Tensor, ok: Tensor) -> None:
    """`kept` becomes `new` if the scalar `ok` is true, else it stays as it is."""
    if kept.is_cuda:
        torch.where(ok, new, kept, out=kept)
    elif ok:
        kept.copy_(new)


def add(gradient: Tensor, residual: Tensor | None) -> Tensor:
    """M = gradient + residual in the compute dtype: in place in `gradient` where that has it, else a new tensor."""
    m = gradient.to(compute_dtype(gradient.dtype))
    return m if residual is None else m.add_(residual)


def cast(m: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """A new tensor: m / divisor, rounded to nearest even into `dtype`; NaN stays NaN."""
    return m.div(divisor).to(dtype)


def uncast_(wire: Tensor, divisor: float, out: Tensor) -> None:
    """out = wire / divisor, divided in the compute dtype."""
    if divisor == 1:
        out.copy_(wire)
    else:
        out.copy_(wire.to(compute_dtype(out.dtype)).div_(divisor))


def project(gradient: Tensor, residual: Tensor | None, q: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """M = gradient + residual, and P = M Q of every matrix.

    Returns:
        M in the compute dtype: `gradient` itself, overwritten, where it has that; else a new tensor.
        Every P^T and, behind them, the vectors of M: one packed tensor.
    """
    m = gradient.to(compute_dtype(gradient.dtype))
    packed = m.new_empty(plan.p_numel + plan.vectors_numel)
    for x in plan.matrices:  # add and product while M is in the cache
        torch.mm(x.q_of(q), _add_(x.of(m), residual, x).t(), out=x.p_of(packed))
    _add_vectors_(m, residual, plan, packed[plan.p_numel :])
    return m, packed


def project_t(
    gradient: Tensor, residual: Tensor | None, p: Tensor, plan: Plan, *, with_vectors: bool
) -> tuple[Tensor, Tensor]:
    """M = gradient + residual, and Q = M^T P of every matrix. Returns as `project`, the vectors if asked for."""
    m = gradient.to(compute_dtype(gradient.dtype))
    packed = m.new_empty(plan.q_numel + (plan.vectors_numel if with_vectors else 0))
    for x in plan.matrices:
        torch.mm(x.p_of(p), _add_(x.of(m), residual, x), out=x.q_of(packed))
    if with_vectors:
        _add_vectors_(m, residual, plan, packed[plan.q_numel :])
    return m, packed


def _add_(matrix: Tensor, residual: Tensor | None, where: Matrix) -> Tensor:
    return matrix if residual is None else matrix.add_(where.of(residual))


def _add_vectors_(m: Tensor, residual: Tensor | None, plan: Plan, packed: Tensor) -> None:
    if plan.vectors:
        vectors = plan.vectors_of(m)
        if residual is not None:
            torch._foreach_add_(vectors, plan.vectors_of(residual))
        torch.cat(vectors, out=packed)


def orthogonalize_(factors: Sequence[Tensor], epsilon: float = 0.0) -> list[Tensor]:
    """Orthonormalize the rows of every factor (rank, n) in place, first row first, as Gram-Schmidt does.

    A row that depends on those before it becomes zero; so does a zero row. With `epsilon`, each row is divided by its
    norm plus `epsilon`. NaN and infinity give NaN.

    The method is Cholesky QR: the Gram matrices of all factors are small enough to be treated together. They are
    float64, for they square the condition number (1e5 becomes 1e10, of 1e16) and the magnitude (1e38 becomes 1e76).

    Returns:
        For each factor, which of its rows were dependent: bool, (rank,).
    """
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for x in factors:
        by_shape.setdefault(tuple(x.shape), []).append(x)
    dependent: dict[Tensor, Tensor] = {}
    for rank in {rank for rank, _ in by_shape}:
        groups = [group for shape, group in by_shape.items() if shape[0] == rank]
        stacks = [torch.stack(group).double() for group in groups]  # each (matrices, rank, n)
        grams = torch.cat([x @ x.mT for x in stacks])  # (matrices, rank, rank)
        transforms, lost = _inverse_cholesky(grams, epsilon)
        sizes = [len(group) for group in groups]
        for group, stack, transform in zip(groups, stacks, transforms.split(sizes), strict=True):
            torch._foreach_copy_(group, list((transform @ stack).unbind()))
        dependent |= zip(chain(*groups), lost.unbind(), strict=True)
    return [dependent[x] for x in factors]


def _inverse_cholesky(gram: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """From gram = X X^T (batch, rank, rank): the lower triangular T for which the rows of T X are orthonormal or,
    where they depend on those before them, zero; and which those are (batch, rank).
    """
    square_norms = gram.diagonal(dim1=1, dim2=2)  # (batch, rank)
    lower, info = torch.linalg.cholesky_ex(gram)
    norms = lower.diagonal(dim1=1, dim2=2)  # of each row, less its projection on those before it
    independent = (info == 0)[:, None] & (norms > DEPENDENT * square_norms.sqrt())
    if gram.is_cuda or not independent.all():
        lower, norms = _cholesky_of_dependent(gram)
    dependent = norms == 0
    lower.diagonal(dim1=1, dim2=2).masked_fill_(dependent, 1.0)  # to be invertible; that row of T is dropped below
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    transform = torch.linalg.solve_triangular(lower, eye.expand_as(gram), upper=False)
    return transform * torch.where(dependent, 0.0, norms / (norms + epsilon))[:, :, None], dependent


def _cholesky_of_dependent(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor with zero columns where rows of X depend on those before them; and its diagonal."""
    smallest = DEPENDENT**2 * gram.diagonal(dim1=1, dim2=2)  # (batch, rank)
    lower = torch.zeros_like(gram)
    for j in range(gram.shape[-1]):
        square = gram[:, j, j]
        scale = torch.where(square <= smallest[:, j], 0.0, square.rsqrt())  # NaN stays NaN
        column = gram[:, :, j] * scale[:, None]
        lower[:, :, j] = column
        gram = gram - column[:, :, None] * column[:, None, :]
    return lower.tril_(), lower.diagonal(dim1=1, dim2=2).clone()


def next_factor_(kept: Tensor, new: Tensor, lost: list[Tensor], fresh: Tensor, ok: Tensor, sizes: list[int]) -> None:
    """If `ok`, `kept` becomes `new`, each matrix's factor scaled to largest magnitude 1 and its `lost` rows `fresh`.

    A row lost to a rank-deficient matrix would stay zero for ever: it is M times zero. The scale keeps the next product
    from squaring the gradient's magnitude; it changes no result, for that product is orthogonalized.

    Args:
        kept, new, fresh: packed factors.
        lost: of each factor, bool (rank,).
        ok: bool scalar.
        sizes: numel of each factor.
    """
    if not kept.is_cuda and not ok:
        return
    factors = new.split(sizes)
    scales = torch._foreach_max(torch._foreach_abs(factors))
    torch._foreach_clamp_min_(scales, torch.finfo(new.dtype).tiny)
    scaled = torch._foreach_div(factors, scales)
    if kept.is_cuda or torch.cat(lost).any():
        for x, rows, drawn in zip(scaled, lost, fresh.split(sizes), strict=True):
            rank = len(rows)
            torch.where(rows[:, None], drawn.view(rank, -1), x.view(rank, -1), out=x.view(rank, -1))
    keep_(kept, torch.cat(scaled), ok)


def reconstruct_(
    m: Tensor, plan: Plan, mean: Factors, sent: Factors, out: Tensor, residual: Tensor | None, ok: Tensor
) -> None:
    """out = P Q^T of the mean factors; residual = M - P Q^T of what this rank sent, if `ok`, else as it was.

    `m` is overwritten; it may be `out` itself.
    """
    rest = None
    if residual is not None and residual.is_cuda:
        rest = torch.empty_like(residual)  # kept or not below
    elif residual is not None and ok:
        rest = residual
    for x in plan.matrices:  # both products while M is in the cache
        if rest is not None:
            torch.addmm(x.of(m), x.p_of(sent.p).t(), x.q_of(sent.q), alpha=-1, out=x.of(rest))
        torch.mm(x.p_of(mean.p).t(), x.q_of(mean.q), out=x.of(m))
    if plan.vectors:
        vectors = plan.vectors_of(m)
        if rest is not None:
            rests = plan.vectors_of(rest)
            torch._foreach_copy_(rests, vectors)
            torch._foreach_sub_(rests, plan.split_vectors(sent.vectors))
        torch._foreach_copy_(vectors, plan.split_vectors(mean.vectors))
    if residual is not None and residual.is_cuda and rest is not None:
        keep_(residual, rest, ok)
    if out is not m:
        out.copy_(m)
