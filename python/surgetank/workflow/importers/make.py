"""GNU make: reads the output of `make -n -B --trace -p`: the recipes that would run, their order, and make's database
of rules.

A dry run of make still runs `$(shell …)` and lines that begin with `+`. Lines with `$(MAKE)` are disabled
(`MAKE=:`), so a sub-make is one task with no further facts. Only files that make itself calls intermediate, and
would remove, are temporary.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..graph import File, Task, Workflow
from ..problem import Problem
from .asked import ask
from .paths import inside, measure, read

_TRACE = re.compile(
    r"^(?P<file>[^\s:]+):(?P<line>\d+): (?:update )?target '(?P<target>[^']+)' (?:does not exist|due to: .*|is .*)$"
)
_ERROR = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+): \*\*\* (?P<what>.*?)(?:\s+Stop\.)?$", re.MULTILINE)
_MISSING = re.compile(r"No rule to make target '(?P<target>[^']+)'(?:, needed by '(?P<by>[^']+)')?")
_CIRCULAR = re.compile(r"^make(?:\[\d+\])?: Circular (?P<a>\S+) <- (?P<b>\S+) dependency dropped", re.MULTILINE)
_TIMEOUT_S = 300


@dataclass
class _Rule:
    """One target, as in the database."""

    target: str
    needs: list[str] = field(default_factory=list)
    # After `|`: it only has to exist.
    before: list[str] = field(default_factory=list)
    phony: bool = False
    intermediate: bool = False
    updated: bool = False
    with_it: list[str] = field(default_factory=list)


@dataclass
class _Recipe:
    target: str
    place: str
    lines: list[str] = field(default_factory=list)


def load(path: Path, *, targets: Sequence[str] = (), variables: Sequence[str] = ()) -> Workflow:
    """The graph of a makefile for `targets` (the first one); `variables` are `NAME=VALUE`."""
    text = read(path, "the makefile")
    program = shutil.which("make")
    if program is None:
        raise Problem("GNU make is not installed", where=path, remedy="install the package `make`")
    for word in (*targets, *variables):
        if word.startswith("-"):
            raise Problem(f"{word!r} is neither a target nor a variable", where=path)
    directory = path.absolute().parent
    command = [program, "-n", "-B", "-p", "--trace", "-f", path.name, "MAKE=:", *variables, *targets]
    environment = {**os.environ, "LC_ALL": "C"}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    ended = ask(command, directory, environment, _TIMEOUT_S, where=path, what="make did not report its rules")
    _refuse(path, text, ended.stderr, ended.returncode)
    output, _, database = ended.stdout.partition("\n# Make data base, printed on ")
    rules = {rule.target: rule for rule in _rules(database.partition("\n# Files\n")[2])}
    recipes = list(_recipes(output, rules))
    if not recipes:
        raise Problem("make has nothing to do", where=path, remedy="name a target that has a recipe")
    return _workflow(path, directory, rules, recipes, set(targets) or _default(database))


def _refuse(path: Path, text: str, output: str, code: int) -> None:
    if circular := _CIRCULAR.search(output):
        at = f"{path}:{_line(text, circular['a']) or 1}"
        raise Problem(f"{circular['a']} and {circular['b']} need each other", where=at, why=circular[0])
    if code == 0:
        return
    if error := _ERROR.search(output):
        where = path if error["file"] == path.name else path.parent / error["file"]
        raise Problem("make cannot read the Makefile", where=f"{where}:{error['line']}", why=error["what"])
    if missing := _MISSING.search(output):
        line = _line(text, missing["target"]) or _line(text, missing["by"] or missing["target"])
        raise Problem(
            f"no rule makes {missing['target']!r}, and the file does not exist", where=f"{path}:{line or 1}", why=missing[0],
            remedy="create it, or correct its name",
        )  # fmt: skip
    raise Problem(
        "make refuses the Makefile", where=path, why=output.strip()[-1000:], remedy="`make -n` has to work first"
    )


def _line(text: str, word: str) -> int:
    """The first line that names it; 0: no line does, a pattern made it."""
    found = re.search(rf"(?<![\w./-]){re.escape(word)}(?![\w./-])", text)
    return text[: found.start()].count("\n") + 1 if found else 0


def _default(database: str) -> set[str]:
    found = re.search(r"^\.DEFAULT_GOAL := (.+)$", database, re.MULTILINE)
    return set(found[1].split()) if found else set()


def _rules(database: str) -> Iterator[_Rule]:
    """The entries of the database for the files that make considered."""
    for entry in database.split("\n\n"):
        lines = entry.lstrip("\n").split("\n")
        if lines and lines[0] == "# Not a target:":
            lines = lines[1:]
        head = re.match(r"^([^#\t\n].*?)(::?)(?:\s(.*))?$", lines[0]) if lines else None
        if head is None:
            continue
        needs, _, before = (head[3] or "").partition("|")
        rule = _Rule(head[1], needs.split(), before.split())
        for line in lines[1:]:
            rule.phony |= line.startswith("#  Phony target")
            rule.intermediate |= line.startswith("#  File is an intermediate prerequisite")
            rule.updated |= line.startswith(("#  File has been updated", "#  Successfully updated"))
            if line.startswith("#  Also makes:"):
                rule.with_it = re.findall(r"'([^']+)'", line) or line.partition(":")[2].split()
        yield rule


def _recipes(output: str, rules: dict[str, _Rule]) -> Iterator[_Recipe]:
    """The commands that would run, target by target; make itself adds `rm` of intermediates at the end."""
    current: _Recipe | None = None
    for line in output.split("\n"):
        if trace := _TRACE.match(line):
            if current:
                yield current
            current = _Recipe(trace["target"], f"{trace['file']}:{trace['line']}")
        elif (
            current is not None
            and line.strip()
            and not re.match(
                r"^make(\[\d+\])?: |^# GNU Make|^# Built for|^# Copyright|^# License|^# This is free|^# There is NO",
                line,
            )
        ):
            words = line.split()
            if words[0] == "rm" and all(
                word in rules and rules[word].intermediate for word in words[1:] if word != "-f"
            ):
                continue
            current.lines.append(line)
    if current:
        yield current


def _workflow(
    path: Path, directory: Path, rules: dict[str, _Rule], recipes: list[_Recipe], targets: set[str]
) -> Workflow:
    run = {recipe.target: recipe for recipe in recipes}
    # A recipe that makes several files runs once, under the name of one of them.
    maker = {other: target for target in run for other in (target, *(rules[target].with_it if target in rules else []))}
    tasks: list[Task] = []
    files: dict[str, File] = {}
    incomplete: list[str] = []
    places: dict[str, str] = {}

    def reach(name: str, seen: frozenset[str]) -> Iterator[tuple[str, bool]]:
        """The meaning of a prerequisite: (file, True), or (task, False) for a target that is not a file."""
        rule = rules.get(name)
        if rule is None or not (rule.phony or (name not in maker and (rule.needs or rule.before))):
            yield name, True
        elif name in maker:
            yield maker[name], False
        elif name not in seen:
            for other in (*rule.needs, *rule.before):
                yield from reach(other, seen | {name})

    for target, recipe in run.items():
        rule = rules.get(target, _Rule(target))
        made = [] if rule.phony else list(dict.fromkeys([target, *rule.with_it]))
        task = Task(target, _kind(recipe.lines) or target)
        for name in rule.needs:
            for found, is_file in reach(name, frozenset()):
                (task.inputs if is_file else task.after).append(inside(found, directory) if is_file else found)
        task.after += [maker[name] for name in rule.before if name in maker]
        task.inputs, task.after = (
            list(dict.fromkeys(task.inputs)),
            [one for one in dict.fromkeys(task.after) if one != target],
        )
        task.outputs = [inside(name, directory) for name in made]
        task.command = "\n".join((["set -e"] if len(recipe.lines) > 1 else []) + recipe.lines) or None
        for name in made:
            intermediate = name in rules and rules[name].intermediate
            files[inside(name, directory)] = File(inside(name, directory), temporary=intermediate)
        if any(re.match(r"^:( |$)", line) for line in recipe.lines):
            incomplete.append(f"{target} calls make again: the import does not follow that call")
            for name in (*task.inputs, *task.outputs):
                files.setdefault(name, File(name)).readers_unknown = True
        tasks.append(task)
        places[target] = str(directory / recipe.place) if directory != Path.cwd() else recipe.place
    implied = {output: task.id for task in tasks for output in task.outputs}
    for task in tasks:
        task.after = [one for one in task.after if one not in {implied.get(name) for name in task.inputs}]
        for name in task.inputs:
            files.setdefault(name, File(name))
    for goal in targets:
        for name, is_file in reach(goal, frozenset()):
            if is_file and inside(name, directory) in files:
                files[inside(name, directory)].final = True
                files[inside(name, directory)].temporary = False
    measure((file for name, file in files.items() if name not in implied), directory)
    return Workflow.of(directory.name, str(path), tasks, files.values(), incomplete=incomplete, places=places)


def _kind(lines: list[str]) -> str | None:
    words = lines[0].split() if lines else []
    return os.path.basename(words[0]) if words else None
