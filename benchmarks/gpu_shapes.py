"""Gradient buckets as real models make them: their parameters' shapes, in the models' order."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log, prod

import torch

from commhooks.bucket import Layout, lay_out

Shape = tuple[int, ...]
MIB = 2**20  # what DDP's bucket_cap_mb counts in


@dataclass(frozen=True)
class BucketShapes:
    """One bucket of a model; `megabytes` is the limit that it was cut by, 25 for DDP's default."""

    model: str
    megabytes: int
    dtype: torch.dtype
    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.model}, {self.megabytes} MB {dtype}"

    def layout(self) -> Layout:
        names = [f"{self.model}.{i}" for i in range(len(self.shapes))]
        return lay_out(0, [(name, name, shape) for name, shape in zip(names, self.shapes, strict=True)])


def resnet50() -> list[Shape]:
    """torchvision's ResNet-50: 25.6 million parameters, 161 tensors, most of them small."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for conv in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [conv, conv[:1], conv[:1]]
            if block == 0:  # the shortcut
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_small() -> list[Shape]:
    """Hugging Face's GPT-2 small: 124.4 million parameters. Its embedding (154 MB) is larger than any bucket here."""
    shapes: list[Shape] = [(50257, 768), (1024, 768)]
    for _ in range(12):
        shapes += [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
        shapes += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [*shapes, (768,), (768,)]


def llama() -> list[Shape]:
    """Layers of TinyLlama 1.1B, without its embeddings: no biases, few and large matrices, grouped keys and values."""
    width, keys, inner = 2048, 256, 5632
    shapes: list[Shape] = []
    for _ in range(22):
        shapes += [(width, width), (keys, width), (keys, width), (width, width)]
        shapes += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return shapes


MODELS: dict[str, Callable[[], list[Shape]]] = {"ResNet-50": resnet50, "GPT-2 small": gpt2_small, "Llama-like": llama}


def partition(shapes: Iterable[Shape], limit: int) -> list[tuple[Shape, ...]]:
    """Cut the parameters, in their order, into buckets of at most `limit` elements; a larger one is its own bucket.

    >>> partition([(3,), (2, 2), (9, 9), (1,)], limit=8)
    [((3,), (2, 2)), ((9, 9),), ((1,),)]
    """
    buckets: list[list[Shape]] = []
    room = 0
    for shape in shapes:
        if prod(shape) > room or not buckets:
            buckets.append([])
            room = limit
        buckets[-1].append(shape)
        room -= prod(shape)
    return [tuple(bucket) for bucket in buckets]


def bucket_of(model: str, megabytes: int, dtype: torch.dtype = torch.float32) -> BucketShapes:
    """Of the model's buckets the one that comes nearest to its limit: the first, of several."""
    limit = megabytes * MIB // dtype.itemsize

    def distance(bucket: Sequence[Shape]) -> float:
        return abs(log(sum(map(prod, bucket)) / limit))

    return BucketShapes(model, megabytes, dtype, min(partition(MODELS[model](), limit), key=distance))


def all_buckets(quick: bool) -> list[BucketShapes]:
    """What is measured, what matters most first: time may run out."""
    sizes = [(25, torch.float32)]
    if not quick:
        sizes += [(100, torch.float32), (1, torch.float32), (25, torch.bfloat16)]
    return [bucket_of(model, megabytes, dtype) for megabytes, dtype in sizes for model in MODELS]
