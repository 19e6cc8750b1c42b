"""The models of the projection: their parameters' shapes, the buckets they make, and what a step of theirs computes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from benchmarks.gpu_shapes import MIB, Shape, gpt2_small, resnet50
from commhooks.bucket import Layout, lay_out

DEFAULT_CAP_MB, DEFAULT_FIRST_MB = 25, 1  # DDP's buckets, and its first one, which may leave early


def llama_7b() -> list[Shape]:
    """Llama 7B: 6.74 billion parameters; 32 layers, no biases, embedding and head not shared."""
    width, inner, vocabulary = 4096, 11008, 32000
    layer: list[Shape] = [*[(width, width)] * 4, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(vocabulary, width), *layer * 32, (width,), (vocabulary, width)]


def ddp_buckets(shapes: Iterable[Shape], itemsize: int, cap_mb: float | None = None) -> list[Layout]:
    """As DDP makes them: the last parameters, whose gradients are ready first, come first; full at the cap or above."""
    caps = [(cap_mb or DEFAULT_CAP_MB) * MIB, DEFAULT_FIRST_MB * MIB] if cap_mb is None else [cap_mb * MIB]
    buckets: list[list[Shape]] = []
    room = 0.0
    for shape in reversed(list(shapes)):
        if room <= 0:
            buckets.append([])
            room = caps.pop() if len(caps) > 1 else caps[0]
        buckets[-1].append(shape)
        room -= prod(shape) * itemsize
    return [
        lay_out(index, [(f"{index}.{i}", f"{index}.{i}", shape) for i, shape in enumerate(bucket)])
        for index, bucket in enumerate(buckets)
    ]


@dataclass(frozen=True)
class Architecture:
    """A model in training.

    Args:
        name: for tables.
        shapes: makes the parameters' shapes, in the model's order.
        gradient_bytes: of one gradient element.
        batch: what a rank computes in one step, in words.
        flops: floating-point operations a step and rank, forward and backward.
    """

    name: str
    shapes: Callable[[], list[Shape]]
    gradient_bytes: int
    batch: str
    flops: float

    def numel(self) -> int:
        return sum(map(prod, self.shapes()))

    def buckets(self) -> list[Layout]:
        return ddp_buckets(self.shapes(), self.gradient_bytes)


# A step takes 6 operations for each parameter and token, forward and backward. ResNet-50 reuses its weights all over
# the image: 4.09 G multiply-adds forward at 224 x 224, twice as many backward.
ARCHITECTURES = (
    Architecture("ResNet-50", resnet50, 4, "64 images", 64 * 3 * 2 * 4.09e9),
    Architecture("GPT-2 small", gpt2_small, 4, "16 x 1024 tokens", 6 * 124_439_808 * 16 * 1024),
    Architecture("Llama 7B", llama_7b, 2, "1 x 4096 tokens", 6 * 6_738_415_616 * 4096),
)
