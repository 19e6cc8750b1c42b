"""Every kernel, at its real block sizes, compiled for GPUs that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compile import Case, Compiled

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


def test_faults_are_found():
    case = Case("x", None, (), {}, 4)
    fine = {"registers": 32, "spills": 0, "stack": 0, "shared": 1024, "loads": [4, 16], "stores": [16]}
    assert Compiled(case, "gfx942", **fine, fmas=1, rounding=0).faults == []
    bad = {"registers": 255, "spills": 4, "stack": 100, "shared": 70_000, "loads": [8], "stores": [4]}
    assert len(Compiled(case, "gfx942", **bad, fmas=1, rounding=1).faults) == 6
