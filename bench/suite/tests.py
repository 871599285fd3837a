"""Tests of the suite's own decisions. Run: cd bench && python3 -m unittest suite.tests"""

import copy
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))

from suite import claims, expect, plots, report
from suite.command import same_work
from suite.figures import faster, latest, newest
from suite.records import faults
from suite.statistics import paired_ratio
from suite.testbed import Refused


def run(variant: str, number: int, seconds: float, **others: object) -> dict:
    found = {
        "variant": variant, "round": number, "seconds": seconds, "tail_s": 0.1, "load_before": 0.2, "memory_peak_bytes": 1,
        "cpu_s": {"tasks": 1.0, "agent": 0.0, "server": 0.1}, "durable_files": 1, "durable_bytes": 1 << 20, "finals": 1, "finals_crc32": "00000001",
    }  # fmt: skip
    return found | others


def record(rounds: int = 10, ours: float = 2.0, theirs: float = 8.0) -> dict:
    runs = [one for number in range(rounds) for one in (run("store", number, theirs + number / 100), run("in-memory", number, ours))]
    return {
        "schema": 1, "item": "incrementation", "mode": "headline", "series": "idle", "command": "bench/run x", "began": "2026-11-24T00:00:00+00:00",
        "ended": "2026-11-24T00:00:01+00:00", "git": {"commit": "abc", "changed": False},
        "machine": {"cores": 2, "memory_bytes": 1, "kernel": "6", "processor": "x", "cgroup": "v1", "root": True},
        "versions": {"surgetank": "surgetank 0"},
        "store": {"name": "lustre-busy", "simulated": True, "preset": {"bandwidth_mib_s": 50, "latency_us": 500}},
        "calibrations": [{"at": "t", "before": "10 iterations", "write_mib_s": 50.0, "read_mib_s": 50.0, "stat_us": 600}],
        "cells": [{
            "name": "10 iterations", "cache": "cold", "memory_limit_bytes": 1, "tier_bytes": 1, "parameters": {"iterations": 10}, "read_mib": 32,
            "written_mib": 320, "final_mib": 32, "moved_mib": 640, "compute_s": 0, "runs": runs,
        }],
    }  # fmt: skip


class Statistics(unittest.TestCase):
    def test_rounds_stay_together(self) -> None:
        # A machine that becomes ten times slower slows both runs of a round, so the ratio stays certain.
        ratio = paired_ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
        self.assertEqual((ratio.median, ratio.low, ratio.high), (2.0, 2.0, 2.0))

    def test_the_interval_is_around_the_median_and_the_same_each_time(self) -> None:
        values = [1.0, 1.2, 0.8, 1.1, 0.9, 1.3, 0.7, 1.0, 1.05, 0.95]
        first, again = (paired_ratio(values, [1.0] * len(values)) for _ in range(2))
        self.assertEqual(first, again)
        self.assertTrue(0.7 < first.low < first.median < first.high < 1.3, first)


class Schema(unittest.TestCase):
    def test_a_record_of_the_harness_is_of_it(self) -> None:
        self.assertEqual(faults(record()), [])

    def test_what_is_missing_wrong_or_unknown_is_named(self) -> None:
        for change, message in (
            (lambda r: r["cells"][0]["runs"][3].pop("seconds"), "record.cells[0].runs[3]: seconds is missing"),
            (lambda r: r["machine"].update(cores=True), "record.machine.cores: True is not of type integer"),
            (lambda r: r.update(mode="quick"), "record.mode: 'quick' is none of ['smoke', 'headline', 'full']"),
            (lambda r: r["git"].update(branch="x"), "record.git: branch is not known"),
        ):
            wrong = copy.deepcopy(record())
            change(wrong)
            self.assertEqual(faults(wrong), [message])


