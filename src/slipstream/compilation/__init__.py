"""Compilation and autotuning that are safe under threads, on cold caches, and never silently dense.

Usable alone: it imports nothing of the trainer, and torch only when it is called.
"""

from slipstream.compilation.dense import dense_flex_allowed
from slipstream.compilation.final_shapes import late_compilations, shapes_are_final, shapes_may_change
from slipstream.compilation.guard import compiled_flex_attention, first_call_alone
from slipstream.compilation.safety import install, report, verify
from slipstream.errors import CompilationError

__all__ = [
    "CompilationError",
    "compiled_flex_attention",
    "dense_flex_allowed",
    "first_call_alone",
    "install",
    "late_compilations",
    "report",
    "shapes_are_final",
    "shapes_may_change",
    "verify",
]
