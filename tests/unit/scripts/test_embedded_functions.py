"""The embedded target's conversations: which functions they are made of, how they are encoded, packed and asked."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from support.scripts import load

SOURCE = '''import os
from typing import Any, Iterable as It, Mapping

class Store(Base):
    """Holds values by name."""

    def __init__(self, path: str, size: int = 4) -> None:
        # Why it is so.
        self.path = path
        self.other = size
        self.values = {}

    @property
    def root(self) -> str:
        """The folder that the store is kept in."""
        folder = os.path.dirname(self.path)
        return folder or "."

    @abstractmethod
    def close(self) -> None:
        """Close the store, whatever that means."""
        self.path = None
        self.values = None


def total(values: It[float], weight: float) -> float:
    """Add up the values, each times the weight.

    And say nothing of it to anyone.
    """
    # One by one.
    result = 0.0
    for value in values:
        result += value * weight

    return result


def bare(values):
    """Say what shall be done, and leave it there."""
    raise NotImplementedError


def undocumented(values):
    first = values[0]
    return first
'''


finding, making, prompting, tokenizing = map(
    load, ("function_pairs", "make_functions", "make_prompts", "train_tokenizer")
)


def pairs(text: str = SOURCE) -> dict[str, Any]:
    return {pair.name: pair for pair in finding.pairs_of({"package": "p", "file": "f.py", "text": text})}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizing.train([SOURCE.replace("value", f"value_{c}") for c in "abcdefgh"] * 4, 700)


def test_only_functions_with_docstring_and_body_are_taken() -> None:
    assert set(pairs()) == {"Store.root", "total"}
    assert not pairs(SOURCE.replace("Holds", "<|im_end|>"))


def test_question_and_answer_join_to_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "BARE", 256)
    pair = pairs()["total"]
    assert pair.user.endswith('to anyone.\n    """')
    assert pair.assistant.startswith("\n    # One by one.\n    result")
    assert pair.assistant.endswith("return result")
    assert pair.user + pair.assistant in SOURCE


def test_context_is_what_the_function_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "BARE", 0)
    found = pairs()
    assert found["total"].user.startswith("from typing import Iterable as It\n\n\ndef total(")
    root = "import os\n\n\nclass Store(Base):\n    def __init__(self, path: str, size: int = 4) -> None:\n"
    root += '        self.path = path\n\n    @property\n    def root(self) -> str:\n        """The folder'
    assert found["Store.root"].user.startswith(root)
    assert found["Store.root"].shorter[0].startswith("class Store(Base):\n    @property")


def test_a_long_docstring_can_be_cut_to_its_first_paragraph() -> None:
    assert pairs()["total"].shorter[1].endswith('float:\n    """Add up the values, each times the weight."""')
    assert finding.first_paragraph(['    """', "    One", "    two.", "", "    Three.", '    """']) == [
        '    """', "    One", "    two.", '    """',
    ]  # fmt: skip
    assert finding.first_paragraph(['    """One."""']) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("\n".join(f"    self.{c} = {c}" for c in "abcde"), True),
        ("\n".join(f"    self.{c} = {c}" for c in "abcd"), False),
        ("    if a:\n        b.c('d')\n    if e:\n        f.g('h')\n" * 3, True),
        ("    for a in b:\n        yield a + 1\n    return", False),
    ],
)  # fmt: skip
def test_bodies_that_repeat_themselves(body: str, expected: bool) -> None:
    assert finding.repeats(body) is expected


def test_the_same_function_is_taken_once() -> None:
    again = (
        SOURCE.replace("def total", "@cached\ndef Total").replace("0.0", "0.0  # none yet").replace("by one", "by two")
    )
    found = [*pairs().values(), *pairs(again).values()]
    assert [p.name for p in making.unseen(found, set(), Counter())] == ["Store.root", "total"]


def folder_of(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizing.save(tokenizer, folder)
    config = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 700}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_transformers_reads_our_splitting_beside_the_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(folder_of(tokenizer, tmp_path / "a"))
    read.save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
    for found in (read, AutoTokenizer.from_pretrained(tmp_path / "b")):
        assert found(SOURCE)["input_ids"] == tokenizer.encode(SOURCE).ids
        assert "ĊĠĠĠĠ" in found.tokenize("a:\n    b")
        assert (found.eos_token, found.pad_token, found.mask_token) == ("<|im_end|>", "<|pad|>", "<|mask|>")
        assert found.chat_template == tokenizing.TEMPLATE.rstrip("\n") or found.chat_template == tokenizing.TEMPLATE


