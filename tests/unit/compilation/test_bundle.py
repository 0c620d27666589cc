"""Bundle files: whole or not at all, whatever happens to the disk, to the writer, or to the bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from slipstream.compilation import bundle
from slipstream.compilation.bundle import Bundle, DamagedBundle, read_bundle, read_header, write_bundle
from slipstream.errors import CompilationError

ENVIRONMENT = {"torch": "2.13.0", "torch commit": "aaaa", "gpu": "A GPU"}
WORK = {"target": "d", "rows": 1}


def a_bundle(**changes: Any) -> Bundle:
    given = {
        "environment": ENVIRONMENT, "work": WORK, "about": {"target": "T"},
        "sections": {"torch": bytes(range(256)) * 400, "tuning": b"[]"}, **changes,
    }  # fmt: skip
    return Bundle(**given)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "new" / "place", a_bundle())
    found = read_bundle(path)
    assert found.sections == a_bundle().sections
    assert (found.environment, found.work, found.about) == (ENVIRONMENT, WORK, {"target": "T"})
    assert found.created.endswith("+00:00")
    assert path.name == bundle.file_name(ENVIRONMENT, WORK)
    assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".")] == [path.name]


def test_the_header_is_readable_text_and_is_read_without_the_rest(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, a_bundle())
    lines = path.read_bytes().split(b"\n", 2)
    assert lines[0].startswith(b"slipstream compile bundle 1 ")
    assert json.loads(lines[1])["environment"] == ENVIRONMENT
    with path.open("r+b") as stream:  # only the sections are damaged
        stream.truncate(path.stat().st_size - 1)
    assert read_header(path).environment == ENVIRONMENT


def test_the_same_work_elsewhere_has_the_same_beginning_of_a_name() -> None:
    here = bundle.file_name(ENVIRONMENT, WORK)
    there = bundle.file_name({**ENVIRONMENT, "gpu": "B"}, WORK)
    assert here != there
    assert here.split("-")[0] == there.split("-")[0]


@pytest.mark.parametrize("size", [0, 3, 40, 200, -1])
def test_a_truncated_file_is_damaged(tmp_path: Path, size: int) -> None:
    path = write_bundle(tmp_path, a_bundle())
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(DamagedBundle, match=r"cut off|not a bundle"):
        read_bundle(path)


def test_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, a_bundle())
    whole = path.read_bytes()
    places = [*range(0, 400, 7), len(whole) // 2, len(whole) - 1]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamagedBundle):
            read_bundle(path)


def test_bytes_past_the_end_are_damage(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, a_bundle())
    with path.open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DamagedBundle, match="longer"):
        read_bundle(path)


def test_a_later_format_is_named(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, a_bundle())
    path.write_bytes(path.read_bytes().replace(b"bundle 1 ", b"bundle 2 ", 1))
    with pytest.raises(DamagedBundle, match="format 2"):
        read_bundle(path)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CompilationError, match=r"cannot be written.*SLIPSTREAM_CACHE") as caught:
        write_bundle(tmp_path / "file" / "below", a_bundle())
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CompilationError, match="cannot be written"):
            write_bundle(tmp_path / "below", a_bundle())
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_leaves_the_old_bundle_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bundle(tmp_path, a_bundle())
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CompilationError, match="No space left"):
        write_bundle(tmp_path, a_bundle(sections={"torch": b"other"}))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([bundle.LOCK, path.name])


CHILD = """
    import os, resource, signal, sys
    from pathlib import Path
    from slipstream.compilation import bundle
    from slipstream.errors import CompilationError
    where, how = Path(sys.argv[1]), sys.argv[2]
    b = bundle.Bundle(environment={"a": 1}, work={"b": 1}, about={}, sections={"torch": how.encode() * 100000})
    if how == "killed":
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    if how == "limited":  # the kernel itself refuses the write half way
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))
    try:
        for _ in range(int(sys.argv[3])):
            bundle.write_bundle(where, b)
    except CompilationError as error:
        print(error)
        sys.exit(2)
"""


def child(where: Path, how: str, times: int = 1) -> subprocess.Popen[str]:
    code = textwrap.dedent(CHILD)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(where), how, str(times)], stdout=subprocess.PIPE, text=True
    )


def test_a_writer_that_is_killed_leaves_the_old_bundle_and_its_leaving_goes(tmp_path: Path) -> None:
    assert child(tmp_path, "good").wait() == 0
    (path,) = tmp_path.glob("*.bundle")
    killed = child(tmp_path, "killed")
    assert killed.wait() == -signal.SIGKILL
    assert list(tmp_path.glob(".*.tmp"))
    assert read_bundle(path).sections["torch"].startswith(b"good")
    assert child(tmp_path, "next").wait() == 0
    assert not list(tmp_path.glob(".*.tmp"))
    assert read_bundle(path).sections["torch"].startswith(b"next")


def test_a_write_that_the_kernel_cuts_short(tmp_path: Path) -> None:
    limited = child(tmp_path, "limited")
    out, _ = limited.communicate()
    assert limited.returncode == 2
    assert "cannot be written" in out
    assert not list(tmp_path.glob("*.bundle"))
    assert not list(tmp_path.glob(".*.tmp"))


def test_two_processes_that_write_at_once_leave_one_whole_bundle(tmp_path: Path) -> None:
    writers = [child(tmp_path, how, 15) for how in ("one", "other")]
    seen = 0
    while any(w.poll() is None for w in writers):
        for path in tmp_path.glob("*.bundle"):
            read_bundle(path)
            seen += 1
    assert [w.returncode for w in writers] == [0, 0]
    assert seen
    (path,) = tmp_path.glob("*.bundle")
    assert read_bundle(path).sections["torch"][:3] in (b"one", b"oth")
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_directory_follows_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert bundle.directory() == tmp_path / "compiled"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    assert bundle.directory() == Path.home() / ".cache" / "slipstream" / "compiled"


def test_a_damaged_bundle_is_set_aside(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, a_bundle())
    aside = bundle.set_aside(path)
    assert aside is not None
    assert not path.exists()
    assert aside.read_bytes()
    assert bundle.set_aside(tmp_path / "not there.bundle") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"bytes": 2', b'"bytes": 1000000000000000000000000000000'),
        (b'"bytes": 2', b'"bytes": 1e999'),
        (b'"bytes": 2', b'"bytes": 16000000000'),
        (b'"about": {}', b'"about": {"target": "\\ud800"}'),
        (b'"about": {}', b'"about": ' + b"[" * 100_000 + b"]" * 100_000),
    ],
)
def test_a_sealed_header_of_absurd_content_is_damage(tmp_path: Path, old: bytes, new: bytes) -> None:
    made = Bundle(environment={}, work={}, sections={"tuning": b"[]"})
    first, line, rest = bundle.encode(made).split(b"\n", 2)
    assert old in line
    line = line.replace(old, new)
    words = [*first.split(b" ")[:-1], hashlib.sha256(line).hexdigest().encode()]
    with pytest.raises(DamagedBundle):
        bundle.parse(b"\n".join([b" ".join(words), line, rest]))
