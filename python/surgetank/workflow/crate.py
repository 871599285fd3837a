"""`surgetank workflow crate`: a Workflow Run RO-Crate of a run (https://w3id.org/ro/wfrun/workflow/0.5), with each of
its tasks (https://w3id.org/ro/wfrun/provenance/0.5). It records which command made which file from which, when, and
where the file was stored.

The crate refers to content by default, as results may be large; `--files` copies it. A file that has changed since
the run gets no checksum.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import mimetypes
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .. import __version__ as VERSION
from .execute import graphfile, journal
from .execute.launch import drained, find_record
from .execute.settings import NOT_DURABLE
from .execute.stamp import Stamp, stamp
from .graph import Workflow
from .problem import Problem

PROFILES = (
    ("https://w3id.org/ro/wfrun/process/0.5", "Process Run Crate"),
    ("https://w3id.org/ro/wfrun/workflow/0.5", "Workflow Run Crate"),
    ("https://w3id.org/ro/wfrun/provenance/0.5", "Provenance Run Crate"),
    ("https://w3id.org/workflowhub/workflow-ro-crate/1.0", "Workflow RO-Crate"),
)
HASH_BYTES = 1 << 20


def add_crate(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "crate",
        help="Write a run as a Workflow Run RO-Crate",
        description="Tasks, files, checksums, times, and where each file lived, of one run.",
    )
    parser.add_argument("run", metavar="RUN", help="a run's name (0001-…), `last`, or its directory")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR|FILE.zip", help="where it is written")
    parser.add_argument("--dir", type=Path, default=Path(), help="the workflow's directory [default: the current one]")
    parser.add_argument("--files", choices=["none", "results", "all"], default="none", help="what is copied into it")
    parser.add_argument("--license", default="All rights reserved", help="of the crate, as text or URL")
    parser.add_argument("--state", help="as of `surgetank run`")
    parser.set_defaults(do=_crate)
    return parser


@dataclass
class Run:
    """The contents of a run's directory."""

    directory: Path
    # The workflow's directory.
    root: Path
    workflow: Workflow
    report: dict[str, Any]
    records: dict[str, journal.Record]
    dropped: dict[str, int] = field(default_factory=dict)


def read(name: str, root: Path) -> Run:
    home = root / journal.HOME
    directory = Path(name) if "/" in name else home / name
    if name == "last":
        past = journal.runs(home)
        directory = home / (past[-1] if past else "none")
    try:
        workflow = graphfile.read(directory / "graph.json")
        report = json.loads((directory / "report.json").read_text())
    except FileNotFoundError as error:
        known = ", ".join(journal.runs(home)[-5:]) or "none"
        raise Problem(
            f"the run {name!r} does not exist, or has not ended",
            where=root,
            why=error,
            remedy=f"runs here: {known}",
        ) from None
    past_ = journal.Past()
    dropped = {}
    for event in journal.events(directory):
        past_.take(event)
        if event["event"] == "drop":
            dropped[event["path"]] = event["at_ns"]
    records = {task: several[-1] for (task, _), several in past_.records.items() if task in workflow.tasks}
    return Run(directory, Path(report["directory"]), workflow, report, records, dropped)


def write(run: Run, record: Mapping[str, Any] | None, out: Path, copy: str, licence: str) -> None:
    """`record`: from `surgetank report --json`, if there is one."""
    try:
        from rocrate.rocrate import ROCrate  # type: ignore[import-untyped]
    except ImportError:
        raise Problem(
            "the library `rocrate` is not installed", remedy="pip install 'surgetank[crate]', or rocrate", code=1
        ) from None
    with tempfile.TemporaryDirectory() as draft:
        crate = ROCrate(gen_preview=False, version="1.1")
        _Writer(crate, run, record, copy, Path(draft)).all(licence)
        if out.suffix == ".zip":
            crate.write_zip(out)
        else:
            crate.write(out)


