"""Error feedback: what compression left out of a gradient is added to the next one (arXiv:1901.09847)."""

from collections.abc import Hashable

from torch import Tensor

from commhooks.memory import ParameterMemory


class ErrorFeedback(ParameterMemory):
    """A model's residuals: one for each parameter, zero at the start, in the compute dtype.

    An algorithm adds the bucket's residual, `flat`, to its gradient, and writes into `next` what of the sum this rank
    did not send.
    """

    def __init__(self) -> None:
        super().__init__(numel=lambda parameter: parameter.numel, start=lambda _, piece: piece.zero_())

    @property
    def residuals(self) -> dict[Hashable, Tensor]:
        """Each parameter's residual, flat, by the parameter's key."""
        return self.pieces
