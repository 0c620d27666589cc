"""Loading without transformers' progress bars and advice, and without losing its warnings."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

LOAD_ERRORS = (Exception,)
"""What transformers may raise for a user's files: anything, since parsers of damaged files raise struct.error, plain
Exception and more. It guards such calls only, and a TargetError is always raised from what was caught."""

# from_pretrained changes torch's default dtype and the progress-bar switch, both of them global to the process.
_LOADING = threading.RLock()

_ADVICE = (
    "is falling back to its reference PyTorch implementation",
    "LOAD REPORT",  # the caller reads the same facts from output_loading_info and reports them
    "The fast path is not available",
    "`torch_dtype` is deprecated",
    "Special tokens have been added in the vocabulary",
)


class _WithoutAdvice(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(text in message for text in _ADVICE)


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Load under this: no bars, no advice, one thread at a time. Other warnings still reach the log. Thread-safe."""
    from transformers.utils import logging as hf_logging

    with _LOADING:
        shown = hf_logging.is_progress_bar_enabled()
        handlers = list(logging.getLogger("transformers").handlers)
        keep = _WithoutAdvice()
        hf_logging.disable_progress_bar()
        for handler in handlers:
            handler.addFilter(keep)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(keep)
            if shown:
                hf_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or its type's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