class _Writer:
    def __init__(self, crate: Any, run: Run, record: Mapping[str, Any] | None, copy: str, draft: Path) -> None:
        from rocrate.model.contextentity import ContextEntity  # type: ignore[import-untyped]

        self.crate, self.run, self.copy, self.draft = crate, run, copy, draft
        self.context = ContextEntity
        self.lived = lives(run, record)
        self.well = run.report["exit"] == 0
        code = run.report["exit"]
        # (3: an earlier run's results were not durable, whatever happened to this one's.)
        known = {0: None, NOT_DURABLE: NOT_DURABLE}
        self.steps = drained(run.report["steps"], record, known[code]) if code in known else run.report["steps"]
        # (The steps were recorded before the last drain.)
        self.well = self.well and all(step["ok"] for step in self.steps)
        self.files: dict[str, Any] = {}
        self.stamps: dict[str, Stamp] = {}
        for done in run.records.values():
            self.stamps.update(done.inputs)
        for done in run.records.values():
            self.stamps.update(done.outputs)

    def add(self, id_: str, kind: str | list[str], **properties: Any) -> Any:
        found = self.crate.get(id_)
        return found or self.crate.add(self.context(self.crate, id_, properties={"@type": kind, **properties}))

    def all(self, licence: str) -> None:
        run, root = self.run, self.crate.root_dataset
        done = sorted(run.records.values(), key=lambda one: (one.began_ns, one.task))
        steps = [step for step in self.steps if step.get("ended_ns")]
        begun = min([one.began_ns for one in done] + [step["began_ns"] for step in steps])
        ended = max([one.ended_ns for one in done] + [step["ended_ns"] for step in steps])
        self.crate.name = f"Run {run.report['run']} of {run.workflow.name}"
        self.crate.description = f"{len(done)} tasks of {run.workflow.name}, run by Surgetank on {socket.gethostname()}; described in {run.workflow.source}"
        self.crate.datePublished = datetime.fromtimestamp(ended / 1e9, UTC)
        self.crate.license = licence
        root["conformsTo"] = [
            self.add(id_, "CreativeWork", name=name, version="0.5" if "wfrun" in id_ else "1.0")
            for id_, name in PROFILES
        ]
        engine = self.add("#surgetank", "SoftwareApplication", name="Surgetank", softwareVersion=VERSION)
        who = self.user()
        main = self.workflow()
        outputs = [path for one in done for path in one.outputs]
        inputs = [path for path in self.stamps if path not in run.workflow.producer]
        action = self.action(
            "#run",
            f"Run of {run.workflow.name}",
            main,
            begun,
            ended,
            inputs,
            outputs,
            self.well,
            description=f"all tasks of {run.workflow.source}",
        )
        mentioned = [action]
        steps_, controls = [], []
        for place, one in enumerate(done):
            did = self.task(one)
            mentioned.append(did)
            named = quote(one.task, safe="")
            program = self.program(run.workflow.tasks[one.task].kind)
            steps_.append(
                self.add(f"#howto-{named}", "HowToStep", name=one.task, position=str(place), workExample=program)
            )
            controls.append(
                self.add(
                    f"#control-{named}",
                    "ControlAction",
                    name=f"Surgetank ran {one.task}",
                    instrument=steps_[-1],
                    object=did,
                )
            )
        main["step"] = steps_
        main["hasPart"] = list({task.kind: self.program(task.kind) for task in run.workflow.tasks.values()}.values())
        mentioned.append(
            self.add(
                "#organize",
                "OrganizeAction",
                name=f"Surgetank ran {run.workflow.name}",
                instrument=engine,
                agent=who,
                startTime=_time(begun),
                endTime=_time(ended),
                object=controls,
                result=action,
            )
        )
        for number, step in enumerate(steps):
            tool = engine
            mentioned.append(
                self.action(
                    f"#step-{number}",
                    f"auxiliary task {step['step']}",
                    tool,
                    step["began_ns"],
                    step["ended_ns"],
                    [],
                    [],
                    step["ok"],
                    description="what surrounds the tasks: room, inputs and results",
                )
            )
        for id_, why in run.report["tasks"]["failed"].items():
            kind = self.program(run.workflow.tasks[id_].kind)
            failed = self.add(
                f"#failed-{quote(id_, safe='')}", "CreateAction", name=f"{id_} (failed)", instrument=kind, error=why,
                actionStatus="http://schema.org/FailedActionStatus",
            )  # fmt: skip
            mentioned.append(failed)
        root["mentions"] = mentioned

    def user(self) -> Any:
        return self.add("#user", "Person", name=getpass.getuser())

    def workflow(self) -> Any:
        from rocrate.model.computationalworkflow import ComputationalWorkflow  # type: ignore[import-untyped]

        source = Path(self.run.workflow.source)
        kept = source if source.is_file() else self.run.directory / "graph.json"
        target = "workflow/" + kept.name
        main = self.crate.add(
            ComputationalWorkflow(
                self.crate,
                str(kept),
                target,
                properties={
                    "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"],
                    "name": self.run.workflow.name,
                    "encodingFormat": media_type(kept),
                },
            )
        )
        language = "WfFormat" if kept.suffix == ".json" else kept.suffix.lstrip(".") or kept.name
        more = {"url": "https://github.com/wfcommons/WfFormat"} if language == "WfFormat" else {}
        main["programmingLanguage"] = self.add("#language", "ComputerLanguage", name=language, **more)
        self.crate.mainEntity = main
        return main

    def program(self, kind: str) -> Any:
        return self.add(f"#program-{quote(kind, safe='')}", "SoftwareApplication", name=kind)

    def task(self, done: journal.Record) -> Any:
        task = self.run.workflow.tasks[done.task]
        command = task.command if isinstance(task.command, str) else shlex.join(task.command or [])
        return self.action(
            f"#task-{quote(done.task, safe='')}", done.task, self.program(task.kind), done.began_ns, done.ended_ns,
            done.inputs, done.outputs, True, description=command,
        )  # fmt: skip

    def action(
        self, id_: str, name: str, tool: Any, began: int, ended: int, inputs: Iterable[str], outputs: Iterable[str],
        well: bool, **more: Any,
    ) -> Any:  # fmt: skip
        status = "CompletedActionStatus" if well else "FailedActionStatus"
        more.setdefault("agent", self.user())
        return self.add(
            id_, "CreateAction", name=name, instrument=tool, startTime=_time(began), endTime=_time(ended),
            object=[self.file(path) for path in inputs], result=[self.file(path) for path in outputs],
            actionStatus=f"http://schema.org/{status}", **more,
        )  # fmt: skip

    def file(self, path: str) -> Any:
        if path in self.files:
            return self.files[path]
        here = self.run.root / path
        size, changed = self.stamps[path]
        properties: dict[str, Any] = {"name": path, "contentSize": str(size), "dateModified": _time(changed)}
        properties["encodingFormat"] = media_type(here)
        notes = dict(self.lived.get(path, {}))
        whole = stamp(str(here)) == (size, changed) and here.is_file()
        if whole:
            properties["sha256"] = sha256(here)
        else:
            notes["content"] = (
                "dropped after its last reader" if path in self.run.dropped else "missing, or changed since"
            )
        if path in self.run.dropped:
            notes["dropped"] = _time(self.run.dropped[path])
        notes_are = [
            self.add(f"#{key}-{quote(value, safe='')}", "PropertyValue", name=key, value=value)
            for key, value in notes.items()
        ]
        if notes_are:
            properties["additionalProperty"] = notes_are
        result = path in self.run.workflow.producer and not self.run.workflow.readers[path]
        if whole and (self.copy == "all" or (self.copy == "results" and result)):
            entity = self.crate.add_file(str(here), "files/" + path.lstrip("/"), properties=properties)
        else:
            # A name, without a promise that it can be fetched: it is on the machine or store of the run.
            entity = self.add(here.as_uri(), "File", **properties)
            self.crate.root_dataset.append_to("hasPart", entity)
        self.files[path] = entity
        return entity


