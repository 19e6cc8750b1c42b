"""Training for long, with all that changes from step to step: no_sync, unused parameters, batch sizes."""

import os
import random
import statistics
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from commhooks.replicas import check_replicas

WORLD_SIZE, WIDTH, LAYERS = 4, 64, 8
CHECK_EVERY = 50
# Bytes. A bucket's smallest buffer, lost in each of the 800 steps between the medians of 2,000, comes to more: 4 KiB
# each. What the allocator makes of batches of changing sizes was less: 0.6 MiB there, 1.0 MiB early on, in 150.
LEAK = 2 * 2**20


class Skipping(nn.Module):
    """Residual layers, of which a forward uses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, used):
        for i in used:
            x = x + torch.tanh(self.layers[i](x)) / LAYERS
        return x


class Chances:
    """What happens in a step: some of it the same on all ranks, some each rank's own."""

    def __init__(self):
        self.common, self.own = random.Random(0), random.Random(1 + dist.get_rank())

    def used(self, idle):
        """Each layer by one rank at least, but for the idle ones."""
        me = dist.get_rank()
        wanted = (i for i in range(LAYERS) if i not in idle)
        return [i for i in wanted if i % WORLD_SIZE == me or self.own.random() < 0.7]

    def batch(self):
        return torch.randn(self.own.randint(1, 40), WIDTH)


def step(ddp, optimizer, chances):
    """One update, from one backward or several. True if every rank's model is the same after it."""
    optimizer.zero_grad()
    silent = chances.common.choice([0, 0, 0, 1, 2])
    # Of a layer that no rank uses in the last backward, DDP leaves each rank its own sum.
    idle = () if silent else (chances.common.randrange(LAYERS),)
    for micro in range(silent + 1):
        with ExitStack() as stack:
            if micro < silent:
                stack.enter_context(ddp.no_sync())
            (ddp(chances.batch(), chances.used(idle)) - 1).square().mean().backward()
    optimizer.step()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(hook, executor, steps):
    ddp = DDP(Skipping(), bucket_cap_mb=0.02, find_unused_parameters=True)
    state = register(ddp, hook, executor=executor)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    chances, sizes = Chances(), []
    for done in range(1, steps + 1):
        step(ddp, optimizer, chances)
        sizes.append(resident())
        if done % CHECK_EVERY == 0:
            check_replicas(ddp, optimizer)
    assert state.step == steps
    assert all(p.isfinite().all() for p in ddp.parameters())
    middle, end = sizes[2 * steps // 5 : 3 * steps // 5], sizes[4 * steps // 5 :]
    return statistics.median(end) - statistics.median(middle)


@pytest.mark.parametrize(
    ("hook", "executor", "steps"),
    [
        ("powersgd", "pipelined", 150),
        pytest.param("powersgd", "pipelined", 2000, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param("topk", "inline", 2000, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_soak(ranks, hook, executor, steps):
    growths = ranks(WORLD_SIZE, soak, hook, executor, steps, timeout=steps // 2 + 60)
    assert max(growths) < LEAK, growths
