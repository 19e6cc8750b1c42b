"""PowerSGD's operations (arXiv:1905.13727, Algorithms 1 and 2), each a launch or two for all matrices of a bucket.

A full step is eight launches: project (2), orthogonalize, project_t (2), magnitudes, keep_factor_, reconstruct_. Of a
float32 gradient they move 28 bytes an element of M: gradient and residual in, M out; M in; M in, gradient and residual
out. Factors are small beside M.

The functions have the names, arguments and meaning of those in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from commhooks.triton_kernels.factors import MAX_RANK, check_rank
from commhooks.triton_kernels.reference import FLOATS, Factors, Plan, Projection, check
from commhooks.triton_kernels.rounding import LAUNCH, round_to, widen
from commhooks.triton_kernels.tiles import (
    CHUNK,
    TILE_COLS,
    TILE_OUT_COLS,
    TILE_OUT_ROWS,
    TILE_ROWS,
    TILE_T_COLS,
    TILE_T_ROWS,
    PlanTables,
    ProjectionTiles,
    plan_tables,
)

BUILT_IN_REGISTERS = 8  # ranks up to this keep a sum a number of M, larger ones take tl.dot


@triton.jit
def _project(
    gradient,
    residual,
    m,
    factor,
    partials,
    tiles,
    HAS_RESIDUAL: tl.constexpr,
    STORE_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One tile of M = gradient + residual, stored; and its part of P^T (rank, rows), or of Q^T (rank, cols).

    ROWS x COLS numbers at a time, STEPS times: along the columns for P, along the rows for Q.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    offset = tl.multiple_of(tl.load(tile), ALIGN)
    rows = tl.load(tile + 1)
    cols = tl.multiple_of(tl.load(tile + 2), ALIGN)
    rank = tl.load(tile + 3)
    factor += tl.load(tile + 4)
    partials += tl.load(tile + 5)
    row = tl.load(tile + 6) + tl.arange(0, ROWS)
    col = tl.multiple_of(tl.load(tile + 7), 16) + tl.arange(0, COLS)
    k = tl.arange(0, R)
    if R <= 8:  # BUILT_IN_REGISTERS
        sums = tl.zeros((R, ROWS, COLS), tl.float32)
    elif TRANSPOSED:
        sums = tl.zeros((R, COLS), tl.float32)
    else:
        sums = tl.zeros((ROWS, R), tl.float32)

    for _ in range(STEPS):
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        at = offset + row[:, None] * cols + col[None, :]
        x = widen(tl.load(gradient + at, inside, other=0.0))  # (ROWS, COLS)
        if HAS_RESIDUAL:
            x += tl.load(residual + at, inside, other=0.0)
        if STORE_M:
            tl.store(m + at, x, inside)
        if TRANSPOSED:
            p = tl.load(factor + k[:, None] * rows + row[None, :], (k < rank)[:, None] & (row < rows)[None, :], 0.0)
            if R <= 8:
                sums += p[:, :, None] * x[None, :, :]
            else:
                sums = tl.dot(p, x, sums, input_precision="ieee")
            row += ROWS
        else:
            q = tl.load(factor + k[:, None] * cols + col[None, :], (k < rank)[:, None] & (col < cols)[None, :], 0.0)
            if R <= 8:
                sums += q[:, None, :] * x[None, :, :]
            else:
                sums = tl.dot(x, tl.trans(q), sums, input_precision="ieee")
            col += COLS

    if TRANSPOSED:
        out = tl.sum(sums, 1) if R <= 8 else sums  # (R, COLS)
        tl.store(partials + k[:, None] * cols + col[None, :], out, (k < rank)[:, None] & (col < cols)[None, :])
    else:
        out = tl.sum(sums, 2) if R <= 8 else tl.trans(sums)  # (R, ROWS)
        tl.store(partials + k[:, None] * rows + row[None, :], out, (k < rank)[:, None] & (row < rows)[None, :])


@triton.jit
def _sum_partials(
    partials,
    gradient,
    residual,
    m,
    wire,
    sent,
    chunks,
    divisor,
    HAS_RESIDUAL: tl.constexpr,
    STORE_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of the packed result: partial sums added up, in their order; or a piece of a vector of M."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 6
    start, numel = tl.load(chunk), tl.load(chunk + 1)
    stride, splits = tl.load(chunk + 3), tl.load(chunk + 4)
    i = tl.arange(0, CHUNK)
    inside = i < numel
    total = tl.zeros((CHUNK,), tl.float32)
    if splits == 0:
        at = tl.load(chunk + 5) + i
        total += widen(tl.load(gradient + at, inside, other=0.0))
        if HAS_RESIDUAL:
            total += tl.load(residual + at, inside, other=0.0)
        if STORE_M:
            tl.store(m + at, total, inside)
    else:
        first = tl.load(chunk + 2)
        for split in range(splits):
            total += tl.load(partials + first + split * stride + i, inside, other=0.0)
    rounded = round_to(tl.div_rn(total, divisor), wire.dtype.element_ty)
    tl.store(wire + start + i, rounded, inside)
    if wire.dtype.element_ty == tl.float32:
        tl.store(sent + start + i, total, inside)
    else:
        tl.store(sent + start + i, widen(rounded) * divisor, inside)


@triton.jit
def _reconstruct(
    m,
    mean_p,
    mean_q,
    mean_vectors,
    sent_p,
    sent_q,
    sent_vectors,
    out,
    residual,
    tiles,
    HAS_RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    if tl.load(tile + 3) == 0:
        _reconstruct_vector(m, mean_vectors, sent_vectors, out, residual, tile, HAS_RESIDUAL, ROWS * COLS)
    else:
        _reconstruct_matrix(m, mean_p, mean_q, sent_p, sent_q, out, residual, tile, HAS_RESIDUAL, ALIGN, ROWS, COLS)


@triton.jit
def _reconstruct_vector(
    m, mean, sent, out, residual, tile, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.load(tile + 7) + tl.arange(0, BLOCK)
    inside = i < tl.load(tile + 2)
    at, packed = tl.load(tile) + i, tl.load(tile + 4) + i
    if HAS_RESIDUAL:
        left = tl.load(m + at, inside, other=0.0) - tl.load(sent + packed, inside, other=0.0)
        tl.store(residual + at, left, inside)
    x = widen(tl.load(mean + packed, inside, other=0.0))
    tl.store(out + at, round_to(x, out.dtype.element_ty), inside)


@triton.jit
def _reconstruct_matrix(
    m, mean_p, mean_q, sent_p, sent_q, out, residual, tile,
    HAS_RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A tile of P Q^T of the means, and of M - P Q^T of what was sent."""
    offset = tl.multiple_of(tl.load(tile), ALIGN)
    rows, cols = tl.load(tile + 1), tl.multiple_of(tl.load(tile + 2), ALIGN)
    rank = tl.load(tile + 3)
    row = tl.load(tile + 6) + tl.arange(0, ROWS)
    col = tl.multiple_of(tl.load(tile + 7), 16) + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = offset + row[:, None] * cols + col[None, :]
    p, q = tl.load(tile + 4) + row, tl.load(tile + 5) + col
    if HAS_RESIDUAL:
        left = tl.load(m + at, inside, other=0.0)
        for k in range(rank):
            p_k = tl.load(sent_p + p + k * rows, row < rows, other=0.0)
            q_k = tl.load(sent_q + q + k * cols, col < cols, other=0.0)
            left -= p_k[:, None] * q_k[None, :]
        tl.store(residual + at, left, inside)
    mean = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(rank):
        p_k = widen(tl.load(mean_p + p + k * rows, row < rows, other=0.0))
        q_k = widen(tl.load(mean_q + q + k * cols, col < cols, other=0.0))
        mean += p_k[:, None] * q_k[None, :]
    tl.store(out + at, round_to(mean, out.dtype.element_ty), inside)


