"""What one process is among several. Real groups are in tests/integration/test_ranks.py."""

from __future__ import annotations

import pytest
import torch

from slipstream.training.ranks import BUCKET_BYTES, Agreement, PeerError, _buckets, _peers, join, launched

ELASTIC = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ELASTIC:
        monkeypatch.delenv(name, raising=False)


def test_one_rank_sends_nothing_and_decides_for_itself() -> None:
    ranks = join(torch.device("cpu"))
    assert (ranks.rank, ranks.size, ranks.first) == (0, 1, True)
    gradients = [torch.ones(3), torch.ones(2, 2)]
    ranks.sum_gradients(gradients)
    assert all(torch.equal(g, torch.ones_like(g)) for g in gradients)
    assert ranks.sum_numbers(1.5, 2.0) == [1.5, 2.0]
    assert ranks.agree(stop=True, progress=0.5, finished=False) == Agreement(True, 0.5, False)
    assert ranks.on_first(lambda: "made") == "made"
    ranks.require_equal("anything", "x")
    assert not torch.distributed.is_initialized()


def test_a_batch_systems_rank_is_not_torch_elastics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert not launched()
    assert join(torch.device("cpu")).size == 1
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    assert launched()
    assert join(torch.device("cpu")).size == 1


def test_gradients_go_in_buckets_in_their_order() -> None:
    large = BUCKET_BYTES // 4
    gradients = [torch.empty(n, device="meta") for n in (10, large, 20, 30, 2 * large, 5)]
    found = _buckets(gradients)
    assert [g.numel() for bucket in found for g in bucket] == [g.numel() for g in gradients]
    assert [[g.numel() for g in bucket] for bucket in found] == [[10, large], [20, 30, 2 * large], [5]]


def test_what_a_collective_raises_is_a_peers_fault() -> None:
    with pytest.raises(PeerError, match="another rank cannot be reached: reset"), _peers():
        raise RuntimeError("reset")
    with pytest.raises(torch.OutOfMemoryError), _peers():  # but for what this rank has done itself
        raise torch.OutOfMemoryError("CUDA out of memory")
