"""The quickstart's recipe, its data inside the package, and what happens to an earlier run."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.quickstart import quickstart_recipe, step_aside, what_this_was


def test_the_recipe_names_files_that_are_there() -> None:
    recipe = quickstart_recipe()
    assert recipe.run.directory == "runs/quickstart"
    assert recipe.target.path == "smollm2"
    assert 0 < recipe.training.max_minutes <= 4
    assert recipe.evaluation.max_prompts >= 60
    for name in (*recipe.data.train, *recipe.data.heldout):
        assert Path(name).is_file()


def test_training_and_heldout_prompts_are_disjoint() -> None:
    from slipstream.data.conversations import read_conversations

    recipe = quickstart_recipe()
    asked = [{c.messages[-2].content for c in read_conversations(recipe.data.train)}]
    asked.append({c.messages[-1].content for c in read_conversations(recipe.data.heldout)})
    assert len(asked[0]) >= 1500
    assert len(asked[1]) >= 60
    assert not asked[0] & asked[1]


def test_overrides_change_it_and_typos_are_refused() -> None:
    assert quickstart_recipe(["--target.path", "elsewhere"]).target.path == "elsewhere"
    with pytest.raises(ConfigError, match=r"Did you mean training\.max_minutes"):
        quickstart_recipe(["--training.max_minute", "1"])


def test_an_earlier_run_is_renamed_and_keeps_everything(tmp_path: Path) -> None:
    run = tmp_path / "quickstart"
    assert step_aside(run) is None
    kept = []
    for text in ("first", "second"):
        run.mkdir()
        (run / "drafter").write_text(text, encoding="utf-8")
        kept.append(step_aside(run))
        assert not run.exists()
    assert [(k / "drafter").read_text(encoding="utf-8") for k in kept if k] == ["first", "second"]
    assert kept[0] != kept[1]


@pytest.mark.parametrize(("lookup", "says"), [(1.5, "prompt lookup reaches 1.500"), (1.1, "beats the best free")])
def test_the_honest_sentence_names_what_was_measured(lookup: float, says: str) -> None:
    text = what_this_was(1.1234, {"bigram": 1.05, "prompt_lookup": lookup}, 3.5, "cpu")
    assert "1.123" in text
    assert "3.5 minutes" in text
    assert says in text
