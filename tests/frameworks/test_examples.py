"""The examples for plain PyTorch do what they say."""

import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from launch import EXAMPLES, Run, torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_train():
    output = torchrun(EXAMPLES / "train_ddp.py", "--steps", 10)
    assert re.search(r"step +10   loss \d", output), output


def test_clip():
    """Catches: a gradient norm that differs between ranks, which clipping would turn into replicas that drift apart."""
    output = torchrun(EXAMPLES / "clip_ddp.py", "--max-norm", 0.1)
    norms = [float(x) for x in re.findall(r"gradient norm ([\d.]+)", output)]
    assert len(norms) == 5
    assert min(norms) > 0.1, "nothing was clipped"
    assert "steps 11, replicas equal" in output  # rank 1 has one step more


def test_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    torchrun(EXAMPLES / "tensorboard_metrics.py", "--out", tmp_path)
    written = events.EventAccumulator(str(tmp_path)).Reload()
    sent = [event.value for event in written.Scalars("commhooks/bytes_sent")]
    assert len(sent) == 5
    assert sent == sorted(sent)
    assert sent[0] > 0
    assert written.Scalars("commhooks/ratio")[-1].value > written.Scalars("commhooks/ratio")[0].value > 1  # warm-up


@pytest.mark.parametrize("hook", ["powersgd", "bf16"])
def test_profile(tmp_path, hook):
    """Catches: ranges that have other names than the pages say, so that the table has rows of nothing."""
    output = torchrun(EXAMPLES / "profile_ddp.py", "--hook", hook, "--width", 256, "--out", tmp_path)
    ms = {name: float(value) for name, value in re.findall(r"^ *([a-z ]+?) +([\d.]+) ms", output, re.MULTILINE)}
    assert len(ms) == 8, output
    assert ms["data"] >= 2  # it sleeps for as long
    assert min(ms.values()) >= 0
    trace = (tmp_path / f"{hook}.json").read_text()
    for phase in ("compress", "launch", "wait", "decompress"):
        assert f'"commhooks.{hook}.{phase} bucket 0"' in trace


def test_resumed_run_is_the_straight_run(tmp_path):
    """Catches: a residual that is lost or meets another parameter. Buckets are others after the resume."""
    example = EXAMPLES / "resume_ddp.py"
    straight = torchrun(example, "--steps", 6, "--out", tmp_path / "straight")
    torchrun(example, "--steps", 3, "--out", tmp_path / "resumed")
    resumed = torchrun(example, "--steps", 6, "--bucket-cap-mb", 0.05, "--out", tmp_path / "resumed")
    assert re.findall(r"step +(\d)", resumed) == ["4", "5", "6"]
    straight, resumed = (re.search(r"checksum of parameters (\w+)", x).group(1) for x in (straight, resumed))
    assert straight == resumed


def test_torchrun_goes_on_without_a_lost_node(tmp_path):
    """Three nodes, of which one is lost, its rank and its torchrun: the other two go on by themselves."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]

    def node(number):
        rendezvous = (
            "--nnodes=2:3",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{port}",
            f"--rdzv-conf=last_call_timeout=3,keep_alive_interval=2,is_host={number == 0}",
            "--local-addr=localhost",
        )
        return Run(EXAMPLES / "elastic_ddp.py", "--steps", 400, "--out", tmp_path, ranks=1, rendezvous=rendezvous)

    with ExitStack() as stack:
        nodes = [stack.enter_context(node(number)) for number in range(3)]
        lost = nodes[-1]
        victim = int(lost.wait_for(r"rank \d of 3, process (\d+)")[1])
        time.sleep(1)
        os.kill(lost.process.pid, signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        statuses = [node.finish(90) for node in nodes[:-1]]
        output = "".join(node.output for node in nodes)
    assert statuses == [0, 0], output
    assert "resharded from 3 ranks to 2" in output
    assert "finished with 2 ranks" in output


def test_every_example_is_run_by_a_test():
    tests = "".join(test.read_text() for test in Path(__file__).parent.glob("test_*.py"))
    ranks = Path(__file__).with_name("lightning_ranks.py").read_text()
    missing = [example.name for example in EXAMPLES.glob("*.py") if example.stem not in tests + ranks]
    assert not missing
