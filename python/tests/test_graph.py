"""The graph checks itself; globs name files as in a shell."""

import pytest

from surgetank.workflow.graph import File, Task, Workflow, matcher, name_files
from surgetank.workflow.problem import Problem


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("*.fits", "a.fits", True),
        ("*.fits", "a/b.fits", False),
        ("**/*.fits", "a/b.fits", True),
        ("**/*.fits", "b.fits", True),
        ("a?[0-9].x", "ab1.x", True),
        ("a?[!0-9].x", "ab1.x", False),
        ("x[]y", "x[]y", True),
        ("x[]]y", "x]y", True),
        ("x[!]]y", "x]y", False),
        ("[^a]", "^", True),
        ("a\nb*", "a\nbc", True),
        ("a.b", "axb", False),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert bool(matcher(glob)(path)) is matches


def _line(*tasks: Task, files: tuple[File, ...] = ()) -> Workflow:
    return Workflow.of("w", "w.yaml", tasks, files)


def test_contradictions_are_reported() -> None:
    for tasks, words in (
        ((Task("a", "k"), Task("a", "k")), "two tasks are called 'a'"),
        ((Task("a", "k", outputs=["x"]), Task("b", "k", outputs=["x"])), "both 'a' and 'b' write 'x'"),
        ((Task("a", "k", ["y"], ["x"]), Task("b", "k", ["x"], ["y"])), "wait for each other"),
        ((Task("a", "k", after=["nobody"]),), "'nobody', which does not exist"),
        ((Task("a", "k", outputs=["../x"]),), "not a path below"),
    ):
        with pytest.raises(Problem, match=words):
            _line(*tasks)


def test_task_that_writes_its_input_is_not_a_cycle() -> None:
    workflow = _line(Task("a", "k", ["x"], ["x", "y"]), Task("b", "k", ["x"]))
    assert workflow.order == ["a", "b"]
    assert workflow.readers["x"] == ["b"]


def test_parents_come_first_otherwise_as_described() -> None:
    workflow = _line(Task("c", "k", ["x"]), Task("b", "k"), Task("a", "k", outputs=["x"]), Task("d", "k", after=["c"]))
    assert workflow.order == ["b", "a", "c", "d"]
    assert workflow.descendants("a") == {"c", "d"}


def test_glob_without_a_match_is_refused() -> None:
    workflow = _line(Task("a", "k", outputs=["x.tmp", "y.tmp"]))
    name_files(workflow, ["y.*"], ["*.tmp"])
    assert (workflow.files["x.tmp"].temporary, workflow.files["y.tmp"].temporary, workflow.files["y.tmp"].final) == (
        True,
        False,
        True,
    )
    with pytest.raises(Problem, match="no file of the workflow matches"):
        name_files(workflow, ["*.fits"], [])
