"""Tests of the suite's own checks and reports. Run: cd scripts && python3 -m unittest --quiet checks.tests"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import unittest
from pathlib import Path

from checks import flaky, prose, remains, servers, shape, slowest

# The form of nextest 0.9.114, shortened: one test passed in its third run, one failed in all, and nextest ended one.
JUNIT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="4" failures="1" errors="0">
    <testsuite name="surgetank::model_mount" tests="4" disabled="0" errors="0" failures="1">
        <testcase name="flips" classname="flake" time="0.004">
            <flakyFailure time="0.195" message="panicked at src/lib.rs:8:5" type="test failure with exit code 101">thread panicked
                <system-out>
SURGETANK_MODEL_SEED=77
</system-out>
                <system-err>said &amp; &lt;done&gt;
</system-err>
            </flakyFailure>
            <flakyFailure time="0.159" message="panicked" type="test failure with exit code 101">thread panicked
                <system-out>SURGETANK_MODEL_SEED=78</system-out>
                <system-err></system-err>
            </flakyFailure>
        </testcase>
        <testcase name="holds" classname="flake" time="0.003"></testcase>
        <testcase name="fails" classname="flake" time="0.179">
            <failure message="always" type="test failure with exit code 101">always</failure>
            <rerunFailure time="0.171" message="always" type="test failure with exit code 101">always</rerunFailure>
        </testcase>
        <testcase name="hung" classname="flake" time="1">
            <flakyFailure time="300" message="test timed out" type="test timeout"></flakyFailure>
        </testcase>
    </testsuite>
</testsuites>
"""


class OfFlaky(unittest.TestCase):
    def of(self, junit: str) -> list[flaky.Flaky]:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "junit.xml"
            path.write_text(junit)
            return flaky.of_junit(path)

    def test_tests_that_held_when_repeated_are_found_with_output(self) -> None:
        flips, hung = self.of(JUNIT)
        self.assertEqual(flips.name, "surgetank::model_mount flips")
        self.assertEqual(flips.outputs, ("SURGETANK_MODEL_SEED=77\nsaid & <done>", "SURGETANK_MODEL_SEED=78"))
        self.assertEqual((hung.name, hung.outputs), ("surgetank::model_mount hung", ("test timed out",)))

    def test_file_that_is_missing_has_none(self) -> None:
        self.assertEqual(flaky.of_pytest(Path("/nonexistent")), [])

    def test_three_are_allowed_and_four_fail(self) -> None:
        some = [flaky.Flaky(f"test {number}", (f"seed {number}",)) for number in range(4)]
        text, passes = flaky.report(some[:3])
        self.assertTrue(passes)
        self.assertIn("flaky: test 2 (passed in run 2)\n---- output of run 1\nseed 2", text)
        text, passes = flaky.report(some)
        self.assertFalse(passes)
        self.assertTrue(text.endswith("each is a defect of the product or of the test"))
        self.assertEqual(flaky.report([]), ("", True))


class OfPytest(unittest.TestCase):
    """pytest with the conftest of python/tests."""

    def run_pytest(self, place: Path, tests: str) -> tuple[int, list[flaky.Flaky]]:
        conftest = Path(__file__).resolve().parents[2] / "python/tests/conftest.py"
        (place / "conftest.py").write_text(conftest.read_text())
        (place / "test_one.py").write_text(tests)
        record = place / "flaky"
        python = conftest.parents[2] / "scripts/python"
        words = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(place), f"--basetemp={place / 'temporary'}", str(place)]
        environment = os.environ | {"CI": "true", "SURGETANK_FLAKY": str(record)}
        done = subprocess.run(words, env=environment, cwd=place, capture_output=True, text=True, check=False)
        return done.returncode, flaky.of_pytest(record)

    def test_test_that_holds_when_repeated_is_recorded(self) -> None:
        tests = """
runs = []
def test_flips():
    runs.append(1)
    print("seed", len(runs))
    assert len(runs) == 3
"""
        with tempfile.TemporaryDirectory() as place:
            code, (one,) = self.run_pytest(Path(place), tests)
        self.assertEqual((code, one.name, len(one.outputs)), (0, "test_one.py::test_flips", 2))
        self.assertIn("seed 1", one.outputs[0])

    def test_test_that_fails_three_times_fails(self) -> None:
        with tempfile.TemporaryDirectory() as place:
            code, found = self.run_pytest(Path(place), "def test_fails():\n    assert False\n")
        self.assertEqual((code, found), (1, []))


