"""The list of source files, docs/internals/files.md: the first sentence of each file's header, by folder.

usage: cd scripts && python3 -m checks.files --write      write the page
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent.parent
PAGE = CHECKOUT / "docs/internals/files.md"
CRATES = ["types", "store", "policy", "tier", "state", "core", "pool", "surgetank"]
FOLDERS = [*(f"crates/{name}" for name in CRATES), "shim", "python", "crates/testkit"]
HEAD = """# Source files

The first sentence of each file's header. `python3 -m checks.files --write`, in `scripts`, writes this page. ARCHITECTURE.md, in
the repository, says how the parts work together.
"""
LINK = re.compile(r"\[([^\]]*)\](?:\([^)]*\)|(?![\[(]))")
SENTENCE = re.compile(r"(.*?[^.][.?])(?=\s|$)", re.DOTALL)


def page() -> str:
    found: dict[str, list[str]] = defaultdict(list)
    listed = subprocess.run(["git", "ls-files", "-z", *FOLDERS], cwd=CHECKOUT, check=True, capture_output=True).stdout
    for name in sorted(listed.decode().split("\0")):
        path = Path(name)
        if (sentence := first_sentence(path)) is not None:
            found[str(path.parent)].append(f"| `{path.name}` | {sentence} |")
    order = sorted(found, key=lambda folder: (next(n for n, top in enumerate(FOLDERS) if folder.startswith(top)), folder))
    parts = [f"\n## {folder}\n\n| file | subject |\n|---|---|\n" + "\n".join(found[folder]) + "\n" for folder in order]
    return HEAD + "".join(parts)


def first_sentence(path: Path) -> str | None:
    """`None`: the file is not in the list (tests, and files without a header)."""
    if "tests" in path.parts or path.stem == "tests" or path.suffix not in {".rs", ".c", ".h", ".py"}:
        return None
    if path.parts[0] == "crates" and path.parts[2] != "src" or path.parts[0] == "python" and path.name == "conftest.py":
        return None
    if not (CHECKOUT / path).is_file():
        return None
    text = (CHECKOUT / path).read_text()
    if path.suffix == ".rs":
        lines = [line[3:].strip() for line in text.splitlines() if line.startswith("//!")]
        head = "\n".join(lines)
    elif path.suffix == ".py":
        head = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.match(r"/\*(.*?)\*/", text, re.DOTALL)
        head = re.sub(r"^ \* ?", "", comment[1], flags=re.MULTILINE) if comment else ""
    paragraph = " ".join(head.strip().split("\n\n")[0].split())
    sentence = SENTENCE.match(paragraph)
    plain = LINK.sub(r"\1", sentence[1] if sentence else paragraph)
    plain = plain.removesuffix(":") + "." if plain.endswith(":") else plain
    return plain.replace("|", r"\|") or None


def complaints() -> list[str]:
    if PAGE.is_file() and PAGE.read_text() == page():
        return []
    return [f"{PAGE.relative_to(CHECKOUT)}: differs from the headers of the files: cd scripts && python3 -m checks.files --write"]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print("\n".join(complaints()))
