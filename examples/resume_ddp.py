"""Checkpoints with a hook's state in them, and a run that goes on as if it had never stopped.

    torchrun --nproc-per-node 2 examples/resume_ddp.py --steps 5
    torchrun --nproc-per-node 2 examples/resume_ddp.py --steps 10    # goes on at step 6

Model and optimizer are the same on every rank; rank 0 saves them. What error feedback keeps back is each rank's own:
every rank saves its part. Without it a resumed run loses what had not been sent yet.
"""

import argparse
import os
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks


def batch(step: int) -> Tensor:
    """This rank's inputs of a step: the same in a resumed run."""
    seed = 1000 * step + dist.get_rank()
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def save(folder: Path, step: int, ddp: nn.Module, optimizer: torch.optim.Optimizer, state: commhooks.HookState) -> None:
    torch.save(state.state_dict(), folder / f"hook-{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        shared = {"step": step, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(shared, folder / "shared.pt")


def load(folder: Path, ddp: nn.Module, optimizer: torch.optim.Optimizer, state: commhooks.HookState) -> int:
    """The number of steps done."""
    shared = torch.load(folder / "shared.pt", map_location="cpu")
    ddp.module.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    state.load_state_dict(torch.load(folder / f"hook-{dist.get_rank()}.pt", map_location="cpu"))
    return shared["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="in all, resumed ones too (default: %(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=25, help="may change (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/resume"), help="folder (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=2))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
    state = commhooks.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0)
    commhooks.register(ddp, commhooks.powersgd_hook, state)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    args.out.mkdir(parents=True, exist_ok=True)
    done = load(args.out, ddp, optimizer, state) if (args.out / "shared.pt").exists() else 0
    for step in range(done + 1, args.steps + 1):
        x = batch(step).to(device)
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:3d}   loss {loss.item():.6f}")
    save(args.out, args.steps, ddp, optimizer, state)

    if dist.get_rank() == 0:
        parameters = torch.cat([p.detach().flatten().cpu() for p in ddp.parameters()])
        print(f"checksum of parameters {zlib.crc32(parameters.numpy().tobytes()):08x}")
    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
