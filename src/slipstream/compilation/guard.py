"""Flex attention that is compiled or refuses to run: never the unfused path, which makes every score at once.

torch runs ``flex_attention`` unfused, after one warning per process, whenever it is called outside a compiled region
(compilation switched off by an environment variable, a recompile limit, a graph break). Here the function that is
compiled looks for itself whether it is being traced, so that no such path can be taken unseen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slipstream.errors import PreflightError

if TYPE_CHECKING:
    from torch import Tensor

_lock = threading.Lock()
_compiled: list[Callable[..., Tensor]] = []


def refuse_eager_flex(query: Tensor, key: Tensor) -> None:
    """Raise PreflightError ``block-sparse`` with the shapes and the size of the score matrix that would have been made.

    query [R, heads, Q, d], key [R, kv_heads, K, d]. Thread-safe.
    """
    rows, heads, queries, _ = query.shape
    size = rows * heads * queries * key.shape[-2] * 4
    raise PreflightError(
        "block-sparse",
        f"flex_attention was called uncompiled with query {tuple(query.shape)} and key {tuple(key.shape)}; "
        f"it would make {size / 2**30:.3f} GiB of fp32 scores. Unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, "
        "or set training.attention = dense",
    )


def _flex(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
    """Call flex attention with grouped heads. Traced: the check below is folded away. Untraced: it raises."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_dynamo_compiling():
        refuse_eager_flex(query, key)
    # Below 128 queries the default is another kernel, for decoding; it has no configuration for many of our shapes
    # (96 queries with grouped heads: "no choices exist for backend").
    out: Tensor = flex_attention(  # type: ignore[assignment]
        query, key, value, block_mask=block_mask, enable_gqa=True, kernel_options={"BACKEND": "TRITON"}
    )
    return out


def compiled_flex_attention() -> Callable[..., Tensor]:
    """Return ``attend(query, key, value, block_mask) -> Tensor``, one compiled object for the process.

    ``fullgraph`` makes a graph break or an exhausted recompile limit an error, ``dynamic=False`` one kernel a shape.
    Inside another compiled region it is inlined. Creating it is thread-safe; its first call at each shape compiles and
    is not: make that call from one thread at a time.
    """
    import torch

    with _lock:
        if not _compiled:
            _compiled.append(torch.compile(_flex, fullgraph=True, dynamic=False))
        return _compiled[0]
