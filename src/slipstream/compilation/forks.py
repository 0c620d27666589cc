"""What a forked child has of a compilation that another thread of its parent was making: locks and patches of torch.

The child has the forking thread alone. Nobody is left there to release dynamo's lock, under which every compilation
and every trace is made, or to put back what they have set for the whole process. Both are mended here, in the child.
Nothing is done in the parent, nor in a child of the very thread that compiles, which goes on with it in both.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

from slipstream.compilation.fx_trace import outer_patchers, trace_lock
from slipstream.compilation.locks import open_in_child

_watching = False
# Dynamo imports it in the middle of a process's first trace of a module. An import that another thread is at when the
# process forks is never done in the child: it would wait for ever to trace a module of its own.
_IMPORTED_LATE = "torch.distributed.tensor.experimental._func_map"
# What torch sets for the process while it traces or compiles, and puts back: how it is when nothing does.
_AT_REST: dict[str, dict[str, Any]] = {
    "torch.fx._symbolic_trace": {"CURRENT_PATCHER": None},
    # The node that is being traced: what is annotated there would be on every node that the child traces.
    "torch.fx.traceback": {
        "should_preserve_node_meta": False,
        "_should_preserve_node_meta": False,
        "current_replay_node": None,
    },
    # Graph modules that dynamo skips: the child's own would run uncompiled.
    "torch.fx._lazy_graph_module": {"_use_lazy_graph_module_flag": False},
    "torch._dynamo.trace_rules": {"_force_inline_flag": False},
}


def watch() -> None:
    """See to the children that are forked from now on. Idempotent; the caller holds the lock of ``install``."""
    global _watching
    if not _watching:
        _watching = True
        if sys.modules["torch"].distributed.is_available():
            with contextlib.suppress(ImportError):
                importlib.import_module(_IMPORTED_LATE)
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    if not open_in_child(trace_lock()):
        return  # nothing was being compiled, or by the thread that forked
    _take_back_patches()
    traceback: Any = sys.modules.get("torch.fx.traceback")
    if hasattr(traceback, "current_meta"):
        traceback.current_meta = {}
    for name, values in _AT_REST.items():
        module = sys.modules.get(name)
        for attribute, value in values.items():
            if hasattr(module, attribute):
                setattr(module, attribute, value)
    _make_forwards_as_ever()


def _take_back_patches() -> None:
    """Give ``torch.nn.Module`` and wrapped functions back, which are the tracer's during a trace.

    The tracer lets other threads' modules pass, but a thread of the child may well have the number of its own.
    """
    fx = sys.modules.get("torch.fx._symbolic_trace")
    for patcher in (getattr(fx, "CURRENT_PATCHER", None), *reversed(outer_patchers)):
        for patch in reversed(getattr(patcher, "patches_made", ())):
            with contextlib.suppress(KeyError):  # dynamo takes patches back while it compiles within a trace
                patch.revert()
    outer_patchers.clear()


def _make_forwards_as_ever() -> None:
    """While dynamo compiles, the forward of every graph module that is made is one that dynamo skips."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    module: Any = sys.modules.get("torch.fx.graph_module")
    skipped = getattr(dynamo, "fx_forward_from_src_skip_result", None)
    upstream = getattr(dynamo, "original_forward_from_src", None)
    if upstream is not None and getattr(module, "_forward_from_src", None) is skipped:
        module._forward_from_src = upstream
