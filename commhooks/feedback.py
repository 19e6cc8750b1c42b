"""Error feedback: what compression left out of a gradient is added to the next one (arXiv:1901.09847)."""

from collections.abc import Hashable

from torch import Tensor

from commhooks import ops
from commhooks.bucket import Bucket
from commhooks.memory import ParameterMemory


class ErrorFeedback:
    """A model's residuals: one for each parameter, zero at the start, in the compute dtype.

    An algorithm adds the bucket's residual to its gradient, and once the result is known leaves in it what of the sum
    this rank did not send. Until then the residual is unchanged, so a step that fails loses nothing.
    """

    def __init__(self) -> None:
        self._memory = ParameterMemory()

    @property
    def residuals(self) -> dict[Hashable, Tensor]:
        """Each parameter's residual, flat, by the parameter's key."""
        return self._memory.pieces

    def residual(self, bucket: Bucket) -> Tensor:
        """The bucket's residual, flat, to be updated in place."""
        dtype = ops.compute_dtype(bucket.buffer.dtype)
        return self._memory.flat(bucket, lambda x: x.numel, dtype, lambda _, piece: piece.zero_())
