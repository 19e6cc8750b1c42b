"""A bucket's parameters as sparse compressors see them: some packed for selection, the others riding along as they are.

Selection must not depend on how DDP has cut its buckets: they change after the first iteration, and with a resume. So
every compressed parameter begins a block of its own.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from commhooks.bucket import Layout, Slice
from commhooks.ops import compute_dtype


class Packing:
    """Where the parameters of a bucket lie in M, the flat tensor that is selected from, and which ride along.

    Vectors ride along, and parameters below `min_numel` entries. The others begin at multiples of `alignment` in M,
    with zeros in between.
    """

    def __init__(self, layout: Layout, min_numel: int, alignment: int) -> None:
        self.riders: list[Slice] = []
        self.packed: list[tuple[Slice, int]] = []  # and where it begins in M
        self.numel = 0
        self._cuts: list[int] = []  # of M: each parameter, and the zeros behind it
        packed_at: list[int] = []  # of the bucket's slices, which ones
        riders_at: list[int] = []
        for i, x in enumerate(layout.slices):
            if len(x.shape) < 2 or x.numel < max(1, min_numel):
                self.riders.append(x)
                riders_at.append(i)
            else:
                self.packed.append((x, self.numel))
                packed_at.append(i)
                zeros = -x.numel % alignment
                self._cuts += [x.numel, zeros]
                self.numel += x.numel + zeros
        self._order = packed_at + riders_at
        self._numels = layout.numels
        self._riders_numels = [x.numel for x in self.riders]
        self._is_dense = not any(self._cuts[1::2])

    def gather(self, gradient: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """M = gradient + residual, (numel,), and the riders' part of that sum, packed; in the compute dtype."""
        dtype = compute_dtype(gradient.dtype)
        make = torch.empty if self._is_dense else torch.zeros
        m = make(self.numel, dtype=dtype, device=gradient.device)
        riding = torch.empty(sum(self._riders_numels), dtype=dtype, device=gradient.device)
        torch._foreach_copy_(self._pieces(m, riding), self._slices(gradient))
        if residual is not None:
            torch._foreach_add_(self._pieces(m, riding), self._slices(residual))
        return m, riding

    def scatter_(self, m: Tensor, riding: Tensor, out: Tensor) -> None:
        """Write M and the riders into their places in the bucket-shaped `out`."""
        torch._foreach_copy_(self._slices(out), self._pieces(m, riding))

    def _slices(self, flat: Tensor) -> list[Tensor]:
        slices = flat.split(self._numels)
        return [slices[i] for i in self._order]

    def _pieces(self, m: Tensor, riding: Tensor) -> list[Tensor]:
        return [*m.split(self._cuts)[::2], *riding.split(self._riders_numels)]


class PackingByLayout:
    """Each bucket's packing, made once a layout."""

    def __init__(self, min_numel: int, alignment: int = 1) -> None:
        self._min_numel, self._alignment = min_numel, alignment
        self._known: WeakKeyDictionary[Layout, Packing] = WeakKeyDictionary()

    def __getitem__(self, layout: Layout) -> Packing:
        packing = self._known.get(layout)
        if packing is None:
            packing = self._known[layout] = Packing(layout, self._min_numel, self._alignment)
        return packing
