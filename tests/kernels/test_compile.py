"""Every kernel, at its real block sizes, compiled for GPUs that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.timeout(300)
def test_no_kernel_spills_or_loads_narrowly(target, tmp_path):
    """In a process of its own: this one has Triton's interpreter, or a GPU. A cache of its own: nothing stale."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.kernels", "--compile", f"--target={target}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "orthogonalize rank 64" in done.stdout
