"""Imports go one way: a module imports only its own package and layers before its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "slipstream"
LAYERS = (
    ("__init__", "errors", "records", "places", "pairs"),
    ("config",),
    ("recipe",),
    ("provenance", "compilation", "data"),
    ("target", "drafter"),
    ("topology",),
    ("decoding",),
    ("training",),
    ("preflight", "prewarm", "evaluation", "preparation"),
    ("export",),
    ("quickstart",),
    ("usage",),
    ("cli_parts",),
    ("cli_tools", "cli_quickstart", "cli_plan"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}
MODULES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "slipstream":
                names = [f"slipstream.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: relative import; write the full name")
        for name in names:
            parts = name.split(".")
            if parts[0] == "slipstream" and len(parts) > 1 and not parts[1].startswith("__version"):
                rooms.add(parts[1])
    return rooms


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_only_earlier_layers(path: Path) -> None:
    own = room_of(path)
    assert own in LAYER_OF, f"{own} has no layer; give it one in this test and in docs/architecture.md"
    for room in imported_rooms(path) - {own}:
        assert room in LAYER_OF, f"{path} imports slipstream.{room}, which has no layer"
        assert LAYER_OF[room] < LAYER_OF[own], f"{own} imports {room}, which is not in an earlier layer"


def test_the_rule_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from slipstream.training.step import x\n", encoding="utf-8")
    assert imported_rooms(bad) == {"training"}
    assert LAYER_OF["training"] > LAYER_OF["data"]


def test_importing_the_package_and_its_command_line_loads_no_torch() -> None:
    code = "import sys, slipstream, slipstream.cli, slipstream.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_stay_readable() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in MODULES if (n := len(p.read_text().splitlines())) > 330}
    assert not long, f"modules grown past about 300 lines: {long}"
