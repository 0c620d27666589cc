"""The first signal is noted, the second one acts as ever, and handlers are put back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from slipstream.training.interrupt import Interrupts


@pytest.fixture(autouse=True)
def python_handlers():
    """Whatever the shell said: a background job is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_first_signal_is_noted_second_interrupts_and_handlers_return():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert interrupts.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_inert_in_other_threads():
    seen = []

    def work() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
