"""Are the ranks' models still the same, to the bit? A checksum of every tensor, compared."""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from commhooks.agreement import describe, digest, first_difference, gather, in_words, same_everywhere

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes
_PIECE = 2**16  # words that one sum takes: a CPU's cache holds their products; two launches a piece on a GPU
_GOLDEN = -0x61C8864680B583EB


class ReplicaError(RuntimeError):
    """The ranks' tensors are not the same."""


def check_replicas(
    ddp: DDP, optimizer: Optimizer | None = None, *, buffers: bool = False, repair: bool = False
) -> list[str]:
    """Compare every parameter across the ranks of the model, to the bit. All of them must call it.

    NaNs with other bits differ, and so do 0.0 and -0.0. Which values a tensor has in which order is compared, not how
    it lies in memory. Parameters that DDP was told to ignore are left out.

    Every tensor is read once, where it lies, and nothing of it is copied to the host: of one CPU core, 25 million
    float32 parameters take 25 ms. Where all is the same, 32 bytes are all-reduced; else 8 bytes and a name a tensor
    are gathered. Blocks the host until the answer is there. May be called from a hook, in backward; but not with
    `repair`, which changes what backward may still need.

    Args:
        ddp: the model.
        optimizer: compare also the tensors it keeps for each parameter. One that shards its state has other tensors
            on every rank, and cannot be checked.
        buffers: compare also the model's buffers. Between two forwards they may rightly differ: those of BatchNorm
            are each rank's own, until DDP sends rank 0's at the next forward.
        repair: copy rank 0's tensors to the ranks that differ, instead of raising. Of what a hook's state keeps, such
            as residuals, nothing is touched.

    Returns:
        The names of the tensors that were repaired.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel model, or `optimizer` no optimizer.
        ReplicaError: on every rank, if a tensor differs. It names the first in the model's order, the ranks that
            differ from rank 0, and the number of tensors; or, also where `repair` is set, the first tensor that is
            not there on every rank with the same name, shape and dtype.
    """
    if not isinstance(ddp, DDP):
        raise TypeError(f"ddp is a {type(ddp).__name__}; it must be a DistributedDataParallel model")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer or None")
    tensors = dict(_tensors(ddp, optimizer, buffers))
    group, device = ddp.process_group, next(iter(tensors.values())).device
    descriptions = [describe(name, x) for name, x in tensors.items()]
    sums = checksums(list(tensors.values()), device)
    if same_everywhere([digest(descriptions), digest(map(str, sums))], group, device):
        return []
    everyone = gather((descriptions, sums), group)
    if any(theirs != everyone[0][0] for theirs, _ in everyone):
        raise ReplicaError(first_difference("tensor", [theirs for theirs, _ in everyone]))
    differing = _differing(list(tensors), [theirs for _, theirs in everyone])
    if not repair:
        raise ReplicaError(_report(differing, len(tensors)))
    for name in differing:
        _send(tensors[name], group, device)
    return list(differing)


def _tensors(ddp: DDP, optimizer: Optimizer | None, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """In an order that every rank has."""
    ignored = ddp.parameters_to_ignore
    parameters = [(name, p) for name, p in ddp.module.named_parameters() if name not in ignored]
    yield from parameters
    if buffers:
        yield from ((name, x) for name, x in ddp.module.named_buffers() if name not in ignored)
    for name, p in parameters:
        kept = {} if optimizer is None else optimizer.state.get(p, {})
        yield from ((f"{key} of {name}", kept[key]) for key in sorted(kept) if isinstance(kept[key], Tensor))


@torch.no_grad()
def checksums(tensors: list[Tensor], device: torch.device) -> list[int]:
    """64 bits a tensor, of its elements' bits in their order. The arithmetic is exact: the same on every device.

    A tensor is cut into pieces. A piece's words are multiplied with odd numbers that look random, and summed modulo
    2**64: one word that changes always changes the sum. The pieces' sums are scrambled and summed.
    """
    words = [_words(x) for x in tensors]
    longest = min(_PIECE, max(x.numel() for x in words))
    factors = {where: _factors(longest, where) for where in {x.device for x in words}}
    products = {where: torch.empty_like(x) for where, x in factors.items()}
    sums = [_checksum(x, factors[x.device], products[x.device]).to(device) for x in words]
    return torch.stack(sums).tolist()


def _words(x: Tensor) -> Tensor:
    """The bits as integers of at most 4 bytes, flat: of a product with 8 bytes, a sign's bit would stay the last one.

    Strided tensors that are not contiguous are copied where they are.
    """
    x = x.detach().resolve_conj().resolve_neg().flatten()
    if x.stride(0) != 1:  # one element, seen by a step
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(_WORDS[min(4, x.element_size())])


def _factors(n: int, device: torch.device) -> Tensor:
    return _scrambled(torch.arange(1, n + 1, device=device) * _GOLDEN) | 1


def _checksum(words: Tensor, factors: Tensor, products: Tensor) -> Tensor:
    sums = [torch.mul(piece, factors[: len(piece)], out=products[: len(piece)]).sum() for piece in words.split(_PIECE)]
    places = torch.arange(1, len(sums) + 1, device=words.device) * _GOLDEN
    return _scrambled(torch.stack(sums) + places).sum()


def _scrambled(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (doi:10.1145/2660193.2660195): a bijection, after which near numbers look unrelated.

    The masks make of torch's shift, which repeats the sign, one that does not.
    """
    x = (x ^ (x >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 2**33 - 1)


def _differing(names: list[str], sums: list[list[int]]) -> dict[str, list[int]]:
    """Name of a tensor that is not the same everywhere -> the ranks where it is not rank 0's."""
    columns = zip(names, zip(*sums, strict=True), strict=True)
    ranks = {name: [rank for rank, x in enumerate(column) if x != column[0]] for name, column in columns}
    return {name: where for name, where in ranks.items() if where}


def _report(differing: dict[str, list[int]], total: int) -> str:
    name, ranks = next(iter(differing.items()))
    everywhere = sorted({rank for where in differing.values() for rank in where})
    return (
        f"{name} differs on {in_words(ranks)} from rank 0; "
        f"in all, {len(differing)} of {total} tensors differ, on {in_words(everywhere)}"
    )


@torch.no_grad()
def _send(x: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Rank 0's tensor, into every rank's."""
    sent = torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x)
    dist.broadcast(sent.flatten().view(torch.uint8), group=group, group_src=0)
    x.copy_(sent)
