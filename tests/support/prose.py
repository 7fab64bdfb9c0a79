"""Counter of phrases that make technical English hard to read, in docstrings and comments of Python files."""

import ast
import re

GOALS = {
    r"who(?:ever)?": 1.0,
    r"(?:nobody|somebody|everybody)": 0.6,
    r"(?:of|by|from|to|with|for|in|on|and|says|tells|is|are|as) what": 2.0,
    r"where (?:it|they|that|there|all|one|the)": 5.0,
    r"(?:of|for|in|on|by|from|behind) (?:which|whom|whose)": 8.0,
    r"(?:the|each|this|that|another|an|which|first|last|other) ones?|ones": 6.0,
    r"so (?:many|much)": 0.5,
    r"(?:anew|beside|behind)": 1.5,
}
"""Maximum occurrences of each phrase per 10,000 words: about the highest figure of eight well-written libraries."""

_LITERAL_OR_COMMENT = re.compile(
    r"""\"{3}(?:\\.|.)*?\"{3}|'{3}(?:\\.|.)*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*""", re.DOTALL
)
"""Matches string literals and comments; a tokenizer would take ten times as long."""
_PHRASES = {phrase: re.compile(rf"\b{phrase}\b", re.IGNORECASE) for phrase in GOALS}


class Counts:
    """Numbers of words, and of occurrences of each phrase, in a set of files."""

    def __init__(self, files):
        self.words = 0
        self.hits = dict.fromkeys(GOALS, 0)
        for file in files:
            for text in texts(file.read_text(encoding="utf-8")):
                self.words += len(re.findall(r"[A-Za-z]+", text))
                for phrase, pattern in _PHRASES.items():
                    self.hits[phrase] += len(pattern.findall(text))

    def rate(self, phrase):
        """Return the occurrences of a phrase per 10,000 words; a single occurrence counts as 0."""
        return 0.0 if self.hits[phrase] < 2 else 1e4 * self.hits[phrase] / self.words

    def total(self):
        """Return the occurrences of all phrases per 10,000 words."""
        return 1e4 * sum(self.hits.values()) / max(self.words, 1)


def texts(source):
    """Yield every docstring, string statement and comment of a module, each with its lines joined.

    >>> list(texts('"A module."  # its comment'))
    ['A module.', '# its comment']
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split())
    yield from (text for text in _LITERAL_OR_COMMENT.findall(source) if text.startswith("#"))
