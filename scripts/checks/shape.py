"""The shape of the Rust sources: how large types and functions are, and which folders import each other in a circle.

The compiler refuses crates that import each other in a circle. It permits circles inside a crate, so this check counts those. The
check relies on rustfmt's form: an item that begins at an indentation ends with a brace at the same one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

METHODS_MAX = 80
FILES_MAX = 3
FUNCTION_LINES_MAX = 100

FUNCTION = re.compile(r"^( *)(?:pub(?:\([a-z: ]+\))? )?(?:const )?(?:async )?(?:unsafe )?(?:extern \"C\" )?fn (\w+)")
IMPL = re.compile(r"^( *)(?:unsafe )?impl(?:<.*?>)? (?!.* for )(?:\w+::)*(\w+)")
DEFINITION = re.compile(r"^ *(?:pub(?:\([a-z: ]+\))? )?(?:struct|enum|union|type) (\w+)")
TESTS = re.compile(r"^ *#\[cfg\((?:test|all\(test)")
CHILD = re.compile(r"(?<![:\w])(\w+)::")
PATH = re.compile(r"\b(crate|super|self)((?:::\w+)+)")
GROUPED = re.compile(r"\buse ((?:crate|super|self)\b[^;{]*\{[^;]*);")


@dataclass
class Type:
    methods: int = 0
    files: set[Path] = field(default_factory=set)


@dataclass
class Shape:
    # By crate, folder and name.
    types: dict[str, Type]
    # By file and name: lines.
    functions: dict[str, int]
    # By crate: groups of files in several folders that import each other in a circle.
    circles: dict[str, list[list[str]]]


def shape(checkout: Path) -> Shape:
    types: dict[str, Type] = defaultdict(Type)
    functions: dict[str, int] = {}
    circles = {}
    for sources in sorted(checkout.glob("crates/*/src")):
        crate = sources.parent.name
        files = [file for file in sorted(sources.rglob("*.rs")) if not is_of_tests(file)]
        defined = definitions(files)
        for file in files:
            lines = without_tests(file.read_text().splitlines())
            for name, length in function_lengths(lines):
                key = f"{file.relative_to(checkout)} {name}"
                functions[key] = max(length, functions.get(key, 0))
            for name, methods in inherent_methods(lines):
                top = module_that_defines(name, file, defined).relative_to(sources).with_suffix("").parts[0]
                types[f"{crate}::{top}::{name}"].methods += methods
                types[f"{crate}::{top}::{name}"].files.add(file)
        circles[crate] = folder_circles(sources, files)
    return Shape(types, functions, circles)


def definitions(files: list[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        for line in without_tests(file.read_text().splitlines()):
            if match := DEFINITION.match(line):
                found[match[1]].append(file)
    return found


def module_that_defines(name: str, file: Path, defined: dict[str, list[Path]]) -> Path:
    """Of several types of that name, the one whose path shares most with the file that implements its methods."""
    def shared(other: Path) -> int:
        pairs = zip(other.with_suffix("").parts, file.with_suffix("").parts)
        return next((n for n, (one, another) in enumerate(pairs) if one != another), len(file.parts))

    return max(defined.get(name, []), key=shared, default=file)


def complaints(found: Shape, allowed: dict[str, dict[str, dict[str, object]]]) -> list[str]:
    """Items that exceed their limit or their recorded exception, and exceptions that are larger than needed."""
    sizes: dict[str, dict[str, tuple[int, ...]]] = {
        "types": {name: (one.methods, len(one.files)) for name, one in found.types.items() if one.methods > METHODS_MAX or len(one.files) > FILES_MAX},
        "functions": {name: (lines,) for name, lines in found.functions.items() if lines > FUNCTION_LINES_MAX},
        "circles": {crate: (sum(map(len, groups)),) for crate, groups in found.circles.items() if groups},
    }
    units = {"types": ("methods", "files"), "functions": ("lines",), "circles": ("files",)}
    limits = {"types": (METHODS_MAX, FILES_MAX), "functions": (FUNCTION_LINES_MAX,), "circles": (0,)}
    wrong = []
    for kind, large in sizes.items():
        listed = allowed.get(kind, {})
        for name in sorted({*large, *listed}):
            if name not in large:
                wrong.append(f"{kind}: {name} no longer needs an exception: remove it from scripts/shape.toml")
            elif name not in listed:
                wrong.append(f"{kind}: {name} has {counted(large[name], units[kind])}, allowed are {counted(limits[kind], units[kind])}")
            elif (recorded := tuple(listed[name].get(unit) for unit in units[kind])) != large[name]:
                wrong.append(f"{kind}: {name} has {counted(large[name], units[kind])}; scripts/shape.toml says {recorded}, which may only go down")
    return wrong


def counted(numbers: tuple[int, ...], units: tuple[str, ...]) -> str:
    return ", ".join(f"{number} {unit}" for number, unit in zip(numbers, units))


def is_of_tests(file: Path) -> bool:
    return file.stem == "tests" or "tests" in file.parts


def without_tests(lines: list[str]) -> list[str]:
    """Without modules of tests inside the file."""
    kept, skip = [], None
    for before, line in zip(["", *lines], lines):
        if skip is None and TESTS.match(before) and line.strip().startswith("mod ") and line.endswith("{"):
            skip = indentation(line)
        if skip is None:
            kept.append(line)
        elif line == " " * skip + "}":
            skip = None
    return kept


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def end_of(lines: list[str], start: int) -> int:
    """The line of the brace that closes what begins there."""
    if lines[start].endswith("}"):
        return start
    closing = " " * indentation(lines[start]) + "}"
    return next((n for n in range(start, len(lines)) if lines[n].startswith(closing)), start)


def function_lengths(lines: list[str]) -> Iterator[tuple[str, int]]:
    for n, line in enumerate(lines):
        if found := FUNCTION.match(line):
            signature_end = next((m for m in range(n, len(lines)) if lines[m].endswith(("{", ";", "}"))), n)
            is_declared_only = lines[signature_end].endswith(";")
            yield found[2], (signature_end if is_declared_only else end_of(lines, n)) - n + 1


def inherent_methods(lines: list[str]) -> Iterator[tuple[str, int]]:
    for n, line in enumerate(lines):
        if (found := IMPL.match(line)) and " for " not in line:
            own = len(found[1]) + 4
            body = lines[n : end_of(lines, n)]
            yield found[2], sum(1 for inner in body if (method := FUNCTION.match(inner)) and len(method[1]) == own)


def folder_circles(sources: Path, files: list[Path]) -> list[list[str]]:
    modules = {module_of(sources, file): file for file in files}
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, file in modules.items():
        for used in imports(module, file, modules):
            arrows["::".join(module)].add("::".join(used))
    groups = components({*arrows, *(used for all_used in arrows.values() for used in all_used)}, arrows)
    return sorted(sorted(group) for group in groups if len({folder(tuple(name.split("::")), modules) for name in group}) > 1)


def module_of(sources: Path, file: Path) -> tuple[str, ...]:
    parts = file.relative_to(sources).with_suffix("").parts
    return () if parts in {("lib",), ("main",)} else parts


def folder(module: tuple[str, ...], modules: dict[tuple[str, ...], Path]) -> tuple[str, ...]:
    """A front page, `foo.rs`, belongs to the folder `foo`."""
    has_folder = any(other[: len(module)] == module and len(other) > len(module) for other in modules)
    return module if has_folder else module[:-1]


def imports(module: tuple[str, ...], file: Path, modules: dict[tuple[str, ...], Path]) -> set[tuple[str, ...]]:
    found = set()
    lines = [line for line in without_tests(file.read_text().splitlines()) if not line.lstrip().startswith("//")]
    grouped = [path for group in GROUPED.findall("\n".join(lines)) for path in ungrouped("".join(group.split()))]
    for line in lines + grouped:
        for child in CHILD.findall(line):
            if (*module, child) in modules:
                found.add((*module, child))
        for root, rest in PATH.findall(line):
            names = rest.strip(":").split("::")
            at: tuple[str, ...] = () if root == "crate" else module if root == "self" else module[:-1]
            while names and names[0] == "super":
                at, names = at[:-1], names[1:]
            path = (*at, *names)
            used = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in modules), None)
            if used and used != module:
                found.add(used)
    return found


def ungrouped(path: str) -> list[str]:
    """`a::{b, c::{d, e}}` as `a::b`, `a::c::d` and `a::c::e`."""
    before, brace, inner = path.partition("{")
    if not brace:
        return [path]
    parts, depth = [""], 0
    for letter in inner.removesuffix("}"):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [whole for part in parts if part for whole in ungrouped(before + part)]


def components(names: set[str], arrows: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected ones of more than one member (Tarjan 1972), without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []
    for root in sorted(names):
        work = [(root, iter(sorted(arrows.get(root, ()))))] if root not in index else []
        while work:
            name, ahead = work[-1]
            if name not in index:
                index[name] = low[name] = len(index)
                stack.append(name)
            following = next(ahead, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    at = stack.index(name)
                    group, stack[at:] = stack[at:], []
                    if len(group) > 1:
                        groups.append(group)
            elif following not in index:
                work.append((following, iter(sorted(arrows.get(following, ())))))
            elif following in stack:
                low[name] = min(low[name], index[following])
    return groups
