"""Kernel tests run on a GPU where there is one, else in Triton's interpreter: see tests/conftest.py."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that is allocated without a value holds NaN, or a pattern for integers, so that what a kernel forgets to
    write, or reads before writing, shows.
    """

    def poison(make):
        def make_poisoned(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan") if x.is_floating_point() else 0x55) if x.dtype != torch.bool else x

        return make_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