def project(
    gradient: Tensor, residual: Tensor | None, q: Tensor, plan: Plan, divisor: float, dtype: torch.dtype
) -> Projection:
    """M = gradient + residual; of every matrix P = M Q; behind them the vectors of M. Two launches.

    With one matrix M = [[1, 2], [3, 4]], Q = [[1], [0]] and divisor 2: P = [[1], [3]], wire [0.5, 1.5], sent [1, 3].

    Args:
        gradient: the bucket, flat: float32, bfloat16 or float16. With a residual and of float32 it becomes M.
        residual: as long, float32, or None. Not changed.
        q: packed Q^T of every matrix, float32.
        plan: where matrices, factors and vectors lie.
        divisor: of what is sent; the number of ranks.
        dtype: of what is sent: float32, bfloat16 or float16.

    Returns:
        See `Projection`. Sums are float32, and the same in every run: partial sums are added in their order.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous or too short, or a rank is above 64; it says which.

    Bytes an element of a float32 M: 12 with a residual (gradient and residual in, M out), 4 without. No fewer are
    possible; partial sums add 8 rank / 1024.
    """
    tables = _checked_tables(gradient, residual, plan, dtype)
    check("q", q, (torch.float32,), plan.q.numel)
    return _launch_project(gradient, residual, q, tables, tables.project, divisor, dtype, transposed=False)


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
    """M = gradient + residual; of every matrix Q = M^T P; behind them, if asked for, the vectors of M. Two launches.

    With one matrix M = [[1, 2], [3, 4]], P = [[1], [0]] and divisor 2: Q = [[1], [2]], wire [0.5, 1], sent [1, 2].

    Arguments, result and errors as of `project`, with P for Q.

    Bytes an element of a float32 M: 12 with a residual, 4 without; partial sums add 8 rank / 128.
    """
    tables = _checked_tables(gradient, residual, plan, dtype)
    check("p", p, (torch.float32,), plan.p.numel)
    tiles = tables.project_t_with_vectors if with_vectors else tables.project_t
    return _launch_project(gradient, residual, p, tables, tiles, divisor, dtype, transposed=True)


