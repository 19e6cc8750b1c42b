"""Elements beyond 2^31 of a tensor, without the memory that such a tensor takes.

The tensors lie in files with holes: only the pages that are touched exist. A kernel with one program a block is
run for a single far block.
"""

import pytest
import torch
from triton.runtime import interpreter

from commhooks.triton_kernels import cast, factors, powersgd
from commhooks.triton_kernels.reference import Factor, Factors, Matrix, Plan

FAR = 2**31 + 4096  # elements: its offset in elements does not fit into int32, that in bytes not into uint32
SUMS = {"rtol": 1e-5, "atol": 1e-3}  # of some 30 products of numbers up to about 100, in another order

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all of the tensor would have to be there")


@pytest.fixture
def far_tensor(tmp_path):
    def make(numel=FAR + 10_000):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)

    return make


@pytest.fixture
def only_block(monkeypatch):
    """Make kernels with a grid of one program believe that they are another one."""

    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    def believe(block):
        def set_far_idx(*_):
            builder.set_grid_dim(block + 1, 1, 1)
            set_grid_idx(block, 0, 0)

        monkeypatch.setattr(builder, "set_grid_idx", set_far_idx)

    return believe


def test_cast(far_tensor, only_block):
    gradient, residual, wire, rest = (far_tensor() for _ in range(4))
    gradient[FAR : FAR + 2048], residual[FAR] = 3.0, 1.0
    only_block(FAR // cast.BLOCK)
    cast._to_wire[(1,)](gradient, residual, wire, rest, len(gradient), 2.0, True, cast.BLOCK)
    assert wire[FAR : FAR + 3].tolist() == [2.0, 1.5, 1.5]
    assert wire[FAR - 1] == 0
    assert rest[FAR] == 0
    cast._from_wire[(1,)](wire, rest, len(wire), 0.5, cast.BLOCK)
    assert rest[FAR : FAR + 3].tolist() == [4.0, 3.0, 3.0]


def test_largest(far_tensor, only_block):
    x, slot = far_tensor(FAR + factors.LARGEST_BLOCK), torch.zeros((), dtype=torch.int32)
    x[FAR + 4095] = -7.0
    only_block((FAR + 4095) // factors.LARGEST_BLOCK)
    factors._largest[(1,)](x, slot, len(x), factors.LARGEST_BLOCK)
    assert slot.view(torch.float32) == 7.0


def test_powersgd(far_tensor):
    """A matrix and a vector that begin beyond 2^31, through all launchers that touch the bucket."""
    n, m = 20, 33
    plan = Plan((Matrix(FAR, n, m, 2, Factor(0, 2, n), Factor(0, 2, m)),), ((FAR + n * m, 7),))
    gradient, residual = far_tensor(), far_tensor()
    values, rest = torch.randn(n * m + 7), torch.randn(n * m + 7)
    gradient[FAR : FAR + len(values)], residual[FAR : FAR + len(values)] = values, rest
    total = values + rest
    q = torch.randn(2 * m)
    m_, _, sent = powersgd.project(gradient, residual, q, plan, 1, torch.float32)
    assert torch.equal(m_[FAR : FAR + len(values)], total)
    torch.testing.assert_close(sent[: 2 * n].view(2, n), q.view(2, m) @ total[: n * m].view(n, m).t(), **SUMS)
    assert torch.equal(sent[2 * n :], total[n * m :])
    _, _, sent_q = powersgd.project_t(m_, None, sent[: 2 * n].clone(), plan, 1, torch.float32, with_vectors=False)
    factors = Factors(sent[: 2 * n].clone(), sent_q, sent[2 * n :].clone())
    powersgd.reconstruct_(m_, plan, factors, factors, gradient, residual)
    product = factors.p.view(2, n).t() @ factors.q.view(2, m)
    torch.testing.assert_close(gradient[FAR : FAR + n * m].view(n, m), product, **SUMS)
    torch.testing.assert_close(residual[FAR : FAR + n * m], total[: n * m] - product.flatten(), **SUMS)
    assert torch.equal(gradient[FAR + n * m : FAR + n * m + 7], total[n * m :])
    assert not residual[FAR + n * m :].any()
