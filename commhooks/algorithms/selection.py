"""What a rank selected from a bucket, as it goes over the wire: one packed buffer of bytes, values and indices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks import ops


@dataclass(frozen=True)
class BlockSelection:
    """The k largest of every block of `block_size` of `numel` entries, packed as by `ops.select_blocks`."""

    numel: int
    k: int
    wire_dtype: torch.dtype
    block_size: int

    @property
    def slots(self) -> int:
        return ops.blocks(self.numel, self.block_size) * self.k

    @property
    def nbytes(self) -> int:
        return ops.packed_bytes(self.numel, self.k, self.block_size, self.wire_dtype)

    @property
    def values_nbytes(self) -> int:
        return self.slots * self.wire_dtype.itemsize

    @property
    def index_nbytes(self) -> int:
        return self.slots * ops.block_index_dtype(self.block_size).itemsize

    def select(self, gradient: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """M less what is selected, and the packed buffer."""
        return ops.select_blocks(gradient, residual, self.k, self.block_size, self.wire_dtype)

    def sum_(self, gathered: Tensor, divisor: float, out: Tensor) -> None:
        """out = the sum of packed buffers (W, bytes), in rank order, / divisor."""
        ops.sum_blocks_(gathered, self.k, self.block_size, self.wire_dtype, divisor, out)

    def values(self, packed: Tensor) -> Tensor:
        """The values in packed buffers (..., bytes), flat."""
        return packed[..., : self.values_nbytes].flatten().view(self.wire_dtype)

    def index_bytes(self, packed: Tensor) -> Tensor:
        """The indices in one packed buffer, as they go over the wire."""
        return packed[self.values_nbytes :][: self.index_nbytes]

    def places(self, index_bytes: Tensor) -> Tensor:
        """Where the selected entries lie, int64."""
        indices = index_bytes.view(ops.block_index_dtype(self.block_size))
        return ops.places(indices, self.numel, self.k, self.block_size)

    # Ranges of whole blocks, one a rank; the last ones may be shorter, or empty.

    def range_numel(self, ranges: int) -> int:
        return -(-ops.blocks(self.numel, self.block_size) // ranges) * self.block_size

    def range_of(self, i: int, ranges: int) -> tuple[int, int]:
        """The entries of the i-th range."""
        size = self.range_numel(ranges)
        return min(i * size, self.numel), min((i + 1) * size, self.numel)

    def part(self, ranges: int) -> "BlockSelection":
        """The selection from a whole range."""
        return BlockSelection(self.range_numel(ranges), self.k, self.wire_dtype, self.block_size)

    def split(self, packed: Tensor, part: "BlockSelection", ranges: int) -> Tensor:
        """The same entries as packed buffers of `ranges` parts: (ranges, bytes)."""
        rows = torch.zeros(ranges, part.nbytes, dtype=torch.uint8, device=packed.device)
        index = self.values_nbytes
        _spread(packed[:index], rows[:, : part.values_nbytes])
        _spread(self.index_bytes(packed), rows[:, part.values_nbytes :][:, : part.index_nbytes])
        return rows

    def join(self, rows: Tensor, part: "BlockSelection") -> Tensor:
        """What `split` has split, together again."""
        packed = torch.zeros(self.nbytes, dtype=torch.uint8, device=rows.device)
        index = self.values_nbytes
        packed[:index] = rows[:, : part.values_nbytes].flatten()[:index]
        indices = rows[:, part.values_nbytes :][:, : part.index_nbytes].flatten()
        packed[index:][: self.index_nbytes] = indices[: self.index_nbytes]
        return packed


def _spread(flat: Tensor, rows: Tensor) -> None:
    """Row by row, as far as it goes."""
    whole, rest = divmod(len(flat), rows.shape[1])
    rows[:whole] = flat[: whole * rows.shape[1]].view(whole, rows.shape[1])
    if rest:
        rows[whole, :rest] = flat[whole * rows.shape[1] :]


@dataclass(frozen=True)
class ExactSelection:
    """The k largest of `numel` entries. Packed: the indices, int32, then the values, up to whole `ops.ALIGNMENT`s."""

    numel: int
    k: int
    wire_dtype: torch.dtype

    @property
    def index_nbytes(self) -> int:
        return self.k * ops.exact_index_dtype(self.numel).itemsize

    @property
    def nbytes(self) -> int:
        return -(-(self.index_nbytes + self.k * self.wire_dtype.itemsize) // ops.ALIGNMENT) * ops.ALIGNMENT

    def select(self, gradient: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """M less what is selected, and the packed buffer."""
        m, values, indices = ops.select_exact(gradient, residual, self.k, self.wire_dtype)
        packed = torch.zeros(self.nbytes, dtype=torch.uint8, device=m.device)
        packed[: self.index_nbytes] = indices.view(torch.uint8)
        packed[self.index_nbytes :][: values.nbytes] = values.view(torch.uint8)
        return m, packed

    def sum_(self, gathered: Tensor, divisor: float, out: Tensor) -> None:
        """out = the sum of packed buffers (W, bytes), in rank order, / divisor."""
        indices = self._indices(gathered)
        ops.sum_sparse_(self.values(gathered).view(indices.shape), indices, divisor, out)

    def values(self, packed: Tensor) -> Tensor:
        """The values in packed buffers (..., bytes), flat."""
        nbytes = self.k * self.wire_dtype.itemsize
        return packed[..., self.index_nbytes :][..., :nbytes].flatten().view(self.wire_dtype)

    def index_bytes(self, packed: Tensor) -> Tensor:
        """The indices in one packed buffer, as they go over the wire."""
        return packed[: self.index_nbytes]

    def places(self, index_bytes: Tensor) -> Tensor:
        """Where the selected entries lie, int64."""
        return self._indices(index_bytes).long()

    def _indices(self, packed: Tensor) -> Tensor:
        dtype = ops.exact_index_dtype(self.numel)
        return packed[..., : self.index_nbytes].flatten().view(dtype).view(*packed.shape[:-1], self.k)


AnySelection = BlockSelection | ExactSelection
