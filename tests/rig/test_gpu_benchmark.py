"""What of the GPU benchmark needs no GPU: its buckets, and the arithmetic of its goals."""

from dataclasses import replace
from math import prod

import pytest
import torch

from benchmarks.gpu_report import goals, powersgd_limit_us, row
from benchmarks.gpu_shapes import MIB, MODELS, BucketShapes, all_buckets, bucket_of, partition
from benchmarks.gpu_timing import Case, Measured


def test_models_have_the_parameters_of_the_real_ones():
    numels = {name: sum(map(prod, shapes())) for name, shapes in MODELS.items()}
    assert numels["ResNet-50"] == 25_557_032
    assert numels["GPT-2 small"] == 124_439_808
    assert numels["Llama-like"] == 1_100_048_384 - 2 * 32000 * 2048 - 2048  # TinyLlama's, less embeddings and last norm


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limit", [2**18, 25 * MIB // 4])
def test_partition_keeps_order_and_limit(name, limit):
    shapes = MODELS[name]()
    buckets = partition(shapes, limit)
    assert [shape for bucket in buckets for shape in bucket] == shapes
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        numel = sum(map(prod, bucket))
        assert numel <= limit or len(bucket) == 1
        assert following is None or numel + prod(following[0]) > limit


def test_buckets_are_near_their_size():
    for bucket in all_buckets(quick=False):
        megabytes = bucket.numel * bucket.dtype.itemsize / MIB
        assert 0.8 * bucket.megabytes <= megabytes <= (2.3 if bucket.megabytes == 1 else bucket.megabytes)
        assert bucket.layout().slices[-1].offset + bucket.layout().slices[-1].numel == bucket.numel


def test_powersgd_limit():
    # 28 MB at 1 GB/s are 28 ms.
    assert powersgd_limit_us(10**6, 1e9, launches=8, launch_interval=2e-6) == pytest.approx(1.3 * 28e3 + 16)


def measured_row(operation, implementation, us, bytes_moved=1e6, shapes=None, launches=8):
    shapes = shapes or bucket_of("ResNet-50", 25)
    case = Case(operation, implementation, lambda: None, bytes_moved)
    return row(shapes, case, Measured(us=us, launches=launches), copy_bandwidth=1e12)


def test_row_arithmetic():
    # 2 MB in 4 us are 500 GB/s, half of 1 TB/s.
    found = measured_row("to_wire", "kernels", us=4, bytes_moved=2e6)
    assert found.gb_per_s == pytest.approx(500)
    assert found.percent_of_copy == pytest.approx(50)


def test_goals():
    small = BucketShapes("ResNet-50", 1, torch.float32, ((512, 512),))
    bucket = bucket_of("ResNet-50", 25)
    limit = powersgd_limit_us(bucket.numel, 1e12, 8, 1e-6)
    rows = [
        measured_row("to_wire", "kernels", us=1.0, bytes_moved=0.95e6),
        measured_row("from_wire_", "kernels", us=1.0, bytes_moved=0.91e6),
        measured_row("from_wire_", "plain torch", us=1.0, bytes_moved=0.1e6),  # no goal of ours
        measured_row("to_wire", "kernels", us=1.0, bytes_moved=0.2e6, shapes=small),  # too short to stream
        measured_row("select_blocks", "kernels", us=1.0, bytes_moved=0.7e6),
        measured_row("PowerSGD full step", "kernels", us=0.9 * limit),
        measured_row("PowerSGD full step", "kernels", us=1.0, shapes=small, launches=9),
        measured_row("powersgd_hook", "kernels", us=10),
        measured_row("powersgd_hook", "torch's hook", us=60),
    ]
    cast, topk, powersgd, launches, faster = goals(rows, copy_bandwidth=1e12, launch_interval=1e-6)
    assert (cast.met, cast.worst, cast.best) == (True, pytest.approx(91), pytest.approx(95))
    assert (topk.met, topk.worst) == (False, pytest.approx(70))
    assert (powersgd.met, powersgd.worst) == (True, pytest.approx(0.9))
    assert (launches.met, launches.worst, launches.worst_bucket) == (False, 9, small.name)
    assert (faster.met, faster.worst) == (True, pytest.approx(6))


def test_goals_without_measurements_are_not_met():
    failed = replace(measured_row("to_wire", "kernels", us=0.0), error="RuntimeError")
    assert [x.met for x in goals([failed], 1e12, 1e-6)] == [None] * 5