MODULE = re.compile(r'^(?:#\[path = "([^"]+)"\]\n)?(?:pub )?mod (\w+);$', re.MULTILINE)
# Modules that the test files of one binary share.
SHARED = re.compile(r"\bcrate::(\w+)")


def modules(roots: list[Path]) -> set[Path]:
    """The files of Rust test programs: these, and what they name with `mod`."""
    found: set[Path] = set()
    ahead = list(roots)
    while ahead:
        file = ahead.pop()
        found.add(file)
        inner = file.parent if file.name == "mod.rs" or file in roots else file.with_suffix("")
        for path, name in MODULE.findall(file.read_text()):
            places = [file.parent / path] if path else [inner / f"{name}.rs", inner / name / "mod.rs"]
            ahead += [place.resolve() for place in places if place.exists() and place.resolve() not in found]
        tests = next((parent for parent in file.parents if parent.name == "tests"), None)
        shared = [place for name in SHARED.findall(file.read_text()) if tests for place in (tests / f"{name}.rs", tests / name / "mod.rs")]
        ahead += [place for place in shared if place.exists() and place not in found]
    return found


class OfServers(unittest.TestCase):
    def test_change_affects_what_the_longest_prefix_says(self) -> None:
        table = servers.read()
        self.assertEqual(table.affected([]), [])
        self.assertEqual(table.affected(["docs/hints.md", "crates/store/src/s3/name.rs"]), [])
        self.assertEqual(table.affected(["crates/store/src/gridfs/wire.rs", "python/tests/conftest.py"]), ["gridfs", "slurm"])
        self.assertEqual(table.affected(["crates/surgetank/tests/hdfs.rs"]), ["hdfs"])
        for path in ("crates/core/src/drain.rs", "Cargo.lock", "scripts/suite", "a-new-file"):
            self.assertEqual(table.affected(["docs/hints.md", path]), table.names)

    def test_prefixes_lead_to_files(self) -> None:
        checkout = Path(__file__).resolve().parent.parent.parent
        for prefix in servers.read().affects:
            self.assertTrue(list(checkout.glob(f"{prefix.rstrip('/')}*")), prefix)

    def test_sources_of_a_suite_affect_it(self) -> None:
        checkout = Path(__file__).resolve().parent.parent.parent
        table = servers.read()
        for name in table.nextest:
            sources = modules(sorted(checkout.glob(f"crates/*/tests/{name}.rs")))
            self.assertTrue(sources, name)
            servers_of = [file for source in sources for file in re.findall(r"surgetank_testkit::servers::(\w+)", source.read_text())]
            sources |= {file for server in servers_of for file in checkout.glob(f"crates/testkit/src/servers/{server}*") if file.is_file()}
            sources |= {file for server in servers_of for file in checkout.glob(f"crates/testkit/src/servers/{server}/*")}
            for source in sources:
                self.assertIn(name, table.affected([str(source.relative_to(checkout))]))

    def test_table_with_an_unknown_suite_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as place:
            table = Path(place) / "table.toml"
            table.write_text('[suites.one]\nnextest = "all()"\n[affects]\n"docs/" = ["two"]\n')
            with self.assertRaisesRegex(ValueError, "two"):
                servers.read(table)


class OfSlowest(unittest.TestCase):
    def test_slowest_is_first(self) -> None:
        with tempfile.TemporaryDirectory() as place:
            junit = Path(place) / "junit.xml"
            junit.write_text(JUNIT)
            lines = slowest.report(junit).splitlines()
        self.assertEqual(len(lines), 5)
        self.assertEqual([line.split()[-1] for line in lines[1:3]], ["hung", "fails"])


