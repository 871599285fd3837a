"""Pegasus 5: the abstract workflow's YAML (`workflow.yml`), with its replica and transformation catalogues if they
exist.

`Pegasus.api` writes these files and has no reader, so this importer does not need it. The planner's additions
(staging, clean-up) are not part of the abstract workflow. A file with `stageOut: false` that another job reads is
temporary: it stays on the scratch site, and Pegasus' own clean-up removes it. With `stageOut: true` or
`registerReplica: true` it is a result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from ..graph import File, Task, Workflow
from . import marked
from .marked import Marked

_MIB = 2**20


def load(path: Path, *, replicas: Path | None = None, transformations: Path | None = None) -> Workflow:
    """The graph of a workflow.yml. Catalogues are in it, given, or `replicas.yml` and `transformations.yml` next to it."""
    document = marked.load(path)
    document.mapping()
    version = str(document.get("pegasus") or "")
    if not version.startswith("5"):
        raise document.wrong(
            f"the file is not a workflow of Pegasus 5 (pegasus: {version or 'missing'})",
            "pegasus",
            remedy="write older DAX (XML) again with Pegasus.api 5",
        )
    reader = _Reader(document, _Catalogue.of(document, transformations))
    sizes, places = _replicas(document, replicas)
    for number, _ in enumerate(document.sequence("jobs")):
        reader.job(number)
    for number, _ in enumerate(document.sequence("jobDependencies")):
        reader.dependency(number)
    for file in reader.files.values():
        # Only files that no job makes; others may be left from an earlier run.
        if file.path not in reader.made and file.size_bytes is None:
            file.size_bytes = sizes.get(file.path)
            if file.size_bytes is None and file.path in places:
                file.size_bytes = _size(places[file.path])
    return Workflow.of(
        str(document.get("name") or path.stem),
        str(path),
        reader.tasks.values(),
        reader.files.values(),
        incomplete=reader.incomplete,
        places=reader.places,
    )


def _beside(path: Path, given: Path | None, name: str) -> Path | None:
    if given is not None:
        return given
    found = path.absolute().parent / name
    return found if found.is_file() else None


def _replicas(document: Marked, given: Path | None) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes from a replica catalogue's metadata, and local paths of replicas."""
    sizes: dict[str, int] = {}
    places: dict[str, str] = {}
    where = _beside(document.path, given, "replicas.yml")
    sources: list[tuple[Marked, tuple[str, ...]]] = [(document, ("replicaCatalog", "replicas"))]
    if where is not None:
        sources.append((marked.load(where, "the replica catalogue"), ("replicas",)))
    for source, place in sources:
        for number, _ in enumerate(source.sequence(*place)):
            name = source.text(*place, number, "lfn")
            size = _whole(source.get(*place, number, "metadata", "size"))
            if size is not None:
                sizes[name] = size
            for replica, _ in enumerate(source.sequence(*place, number, "pfns")):
                parsed = urlparse(source.text(*place, number, "pfns", replica, "pfn"))
                if parsed.scheme in ("", "file"):
                    places.setdefault(name, unquote(parsed.path))
    return sizes, places


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size if os.path.isfile(path) else None
    except (OSError, ValueError):
        return None


@dataclass
class _Catalogue:
    """Properties of transformations that their jobs inherit."""

    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Marked, given: Path | None) -> _Catalogue:
        catalogue = cls()
        where = _beside(document.path, given, "transformations.yml")
        if isinstance(document.get("transformationCatalog"), dict):
            catalogue.read(document, "transformationCatalog")
        if where is not None:
            catalogue.read(marked.load(where, "the transformation catalogue"))
        return catalogue

    def read(self, source: Marked, *top: str) -> None:
        images = {
            source.text(*top, "containers", number, "name"): str(source.get(*top, "containers", number, "image") or "")
            for number, _ in enumerate(source.sequence(*top, "containers"))
        }
        for number, _ in enumerate(source.sequence(*top, "transformations")):
            name = _transformation(source, *top, "transformations", number)
            profiles: dict[str, Any] = {}
            for place in [
                (),
                *(("sites", site) for site, _ in enumerate(source.sequence(*top, "transformations", number, "sites"))),
            ]:
                _merge(profiles, source.get(*top, "transformations", number, *place, "profiles"))
                container = source.get(*top, "transformations", number, *place, "container")
                if isinstance(container, str):
                    self.images[name] = images.get(container) or container
            self.profiles[name] = profiles


