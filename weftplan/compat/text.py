"""``mx.contrib.text``: word counts, and vocabularies for an Embedding.

The module implements ``text.utils.count_tokens_from_str`` and ``text.vocab.Vocabulary``, which need no data. Word
vectors, which MXNet downloads, are absent on purpose. The module is stateless; any thread may call it.
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
    """Count the words of a text; add the counts to ``counter_to_update`` if given.

    ``token_delim`` and ``seq_delim`` are regular expressions that separate words and sentences.

    >>> sorted(count_tokens_from_str("Life is great ! \\n life is good", to_lower=True).items())
    [('!', 1), ('good', 1), ('great', 1), ('is', 2), ('life', 2)]
    """
    counter: Counter[str] = Counter() if counter_to_update is None else counter_to_update
    words = filter(None, re.split(f"{token_delim}|{seq_delim}", source_str))
    counter.update(word.lower() if to_lower else word for word in words)
    return counter


class Vocabulary:
    """Numbers of words: 0 for every unknown word, then reserved words, then the words of ``counter``.

    Frequent words come first; equally frequent words keep their order.

    Args:
        counter: how often each word occurs.
        most_freq_count: most words of ``counter``.
        min_freq: less frequent words are unknown.
        unknown_token: the token of number 0.
        reserved_tokens: words that always have a number.

    >>> words = Vocabulary(Counter("a b b c c c".split()), min_freq=2, reserved_tokens=["<pad>"])
    >>> words.idx_to_token, words.to_indices(["c", "a"]), words.to_tokens(3)
    (['<unk>', '<pad>', 'c', 'b'], [2, 0], 'b')
    """

    def __init__(
        self,
        counter: Counter[Hashable] | None = None,
        most_freq_count: int | None = None,
        min_freq: int = 1,
        unknown_token: Hashable = "<unk>",
        reserved_tokens: Sequence[Hashable] | None = None,
    ) -> None:
        if min_freq <= 0:
            raise ParameterError(f"Vocabulary: min_freq must be at least 1, got {min_freq!r}")
        if counter is not None and not isinstance(counter, Counter):
            raise ParameterError(f"Vocabulary: counter must be a collections.Counter, got {type(counter).__name__}")
        tokens = [unknown_token, *(reserved_tokens or ())]
        if len(set(tokens)) != len(tokens):
            raise ParameterError(f"Vocabulary: unknown_token and reserved_tokens must differ, got {tokens}")
        self.unknown_token = unknown_token
        self.reserved_tokens = None if reserved_tokens is None else list(reserved_tokens)
        often = sorted((counter or {}).items())
        often.sort(key=lambda pair: -pair[1])
        words = [word for word, count in often if count >= min_freq and word not in tokens]
        self.idx_to_token: list[Any] = [*tokens, *(words if most_freq_count is None else words[:most_freq_count])]
        self.token_to_idx: dict[Any, int] = {word: number for number, word in enumerate(self.idx_to_token)}

    def __len__(self) -> int:
        return len(self.idx_to_token)

    def to_indices(self, tokens: Any) -> Any:
        """Return the number of a word, or of each word in a list."""
        if isinstance(tokens, list):
            return [self.token_to_idx.get(word, 0) for word in tokens]
        return self.token_to_idx.get(tokens, 0)

    def to_tokens(self, indices: Any) -> Any:
        """Return the word of a number, or of each number in a list; raise ParameterError for an unassigned number."""
        if isinstance(indices, list):
            return [self.to_tokens(number) for number in indices]
        if not isinstance(indices, int) or not 0 <= indices < len(self):
            raise ParameterError(f"Vocabulary: numbers of words are 0 to {len(self) - 1}, got {indices!r}")
        return self.idx_to_token[indices]


utils = SimpleNamespace(count_tokens_from_str=count_tokens_from_str)
vocab = SimpleNamespace(Vocabulary=Vocabulary)
