"""The packed product is the plain one, and its absence costs speed alone."""

from __future__ import annotations

import pytest
import torch
from headway_runtime import linear
from headway_runtime.linear import MANY_ROWS, Linear, packing_works, plain_pays
from torch.nn import functional

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 7, 48, MANY_ROWS, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_packed_and_plain_agree_at_every_number_of_rows(rows, bias, plain):
    if not packing_works(torch.float32, CPU):
        pytest.skip("this torch has no packed linear operators for this processor")
    torch.manual_seed(0)
    weight, x, offset = torch.randn(96, 64), torch.randn(rows, 64), torch.randn(96) if bias else None
    ours = Linear(weight, offset, packed=True, plain=plain)(x)
    torch.testing.assert_close(ours, functional.linear(x, weight, offset), rtol=1e-4, atol=1e-4)


def missing(*_arguments):
    raise AttributeError("no such operator")


def wrong(x, _packed, _bias):
    return torch.zeros(len(x), 48)


@pytest.mark.parametrize(("name", "broken"), [("_pack", missing), ("_packed_product", missing), ("_packed_product", wrong)])
def test_operators_that_are_missing_or_wrong_are_not_used(name, broken, monkeypatch):
    monkeypatch.setattr(linear, name, broken)
    assert not packing_works(torch.float32, CPU)


def test_without_packing_the_plain_product_serves():
    weight, x = torch.randn(96, 64), torch.randn(5, 64)
    assert torch.equal(Linear(weight, packed=False, plain=False)(x), functional.linear(x, weight))


def test_a_second_copy_needs_memory_and_a_gain(monkeypatch):
    weights = [torch.randn(96, 64)]
    assert not plain_pays(weights, total_bytes=1 << 50)
    monkeypatch.setattr(linear, "_seconds", lambda run: 1.0)
    assert not plain_pays(weights, total_bytes=1)
    times = iter((1.0, 1.1))  # plain, packed
    monkeypatch.setattr(linear, "_seconds", lambda run: next(times))
    monkeypatch.setattr(linear, "_pack", lambda weight: weight)
    assert plain_pays(weights, total_bytes=1)
