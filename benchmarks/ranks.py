"""What every rank of a benchmark does first and last."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist


def run_rank(work: Callable[[], object], timeout: float = 60) -> NoReturn:
    """Do the work in a gloo process group, on one thread; then end the process.

    The process ends without taking the interpreter down: a thread of gloo's lets go of a collective's tensors a moment
    after the collective, and needs the interpreter for it. On a loaded machine that can be too late, which aborts.

    Args:
        work: what this rank does. Whatever it raises ends the process as usual.
        timeout: of each collective, in seconds.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    work()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
