"""A hook in Lightning."""

import re
from pathlib import Path

import pytest
from launch import metrics, torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

pytest.importorskip("lightning")


def test_lightning(tmp_path):
    """Catches: a callback that Lightning calls before the model is wrapped, or whose hook is not called.

    And what docs/lightning.md says of Lightning's own way. When that changes, the page has to.
    """
    output = torchrun(Path(__file__).with_name("lightning_ranks.py"), tmp_path, timeout=150)
    assert output.count("Lightning's own way: 0 steps") == 2, output
    first, resumed = re.findall(r"^steps .*", output, re.MULTILINE)
    steps, sent, ratio = metrics(first)
    assert steps == 16
    assert sent > 0
    assert ratio > 20
    assert output.count("saved at step 16") == 2, output
    assert metrics(resumed) == (32, 2 * sent, ratio), "the hook's state did not come with the checkpoint"
