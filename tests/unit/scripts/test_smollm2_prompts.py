"""The prompts of SmolLM2's drafter: the same every time, no two nearly alike, nothing held out and nothing of HumanEval
among those to train on."""

import ast
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "smollm2_pair"


def import_script(name: str) -> ModuleType:
    """Import a script under a name of its own: another folder has a ``make_prompts`` too."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"smollm2_pair_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


make = import_script("make_prompts")
own_prompts = make.own.__globals__
function_prompts, text_prompts = make.function_prompts, make.text_prompts
Prompt, Seen, Phrases = make.Prompt, make.Seen, make.Phrases

PROBLEM = {
    "task_id": "HumanEval/0",
    "entry_point": "has_close_elements",
    "prompt": "def has_close_elements(numbers, threshold):\n"
    '    """ Check if in given list of numbers, are any two numbers closer to each other than given threshold. """\n',
}
FUNCTIONS = [
    (
        "flask",
        "add_all",
        "def add_all(values, start=0):",
        "Add the values up, one after the other.",
        "    return start",
    ),
    (
        "flask",
        "hasCloseElements",
        "def hasCloseElements(a):",
        "Compare what stands close together.",
        "    return a < 1",
    ),
    ("flask", "Store.get", "class Store:\n    def get(self, key):", "Look the key up in the store.", "    return 1"),
    ("rich", "wide", "def wide(text: str) -> bool:", "Tell whether the text is wide.", "    return cell(text) > 1"),
]
PASSAGE = (
    "The cache holds what was asked for before, so that it need not be asked for again. It is emptied when the size"
    " that was set is reached, and those entries go first that nobody has asked for in a long time. A cache that was"
    " closed can be opened again, but what it held is gone by then, and the first questions take as long as ever."
)
OTHER_PASSAGE = (
    "A timer is started by the first call and stopped by the second one. If there is no second call within an hour,"
    " then the timer is thrown away, since nobody would want to know of it any more. The names of timers are not case"
    " sensitive, and there may be as many of them at once as the machine has room for."
)


def words(texts: list[str]) -> list[int]:
    """Stands in for the tokenizer."""
    return [len(text.split()) for text in texts]


def corpus(folder: Path) -> Path:
    """A small corpus: functions and a documented module, of packages to train on and of a held-out one."""
    (folder / "clean").mkdir(parents=True)
    for role, package in (("train", None), ("heldout", "tornado")):
        rows = []
        for place, (name, function, head, doc, body) in enumerate(FUNCTIONS):
            indent = "    " if head.startswith("class") else ""
            if package is not None:
                function, head, doc = function + "_x", head.replace(function, function + "_x"), f"Other: {doc}"
            user = f'{head}\n{indent}    """{doc}"""'
            row = {"package": package or name, "file": f"{place}.py", "function": function}
            rows.append({**row, "user": user, "assistant": f"\n{indent}    # {place}\n{indent}{body}"})
        name = "functions.jsonl" if package is None else "functions_heldout.jsonl"
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = PASSAGE if package is None else OTHER_PASSAGE
        document = {"package": package or "flask", "file": "a.py", "text": f'"""{text}"""\n\nimport os\n'}
        (folder / "clean" / f"{role}.jsonl").write_text(json.dumps(document) + "\n")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Any]:
    folder = corpus(tmp_path_factory.mktemp("corpus"))
    splits, refused = make.build(folder, [], make.HumanEval([PROBLEM]), words)
    return splits, refused


def prompt(user: str, kind: str = "own/list", **more: Any) -> Any:
    return Prompt(kind, "own", user, user, user, **more)


def test_our_own_material_is_enough_and_of_many_kinds(built: Any) -> None:
    splits, _ = built
    ours = [p for p in splits["train"] if p.kind.startswith("own/")]
    kinds = Counter(p.kind for p in ours)
    assert len(ours) == make.TRAIN["own"]
    assert len(kinds) >= 40
    assert max(kinds.values()) < 0.1 * len(ours)
    assert len([p for p in splits["heldout"] if p.kind.startswith("own/")]) >= 300
    assert {p.kind for p in splits["heldout"] if p.kind.startswith("own/")} == {*kinds, "own/conversation"}


def test_the_shares_of_the_parts() -> None:
    total = sum(make.TRAIN.values())
    assert total == 40_000
    assert {part: count / total for part, count in make.TRAIN.items()} == {"own": 0.35, "code": 0.35, "text": 0.30}
    for shares in function_prompts.TASKS.values():
        assert sum(shares.values()) == 100
    assert sum(text_prompts.TASKS.values()) == 100


def test_code_and_text_come_from_the_packages_of_their_split(built: Any) -> None:
    splits, _ = built
    parts = {split: Counter(p.kind.split("/")[0] for p in prompts) for split, prompts in splits.items()}
    assert 1 <= parts["train"]["code"] <= 3
    assert parts["train"]["text"] == parts["heldout"]["text"] == 1
    assert {p.source for p in splits["heldout"]} == {"own", "tornado"}
    assert "tornado" not in {p.source for p in splits["train"]}


def test_no_prompt_twice_and_none_of_the_held_out_ones(built: Any) -> None:
    splits, _ = built
    texts = {split: [" ".join(make.text_of(p).casefold().split()) for p in splits[split]] for split in splits}
    for split in splits:
        assert len(texts[split]) == len(set(texts[split]))
    assert set(texts["train"]).isdisjoint(texts["heldout"])
    firsts = {p.user.casefold() for p in splits["train"]}
    assert firsts.isdisjoint(p.user.casefold() for p in splits["heldout"])
    assert firsts.isdisjoint(text.casefold() for text in own_prompts["quickstart_heldout"]())


def test_held_out_topics_are_in_no_training_prompt(built: Any) -> None:
    splits, _ = built
    training = "\n".join(p.user for p in splits["train"] if p.kind.startswith("own/")).casefold()
    for kind, spec in own_prompts["merged"]()["kinds"].items():
        if spec.get("from") == "passages":
            continue
        for values in spec["heldout"]:
            for value in values[: 2 if kind == "compare" else 1]:
                name = value.casefold()
                assert name not in training or not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", training), value
    for _, text, _ in own_prompts["merged"]()["passages"]["heldout"]:
        assert text.casefold() not in training


def test_topics_of_a_kind_are_all_different() -> None:
    for kind, spec in own_prompts["merged"]()["kinds"].items():
        if spec.get("from") != "passages":
            topics = [tuple(values) for split in ("train", "heldout") for values in spec[split]]
            assert len(topics) == len(set(topics)), (kind, [t for t, n in Counter(topics).items() if n > 1])
        assert len(spec["templates"]) == len(set(spec["templates"])), kind


def test_every_slot_is_filled(built: Any) -> None:
    splits, _ = built
    for p in [p for split in splits.values() for p in split if p.kind.startswith("own/")]:
        assert not re.search(r"\{[a-zA-Z]+\}|\w [.?!](?!\w)|[^.]\.\.$", p.user.split("```")[0]), p.user
        assert p.user[0].isupper() or p.user[0] in "\"`'0123456789" or p.kind == "own/roleplay", p.user


def test_a_near_duplicate_is_refused_and_another_text_is_not() -> None:
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    long += " eighteen nineteen twenty and so on until the very end"
    seen = Seen()
    assert seen.take(long)
    assert not seen.take(long.upper().replace(" ", "  ") + "!")
    assert not seen.take(long.replace("twenty", "hundred"))
    assert seen.take(" ".join(reversed(long.split())))
    assert seen.take("Give me five names for a cat that lives on a ship.")
    assert not seen.take("Give me five names for a cat that lives on a boat.")
    assert seen.take("Give me five names for a dog, and say which one you like best.")
    assert seen.take("Hello!")
    assert not seen.take("hello")


def test_a_text_within_another_one_is_found_and_strictness_can_be_set() -> None:
    start = " ".join(f"word{n}" for n in range(40))
    half = " ".join(f"word{n}" for n in range(24, 40)) + " " + " ".join(f"other{n}" for n in range(24))
    assert not Seen().near(start)
    seen, strict = Seen(), Seen(most_long=0.2)
    seen.add(start)
    strict.add(start)
    assert seen.near("A preface. " + start)
    assert not seen.near(half)
    assert strict.near(half)


def test_humaneval_is_kept_away_by_name_and_by_words() -> None:
    humaneval = make.HumanEval([PROBLEM])
    assert humaneval.reason(prompt("Write it.", function="hasCloseElements"))
    assert humaneval.reason(prompt("Write it.", function="has_close_element")) is None
    near = "Please check if, in given list of numbers, are any two numbers closer than they should be."
    assert humaneval.reason(prompt(near)) == "words of HumanEval"
    assert humaneval.reason(prompt("Tell me something.", follow=(near,))) == "words of HumanEval"
    assert humaneval.reason(prompt("Check if any two numbers of a list are close to each other.")) is None


def test_no_training_prompt_is_near_humaneval(built: Any) -> None:
    splits, refused = built
    assert refused["train"]["code"]["function named as in HumanEval"] == 1
    assert not any("hasCloseElements" in p.user for p in splits["train"])
    stated = own_prompts["load"]("code")["states_a_humaneval_task"]
    assert len(stated) >= 10
    assert not any(text in p.user for p in splits["train"] for text in stated)


def test_the_sieve_counts_what_it_refuses() -> None:
    sieve = make.Sieve(make.HumanEval([PROBLEM]), words, ["What is the name of the smallest bird in the world?"])
    given = [
        prompt("Which river is the longest one in Europe?", "text/title"),
        prompt("which river is the longest one in Europe", "text/title"),
        prompt("What is the name of the smallest bird in the world, please?", "text/title"),
        prompt("word " * 301, "text/title"),
        prompt("Why does a cake rise in a hot oven?", "text/title"),
        prompt("How did people count before they had numbers?", "text/title"),
        prompt("When do the swallows come back from Africa?", "text/title"),
    ]
    kept = sieve.take(given, 3, 2)
    assert [given.index(p) for p in kept] == [0, 4]
    assert sieve.refused["text"] == {
        "near-duplicate": 1,
        "near a held-out prompt": 1,
        "too long": 1,
        "package's share": 2,
    }
    assert len(sieve.take([prompt("Name a fish."), prompt("Who drew the first map of all?")], 1, 1)) == 1
    assert sieve.refused["own"]["enough"] == 1


def test_conversations_alternate_and_end_with_the_user(built: Any) -> None:
    splits, _ = built
    for split, prompts in splits.items():
        longer = 0
        for p in prompts:
            messages = make.messages_of(p)
            roles = [m["role"] for m in messages if m["role"] != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
            assert all(m["content"].strip() for m in messages)
            longer += len(roles) > 1
            # A held-out prompt is decoded as it is: its answers are authored.
            assert split == "train" or make.PLACEHOLDER not in make.text_of(p)
        assert longer > (1000 if split == "train" else 5)


def test_values_of_problems_add_up() -> None:
    evaluate, drawn = own_prompts["evaluate"], own_prompts["drawn"]
    assert evaluate("a*b+c", {"a": 2, "b": 3, "c": 4}) == 10
    assert evaluate("a*x-b", {"a": 2, "b": 3, "x": 4}) == 5
    values = [drawn({"name": ["A", "B"]}, "a=3-9 b=-2-2 t=a*b", n) for n in range(50)]
    assert {v["a"] for v in values} == set(range(3, 10))
    assert {v["b"] for v in values} == set(range(-2, 3))
    assert all(v["t"] == v["a"] * v["b"] for v in values)


def test_a_slip_changes_one_token_and_still_parses() -> None:
    code = 'def below(values, limit):\n    """Less < or more >."""\n    return [v for v in values if v < limit]'
    assert function_prompts.slipped(code, 3) == code.replace("v < limit", "v <= limit")
    assert function_prompts.slipped('def f():\n    """A and B."""\n    return name', 3) is None


def test_functions_are_taken_apart() -> None:
    name, function, head, doc, body = FUNCTIONS[0]
    pair = {"package": name, "file": "a.py", "function": function, "user": f'{head}\n    """{doc}"""'}
    found = function_prompts.parsed({**pair, "assistant": f"\n\n{body}"})
    assert found.signature == "add_all(values, start=0)"
    assert (found.kind, found.typed) == ("closed", False)
    assert found.bare == f"{head}\n{body}"
    assert function_prompts.parsed({**pair, "assistant": "\n    return other(values)"}).kind == "open"
    linked = pair["user"].replace(doc, "See https://example.org for more of this.")
    assert function_prompts.parsed({**pair, "user": linked, "assistant": f"\n{body}"}) is None


def test_code_in_prompts_is_python(built: Any) -> None:
    splits, _ = built
    seen = 0
    for p in splits["train"] + splits["heldout"]:
        block = re.search(r"```python\n(.*?)\n```", p.user, re.DOTALL)
        if block and p.kind in ("own/snippet", "code/bug", "code/explain", "code/docstring", "code/complete"):
            ast.parse(block[1])
            seen += 1
    assert seen > 50


def test_markup_is_taken_off() -> None:
    plain = text_prompts.of_sources.__globals__["plain"]
    assert plain("Use :class:`~a.b.Cat` and ``x_y`` of `the guide <x.html>`_.") == "Use Cat and x_y of the guide."
    assert plain("A **bold** word, a [link](y), html5lib_ and [N, 2] of\n  <b>x[0]</b> [1]_ .") == (
        "A bold word, a link, html5lib and [N, 2] of x[0]."
    )


def test_passages_are_prose() -> None:
    passages_of = text_prompts.of_sources.__globals__["passages_of"]
    assert [p.text for p in passages_of("flask", "module", f"Title\n=====\n\n{PASSAGE}\n\n    code()\n")] == [PASSAGE]
    for spoiled in (
        PASSAGE.replace("closed", "closed (see https://example.org)"),
        PASSAGE.replace("The cache", "However, the cache"),
        PASSAGE.replace("asked", "get_it(x)").replace("was", "is_in"),
        PASSAGE.replace("asked", "licensed"),
        PASSAGE.split(".")[0] + ".",
    ):
        assert not list(passages_of("flask", "module", spoiled)), spoiled


def test_missing_wheels_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not list(text_prompts.wheels_of("heldout", [tmp_path]))
    assert "heldout: 12 of 12 wheels are not here" in capsys.readouterr().err


def test_written_rows_and_manifest(built: Any, tmp_path: Path) -> None:
    splits, refused = built
    few = {split: prompts[:200] for split, prompts in splits.items()}
    manifest = make.write(few, refused, tmp_path, words)
    for split in few:
        data = (tmp_path / f"prompts_{split}.jsonl").read_bytes()
        rows = [json.loads(line) for line in data.splitlines()]
        assert len(rows) == manifest[split]["prompts"] == 200
        assert set(rows[0]) == {"messages", "kind", "source"}
        assert manifest[split]["sha256"] == hashlib.sha256(data).hexdigest()
        assert sum(manifest[split]["kinds"].values()) == sum(s["prompts"] for s in manifest[split]["sources"].values())
        assert all(source["licence"] for source in manifest[split]["sources"].values())
    assert (
        make.lzma.decompress((tmp_path / "packed" / "prompts_train.jsonl.xz").read_bytes())
        == (tmp_path / "prompts_train.jsonl").read_bytes()
    )
    assert [p.key() for p in few["train"]] == sorted(p.key() for p in few["train"])


def test_a_source_that_is_not_audited_for_the_split_is_refused(tmp_path: Path) -> None:
    held = prompt("Write a title.", "text/title")._replace(source="tornado")
    with pytest.raises(SystemExit, match="tornado is not audited for train"):
        make.write({"train": [held]}, {}, tmp_path, words)


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_process(built: Any, tmp_path: Path) -> None:
    splits, _ = built
    code = (
        "import sys, hashlib; sys.path[:0] = sys.argv[1:2]\n"
        "import make_prompts as make\nfrom pathlib import Path\n"
        "humaneval = make.HumanEval([])\n"
        "splits, _ = make.build(Path(sys.argv[2]), [], humaneval, lambda texts: [len(t.split()) for t in texts])\n"
        "print(*(hashlib.sha256(make.encode(splits[s])).hexdigest() for s in ('heldout', 'train')))\n"
    )
    folder = corpus(tmp_path / "corpus")
    outputs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(FOLDER), str(folder)]
        outputs.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].split()[0] == hashlib.sha256(make.encode(splits["heldout"])).hexdigest()
