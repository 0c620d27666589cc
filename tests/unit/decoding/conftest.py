"""Tiny targets, loaded once, and their long greedy answers from the uncached model."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import TargetConfig
from slipstream.target.model import Target, load_target
from support.tiny import save_tiny_target

PROMPT_LENGTHS = (5, 17, 33, 1, 40, 3)
ANSWER = 36


@pytest.fixture(scope="session")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """Return a loader of one tiny float32 target per family that never stops at eos."""

    @functools.cache
    def load(family: str) -> Target:
        directory = save_tiny_target(Path(tmp_path_factory.mktemp(family)) / "target", family)
        target = load_target(TargetConfig(path=str(directory)), device=torch.device("cpu"), dtype=torch.float32)
        return with_eos(target)

    return load


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def answers_of(target_of: Callable[[str], Target], prompts: list[list[int]]) -> Callable[[str], list[list[int]]]:
    """Return the first ANSWER greedy tokens of each prompt, found without any cache or padding."""

    @functools.cache
    def answers(family: str) -> list[list[int]]:
        target, out = target_of(family), []
        for prompt in prompts:
            ids = list(prompt)
            with torch.inference_mode():
                for _ in range(ANSWER):
                    logits = target.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                    ids.append(int(logits.argmax()))
            out.append(ids[len(prompt) :])
        return out

    return answers


def with_eos(target: Target, *eos: int, **changes: Any) -> Target:
    """Return the same target with other stop tokens (none by default) or other facts."""
    other = copy.copy(target)
    other.info = dataclasses.replace(target.info, eos_ids=tuple(eos), **changes)
    return other


@pytest.fixture(scope="session")
def altered() -> Callable[..., Target]:
    return with_eos
