"""``slipstream prewarm``: compile and tune what a recipe needs, once, and keep it in a bundle that ``train`` loads.

What runs is the training step itself, on the recipe's own first rows, forward and backward, the target's reader before
it, and some rounds of block decoding on the held-out prompts. Nothing of the run is written: no run directory, no
weights.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.compilation import bundle_live, triton_kernels
from slipstream.compilation.bundle import Bundle
from slipstream.compilation.fingerprint import work
from slipstream.config import Recipe
from slipstream.drafter.store import save_drafter
from slipstream.errors import CompilationError, DecodingError
from slipstream.training.directory import RunDirectory
from slipstream.training.disk import size_words
from slipstream.training.hardware import resolve_device
from slipstream.training.heldout import decoded_acceptance, heldout_prompts
from slipstream.training.loop import Trainer
from slipstream.training.session import PreparedRun, build_reader, prepare

if TYPE_CHECKING:
    from rich.console import Console

# Where kernels get documents one by one their lengths and number differ from batch to batch, and tuners may have a key
# for each.
_UNPACKED_BATCHES = 4
_DECODED_BLOCKS = 4


def prewarm(
    recipe: Recipe,
    *,
    console: Console,
    devices: Sequence[str] = (),
    preflight: Callable[[PreparedRun], Any] | None = None,
) -> int:
    """Compile and tune for each device, one after another, and write a bundle for each; return the exit code, 0.

    ``devices``: as ``run.device``; empty is the recipe's own. ``preflight``: as ``train``'s, run first, because it
    compiles shapes of its own. On a CPU nothing is compiled, and that is said. Processes that prewarm at once do no
    harm: of two with the same key, the last bundle stays. Call from the main thread.

    Raises CompilationError where the bundle cannot be written or torch's caches are switched off, and the errors of
    target, data and drafter.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for device in dict.fromkeys(resolve_device(name) for name in devices or (recipe.run.device,)):
        if device.type != "cuda":
            say(f"{device}: nothing to do: on a CPU attention is dense and nothing is compiled")
            continue
        began = time.monotonic()
        run = prepare(dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, device=str(device))), say=say)
        if preflight is not None and recipe.training.preflight:
            preflight(run)
        prompts = heldout_prompts(run.recipe, run.target)
        run_once(run, console, prompts)
        with triton_kernels.launched() as kernels:  # once more, now that all is tuned: these are what a run launches
            run.target.assert_causal()
            build_reader(run.recipe, run.config, run.target)
            if preflight is not None and recipe.training.preflight:
                with console.capture():  # its lines have been seen
                    preflight(run)
            run_once(run, console, prompts)
        if (told := bundle_live.first_step_report()) is not None:
            say(told)
        saved = save(run, kernels)
        say(f"{device}: {_told(saved)}; {time.monotonic() - began:.1f} s")
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def run_once(run: PreparedRun, console: Console, prompts: Sequence[list[int]] = ()) -> None:
    """Run all that is compiled or tuned: the reader, the training step with its backward, the optimizer's step, and
    the decoding of held-out prompts where there are any, a few blocks long.

    The drafter's weights change; use the run for nothing else afterwards. Waits for the device.
    """
    trainer = Trainer(run, RunDirectory(Path(run.recipe.run.directory)), "prewarm", console, [])
    trainer.train_step()
    if run.reader.mode == "unpacked" or run.reader.recurrent == "documents":
        first = run.recipe.training.accumulation
        for index in range(first, first + _UNPACKED_BATCHES):
            trainer.source.read(index)
    if prompts:
        _decode(run, list(prompts), console)
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def _decode(run: PreparedRun, prompts: list[list[int]], console: Console) -> None:
    """Decode as training does for its held-out figures; a drafter of one step proposes nothing worth reading."""
    evaluation = dataclasses.replace(
        run.recipe.evaluation,
        max_new_tokens=min(run.recipe.evaluation.max_new_tokens, _DECODED_BLOCKS * run.config.block_size),
    )
    with tempfile.TemporaryDirectory(prefix="slipstream-prewarm-") as place:
        drafter = save_drafter(run.draft_model, run.config, Path(place) / "drafter", dtype=torch.float32)
        try:
            decoded_acceptance(dataclasses.replace(run.recipe, evaluation=evaluation), run.target, drafter, prompts)
        except DecodingError as error:
            told = f"warning: held-out prompts could not be decoded ({error}); what that needs is not in the bundle"
            console.print(told, markup=False, highlight=False, soft_wrap=True)


def save(run: PreparedRun, kernels: Mapping[str, Any] | None = None) -> tuple[Path, Bundle] | None:
    """Write what this process has compiled as the bundle of a run; return it, None where nothing was compiled.

    ``kernels``: Triton's that the run launches (``triton_kernels.launched``).
    Raises CompilationError where it cannot be written, or where torch keeps nothing of what it compiles.
    """
    saved = bundle_live.save(work_of(run), run.device, {"target": run.target.info.name}, kernels)
    if run.attention.kind == "flex" and (saved is None or not saved[1].about["graphs"]):
        raise CompilationError(
            "torch kept nothing of what it compiled, so that there is nothing to bundle; unset "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE"
        )
    return saved


def work_of(run: PreparedRun) -> dict[str, Any]:
    """Return what ``prepare`` looks a bundle up by, of a run that it has prepared."""
    return work(
        run.recipe,
        run.config,
        target_digest=run.target.info.digest,
        row_length=run.dataset.row_length,
        precision=run.precision,
        attention=run.attention.kind,
        device=run.device,
    )


def _told(saved: tuple[Path, Bundle] | None) -> str:
    if saved is None:
        return "nothing was compiled or tuned, so there is nothing to keep"
    path, bundle = saved
    size = size_words(path.stat().st_size)
    what = bundle.about
    return (
        f"{what['graphs']} graphs, {what['tuning results']} tuning results and {what['kernels']} Triton kernels, "
        f"{size}, in {path}"
    )
