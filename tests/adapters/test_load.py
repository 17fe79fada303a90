"""Finding adapters: by name, by dotted name, by file; and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdpcheck import adapters
from fsdpcheck.errors import AdapterError, MissingDependency

SOURCE = """
from fsdpcheck.adapters.contract import Features

class Mine:
    name = "mine"
    features = Features(promises=frozenset())
    def build(self, model, setup): ...

mine = Mine()
def make(): return Mine()
class NoBuild:
    name, features = "x", Features(promises=frozenset())
class NoFeatures:
    name = "x"
    def build(self, model, setup): ...
class NoName:
    features = Features(promises=frozenset())
    def build(self, model, setup): ...
class Slip(Mine):
    features = Features(promises=frozenset({"plian"}))
class Unaccepting(Mine):
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"ragge"}))
class OneWord(Mine):
    features = Features(promises="plain")
class Fussy(Mine):
    def __init__(self, needed): ...
loaded = []
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_adapter.py"
    path.write_text(SOURCE)
    return path


def test_names_are_the_modules_of_the_folder() -> None:
    assert set(adapters.names()) >= {"reference", "fully_shard", "fsdp1", "opacus"}
    assert not [name for name in adapters.names() if name.startswith("_")]


def test_a_name_gives_the_same_object_every_time() -> None:
    assert adapters.load("fully_shard") is adapters.load("fully_shard")
    assert adapters.load("fully_shard").name == "fully_shard"


def test_a_built_in_adapter_has_variants_by_attribute() -> None:
    assert adapters.load("reference:bookkeeping").name == "reference, ghost_bk"
    assert adapters.is_builtin("reference:bookkeeping")
    assert not adapters.is_builtin("elsewhere:bookkeeping")
    assert not adapters.is_builtin("reference:")
    with pytest.raises(AdapterError, match="nonesuch"):
        adapters.load("reference:nonesuch")


@pytest.mark.parametrize("attr", ["mine", "make", "Mine"])
def test_a_file_may_hold_an_object_a_factory_or_a_class(file: Path, attr: str) -> None:
    assert adapters.load(f"{file}:{attr}").name == "mine"


def test_a_file_is_loaded_once_whatever_path_leads_to_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    first, second = adapters.load(f"{file}:mine"), adapters.load("my_adapter.py:mine")
    assert first is second
    assert sys.modules[type(first).__module__].mine is first


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    found = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(SOURCE)
        found.append(adapters.load(f"{tmp_path / folder / 'same.py'}:mine"))
    assert type(found[0]) is not type(found[1])


