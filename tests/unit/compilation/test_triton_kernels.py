"""Compiled Triton kernels travel from one cache to another, and only whole and by their own names."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.compilation import triton_kernels
from slipstream.compilation.triton_kernels import collect, decode, encode, restore

HASH = "0123456789abcdef" * 4
META = json.dumps({"name": "k", "hash": HASH, "target": {"backend": "cuda"}}).encode()
FILES = {"k.json": META, "k.cubin": b"\x7fELF\x00code", "k.ptx": b".version 8"}

# Triton compiles for a GPU that is not there: only a launch needs one.
PROGRAM = """
    import os, sys
    sys.path.insert(0, sys.argv[2])
    import triton
    from triton.backends.compiler import GPUTarget
    from slipstream.compilation import triton_kernels
    from kernel_for_test import double
    where = sys.argv[1]
    if os.path.exists(where):
        print("put", triton_kernels.restore(triton_kernels.decode(open(where, "rb").read())))
    triton_kernels.count_compiled()
    source = triton.compiler.ASTSource(fn=double, signature={"x": "*fp32", "n": "i32"}, constexprs={})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print("compiled", triton_kernels.compiled())
    if not os.path.exists(where):
        open(where, "wb").write(triton_kernels.encode(triton_kernels.collect({kernel.hash: kernel})))
"""

KERNEL = """
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, n):
        place = tl.program_id(0)
        tl.store(x + place, tl.load(x + place, mask=place < n) * 2, mask=place < n)
"""


def kernel(root: Path, files: dict[str, bytes] = FILES) -> SimpleNamespace:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return SimpleNamespace(hash=HASH, metadata_group={name: str(root / name) for name in files})


def test_what_is_collected_comes_back(tmp_path: Path) -> None:
    found = collect({HASH: kernel(tmp_path)})
    assert found == {HASH: FILES}
    assert decode(encode(found)) == found
    assert encode(found) == encode(decode(encode(found)))
    assert decode(b"") == {}


def test_a_kernel_whose_files_have_gone_is_left_out(tmp_path: Path) -> None:
    made = kernel(tmp_path)
    (tmp_path / "k.cubin").unlink()
    assert collect({HASH: made}) == {}


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name in names:
            made.writestr(name, b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"no archive",
        archive("../../etc/passwd"),
        archive(f"{HASH}/../../x.json"),
        archive(f"{HASH}/.hidden"),
        archive(f"{HASH}/a/b.json"),
        archive("short/k.json"),
        archive(f"{HASH}/k.cubin"),
        encode({HASH: FILES})[:-30],
        encode({HASH: {"k.json": META}}),  # no binary
        encode({HASH: {**FILES, "k.cubin": b""}}),
        encode({HASH: {**FILES, "l.json": META}}),  # two that describe it
        encode({HASH: {**FILES, "k.json": b"{}"}}),
        encode({HASH: {**FILES, "k.json": b"\0\0"}}),
        encode({"f" * 64: FILES}),  # under another one's hash
        encode({HASH: {**FILES, "__grp__k.json": b"{}"}}),
        encode({HASH: {**FILES, "lock": b""}}),
        encode({HASH: {**FILES, "a\nb": b""}}),
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        decode(content)


def test_kernels_are_put_where_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert restore({HASH: FILES}) == 1
    group = get_cache_manager(HASH).get_group("k.json")
    assert group is not None
    assert {name: Path(path).read_bytes() for name, path in group.items()} == FILES
    assert all(path.startswith(str(tmp_path / "cache")) for path in group.values())
    assert restore({HASH: FILES}) == 0
    Path(group["k.cubin"]).unlink()
    assert restore({HASH: FILES}) == 1
    for torn in ("k.cubin", "k.json", "__grp__k.json"):  # as a machine leaves them that lost its power
        Path(group["k.json"]).with_name(torn).write_bytes(b"")
        assert restore({HASH: FILES}) == 1
        found = get_cache_manager(HASH).get_group("k.json")
        assert found is not None
        assert {name: Path(path).read_bytes() for name, path in found.items()} == FILES
    assert restore({}) == 0


def test_launches_are_collected_while_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("triton.compiler.compiler")

    class Compiled:
        hash = HASH

        def launch_metadata(self, grid: object) -> str:
            return f"told {grid}"

    monkeypatch.setattr(compiler, "CompiledKernel", Compiled)
    before = Compiled.launch_metadata
    one = Compiled()
    with triton_kernels.launched() as found:
        assert one.launch_metadata((1,)) == "told (1,)"
    assert found == {HASH: one}
    assert Compiled.launch_metadata is before


@pytest.mark.slow
def test_another_process_finds_a_kernel_and_compiles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "kernel_for_test.py").write_text(textwrap.dedent(KERNEL), encoding="utf-8")

    def told(cache: str) -> str:
        source = str(Path(__file__).resolve().parents[3] / "src")
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / cache), "PYTHONPATH": source}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "kernels.zip"), str(tmp_path)],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert told("one") == "compiled 1\n"
    assert told("two") == "put 1\ncompiled 0\n"
    os.rename(tmp_path / "kernels.zip", tmp_path / "aside.zip")
    assert told("three") == "compiled 1\n"  # without them it is compiled again


def test_what_another_listener_hides_is_not_told_as_none(fresh) -> None:
    told = fresh("""
        import triton
        from slipstream.compilation import triton_kernels
        print(triton_kernels.compiled(), end=" ")
        triton_kernels.count_compiled()
        print(triton_kernels.compiled(), end=" ")
        triton.knobs.compilation.listener = lambda **told: None
        print(triton_kernels.compiled())
    """)
    assert told == "None 0 None"
