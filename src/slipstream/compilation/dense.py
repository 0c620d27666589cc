"""Flex attention that runs uncompiled makes every score at once. Here that is an error, anywhere in the process.

torch warns of it once per process and goes on; the warning is not even given while something compiles. Every uncompiled
call sets up a compilation environment of its own, and no compiled call does: that is where it is met.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from slipstream.compilation.hazards import Hazard
from slipstream.errors import CompilationError

_MODULE = "torch.nn.attention.flex_attention"
_SETUP = "setup_compilation_env"


class _Allowed(threading.local):
    depth = 0


_allowed = _Allowed()


@contextlib.contextmanager
def dense_flex_allowed() -> Iterator[None]:
    """Let the calling thread call flex attention uncompiled on purpose: for small references and debugging."""
    _allowed.depth += 1
    try:
        yield
    finally:
        _allowed.depth -= 1


def refuse_eager_flex(query: Any, key: Any) -> None:
    """Raise CompilationError with the shapes and the size of the score matrix that would have been made.

    query [R, heads, Q, d], key [R, kv_heads, K, d]. Thread-safe.
    """
    rows, heads, queries, _ = query.shape
    size = rows * heads * queries * key.shape[-2] * 4
    raise CompilationError(
        f"flex_attention was called uncompiled with query {tuple(query.shape)} and key {tuple(key.shape)}; it would "
        f"make {size / 2**30:.3f} GiB of fp32 scores. Compile it with fullgraph=True, unset TORCHDYNAMO_DISABLE and "
        "TORCH_COMPILE_DISABLE, or choose a dense attention by name (training.attention = dense)"
    )


def _flex() -> Any:
    return sys.modules[_MODULE]


def _unknown() -> str:
    flex = _flex()
    if not hasattr(flex, _SETUP):
        return f"{_MODULE} has no {_SETUP}"
    if _SETUP not in flex.flex_attention.__code__.co_names:
        return f"{_MODULE}.flex_attention does not call {_SETUP}"
    return ""


def _apply() -> None:
    flex = _flex()
    setup = getattr(flex, _SETUP)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if not _allowed.depth:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code is not flex.flex_attention.__code__:
                frame = frame.f_back  # type: ignore[assignment]
            if frame is not None:
                refuse_eager_flex(frame.f_locals["query"], frame.f_locals["key"])
            raise CompilationError("flex_attention was called uncompiled; compile it with fullgraph=True")
        return setup(*args, **kwargs)

    setattr(flex, _SETUP, refuse)
    # torch's warning comes before that, once per process, and says what is not going to happen.
    shown: set[str] = getattr(flex, "_WARNINGS_SHOWN", set())
    shown.add("flex_attention_performance")


def _check() -> str:
    import torch

    x = torch.zeros(1, 1, 1, 16)
    try:
        _flex().flex_attention(x, x, x)
    except CompilationError:
        return ""
    except Exception as error:
        return f"an uncompiled call raised {type(error).__name__}: {error}"
    return "an uncompiled call went through"


DENSE_FLEX = Hazard(
    name="dense-flex",
    what="flex attention that is called uncompiled makes the whole score matrix, after one warning per process",
    module=_MODULE,
    needed=lambda: True,
    unknown=_unknown,
    apply=_apply,
    check=_check,
)
