from __future__ import annotations

import contextlib
import logging
import threading

import pytest
from transformers.utils import logging as hf_logging

from slipstream.target.quiet import quiet_loading, without_kernel_advice


@pytest.fixture
def heard():
    """Collect what transformers' logger lets through."""
    messages: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    ear, logger = Ear(), logging.getLogger("transformers")
    logger.addHandler(ear)
    yield messages
    logger.removeHandler(ear)


def test_warnings_pass_and_advice_does_not(heard):
    logger = hf_logging.get_logger("transformers.test")
    advice = "`x` is falling back to its reference PyTorch implementation because `y` is not installed."
    with quiet_loading():
        logger.warning(advice)
        logger.warning("rope scaling is not understood")
    assert heard == ["rope scaling is not understood"]
    logger.warning(advice)
    assert heard[1:] == [advice]


def test_advice_about_kernels_can_be_dropped_for_good(heard):
    logger = hf_logging.get_logger("transformers.test")
    for _ in range(2):
        without_kernel_advice()
    logger.warning("`x` is falling back to its reference PyTorch implementation because `y` is not installed.")
    logger.warning("rope scaling is not understood")
    assert heard == ["rope scaling is not understood"]
    for handler in logging.getLogger("transformers").handlers:
        assert len([f for f in handler.filters if getattr(f, "__name__", "") == "_is_no_advice"]) == 1
        handler.filters.clear()


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_off_inside_and_as_before_outside(shown):
    before = hf_logging.is_progress_bar_enabled()
    (hf_logging.enable_progress_bar if shown else hf_logging.disable_progress_bar)()
    try:
        with contextlib.suppress(KeyError), quiet_loading():
            assert not hf_logging.is_progress_bar_enabled()
            raise KeyError
        assert hf_logging.is_progress_bar_enabled() is shown
    finally:
        (hf_logging.enable_progress_bar if before else hf_logging.disable_progress_bar)()


def test_one_thread_at_a_time_and_nesting_is_allowed():
    inside, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        for _ in range(20):
            with quiet_loading(), quiet_loading():
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                with lock:
                    inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


def test_warnings_of_a_load_that_fails_are_not_shown_beside_its_error(heard):
    logger = hf_logging.get_logger("transformers.test")
    with contextlib.suppress(KeyError), quiet_loading():
        with quiet_loading():
            logger.warning("a field is odd")
        raise KeyError
    assert heard == []
    with quiet_loading():
        with quiet_loading():
            logger.warning("a field is odd")
        logger.warning("another is, too")
    assert heard == ["a field is odd", "another is, too"]
