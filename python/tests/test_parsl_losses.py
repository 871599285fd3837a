"""Parsl programs whose files are lost: which apps run again, without a pool. (`test_pool_losses.py` has one.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parsl
import pytest
from parsl import File, bash_app
from parsl.config import Config
from parsl.executors import ThreadPoolExecutor

from surgetank.workflow.engines import parsl_losses
from surgetank.workflow.engines.parsl_losses import LostNodes
from surgetank.workflow.execute import losses
from surgetank.workflow.problem import Problem


@bash_app  # type: ignore[misc, unused-ignore]
def copy(inputs: Any = (), outputs: Any = ()) -> str:
    return f"echo {outputs[0].filename} >> ran; cat {' '.join(map(str, inputs))} > {outputs[0]}"


@bash_app  # type: ignore[misc, unused-ignore]
def add(inputs: Any = (), outputs: Any = ()) -> str:
    """Changes its input, and makes a file."""
    return f"echo {outputs[1].filename} >> ran; echo more >> {inputs[0]}; cp {inputs[0]} {outputs[1]}"


@bash_app  # type: ignore[misc, unused-ignore]
def second_try(inputs: Any = (), outputs: Any = ()) -> str:
    """Fails the first time."""
    return (
        f"echo {outputs[0].filename} >> ran; test -e tried || {{ touch tried; exit 1; }}; cp {inputs[0]} {outputs[0]}"
    )


class Lost:
    """Files that are lost after each pass."""

    def __init__(self) -> None:
        self.next: list[set[str]] = []
        self.now: set[str] = set()

    def are_new(self, *, failed: bool) -> bool:
        self.now = self.next.pop(0) if self.next else set()
        return bool(self.now)

    def is_lost(self, path: str) -> bool:
        # (One that is removed is not there, and one that is made again is not lost.)
        there = Path(path).exists()
        is_lost = there and Path(path).name in self.now
        self.now -= set() if there else {Path(path).name}
        return is_lost


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Lost, LostNodes]]:
    monkeypatch.chdir(tmp_path)
    state = Lost()
    for module in (parsl_losses, losses):
        monkeypatch.setattr(module, "lost", state.is_lost)
    nodes = LostNodes()
    monkeypatch.setattr(nodes._losses, "are_new", state.are_new)
    monkeypatch.setattr(nodes._losses, "in_pool", True)
    config = Config(
        executors=[ThreadPoolExecutor(max_threads=2)],
        memoizer=nodes,
        retries=1,
        usage_tracking=0,
        run_dir=str(tmp_path / "runinfo"),
        initialize_logging=False,
    )
    Path("a").write_text("1\n")
    with parsl.load(config):
        yield state, nodes


def ran() -> list[str]:
    return sorted(Path("ran").read_text().split())


def chain(length: int) -> Callable[[], str]:
    def program() -> str:
        at = File("a")
        for number in range(length):
            at = copy(inputs=[at], outputs=[File(f"b{number}")]).outputs[0]
        both = [copy(inputs=[at], outputs=[File(name)]) for name in ("c", "d")]
        copy(inputs=[one.outputs[0] for one in both], outputs=[File("e")]).result()
        return Path("e").read_text()

    return program


def test_only_apps_whose_files_are_lost_run_again(lost: tuple[Lost, LostNodes]) -> None:
    state, nodes = lost
    state.next = [{"b1", "c"}, {"d"}]
    assert nodes.run(chain(3)) == "1\n1\n"
    assert ran() == sorted(["b0", "b1", "b1", "b2", "c", "c", "d", "d", "e"])
    assert {Path(path).name for path in nodes.made_again} == {"b1", "c", "d"}


def test_error_of_an_app_is_no_loss(lost: tuple[Lost, LostNodes]) -> None:
    _, nodes = lost
    Path("a").unlink()
    with pytest.raises(Exception, match="ependency failure"):
        nodes.run(chain(1))
    assert set(ran()) == {"b0"}


def test_long_chain_is_made_again(lost: tuple[Lost, LostNodes]) -> None:
    state, nodes = lost
    state.next = [{f"b{number}" for number in range(150)}]
    assert nodes.run(chain(150)) == "1\n1\n"
    assert len(ran()) == 2 * 150 + 3


def test_another_try_is_the_same_call(lost: tuple[Lost, LostNodes]) -> None:
    state, nodes = lost
    state.next = [{"b"}]

    def program() -> None:
        made = second_try(inputs=[File("a")], outputs=[File("made")])
        copy(inputs=[made.outputs[0]], outputs=[File("b")]).result()

    nodes.run(program)
    assert ran() == ["b", "b", "made", "made"]


def changing() -> str:
    first = copy(inputs=[File("a")], outputs=[File("f")])
    add(inputs=[first.outputs[0]], outputs=[File("f"), File("g")]).result()
    return Path("g").read_text()


def test_changed_input_is_made_from_its_beginning(lost: tuple[Lost, LostNodes]) -> None:
    state, nodes = lost
    state.next = [{"f"}]
    assert nodes.run(changing) == "1\nmore\n"
    assert ran() == ["f", "f", "g", "g"] and Path("f").read_text() == "1\nmore\n"


def test_app_does_not_change_its_input_twice(lost: tuple[Lost, LostNodes]) -> None:
    state, nodes = lost
    state.next = [{"g"}]
    with pytest.raises(Problem, match="cannot run again"):
        nodes.run(changing)
    assert Path("f").read_text() == "1\nmore\n"
