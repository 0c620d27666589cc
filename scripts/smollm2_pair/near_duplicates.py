"""Near-duplicates among prompts: texts that share most of their word n-grams.

Long texts are compared by 8-grams of words, short ones by 4-grams, where one differing word is a small part of the
text. What is compared is the share of the smaller text's n-grams that the other has too, so that a text within another
one is found as well.
"""

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

LONG, SHORT = 8, 4  # words in an n-gram
LONG_FROM = 24  # words of a text
MOST_LONG, MOST_SHORT = 0.5, 0.8  # shared n-grams: as many make a near-duplicate
WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """The words of a text, without case, punctuation and spacing."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def grams(words: list[str], n: int) -> set[int]:
    """Hashes of the n-grams of words, the same on every machine; fewer words than n are one n-gram."""
    spans = (" ".join(words[i : i + n]) for i in range(max(len(words) - n + 1, 1)))
    return {int.from_bytes(hashlib.blake2b(span.encode(), digest_size=8).digest(), "big") for span in spans}


class Seen:
    """Texts that were taken, and whether a further one is nearly one of them."""

    def __init__(self, most_long: float = MOST_LONG, most_short: float = MOST_SHORT) -> None:
        self.most = {LONG: most_long, SHORT: most_short}
        self._posts: dict[int, dict[int, list[int]]] = {LONG: defaultdict(list), SHORT: defaultdict(list)}
        self._sizes: dict[int, list[int]] = {LONG: [], SHORT: []}

    def near(self, text: str) -> bool:
        """Whether the text is nearly one that was added."""
        return any(self._near(n, found) for n, found in self._grams(text))

    def add(self, text: str) -> None:
        """Remember the text."""
        for n, found in self._grams(text):
            number = len(self._sizes[n])
            self._sizes[n].append(len(found))
            for gram in found:
                self._posts[n][gram].append(number)

    def take(self, text: str) -> bool:
        """Remember the text unless it is a near-duplicate; whether it was remembered."""
        if self.near(text):
            return False
        self.add(text)
        return True

    def _grams(self, text: str) -> Iterator[tuple[int, set[int]]]:
        words = words_of(text)
        if len(words) >= LONG_FROM:
            yield LONG, grams(words, LONG)
        else:
            yield SHORT, grams(words, SHORT)

    def _near(self, n: int, found: set[int]) -> bool:
        posts, sizes = self._posts[n], self._sizes[n]
        shared = Counter(number for gram in found if gram in posts for number in posts[gram])
        return any(count >= self.most[n] * min(len(found), sizes[number]) for number, count in shared.items())


class Phrases:
    """The 8-grams of texts that must not be met again, not one of them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams: set[int] = set()
        for text in texts:
            words = words_of(text)
            if len(words) >= LONG:
                self._grams |= grams(words, LONG)

    def met(self, text: str) -> bool:
        """Whether the text holds one of the phrases."""
        words = words_of(text)
        return len(words) >= LONG and not self._grams.isdisjoint(grams(words, LONG))
