"""`surgetank workflow run`: the local executor on the command line."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..derive import Persist
from ..graph import Workflow, name_files
from ..importers import wfformat
from . import inner, journal, plan, resume
from .inner import absent, check, farewell
from .launch import launch
from .persist import droppable
from .settings import Settings, memory_here, size_of
from .stamp import stamp

Verbs = Any  # argparse's action of subparsers has no public name.
Load = Callable[[Path], Workflow]


def add_run(subparsers: Verbs, load: Load = wfformat.load) -> argparse.ArgumentParser:
    """The verb `run`; `load` reads a description of any engine."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="Run the tasks on this machine, or on the nodes of a Slurm job",
        description="Runs the tasks of a workflow under Surgetank, on this machine or the nodes of a Slurm job; the same command again continues an interrupted run.",
    )
    parser.add_argument("description", type=Path, metavar="FILE", help="the workflow's description")
    add_execution(parser)
    parser.add_argument(
        "--cluster", type=_count, default=1, metavar="N", help="short tasks of a kind: up to N in one process"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan, auxiliary tasks included; run nothing")
    parser.add_argument("--inputs-from", metavar="DIR|URL", help="missing inputs are staged in from here")
    parser.add_argument("--results-to", metavar="DIR|URL", help="results are staged out to here, besides the store")
    parser.add_argument("--on", choices=["here", "slurm"], default="here",
                        help="where tasks run: here [default], or on the nodes of the Slurm job, each where its inputs are")  # fmt: skip
    parser.add_argument("--no-images", action="store_true", help="run tasks that name a container image without it")
    parser.set_defaults(do=lambda args: _run(args, load))
    return parser


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Options that `run` and `replay` share."""
    parser.add_argument(
        "-j", "--jobs", type=_cores, metavar="N", help="cores the tasks share, on each node [default: all]"
    )
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE", help="memory the tasks share on each node, by the amounts they declare"
    )
    parser.add_argument("--persist", type=Persist, choices=list(Persist), metavar="{final,all,when-consumed}",
                        help="what goes to the store: final: results only, no files between tasks; all [default]: every file that is not"
                        " declared temporary; when-consumed: like all, a task's outputs when all its children are done")  # fmt: skip
    name_options(parser)
    parser.add_argument(
        "--retries", type=_count0, metavar="N", help="tries after a failure [default: the task's own number]"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="after a failure continue with tasks that do not depend on it"
    )
    parser.add_argument(
        "--grace", type=float, default=10.0, metavar="SECONDS", help="how long stopped tasks have to end"
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="what the workflow's paths are relative to [default: the current directory]"
    )
    parser.add_argument("--over", metavar="DIR", help="what Surgetank serves [default: --dir]")
    for option in ("--tier", "--rule"):
        parser.add_argument(option, action="append", default=[], metavar="…", help="as of `surgetank run`")
    for option in ("--store", "--state", "--config", "--deadline"):
        parser.add_argument(option, metavar="…", help="as of `surgetank run`")
    parser.add_argument("--bare", action="store_true", help="without Surgetank, straight on the directory")
    parser.add_argument("--no-prefetch", action="store_true", help="do not bring inputs into the tiers")
    parser.add_argument("--json", action="store_true", help="the report, or the plan, as JSON on standard output")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def name_options(parser: argparse.ArgumentParser) -> None:
    """Files that the user names explicitly (`graph.name_files`)."""
    for word, meaning in (
        ("final", "a result, even if a task reads it"),
        ("temporary", "may go after its last reader"),
    ):
        parser.add_argument(
            f"--{word}",
            action="append",
            default=[],
            metavar="GLOB",
            help=f"what matches is {meaning}; `*` crosses no slash",
        )


def settings_of(args: argparse.Namespace) -> Settings:
    directory = os.path.realpath(args.dir or args.over or ".")
    serve = ["-q"] if args.quiet else ["--no-summary"]
    for option in ("tier", "rule"):
        for value in getattr(args, option):
            serve += [f"--{option}", value]
    for option in ("store", "config", "deadline"):
        if getattr(args, option) is not None:
            serve += [f"--{option}", getattr(args, option)]
    return Settings(
        directory=directory,
        over=os.path.realpath(args.over or directory),
        jobs=args.jobs or float(len(os.sched_getaffinity(0))),
        jobs_named=args.jobs is not None,
        memory_bytes=args.memory or memory_here(),
        memory_named=args.memory is not None,
        persist=args.persist or Persist.FINAL,
        persist_named=args.persist is not None,
        retries=args.retries,
        keep_going=args.keep_going,
        grace_s=args.grace,
        bare=args.bare,
        prefetch=not args.no_prefetch,
        progress=not args.quiet,
        state=None if args.state is None else os.path.realpath(args.state),
        serve=serve,
    )


def _run(args: argparse.Namespace, load: Load) -> int:
    workflow = load(args.description)
    name_files(workflow, args.final, args.temporary)
    settings = settings_of(args)
    settings.cluster, settings.on = args.cluster, args.on
    settings.inputs_from, settings.results_to = args.inputs_from, args.results_to
    settings.images = not args.no_images
    if args.dry_run:
        planned = dry_run(workflow, settings)
        print(json.dumps(planned.as_json(), indent=1) if args.json else planned.text())
        return 0
    report = launch(workflow, settings)
    tell(report, as_json=args.json)
    code: int = report["exit"]
    return code


def tell(report: dict[str, Any], *, as_json: bool) -> None:
    """Reports the end of a run to the user."""
    if as_json:
        print(json.dumps(report, indent=1))
    elif "tasks" in report:
        print(farewell(report))


def dry_run(workflow: Workflow, settings: Settings) -> plan.Plan:
    """The plan of a run; changes nothing."""
    os.chdir(settings.directory)
    check(workflow, settings)
    missing = absent(workflow, settings)
    drop = droppable(workflow, settings.persist, settings.persist_named, settings.directory, settings.over)
    decision = resume.decide(workflow, journal.load(inner.HOME), stamp, drop)
    return plan.make(workflow, decision, settings, drop, missing)


def _cores(text: str) -> float:
    cores = float(text)
    if not 0 < cores <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of cores")
    return cores


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return count


def _count0(text: str) -> int:
    if (count := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return count


def _size(text: str) -> int:
    try:
        return size_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