def lives(run: Run, record: Mapping[str, Any] | None) -> dict[str, dict[str, str]]:
    """Where files were stored and when they became durable, from the agent's record (its 100 largest files)."""
    if record is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    served = Path(record["directory"]) if isinstance(record["directory"], str) else run.root
    for file in record.get("files", []):
        if not isinstance(file.get("path"), str):
            continue
        whole = served / file["path"]
        if not whole.is_relative_to(run.root):
            continue
        properties = {"place": file["place"], "placement": file["placement"], "versions": str(file["versions"])}
        begun_us = record["begun_unix_us"]
        properties["sealed"] = _time((begun_us + file["sealed_us"]) * 1000)
        durable = file.get("durable_us")
        properties["durable"] = "never in the store" if durable is None else _time((begun_us + durable) * 1000)
        if durable is not None:
            properties["store"] = record["store"]
        found[str(whole.relative_to(run.root))] = properties
    return found


def media_type(path: Path) -> str:
    """The media type, from the file's name."""
    return mimetypes.guess_type(path.name)[0] or "application/octet-stream"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def _crate(args: argparse.Namespace) -> int:
    run = read(args.run, args.dir)
    mark = run.report.get("mark")
    record = find_record(args.state or run.report.get("state"), mark) if mark else None
    if args.out.exists():
        raise Problem("the path already exists", where=args.out, remedy="choose another name for the crate")
    try:
        write(run, record, args.out, args.files, args.license)
    except OSError as error:
        if args.out.is_dir():
            shutil.rmtree(args.out)
        raise Problem("the crate cannot be written", where=args.out, why=error, code=1) from None
    print(f"{args.out}: {len(run.records)} tasks, {'with' if record else 'without'} the agent's record")
    return 0
