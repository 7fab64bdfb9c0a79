"""``mx.contrib.text``: words counted, and numbered for an Embedding.

It owns the two parts that need nothing but words: ``text.utils.count_tokens_from_str`` and ``text.vocab.Vocabulary``.
Vectors of words, which MXNet downloads, are absent on purpose. Nothing is kept; any thread may call it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

from weftplan.errors import ParameterError

__all__ = ["utils", "vocab"]


def count_tokens_from_str(
    source_str: str,
    token_delim: str = " ",
    seq_delim: str = "\n",
    to_lower: bool = False,
    counter_to_update: Counter[str] | None = None,
) -> Counter[str]:
    """How often each word is in a text; added to ``counter_to_update`` where that is given.

    ``token_delim`` and ``seq_delim``, regular expressions, stand between words and between sentences.

    >>> sorted(count_tokens_from_str("Life is great ! \\n life is good", to_lower=True).items())
    [('!', 1), ('good', 1), ('great', 1), ('is', 2), ('life', 2)]
    """
    counter: Counter[str] = Counter() if counter_to_update is None else counter_to_update
    words = filter(None, re.split(f"{token_delim}|{seq_delim}", source_str))
    counter.update(word.lower() if to_lower else word for word in words)
    return counter


class Vocabulary:
    """Numbers of words: 0 for every unknown one, then the reserved ones, then those of ``counter``.

    Frequent words come first, and equally frequent ones in their order.

    Args:
        counter: how often each word occurs.
        most_freq_count: so many words of ``counter`` at most.
        min_freq: words that occur more seldom are unknown.
        unknown_token: what number 0 is called.
        reserved_tokens: words that have a number whether or not they occur.

    >>> words = Vocabulary(Counter("a b b c c c".split()), min_freq=2, reserved_tokens=["<pad>"])
    >>> words.idx_to_token, words.to_indices(["c", "a"]), words.to_tokens(3)
    (['<unk>', '<pad>', 'c', 'b'], [2, 0], 'b')
    """

    def __init__(
        self,
        counter: Counter[Any] | None = None,
        most_freq_count: int | None = None,
        min_freq: int = 1,
        unknown_token: Hashable = "<unk>",
        reserved_tokens: Sequence[Hashable] | None = None,
    ) -> None:
        if min_freq <= 0:
            raise ParameterError(f"Vocabulary: min_freq must be at least 1, got {min_freq!r}")
        if counter is not None and not isinstance(counter, Counter):
            raise ParameterError(f"Vocabulary: counter must be a collections.Counter, got {type(counter).__name__}")
        first = [unknown_token, *(reserved_tokens or ())]
        if len(set(first)) != len(first):
            raise ParameterError(f"Vocabulary: unknown_token and reserved_tokens must differ, got {first}")
        self.unknown_token = unknown_token
        self.reserved_tokens = None if reserved_tokens is None else list(reserved_tokens)
        often = sorted((counter or {}).items())
        often.sort(key=lambda pair: -pair[1])
        words = [word for word, count in often if count >= min_freq and word not in first]
        self.idx_to_token: list[Any] = [*first, *(words if most_freq_count is None else words[:most_freq_count])]
        self.token_to_idx: dict[Any, int] = {word: number for number, word in enumerate(self.idx_to_token)}

    def __len__(self) -> int:
        return len(self.idx_to_token)

    def to_indices(self, tokens: Any) -> Any:
        """The number of a word, or of each in a list."""
        if isinstance(tokens, list):
            return [self.token_to_idx.get(word, 0) for word in tokens]
        return self.token_to_idx.get(tokens, 0)

    def to_tokens(self, indices: Any) -> Any:
        """The word of a number, or of each in a list; raises ParameterError for a number that no word has."""
        if isinstance(indices, list):
            return [self.to_tokens(number) for number in indices]
        if not isinstance(indices, int) or not 0 <= indices < len(self):
            raise ParameterError(f"Vocabulary: numbers of words are 0 to {len(self) - 1}, got {indices!r}")
        return self.idx_to_token[indices]


utils = SimpleNamespace(count_tokens_from_str=count_tokens_from_str)
vocab = SimpleNamespace(Vocabulary=Vocabulary)
