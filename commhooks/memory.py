"""Tensors that belong to parameters, stored flat for each bucket."""

from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

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
        self._flat: WeakKeyDictionary[Layout, Tensor] = WeakKeyDictionary()
        self.pieces: dict[Hashable, Tensor] = {}

    def flat(
        self,
        bucket: Bucket,
        numel: Callable[[Slice], int],
        dtype: torch.dtype,
        start: Callable[[Slice, Tensor], object],
    ) -> Tensor:
        """The bucket's flat tensor, `numel(parameter)` elements for each parameter in their order.

        A piece that was not there before is filled by `start(parameter, piece)`.
        """
        flat = self._flat.get(bucket.layout)
        if flat is None:
            parameters = bucket.layout.slices
            numels = [numel(x) for x in parameters]
            flat = torch.empty(sum(numels), dtype=dtype, device=bucket.buffer.device)
            for parameter, piece in zip(parameters, flat.split(numels), strict=True):
                if parameter.key in self.pieces:
                    piece.copy_(self.pieces[parameter.key])
                else:
                    start(parameter, piece)
                self.pieces[parameter.key] = piece
            self._flat[bucket.layout] = flat
        return flat
