"""The operations of the casting hooks and of PowerSGD in plain torch: the meaning that every kernel is held to.

Tensors are flat unless a shape says otherwise. Arithmetic is float32, float64 where the gradient is float64
(`compute_dtype`). No function here waits for a GPU: where a CPU may look at a value and branch, a GPU selects.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

# A row shorter than this fraction of its former length, once the rows before it are projected out of it, is rounding
# noise of the float32 products that made it (2^-24 an operation), and counts as linearly dependent.
DEPENDENT = 1e-6


FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of what goes over the wire, and that kernels take


@dataclass(frozen=True)
class Factor:
    """Where one factor lies in its packed tensor: transposed, (rank, length), so that a column of P is contiguous."""

    offset: int
    rank: int
    length: int

    @property
    def numel(self) -> int:
        return self.rank * self.length

    def of(self, flat: Tensor) -> Tensor:
        return _view(flat, self.offset, self.rank, self.length)


@dataclass(frozen=True, eq=False)
class Side:
    """One side's factors, all the Ps or all the Qs of a bucket, packed one behind the other."""

    factors: tuple[Factor, ...]

    @cached_property
    def numel(self) -> int:
        return sum(x.numel for x in self.factors)

    @cached_property
    def ranks(self) -> list[int]:
        return [x.rank for x in self.factors]

    def of(self, flat: Tensor) -> list[Tensor]:
        return [x.of(flat) for x in self.factors]


@dataclass(frozen=True)
class Matrix:
    """Where a gradient matrix M (rows, cols) and its factors P^T (rank, rows) and Q^T (rank, cols) lie.

    With factors transposed every product streams M along its rows.
    """

    offset: int
    rows: int
    cols: int
    rank: int
    p: Factor
    q: Factor

    def of(self, flat: Tensor) -> Tensor:
        return _view(flat, self.offset, self.rows, self.cols)


def _view(flat: Tensor, offset: int, rows: int, cols: int) -> Tensor:
    return flat.as_strided((rows, cols), (cols, 1), flat.storage_offset() + offset)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a bucket is factorized: its matrices, and the (offset, numel) ranges that stay as they are, the vectors."""

    matrices: tuple[Matrix, ...]
    vectors: tuple[tuple[int, int], ...]

    @cached_property
    def p(self) -> Side:
        return Side(tuple(x.p for x in self.matrices))

    @cached_property
    def q(self) -> Side:
        return Side(tuple(x.q for x in self.matrices))

    @cached_property
    def vectors_numel(self) -> int:
        return sum(numel for _, numel in self.vectors)

    def vectors_of(self, flat: Tensor) -> list[Tensor]:
        return [flat[offset : offset + numel] for offset, numel in self.vectors]

    def split_vectors(self, packed: Tensor) -> list[Tensor]:
        return list(packed.split([numel for _, numel in self.vectors]))


class Factors(NamedTuple):
    """A factorized bucket: packed P^T, packed Q^T, and the packed vectors."""

    p: Tensor
    q: Tensor
    vectors: Tensor


class Projection(NamedTuple):
    """A projected bucket.

    m: M in the compute dtype: the gradient's own memory where it has that, else a new tensor.
    wire: the product and the vectors, divided and rounded: what goes to the other ranks.
    sent: what of the product and the vectors is in `wire`: `wire` times the divisor, in the compute dtype.
    """

    m: Tensor
    wire: Tensor
    sent: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are computed with: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(name: str, x: Tensor | None, dtypes: tuple[torch.dtype, ...], numel: int) -> None:
    """What every launcher asks of a tensor: its dtype, contiguous memory, at least `numel` elements.

    Raises:
        ValueError: it is not so; the message names the tensor.
    """
    if x is None:
        return
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is of {x.dtype}; it must be of {', '.join(map(str, dtypes))}")
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}; it must be contiguous")
    if x.numel() < numel:
        raise ValueError(f"{name} has {x.numel()} elements; it must have {numel}")


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, a scalar of x's dtype; NaN if there is one; 0 of nothing. One read."""
    if x.numel() == 0:
        return x.new_zeros(())
    smallest, greatest = torch.aminmax(x)
    return torch.maximum(-smallest, greatest)


