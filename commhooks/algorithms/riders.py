"""Parameters that are not worth compressing: they ride along, packed, with what is sent of the others."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from commhooks.bucket import Layout


class Riders:
    """The parameters of a bucket that ride along, and their places: vectors, and those below `min_numel` entries."""

    def __init__(self, layout: Layout, min_numel: int) -> None:
        self.slices = [x for x in layout.slices if len(x.shape) < 2 or x.numel < max(1, min_numel)]
        self.numels = [x.numel for x in self.slices]
        self.numel = sum(self.numels)
        self.alone = len(self.slices) == len(layout.slices)  # nothing is compressed

    def take_(self, flat: Tensor) -> Tensor:
        """Their elements of `flat`, packed; which are zero in `flat` from then on."""
        if not self.slices:
            return flat.new_empty(0)
        views = self._views(flat)
        packed = torch.cat(views)
        torch._foreach_zero_(views)
        return packed

    def put_(self, packed: Tensor, flat: Tensor) -> None:
        """Write the packed elements back into their places in `flat`."""
        if self.slices:
            torch._foreach_copy_(self._views(flat), list(packed.split(self.numels)))

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [x.of(flat) for x in self.slices]


class RidersByLayout:
    """Each bucket's riders, looked for once a layout."""

    def __init__(self, min_numel: int) -> None:
        self._min_numel = min_numel
        self._known: WeakKeyDictionary[Layout, Riders] = WeakKeyDictionary()

    def __getitem__(self, layout: Layout) -> Riders:
        riders = self._known.get(layout)
        if riders is None:
            riders = self._known[layout] = Riders(layout, self._min_numel)
        return riders
