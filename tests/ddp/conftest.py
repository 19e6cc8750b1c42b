from functools import partial

import pytest
from processes import run_ranks


@pytest.fixture
def ranks(tmp_path):
    """run_ranks, with a place for its files."""
    return partial(run_ranks, tmp_path=tmp_path)
