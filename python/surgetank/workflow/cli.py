"""The command `surgetank workflow …` (the binary starts this)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from . import crate, explain, hints, jsontext, plot, replay
from .derive import Facts, Persist, derive
from .execute import cli as execute
from .graph import Workflow, name_files
from .importers import ENGINES, load, wfformat
from .problem import Problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 Surgetank or the machine failed, 2 wrong usage or description (docs/exit-codes.md)."""
    try:
        args = _parser().parse_args(arguments)
        code: int = args.do(args)
        sys.stdout.flush()
        return code
    except Problem as problem:
        print(f"surgetank workflow: {problem}", file=sys.stderr)
        return problem.code
    except BrokenPipeError:
        # The reader of standard output has gone: this prevents a second error at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"surgetank workflow: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surgetank workflow", description="What the workflow's graph knows: lifetimes, patterns and placement."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    importing = verbs.add_parser("import", help="Read a description and write it as WfFormat")
    _of_graph(importing)
    importing.add_argument("-o", "--out", type=Path, help="file to write; standard output without it")
    importing.set_defaults(do=_import)

    explaining = verbs.add_parser(
        "explain", help="Per file: pattern, lifetime, size, readers, hint; the peak of live bytes"
    )
    _of_facts(explaining)
    explaining.add_argument(
        "-j", "--cores", type=_cores, default=float(os.cpu_count() or 1), help="cores the tasks have"
    )
    explaining.add_argument("--every", action="store_true", help="a line for every file, not for every kind")
    explaining.add_argument("--json", action="store_true", help="as one JSON object")
    explaining.set_defaults(do=_explain)

    plotting = verbs.add_parser("plot", help="Draw the graph, files coloured by lifetime or tier, as SVG")
    _of_facts(plotting)
    plotting.add_argument("-o", "--out", type=Path, required=True, help="the SVG file")
    plotting.add_argument("--tiers", action="store_true", help="colour by the tier each task wishes for")
    plotting.set_defaults(do=_plot)

    hinting = verbs.add_parser("hints", help="The hints for the agent: for `surgetank hint --from`, or as rules")
    _of_facts(hinting)
    hinting.add_argument("--rules", action="store_true", help="as rules for surgetank.toml")
    hinting.add_argument("-o", "--out", type=Path, help="file to write; standard output without it")
    hinting.set_defaults(do=_hints)
    execute.add_run(verbs, load)
    replay.add_replay(verbs, load)
    crate.add_crate(verbs)
    return parser


def _of_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("description", type=Path, help="the workflow's description, in its engine's own language")
    parser.add_argument("--engine", choices=sorted(ENGINES), help="its language [default: recognised from the file]")


def _of_facts(parser: argparse.ArgumentParser) -> None:
    _of_graph(parser)
    parser.add_argument(
        "--persist",
        type=Persist,
        choices=list(Persist),
        metavar="{final,all,when-consumed}",
        default=Persist.ALL,
        help="what goes to the store: results only, every file that is not declared temporary (default), or the same when consumed",
    )
    execute.name_options(parser)
    parser.add_argument(
        "--history",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an earlier run (WfFormat): sizes of files",
    )


def _cores(text: str) -> float:
    cores = float(text)
    if not 0 < cores <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of cores")
    return cores


def _derived(args: argparse.Namespace) -> tuple[Workflow, dict[str, Facts]]:
    workflow = load(args.description, args.engine)
    name_files(workflow, args.final, args.temporary)
    return workflow, derive(workflow, args.persist, [wfformat.load(path) for path in args.history])


def _import(args: argparse.Namespace) -> int:
    _write(args.out, wfformat.dumps(load(args.description, args.engine)))
    return 0


def _explain(args: argparse.Namespace) -> int:
    workflow, facts = _derived(args)
    if args.json:
        document: dict[str, Any] = explain.summary(workflow, facts, args.persist, args.cores)
        document["of_files"] = explain.rows(workflow, facts, args.persist)
        print(jsontext.dumps(document, indent=1))
    else:
        sys.stdout.write(explain.text(workflow, facts, args.persist, args.cores, every=args.every))
    return 0


def _plot(args: argparse.Namespace) -> int:
    workflow, facts = _derived(args)
    tiers = None
    if args.tiers:
        tiers = {
            path: workflow.tasks[fact.maker].tier or "store" if fact.maker is not None else "store"
            for path, fact in facts.items()
        }
    _write(args.out, plot.svg(workflow, facts, tiers))
    return 0


def _hints(args: argparse.Namespace) -> int:
    workflow, facts = _derived(args)
    some = hints.hints(workflow, facts, args.persist)
    _write(args.out, hints.rules_toml(some) if args.rules else hints.json_lines(some))
    return 0


def _write(out: Path | None, text: str) -> None:
    if out is None:
        stream: TextIO = sys.stdout
        stream.write(text)
        return
    try:
        if out.is_file() or not out.exists():
            jsontext.write_whole(out, text)
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Problem("the file cannot be written", where=out, why=error, code=1) from None


if __name__ == "__main__":
    sys.exit(main())
