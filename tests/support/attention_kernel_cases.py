"""What the tests of attention's kernels share: inputs, how a backend runs, what its results are held against."""

from __future__ import annotations

import functools

import attention_cases
import torch
from attention_cases import Place, reference
from interpreted import DEVICE, INTERPRETED, assert_as_specified
from witness import outputs_and_gradients

from tempo_kernels.attention import kernel as attention_kernel
from tempo_kernels.attention.settings import Inputs, Kept

# A sample later the number has no 32 bits any more.
settings = functools.partial(attention_cases.settings, first_sample=2**32 - 1)

if INTERPRETED:
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    def create_dot_as_the_gpu(self, a, b, d, *options):
        """The interpreter multiplies bfloat16 as integers, and sums in an order that depends on the shapes: the same
        product would differ from pass to pass, where it does not on a GPU."""
        a, b = (
            (t.data.astype(np.uint32) << 16).view(np.float32) if t.dtype.scalar == tl.bfloat16 else t.data
            for t in (a, b)
        )
        product = np.matmul(a.astype(np.float64), b.astype(np.float64)) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot_as_the_gpu


def run(module, q, k, v, grad, mask, chosen, **more):
    """out, grad_q, grad_k and grad_v, and the gradients of the bias and the sink where they are given."""
    return run_inputs(module, Inputs(q, k, v, mask, **more), grad, chosen)


def run_inputs(module, inputs, grad, chosen):
    out, logsumexp = module.forward(inputs, chosen)
    grads = module.backward(grad, inputs, Kept(out, logsumexp), chosen, needs_grad_bias=inputs.bias is not None)
    return [out, *(g for g in grads if g is not None)]


def check(q, k, v, grad, chosen, mask=None, sink=None, bias=None, alibi_slopes=None):
    """Three witnesses: the kernels, and unfused attention in the same dtype and in float64."""
    more = {"sink": sink, "bias": bias, "alibi_slopes": alibi_slopes}
    found = run(attention_kernel, q, k, v, grad, mask, chosen, **more)

    hidden, slopes = (None if t is None else t.cpu() for t in (mask, alibi_slopes))

    def specified(q, k, v, grad, sink, bias):
        def attend(q, k, v, bias, sink):
            return reference(q, k, v, chosen, hidden, sink, bias, slopes)

        return outputs_and_gradients(attend, [q, k, v, bias, sink], grad, q.dtype)

    given = {"bias": bias, "sink": sink}
    names = ["out", "grad_q", "grad_k", "grad_v", *(f"grad_{name}" for name, t in given.items() if t is not None)]
    assert_as_specified(found, [q, k, v, grad, sink, bias], specified, *names)


def random_inputs(*sizes, dtype):
    """q, k, v and grad of sq, sk, b, a, g, d."""
    return Place(*sizes).make_inputs(dtype, DEVICE)


def dropped_elements(chosen, sq, sk, b, a, d=128):
    """The mask [b, a, sq, sk] that the kernel applies in each of its passes: forward, and both gradients."""
    # All probabilities are equal; the columns of the unit matrix take them out one key at a time.
    zeros = torch.zeros(sq, b, a, d, dtype=torch.bfloat16, device=DEVICE)
    k = torch.zeros(sk, b, a, d, dtype=torch.bfloat16, device=DEVICE)
    unit = torch.eye(sk, d, dtype=torch.bfloat16, device=DEVICE).view(sk, 1, 1, d).expand(sk, b, a, d)
    inputs = Inputs(zeros, k, unit)
    out, logsumexp = attention_kernel.forward(inputs, chosen)
    forward = out[..., :sk].permute(1, 2, 0, 3) == 0
    # grad_v [key, query] is a probability where grad_out is the unit matrix too.
    grad_out = torch.eye(sq, d, dtype=torch.bfloat16, device=DEVICE).view(sq, 1, 1, d).expand(sq, b, a, d)
    grad_v = attention_kernel.backward(grad_out, inputs, Kept(out, logsumexp), chosen)[2]
    columns = grad_v[..., :sq].permute(1, 2, 3, 0) == 0
    # Of keys that are the unit matrix, grad_q [query, key] is the gradient of the scores: minus delta where dropped.
    ones = torch.ones_like(grad_out)
    values = torch.ones_like(k)
    inputs = Inputs(zeros, unit, values)
    out, logsumexp = attention_kernel.forward(inputs, chosen)
    grad_q = attention_kernel.backward(ones, inputs, Kept(out, logsumexp), chosen)[0]
    rows = grad_q[..., :sk].permute(1, 2, 0, 3) < 0
    return forward, rows, columns
