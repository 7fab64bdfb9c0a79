"""Generated files equal the output of ``python docs/refresh.py``."""

from tests.support.scripts import script


def test_generated_files_are_fresh():
    """Each generated file has the text that docs/refresh.py would write now."""
    stale = [path for path, text in script("refresh").pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python docs/refresh.py"


def test_refresh_corrects_the_count_of_operators(tmp_path, monkeypatch):
    """docs/refresh.py corrects a wrong number of operators on the page of limits."""
    refresh = script("refresh")
    text = refresh.LIMITS.read_text(encoding="utf-8")
    stale = tmp_path / "limits.md"
    stale.write_text(text.replace(" operators, listed by", "7 operators, listed by"), encoding="utf-8")
    monkeypatch.setattr(refresh, "LIMITS", stale)
    assert stale.read_text(encoding="utf-8") != refresh.limits() == text
