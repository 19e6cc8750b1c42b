"""Training that loses machines, and goes on with those that are left: checkpoints, and a hook's state dealt out anew.

    torchrun --standalone --nproc-per-node 3 examples/elastic_ddp.py    # kill -9 a rank; then start again with fewer:
    torchrun --standalone --nproc-per-node 2 examples/elastic_ddp.py

Or let torchrun do it. On each of up to three machines, with --out on a disk that all of them see:

    torchrun --nnodes 1:3 --nproc-per-node 1 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic_ddp.py --out /shared/elastic

When a machine is gone, the others' ranks fail, are started again as a smaller group, and find the last checkpoint. What
error feedback kept back on the lost machine is in it: `commhooks.reshard` deals it out to the ranks that are left.
"""

import argparse
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks


def save(folder: Path, step: int, ddp: nn.Module, optimizer: torch.optim.Optimizer, state: commhooks.HookState) -> None:
    """A folder a checkpoint, of which `latest` tells only once it is whole."""
    checkpoint = folder / f"step-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(state.state_dict(), checkpoint / f"hook-{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        shared = {
            "step": step,
            "world_size": dist.get_world_size(),
            "model": ddp.module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(shared, checkpoint / "shared.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(checkpoint.name)
        (folder / "latest.new").replace(folder / "latest")
        for old in folder.glob("step-*"):
            if old != checkpoint:
                shutil.rmtree(old)


def load(folder: Path, ddp: nn.Module, optimizer: torch.optim.Optimizer, state: commhooks.HookState) -> int:
    """The number of steps done."""
    checkpoint = folder / (folder / "latest").read_text()
    shared = torch.load(checkpoint / "shared.pt", map_location="cpu")
    ddp.module.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    before, now, rank = shared["world_size"], dist.get_world_size(), dist.get_rank()
    if before == now:
        state.load_state_dict(torch.load(checkpoint / f"hook-{rank}.pt", map_location="cpu"))
    else:
        states = [torch.load(checkpoint / f"hook-{r}.pt", map_location="cpu") for r in range(before)]
        state.load_state_dict(commhooks.reshard(states, now)[rank])
        if rank == 0:
            print(f"resharded from {before} ranks to {now}", flush=True)
    return shared["step"]


def batch(step: int) -> Tensor:
    """This rank's inputs of a step."""
    seed = 1000 * step + dist.get_rank()
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="in all, resumed ones too (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/elastic"), help="folder (default: %(default)s)")
    args = parser.parse_args()

    # A rank that is gone shows at once where its connections break, and after this time where they do not.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device))
    state = commhooks.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0)
    commhooks.register(ddp, commhooks.powersgd_hook, state)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    done = load(args.out, ddp, optimizer, state) if (args.out / "latest").exists() else 0
    print(f"rank {rank} of {dist.get_world_size()}, process {os.getpid()}, {done} steps done", flush=True)
    for step in range(done + 1, args.steps + 1):
        x = batch(step).to(device)
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0:
            save(args.out, step, ddp, optimizer, state)
            if rank == 0:
                print(f"step {step:4d}   loss {loss.item():.4f}   saved", flush=True)

    commhooks.check_replicas(ddp)
    if rank == 0:
        print(f"finished with {dist.get_world_size()} ranks", flush=True)
    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
