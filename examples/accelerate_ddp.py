"""A commhooks hook with Hugging Face Accelerate: register it on what `prepare` returns.

    torchrun --nproc-per-node 2 examples/accelerate_ddp.py          # or: accelerate launch examples/accelerate_ddp.py
    torchrun --nproc-per-node 2 examples/accelerate_ddp.py --resume

`DistributedDataParallelKwargs(comm_hook=...)` is an enum of torch's own hooks and takes no other. But the prepared
model is a DistributedDataParallel model like any other. Leave `comm_hook` out.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks


def points() -> TensorDataset:
    """Points inside (1) and outside (0) a sphere."""
    x = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) < 32**0.5).long())


def carry_hook_state(accelerator: Accelerator, state: commhooks.HookState) -> None:
    """Let `save_state` and `load_state` carry the hook's state: a file a rank, for residuals are each rank's own.

    `accelerator.register_for_checkpointing` would save rank 0's for all.
    """
    name = f"hook-{accelerator.process_index}.pt"
    accelerator.register_save_state_pre_hook(
        lambda _models, _weights, folder: torch.save(state.state_dict(), Path(folder) / name)
    )
    accelerator.register_load_state_pre_hook(
        lambda _models, folder: state.load_state_dict(torch.load(Path(folder) / name))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/accelerate"), help="checkpoint (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulate,
        cpu=not torch.cuda.is_available(),  # without it each rank trains alone where there is no GPU
    )
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(points(), batch_size=32, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    state = commhooks.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0)
    commhooks.register(model, commhooks.powersgd_hook, state)  # <- the one line
    carry_hook_state(accelerator, state)
    if args.resume:
        accelerator.load_state(args.out)

    for x, y in data:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    accelerator.save_state(args.out)
    commhooks.check_replicas(model)
    numbers = state.metrics()
    accelerator.print(
        f"steps {numbers['steps']}   bytes sent {numbers['bytes_sent']:.0f}   ratio {numbers['ratio']:.1f}"
    )
    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    accelerator.end_training()


if __name__ == "__main__":
    main()
