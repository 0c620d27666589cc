"""A module is acted upon once, as soon as it has been imported, whoever imports it."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.compilation.hooks import installed, when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"slow_module_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.05)\nvalue = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_now_if_it_is_imported(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []
    assert when_imported(module, lambda m: seen.append(m.value))
    assert seen == [1]


def test_later_if_it_is_not_and_only_once(module: str) -> None:
    seen: list[int] = []
    assert not when_imported(module, lambda m: seen.append(m.value))
    assert not when_imported(module, lambda m: seen.append(m.value + 1))
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert seen == [1, 2]


def test_while_other_threads_import_it(module: str) -> None:
    seen: list[int] = []
    threads = [threading.Thread(target=importlib.import_module, args=(module,)) for _ in range(3)]
    threads += [threading.Thread(target=when_imported, args=(module, lambda m: seen.append(m.value))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]


def test_while_another_thread_is_looking_for_it(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import has begun, and it is not among the modules yet: the moment in which an action was once lost."""
    looking, go_on = threading.Event(), threading.Event()

    class Slow(MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            if fullname == module:
                looking.set()
                go_on.wait(10)

    path = sys.meta_path.index(PathFinder)  # after whatever looks at every name, before what finds this one
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:path], Slow(), *sys.meta_path[path:]])
    importing = threading.Thread(target=importlib.import_module, args=(module,))
    importing.start()
    assert looking.wait(10)
    seen: list[int] = []
    asking = threading.Thread(target=when_imported, args=(module, lambda m: seen.append(m.value)))
    asking.start()
    asking.join(0.2)  # long enough to be left without an answer, were it not to wait for the import
    go_on.set()
    importing.join()
    asking.join()
    assert seen == [1]


def test_two_imports_that_wait_for_each_other_are_no_deadlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One imports a submodule, whose package needs what another thread imports, which waits for the submodule."""
    (tmp_path / "hooked_package").mkdir()
    (tmp_path / "hooked_package" / "__init__.py").write_text("import hook_meeting\nhook_meeting.package()\n")
    (tmp_path / "hooked_package" / "part.py").write_text("value = 1\n")
    (tmp_path / "hooking_module.py").write_text("import hook_meeting\nhook_meeting.module()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    inside, wanted, faults, seen = threading.Event(), threading.Event(), [], []

    def package() -> None:
        inside.set()
        assert wanted.wait(10)
        importlib.import_module("hooking_module")

    def module() -> None:
        wanted.set()
        time.sleep(0.2)  # until the other thread waits for this module
        try:
            when_imported("hooked_package.part", lambda m: seen.append(m.value))
        except BaseException as error:
            faults.append(error)

    monkeypatch.setitem(sys.modules, "hook_meeting", SimpleNamespace(package=package, module=module))
    first = threading.Thread(target=importlib.import_module, args=("hooked_package.part",))
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=importlib.import_module, args=("hooking_module",))
    second.start()
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()
    for name in ("hooked_package.part", "hooked_package", "hooking_module"):
        sys.modules.pop(name, None)
    assert not faults
    assert seen == [1]


def test_whether_a_package_is_there() -> None:
    assert installed("json")
    assert not installed("no_such_package_anywhere")
