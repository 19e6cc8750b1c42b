"""Activation checkpointing and gradient clipping with a hook."""

from pathlib import Path

import pytest
from launch import torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_habits_of_training_loops():
    """Catches: gradients that reach the hook twice or not at all when activations are computed again; norms that
    differ between ranks."""
    torchrun(Path(__file__).with_name("loop_ranks.py"))
