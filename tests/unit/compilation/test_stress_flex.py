from __future__ import annotations

import pytest
import torch

from slipstream.compilation import stress_flex as sf
from slipstream.compilation.stress_rounds import Counts


def test_plain_attention_is_flex_attention_s():
    from torch.nn.attention.flex_attention import flex_attention

    from slipstream.compilation import dense_flex_allowed

    q, k, v = torch.randn(2, 2, 128, 16), torch.randn(2, 1, 128, 16), torch.randn(2, 1, 128, 16)
    with dense_flex_allowed():
        expected = flex_attention(q, k, v, block_mask=sf._block_mask(128), enable_gqa=True)
    assert torch.allclose(sf._plain_attention(q, k, v), expected, atol=1e-5)


def test_the_annotation_that_block_masks_leave_is_the_one_that_is_looked_for(monkeypatch):
    annotate = getattr(torch.fx.traceback, "annotate", None)
    if annotate is None:
        pytest.skip("this torch has no annotations")
    seen = []

    def noted(what):
        seen.append(what)
        return annotate(what)

    monkeypatch.setattr(torch.fx.traceback, "annotate", noted)
    sf._block_mask(128)
    assert all(what == {sf.Masks.annotation: True} for what in seen)


def test_an_annotation_in_the_graph_is_seen():
    torch._dynamo.reset()
    work = sf.Masks()

    def annotated(x, w):
        with torch.fx.traceback.annotate({work.annotation: True}):
            return x @ w

    leaves = [torch.randn(2, 8), torch.randn(8, 8)]
    with pytest.raises(RuntimeError, match="another thread's annotation"), torch.fx.traceback.preserve_node_meta():
        work._body(annotated, leaves)()


@pytest.mark.parametrize("kind", sf.WORKLOADS, ids=lambda kind: kind.name)
def test_each_workload_hands_out_a_body_and_a_reference_for_each_thread(kind, monkeypatch):
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    work = kind()
    if work.lacking():
        pytest.skip(work.lacking())
    work.guard, work.counts = False, Counts()
    cold = work.cold(number=1, seed=0, threads=3)
    assert len(cold.bodies) == len(cold.alone) == len(cold.delays) == 3
    results = cold.alone[-1]()
    assert results
    assert all(torch.isfinite(r.float()).all() for r in results)
