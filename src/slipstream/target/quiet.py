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

_REFERENCE_KERNEL = "is falling back to its reference PyTorch implementation"
_ADVICE = (
    _REFERENCE_KERNEL,
    "LOAD REPORT",  # the caller reads the same facts from output_loading_info and reports them
    "The fast path is not available",
    "`torch_dtype` is deprecated",
    "Special tokens have been added in the vocabulary",
)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return _REFERENCE_KERNEL not in record.getMessage()


def without_kernel_advice() -> None:
    """Drop transformers' advice to install faster kernels, for good: on a CPU its own are the only ones. Thread-safe.

    It is given at the first forward, long after loading. On a GPU, where it matters, it stays.
    """
    from transformers.utils import logging as hf_logging

    for handler in hf_logging.get_logger("transformers").handlers:
        if _is_no_advice not in handler.filters:
            handler.addFilter(_is_no_advice)


class _HoldBack(logging.Filter):
    """Keeps this thread's records until it is known whether the load succeeds; drops advice."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[logging.LogRecord] = []
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if any(text in message for text in _ADVICE):
            return False
        if record.thread == self._thread:
            self.held.append(record)
        return record.thread != self._thread


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Load under this: no bars, no advice, one thread at a time. Thread-safe; may be nested.

    Other warnings reach the log at the end of a load that succeeds. One that fails raises, and the error says in one
    line what is wrong.
    """
    from transformers.utils import logging as hf_logging

    with _LOADING:
        shown = hf_logging.is_progress_bar_enabled()
        filters = [(handler, _HoldBack()) for handler in logging.getLogger("transformers").handlers]
        hf_logging.disable_progress_bar()
        for handler, hold in filters:
            handler.addFilter(hold)
        try:
            yield
        except BaseException:
            for _, hold in filters:
                hold.held.clear()
            raise
        finally:
            for handler, hold in filters:
                handler.removeFilter(hold)
                for record in hold.held:
                    handler.handle(record)
            if shown:
                hf_logging.enable_progress_bar()
