"""Train the embedded target, a small Qwen3.5-architecture hybrid, from random weights on encoded tokens.

    python train_target.py --tokens build/embedded_target --out build/embedded_target/target --minutes 15

Reads ``train.bin``, ``functions.bin`` with its mask, what is held out of both, and ``tokenizer/``; writes a Hugging
Face directory in bfloat16 and ``training_log.jsonl``. Source is learned whole, of functions the answers alone: few
rows at first, a third of all while the learning rate falls. ``--state FILE`` saves there now and then, and goes on
from there: time so far counts. Matrices are trained by Muon, the rest by AdamW, float32 weights, bfloat16 autocast;
the learning rate is constant and falls linearly to zero over the last 30 % of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from chunked_rule import chunked_gated_delta_rule, shifted_conv
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

DECAY_SHARE = 0.3
FUNCTION_ROWS = (0.05, 0.35)  # share of a batch before the decay, and during it
IGNORED = -100
WARMUP_STEPS = 100
SAVE_SECONDS = 60.0


def make_config(args: argparse.Namespace, vocab: int, eos: list[int], pad: int) -> Qwen3_5TextConfig:
    """Return the target's configuration: three Gated DeltaNet layers to each of full attention, as Qwen3.5."""
    return Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=args.key_heads,
        linear_num_value_heads=2 * args.key_heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
    )


def use_training_kernels(model: Any) -> None:
    """Have the model's forwards take the rule and the convolution of ``chunked_rule``."""
    modeling.torch_chunk_gated_delta_rule = chunked_gated_delta_rule
    for name in ("causal_conv1d_fn", "torch_causal_conv1d_fn"):
        if hasattr(modeling, name):
            setattr(modeling, name, shifted_conv)
    for layer in model.model.layers:
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None and hasattr(mixer, "chunk_gated_delta_rule"):
            mixer.chunk_gated_delta_rule = chunked_gated_delta_rule
        if mixer is not None and hasattr(mixer, "causal_conv1d_fn"):
            mixer.causal_conv1d_fn = shifted_conv


