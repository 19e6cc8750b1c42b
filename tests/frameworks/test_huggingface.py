"""A hook with Accelerate and with the Trainer of transformers."""

import pytest
from launch import EXAMPLES, metrics, torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("package", "example", "first", "more"),
    [
        ("accelerate", "accelerate_ddp.py", (), ("--resume",)),
        ("transformers", "trainer_ddp.py", ("--steps", 10), ("--steps", 20, "--resume")),
    ],
)
def test_hook_is_called_and_its_state_comes_back(tmp_path, package, example, first, more):
    """Catches: a hook that is registered on another model than the one that is trained, or never called."""
    pytest.importorskip(package)
    steps, sent, ratio = metrics(torchrun(EXAMPLES / example, *first, "--out", tmp_path))
    assert steps > 0
    assert sent > 0
    assert ratio > 10
    resumed = metrics(torchrun(EXAMPLES / example, *more, "--out", tmp_path))
    assert resumed == (2 * steps, 2 * sent, ratio), "the hook's state did not come with the checkpoint"
