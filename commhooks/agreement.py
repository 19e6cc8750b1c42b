"""What the ranks of a model must agree on, compared before it can go wrong: every rank hears of every difference."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from commhooks.state import HookState

T = TypeVar("T")

# Where these differ, so do DDP's own collectives.
DDP_OPTIONS = ("bucket_bytes_cap", "find_unused_parameters", "static_graph", "broadcast_buffers")


def configuration(state: HookState) -> dict[str, object]:
    """What decides which collectives a hook makes with this state."""
    options = {name: getattr(state, name) for name in ("executor", "check_replicas_every", "step")}
    return {"state": type(state).__name__} | state.config() | options


def agree(ddp: DDP, config: Mapping[str, object], problem: str | None = None) -> None:
    """Compare a hook's configuration, DDP's options and the parameters. All ranks of the model must call it.

    Of the parameters, 8 bytes a rank are sent; their descriptions only where these differ.

    Args:
        ddp: the model.
        config: what must be the same on every rank, by name, such as the state's `configuration`.
        problem: what is wrong on this rank; None if nothing is.

    Raises:
        ValueError: on every rank. It lists every rank's problem; without any, every difference from rank 0.
    """
    parameters = [f"{describe(name, p)} requires_grad={p.requires_grad}" for name, p in ddp.module.named_parameters()]
    config = dict(config) | {f"DDP's {name}": getattr(ddp, name) for name in DDP_OPTIONS}
    problems, configs, digests = zip(*gather((problem, config, digest(parameters)), ddp.process_group), strict=True)
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    wrong = wrong or _config_differences(configs)
    if len(set(digests)) > 1:
        wrong.append(first_difference("parameter", gather(parameters, ddp.process_group)))
    if wrong:
        raise ValueError("; ".join(wrong))


def gather(mine: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's object."""
    everyone: list[T] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def same_everywhere(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Does every rank have these 64-bit signed numbers? One all-reduce of 16 bytes a number."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    largest = torch.stack([mine, ~mine])  # ~x falls where x rises: the largest of it is the smallest number's
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return torch.equal(largest[0], ~largest[1])


def digest(texts: Iterable[str]) -> int:
    """64 bits of a hash, signed."""
    lines = "\n".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(lines, digest_size=8).digest(), "little", signed=True)


def describe(name: str, x: Tensor) -> str:
    return f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def first_difference(kind: str, everyone: Sequence[Sequence[str]]) -> str:
    """The first place where a rank's list is not rank 0's, in words. There must be one."""
    first = everyone[0]
    places = [(i, rank) for rank, other in enumerate(everyone) if (i := _parting(first, other)) is not None]
    place = min(i for i, _ in places)
    ranks = [rank for i, rank in places if i == place]
    return f"{kind} {place} is {_at(first, place)} on rank 0 and {_at(everyone[ranks[0]], place)} on {in_words(ranks)}"


def in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _parting(first: Sequence[str], other: Sequence[str]) -> int | None:
    if first == other:
        return None
    same = [a == b for a, b in zip(first, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _at(texts: Sequence[str], place: int) -> str:
    return texts[place] if place < len(texts) else "missing"


def _config_differences(configs: Sequence[Mapping[str, object]]) -> list[str]:
    first = configs[0]
    return [
        f"{name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}"
        for rank, other in enumerate(configs)
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]
