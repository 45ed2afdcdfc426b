"""Every layout's product is the ordinary one, and the absence of a layout costs speed alone."""

from __future__ import annotations

import pytest
import torch
from headway_runtime.model import linear
from headway_runtime.model.kernels import library
from headway_runtime.model.kernels.library import kernels
from headway_runtime.model.linear import MANY_ROWS, Linear, WeightLayout, WeightLayouts, choose_layouts, known_layouts
from torch.nn import functional

CPU = torch.device("cpu")
OURS = "compiled for this processor"


def known(name, dtype=torch.float32):
    """The layout of this name; a skip says what keeps it from working here."""
    for layout in known_layouts(dtype):
        if layout.name == name:
            return layout
    return pytest.skip(
        f"no layout {name} for {dtype} here: {kernels() if name == OURS else 'this torch or processor lacks it'}"
    )


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine that has none, whatever was compiled before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    kernels.cache_clear()
    yield tmp_path
    kernels.cache_clear()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 48, 95, 96, 97, MANY_ROWS, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["torch's", "oneDNN's", OURS])
def test_layouts_agree_at_every_number_of_rows(rows, bias, name):
    layout = known(name)
    torch.manual_seed(0)
    weight, x, offset = torch.randn(96, 64), torch.randn(rows, 64), torch.randn(96) if bias else None
    ours = Linear(weight, offset, WeightLayouts(layout, layout))(x)
    torch.testing.assert_close(ours, functional.linear(x, weight, offset), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (15, 7), (16, 288), (17, 289), (100, 1000), (250, 33)])
def test_our_layout_takes_every_shape_on_any_number_of_threads(outputs, inputs, count, threads):
    layout = known(OURS)
    threads(count)
    torch.manual_seed(1)
    weight, offset, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(101, inputs)
    expected = (x.double() @ weight.double().T + offset).float()
    torch.testing.assert_close(layout.lay_out(weight, offset)(x), expected, rtol=1e-4, atol=1e-4)


def test_in_our_layout_a_row_has_the_same_bits_whatever_is_computed_beside_it():
    layout = known(OURS)
    torch.manual_seed(2)
    product = layout.lay_out(torch.randn(70, 600), torch.randn(70))
    x = torch.randn(200, 600)
    whole = product(x)
    for first, last in ((0, 1), (3, 5), (50, 61), (7, 110)):
        assert torch.equal(product(x[first:last]), whole[first:last])


def test_our_layout_reads_rows_that_lie_apart_and_writes_nothing_beside_its_result():
    layout = known(OURS)
    torch.manual_seed(3)
    weight, wide = torch.randn(33, 40), torch.randn(9, 80)
    given = wide.clone()
    torch.testing.assert_close(
        layout.lay_out(weight, None)(wide[:, 20:60]), wide[:, 20:60] @ weight.T, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(wide, given)


def test_no_rows_give_no_rows():
    for layout in known_layouts(torch.float32):
        assert layout.lay_out(torch.randn(20, 8), None)(torch.empty(0, 8)).shape == (0, 20)


def missing(_weight, _bias):
    raise AttributeError("no such operator")


def wrong(weight, _bias):
    return lambda x: torch.zeros(len(x), len(weight))


@pytest.mark.parametrize("broken", [missing, wrong])
def test_layouts_that_are_missing_or_wrong_are_not_used(broken, monkeypatch):
    monkeypatch.setattr(linear, "_onednn", broken)
    monkeypatch.setattr(linear, "_compiled", lambda _kernels, weight, bias: broken(weight, bias))
    assert [layout.name for layout in known_layouts(torch.float32)] == ["torch's"]


def test_our_layout_is_for_float32_alone():
    assert OURS not in [layout.name for layout in known_layouts(torch.bfloat16)]


def test_a_machine_without_a_compiler_says_so_and_serves(no_compiler):
    assert "install gcc" in kernels()
    assert OURS not in [layout.name for layout in known_layouts(torch.float32)]
    weight, x = torch.randn(96, 64), torch.randn(5, 64)
    product = Linear(weight, None, choose_layouts([weight], 1, CPU))
    torch.testing.assert_close(product(x), functional.linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'cc1: error: bad value for -march' >&2; exit 1", "bad value for -march"),
        ("exit 3", "status 3"),
        ("exit 0", "cannot open shared object"),  # it made nothing
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "file too short"),
        ("sleep 60", "timed out"),
    ],
)
def test_a_compiler_that_fails_is_named_and_done_without(script, said, no_compiler, monkeypatch):
    compiler = no_compiler / "mycc"
    compiler.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(library, "_TIMEOUT", 1.0)
    assert said in kernels()
    assert "mycc" in kernels()
    assert OURS not in [layout.name for layout in known_layouts(torch.float32)]


def layout_taking(few, many, clock):
    """A layout whose products take this long by the clock that `_seconds` reads."""

    def lay_out(_weight, _bias):
        def product(x):
            clock["now"] += few if len(x) < MANY_ROWS else many
            return x

        return product

    return WeightLayout(f"{few}-{many}", lay_out)


@pytest.mark.parametrize(
    ("costs", "total_bytes", "chosen"),
    [
        ([(3, 9), (1, 5), (2, 7)], 1, "1-5"),
        ([(3, 2), (1, 5)], 1, "1-5, from 128 rows on 3-2"),
        ([(3, 2), (1, 5)], 1 << 50, "1-5"),  # no memory for a second copy
        ([(3, 100), (1, 102)], 1, "1-102"),  # a gain that is not worth one
    ],
)
def test_what_serves_few_rows_and_what_serves_many_is_measured(costs, total_bytes, chosen, monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(linear.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(
        linear, "known_layouts", lambda _dtype: [layout_taking(few, many, clock) for few, many in costs]
    )
    assert str(choose_layouts([torch.randn(96, 64)], total_bytes, CPU)) == chosen


def test_few_and_many_rows_each_take_their_layout():
    few, many = (WeightLayout(name, lambda _w, _b, name=name: lambda _x: name) for name in ("few", "many"))
    product = Linear(torch.randn(4, 4), None, WeightLayouts(few, many))
    assert (product(torch.empty(MANY_ROWS - 1, 4)), product(torch.empty(MANY_ROWS, 4))) == ("few", "many")
