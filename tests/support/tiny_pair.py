"""A pair as the package ships them, with a tiny hybrid target and a drafter of a few steps."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.tiny import save_tiny_target, write_conversations
from support.tiny_run import quiet_train, tiny_recipe

RECIPE = """
[run]
directory = "runs/quickstart"
device = "cpu"
threads = 1

[target]
path = "embedded"
dtype = "float32"

[data]
train = ["answers_train.jsonl"]
heldout = ["prompts_heldout.jsonl"]
row_length = 160

[drafter]
layers = 1
block_size = 4

[training]
steps = 4
anchors = 24
log_every = 1
evaluate_every = 2
evaluate_prompts = 2
precision = "float32"
learning_rate = 1e-3
preflight = false

[evaluation]
max_new_tokens = 12
batch_size = 2
"""


def write_pair(root: Path) -> Path:
    """Write ``root/embedded``, drafter and run included, and return ``root``: what ``slipstream.pairs`` looks into."""
    pair = root / "embedded"
    save_tiny_target(pair / "target", "qwen3_5")
    write_conversations(pair / "answers_train.jsonl", 20)
    write_conversations(pair / "prompts_heldout.jsonl", 3)
    (pair / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    changes = {
        "target__path": pair / "target", "data__train": pair / "answers_train.jsonl", "training__evaluate_every": 1,
        "data__heldout": pair / "prompts_heldout.jsonl", "drafter__block_size": 6, "training__preflight": "false",
    }  # fmt: skip
    summary, _ = quiet_train(tiny_recipe(root, root / "trained", **changes))
    shutil.copytree(summary.drafter, pair / "drafter")
    (pair / "run").mkdir()
    for name in ("recipe.toml", "metrics.jsonl"):
        shutil.copy(root / "trained" / name, pair / "run" / name)
    return root