class OfRemains(unittest.TestCase):
    def setUp(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.target, self.temporary = Path(place.name) / "target", Path(place.name) / "temporary"
        (self.target / "tmp").mkdir(parents=True)
        self.temporary.mkdir()
        self.before = remains.Before(self.target, self.temporary, own=False)

    def test_nothing_remains_of_a_suite_that_left_nothing(self) -> None:
        (self.target / "tmp/scene.lock").touch()
        (self.temporary / "hsperfdata_root").mkdir()
        self.assertEqual(self.before.remains(), [])

    def test_files_and_directories_remain(self) -> None:
        (self.target / "tmp/scene-one").mkdir()
        (self.temporary / "left").touch()
        self.assertEqual(self.before.remains(), [f"directory {self.target}/tmp/scene-one", f"file {self.temporary}/left"])

    def test_directory_that_was_made_again_remains(self) -> None:
        left = self.target / "tmp/scene-one"
        left.mkdir()
        before = remains.Before(self.target, self.temporary, own=False)
        self.assertEqual(before.remains(), [])
        left.rmdir()
        time.sleep(0.05)
        left.mkdir()
        self.assertEqual(before.remains(), [f"directory {left}"])

    def test_process_with_the_mark_remains_until_it_ends(self) -> None:
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        environment = os.environ | {remains.MARK: str(self.temporary)}
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
        try:
            (found,) = remains.await_nothing(self.before.remains, timeout_s=0.5)
            self.assertTrue(found.startswith(f"process {left.pid}: "), found)
        finally:
            for process in (left, other):
                process.communicate(b"\n")
        self.assertEqual(remains.await_nothing(self.before.remains), [])

    def test_mounts_are_found(self) -> None:
        self.before.mounts.discard("/proc")
        self.assertEqual(self.before.remains(), ["mount /proc"])


class OfShape(unittest.TestCase):
    def shape_of(self, files: dict[str, str]) -> shape.Shape:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        for name, text in files.items():
            path = Path(place.name) / "crates/one/src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return shape.shape(Path(place.name))

    def test_methods_are_counted_over_all_files_without_traits_and_tests(self) -> None:
        method = "    pub fn a(&self) {\n        b()\n    }\n"
        found = self.shape_of({
            "lib.rs": f"impl Large {{\n{method * 50}}}\nimpl Clone for Large {{\n{method}}}\n",
            "other.rs": f"impl<T> Large {{\n{method * 31}}}\n#[cfg(test)]\nmod tests {{\n    impl Large {{\n    {method}    }}\n}}\n",
        })
        self.assertEqual([found.types[f"one::{name}::Large"].methods for name in ("lib", "other")], [50, 31])

    def test_lines_of_a_function_end_with_its_brace(self) -> None:
        found = self.shape_of({"lib.rs": "fn short() {}\n\nfn long(\n    a: u8,\n) -> u8 {\n    a\n}\n\ntrait T {\n    fn only(\n        &self,\n    );\n}\n"})
        self.assertEqual([found.functions[f"crates/one/src/lib.rs {name}"] for name in ("short", "long", "only")], [1, 5, 3])

    def test_circle_between_folders_is_found_and_inside_one_is_not(self) -> None:
        files = {"lib.rs": "mod a;\nmod b;\n", "a.rs": "mod inner;\n", "b.rs": "mod inner;\n"}
        apart = self.shape_of({**files, "a/inner.rs": "use crate::b::inner::X;\n", "b/inner.rs": "// crate::a::inner\n"})
        self.assertEqual(apart.circles["one"], [])
        circle = self.shape_of({**files, "a/inner.rs": "use crate::b::inner::X;\n", "b/inner.rs": "use crate::a::inner::Y;\n"})
        self.assertEqual(circle.circles["one"], [["a::inner", "b::inner"]])
        grouped = self.shape_of({**files, "a/inner.rs": "use crate::{\n    b::{inner::X, Z},\n};\n", "b/inner.rs": "use super::super::{a::inner::Y};\n"})
        self.assertEqual(grouped.circles["one"], [["a::inner", "b::inner"]])
        inside = self.shape_of({"lib.rs": "", "x.rs": "use crate::y::Y;\n", "y.rs": "use super::x::X;\n"})
        self.assertEqual(inside.circles["one"], [])

    def test_numbers_may_only_go_down(self) -> None:
        found = self.shape_of({"lib.rs": "fn long() {\n" + "    a();\n" * 110 + "}\n"})
        name = "crates/one/src/lib.rs long"
        self.assertEqual(len(shape.complaints(found, {})), 1)
        self.assertEqual(len(shape.complaints(found, {"functions": {name: {"lines": 111}}})), 1)
        self.assertEqual(len(shape.complaints(found, {"functions": {name: {"lines": 113}}})), 1)
        self.assertEqual(shape.complaints(found, {"functions": {name: {"lines": 112}}}), [])
        self.assertEqual(len(shape.complaints(self.shape_of({"lib.rs": ""}), {"functions": {name: {"lines": 112}}})), 1)


class OfProse(unittest.TestCase):
    def found(self, path: str, text: str) -> list[tuple[int, str]]:
        return [(one.line, one.what) for one in prose.look(path, text)]

    def test_words_are_found_in_pages_outside_code(self) -> None:
        page = "# A page\n\nIt is mended, once\nmore `once more`.\n\n```console\n$ told\n```\n\n| who | [told](told.md) |\n"
        self.assertEqual(self.found("docs/a.md", page), [(3, "'mended'"), (3, "'once more'"), (10, "'told'")])
        self.assertEqual(self.found("docs/command-line.md", page), [])

    def test_words_are_found_in_comments_only(self) -> None:
        rust = """//! For whoever\nfn told() { let x = "// mend"; let y = r#"/* mend "*/"#; let z = '"'; } // kept for\n// ever, `anew`\n/* lies */\n"""
        self.assertEqual(self.found("a.rs", rust), [(1, "'whoever'"), (2, "'for ever'"), (4, "'lies'")])
        self.assertEqual(self.found("a.c", '/* As\n * ever. */\nint told; // "told"\n'), [(1, "'as ever'"), (3, "'told'")])
        python = '"""Nobody."""\nx = "nobody"  # nobody\n\n\ndef f():\n    """Nobody\n\n    told."""\n'
        self.assertEqual(self.found("a.py", python), [(1, "'nobody'"), (2, "'nobody'"), (6, "'nobody'"), (8, "'told'")])
        self.assertEqual(self.found("a.toml", "# told\n"), [])

    def test_words_are_found_in_messages_of_the_product(self) -> None:
        rust = 'let x = "lies";\nlet y = format!("it lies\n there {why}");\n\n#[cfg(test)]\nmod tests {\n    let z = "it is told to all";\n}\n'
        self.assertEqual(self.found("crates/core/src/a.rs", rust), [(2, "'lies'")])
        for path in ("crates/core/src/a/tests.rs", "crates/core/tests/a.rs"):
            self.assertEqual(self.found(path, rust), [], path)

    def test_words_with_another_meaning_are_allowed(self) -> None:
        for allowed in ("There is no room.", "It is no longer used.", "It is over 600 lines.", "A user who reads it.", "Who reads it?", "It amends it.", "It goes by itself."):
            self.assertEqual(self.found("docs/a.md", allowed), [], allowed)
        for banned in ("It is no file.", "When it is over, it ends.", "Who reads it waits.", "It is for who reads.", "They go by the name."):
            self.assertEqual(len(self.found("docs/a.md", banned)), 1, banned)

    def test_long_sentences_are_found_in_pages(self) -> None:
        long, short = "One" + " word" * 25 + ".", "One" + " word" * 24 + "."
        page = f"{short} {short}\n{long}\n\n- {short}\n- {long}\n\n| {short} | {long} |\n"
        self.assertEqual([line for line, _ in self.found("docs/a.md", page)], [2, 5, 7])
        self.assertEqual(self.found("docs/a.md", f"`{'a ' * 30}` {short[3:]}"), [])
        self.assertEqual(self.found("a.rs", f"// {long}\n"), [])

    def test_line_of_a_sentence_behind_code_is_its_own(self) -> None:
        page = "```sh\na\nb\n```\nOne" + " word" * 25 + ".\n"
        self.assertEqual([line for line, _ in self.found("docs/a.md", page)], [5])

    def test_entries_of_the_changelog_have_their_own_limit(self) -> None:
        page = f"- {'word ' * 30}\n- {'word ' * 15}end. {'word ' * 15}\n"
        self.assertEqual(self.found("CHANGELOG.md", page), [(2, "an entry of 31 words")])

    def test_numbers_may_only_go_down(self) -> None:
        found = prose.look("a.rs", "// told\n// told\n")
        self.assertEqual(prose.complaints(found, {"words": {"a.rs": 2}}), [])
        self.assertEqual(len(prose.complaints(found, {"words": {"a.rs": 1}})), 3)
        self.assertEqual(len(prose.complaints(found, {"words": {"a.rs": 3}})), 1)
        self.assertEqual(len(prose.complaints(found, {"words": {"a.rs": 2, "b.rs": 1}})), 1)

    def test_written_numbers_are_those_that_are_found_and_do_not_grow(self) -> None:
        found = prose.look("a.rs", "// told\n// told\n")
        with tempfile.TemporaryDirectory() as place:
            to = Path(place) / "prose.toml"
            self.assertIsNone(prose.write(found, to))
            self.assertEqual(prose.complaints(found, tomllib.loads(to.read_text())), [])
            self.assertIsNone(prose.write(prose.look("b.rs", "// told\n"), to))
            self.assertIsNotNone(prose.write(found, to))
            self.assertEqual(tomllib.loads(to.read_text())["words"], {"b.rs": 1})


if __name__ == "__main__":
    unittest.main()