def optimizers(model: Any, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embedding, norms, gates and convolutions."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        large = parameter.ndim == 2 and min(parameter.shape) >= 64 and "embed" not in name and "lm_head" not in name
        (matrices if large else rest).append(parameter)
    fused = matrices[0].is_cuda
    return [
        torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]


class Rows:
    """Rows of ``length + 1`` tokens, without repeats within an epoch, in an order that the seed decides.

    Where ``mask`` is given, a file of a byte a token, only tokens with 1 are learned.
    """

    def __init__(self, path: Path, length: int, device: torch.device, seed: int, mask: Path | None = None) -> None:
        tokens = np.fromfile(path, dtype=np.uint16)
        self.count = (len(tokens) - 1) // length
        if not self.count:
            raise SystemExit(f"{path} holds {len(tokens)} tokens, fewer than one row of {length}")
        self.tokens = torch.from_numpy(tokens.astype(np.int32) if device.type == "cpu" else tokens.view(np.int16))
        self.tokens = self.tokens.to(device)
        self.mask = None if mask is None else torch.from_numpy(np.fromfile(mask, dtype=np.uint8)).to(device)
        self.length, self.seed = length, seed

    def batch(self, first: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the ids and the labels, ``int64 [rows, length]`` each, of ``rows`` rows from number ``first`` on."""
        places = []
        for epoch in range(first // self.count, (first + rows - 1) // self.count + 1):
            begin, end = max(first - epoch * self.count, 0), min(first + rows - epoch * self.count, self.count)
            places.append(self._order(epoch)[begin:end])
        starts = torch.cat(places).to(self.tokens.device) * self.length
        index = starts[:, None] + torch.arange(self.length + 1, device=self.tokens.device)
        ids = self.tokens[index].long() & 0xFFFF
        labels = ids[:, 1:]
        if self.mask is not None:
            labels = labels.masked_fill(self.mask[index[:, 1:]] == 0, IGNORED)
        return ids[:, :-1], labels

    def _order(self, epoch: int) -> Tensor:
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._kept = epoch, torch.randperm(self.count, generator=generator)
        return self._kept


def loss_of(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats over the labels that count, of rows ``int64 [B, T]``."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return cross_entropy(hidden, model.lm_head.weight, labels)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of states ``[B, T, H]`` against ``int64 [B, T]``."""
    logits = F.linear(hidden, weight).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def heldout_loss(model: Any, rows: Rows, batch: int, batches: int, device: torch.device) -> float:
    """Return the mean loss over the first rows."""
    total = torch.zeros((), device=device)
    count = min(batches, max(rows.count // batch, 1))
    for number in range(count):
        with torch.autocast(device.type, torch.bfloat16):
            total += loss_of(model, *rows.batch(number * batch, batch))
    return float(total) / count


def factor(step: int, share: float) -> float:
    """Return the learning rate's factor at ``share`` (0..1) of the time."""
    return min((step + 1) / WARMUP_STEPS, 1.0) * min((1.0 - share) / DECAY_SHARE, 1.0)


class Mixture:
    """Batches of source and of functions: their counts depend on the schedule alone, their sum is always the same."""

    def __init__(self, source: Rows, functions: Rows | None, rows: int) -> None:
        self.source, self.functions, self.rows = source, functions, rows
        self.read = [0, 0]  # rows so far; part of what a resumed training needs

    def batch(self, decaying: bool) -> tuple[Tensor, Tensor]:
        """Return the next ids and labels, ``int64 [rows, length]`` each."""
        many = round(FUNCTION_ROWS[decaying] * self.rows) if self.functions is not None else 0
        parts = [self.source.batch(self.read[0], self.rows - many)]
        if self.functions is not None and many:
            parts.append(self.functions.batch(self.read[1], many))
        self.read = [self.read[0] + self.rows - many, self.read[1] + many]
        ids, labels = (torch.cat(both) for both in zip(*parts, strict=True))
        return ids, labels


def save_state(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole."""
    torch.save(content, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def main() -> None:
    """Train and write the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of training in all, with what --state holds")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="minutes of this process; the state stays")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--ffn", type=int, default=832)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    began = time.monotonic()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(args.tokens / "tokenizer")
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = make_config(args, len(tokenizer), ends, tokenizer.pad_token_id)
    model = modeling.Qwen3_5ForCausalLM(config).to(device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, tokenizer.pad_token_id
    model.train()
    use_training_kernels(model)
    global cross_entropy
    if not args.no_compile:
        # Each layer is compiled for its own index, with and without gradients; past the limit it would run uncompiled.
        torch._dynamo.config.recompile_limit = 8 * args.layers
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        cross_entropy = torch.compile(cross_entropy, dynamic=False)
    rows, heldout = (Rows(args.tokens / f"{name}.bin", args.length, device, args.seed) for name in ("train", "heldout"))
    functions, unseen = (
        Rows(args.tokens / f"{name}.bin", args.length, device, args.seed, args.tokens / f"{name}_mask.bin")
        if (args.tokens / f"{name}.bin").exists()
        else None
        for name in ("functions", "functions_heldout")
    )
    mixture = Mixture(rows, functions, args.rows)
    both = optimizers(model, args.muon_lr, args.adam_lr)
    rates = [group["lr"] for optimizer in both for group in optimizer.param_groups]
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "training_log.jsonl").open("a", encoding="utf-8")

    def tell(**values: Any) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    def measure(batches: int) -> dict[str, float]:
        found = {"heldout": heldout_loss(model, heldout, args.rows, batches, device)}
        if unseen is not None:
            found["heldout_functions"] = heldout_loss(model, unseen, args.rows, batches, device)
        return found

    step, spent = 0, 0.0
    if args.state is not None and args.state.exists():
        held = torch.load(args.state, map_location=device)
        step, spent, mixture.read = held["step"], held["spent"], held["read"]
        model.load_state_dict(held["model"])
        for optimizer, state in zip(both, held["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    parameters = sum(p.numel() for p in model.parameters())
    tell(
        parameters=parameters, train_tokens=rows.count * args.length, torch=torch.__version__, resumed_at=step,
        **{k: v for k, v in vars(args).items() if isinstance(v, int | float) and math.isfinite(v)},
    )  # fmt: skip
    first_step, start, saved, told, losses = step, time.monotonic(), time.monotonic(), time.monotonic(), []
    while True:
        now = time.monotonic()
        elapsed = spent + now - start
        share = elapsed / (args.minutes * 60)
        stopping = share >= 1 or now - began > args.stop_after * 60
        if stopping or now - saved > SAVE_SECONDS:
            if args.state is not None:
                held = {"step": step, "spent": elapsed, "read": mixture.read, "model": model.state_dict()}
                save_state(args.state, {**held, "optimizers": [o.state_dict() for o in both]})
            start += time.monotonic() - now
            saved = time.monotonic()
        if stopping:
            break
        for group, rate in zip([g for o in both for g in o.param_groups], rates, strict=True):
            group["lr"] = rate * factor(step, share)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, *mixture.batch(share > 1 - DECAY_SHARE))
        loss.backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step == first_step + 10:  # compiled by now; what that took is not the training's
            losses.append(float(loss.detach()))
            start += (time.monotonic() - start) if not spent else 0.0
            told = time.monotonic()
        elif step % 50 == 0:
            value, now = float(loss.detach()), time.monotonic()
            rate = (50 if step - first_step >= 60 else step - first_step - 10) * args.rows * args.length / (now - told)
            tell(step=step, loss=value, share=share, tokens_per_second=int(rate), epoch=mixture.read[0] / rows.count)
            told = now
            if not math.isfinite(value):
                raise SystemExit(f"the loss is {value} at step {step}; lower --muon-lr")
            if step % 500 == 0:
                tell(step=step, **measure(8))
                start += time.monotonic() - now
                told = time.monotonic()
    tell(step=step, minutes=elapsed / 60, **measure(32))
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
