#!/usr/bin/env python3
"""Judges what `slipstream stress --json FILE` found with the guard and without: exit code 0 if it proves anything.

Guarded rounds must all be clean, and enough. Without the guard some round must fail in each workload that is known to
fail on that release of torch, or the clean ones would say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Workloads most of whose rounds fail without the guard, by release of torch; and those that do so on any.
KNOWN = {"2.11": ("compile", "mixed"), "2.13": ("masks",)}
KNOWN_ON_ANY = ("triton", "triton-restore")


def faults(found: dict[str, Any], guarded: int) -> list[str]:
    """Return what keeps ``found`` from proving that the guard holds, a line each."""
    on = [row for row in found["rows"] if row["guard"]]
    off = {row["workload"]: row for row in found["rows"] if not row["guard"]}
    said = [f"{row['workload']}: {row['bad']} guarded rounds are bad" for row in on if row["bad"]]
    said += [f"{row['workload']}: no guarded round was played" for row in on if not row["rounds"]]
    if (played := sum(row["rounds"] for row in on)) < guarded:
        said.append(f"{played} guarded rounds were played, fewer than {guarded}")
    release = ".".join(str(found["versions"].get("torch", "")).split(".")[:2])
    for name in (*KNOWN.get(release, ()), *KNOWN_ON_ANY):
        if not off.get(name, {}).get("bad"):
            said.append(f"{name}: no round failed without the guard, so that clean ones prove nothing")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--guarded", type=int, default=1, metavar="N", help="guarded rounds that are needed")
    args = parser.parse_args()
    found = json.loads(args.file.read_text(encoding="utf-8"))
    total = {guard: [row for row in found["rows"] if row["guard"] is guard] for guard in (True, False)}
    on, off = (f"{sum(r['bad'] for r in rows)} of {sum(r['rounds'] for r in rows)}" for rows in total.values())
    print(f"{', '.join(f'{k} {v}' for k, v in found['versions'].items())}: bad rounds: {on} guarded, {off} not")
    said = faults(found, args.guarded)
    for line in said:
        print(f"stress: {line}", file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
