"""Generated files are fresh: what ``python docs/refresh.py`` would write now."""

from tests.support.scripts import script


def test_generated_files_are_fresh():
    """Stubs, pages, tables of files and the README's count follow from the registry, the variables and the sources."""
    stale = [path for path, text in script("refresh").pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python docs/refresh.py"


def test_refresh_corrects_the_count_of_operators(tmp_path, monkeypatch):
    """A README with another number of operators is not fresh."""
    refresh = script("refresh")
    text = refresh.README.read_text(encoding="utf-8")
    stale = tmp_path / "README.md"
    stale.write_text(text.replace(" operators, listed by", "7 operators, listed by"), encoding="utf-8")
    monkeypatch.setattr(refresh, "README", stale)
    assert stale.read_text(encoding="utf-8") != refresh.readme() == text
