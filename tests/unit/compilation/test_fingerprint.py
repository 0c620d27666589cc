"""Fingerprints: what is recorded, and how a difference is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slipstream.compilation import fingerprint
from slipstream.config import Recipe


@dataclass(frozen=True)
class Drafter:
    layers: int = 5
    layer_types: tuple[str, ...] = ("full_attention",)


def the_work(**changes: object) -> fingerprint.Fields:
    given = {
        "target_digest": "d", "row_length": 64, "precision": torch.bfloat16, "attention": "flex",
        "device": torch.device("cuda", 0), **changes,
    }  # fmt: skip
    return fingerprint.work(Recipe(), Drafter(), **given)  # type: ignore[arg-type]


def test_an_environment_names_the_commit_that_torch_was_built_from() -> None:
    fields = fingerprint.environment(torch.device("cpu"))
    assert fields["torch"] == torch.__version__
    assert fields["torch commit"] == torch.version.git_version
    assert {"cuda", "triton", "fla", "python", "gpu", "capability", "driver"} <= set(fields)
    assert json.loads(json.dumps(fields)) == fields


def test_a_gpu_is_named_with_capability_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.1\necho 580.1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    fingerprint._driver.cache_clear()

    @dataclass
    class Properties:
        name: str = "A GPU"
        major: int = 9
        minor: int = 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    fields = fingerprint.environment("cuda:0")
    fingerprint._driver.cache_clear()
    assert (fields["gpu"], fields["capability"], fields["driver"]) == ("A GPU", "9.0", "580.1")


def test_a_driver_that_cannot_be_asked_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    fingerprint._driver.cache_clear()
    assert fingerprint._driver() is None
    fingerprint._driver.cache_clear()


def test_every_shape_counts() -> None:
    first = the_work()
    assert first == the_work()
    assert first["drafter.layer_types"] == ["full_attention"]
    assert first["precision"] == "bfloat16"
    for change in ({"row_length": 65}, {"target_digest": "e"}, {"attention": "dense"}, {"device": "cuda:1"}):
        assert fingerprint.digest(the_work(**change)) != fingerprint.digest(first)


def test_the_same_version_of_another_wheel_is_a_difference() -> None:
    here = {"torch": "2.13.0", "torch commit": "aaaa", "gpu": None}
    assert fingerprint.differences(here, {**here, "torch commit": "bbbb"}) == ["torch commit is aaaa here, bbbb there"]
    assert fingerprint.differences(here, here) == []
    assert fingerprint.differences(here, {**here, "more": 1}) == ["more is None here, 1 there"]
