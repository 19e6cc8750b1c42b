"""What test_loops.py's ranks do: a training loop's habits, each compared with the same training without it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import commhooks


class Network(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def train(recompute=False, max_norm=None, static_graph=False):
    """The parameters after some steps, flat, and the gradients' norms."""
    ddp = DDP(Network(recompute), bucket_cap_mb=0.02, static_graph=static_graph)
    state = commhooks.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0)
    commhooks.register(ddp, commhooks.powersgd_hook, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    norms = []
    for _ in range(5):
        loss = (ddp(torch.randn(8, 64, generator=generator)) - 1).square().mean()
        loss.backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    commhooks.check_replicas(ddp)
    return nn.utils.parameters_to_vector(ddp.parameters()).detach(), norms


def main():
    dist.init_process_group("gloo")
    plain, _ = train()
    for static_graph in (False, True):
        recomputed, _ = train(recompute=True, static_graph=static_graph)
        assert torch.equal(plain, recomputed), "activation checkpointing changes the result"

    loose, norms = train(max_norm=1e9)
    torch.testing.assert_close(loose, plain)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, norms)
    assert all(theirs == norms for theirs in everyone), "ranks clip by other norms"
    tight, _ = train(max_norm=float(min(norms)) / 2)
    assert not torch.allclose(tight, plain), "nothing was clipped"

    last = dist.barrier(async_op=True)  # kept until the end: see examples/train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
