"""Answers by the target: multi-turn, resumable, refused when the work has changed; every oddity counted."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import DataConfig, RegenerateConfig
from slipstream.data.answers import split_reasoning
from slipstream.data.conversations import read_conversations
from slipstream.data.pack import build_dataset
from slipstream.data.regenerate import Generate, RegenerateProgress, RegenerateReport, regenerate
from slipstream.data.render import Renderer
from slipstream.data.rows import as_cut, parse_row
from slipstream.errors import DataError
from slipstream.records import Conversation
from support.tiny import CHATML, THINKING, tiny_tokenizer

END = 257
TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


class Says:
    """A target that answers by a function of the prompt's text; it records its calls and may die at one."""

    def __init__(self, answer: Callable[[str], str] | str = "", *, dies_at: int = -1) -> None:
        self.answer = answer
        self.calls: list[list[list[int]]] = []
        self.seeds: list[int] = []
        self.dies_at = dies_at

    def __call__(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        self.calls.append(prompts)
        self.seeds.append(seed)
        out = []
        for prompt in prompts:
            text = TOKENIZER.decode(prompt, skip_special_tokens=False)
            said = self.answer(text) if callable(self.answer) else self.answer
            out.append([*ids(said), END][:max_new_tokens])
        return out


def echo(text: str) -> str:
    """An answer that depends on the whole prompt."""
    return f"I read {len(text)} characters."


def chats(count: int, turns: int = 1) -> list[Conversation]:
    rows = [
        [
            message
            for t in range(turns)
            for message in (
                {"role": "user", "content": f"Question {i}.{t} " + "?" * (i % 5)},
                {"role": "assistant", "content": f"old {i}.{t}"},
            )
        ]
        for i in range(count)
    ]
    return [parse_row({"messages": m}, f"f.jsonl:{i + 1}") for i, m in enumerate(rows)]


def run(
    directory: Path, conversations: list[Conversation], says: Generate, *, template: str = CHATML,
    name: str = "out.jsonl", data: DataConfig | None = None, progress: Any = None, max_positions: int = 0,
    target: str = "t", target_settings: Any = None, **settings: Any,
) -> RegenerateReport:  # fmt: skip
    return regenerate(
        conversations,
        renderer=Renderer(tiny_tokenizer(template), data=data or DataConfig()),
        generate=says,
        output=directory / name,
        settings=RegenerateConfig(**{"batch_size": 3, "max_new_tokens": 64, **settings}),
        progress=progress,
        target_digest=target,
        max_positions=max_positions,
        target_settings=target_settings or {"target.dtype": "float32"},
    )


def rows(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_answers_are_replaced_in_the_order_of_the_source(tmp_path: Path) -> None:
    told: list[RegenerateProgress] = []
    says = Says(echo)
    report = run(tmp_path, chats(7), says, progress=told.append)
    got = rows(tmp_path / "out.jsonl")
    assert [r["messages"][0]["content"][:10] for r in got] == [f"Question {i}" for i in range(7)]
    assert all(r["messages"][1]["content"].startswith("I read ") and r["finish"] == "eos" for r in got)
    assert (report.rows, report.answers, report.conversations, report.resumed) == (7, 7, 7, 0)
    assert report.tokens == sum(len(r["messages"][1]["content"]) + 1 for r in got)
    assert report.retokenised_differently == report.unfinished == report.empty == 0
    assert (told[0].done, told[0].eta_seconds) == (0, None)
    assert (told[-1].done, told[-1].total, told[-1].eta_seconds) == (7, 7, 0.0)
    assert [len(c) for c in says.calls] == [3, 3, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.report.json"]
    assert "7 of 7 conversations" in report.lines()[0]
    assert len(report.lines()) == 1


def test_the_longest_prompts_come_first_and_the_others_in_a_drawn_order(tmp_path: Path) -> None:
    asked = [parse_row({"messages": [{"role": "user", "content": "?" * n}]}, f"f.jsonl:{n}") for n in range(1, 41)]
    first, again, ended = Says(echo), Says(echo), Says(echo, dies_at=5)
    run(tmp_path, asked, first, name="a.jsonl", temperature=0.7)
    run(tmp_path, asked, again, name="b.jsonl", temperature=0.7)
    assert (first.calls, first.seeds) == (again.calls, again.seeds)
    shortest = [min(len(p) for p in call) for call in first.calls]
    assert shortest[0] == max(shortest)
    assert shortest != sorted(shortest, reverse=True)
    assert all(max(len(p) for p in call) - least <= 2 for call, least in zip(first.calls, shortest, strict=True))
    with pytest.raises(KeyboardInterrupt):  # what a run that is ended leaves is of all lengths
        run(tmp_path, asked, ended, name="c.jsonl", temperature=0.7)
    ahead = [min(len(p) for p in call) for call in ended.calls]
    assert max(ahead[1:]) > sorted(shortest)[len(shortest) // 2] > min(ahead[1:])


def test_ids_trained_on_are_the_ids_that_were_written(tmp_path: Path) -> None:
    says = Says(echo)
    run(tmp_path, chats(4, turns=2), says)
    data = DataConfig(train=(str(tmp_path / "out.jsonl"),), row_length=512)
    dataset = build_dataset(data, TOKENIZER, cache_dir=tmp_path)
    trained = {tuple(document.tolist()) for document, _ in dataset.documents()}
    last = [p for call in says.calls for p in call if TOKENIZER.decode(p).count("Question") == 2]
    assert trained == {(*p, *ids(echo(TOKENIZER.decode(p, skip_special_tokens=False))), END) for p in last}


def test_each_turn_is_answered_on_the_new_history(tmp_path: Path) -> None:
    report = run(tmp_path, chats(2, turns=3), Says(echo))
    assert report.answers == 6
    for row in rows(tmp_path / "out.jsonl"):
        messages = row["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * 3
        for place in (1, 3, 5):
            prompt = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:place])
            assert messages[place]["content"] == echo(prompt + "<|im_start|>assistant\n")


def test_prompts_without_answers_and_systems_and_tools(tmp_path: Path) -> None:
    system = {"role": "system", "content": "S"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    tool, user, old = (
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "o"},
    )
    given = [
        parse_row({"messages": [system, user]}, "o"),
        parse_row({"messages": [user, call, tool, old], "tools": [{"name": "f"}]}, "o"),
        parse_row({"messages": [user, old, user]}, "o"),
    ]
    report = run(tmp_path, given, Says(echo))
    got = rows(tmp_path / "out.jsonl")
    assert [m["role"] for m in got[0]["messages"]] == ["system", "user", "assistant"]
    assert [m["role"] for m in got[1]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert got[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "f"
    assert got[1]["tools"] == [{"name": "f"}]
    assert len(got[2]["messages"]) == 4
    assert report.kept_tool_calls == 1
    assert len(list(read_conversations([str(tmp_path / "out.jsonl")]))) == 3


def test_raw_prompts(tmp_path: Path) -> None:
    given = [Conversation(origin="o", kind="raw", prompt=f"def f{i}", completion="old") for i in range(3)]
    report = run(tmp_path, given, Says("(x): pass"), data=DataConfig(prompt_completion="raw"))
    assert rows(tmp_path / "out.jsonl")[2] == {"prompt": "def f2", "completion": "(x): pass", "finish": "eos"}
    assert report.retokenised_differently == 0
    report = run(tmp_path, given, Says("x" * 99), name="cut.jsonl", max_new_tokens=5)
    assert (report.unfinished, report.retokenised_differently) == (3, 0)
    data = DataConfig(train=(str(tmp_path / "cut.jsonl"),), prompt_completion="raw")
    cut = list(read_conversations(data.train, prompt_completion="raw"))
    assert build_dataset(data, TOKENIZER, cache_dir=tmp_path).report.supervised == 15  # the target wrote no end
    assert run(tmp_path, cut, Says("y"), name="again.jsonl").retokenised_differently == 0
    with pytest.raises(DataError, match="a text row has no prompt to answer"):
        run(tmp_path, [Conversation(origin="o", kind="raw", completion="x")], Says("y"), name="b.jsonl")


def test_an_answer_that_was_cut_and_is_now_finished(tmp_path: Path) -> None:
    report = run(tmp_path, [as_cut(c) for c in chats(2)], Says(echo))
    assert (report.answers, report.retokenised_differently) == (2, 0)


def test_unfinished_answers(tmp_path: Path) -> None:
    report = run(tmp_path, chats(2, turns=2), Says("x" * 100), max_new_tokens=10)
    got = rows(tmp_path / "out.jsonl")
    # The conversation ends at the cut answer: no server would go on from there.
    assert all(len(r["messages"]) == 2 and r["finish"] == "length" for r in got)
    assert report.unfinished == report.answers == 2
    assert report.retokenised_differently == 0
    dataset = build_dataset(
        DataConfig(train=(str(tmp_path / "out.jsonl"),), row_length=128), TOKENIZER, cache_dir=tmp_path
    )
    assert dataset.report.supervised == 20  # the words alone, no end of turn
    short_then_long = Says(lambda text: "x" * 100 if text.count("user") > 1 else "yes")
    report = run(tmp_path, chats(2, turns=2), short_then_long, max_new_tokens=10, name="b.jsonl", keep_unfinished=False)
    got = rows(tmp_path / "b.jsonl")
    assert all(len(r["messages"]) == 2 and r["finish"] == "eos" for r in got)
    assert (report.unfinished, report.answers) == (2, 2)
    with pytest.raises(DataError, match=r"no usable answer to any of 1 conversations .*1 cut"):
        run(tmp_path, chats(1), Says("x" * 100), max_new_tokens=10, name="c.jsonl", keep_unfinished=False)
    assert not (tmp_path / "c.jsonl").exists()


def test_empty_answers_and_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    says = Says(lambda text: "" if "Question 1" in text else "fine")
    report = run(tmp_path, chats(3), says)
    assert (report.rows, report.empty) == (2, 1)
    assert "1 turns were left out: the target said nothing" in report.lines()
    assert len(list(read_conversations([str(tmp_path / "out.jsonl")]))) == 2
    report = run(tmp_path, chats(5), Says("fine"), name="b.jsonl", max_positions=64 + 34)
    assert 0 < report.too_long < 5
    assert report.rows == 5 - report.too_long


def test_oddities_are_counted(tmp_path: Path) -> None:
    report = run(tmp_path, chats(1, turns=2), Says("again"), name="a.jsonl")
    assert report.duplicate_turns == 1
    # The template strips what the target wrote around its words: other ids.
    report = run(
        tmp_path, chats(1), Says(" spaced "), template=CHATML.replace("m.content", "m.content | trim"), name="b.jsonl"
    )
    assert report.retokenised_differently == 1
    report = run(tmp_path, chats(1), Says("hm</think> yes"), name="c.jsonl")
    assert report.unbalanced_think == 1
    # A byte that is no character does not come back from text.
    half = [ids("ü")[0], END]
    assert run(tmp_path, chats(1), lambda *_, **__: [half], name="d.jsonl").retokenised_differently == 1


def test_answers_that_the_template_refuses_are_left_out(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}" + CHATML
    )
    says = Says(lambda text: "bad" if "Question 1" in text else "good")
    report = run(tmp_path, chats(3), says, template=template)
    assert (report.rows, report.unrenderable) == (2, 1)


def test_a_group_is_tokenized_together_and_answered_as_each_alone(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[int] = []
    encode = Renderer._encode
    monkeypatch.setattr(Renderer, "_encode", lambda self, texts: calls.append(len(texts)) or encode(self, texts))
    template = THINKING.replace(
        "{{ m.content }}", "{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content | trim }}"
    )
    said = ["<think>\nhm\n</think>\n\nyes", " spaced ", "bad", "", "<think>\nnever closed", "fine", "x" * 99]

    def answer(text: str) -> str:
        return said[int(text.partition("Question ")[2].partition(".")[0]) % len(said)]

    options: dict[str, Any] = {"template": template, "data": DataConfig(thinking="on")}
    found = [
        run(tmp_path, chats(21, turns=2), Says(answer), name=name, batch_size=size, **options)
        for name, size in (("alone.jsonl", 1), ("all.jsonl", 21))
    ]
    assert rows(tmp_path / "alone.jsonl") == rows(tmp_path / "all.jsonl")
    alone, whole = ({**f.as_json(), "output": "", "seconds": 0} for f in found)
    assert alone == whole
    assert min(found[0].unrenderable, found[0].retokenised_differently, found[0].unfinished, found[0].empty) > 0
    calls.clear()
    run(tmp_path, chats(60), Says("fine"), name="many.jsonl", batch_size=60)
    assert [n for n in calls if n] == [
        60,
        60,
        120,
    ]  # lengths, prompts, answers: behind their prompts, and the prompts again


def test_one_prompt_that_cannot_be_made_names_its_origin(tmp_path: Path) -> None:
    template = "{% if 'Question 2' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + CHATML
    with pytest.raises(DataError, match=r"f.jsonl:3: the chat template refuses the conversation: .*no"):
        run(tmp_path, chats(4), Says("fine"), template=template)


def test_reasoning_gets_its_own_field_and_the_ids_stay(tmp_path: Path) -> None:
    says = Says("<think>\nhm\n</think>\n\nyes")
    report = run(tmp_path, chats(2), says, template=THINKING, data=DataConfig(thinking="on"))
    message = rows(tmp_path / "out.jsonl")[0]["messages"][1]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert report.retokenised_differently == report.unbalanced_think == 0
    # A template that does not show reasoning keeps it in the content, where it is shown.
    report = run(tmp_path, chats(2), says, name="b.jsonl")
    message = rows(tmp_path / "b.jsonl")[0]["messages"][1]
    assert "reasoning_content" not in message
    assert message["content"] == "<think>\nhm\n</think>\n\nyes"
    assert report.retokenised_differently == 0
    # Cut while thinking: all of it is reasoning, and only it is supervised.
    report = run(
        tmp_path, chats(2), Says("<think>\n" + "x" * 99), template=THINKING, data=DataConfig(thinking="on"),
        name="c.jsonl", max_new_tokens=20,
    )  # fmt: skip
    message = rows(tmp_path / "c.jsonl")[0]["messages"][1]
    assert (message["reasoning_content"], message["content"]) == ("x" * 18, "")
    assert (report.unfinished, report.retokenised_differently, report.unbalanced_think) == (2, 0, 0)


@pytest.mark.parametrize(
    ("text", "opened", "want"),
    [
        ("yes", False, (None, "yes")),
        ("<think>\na\n</think>\n\nyes", False, ("a", "yes")),
        ("\n<think>a</think>yes", False, ("a", "yes")),
        ("a\n</think>\n\nyes", True, ("a", "yes")),
        ("<think>a", False, ("a", "")),
        ("a", True, ("a", "")),
        ("a</think>b", False, (None, "a</think>b")),
        ("<think></think>b", False, ("", "b")),
    ],
)
def test_split_reasoning(text: str, opened: bool, want: tuple[str | None, str]) -> None:
    assert split_reasoning(text, opened=opened) == want


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("dies_at", range(5))
def test_a_run_that_died_and_was_resumed_gives_the_same_file(tmp_path: Path, dies_at: int, name: str) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    straight = Says(echo)
    report = run(whole, chats(8, turns=2), straight, name=name)
    with pytest.raises(KeyboardInterrupt):
        run(torn, chats(8, turns=2), Says(echo, dies_at=dies_at), name=name)
    assert not (torn / name).exists()
    again = Says(echo)
    resumed = run(torn, chats(8, turns=2), again, name=name)
    assert (torn / name).read_bytes() == (whole / name).read_bytes()
    assert resumed.resumed == 3 * (dies_at // 2)
    assert again.calls == straight.calls[2 * (dies_at // 2) :]  # nothing is asked twice, and batches are the same
    assert again.seeds == straight.seeds[2 * (dies_at // 2) :]
    ours, theirs = report.as_json(), resumed.as_json()
    for key in ("output", "seconds", "resumed"):
        del ours[key], theirs[key]
    assert ours == theirs


def test_a_torn_last_line_and_a_half_logged_group(tmp_path: Path) -> None:
    run(tmp_path / "whole", chats(6), Says(echo))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, chats(6), Says(echo, dies_at=1))
    journal = tmp_path / "out.jsonl.partial"
    text = journal.read_bytes()
    for cut in range(text.index(b"\n") + 1, len(text), 23):  # killed at any byte behind the first line
        journal.write_bytes(text[:cut])
        report = run(tmp_path, chats(6), Says(echo))
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
        assert report.resumed == text[:cut].count(b"\n") - 1
        (tmp_path / "out.jsonl").unlink()
    for cut in range(0, text.index(b"\n") + 1, 61):  # killed within the first line
        journal.write_bytes(text[:cut])
        assert run(tmp_path, chats(6), Says(echo)).resumed == 0
        (tmp_path / "out.jsonl").unlink()


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, chats(6), Says(echo, dies_at=1))
    journal = tmp_path / "out.jsonl.partial"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"{torn\n", *lines[3:]]))
    with pytest.raises(DataError, match=r"out\.jsonl\.partial:3: the journal is damaged"):
        run(tmp_path, chats(6), Says(echo))


def test_kill_nine_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from unit_test_regenerate import Says, chats, echo, run
        def slow(text):
            time.sleep(0.02)
            return echo(text)
        run(Path(sys.argv[1]), chats(300), Says(slow))
        """
    )
    here = Path(__file__).resolve()
    (tmp_path / "unit_test_regenerate.py").write_bytes(here.read_bytes())
    path = os.pathsep.join([str(tmp_path), str(here.parents[3] / "src"), str(here.parents[2])])
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    journal = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 10):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out.jsonl").exists()
    report = run(tmp_path, chats(300), Says(echo))
    assert 10 <= report.resumed < 300
    run(tmp_path / "whole", chats(300), Says(echo))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperature": 1.0}, "regenerate.temperature was 0.0, now 1.0"),
        ({"batch_size": 4}, "regenerate.batch_size was 3, now 4"),
        ({"target": "other"}, "target was t, now other"),
        ({"target_settings": {"target.dtype": "bfloat16"}}, r"target\.dtype was float32, now bfloat16"),
        ({"target_settings": {"target.dtype": "float32", "device": "cuda"}}, "device was None, now cuda"),
        ({"template": THINKING}, "tokenizer was"),
        ({"data": DataConfig(thinking="on")}, "data.thinking was auto, now on"),
        ({"conversations": chats(7)}, "conversations was"),
    ],
)
def test_other_work_is_refused_and_nothing_is_lost(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, chats(6), Says(echo, dies_at=1))
    before = (tmp_path / "out.jsonl.partial").read_bytes()
    conversations = change.pop("conversations", chats(6))
    with pytest.raises(DataError, match=f"holds answers of other work .*{told}"):
        run(tmp_path, conversations, Says(echo), **change)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == before
    run(tmp_path, chats(6), Says(echo))
    with pytest.raises(DataError, match=f"exists and is not overwritten .*{told}"):
        run(tmp_path, conversations, Says(echo), **change)


@pytest.mark.parametrize("change", [{"temperature": 1.0}, {"target": "other"}, {"max_new_tokens": 9}])
def test_a_journal_without_answers_is_no_obstacle(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, chats(4), Says(echo, dies_at=0))
    assert (tmp_path / "out.jsonl.partial").exists()
    report = run(tmp_path, chats(4), Says(echo), **change)
    assert (report.rows, report.resumed) == (4, 0)
    told = json.loads((tmp_path / "out.jsonl.report.json").read_text())["identity"]
    assert told["regenerate.max_new_tokens"] == change.get("max_new_tokens", 64)


def test_work_that_gave_nothing_names_the_cure_and_is_no_obstacle(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable answer .*2 too long") as caught:
        run(tmp_path, chats(2), Says(echo), max_positions=64)
    assert "lower regenerate.max_new_tokens from 64: with the prompt it must fit the target's 64 positions" in str(
        caught.value
    )
    assert (tmp_path / "out.jsonl.partial").exists()
    assert run(tmp_path, chats(2), Says("x"), max_positions=64, max_new_tokens=4).rows == 2
    with pytest.raises(DataError, match=r"raise regenerate\.max_new_tokens from 10 or set regenerate\.keep_unfinished"):
        run(tmp_path, chats(1), Says("x" * 100), max_new_tokens=10, name="c.jsonl", keep_unfinished=False)
    assert run(tmp_path, chats(1), Says("x" * 100), max_new_tokens=10, name="c.jsonl").rows == 1


def test_complete_work_is_not_done_again(tmp_path: Path) -> None:
    first = run(tmp_path, chats(4), Says(echo), name="out.jsonl.gz")
    says = Says(echo)
    assert run(tmp_path, chats(4), says, name="out.jsonl.gz") == first
    assert not says.calls
    (tmp_path / "out.jsonl.gz").write_bytes(gzip.compress(b"edited\n"))
    with pytest.raises(DataError, match="it was changed since it was written"):
        run(tmp_path, chats(4), says, name="out.jsonl.gz")


def test_a_file_that_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine\n")
    with pytest.raises(
        DataError, match=r"exists and is not overwritten \(there is no out\.jsonl\.report\.json beside it\)"
    ):
        run(tmp_path, chats(4), Says(echo))
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    def interfere(text: str) -> str:
        with pytest.raises(DataError, match="is being written by another process"):
            run(tmp_path, chats(4), Says(echo))
        return "fine"

    assert run(tmp_path, chats(4), Says(interfere)).rows == 4


def test_full_disk_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match="No space left on device; free space and run the same command again"):
        run(tmp_path, chats(9), Says(echo))
    report = run(tmp_path, chats(9), Says(echo))
    assert (report.resumed, report.rows) == (3, 9)


def test_bad_calls(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no conversations to answer"):
        run(tmp_path, [], Says(echo))
    with pytest.raises(DataError, match=r"must end in .jsonl or .jsonl.gz"):
        run(tmp_path, chats(1), Says(echo), name="out.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be"):
        run(tmp_path / "file", chats(1), Says(echo))

    def stops_early(prompts: list[list[int]], **_: Any) -> list[list[int]]:
        return [[5] for _ in prompts]

    with pytest.raises(ValueError, match="without a stop token of the renderer"):
        run(tmp_path, chats(1), stops_early)
