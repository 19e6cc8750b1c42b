"""How much compression leaves out of each parameter."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commhooks.bucket import Bucket
from commhooks.comm import Collective, Comm
from commhooks.unused import spare_unused

if TYPE_CHECKING:
    from commhooks.state import HookState

Algorithm = Callable[[Any, Bucket, Comm], Coroutine[Collective, Tensor, Tensor]]


class CompressionErrors:
    """By parameter: the norm of what was not sent, and of all there was to send. One bucket a step is looked at."""

    def __init__(self) -> None:
        self.latest: dict[str, tuple[Tensor, Tensor]] = {}  # of a step that may not count
        self._norms: dict[str, tuple[Tensor, Tensor]] = {}
        self._turn = 0

    def look_at(self, bucket: Bucket) -> bool:
        """Is it this bucket's turn?"""
        looked = bucket.index == self._turn
        if bucket.is_last:
            self._turn = (self._turn + 1) % (bucket.index + 1)
        return looked

    def commit(self) -> None:
        self._norms |= self.latest
        self.latest = {}

    def discard(self) -> None:
        self.latest = {}

    def by_parameter(self) -> dict[str, float]:
        return {name: _ratio(float(rest), float(whole)) for name, (rest, whole) in self._norms.items()}

    def overall(self) -> float:
        rest, whole = (sum(float(x[i]) ** 2 for x in self._norms.values()) ** 0.5 for i in (0, 1))
        return _ratio(rest, whole)


def start(
    algorithm: Algorithm, state: "HookState", bucket: Bucket, comm: Comm
) -> Coroutine[Collective, Tensor, Tensor]:
    """The coroutine of a bucket: unused parameters are spared, and its error measured, where the state wants that."""
    if state.spares_unused and (state.own or state.common) and not state.reduces_exactly(bucket):
        algorithm = partial(spare_unused, algorithm)
    if state.track_error and state.errors.look_at(bucket):
        return _tracked(algorithm, state, bucket, comm)
    return algorithm(state, bucket, comm)


async def _tracked(algorithm: Algorithm, state: "HookState", bucket: Bucket, comm: Comm) -> Tensor:
    if state.reduces_exactly(bucket):
        return await algorithm(state, bucket, comm)
    feedback, slices = state.own["residual"], bucket.layout.slices
    before = feedback.pieces_of(bucket, after=False)
    gradients = bucket.buffer.split(bucket.layout.numels)
    whole = [torch.linalg.vector_norm(x + piece) for x, piece in zip(gradients, before, strict=True)]
    result = await algorithm(state, bucket, comm)
    if feedback.is_written(bucket):
        rest = [torch.linalg.vector_norm(piece) for piece in feedback.pieces_of(bucket, after=True)]
        norms = zip(rest, whole, strict=True)
        state.errors.latest |= {x.name: both for x, both in zip(slices, norms, strict=True)}
    return result


def _ratio(rest: float, whole: float) -> float:
    return rest / whole if whole else 0.0
