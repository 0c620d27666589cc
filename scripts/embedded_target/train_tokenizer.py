"""Train the embedded target's tokenizer: byte-level BPE, for Python source.

Merges are learnt once, for the largest vocabulary asked for; a smaller one is a prefix of it, since BPE is greedy. So
the sizes are compared on the very same merges. The one that is kept becomes a Hugging Face tokenizer folder.
``--settings-only`` writes that folder's settings and chat template anew, and leaves the vocabulary alone.
"""

import argparse
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BUILD = Path(__file__).resolve().parents[2] / "build" / "embedded_target"
# The end of a document is 0: a buffer of zeros then reads as nothing.
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"]
SPECIALS += [f"<|reserved_{i}|>" for i in range(11)]
# In this order: a word with the one sign or blank before it; a single digit; a run of signs; line ends with the next
# line's indent, as one piece; blanks. A line end never joins the signs before it: a prompt that stops at a docstring's
# closing quotes is cut where the tokens are cut anyway.
PATTERN = r" ?\p{N}| ?[^\r\n\s\p{L}\p{N}]?\p{L}+|\s*\n[ \t]*| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# ChatML, but the prompt stops before the line end behind "assistant": with the indent after it that is one token, which
# the answer starts with, as source goes on behind a docstring. So no token spans the border, whoever encodes.
TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message.content or '' -%}
{%- set own_line_end = message.role == 'assistant' and content.startswith('\\n') -%}
{{ '<|im_start|>' + message.role + ('' if own_line_end else '\\n') + content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant' }}
{%- endif -%}
"""
SIZES = (4096, 8192, 16384)
KEPT = 8192


def documents(path: Path) -> Iterator[str]:
    """The texts of a cleaned file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def sample(path: Path, limit: int) -> list[str]:
    """About `limit` bytes of documents, chosen by a hash of each, so that one more changes no other choice."""
    share = min(1.0, limit / path.stat().st_size)
    return [text for text in documents(path) if zlib.crc32(text.encode()) < share * 2**32]


def train(texts: list[str], size: int) -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def cut(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The same tokenizer with the first `size` entries only."""
    state = json.loads(tokenizer.to_str())
    vocab = {token: number for token, number in state["model"]["vocab"].items() if number < size}
    state["model"]["vocab"] = vocab
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) in vocab]
    return Tokenizer.from_str(json.dumps(state))


def bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    """How many bytes of UTF-8 a token holds on average."""
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts))
    return sum(len(text.encode()) for text in texts) / tokens


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face tokenizer folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_settings(folder)


def save_settings(folder: Path) -> None:
    """Write what stands beside the vocabulary: settings and chat template.

    A turn's end is the tokenizer's end of sequence, as in other chat models: who reads only one sees that one. The end
    of a document is the generation config's second. The class is named by the name that every release of transformers
    reads as "take the file as it is": what is registered for ``qwen3_5`` has a splitting of its own.
    """
    named = ("<|im_end|>", "<|pad|>", "<|mask|>")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "mask_token": "<|mask|>",
        "additional_special_tokens": [t for t in SPECIALS if t not in named],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def main() -> None:
    """Learn, compare the sizes on held-out source, keep one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="where clean_corpus.py worked")
    parser.add_argument("--sample", type=int, default=120_000_000, help="bytes of training text to learn from")
    parser.add_argument("--settings-only", action="store_true", help="of the tokenizer that is there")
    args = parser.parse_args()
    if args.settings_only:
        save_settings(args.build / "tokenizer")
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    texts = sample(args.build / "clean" / "train.jsonl", args.sample)
    held_out = list(documents(args.build / "clean" / "heldout.jsonl"))
    largest = train(texts, max(SIZES))
    report = {}
    for size in SIZES:
        tokenizer = cut(largest, size)
        report[str(size)] = round(bytes_per_token(tokenizer, held_out), 4)
        print(f"vocabulary {size:6,}: {report[str(size)]:.3f} bytes per token on held-out source")
        if size == KEPT:
            save(tokenizer, args.build / "tokenizer")
    (args.build / "tokenizer_report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
