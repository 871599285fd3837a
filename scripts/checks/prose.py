"""The prose of pages and comments: words that the project does not use, and sentences that are too long.

The check reads Markdown pages outside code, the comments and doc comments of Rust, C and Python, and messages in the product's Rust
code. The file scripts/prose.toml has the allowed number of findings for each file that still has some. The numbers only go down: more
findings are an error, and so are fewer until the number is lowered.

usage: cd scripts && python3 -m checks.prose [FILE…]      every finding of these files, listed in scripts/prose.toml or not
       cd scripts && python3 -m checks.prose --write      lower the numbers of scripts/prose.toml to what is found
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SENTENCE_WORDS_MAX = 25
# An entry of the changelog, which may have several sentences.
ENTRY_WORDS_MAX = 30
CHECKOUT = Path(__file__).resolve().parent.parent.parent
RATCHET = CHECKOUT / "scripts/prose.toml"
# Written by the program itself, or by another check.
GENERATED = {"docs/command-line.md", "docs/internals/files.md"}
KINDS = ("words", "sentences")

ACTOR = "the actor: the agent, a process, another client, the user"
# In small letters. A match counts only if its group `bad` took part: an alternative without that group is allowed.
BANNED = [
    (re.compile(pattern.replace(" ", r"\s+")), instead)
    for pattern, instead in [
        (r"\b(?P<bad>mend(?:s|ed|ing|able)?)\b", "fix, repair"),
        (r"\b(?P<bad>told)\b", "reported, notified, or the verb of what happened"),
        (r"\b(?P<bad>(?:tell|tells|telling) of)\b", "reports, names"),
        (r"\b(?P<bad>anew)\b", "again"),
        (r"\b(?P<bad>for ever|forever)\b", "indefinitely, without limit"),
        (r"\b(?P<bad>in turn)\b(?! with)", "in order, one after another"),
        (r"\b(?P<bad>once more)\b", "again"),
        (r"\bthere (?:is|are|was|were) no\b|\b(?P<bad>(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|one\b|\d)\w+)", "is not a …"),
        (r"\b(?P<bad>as ever)\b", "as before, unchanged"),
        (r"\b(?P<bad>(?:is|are|was|were|has been) over)\b(?! (?:\d+|a|an|the|it|its|them|their)\b)", "ends, has ended"),
        (r"\band goe?s? by\b|\b(?P<bad>(?:go|goes|going|gone|went) by)\b(?! (?:itself|themselves|now|then)\b)", "uses, follows"),
        (r"\b(?P<bad>(?:fall|falls|falling|fell|fallen) short)\b", "misses its target"),
        (r"\b(?P<bad>lies|lie|lay(?= (?:in|on|at|below|under|there|beside)\b))\b", "is stored, is"),
        (r"\b(?P<bad>whoever|nobody|somebody|anybody|everybody|someone|anyone|everyone)\b", ACTOR),
        (r"(?:[.;] |\A|\n\n|\b(?:for|by|of|to|from) )(?P<bad>who)\b(?![^.;:]*\?)", ACTOR),
    ]
]

FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
TARGET = re.compile(r"(?<=\])\([^)\s]*\)|<https?:[^>]*>|https?://\S+|<!--.*?-->", re.DOTALL)
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +", re.MULTILINE)
END = re.compile(r"[.!?][\"')*_\]]*(?=\s+[\"'(*_\[]*[A-Z0-9.])|[.!?]\W*\Z")
WORD = re.compile(r"\S*\w\S*")
# Stands for code: no pattern crosses it.
NOT_PROSE = "\0"

RUST = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|\bb?r(?P<hash>\#*)".*?"(?P=hash)|"(?:\\.|[^"\\])*"|'(?:\\u\{\w+\}|\\x..|\\.|[^'\\\n])'""",
    re.DOTALL | re.VERBOSE,
)
C = re.compile(r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
MESSAGES = re.compile(r"^crates/\w+/src/(?!.*\btests?\b)(?!.*/trouble\.rs$).*\.rs$")
TESTS = re.compile(r"^#\[cfg\(test\)\]\n(?:#.*\n)*mod ", re.MULTILINE)
MARKER = re.compile(r"^([ \0]*)(//[/!]?|/\*+!?|\*(?!/)|#+!?)(?=\s|$)|\*+/", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    kind: str
    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.instead}"


def look(path: str, text: str) -> list[Finding]:
    prose = prose_of(path, text)
    if prose is None:
        return []
    found = list(banned(path, prose))
    if path.endswith(".md"):
        found += long_sentences(path, prose)
    return sorted(found, key=lambda one: one.line)


def prose_of(path: str, text: str) -> str | None:
    """The prose of a file on its own lines: code is left out, its line feeds are not."""
    suffix = Path(path).suffix
    if path in GENERATED:
        return None
    if suffix == ".md":
        return without_spans(FENCE.sub(erase, text))
    if suffix in {".rs", ".c", ".h"}:
        comments = [match.span("comment") for match in (RUST if suffix == ".rs" else C).finditer(text) if match["comment"]]
        if MESSAGES.search(path):
            comments = sorted([*comments, *messages(text)])
    elif suffix == ".py":
        comments = list(python_comments(text))
    else:
        return None
    kept, at = [], 0
    for start, end in comments:
        kept += [blacken(text[at:start]), text[start:end]]
        at = end
    prose = MARKER.sub(lambda match: " " * len(match[0]), "".join([*kept, blacken(text[at:])]))
    return without_spans(FENCE.sub(erase, prose))


def messages(text: str) -> Iterator[tuple[int, int]]:
    """Strings of several words, before the tests in the file."""
    end = tests.start() if (tests := TESTS.search(text)) else len(text)
    for match in RUST.finditer(text, 0, end):
        if not match["comment"] and match[0].count(" ") >= 2:
            yield match.span()


def without_spans(prose: str) -> str:
    # A span of code becomes one word with a capital letter, because a sentence may begin with it.
    spanless = SPAN.sub(lambda match: match[0] if "\n\n" in match[0] else re.sub(r"\S|[ \t]", "c", match[0]).replace("c", "C", 1), prose)
    return TARGET.sub(lambda match: re.sub(r"\S", " ", match[0]), spanless)


def blacken(code: str) -> str:
    return code if not code or code.isspace() else NOT_PROSE + "\n" * code.count("\n")


def erase(match: re.Match[str]) -> str:
    return blacken(match[0])


def python_comments(text: str) -> Iterator[tuple[int, int]]:
    """Comments, and strings that are statements."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    opens_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and opens_line):
            yield starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
        if token.type != tokenize.COMMENT:
            opens_line = token.type in {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}


def banned(path: str, prose: str) -> Iterator[Finding]:
    small = prose.lower()
    for pattern, instead in BANNED:
        for match in pattern.finditer(small):
            if match["bad"]:
                word = " ".join(match["bad"].split())
                yield Finding(path, line_of(prose, match.start("bad")), "words", f"'{word}'", f"write {instead}")


def long_sentences(path: str, prose: str) -> Iterator[Finding]:
    is_changelog = path == "CHANGELOG.md"
    for at, block, is_item in blocks(prose):
        if is_changelog and is_item:
            length = len(WORD.findall(block))
            if length > ENTRY_WORDS_MAX:
                yield Finding(path, line_of(prose, at), "sentences", f"an entry of {length} words", f"at most {ENTRY_WORDS_MAX}")
            continue
        for start, sentence in sentences(block):
            words = WORD.findall(sentence)
            if len(words) > SENTENCE_WORDS_MAX:
                what = f"a sentence of {len(words)} words ({' '.join(words[:5])} …)"
                yield Finding(path, line_of(prose, at + start), "sentences", what, f"at most {SENTENCE_WORDS_MAX}; divide it, or make a list")


def blocks(prose: str) -> Iterator[tuple[int, str, bool]]:
    """Paragraphs, headings, items of lists, and cells of tables, in which a semicolon ends a sentence. With their offsets."""
    for paragraph in re.finditer(r"(?:(?!\n[ \t]*\n).)+", prose, re.DOTALL):
        at, text = paragraph.start(), paragraph[0]
        if text.lstrip().startswith("|"):
            for cell in re.finditer(r"(?:\\\||[^|\n;])+", text):
                yield at + cell.start(), cell[0], False
            continue
        cuts = sorted({0, len(text), *(item.start() for item in ITEM.finditer(text)), *(head.start() for head in re.finditer(r"^#", text, re.MULTILINE))})
        for start, end in zip(cuts, cuts[1:]):
            part = text[start:end]
            is_item = ITEM.match(part) is not None
            yield at + start, ITEM.sub(lambda match: " " * len(match[0]), part) if is_item else part, is_item


def sentences(block: str) -> Iterator[tuple[int, str]]:
    at = 0
    for end in [*(match.end() for match in END.finditer(block)), len(block)]:
        sentence = block[at:end]
        yield at + len(sentence) - len(sentence.lstrip()), sentence
        at = end


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def look_at_all(paths: Iterable[str], checkout: Path = CHECKOUT) -> list[Finding]:
    return [one for path in sorted(map(str, paths)) for one in look(path, read(checkout / path))]


def read(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def complaints(found: list[Finding], allowed: dict[str, dict[str, int]]) -> list[str]:
    """Findings of files that have more than they are allowed, and numbers that can be lowered."""
    wrong = []
    for kind in KINDS:
        counted = count(found)[kind]
        listed = allowed.get(kind, {})
        for path in sorted({*counted, *listed}):
            number, most = counted.get(path, 0), listed.get(path, 0)
            if number > most:
                wrong.append(f"{path}: {number} {kind}, scripts/prose.toml allows {most}:")
                wrong += [f"  {one}" for one in found if (one.path, one.kind) == (path, kind)]
            elif number < most:
                wrong.append(f"{path}: {number} {kind}, scripts/prose.toml says {most}: lower it (cd scripts && python3 -m checks.prose --write)")
    return wrong


def count(found: list[Finding]) -> dict[str, dict[str, int]]:
    counted: dict[str, dict[str, int]] = {kind: defaultdict(int) for kind in KINDS}
    for one in found:
        counted[one.kind][one.path] += 1
    return counted


def ratchet(found: list[Finding]) -> str:
    lines = [
        "# Exceptions from scripts/checks/prose.py: banned words, and sentences that are too long, by file.",
        "# Numbers only go down. Written by: cd scripts && python3 -m checks.prose --write",
    ]
    for kind, files in count(found).items():
        lines += ["", f"[{kind}]", *(f'"{path}" = {number}' for path, number in sorted(files.items()))]
    return "\n".join(lines) + "\n"


def write(found: list[Finding], to: Path = RATCHET) -> str | None:
    """Returns the reason for a refusal. No total may grow; the number of one file may, because files are renamed."""
    before = tomllib.loads(to.read_text()) if to.exists() else None
    for kind, files in count(found).items():
        total = sum(files.values())
        if before is not None and total > (most := sum(before.get(kind, {}).values())):
            return f"{total} {kind} were found, {to.name} allows {most}: remove the new ones, or remove {to.name} to count everything again"
    to.write_text(ratchet(found))
    return None


def main(arguments: list[str]) -> int:
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=CHECKOUT, check=True, capture_output=True)
    paths = [name for name in listed.stdout.decode().split("\0") if name and (CHECKOUT / name).is_file()]
    if arguments == ["--write"]:
        failure = write(look_at_all(paths))
        if failure:
            print(failure, file=sys.stderr)
        return 1 if failure else 0
    asked = {Path(one).resolve() for one in arguments}
    chosen = [name for name in paths if not asked or CHECKOUT / name in asked]
    found = look_at_all(chosen)
    print("\n".join(map(str, found)) or f"prose: {len(chosen)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
