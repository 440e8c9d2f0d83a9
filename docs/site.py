"""What mkdocs reads beside mkdocs.yml: pages that lie outside docs/, all pages of causes, and links between them."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_config(config: Any) -> Any:
    """Put a page per cause below the entry `Causes`."""
    causes = [f"causes/{p.name}" for p in sorted((ROOT / "docs" / "causes").glob("*.md")) if p.name != "README.md"]
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    at = next(i for i, entry in enumerate(reference) if "Causes" in entry)
    reference[at] = {"Causes": ["causes/README.md", *causes]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Take pages of the repository's top level for pages of the site."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to such pages, and theirs into docs/, to where they are in the site."""
    if page.file.src_uri in OUTSIDE:
        return markdown.replace("](docs/", "](")
    for name in OUTSIDE:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    return markdown
