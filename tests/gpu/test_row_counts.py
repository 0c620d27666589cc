"""Decoding a hybrid target on a GPU: neither other prompt lengths nor rows that end make FLA's kernels be tuned anew.

In bfloat16: float32 decodes by the recurrent kernel alone (``target.rules``), which is not tuned. FLA must be
importable (``PYTHONPATH=.venv/fla`` where it lies aside).
"""

from __future__ import annotations

import copy
import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import TargetConfig
from slipstream.decoding.speculative import decode_plain, decode_speculative
from slipstream.target.model import Target, load_target
from support.proposers import Follower
from support.tiny import save_tiny_target

pytestmark = pytest.mark.gpu

ROWS = 512


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return a hybrid target that ends often, so that rows end all along."""
    directory: Path = tmp_path_factory.mktemp("hybrid") / "target"
    save_tiny_target(
        directory, "qwen3_5", scale=2.0, hidden_size=256, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64
    )
    loaded = load_target(TargetConfig(path=str(directory), dtype="bfloat16"), device=torch.device("cuda"))
    ending = copy.copy(loaded)
    ending.info = dataclasses.replace(loaded.info, eos_ids=tuple(range(0, 250, 12)))
    return ending


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 250, (count, length), generator=generator).tolist()


@pytest.mark.skipif(find_spec("fla") is None, reason="FLA is not importable: set PYTHONPATH=.venv/fla")
def test_other_lengths_and_fewer_rows_tune_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.autotuner import Autotuner

    def both(count: int, length: int) -> None:
        options: dict[str, Any] = {"max_new_tokens": 24, "batch_size": ROWS}
        plain = decode_plain(target, prompts(count, length), **options)
        assert len({len(g.output_ids) for g in plain.generations}) > 3
        decode_speculative(
            target, Follower(lambda t: (7 * t + 1) % 250), prompts(count, length), block_size=4, **options
        )

    both(ROWS, 24)
    tuned: list[str] = []
    bench = Autotuner._bench

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        tuned.append(str(self.arg_names))
        return bench(self, *args, **kwargs)

    monkeypatch.setattr(Autotuner, "_bench", counted)
    both(ROWS, 60)  # 60 * 512 * 4 vectors are two blocks of the norm's; 24 * 512 * 4 are one
    both(ROWS, 90)
    both(100, 24)
    assert tuned == []
