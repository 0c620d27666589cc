from __future__ import annotations

import threading

import pytest
import torch

from slipstream.compilation.dense import refuse_eager_flex
from slipstream.compilation.guard import compiled_flex_attention
from slipstream.errors import CompilationError


def test_there_is_one_compiled_object_for_all_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(compiled_flex_attention())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(attend) for attend in found}) == 1


def test_an_uncompiled_call_is_an_error_with_shape_and_size():
    q, k = torch.empty(2, 32, 8192, 128, device="meta"), torch.empty(2, 8, 11264, 128, device="meta")
    with pytest.raises(CompilationError) as caught:
        refuse_eager_flex(q, k)
    assert "(2, 32, 8192, 128)" in str(caught.value)
    assert "(2, 8, 11264, 128)" in str(caught.value)
    assert "22.000 GiB" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_switching_compilation_off_does_not_reach_the_dense_path():
    x = torch.randn(1, 2, 128, 16)
    attend = compiled_flex_attention()
    with torch.compiler.set_stance("force_eager"), pytest.raises(CompilationError, match="uncompiled"):
        attend(x, x, x, None)


def test_inside_another_compiled_region_it_is_inlined():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        raise RuntimeError("only the trace is wanted")

    attend = compiled_flex_attention()
    torch._dynamo.reset()
    x = torch.randn(1, 2, 128, 16)
    with pytest.raises(Exception, match="only the trace is wanted"):
        torch.compile(lambda y: attend(y * 2, y, y, None) + 1, fullgraph=True, backend=backend)(x)
    assert len(graphs) == 1
    targets = {str(node.target) for node in graphs[0].graph.nodes}
    assert "flex_attention" in targets
