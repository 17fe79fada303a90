"""``fsdpcheck.adapter`` holds and documents every name that an author of an adapter needs."""

from __future__ import annotations

import ast
import inspect
import pydoc
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fsdpcheck import adapter, adapters, engines
from fsdpcheck.adapters import builtin
from fsdpcheck.judging import registry
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.run import Run

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "data_parallel.py"


BUILTIN = ("fsdpcheck.adapters.builtin", "fsdpcheck.impl")


def _shown() -> str:
    """The example of the module's text, as a program."""
    lines = inspect.getdoc(adapter).splitlines()  # type: ignore[union-attr]
    first = next(at for at, line in enumerate(lines) if line.startswith("    import torch"))
    last = next(at for at, line in enumerate(lines) if line.startswith("    adapter = "))
    return textwrap.dedent("\n".join(lines[first : last + 1]))


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _undocumented(name: str, thing: object, text: str) -> Iterator[str]:
    """What of a name the text of pydoc leaves unexplained."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):  # pydoc shows no text of a Literal or Callable
        rows = [line.split() for line in text.splitlines() if line.startswith("        ")]
        yield from () if any(row[:1] == [name] and len(row) > 3 for row in rows) else [name]
        return
    line = _first_line(thing)
    if not line or line.startswith(f"{name}(") or line not in text:  # a dataclass without a text has its signature
        yield name
    fields = inspect.get_annotations(thing) if inspect.isclass(thing) else {}
    for part, value in vars(thing).items() if inspect.isclass(thing) else ():
        called = part not in fields and (inspect.isfunction(value) or isinstance(value, property))
        if called and not part.startswith("_") and not (_first_line(value) and _first_line(value) in text):
            yield f"{name}.{part}"


def test_pydoc_explains_every_name_and_every_method() -> None:
    text = pydoc.render_doc(adapter, renderer=pydoc.plaintext)
    missing = [lost for name in adapter.__all__ for lost in _undocumented(name, getattr(adapter, name), text)]
    assert missing == []


def test_the_face_holds_what_the_built_in_adapters_take_of_fsdpcheck() -> None:
    """But for helpers of ``builtin``, which are no part of the contract, and ``impl``, an implementation."""
    taken = set()
    for path in Path(builtin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fsdpcheck":
                taken |= {(str(node.module), alias.name) for alias in node.names}
    taken = {(module, name) for module, name in taken if not module.startswith(BUILTIN)}
    assert len(taken) > 10
    assert {name for _, name in taken} - set(adapter.__all__) == set(), "next: add the name to fsdpcheck/adapter.py"


def test_the_example_of_the_text_holds_what_it_promises(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_shown())
    with closing(engines.open_engine("simulated")) as engine:
        run = Run(engine, f"{tmp_path / 'mine.py'}:adapter")
        verdict = check_law(registry.chapters()["training.plain"], run, world_sizes=(1, 2))
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.skipif(not EXAMPLE.is_file(), reason="only a checkout has the examples")
def test_the_file_of_examples_is_the_example_of_the_text() -> None:
    assert EXAMPLE.read_text(encoding="utf-8").partition('"""\n')[2].strip() == _shown()
    assert adapters.load(f"{EXAMPLE}:adapter").name == "data_parallel"
