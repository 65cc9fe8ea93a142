"""README and docs are true: their snippets run, their generated parts are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from orchard.cli import COMMANDS
from orchard.dispatch import settings

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{n}")
    for page in PAGES
    for n, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block runs by itself."""
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})


def test_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The first snippet of the README prints the block that follows it."""
    text = (ROOT / "README.md").read_text()
    match = re.search(r"```python\n(.*?)```\n+[^`]*```text\n(.*?)```", text, re.DOTALL)
    assert match is not None
    exec(compile(match[1], "README", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out.strip() == match[2].strip()


def test_generated_parts_are_current() -> None:
    """`make docs` would change nothing."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page in generate.pages():
        assert generate.filled(page.read_text()) == page.read_text(), page.name
    assert "`reference` / chunked" in (ROOT / "README.md").read_text()


def test_links_lead_somewhere() -> None:
    """Relative links in README and docs point at files that exist."""
    found = 0
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                found += 1
                assert (page.parent / target).exists(), f"{page.name}: {target}"
    assert found > 5


def test_every_variable_is_documented() -> None:
    """docs/environment.md lists the variables that are read, and no others."""
    text = (ROOT / "docs/environment.md").read_text()
    assert set(re.findall(r"`(ORCHARD_[A-Z_]+)`", text)) == set(settings.VARIABLES)
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"\"(ORCHARD_[A-Z_]+)\"", source)) == set(settings.VARIABLES)


def test_commands_are_documented() -> None:
    """The README names every command."""
    text = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"orchard {command}" in text
