"""After the shapes are final no recompilation goes unseen, whatever its cause."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slipstream.compilation import first_call_alone, late_compilations, shapes_are_final, shapes_may_change
from slipstream.errors import CompilationError

SCALE = 2.0


@pytest.fixture(autouse=True)
def _open() -> Iterator[None]:
    shapes_may_change()
    yield
    shapes_may_change()


class Counted:
    """A backend that counts, and runs the graph as it is."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.calls += 1
        return graph.forward


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def module_in_evaluation(backend: Counted) -> tuple[Callable[..., Any], Callable[[], None]]:
    dropout = torch.nn.Dropout(0.5)
    return first_call_alone(lambda x: dropout(x) + 1, backend=backend), lambda: dropout.train(False) and None


def changed_global(backend: Counted) -> tuple[Callable[..., Any], Callable[[], None]]:
    def change() -> None:
        global SCALE
        SCALE += 1.0

    return first_call_alone(scaled, backend=backend), change


CAUSES = [module_in_evaluation, changed_global]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_recompilation_is_an_error_with_the_functions_name(cause: Any) -> None:
    backend, x = Counted(), torch.ones(4)
    compiled, change = cause(backend)
    compiled(x)
    shapes_are_final(strict=True)
    compiled(x)  # warm
    assert (backend.calls, late_compilations()) == (1, {})
    change()
    for _ in range(2):  # not the first time only
        with pytest.raises(CompilationError, match=r"(lambda|scaled).*compiled again for the same signature"):
            compiled(x)
    assert backend.calls == 1
    shapes_may_change()
    compiled(x)  # and may be compiled again when that is allowed
    assert backend.calls == 2


@pytest.mark.parametrize("cause", CAUSES)
def test_a_recompilation_is_counted_and_logged_where_it_is_allowed(
    cause: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend, x = Counted(), torch.ones(4)
    compiled, change = cause(backend)
    compiled(x)
    shapes_are_final(strict=False)
    change()
    compiled(x)
    assert backend.calls == 2
    (count,) = late_compilations().values()
    assert count == 1
    assert "compiled again" in caplog.text


def test_masks_with_and_without_full_tiles_are_two_signatures() -> None:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    full = create_block_mask(causal, 1, 1, 256, 256, device="cpu")
    partial = BlockMask.from_kv_blocks(
        full.kv_num_blocks, full.kv_indices, None, None, full.BLOCK_SIZE, causal, (256, 256)
    )
    compiled = first_call_alone(lambda mask: mask.kv_num_blocks + 1, backend="eager")
    compiled(full)
    compiled(partial)
    assert compiled.signatures() == 2


def test_what_others_compile_is_counted_and_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    shapes_are_final(strict=True)

    def of_the_target(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    other = torch.compile(of_the_target, backend="eager", dynamic=False)
    for length in range(2, 5):
        other(torch.ones(length))
    (name,) = late_compilations()
    assert name.endswith("of_the_target")
    assert late_compilations()[name] == 3
    assert caplog.text.count("of_the_target") == 1  # once, not for every length


def test_an_error_of_the_function_itself_is_the_callers() -> None:
    compiled = first_call_alone(lambda x: x.view(3), backend="eager")
    compiled(torch.ones(3))
    shapes_are_final(strict=True)
    with pytest.raises(Exception, match="3") as raised:
        compiled(torch.ones(3).to(torch.float64).expand(2, 3))
    assert isinstance(raised.value, CompilationError)  # a new signature
    failing = first_call_alone(lambda x, fail: x + 1, backend=lambda g, _: _raises)
    shapes_may_change()
    with pytest.raises(ZeroDivisionError):
        failing(torch.ones(1), True)


def _raises(*_: Any) -> Any:
    raise ZeroDivisionError


def test_other_threads_are_told_too() -> None:
    backend, x, told = Counted(), torch.ones(4), []
    compiled, change = changed_global(backend)
    compiled(x)
    shapes_are_final(strict=True)
    change()

    def call() -> None:
        try:
            compiled(x)
        except CompilationError as error:
            told.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 4
    assert backend.calls == 1
