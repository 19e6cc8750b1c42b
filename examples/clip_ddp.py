"""What training loops do around a hook: gradient accumulation, clipping, activation checkpointing, uneven inputs.

    torchrun --nproc-per-node 2 examples/clip_ddp.py

Clip after backward, as without a hook: gradients are means over all ranks then, equal on each, and so is their norm.
"""

import argparse
import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks


class Network(nn.Module):
    """Layers whose activations are computed again in backward instead of kept."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20, help="of rank 0; rank r has 2 r more (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step (default: %(default)s)")
    parser.add_argument("--max-norm", type=float, default=0.5, help="of all gradients together (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=2))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Network().to(device))
    state = commhooks.PowerSGDState(matrix_approximation_rank=4, start_powerSGD_iter=0)
    commhooks.register(ddp, commhooks.powersgd_hook, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(16, 256, generator=generator) for _ in range(args.batches + 2 * rank)]
    with Join([ddp]):  # ranks that run out of batches keep up with the others' collectives
        for i, x in enumerate(batches, 1):
            last_of_step = i % args.accumulate == 0
            with nullcontext() if last_of_step else ddp.no_sync():
                loss = (ddp(x.to(device)) - 1).square().mean() / args.accumulate
                loss.backward()
            if last_of_step:
                norm = nn.utils.clip_grad_norm_(ddp.parameters(), args.max_norm)  # before clipping
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0 and i % 4 == 0:
                    print(f"batch {i:3d}   loss {loss.item() * args.accumulate:.3f}   gradient norm {norm:.3f}")

    commhooks.check_replicas(ddp)
    if rank == 0:
        print(f"steps {state.metrics()['steps']}, replicas equal")
    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
