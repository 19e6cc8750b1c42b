"""Were all numbers of a step finite? Whether the step counts depends on it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Verdict:
    """Whether the largest magnitudes that the buckets of a step have received are finite: the same on every rank.

    On a GPU the answer travels to the host while training goes on, and is waited for when the next step begins: what
    was queued since then keeps the GPU busy meanwhile. Made on the stream that computed `worst`.
    """

    def __init__(self, worst: Sequence[Tensor]) -> None:
        self._finite = torch.stack([x.double() for x in worst]).isfinite().all()
        self._arrival: torch.cuda.Event | None = None
        if self._finite.is_cuda:
            here = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._finite = here.copy_(self._finite, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    @property
    def is_in(self) -> bool:
        """False while the host would have to wait for it."""
        return self._arrival is None or self._arrival.query()

    def is_finite(self) -> bool:
        if self._arrival is not None:
            self._arrival.synchronize()
        return bool(self._finite)
