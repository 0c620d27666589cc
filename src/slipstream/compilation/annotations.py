"""Annotations of a graph that is being traced, made by threads that trace nothing.

``torch.fx.traceback.annotate`` writes into one dictionary of the process, from which every trace takes its nodes'
metadata. Since torch 2.13 making a block mask does so, with "fallback_to_eager": the annotation lands in the graph that
another thread is compiling just then, and that graph's nodes run uncompiled, without a word; or the other thread has
put the dictionary back in between, and the first one fails with ``KeyError: 'custom'``.

Here only a thread that traces annotates. For any other an annotation has no meaning. The body is changed in the
function itself, since dynamo knows ``annotate`` by its identity.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from slipstream.compilation.hazards import Hazard
from slipstream.compilation.thread_flags import Aside, names

_MODULE = "torch.fx.traceback"


def _traceback() -> Any:
    return sys.modules[_MODULE]


def _traces() -> bool:
    """Whether the calling thread traces: under dynamo's compile lock, into a proxy mode, or with FX."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and dynamo.compile_lock._is_owned():
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        return True
    fx = sys.modules.get("torch.fx._symbolic_trace")
    return fx is not None and bool(fx.is_fx_symbolic_tracing())


def _annotate_own(annotation_dict: Any) -> Iterator[None]:
    if _slipstream_traces():  # type: ignore[name-defined]  # noqa: F821
        yield from _slipstream_annotate(annotation_dict)  # type: ignore[name-defined]  # noqa: F821
    else:
        yield


def _unknown() -> str:
    traceback = _traceback()
    annotate = inspect.unwrap(traceback.annotate)
    code = getattr(annotate, "__code__", None)
    if code is None or code.co_freevars or "current_meta" not in names(code):
        return f"{_MODULE}.annotate does not write to current_meta"
    if code.co_varnames[: code.co_argcount] != ("annotation_dict",):
        return f"{_MODULE}.annotate takes {code.co_varnames[: code.co_argcount]}"
    return ""


def _apply() -> None:
    traceback = _traceback()
    annotate = inspect.unwrap(traceback.annotate)
    traceback._slipstream_annotate = FunctionType(annotate.__code__, annotate.__globals__, annotate.__name__)
    traceback._slipstream_traces = _traces
    annotate.__code__ = _annotate_own.__code__


def _check() -> str:
    traceback = _traceback()

    def body(hold: Any) -> None:
        with traceback.annotate({"slipstream": "probe"}):
            hold()

    with Aside(body) as aside:
        seen = "slipstream" in traceback.current_meta.get("custom", {})
    if aside.failure:
        return f"annotating in another thread failed: {aside.failure}"
    return "what another thread annotates is in every trace's metadata" if seen else ""


ANNOTATIONS = Hazard(
    name="annotations",
    what="a thread that makes a block mask marks the graph that another one compiles as not to be compiled",
    module=_MODULE,
    needed=lambda: hasattr(_traceback(), "annotate"),
    unknown=_unknown,
    apply=_apply,
    check=_check,
)
