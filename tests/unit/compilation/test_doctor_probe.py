"""What a fresh process finds here, and that an import that fails is an answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slipstream.compilation import doctor_probe
from slipstream.compilation.doctor_interview import Interview
from slipstream.compilation.doctor_probe import HAZARD_NAMES


def fake(directory: Path, package: str, code: str) -> None:
    (directory / package).mkdir()
    (directory / package / "__init__.py").write_text(code, encoding="utf-8")


def ask(mode: str, names: tuple[str, ...]):
    with Interview(mode, names, seconds=120) as interview:
        return interview.answers()


def test_a_broken_import_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "torch", "raise ImportError('libcudart.so.13: cannot open\\nshared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (answer,) = ask("packages", ("torch",)).values()
    assert answer == {"failed": "ImportError: libcudart.so.13: cannot open shared object file"}


def test_fla_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "fla", "")
    (tmp_path / "fla" / "utils.py").write_text("import no_such_module", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "no_such_module" in ask("packages", ("fla",))["fla"]["failed"]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    assert ask("packages", ("triton",)) == {"triton": {"version": None, "failed": ""}}


def test_nothing_compiled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert ask("packages", ("compile",)) == {"compile": {"compiled": False}}


def test_torch_tells_its_build_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    answers = ask("packages", ("torch", "compile", "gpus"))
    assert answers["torch"]["version"] == torch.__version__
    assert answers["torch"]["git_commit"] == torch.version.git_version
    assert answers["torch"]["cuda"] == torch.version.cuda
    assert answers["compile"] == {"compiled": True}
    assert len(answers["gpus"]["gpus"]) == torch.cuda.device_count()


@pytest.mark.slow
def test_stock_hazards_are_provoked_and_after_install_none_is_seen() -> None:
    for _ in range(8):  # other threads must come by within milliseconds, and a busy machine may not let them
        with Interview("stock", HAZARD_NAMES) as stock, Interview("installed", (*HAZARD_NAMES, "verify")) as installed:
            before, after = stock.answers(), installed.answers()
        provoked = all(answer["status"] != "not seen" for answer in before.values())
        if provoked and before["inductor-autotuner"]["status"] != "safe upstream":
            break
    assert tuple(before) == HAZARD_NAMES
    assert {a["status"] for a in before.values()} <= {"present", "safe upstream", "not installed"}
    for name in ("fx-modules", "lazy-backward", "inductor-autotuner", "dense-flex"):
        if before[name]["status"] != "not installed":
            assert before[name]["status"] == "present", before[name]
            assert before[name]["detail"]
    assert after["verify"] == {"seen": ""}
    for name in HAZARD_NAMES:
        assert after[name]["seen"] == ""
        assert (before[name]["status"], after[name]["status"]) in {
            ("present", "handled"),
            ("safe upstream", "safe upstream"),
            ("not installed", "not installed"),
        }


def test_gpus_are_named_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def memory(index: int) -> tuple[int, int]:
        if index:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        return 60, 80

    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 80

    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch, "ones", lambda n, device: ones(n))
    found = doctor_probe._gpus("gpus")
    assert found["peers"] == [[None, True], [False, None]]
    good, bad = found["gpus"]
    assert good == {
        "index": 0, "name": "NVIDIA H200", "capability": "9.0", "memory_total": 80, "memory_free": 60, "failed": "",
    }  # fmt: skip
    assert bad["memory_free"] is None
    assert bad["failed"] == "RuntimeError: CUDA error: out of memory more of it"