def _transformation(source: Marked, *place: str | int) -> str:
    """`namespace::name:version`, as Pegasus writes it."""
    space, version = source.get(*place, "namespace"), source.get(*place, "version")
    return (f"{space}::" if space else "") + source.text(*place, "name") + (f":{version}" if version else "")


def _merge(into: dict[str, Any], profiles: Any) -> None:
    if isinstance(profiles, dict):
        for space, values in profiles.items():
            if isinstance(values, dict):
                into.setdefault(space, {}).update(values)


@dataclass
class _Reader:
    document: Marked
    catalogue: _Catalogue
    tasks: dict[str, Task] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)

    def job(self, number: int) -> None:
        document, place = self.document, ("jobs", number)
        document.mapping(*place)
        id_ = document.text(*place, "id")
        if id_ in self.tasks:
            raise document.wrong(f"two jobs have the id {id_!r}", *place, "id")
        type_ = document.get(*place, "type") or "job"
        task = Task(id_, str(type_))
        if type_ == "job":
            self.program(task, *place)
        elif type_ in ("pegasusWorkflow", "condorWorkflow"):
            self.incomplete.append(
                f"job {id_} is a workflow of its own ({document.get(*place, 'file')}): Pegasus plans it during the run"
            )
        else:
            raise document.wrong(f"{type_!r} is not a type of job", *place, "type")
        for use, _ in enumerate(document.sequence(*place, "uses")):
            self.use(task, *place, "uses", use)
        if type_ != "job":
            for path in (*task.inputs, *task.outputs):
                self.files[path].readers_unknown = True
        self.tasks[id_] = task
        self.places[id_] = document.at(*place)

    def program(self, task: Task, *place: str | int) -> None:
        document = self.document
        name = _transformation(document, *place)
        profiles: dict[str, Any] = {}
        for more in (document.get("profiles"), self.catalogue.profiles.get(name), document.get(*place, "profiles")):
            _merge(profiles, more)
        task.kind = document.text(*place, "name")
        task.command = [task.kind, *(str(word) for word in document.sequence(*place, "arguments"))]
        pegasus, condor, dagman = (profiles.get(space, {}) for space in ("pegasus", "condor", "dagman"))
        cores = _number(pegasus.get("cores")) or _number(condor.get("request_cpus"))
        memory = _number(pegasus.get("memory")) or _number(condor.get("request_memory"))
        task.cores = cores or 1.0
        # Both are in MB of 2²⁰ bytes, as HTCondor counts.
        task.memory_bytes = int(memory * _MIB) if memory else None
        task.retries = _whole(dagman.get("retry", dagman.get("RETRY", pegasus.get("retry")))) or 0
        runtime = _number(pegasus.get("runtime"))
        task.runtime_s = runtime
        task.image = self.catalogue.images.get(name)

    def use(self, task: Task, *place: str | int) -> None:
        document = self.document
        path = document.text(*place, "lfn")
        type_ = document.get(*place, "type")
        file = self.files.setdefault(path, File(path))
        size = _whole(document.get(*place, "metadata", "size"))
        if size is None:
            size = _whole(document.get(*place, "size"))
        file.size_bytes = file.size_bytes if size is None else size
        if type_ in ("output", "inout", "checkpoint"):
            staged = document.get(*place, "stageOut")
            file.final = staged is True or document.get(*place, "registerReplica") is True
            file.temporary = staged is False and not file.final
            task.outputs.append(path)
            self.made.add(path)
        if type_ in ("input", "inout", "checkpoint"):
            task.inputs.append(path)
        if type_ not in ("input", "output", "inout", "checkpoint"):
            raise document.wrong(
                f"{type_!r} is not a use of a file", *place, "type", remedy="input, output, inout or checkpoint"
            )

    def dependency(self, number: int) -> None:
        document = self.document
        parent = document.text("jobDependencies", number, "id")
        if parent not in self.tasks:
            raise document.wrong(
                f"jobDependencies names the job {parent!r}, which does not exist", "jobDependencies", number
            )
        for child in document.sequence("jobDependencies", number, "children"):
            if child not in self.tasks:
                raise document.wrong(
                    f"jobDependencies names the job {child!r}, which does not exist", "jobDependencies", number
                )
            task = self.tasks[child]
            if not set(self.tasks[parent].outputs) & set(task.inputs):
                task.after.append(parent)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if number >= 0 else None
