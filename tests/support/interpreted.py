"""What the tests of kernels share: where kernels run, and what their results are held against.

Under TRITON_INTERPRET=1 they run on the CPU, in Triton's interpreter; without it, on a GPU. The variable counts when
triton is imported, for a whole process: test_kernels_interpreted.py starts one for it.
"""

from __future__ import annotations

import os
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from witness import assert_within_rule

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kernel_test(function):
    """Poisons what the kernels allocate, and has launches planned anew; outside of the interpreter, asks for a GPU."""
    function = pytest.mark.usefixtures("nan_poison", "fresh_plans")(function)
    return function if INTERPRETED else pytest.mark.gpu(function)


if INTERPRETED:
    from fast_interpreter import accelerate
    from triton import language as tl
    from triton.runtime import interpreter

    convert_float = interpreter._convert_float

    def convert_float_as_the_gpu(value, from_type, to_type, rounding):
        """The interpreter cuts float32 off to bfloat16 where a GPU rounds to the nearest."""
        if (from_type, to_type) != (tl.float32, tl.bfloat16):
            return convert_float(value, from_type, to_type, rounding)
        rounded = torch.from_numpy(np.array(value, dtype=np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = convert_float_as_the_gpu

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, *scope):
        """Triton 3.6 asks numpy for the number in an array of one dimension, which numpy 2.4 refuses."""
        patch_tensor(tensor, *scope)
        set_attribute = scope[0].set_attr if scope else setattr
        set_attribute(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy

    patch_language = interpreter._patch_lang
    patched: set[ModuleType] = set()

    def patch_language_once_per_launch(fn):
        """Each call of a device function would patch all of triton.language again, which takes a third of the time:
        it is patched already, until the launch ends and restores it."""
        languages = {value for value in fn.__globals__.values() if isinstance(value, ModuleType)} & {tl, tl.core}
        if languages <= patched:
            return None
        scope = patch_language(fn)
        if scope is None:  # an older Triton, which restores nothing
            return None
        if not patched:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(languages)
        return scope

    interpreter._patch_lang = patch_language_once_per_launch
    accelerate()


def round_sums(grads):
    """Gradients in the dtype of the first: the specification gives sums in float32, and kernels round theirs."""
    return [grad.to(grads[0].dtype) for grad in grads]


def assert_as_specified(found, inputs, specification, *names):
    """Each result by the rule of three witnesses: the specification in the same dtype and in float64 are two."""
    inputs = [t.cpu() if isinstance(t, Tensor) else t for t in inputs]
    same = specification(*inputs)
    exact = specification(*[t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs])
    for name, ours, theirs, truth in zip(names, found, same, exact, strict=True):
        assert_within_rule(name, ours.cpu(), theirs, truth)


def check_backward(kernel, eager, tensors, *choice):
    """An activation's grad_x and grad_bias, and grad_x alone, of the functions' (*tensors, *choice, has_bias)."""
    found = kernel(*tensors, *choice, True)
    specified = lambda *t: round_sums(eager(*t, *choice, True))  # noqa: E731
    assert_as_specified(found, tensors, specified, "grad_x", "grad_bias")
    alone, nothing = kernel(*tensors, *choice, False)
    assert torch.equal(alone, found[0]) and nothing is None


def check_many_tiles(monkeypatch, check, inputs, grad_bias_of):
    """`check` where one program sums many tiles, and the sums that `grad_bias_of` gives of them are the same bits."""
    from tempo_kernels import kernel_sums

    monkeypatch.setattr(kernel_sums, "count_multiprocessors", lambda device: 1)
    check(*inputs)
    assert torch.equal(grad_bias_of(*inputs), grad_bias_of(*inputs))