def to_wire(
    gradient: Tensor, residual: Tensor | None, divisor: float, dtype: torch.dtype, rest: Tensor | None
) -> Tensor:
    """wire = (gradient + residual) / divisor, rounded to nearest even into `dtype`; NaN stays NaN.

    Args:
        gradient: may be overwritten if there is a residual.
        rest: with a residual, becomes what of the sum the wire does not carry.
    """
    m = gradient.to(compute_dtype(gradient.dtype))
    if residual is None or rest is None:
        return m.div(divisor).to(dtype)
    wire = m.add_(residual).div(divisor).to(dtype)
    torch.sub(m, wire, alpha=divisor, out=rest)
    return wire


def from_wire_(wire: Tensor, divisor: float, out: Tensor) -> None:
    """out = wire / divisor."""
    if divisor == 1:
        out.copy_(wire)
    else:
        out.copy_(wire.to(compute_dtype(out.dtype)).div(divisor))


def project(
    gradient: Tensor, residual: Tensor | None, q: Tensor, plan: Plan, divisor: float, dtype: torch.dtype
) -> Projection:
    """M = gradient + residual; of every matrix P = M Q; behind them the vectors of M. `q` is packed."""
    m = gradient.to(compute_dtype(gradient.dtype))
    packed = m.new_empty(plan.p.numel + plan.vectors_numel)
    for x in plan.matrices:  # add and product while M is in the cache
        torch.mm(x.q.of(q), _add_(x.of(m), residual, x).t(), out=x.p.of(packed))
    _add_vectors_(m, residual, plan, packed[plan.p.numel :])
    return _projection(m, packed, divisor, dtype)


def project_t(
    gradient: Tensor,
    residual: Tensor | None,
    p: Tensor,
    plan: Plan,
    divisor: float,
    dtype: torch.dtype,
    *,
    with_vectors: bool,
) -> Projection:
    """M = gradient + residual; of every matrix Q = M^T P; behind them, if asked for, the vectors of M."""
    m = gradient.to(compute_dtype(gradient.dtype))
    packed = m.new_empty(plan.q.numel + (plan.vectors_numel if with_vectors else 0))
    for x in plan.matrices:
        torch.mm(x.p.of(p), _add_(x.of(m), residual, x), out=x.q.of(packed))
    if with_vectors:
        _add_vectors_(m, residual, plan, packed[plan.q.numel :])
    return _projection(m, packed, divisor, dtype)


def _add_(matrix: Tensor, residual: Tensor | None, where: Matrix) -> Tensor:
    return matrix if residual is None else matrix.add_(where.of(residual))


def _add_vectors_(m: Tensor, residual: Tensor | None, plan: Plan, packed: Tensor) -> None:
    if plan.vectors:
        vectors = plan.vectors_of(m)
        if residual is not None:
            torch._foreach_add_(vectors, plan.vectors_of(residual))
        torch.cat(vectors, out=packed)


def _projection(m: Tensor, packed: Tensor, divisor: float, dtype: torch.dtype) -> Projection:
    wire = packed.div(divisor).to(dtype)
    return Projection(m, wire, packed if dtype == packed.dtype else wire.to(packed.dtype).mul_(divisor))


