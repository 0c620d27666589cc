"""All checks pass on every family; results are printed, written and raised by name; nothing of the run is changed."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from slipstream.errors import ConfigError, DrafterError, PreflightError
from slipstream.preflight import CHEAP, CHECKS, cheap_checks, run_checks, run_preflight
from slipstream.preflight import runner as runner_module
from slipstream.preflight.report import CheckFailure
from support.tiny import FAMILIES


def test_the_checks_have_the_names_of_the_design() -> None:
    assert set(CHECKS) == {
        "head-parity", "no-leak", "overfit", "render-parity", "norms-move", "mask-token", "tied-head", "rope",
        "packing-parity", "empty-batch", "exact-resume", "lossless",
    }  # fmt: skip
    assert set(CHEAP) == set(CHECKS) - {"overfit", "norms-move", "exact-resume", "lossless"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_check_passes_on_every_family(family, prepared) -> None:
    out = io.StringIO()
    report = run_checks(prepared(family), list(CHECKS), console=Console(file=out, width=300))
    assert report.passed, out.getvalue()
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == list(CHECKS)
    assert all(" ok: " in line and line.endswith(" s)") for line in lines)


def test_weights_gradients_mode_and_generators_stay_as_they_were(run) -> None:
    before = {name: p.detach().clone() for name, p in run.draft_model.named_parameters()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    run.draft_model.eval()
    run_checks(run, list(CHECKS))
    assert torch.equal(state, torch.get_rng_state())
    assert not run.draft_model.training
    run.draft_model.train()
    for name, parameter in run.draft_model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_a_failure_is_printed_written_and_raised_by_its_name(run, changed) -> None:
    out = io.StringIO()
    padded = changed(run, mask_token_id=258)
    report = run_checks(padded, ["rope", "mask-token"], console=Console(file=out, width=300))
    assert not report.passed
    assert report.failed == ("mask-token",)
    assert "mask-token FAILED: mask token 258" in out.getvalue()
    tree = json.loads(json.dumps(report.as_json()))
    assert tree["passed"] is False
    assert tree["checks"]["rope"]["passed"] is True
    assert "258" in tree["checks"]["mask-token"]["detail"]
    with pytest.raises(PreflightError, match="preflight check mask-token failed: mask token 258") as caught:
        report.raise_failure()
    assert caught.value.check == "mask-token"


def test_the_trainer_is_given_the_cheap_checks(run, changed) -> None:
    tree = cheap_checks()(run)
    assert tree is not None
    assert list(tree["checks"]) == list(CHEAP)
    off = dataclasses.replace(run.recipe, training=dataclasses.replace(run.recipe.training, preflight=False))
    out = io.StringIO()
    assert cheap_checks(Console(file=out))(dataclasses.replace(run, recipe=off)) is None
    assert "preflight is off" in out.getvalue()
    with pytest.raises(PreflightError, match="mask-token"):
        cheap_checks()(changed(run, mask_token_id=258))


def test_errors_that_a_user_can_mend_are_results_and_others_escape(run, monkeypatch) -> None:
    def mendable(_):
        raise DrafterError("two\nlines")

    def fault(_):
        raise RuntimeError("ours")

    monkeypatch.setitem(runner_module.CHECKS, "rope", mendable)
    (result,) = run_checks(run, ["rope"]).results
    assert not result.passed
    assert result.detail == "two lines"
    monkeypatch.setitem(runner_module.CHECKS, "rope", fault)
    with pytest.raises(RuntimeError, match="ours") as caught:
        run_checks(run, ["rope"])
    assert "while preflight ran rope" in caught.value.__notes__


def test_the_command_loads_the_recipe_runs_and_writes(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    out = io.StringIO()
    report = run_preflight(
        run.recipe, output=tmp_path / "report.json", console=Console(file=out, width=300), checks=["rope", "mask-token"]
    )
    assert report.passed
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is True
    assert "2 checks passed" in out.getvalue()
    assert not Path(run.recipe.run.directory).exists()
    cheap = run_preflight(run.recipe, only_cheap=True)
    assert [r.name for r in cheap.results] == list(CHEAP)


def test_an_unknown_check_and_an_output_that_cannot_be_written_are_told(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="no preflight check 'ropes'"):
        run_preflight(run.recipe, checks=["ropes"])
    with pytest.raises(ConfigError, match="cannot be written"):
        run_preflight(run.recipe, checks=["rope"], output=tmp_path / "missing" / "report.json")


def test_data_without_an_anchor_fails_the_checks_that_need_one(run, verdict) -> None:
    class Bare:
        def documents(self):
            return iter(())

    bare = dataclasses.replace(run, dataset=Bare())
    assert "two supervised tokens" in verdict(bare, "no-leak")["no-leak"]


def test_a_check_failure_is_one_line() -> None:
    assert str(CheckFailure("x")) == "x"
