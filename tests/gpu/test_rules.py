"""A float32 target on a GPU with FLA: decoding sums in float32, and a CPU and a GPU share a process.

FLA must be importable (``PYTHONPATH=.venv/fla`` where it lies aside).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from slipstream.config import TargetConfig
from slipstream.decoding.losslessness import compare_lossless
from slipstream.decoding.plain import decode_plain
from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.recurrent import RecurrentStates
from slipstream.decoding.rollback import TargetState
from slipstream.decoding.speculative import decode_speculative
from slipstream.target.model import Target, load_target
from slipstream.target.rules import Rule
from support.proposers import Follower
from support.tiny import save_tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("fla") is None, reason="FLA is not importable: set PYTHONPATH=.venv/fla"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(
        tmp_path_factory.mktemp("hybrid") / "target", "qwen3_5", scale=2.0, hidden_size=256, head_dim=64,
        linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return load_target(TargetConfig(path=str(directory)), device=torch.device("cuda"), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 250, (5 + 3 * n,), generator=generator).tolist() for n in range(32)]


def chunked(target: Target) -> Rule:
    rule = sys.modules[type(target.model).__module__].torch_chunk_gated_delta_rule
    assert isinstance(rule, Rule)
    assert rule.exact is not None
    return rule


@torch.inference_mode()
def apart(target: Target, prompts: list[list[int]]) -> float:
    """Return the relative difference between a block of eight tokens and the same tokens one by one."""
    call = DecoderCall(target)
    block = torch.arange(8 * len(prompts), device=target.device).remainder(250).view(len(prompts), 8)
    with TargetState(call, prefill(call, prompts, None), 256) as whole:
        at_once = whole.verify(block)
    singles = []
    with TargetState(call, prefill(call, prompts, None), 256) as stepwise:
        for token in block.split(1, dim=1):
            singles.append(stepwise.verify(token))
            stepwise.commit([1] * len(prompts))
    return float((at_once - torch.cat(singles, dim=1)).norm() / at_once.norm())


def test_blocks_and_single_tokens_are_read_alike(target, prompts, monkeypatch):
    exact = apart(target, prompts[:8])
    monkeypatch.setattr(chunked(target), "exact", None)
    stock = apart(target, prompts[:8])
    told = f"apart {exact:.1e} by the recurrent kernel, {stock:.1e} by the chunked ones"
    print(told)
    assert exact < 1e-4, told
    assert exact < stock, told


def test_a_gpu_and_a_cpu_find_the_same(target, directory, prompts):
    """In one process; the CPU by transformers' own code, the GPU by kernels that sum in float32."""
    here = load_target(TargetConfig(path=str(directory)), device=torch.device("cpu"), dtype=torch.float32)
    for prompt in prompts[-3:]:
        with torch.inference_mode():
            found, truth = (prefill(DecoderCall(t), [prompt], None).logits.cpu() for t in (target, here))
        difference = float((found - truth).norm() / truth.norm())
        print(f"logits of {len(prompt)} tokens: {difference:.1e}")
        assert difference < 1e-4


@pytest.mark.parametrize("fault", [False, True])
def test_float32_is_lossless_and_a_fault_is_found(target, prompts, fault, monkeypatch):
    options = {"max_new_tokens": 64, "batch_size": 16}
    plain = decode_plain(target, prompts, **options).generations
    following = {a: b for g in plain for a, b in pairwise(g.output_ids)}
    if fault:
        monkeypatch.setattr(RecurrentStates, "roll_back", lambda *_: None)
    drafts = Follower(lambda token: following.get(token, 0))
    spec = decode_speculative(target, drafts, prompts, block_size=8, **options).generations
    result = compare_lossless(plain, spec, target=target, batch_size=16)
    print(f"{result.equal} of {result.responses} equal, rounding noise {result.rounding_noise}")
    assert bool(result.faults) is fault, result.first_differences
    if result.rounding_noise is not None:
        assert result.rounding_noise < 1e-3
