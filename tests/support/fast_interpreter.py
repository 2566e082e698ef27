"""Triton's interpreter in two fifths of its time: what never changes is not made anew for every operation.

An operation of the interpreter costs far more in the descriptions of its types than in NumPy. Nothing here changes what
an operation computes. interpreted.py calls accelerate, in a process that runs kernels under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses

from triton import language as tl
from triton.runtime import interpreter


def keep_dtypes_of_numpy() -> None:
    """A type's name says all that its dtype in NumPy depends on; pointers have no hash."""
    find_dtype, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        if dtype.name not in found:
            found[dtype.name] = find_dtype(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = get_np_dtype


def keep_types_of_blocks() -> None:
    """One object per type of a block, whoever makes it, and one of what the builder (there is one) has for it."""
    initialize, to_ir, blocks = tl.core.block_type.__init__, tl.core.block_type.to_ir, {}

    def make(cls, element_ty, shape):
        pointer = (element_ty.address_space, element_ty.const) if element_ty.is_ptr() else ()
        key = (element_ty.name, pointer, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            block = object.__new__(cls)
            initialize(block, element_ty, shape)
            blocks[key] = block
        return blocks[key]

    def get_ir(self, builder):
        if "_ir" not in vars(self):
            self._ir = to_ir(self, builder)
        return self._ir

    tl.core.block_type.__new__ = make
    tl.core.block_type.__init__ = lambda self, element_ty, shape: None
    tl.core.block_type.to_ir = get_ir


def describe_tensors_once_per_type() -> None:
    """All that a tensor is made of but its handle (shape, size, dtype) follows from its type."""
    describe = tl.core.tensor.__init__

    def initialize(self, handle, type):
        description = vars(type).get("_description_of_tensors")
        if description is None:
            describe(self, handle, type)
            type._description_of_tensors = {name: value for name, value in vars(self).items() if name != "handle"}
            return
        vars(self).update(description)
        self.handle = handle

    tl.core.tensor.__init__ = initialize


def compare_dtypes_by_identity_first() -> None:
    """Most dtypes that are compared are the same object."""
    is_equal = tl.core.dtype.__eq__
    tl.core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def compute_no_check_that_nobody_reads() -> None:
    """Whether each integer sum and product overflows is found out in int64, for an assertion that only debug makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def accelerate() -> None:
    keep_dtypes_of_numpy()
    keep_types_of_blocks()
    describe_tensors_once_per_type()
    compare_dtypes_by_identity_first()
    compute_no_check_that_nobody_reads()