class Fairness(unittest.TestCase):
    def cell(self) -> object:
        return type("Cell", (), {"name": "cell"})

    def test_other_results_are_refused(self) -> None:
        with self.assertRaises(Refused):
            same_work(self.cell(), [run("store", 0, 1.0), run("in-memory", 0, 1.0, finals_crc32="00000002")])

    def test_bytes_must_be_equal_where_the_promise_is(self) -> None:
        less = run("copy-all", 0, 1.0, durable_bytes=1)
        with self.assertRaises(Refused):
            same_work(self.cell(), [run("store", 0, 1.0), less])
        same_work(self.cell(), [run("store", 0, 1.0), {**less, "variant": "in-memory"}])

    def test_temporaries_that_found_no_room_may_be_in_the_store_besides(self) -> None:
        def agent(spills: int, tier_in_mib: int) -> dict:
            return {"spills": spills, "tier_in_bytes": tier_in_mib << 20}

        all_in = run("in-memory", 0, 1.0, agent=agent(0, 8))
        more = run("in-memory", 1, 1.0, durable_bytes=2 << 20)
        same_work(self.cell(), [all_in, {**more, "agent": agent(1, 8)}])
        # The agent placed a file in the store when it was created, so the tier got a MiB less.
        same_work(self.cell(), [all_in, {**more, "agent": agent(0, 7)}])
        with self.assertRaises(Refused):
            same_work(self.cell(), [all_in, {**more, "agent": agent(0, 8)}])
        with self.assertRaises(Refused):
            same_work(self.cell(), [{**all_in, "variant": "copy-all"}, {**more, "variant": "copy-all", "agent": agent(1, 8)}])


def loaded(ours: float = 2.0, began: str = "2026-11-24T00:00:00+00:00", file: str = "one.json", **others: object) -> dict:
    """A record as `records.load` gives it."""
    return record(rounds=3, ours=ours) | {"began": began, "file": file} | others


def expected(ours: float = 2.0) -> list[dict]:
    """A record for each of the five figures."""
    found = []
    for number, figure in enumerate(expect.FIGURES):
        one = loaded(ours, file=f"{number}.json", item=figure.item)
        one["store"]["name"] = figure.store
        one["cells"][0]["name"] = figure.cell
        one["cells"][0]["runs"] += [{**run, "variant": "copy-all"} for run in one["cells"][0]["runs"] if run["variant"] == "in-memory"]
        found.append(one)
    return found


class Newest(unittest.TestCase):
    def test_cell_measured_again_counts_once(self) -> None:
        old, new = loaded(4.0), loaded(2.0, "2026-11-25T00:00:00+00:00", "two.json")
        self.assertEqual([len(one["cells"]) for one in newest([new, old])], [1, 0])
        self.assertEqual(newest([old, new])[1], new)

    def test_other_store_series_or_cache_is_another_cell(self) -> None:
        old = loaded()
        for change in (
            lambda r: r["store"].update(name="nfs"),
            lambda r: r.update(series="loaded"),
            lambda r: r["cells"][0].update(cache="warm"),
            lambda r: r["cells"][0].update(name="5 iterations"),
        ):
            new = copy.deepcopy(loaded(began="2026-11-25T00:00:00+00:00"))
            change(new)
            self.assertEqual([len(one["cells"]) for one in newest([old, new])], [1, 1])


class Expect(unittest.TestCase):
    def test_page_has_five_figures_with_conditions_and_commands(self) -> None:
        text = expect.table(expected())
        for number, figure in enumerate(expect.FIGURES, 1):
            self.assertIn(f"\n| {number} | {figure.work} |", text)
            self.assertIn(f"\n{number}. `{figure.store}` with 50 MiB/s and 500 µs, ", text)
            self.assertIn(f"\n   `{expect.again(figure)}`\n", text)
        self.assertEqual(text.count("4.00 (4.00 – 4.01) ×"), 5)

    def test_figure_without_record_ends_the_program(self) -> None:
        with self.assertRaisesRegex(SystemExit, "no record has copy-all of 'montage, small'"):
            expect.table([one for one in expected() if one["item"] != "montage"])

    def test_figure_uses_the_newest_record(self) -> None:
        again = copy.deepcopy(expected(ours=4.0)[1]) | {"began": "2026-11-25T00:00:00+00:00", "file": "again.json"}
        record, _ = expect.found(expect.FIGURES[1], [*expected(), again])
        self.assertEqual(record["file"], "again.json")

    def test_machine_omits_the_suffix_of_the_kernel(self) -> None:
        one = loaded()
        one["machine"] |= {"memory_bytes": 3 << 29, "kernel": "6.18.44-x1"}
        self.assertEqual(expect.machine(one), "2 cores, 1.5 GiB of memory, Linux 6.18.44")


