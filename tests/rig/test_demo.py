"""The demo, short: every hook, real ranks on real links."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_rig import needs_namespaces

ROOT = Path(__file__).parents[2]


@needs_namespaces
@pytest.mark.timeout(300)
def test_demo(tmp_path):
    command = [sys.executable, "-m", "benchmarks.demo", "--steps=15", "--rate=500mbit", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "demo.json").read_text())
    machine, hooks = summary["machine"], summary["hooks"]
    assert 2.5e8 <= machine["link_rate_measured"] <= 5.5e8  # busy processors may not fill the link
    assert len(hooks) == 6
    for row in hooks:
        link_ms = row["tx_bytes_per_step"] * 8 / machine["link_rate_measured"] * 1e3
        assert row["floor_ms"] == max(machine["no_communication_ms"], link_ms)
        assert 0 < row["loss"] < 5.6  # untrained: ln 256 = 5.5
        if row["metric_bytes_per_step"]:
            assert row["tx_bytes_per_step"] == pytest.approx(row["metric_bytes_per_step"], rel=0.1)
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    for row in hooks:
        assert row["hook"][:5] in done.stdout
