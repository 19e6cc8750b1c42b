"""Training goes on with fewer ranks than it began with, and gets where it would have got."""

import pytest
import torch
import torch.distributed as dist
from models import HOOKS, linears
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks

STEPS = 80  # in all, the second half with fewer ranks
WIDTH = 48


def batch(step):
    """The same problem for all ranks, with a little noise of each one's own."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return x + 0.02 * noise, x.roll(1, dims=1)


def trained(hook, steps, load=None, save=None):
    """Train for these steps, from the checkpoint of `load`, if there is one; the loss after them."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*linears(2, WIDTH)), bucket_cap_mb=0.005)
    function, state_type, options = HOOKS[hook]
    state = commhooks.register(ddp, function, state_type(**options))
    if load:
        ddp.module.load_state_dict(torch.load(f"{load}-model.pt"))
        parts = [torch.load(f"{load}-{rank}.pt") for rank in range(3)]
        state.load_state_dict(commhooks.reshard(parts, dist.get_world_size())[dist.get_rank()])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
    if save:
        torch.save(ddp.module.state_dict(), f"{save}-model.pt")
        torch.save(state.state_dict(), f"{save}-{dist.get_rank()}.pt")
    with torch.no_grad():
        x, y = batch(0)
        return (ddp.module(x) - y).square().mean().item()


def undisturbed(hook, path):
    loss = trained(hook, range(STEPS))
    trained(hook, range(STEPS // 2), save=path)
    return loss


def with_fewer(hook, path):
    return trained(hook, range(STEPS // 2, STEPS), load=path)


@pytest.mark.parametrize("hook", ["powersgd", "topk leader", "randomk"])
def test_fewer_ranks_get_where_all_would_have_got(ranks, tmp_path, hook):
    """Catches: residuals that are dropped, or scaled for the old number of ranks."""
    expected, *_ = ranks(3, undisturbed, hook, tmp_path / "saved")
    found, *_ = ranks(2, with_fewer, hook, tmp_path / "saved")
    assert found == pytest.approx(expected, rel=0.02)
