"""Two training tasks that need no download: a byte-level GPT on Python's own source, and handwritten digits.

Used by benchmarks.convergence. Every rank trains on batches of its own; the held-out part is shared out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from examples.train_ddp import GPT, batches, standard_library_text

HELD_OUT_TEXT = 200_000  # bytes at the text's end
HELD_OUT_PIECES = 32
HELD_OUT_DIGITS = 600
GPT_BATCH, DIGITS_BATCH = 4, 32  # a rank and step


@dataclass(frozen=True)
class Problem:
    """One rank's share of a task: a model from the seed's start, endless batches, and its part of the held-out data."""

    model: nn.Module
    batches: Iterator[tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long.

    Args:
        label: for tables.
        steps: of a run of plain DDP or bf16; hooks that compress more may take `patience` times as many.
        evaluate_every: so many steps.
        learning_rates: the grid that bf16 is tuned on.
        momentum: of SGD; None is AdamW.
        make: (seed, rank, world size) -> Problem.
    """

    label: str
    steps: int
    patience: float
    evaluate_every: int
    learning_rates: tuple[float, ...]
    momentum: float | None
    make: Callable[[int, int, int], Problem]


class DigitsNet(nn.Sequential):
    """Images (batch, 1, 8, 8) in, logits of the ten digits out: two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def make_gpt(seed: int, rank: int, world_size: int) -> Problem:
    torch.manual_seed(seed)
    model = GPT()
    text = _text()
    data = batches(text[:-HELD_OUT_TEXT], GPT_BATCH, model.context, seed=_data_seed(seed, rank))
    x, y = next(batches(text[-HELD_OUT_TEXT:], HELD_OUT_PIECES, model.context, seed=0))
    return Problem(model, data, (x[rank::world_size], y[rank::world_size]))


@cache
def _text() -> Tensor:
    return standard_library_text()


def make_digits(seed: int, rank: int, world_size: int) -> Problem:
    torch.manual_seed(seed)
    model = DigitsNet()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # one split, whatever the seed
    train, held_out = order[HELD_OUT_DIGITS:][rank::world_size], order[:HELD_OUT_DIGITS][rank::world_size]
    data = _draw(images[train], labels[train], torch.Generator().manual_seed(_data_seed(seed, rank)))
    return Problem(model, data, (images[held_out], labels[held_out]))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy; logits are (..., classes), y is (...)."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


@torch.no_grad()
def evaluate(problem: Problem) -> Tensor:
    """Of this rank's held-out part: [sum of losses, number right, number]. Added up over ranks it is the whole's."""
    x, y = problem.held_out
    logits = problem.model(x).flatten(0, -2)
    right = (logits.argmax(1) == y.flatten()).sum()
    return torch.stack([F.cross_entropy(logits, y.flatten(), reduction="sum"), right, torch.tensor(y.numel())]).double()


def _draw(images: Tensor, labels: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        chosen = torch.randint(len(labels), (DIGITS_BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


def _data_seed(seed: int, rank: int) -> int:
    return 1000 * seed + rank + 1


TASKS = {
    "gpt": Task(
        "byte-level GPT, AdamW",
        steps=210,
        patience=1.4,
        evaluate_every=10,
        learning_rates=(2.5e-4, 5e-4, 1e-3, 2e-3),
        momentum=None,
        make=make_gpt,
    ),
    "digits": Task(
        "digits, CNN, SGD with momentum",
        steps=200,
        patience=1.5,
        evaluate_every=5,
        learning_rates=(0.02, 0.05, 0.1, 0.2),
        momentum=0.9,
        make=make_digits,
    ),
}