def _checked_tables(gradient: Tensor, residual: Tensor | None, plan: Plan, dtype: torch.dtype) -> PlanTables:
    tables = plan_tables(plan, gradient.device)
    check("gradient", gradient, FLOATS, 0)
    check("residual", residual, (torch.float32,), gradient.numel())
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}; it must be one of {FLOATS}")
    check_rank(tables.max_rank)
    return tables


def _launch_project(
    gradient: Tensor,
    residual: Tensor | None,
    factor: Tensor,
    tables: PlanTables,
    tiles: ProjectionTiles,
    divisor: float,
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> Projection:
    in_place = gradient.dtype == torch.float32
    m = gradient if in_place else torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)
    flags = residual is not None, not in_place or residual is not None  # HAS_RESIDUAL, STORE_M
    partials = torch.empty(tiles.partial_numel, dtype=torch.float32, device=m.device)
    if len(tiles.tiles):
        constants = projection_constants(tables.max_rank, transposed=transposed)
        _project[(len(tiles.tiles),)](
            gradient, residual, m, factor, partials, tiles.tiles, *flags, transposed, tables.align, **constants,
            **LAUNCH,
        )  # fmt: skip
    numel = tiles.packed_numel
    wire = torch.empty(numel, dtype=dtype, device=m.device)
    sent = torch.empty(numel, dtype=torch.float32, device=m.device)
    if len(tiles.chunks):
        _sum_partials[(len(tiles.chunks),)](
            partials,
            gradient,
            residual,
            m,
            wire,
            sent,
            tiles.chunks,
            float(divisor),
            *flags,
            CHUNK,
            **LAUNCH,
            num_warps=4,
        )
    return Projection(m, wire, sent)


def projection_constants(rank: int, *, transposed: bool) -> dict[str, int]:
    """ROWS, COLS and STEPS of `_project`: how it goes through a tile; and the number of warps.

    Up to rank 8 each thread keeps rank sums for each of its numbers, and adds threads' up once a tile: 16 x 128 x rank
    sums are 64 registers a thread at rank 8. Above, tl.dot adds up at each step; what it holds of both sides must fit
    into the registers too.
    """
    r = max(1, triton.next_power_of_2(rank))
    rows = 16
    cols = 64 if not transposed and r > BUILT_IN_REGISTERS else 128
    tile_rows, tile_cols = (TILE_T_ROWS, TILE_T_COLS) if transposed else (TILE_ROWS, TILE_COLS)
    steps = tile_rows // rows if transposed else tile_cols // cols
    narrow = not transposed and r in (1, 2, 16, 32)
    warps = 4 if narrow else 16 if transposed and r == MAX_RANK else 8
    return {"R": r, "ROWS": rows, "COLS": cols, "STEPS": steps, "num_warps": warps}


def reconstruct_(m: Tensor, plan: Plan, mean: Factors, sent: Factors, out: Tensor, residual: Tensor | None) -> None:
    """out = P Q^T of the mean factors; residual = M - P Q^T of what this rank sent. One launch.

    With M = [[1, 2], [3, 4]], mean and sent P = [[1], [0]], Q = [[1], [2]]: out [[1, 2], [0, 0]], residual
    [[0, 0], [3, 4]].

    Args:
        m: float32; it may be `out` itself.
        plan: where matrices, factors and vectors lie.
        mean: float32, bfloat16 or float16.
        sent: float32.
        out: float32, bfloat16 or float16: overwritten.
        residual: float32, overwritten; or None.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous or too short; it says which.

    Bytes an element of a float32 M: 12 with a residual (M in, gradient and residual out), 4 without.
    """
    tables = plan_tables(plan, m.device)
    check("m", m, (torch.float32,), 0)
    check("out", out, FLOATS, m.numel())
    check("residual", residual, (torch.float32,), m.numel())
    numels = plan.p.numel, plan.q.numel, plan.vectors_numel
    for name, x, numel in zip(Factors._fields, mean, numels, strict=True):
        check(f"mean.{name}", x, FLOATS, numel)
    for name, x, numel in zip(Factors._fields, sent, numels, strict=True):
        check(f"sent.{name}", x, (torch.float32,), numel)
    if len(tables.reconstruct):
        _reconstruct[(len(tables.reconstruct),)](
            m, *mean, *sent, out, residual, tables.reconstruct, residual is not None, tables.align,
            TILE_OUT_ROWS, TILE_OUT_COLS, **LAUNCH, num_warps=8,
        )  # fmt: skip
