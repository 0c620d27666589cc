"""The Triton kernel of stress runs on a GPU. Imports Triton: only the CUDA workloads import it, when they run.

It stands alone because Triton reads a kernel's source, and finds the names in it among the module's.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def add_one_and_copy(x, y, n, block: tl.constexpr, change: tl.constexpr):  # type: ignore[no-untyped-def]
    """``y = x``, and then ``x = x + 1`` if ``change``, for the first ``n`` elements."""
    offset = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + offset, mask=offset < n)
    tl.store(y + offset, value, mask=offset < n)
    if change:
        tl.store(x + offset, value + 1.0, mask=offset < n)