def orthogonalize(packed: Tensor, side: Side, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Orthonormal rows of the same span for every factor (rank, length), first row first, as Gram-Schmidt makes them.

    A row that depends on those before it becomes zero; so does a zero row. With `epsilon`, each row is divided by its
    norm plus `epsilon`. NaN and infinity give NaN.

    The method is Cholesky QR: the Gram matrices of all factors are small enough to be treated together. They are
    float64, for they square the condition number (1e5 becomes 1e10, of 1e16) and the magnitude (1e38 becomes 1e76).

    Args:
        packed: the factors, of any float dtype; what lies behind them is ignored.
        dtype: of the result.

    Returns:
        The packed orthonormal factors; and which rows were dependent, of one factor behind the other: bool.
    """
    bases = torch.empty(side.numel, dtype=dtype, device=packed.device)
    lost: list[Tensor] = [bases] * len(side.factors)
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, x in enumerate(side.factors):
        by_shape.setdefault((x.rank, x.length), []).append(i)
    for rank in {rank for rank, _ in by_shape}:
        groups = [group for shape, group in by_shape.items() if shape[0] == rank]
        stacks = [torch.stack([side.factors[i].of(packed) for i in group]).double() for group in groups]
        grams = torch.cat([x @ x.mT for x in stacks])  # (matrices, rank, rank)
        transforms, dependent = _inverse_cholesky(grams, epsilon)
        sizes = [len(group) for group in groups]
        for group, stack, transform in zip(groups, stacks, transforms.split(sizes), strict=True):
            torch._foreach_copy_([side.factors[i].of(bases) for i in group], list((transform @ stack).unbind()))
        for i, rows in zip(chain(*groups), dependent.unbind(), strict=True):
            lost[i] = rows
    return bases, torch.cat(lost) if lost else torch.empty(0, dtype=torch.bool, device=packed.device)


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


def magnitudes(packed: Tensor, side: Side, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each factor (factors,), and of the factors and `vectors` together, a scalar.

    NaN if there is one: so the scalar is finite if every number that all ranks have received is.
    """
    if not side.factors:
        return packed.new_empty(0, dtype=compute_dtype(packed.dtype)), largest(vectors)
    of_each = torch.stack(torch._foreach_max(torch._foreach_abs(side.of(packed))))
    worst = torch.maximum(of_each.max(), largest(vectors))
    return of_each.to(compute_dtype(packed.dtype)), worst


def keep_factor_(
    kept: Tensor,
    new: Tensor,
    side: Side,
    scales: Tensor,
    lost: Tensor,
    fresh: Tensor,
) -> None:
    """`kept` becomes `new`, each factor divided by its scale, and its `lost` rows `fresh`.

    A row lost to a rank-deficient matrix would stay zero for ever: it is M times zero. The scale, of `magnitudes`,
    keeps the next product from squaring the gradient's magnitude; it changes no result, for that product is
    orthogonalized.

    Args:
        kept, new, fresh: packed factors; `new` of any float dtype.
        scales: (factors,).
        lost: bool, of `orthogonalize`.
    """
    scaled = [x.to(kept.dtype) for x in side.of(new)]
    scaled = list(torch._foreach_div(scaled, list(scales.clamp_min(torch.finfo(kept.dtype).tiny).unbind())))
    if kept.is_cuda or lost.any():
        rows = lost.split(side.ranks)
        drawn = side.of(fresh)
        scaled = [torch.where(gone[:, None], x, y) for x, y, gone in zip(drawn, scaled, rows, strict=True)]
    torch.cat([x.flatten() for x in scaled], out=kept)


def reconstruct_(m: Tensor, plan: Plan, mean: Factors, sent: Factors, out: Tensor, residual: Tensor | None) -> None:
    """out = P Q^T of the mean factors; residual = M - P Q^T of what this rank sent.

    Args:
        m: overwritten; it may be `out` itself.
        mean: of any float dtype.
        sent: in the compute dtype.
        residual: overwritten, or None.
    """
    mean = Factors(*(x.to(m.dtype) for x in mean))
    for x in plan.matrices:  # both products while M is in the cache
        if residual is not None:
            torch.addmm(x.of(m), x.p.of(sent.p).t(), x.q.of(sent.q), alpha=-1, out=x.of(residual))
        torch.mm(x.p.of(mean.p).t(), x.q.of(mean.q), out=x.of(m))
    if plan.vectors:
        vectors = plan.vectors_of(m)
        if residual is not None:
            rests = plan.vectors_of(residual)
            torch._foreach_copy_(rests, vectors)
            torch._foreach_sub_(rests, plan.split_vectors(sent.vectors))
        torch._foreach_copy_(vectors, plan.split_vectors(mean.vectors))
    if out is not m:
        out.copy_(m)
