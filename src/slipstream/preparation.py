"""``slipstream prepare``: show, pack and cache what will be trained on, or let the target answer the prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slipstream.config import Recipe
from slipstream.errors import ConfigError
from slipstream.recipe import recipe_as_toml

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.data.pack import PackedDataset
    from slipstream.data.regenerate import RegenerateProgress, RegenerateReport


def prepare(
    recipe: Recipe,
    *,
    show: int = 0,
    regenerate_to: Path | None = None,
    sources: Literal["train", "heldout"] = "train",
    dry_run: bool = False,
    console: Console,
) -> PackedDataset | RegenerateReport | None:
    """Render and pack ``data.train`` (or ``data.heldout``), print the report and ``show`` samples; or regenerate.

    Returns None for a dry run. Raises the errors of data and target.
    """
    if not recipe.target.path:
        raise ConfigError("target.path is empty; give a directory, hub id or .gguf file of a causal language model")
    if not getattr(recipe.data, sources):
        raise ConfigError(f"data.{sources} is empty; name a file of conversations")
    recipe = replace(recipe, data=replace(recipe.data, train=getattr(recipe.data, sources)))
    if dry_run:
        console.print(recipe_as_toml(recipe), markup=False)
        return None
    if regenerate_to is not None:
        return _regenerate(recipe, regenerate_to, console)
    return _pack(recipe, show, console, compare=sources == "train")


def _pack(recipe: Recipe, show: int, console: Console, *, compare: bool) -> PackedDataset:
    from slipstream.data.conversations import read_conversations
    from slipstream.data.pack import build_dataset
    from slipstream.data.render import Renderer
    from slipstream.target.description import describe_target
    from slipstream.training.heldout import overlap

    info, tokenizer, _ = describe_target(recipe.target)
    if show > 0:
        renderer = Renderer(tokenizer, data=recipe.data, stop_ids=info.eos_ids)
        found = read_conversations(
            recipe.data.train, prompt_completion=recipe.data.prompt_completion, max_samples=recipe.data.max_samples
        )
        shown = 0
        for samples in renderer.render_many(found, chunk=show):
            for sample in samples[: show - shown]:
                tokens, supervised = len(sample.ids), int(sample.loss_mask.sum())
                share = f"{supervised} supervised ({supervised / tokens:.0%})"
                console.print(f"── {sample.origin}: {tokens} tokens, {share}", markup=False)
                # Written as it is: the text carries its own colours, which rich would count as characters.
                console.file.write(renderer.as_ansi(sample) + "\n")
                shown += 1
            if shown >= show:
                break
    with console.status("rendering and packing") as status:
        dataset = build_dataset(
            recipe.data,
            tokenizer,
            stop_ids=info.eos_ids,
            progress=lambda done: status.update(f"rendering: {done:,} conversations"),
        )
    for line in (*dataset.notes, *dataset.report.lines()):
        console.print(line, markup=False, soft_wrap=True)
    if compare:
        warning = overlap(recipe.data, tokenizer, info, dataset)
        if warning is not None:
            console.print(warning, markup=False, style="yellow", soft_wrap=True)
    return dataset


def _regenerate(recipe: Recipe, output: Path, console: Console) -> RegenerateReport:
    from slipstream.data.conversations import read_conversations
    from slipstream.data.regenerate import regenerate
    from slipstream.data.render import Renderer
    from slipstream.decoding.plain import generate_plain
    from slipstream.target.model import load_target
    from slipstream.training.hardware import resolve_device

    target = load_target(recipe.target, device=resolve_device(recipe.run.device))
    try:
        renderer = Renderer(target.tokenizer, data=recipe.data, stop_ids=target.info.eos_ids)

        def generate(
            prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
        ) -> list[list[int]]:
            generations, _ = generate_plain(
                target,
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                batch_size=recipe.regenerate.batch_size,
            )
            return [list(g.output_ids) for g in generations]

        with RegenerateDisplay(console) as display:
            report = regenerate(
                read_conversations(
                    recipe.data.train,
                    prompt_completion=recipe.data.prompt_completion,
                    max_samples=recipe.data.max_samples,
                ),
                renderer=renderer,
                generate=generate,
                output=output,
                settings=recipe.regenerate,
                progress=display.update,
                target_digest=target.info.digest,
                target_settings={
                    "target.dtype": target.info.dtype,
                    "target.attention": recipe.target.attention,
                    "device": target.device.type,
                },
                max_positions=target.info.max_positions,
                seed=recipe.run.seed,
            )
    finally:
        target.close()
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)
    console.print(f'now set data.train = ["{output}"]', markup=False, soft_wrap=True)
    return report


class RegenerateDisplay:
    """Progress with a rate and an estimate: a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = console
        self._bar = Progress(
            TextColumn("answering"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, figures="")

    def __enter__(self) -> RegenerateDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: RegenerateProgress) -> None:
        """Show a finished group; before the first one, what an earlier process has done."""
        left = "" if progress.eta_seconds is None else f", about {progress.eta_seconds:,.0f} s left"
        figures = f"{progress.tokens_per_second:,.0f} tokens/s{left}" if progress.tokens_per_second else ""
        self._bar.update(self._task, completed=progress.done, total=progress.total, figures=figures)
        if not self.console.is_terminal and progress.done:
            counted = f"answered {progress.done:,} of {progress.total:,}"
            self.console.print(f"{counted}: {figures}" if figures else counted, markup=False)
