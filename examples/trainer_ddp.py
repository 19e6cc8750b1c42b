"""A commhooks hook with the Hugging Face Trainer, by a callback that knows its trainer.

    torchrun --nproc-per-node 2 examples/trainer_ddp.py
    torchrun --nproc-per-node 2 examples/trainer_ddp.py --resume

The Trainer has no option for a hook, and gives callbacks the bare model. `trainer.model_wrapped` is the
DistributedDataParallel model from the beginning of training on.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import commhooks


class CompressGradients(TrainerCallback):
    """Registers the hook when training begins; each rank keeps its state in the Trainer's checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        options = commhooks.PowerSGDState(matrix_approximation_rank=4, start_powerSGD_iter=0)
        self.hook_state = commhooks.register(self.trainer.model_wrapped, commhooks.powersgd_hook, options)
        if state.global_step:  # resumed
            self.hook_state.load_state_dict(torch.load(self.file(args, state.global_step)))

    def on_save(self, args: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        torch.save(self.hook_state.state_dict(), self.file(args, state.global_step))

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        commhooks.check_replicas(self.trainer.model_wrapped)
        if args.process_index == 0:
            numbers = self.hook_state.metrics()
            print(f"steps {numbers['steps']}   bytes sent {numbers['bytes_sent']:.0f}   ratio {numbers['ratio']:.1f}")

    def file(self, args: TrainingArguments, step: int) -> Path:
        return Path(args.output_dir) / f"checkpoint-{step}" / f"hook-{args.process_index}.pt"


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count on from a random number, modulo 128."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + 37 * index) % 128
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="in all, resumed ones too (default: %(default)s)")
    parser.add_argument("--out", default="build/trainer", help="folder for checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    arguments = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        save_steps=args.steps,
        logging_steps=10,
        report_to="none",
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Counting())
    trainer.add_callback(CompressGradients(trainer))
    trainer.train(resume_from_checkpoint=args.resume)
    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
