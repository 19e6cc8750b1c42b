"""torch.compile around DDP and inside it, with a hook registered."""

import re
import shutil

import pytest
from launch import EXAMPLES, torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROW = re.compile(r"^(.*?) +loss ([\d.]+) +[\d.]+ ms/step +ratio ([\d.]+)$", re.MULTILINE)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_compiled_training_is_the_same(backend):
    """Catches: a hook that is traced, skipped, or given other buckets' gradients when graphs are split at buckets."""
    output = torchrun(EXAMPLES / "compile_ddp.py", "--steps", 3, "--backend", backend, timeout=200)
    ways = {way: (float(loss), float(ratio)) for way, loss, ratio in ROW.findall(output)}
    assert list(ways) == ["not compiled", "torch.compile(ddp)", "DDP(torch.compile(model))"], output
    loss, ratio = ways["not compiled"]
    assert ratio > 30
    for compiled_loss, compiled_ratio in ways.values():
        assert compiled_loss == pytest.approx(loss, rel=1e-3)
        assert compiled_ratio == ratio
