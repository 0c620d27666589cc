"""Choose the held-out prompts: those whose greedy answer ends and does not loop.

    python choose_prompts.py --target DIR_OR_NAME --prompts prompts_heldout.jsonl --out chosen.jsonl.gz --count 240

Decodes every prompt greedily and writes the first ``--count`` that are fit, their messages alone, and beside them
``<out>.report.json``: how many ended, how many loop at periods 8 and 24 (``slipstream.data.loops``), of all prompts and
of the chosen. Held-out acceptance is measured on what the target says when it does not repeat itself, because a loop
flatters every source of drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.config import DataConfig, TargetConfig
from slipstream.data.conversations import read_conversations
from slipstream.data.journal import write_whole
from slipstream.data.loops import PERIODS, loop_period
from slipstream.data.render import Renderer
from slipstream.decoding.plain import generate_plain
from slipstream.errors import SlipstreamError
from slipstream.target.model import load_target


def rates(answers: Sequence[Sequence[int]], ends: frozenset[int]) -> dict[str, Any]:
    """Return what share of answers (token ids) ends in a token of ``ends``, and what share loops at each period."""
    count = max(len(answers), 1)
    lengths = sorted(len(answer) for answer in answers)
    found: dict[str, Any] = {
        "answers": len(answers),
        "ended": round(sum(answer[-1] in ends for answer in answers) / count, 4),
        "median_tokens": lengths[len(lengths) // 2] if lengths else 0,
    }
    for period in PERIODS:
        found[f"loops_{period}"] = round(sum(loop_period(a, period) is not None for a in answers) / count, 4)
    return found


def fit(answer: Sequence[int], ends: frozenset[int], shortest: int) -> bool:
    """Say whether an answer ends, has ``shortest`` tokens or more, and does not loop."""
    return answer[-1] in ends and len(answer) >= shortest and loop_period(answer, max(PERIODS)) is None


def main() -> None:
    """Decode, choose, write and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--shortest", type=int, default=24, help="tokens; a shorter answer has nothing to accelerate")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--limit", type=int, default=0, help="look at so many prompts; 0 is all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    target = load_target(
        TargetConfig(path=args.target, dtype="float32"), device=torch.device(args.device), dtype=torch.float32
    )
    renderer = Renderer(target.tokenizer, data=DataConfig(), stop_ids=target.info.eos_ids)
    conversations = list(read_conversations([args.prompts], max_samples=args.limit))
    generations, seconds = generate_plain(
        target,
        [renderer.prompt_ids(conversation) for conversation in conversations],
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        progress=lambda done, of: print(f"{done} of {of}", flush=True) if done % 100 == 0 else None,
    )
    answers = [list(generation.output_ids) for generation in generations]
    ends = frozenset(target.info.eos_ids)
    chosen = [i for i, answer in enumerate(answers) if fit(answer, ends, args.shortest)][: args.count]
    report = {
        "target_digest": target.info.digest,
        "max_new_tokens": args.max_new_tokens,
        "shortest": args.shortest,
        "all": rates(answers, ends),
        "chosen": rates([answers[i] for i in chosen], ends),
        "tokens_per_second": round(sum(map(len, answers)) / seconds, 1),
    }
    rows = ({"messages": [m.as_template_dict() for m in conversations[i].messages]} for i in chosen)
    write_whole(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    Path(f"{args.out}.report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    for i in chosen[:3]:
        print("----\n" + renderer.decode(answers[i]))
    if len(chosen) < args.count:
        print(f"only {len(chosen)} of {len(conversations)} prompts are fit; give more prompts")


if __name__ == "__main__":
    try:
        main()
    except SlipstreamError as error:
        raise SystemExit(f"choose_prompts: {error}") from None