def test_the_pieces_are_what_the_template_gives(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(folder_of(tokenizer, tmp_path))
    frame = making.Frame(tokenizer)
    for encoded in making.encode(tokenizer, pairs().values(), Counter()):
        asked = [{"role": "user", "content": encoded.pair.user}]
        told = [*asked, {"role": "assistant", "content": encoded.pair.assistant}]
        prompt = read.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        whole = read.apply_chat_template(told, return_dict=False)
        ids, mask = frame.conversation(encoded)
        assert ids.tolist() == [*whole, 0]
        assert whole[: len(prompt)] == prompt
        assert mask.tolist() == [0] * len(prompt) + [1] * (len(whole) - len(prompt) - 1) + [0, 0]
        bare = [*asked, {"role": "assistant", "content": encoded.pair.assistant[1:]}]
        assert read.apply_chat_template(bare, return_dict=False) == whole


def test_a_long_question_is_asked_with_less(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs()["total"]
    lengths = [len(tokenizer.encode(text).ids) for text in pair.shorter]
    dropped: Counter[str] = Counter()
    for most, expected in ((lengths[0], pair.shorter[0]), (lengths[1], pair.shorter[1])):
        monkeypatch.setattr(making, "MOST_USER", most)
        found = making.encode(tokenizer, [pair._replace(user=SOURCE)], dropped)
        assert [item.pair.user for item in found] == [expected]
    monkeypatch.setattr(making, "MOST_USER", 5)
    assert not list(making.encode(tokenizer, [pair], dropped))
    assert dropped == {"long question": 1}


def encoded_pairs(tokenizer: Tokenizer, count: int) -> list[Any]:
    pair, chance = pairs()["total"], np.random.default_rng(0)
    return [
        making.Encoded(
            pair._replace(key=f"{n:04}", package=f"p{n % 3}"),
            np.full(chance.integers(20, 200), 300, dtype="<u2"),
            np.full(chance.integers(12, 200), 301, dtype="<u2"),
        )
        for n in range(count)
    ]


def test_rows_start_with_a_conversation_and_lose_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    frame, encoded = making.Frame(tokenizer), encoded_pairs(tokenizer, 500)
    report = making.write(frame, encoded, tmp_path, "functions")
    ids = np.fromfile(tmp_path / "functions.bin", dtype="<u2").reshape(-1, making.ROW)
    mask = np.fromfile(tmp_path / "functions_mask.bin", dtype=np.uint8).reshape(-1, making.ROW)
    assert (ids[:, 0] == tokenizer.token_to_id("<|im_start|>")).all()
    assert report["rows"] == len(ids)
    assert report["supervised"] == mask.sum() == sum(len(item.answer) + 1 for item in encoded)
    assert set(np.unique(ids[mask == 1])) == {301, tokenizer.token_to_id("<|im_end|>")}
    assert (ids == 300).sum() == sum(len(item.user) for item in encoded)
    assert report["filled"] > 0.9
    assert len((tmp_path / "functions.jsonl").read_text().splitlines()) == 500


def test_no_package_gives_more_than_its_share_and_prompts_are_apart(tokenizer: Tokenizer) -> None:
    encoded = encoded_pairs(tokenizer, 60)
    dropped: Counter[str] = Counter()
    kept = making.capped(encoded, 10, dropped)
    assert Counter(item.pair.package for item in kept) == {"p0": 10, "p1": 10, "p2": 10}
    assert dropped == {"package's share": 30}
    trained, prompts = making.part_prompts(kept, 8, 3)
    assert len(prompts) == 8
    assert max(Counter(item.pair.package for item in prompts).values()) == 3
    assert {i.pair.key for i in trained} | {i.pair.key for i in prompts} == {i.pair.key for i in kept}
    assert len(trained) == 22


def test_prompts_are_of_all_lengths() -> None:
    rows = [
        {
            "package": f"p{n % 7}",
            "file": "f",
            "function": "g",
            "user": f"def f_{n}",
            "user_tokens": 200 if n % 10 else 30,
        }
        for n in range(400)
    ]
    chosen = prompting.of_all_lengths(rows, 60, 15)
    assert len(chosen) == 60
    assert sum(row["user_tokens"] == 30 for row in chosen) == 30
    assert max(Counter(row["package"] for row in chosen).values()) <= 15
    assert prompting.conversation(chosen[0])["messages"] == [{"role": "user", "content": chosen[0]["user"]}]