class Report(unittest.TestCase):
    def test_page_changes_only_between_the_marks(self) -> None:
        text = f"before\n{report.BEGIN}\nobsolete\n{report.END}\nafter\n"
        page = report.page(text, expected())
        self.assertTrue(page.startswith("before\n") and page.endswith("after\n") and "obsolete" not in page)
        self.assertEqual(report.page(page, expected()), page)
        self.assertNotEqual(report.page(page, expected(ours=2.5)), page)

    def test_page_without_marks_ends_the_program(self) -> None:
        with self.assertRaises(SystemExit):
            report.page("before\n", expected())

    def test_document_changes_with_its_records(self) -> None:
        self.assertEqual(report.document([loaded()]), report.document([loaded()]))
        self.assertNotEqual(report.document([loaded()]), report.document([loaded(ours=2.5)]))

    def test_section_gives_spread_rounds_command_and_commit(self) -> None:
        changed = loaded(git={"commit": "abcdef0123456789", "changed": True})
        text = report.section(changed, latest([changed]))
        self.assertIn("### one.json: incrementation on lustre-busy (simulated), idle\n", text)
        self.assertIn("- Command: `bench/run x`\n- Build: 2026-11-24, commit abcdef0123 with local changes, surgetank 0\n", text)
        self.assertIn("| 10 iterations | store | 3 | 8.01 (8.00 – 8.02) |", text)
        self.assertIn("|  | in-memory | 3 | 2.00 (2.00 – 2.00) | 4.00 (", text)

    def test_superseded_cell_is_marked_and_kept(self) -> None:
        old, new = loaded(4.0), loaded(2.0, "2026-11-25T00:00:00+00:00", "two.json")
        text = report.document([old, new])
        self.assertEqual((text.count("| 10 iterations, superseded |"), text.count("| 10 iterations |")), (1, 1))
        self.assertIn("4.00 (4.00 – 4.01) × at 10 iterations", text)

    def test_command_omits_the_directory_of_results(self) -> None:
        words = "bench/run terrain --results /somewhere/else --cell '10 iter'"
        self.assertEqual(report.command(loaded(command=words)), "bench/run terrain --cell '10 iter'")

    def test_changed_or_missing_file_is_named(self) -> None:
        with tempfile.TemporaryDirectory(dir=report.CHECKOUT / "bench") as directory:
            file = Path(directory, "REPORT.md")
            named = [f"{file.relative_to(report.CHECKOUT)}: differs from the text that bench/results gives"]
            self.assertEqual(report.differing({file: "text\n"}), named)
            file.write_text("text\n")
            self.assertEqual(report.differing({file: "text\n"}), [])
            file.write_text("text by hand\n")
            self.assertEqual(report.differing({file: "text\n"}), named)

    def test_a_claim_that_is_missed_says_so(self) -> None:
        self.assertEqual(claims.in_memory([record(ours=2.0)])[0][-1], "✓")
        self.assertEqual(claims.in_memory([record(ours=4.0)])[0][-1], "✗")
        self.assertEqual(faster(record(ours=4.0)["cells"][0], "in-memory", "by-hand"), None)

    def test_terrain_is_held_against_staging_by_hand_where_that_saves_less(self) -> None:
        def message(ours: float, by_hand: float | None) -> str:
            terrain = {**record(ours=ours, theirs=10.0), "item": "terrain"}
            if by_hand is not None:
                terrain["cells"][0]["runs"] += [run("by-hand", number, by_hand) for number in range(10)]
            return claims.terrain([terrain])[0][-1]

        # 40 %; 33 % with nothing beside it; beside 27, 50 and 36 % by hand; 24 % beside 27; 4 % beside none.
        given = [message(6.0, None), message(6.7, None), message(6.7, 7.3), message(6.7, 5.0), message(6.7, 6.4), message(7.6, 7.3), message(9.6, 10.0)]
        self.assertEqual(given, ["✓", "✗", "✓", "✗", "✗", "✗", "–"])

    def test_a_plot_is_named_by_its_numbers(self) -> None:
        one, other = ([{**record(), "store": {**record()["store"], "name": name}} for name in names] for names in (("a", "b"), ("a", "c")))
        self.assertNotEqual(report.drawn_from(one), report.drawn_from(other))
        self.assertEqual(plots.wanted([]), {})

    def test_lines_leave_out_cells_with_another_fixed_value(self) -> None:
        records = []
        for steps, processes in ((1, 2), (5, 2), (5, 8)):
            one = loaded()
            one["cells"][0] |= {"name": f"{steps}, {processes}", "parameters": {"iterations": steps, "processes": processes}}
            records.append(one)
        found = plots.lines_by(records, "incrementation", "iterations", "lustre-busy", {"iterations", "processes"}, {"processes": 2})
        self.assertEqual([steps for steps, _ in found["store"]], [1, 5])


if __name__ == "__main__":
    unittest.main()
