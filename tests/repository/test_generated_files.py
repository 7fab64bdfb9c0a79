"""Generated files equal the output of ``python docs/refresh.py``."""

from tests.support.scripts import script


def test_generated_files_are_fresh():
    """Each generated file has the text that docs/refresh.py would write now."""
    stale = [path for path, text in script("refresh").pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python docs/refresh.py"


def test_refresh_corrects_the_count_of_operators(tmp_path, monkeypatch):
    """docs/refresh.py corrects a wrong number of operators in the README."""
    refresh = script("refresh")
    text = refresh.README.read_text(encoding="utf-8")
    stale = tmp_path / "README.md"
    stale.write_text(text.replace(" operators, listed by", "7 operators, listed by"), encoding="utf-8")
    monkeypatch.setattr(refresh, "README", stale)
    assert stale.read_text(encoding="utf-8") != refresh.readme() == text