def test_of_a_library_that_is_installed_too_the_copy_beside_the_adapter_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of Python's own modules is shadowed."""
    installed, beside = tmp_path / "site-packages", tmp_path / "repository"
    for folder, release in ((installed, "old"), (beside, "new")):
        folder.mkdir()
        (folder / "a_library_of_ours.py").write_text(f"release = {release!r}\n")
    (beside / "colorsys.py").write_text("raise RuntimeError('not this one')\n")
    imports = "import a_library_of_ours\nimport colorsys\n"
    (beside / "found.py").write_text(imports + SOURCE + "\nmine.name = a_library_of_ours.release\n")
    here = next(at for at, folder in enumerate(sys.path) if Path(folder).name == "site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path[:here], str(installed), *sys.path[here:]])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    try:
        assert adapters.load(f"{beside / 'found.py'}:mine").name == "new"
    finally:
        sys.modules.pop("a_library_of_ours", None)


def test_a_dotted_name_is_found_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_package_of_mine.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert adapters.load("some_package_of_mine:mine").name == "mine"


@pytest.mark.parametrize(
    ("attr", "said"),
    [
        ("NoBuild", "has no method build"),
        ("NoFeatures", "has no features"),
        ("NoName", "has no name"),
        ("Fussy", "could not be called without arguments"),
        ("loaded", "has no method build"),
        ("mime", "Did you mean 'mine'"),
        ("", "is not of the form"),
        ("Slip", "Features.promises holds 'plian', wanted a set of: .*plain.* Did you mean 'plain'"),
        ("Unaccepting", "Features.accepts holds 'ragge', .* Did you mean 'ragged'"),
        ("OneWord", "Features.promises holds 'plain', wanted a set of"),
    ],
)
def test_a_malformed_adapter_is_named_with_what_it_lacks(file: Path, attr: str, said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        adapters.load(f"{file}:{attr}")


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("fuly_shard", r"Did you mean 'fully_shard'\? Known: .*reference"),
        ("no_such_package.module:x", "no module 'no_such_package'"),
        ("/no/such/file.py:x", "there is no file"),
        ("train.py", "names no attribute of the file: wanted file.py:attr"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(ref: str, said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        adapters.load(ref)


def test_an_error_while_importing_shows_its_own_message(tmp_path: Path) -> None:
    path = tmp_path / "raises.py"
    path.write_text("raise ValueError('the moon is full')")
    for _ in range(2):  # and a failed import leaves no half module behind
        with pytest.raises(AdapterError, match="ValueError: the moon is full"):
            adapters.load(f"{path}:x")


def test_an_adapter_that_exits_while_importing_does_not_end_us(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("import sys; sys.exit(3)")
    with pytest.raises(AdapterError, match="SystemExit: 3"):
        adapters.load(f"{path}:x")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import numpyy\n", "needs 'numpyy', which is not installed. Did you mean 'numpy'?"),
        ("import zz_nobody\n", "which is not installed; if that is a package: pip install zz_nobody"),
        ("import json\n\nTABLE = {}['nothing']\n", "KeyError: 'nothing'"),
        ("import json\njson.loads('{')\n", "JSONDecodeError"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_an_import_that_fails_says_where(tmp_path: Path, source: str, said: str) -> None:
    """At the innermost line that is the user's, and what stands there; a slip of the pen is no package to install."""
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(AdapterError) as failed:
        adapters.load(f"{path}:adapter")
    told, line = str(failed.value), source.count("\n")
    assert said in told
    assert told.endswith(f"\n  where   {path}:{line}: {source.splitlines()[-1]}")
    assert ("pip install" in told) == ("pip install" in said)


def test_a_missing_package_is_told_from_a_missing_module(tmp_path: Path) -> None:
    path = tmp_path / "needs.py"
    path.write_text("import a_package_nobody_has.part")
    with pytest.raises(MissingDependency, match="pip install a_package_nobody_has"):
        adapters.load(f"{path}:x")


def test_what_an_installed_package_lacks_is_no_slip_of_the_pen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in {"of_somebody.py": "import numpyy\n", "needs.py": "import of_somebody\n"}.items():
        (tmp_path / name).write_text(source)
    known = tmp_path / "of_somebody-1.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: of-somebody\nVersion: 1.0\n")
    (known / "top_level.txt").write_text("of_somebody\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependency, match=r"needs 'numpyy', .*; if that is a package: pip install numpyy"):
        adapters.load(f"{tmp_path / 'needs.py'}:x")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.delitem(sys.modules, "fsdpcheck.adapters.builtin.opacus", raising=False)
    monkeypatch.setattr(adapters, "_loaded", {})
    with pytest.raises(MissingDependency, match=r"pip install 'fsdpcheck\[opacus\]'"):
        adapters.load("opacus")


@pytest.mark.parametrize(("module", "accepted"), [('"counting"', False), ("__name__", True)])
def test_a_global_of_a_second_copy_of_the_file_is_refused(tmp_path: Path, module: str, accepted: bool) -> None:
    path = tmp_path / "counting.py"
    path.write_text(
        "from fsdpcheck.adapter import Features\nCOUNT = 0\n\nclass Mine:\n    name = 'counting'\n"
        f"    features = Features(frozenset(), rank_local=({module} + ':COUNT',))\n"
        "    def build(self, model, setup): ...\n"
    )
    if accepted:
        assert adapters.load(f"{path}:Mine").features.rank_local[0].endswith(":COUNT")
    else:
        with pytest.raises(AdapterError, match=r'wanted  a name that follows the module: f"\{__name__\}:COUNT"'):
            adapters.load(f"{path}:Mine")
