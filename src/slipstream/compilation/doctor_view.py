"""The doctor's findings as tables for people. What is found is shown as it is: no text of it is read as markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STOCK = {
    "present": "provoked here",
    "not seen": "not provoked here",
    "safe upstream": "safe as it is",
    "not installed": "not installed",
    "not known": "not known",
}


def size(value: int | None) -> str:
    """Return a number of bytes as people read it."""
    if value is None:
        return "?"
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= one:
            return f"{value / one:.1f} {unit}"
    return f"{value} B"


def show(found: dict[str, Any], console: Console) -> None:
    """Print what ``examine`` found as tables, then what will bite and what is worth knowing, each with its cure."""
    for table in (_installed(found), _gpus(found), _hazards(found), _environment(found), _places(found)):
        if table is not None:
            console.print(table)
            console.print()
    _findings(found, console)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: object, style: str = "") -> None:
    from rich.text import Text

    table.add_row(*(Text(str(cell)) for cell in cells), style=style)


def _installed(found: dict[str, Any]) -> Table:
    table = _table(f"Installed (slipstream {found['slipstream']})", "what", "version", "")
    _row(table, "Python", found["python"]["version"], found["python"]["executable"])
    for name, package in found["packages"].items():
        more = []
        if package.get("git_commit"):
            more.append(f"git {package['git_commit']}")
        if name == "torch" and package["version"]:
            more.append(f"CUDA {package['cuda']}" if package["cuda"] else "CPU build")
        if package.get("wanted"):
            more.append(f"torch asks for {package['wanted']}")
        if package["failed"]:
            more.append(package["failed"])
        _row(table, name, package["version"] or "-", ", ".join(more), style="red" if package["failed"] else "")
    driver = found["driver"]
    cuda = f"runs CUDA up to {driver['cuda']}" if driver and driver["cuda"] else ""
    _row(table, "NVIDIA driver", (driver or {}).get("version") or "-", cuda)
    compiler = found["compiler"]
    _row(table, "C compiler", compiler["path"] or "-", "" if compiler["headers"] else "without Python.h")
    return table


def _gpus(found: dict[str, Any]) -> Table | None:
    if not found["gpus"]:
        return None
    table = _table("GPUs", "", "name", "capability", "memory", "free", "peer access to")
    for gpu, peers in zip(found["gpus"], found["peers"], strict=True):
        reached = " ".join(str(other) for other, access in enumerate(peers) if access) or "-"
        memory, free = size(gpu["memory_total"]), size(gpu["memory_free"])
        style = "red" if gpu["failed"] else ""
        _row(table, gpu["index"], gpu["name"], gpu["capability"], memory, free, reached, style=style)
    return table


def _hazards(found: dict[str, Any]) -> Table:
    table = _table(
        "Hazards of compiling in several threads", "hazard", "as it is", "after install()", "what was seen as it is"
    )
    for hazard in found["hazards"]:
        after = hazard["installed"]
        if hazard["held"] and after != "not installed":
            after += ", verified"
        said = hazard["seen"] or hazard["installed_detail"] or hazard["stock_detail"]
        _row(
            table,
            hazard["name"],
            STOCK.get(hazard["stock"], hazard["stock"]),
            after,
            said or ("" if hazard["held"] else hazard["what"]),
            style="green" if hazard["installed"] == "handled" and hazard["held"] else "" if hazard["held"] else "red",
        )
    return table


def _environment(found: dict[str, Any]) -> Table | None:
    rows = [row for row in found["environment"] if row["value"] is not None]
    if not rows:
        return None
    table = _table("Environment variables that are set", "name", "value", "effect")
    for row in rows:
        style = {"bites": "red", "note": "yellow"}.get(row["level"], "")
        _row(table, row["name"], row["value"], row["effect"], style=style)
    return table


def _places(found: dict[str, Any]) -> Table:
    table = _table("Caches and disks", "what", "path", "files", "size", "free", "state")
    for place in (*found["caches"], found["working_directory"]):
        counted = bool(place["variable"])
        more = "" if place["complete"] else "more than "
        state = place["why_not"] or ("can be written" if place["exists"] else "not there yet; can be made")
        _row(
            table,
            place["name"] + (" cache" if counted else ""),
            place["path"],
            f"{more}{place['files']}" if counted else "",
            f"{more}{size(place['bytes'])}" if counted else "",
            size(place["free_bytes"]),
            state,
            style="" if place["writable"] else "red",
        )
    if (memory := found["shared_memory"]) is not None:
        total = size(memory["total_bytes"])
        _row(table, "shared memory", memory["path"], "", total, size(memory["free_bytes"]), "")
    return table


def _findings(found: dict[str, Any], console: Console) -> None:
    for heading, style, findings in (
        ("Will bite:", "bold red", found["problems"]),
        ("Worth knowing:", "bold yellow", found["notes"]),
    ):
        if findings:
            console.print(heading, style=style)
            for finding in findings:
                console.print(f"  {finding['what']}", markup=False, soft_wrap=True)
                console.print(f"    -> {finding['cure']}", markup=False, soft_wrap=True)
    if found["ok"]:
        console.print("Nothing here will bite.", style="bold green")
