"""What the ranks of these tests have in common."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks

HOOKS = {
    "allreduce": (commhooks.allreduce_hook, commhooks.HookState, {}),
    "bf16": (commhooks.bf16_hook, commhooks.CastState, {"use_error_feedback": True}),
    "fp16 fp32 sum": (commhooks.fp16_hook, commhooks.CastState, {"accumulate": "fp32"}),
    "powersgd": (commhooks.powersgd_hook, commhooks.PowerSGDState, {"start_powerSGD_iter": 0}),
    "powersgd alternating": (
        commhooks.powersgd_hook,
        commhooks.PowerSGDState,
        {"start_powerSGD_iter": 0, "alternating": True},
    ),
    "topk": (commhooks.topk_hook, commhooks.TopKState, {"density": 0.1}),  # allgather for 2 ranks, balanced for 4
    "topk leader": (commhooks.topk_hook, commhooks.TopKState, {"density": 0.1, "aggregation": "leader"}),
    "randomk": (commhooks.randomk_hook, commhooks.RandomKState, {"density": 0.1}),
}


def linears(n: int = 12, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


def register(ddp: DDP, name: str, **options) -> commhooks.HookState:
    """By DDP's own method, as a user of torch would."""
    hook, state_type, defaults = HOOKS[name]
    state = state_type(**(defaults | options))
    ddp.register_comm_hook(state, hook)
    return state


def inputs(seed: int = 0, batch: int = 8, width: int = 64) -> torch.Tensor:
    """Different on each rank."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(1000 * seed + dist.get_rank()))


def train(ddp: nn.Module, steps: int, width: int = 64) -> list[float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (ddp(inputs(step, width=width)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_unevenly(ddp: nn.Module) -> None:
    """Under `Join`: two steps more on each next rank."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with Join([ddp]):
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            ddp(inputs(step)).square().mean().backward()
            optimizer.step()


def assert_replicas_equal(module: nn.Module) -> None:
    mine = torch.cat([p.detach().flatten().double() for p in module.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first), "this rank's parameters differ from rank 0's"
    assert mine.isfinite().all()
