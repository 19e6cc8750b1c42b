"""Tensors that belong to parameters, stored flat for each bucket."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from commhooks.bucket import Bucket, Layout, Slice


class ParameterMemory:
    """One tensor for each parameter, kept as pieces of one flat tensor for each bucket.

    DDP rebuilds its buckets after the first iteration. When a bucket comes with another layout, its flat tensor is
    laid out anew and every piece is copied from wherever its parameter lay before.

    Attributes:
        pieces: each parameter's tensor, flat, by the parameter's key.
    """

    def __init__(self) -> None:
        self.pieces: dict[Hashable, Tensor] = {}
        self._homes: dict[Hashable, Layout] = {}  # whose flat tensor a parameter's piece lies in
        self._flat: dict[Layout, Tensor] = {}

    def flat(
        self,
        bucket: Bucket,
        numel: Callable[[Slice], int],
        dtype: torch.dtype,
        start: Callable[[Slice, Tensor], object],
    ) -> Tensor:
        """The bucket's flat tensor, made of `numel(parameter)` elements for each parameter in their order.

        A piece that was not there before is filled by `start(parameter, piece)`.
        """
        layout = bucket.layout
        flat = self._flat.get(layout)
        if flat is None:
            numels = [numel(x) for x in layout.slices]
            flat = torch.empty(sum(numels), dtype=dtype, device=bucket.buffer.device)
            for parameter, piece in zip(layout.slices, flat.split(numels), strict=True):
                self._move(parameter, piece, layout, start)
            self._flat[layout] = flat
        return flat

    def _move(self, parameter: Slice, piece: Tensor, layout: Layout, start: Callable[[Slice, Tensor], object]) -> None:
        key = parameter.key
        if key in self.pieces:
            piece.copy_(self.pieces[key])
            self._flat.pop(self._homes[key], None)  # no longer whole
        else:
            start(parameter, piece)
        self.pieces[key], self._homes[key] = piece, layout
