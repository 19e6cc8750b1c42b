"""Descriptor tables: which part of which matrix each program of a grouped PowerSGD kernel works on.

One launch treats all matrices of a bucket. Its grid has one program a tile, and program i finds what it needs in row i
of a table of int64. Tables are built once for a bucket layout and device, and stay on the device.
"""

from dataclasses import dataclass
from math import gcd
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from commhooks.triton_kernels.reference import Matrix, Plan, Side

# A tile of M is 64 kB of float32: long enough a stream that a program's partial sums (rank numbers a row of the tile)
# are few beside it, short enough that a 25 MB bucket makes 400 programs, three for each multiprocessor of an H200.
TILE_ROWS, TILE_COLS = 16, 1024  # of P = M Q, which sums over columns
TILE_T_ROWS, TILE_T_COLS = 128, 128  # of Q = M^T P, which sums over rows; 128 columns are a 512-byte run of a row
TILE_OUT_ROWS, TILE_OUT_COLS = 16, 256  # of P Q^T, which sums over nothing
CHUNK = 1024  # numbers of a packed factor or vector to a program


@dataclass(frozen=True)
class ProjectionTiles:
    """Of one product: `tiles` of M, each writing partial sums; `chunks` of the packed result, each adding some up.

    tiles: offset of M, rows, cols, rank, offset of the given factor, offset of the partial sums, first row, first col.
    chunks: offset in the packed result, numel, offset of the first partial sum, their distance, their number, offset
        in the bucket of what is copied where their number is 0: a vector's.
    """

    tiles: Tensor
    chunks: Tensor
    partial_numel: int
    packed_numel: int


@dataclass(frozen=True)
class PlanTables:
    """Of a plan. `align` is a power of two, at most 16, that divides all matrices' offsets and columns."""

    align: int
    max_rank: int
    project: ProjectionTiles
    project_t: ProjectionTiles
    project_t_with_vectors: ProjectionTiles
    reconstruct: Tensor  # offset, rows, cols, rank (0: a vector's), offset of P or of the vector, of Q, first row, col


@dataclass(frozen=True)
class SideTables:
    """Of a side's factors.

    factors: offset, rank, length, number of rows in the factors before.
    chunks: offset in the packed factors, numel, factor, offset of the factor.
    """

    max_rank: int
    factors: Tensor
    chunks: Tensor


_plan_tables: WeakKeyDictionary[Plan, PlanTables] = WeakKeyDictionary()
_side_tables: WeakKeyDictionary[Side, SideTables] = WeakKeyDictionary()


def plan_tables(plan: Plan, device: torch.device) -> PlanTables:
    tables = _plan_tables.get(plan)
    if tables is None or tables.reconstruct.device != device:
        tables = _plan_tables[plan] = PlanTables(
            align=_alignment(plan),
            max_rank=max((x.rank for x in plan.matrices), default=0),
            project=_projection(plan, device, transposed=False, with_vectors=True),
            project_t=_projection(plan, device, transposed=True, with_vectors=False),
            project_t_with_vectors=_projection(plan, device, transposed=True, with_vectors=True),
            reconstruct=_table(_reconstruction(plan), 8, device),
        )
    return tables


def side_tables(side: Side, device: torch.device) -> SideTables:
    tables = _side_tables.get(side)
    if tables is None or tables.factors.device != device:
        factors: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        rows = 0
        for i, x in enumerate(side.factors):
            factors.append((x.offset, x.rank, x.length, rows))
            chunks += [(start, numel, i, x.offset) for start, numel in _pieces(x.offset, x.numel)]
            rows += x.rank
        tables = _side_tables[side] = SideTables(
            max_rank=max(side.ranks, default=0), factors=_table(factors, 4, device), chunks=_table(chunks, 4, device)
        )
    return tables


def _projection(plan: Plan, device: torch.device, *, transposed: bool, with_vectors: bool) -> ProjectionTiles:
    tiles: list[tuple[int, ...]] = []
    chunks: list[tuple[int, ...]] = []
    partial = 0
    rows, cols = (TILE_T_ROWS, TILE_T_COLS) if transposed else (TILE_ROWS, TILE_COLS)
    for x in plan.matrices:
        given, made = (x.p, x.q) if transposed else (x.q, x.p)
        splits = -(-x.rows // rows) if transposed else -(-x.cols // cols)
        for row in range(0, x.rows, rows):
            for col in range(0, x.cols, cols):
                split = row // rows if transposed else col // cols
                tiles.append(_tile(x, given.offset, partial + split * made.numel, row, col))
        for start, numel in _pieces(made.offset, made.numel):
            chunks.append((start, numel, partial + start - made.offset, made.numel, splits, 0))
        partial += splits * made.numel
    packed = plan.q.numel if transposed else plan.p.numel
    if with_vectors:
        for offset, size in plan.vectors:
            chunks += [(packed + start, numel, 0, 0, 0, offset + start) for start, numel in _pieces(0, size)]
            packed += size
    return ProjectionTiles(_table(tiles, 8, device), _table(chunks, 6, device), partial, packed)


def _reconstruction(plan: Plan) -> list[tuple[int, ...]]:
    tiles: list[tuple[int, ...]] = []
    for x in plan.matrices:
        for row in range(0, x.rows, TILE_OUT_ROWS):
            tiles += [_tile(x, x.p.offset, x.q.offset, row, col) for col in range(0, x.cols, TILE_OUT_COLS)]
    packed = 0
    for offset, size in plan.vectors:
        for start in range(0, size, TILE_OUT_ROWS * TILE_OUT_COLS):
            tiles.append((offset, 1, size, 0, packed, 0, 0, start))
        packed += size
    return tiles


def _tile(x: Matrix, first: int, second: int, row: int, col: int) -> tuple[int, ...]:
    return x.offset, x.rows, x.cols, x.rank, first, second, row, col


def _pieces(offset: int, numel: int) -> list[tuple[int, int]]:
    """(offset, numel) of pieces of at most CHUNK."""
    return [(offset + start, min(CHUNK, numel - start)) for start in range(0, numel, CHUNK)]


def _alignment(plan: Plan) -> int:
    return gcd(16, *(x.offset for x in plan.matrices), *(x.cols for x in plan.matrices))


def _table(rows: list[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, width)
