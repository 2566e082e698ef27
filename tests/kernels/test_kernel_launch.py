"""A launch by a plan hands over what Triton's own launch would: the variant, the grid and the arguments, on a GPU that
takes launches and computes nothing."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

import triton
import triton.language as tl
from fake_gpu import fake_gpu
from triton.runtime import driver

from tempo_kernels import kernel_launch
from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.kernel_launch import HAS_DESCRIPTORS, Layout, Plan, cache_plans, forget_plans, launch
from tempo_kernels.linear_cross_entropy import linear_cross_entropy
from tempo_kernels.norm import layer_norm

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the faked driver is compiled by gcc, which is not found"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the faked driver stands where there is no GPU"),
    pytest.mark.skipif(not hasattr(triton, "knobs"), reason="before triton 3.4, Triton makes every launch"),
]


OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["shift"])
def _kernel(x_ptr, y_ptr, out_ptr, size, shift, scale, HAS_Y: tl.constexpr):
    place = tl.arange(0, 16)
    x = tl.load(x_ptr + place, mask=place < size) * scale + shift
    if HAS_Y:
        x += tl.load(y_ptr + place)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty))


@triton.jit
def _described_kernel(x_ptr, out_ptr):
    tl.store(out_ptr + tl.arange(0, 32), tl.reshape(x_ptr.load([1, 0]), (32,)))


def read(argument):
    """Addresses for tensors, and for those that are described with how."""
    if hasattr(argument, "block_shape"):
        return argument.base.data_ptr(), argument.shape, argument.strides, argument.block_shape, argument.padding
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def read_encoded(argument):
    """Numbers, in lists or not, and the bytes of an encoded descriptor; what else Triton hands over is for hooks."""
    if isinstance(argument, (list, tuple)):
        return [read_encoded(one) for one in argument]
    if type(argument).__name__ == "PyCUtensorMap":
        return ctypes.string_at(id(argument) + type(argument).__basicsize__ - 128, 128)
    argument = read(argument)
    return argument if isinstance(argument, int) else None


class Launches(list):
    """What reached the launcher in C: the compiled function, the grid, and the arguments as `read` has them. Those of a
    launch by a plan, which skips Triton's method around it, and of Triton's own look alike there."""

    def __enter__(self):
        from triton.backends.nvidia.driver import CudaLauncher

        def find(method):
            def record(x, y, z, stream, function, *others):
                if isinstance(stream, int):  # kernel_launch marks the stream to find out what the method hands over
                    is_packed = isinstance(others[-1], (list, tuple))
                    metadata = next(place for place, other in enumerate(others) if isinstance(other, tuple))
                    self.append((function, (x, y, z), *map(read, others[-1] if is_packed else others[metadata + 4 :])))
                vars(method)["launch"](x, y, z, stream, function, *others)

            return record

        change = property(find, lambda method, launch: vars(method).update(launch=launch))
        self._patch = mock.patch.object(CudaLauncher, "launch", change, create=True)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


@pytest.fixture(scope="module")
def gpu():
    forget_plans()
    with fake_gpu() as count:
        yield count
    forget_plans()


def at(offset, dtype=torch.float32):
    """16 numbers whose address is so many bytes behind a multiple of 16."""
    memory = torch.zeros(256, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + offset
    return memory[start : start + 16 * dtype.itemsize].view(dtype)


@pytest.fixture
def by_triton(monkeypatch):
    """How often Triton made the launch."""
    calls = []
    run = type(_kernel).run
    monkeypatch.setattr(type(_kernel), "run", lambda self, *args, **named: calls.append(1) or run(self, *args, **named))
    return calls


CASES = list(itertools.product([0, 4], [None, 0, 8], [torch.float32, torch.float16], [1, 7, 16, 48, 2**31], [3]))


@pytest.fixture(scope="module")
def plans():
    @cache_plans
    def plan(size, has_y):
        return Plan((5,), ("shift",), size=size, scale=0.5, HAS_Y=has_y, **OPTIONS)

    return plan


def test_every_launch_hands_over_what_tritons_own_does(gpu, plans):
    """Alignments, absent tensors, dtypes and numbers in all combinations: each three times, so that the second and the
    third come from a plan, in an order in which every plan meets every alignment."""
    chosen = set()
    with Launches() as launches:
        for x_offset, y_offset, dtype, size, shift in CASES[::9] + CASES[5::17]:
            x, y, out = at(x_offset), None if y_offset is None else at(y_offset), at(0, dtype)
            for number in (shift, -shift, 2**31 - 1):
                named = {"size": size, "scale": 0.5, "HAS_Y": y is not None} | OPTIONS
                launch(_kernel, plans(size, y is not None), (x, y, out), (number,))
                _kernel[(5,)](x, y, out, shift=number, **named)
                found, expected = launches[-2:]
                assert found == expected, (x_offset, y_offset, dtype, size, number)
                chosen.add(expected[0])
    assert len(chosen) > 6, "the cases differ in what is compiled for them"


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this version of Triton gets no tensor descriptors")
def test_a_described_tensor_is_handed_over_as_tritons_own(gpu, by_triton):
    from triton.tools.tensor_descriptor import TensorDescriptor

    how = [4, 16], [16, 1], [2, 16]
    plan = Plan((5,), (), {0: Layout(*how)}, **OPTIONS)
    with Launches() as launches:
        for _ in range(3):
            x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.bfloat16)
            launch(_described_kernel, plan, (x, out))
            _described_kernel[(5,)](TensorDescriptor(x, *how), out, **OPTIONS)
            assert launches[-2] == launches[-1] and launches[-1][2] == (x.data_ptr(), *how, "zero")
            before = gpu()
            launch(_described_kernel, plan, (x, out))
            assert gpu() - before == 1
    assert len(by_triton) == 4, "the plan's first, and the three beside it"


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this version of Triton gets no tensor descriptors")
def test_a_descriptor_is_encoded_once_per_address_as_triton_encodes_it(gpu, monkeypatch):
    from triton.tools.tensor_descriptor import TensorDescriptor

    how, out, launches, encoded = ([4, 16], [16, 1], [2, 16]), torch.zeros(32), [], []
    first, second, third = torch.zeros(3, 128, dtype=torch.bfloat16).unbind()
    wrapper = _described_kernel[(5,)](TensorDescriptor(first, *how), out, **OPTIONS).run.launch
    in_c = wrapper.__closure__[wrapper.__code__.co_freevars.index("launcher")]
    monkeypatch.setattr(in_c, "cell_contents", lambda *arguments: launches.append([*map(read_encoded, arguments)]))
    is_newer = hasattr(driver.active.utils, "fill_tma_descriptor_tiled")
    encoder = "fill_tma_descriptor_tiled" if is_newer else "fill_tma_descriptor"
    encode = getattr(driver.active.utils, encoder)
    monkeypatch.setattr(driver.active.utils, encoder, lambda *given: encoded.append(given) or encode(*given))
    monkeypatch.setattr(kernel_launch, "MAX_ENCODED", 2)
    plan, counts = Plan((5,), (), {0: Layout(*how)}, **OPTIONS), []
    launch(_described_kernel, plan, (first, out))
    for x in (first, first, second, first, third, first):
        encoded.clear()
        launch(_described_kernel, plan, (x, out))
        counts.append(len(encoded))
        _described_kernel[(5,)](TensorDescriptor(x, *how), out, **OPTIONS)
        assert launches[-2] == launches[-1]
    assert counts == [1, 0, 1, 0, 1, 1], "two are kept"
    assert launches[-1] != launches[-3], "another address"


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this version of Triton gets no tensor descriptors")
def test_a_driver_that_takes_no_descriptor_is_named_with_what_to_do(gpu, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    monkeypatch.setattr(type(_described_kernel), "run", refuse)
    plan = Plan((1,), (), {0: Layout((2, 32), (32, 1), (1, 32))}, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"_described_kernel: .*invalid argument.*; set TEMPO_DESCRIPTORS=0 in the"):
        launch(_described_kernel, plan, (torch.zeros(64), at(0)), ())
    with pytest.raises(RuntimeError, match="^Triton Error"):
        launch(_described_kernel, Plan((1,), **OPTIONS), (torch.zeros(64), at(0)), ())


def test_the_second_launch_is_not_tritons(gpu, by_triton):
    plan = Plan((5,), ("shift",), size=16, scale=0.5, HAS_Y=False, **OPTIONS)
    for number in (3, 4, 5):
        launch(_kernel, plan, (at(0), None, at(0)), (number,))
    assert len(by_triton) == 1
    launch(_kernel, plan, (at(4), None, at(0)), (3,))
    assert len(by_triton) == 2, "another alignment is another variant"
    launch(_kernel, plan, (at(0), None, at(0)), (2**31,))
    assert len(by_triton) == 3, "a number of 64 bits is not for a variant that takes 32"
    launch(_kernel, plan, (at(0), None, at(0)), (3,))
    assert len(by_triton) == 3


def test_triton_launches_what_lies_on_two_devices(gpu, by_triton, monkeypatch):
    """It refuses a tensor that the GPU cannot read."""
    plan, x, out = Plan((5,), ("shift",), size=16, scale=0.5, HAS_Y=False, **OPTIONS), at(0), at(0)
    for device in (0, 0, 1, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, device=device: device if tensor is out else 0)
        launch(_kernel, plan, (x, None, out), (3,))
    assert len(by_triton) == 3


def test_what_wants_to_see_launches_sees_them_all(gpu, by_triton):
    plan = Plan((5,), ("shift",), size=16, scale=0.5, HAS_Y=False, **OPTIONS)
    seen = []
    see = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    launch(_kernel, plan, (at(0), None, at(0)), (3,))
    triton.knobs.runtime.launch_enter_hook.add(see)
    try:
        for _ in range(2):
            launch(_kernel, plan, (at(0), None, at(0)), (3,))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(see)
    assert seen == ["_kernel"] * 2


def test_a_number_that_is_specialized_cannot_vary(gpu):
    plan = Plan((5,), ("size",), shift=3, scale=0.5, HAS_Y=False, **OPTIONS)
    with pytest.raises(AssertionError):
        launch(_kernel, plan, (at(0), None, at(0)), (3,))


def leaves(*shapes):
    return [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def run_attention(q, k, v):
    return attention(q, k, v, causal=True, softmax_scale=0.125, dropout_p=0.1, dropout_key=1 << 40)


def leaves_of_norm():
    """No channel is lost."""
    x, weight, bias = leaves((4, 2, 64), (64,), (64,))
    with torch.no_grad():
        weight.fill_(1.0), bias.zero_()
    return x, weight, bias


LABELS = torch.zeros(2, 4, dtype=torch.int64)
OPERATIONS = {
    "gelu": (gelu, leaves((4, 2, 64), (64,)), 3),
    "layer_norm": (layer_norm, leaves_of_norm(), 4),
    "layer_norm, keep input": (partial(layer_norm, keep="input"), leaves_of_norm(), 3),
    "bias_dropout_add": (partial(bias_dropout_add, p=0.1, key=7), leaves((4, 2, 64), (64,), (4, 2, 64)), 3),
    "linear_cross_entropy": (partial(linear_cross_entropy, labels=LABELS), leaves((4, 2, 64), (32, 64)), 4),
}


@pytest.mark.parametrize(("operation", "inputs", "num_launches"), OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_launches_anew_what_it_launched_before(gpu, by_triton, operation, inputs, num_launches):
    for _ in range(2):
        before = gpu()
        operation(*inputs).sum().backward()
        assert gpu() - before == num_launches
        assert len(by_triton) <= num_launches
    by_triton.clear()
    operation(*inputs).sum().backward()
    assert not by_triton


def test_attention_of_other_strides_has_other_arguments(gpu):
    """Slices of one tensor, then tensors of their own, then a view in another order, in turn: what reaches the launcher
    is what Triton's own launch of the same call hands over."""
    whole = torch.randn(4, 2, 1, 192, dtype=torch.bfloat16)
    apart = [torch.randn(4, 2, 1, 64, dtype=torch.bfloat16) for _ in range(3)]
    turned = [torch.randn(2, 4, 1, 64, dtype=torch.bfloat16).transpose(0, 1) for _ in range(3)]
    found = {}
    with Launches() as launches:
        for name, inputs in [("slices", whole.split(64, -1)), ("apart", apart), ("turned", turned)] * 2:
            run_attention(*inputs)
            found.setdefault(name, []).append(launches[-1])
            if name == "turned":
                forget_plans()
    for first, second in found.values():
        # Behind the function and the grid: q, k, v; then out and logsumexp, which are new memory in every call.
        assert first[2:5] == second[2:5] and first[7:] == second[7:]
    assert len({tuple(calls[0][11:20]) for calls in found.values()}) == 3
