"""Files that are no dumps, broken or hostile: each is told in a few lines, and none is run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.errors import UsageError
from fsdpcheck.traces import reading
from tests.common.dumps import dump, entry, write

WHOLE = dump([entry("nccl:all_reduce", 1)], {"0": (0,)})


def _changed(**changes: Any) -> dict[str, Any]:
    (first,) = WHOLE["entries"]
    return {**WHOLE, "entries": [{name: value for name, value in {**first, **changes}.items() if value is not None}]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "it is a value of type list, wanted dict"),
        ({}, "it has no 'version'"),
        ({**WHOLE, "version": "3.0"}, "its version is '3.0', wanted 2.x"),
        ({**WHOLE, "entries": {}}, "it.entries is a value of type dict, wanted list"),
        ({**WHOLE, "entries": [7]}, r"entries\[0\] is a value of type int, wanted dict"),
        ({**WHOLE, "pg_config": {"0": {}}}, r"pg_config\['0'\] has no 'ranks'"),
        (_changed(collective_seq_id=None), r"entries\[0\] has no 'collective_seq_id'"),
        (_changed(collective_seq_id=True), r"entries\[0\].collective_seq_id is a value of type bool, wanted int"),
        (_changed(profiling_name="all reduce"), "wanted backend:operation"),
        (_changed(process_group=["0"]), "wanted a name and a description"),
        (_changed(input_sizes=[[1], [2]]), "has 2 input_sizes and 1 input_dtypes"),
        (_changed(input_sizes=[["x"]]), "has a tensor that is none"),
        (_changed(frames=[{"filename": "train.py"}]), r"entries\[0\].frames has no 'line'"),
    ],
)
def test_a_dump_that_is_none_is_told_by_its_first_wrong_place(tmp_path: Path, data: Any, why: str) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(data, protocol=2))
    with pytest.raises(UsageError, match=why) as told:
        reading.read([tmp_path])
    assert [line.split()[0] for line in str(told.value).split("\n")[1:]] == ["got", "wanted", "where", "next"]
    (tmp_path / "rank_0").unlink()
    (tmp_path / "rank_0.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=why):
        reading.read([tmp_path])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it holds no JSON"),
        (b"\x80\x02", "its pickle is broken: EOFError"),
        (pickle.dumps(WHOLE, protocol=2)[:200], "its pickle is broken"),
        (b"\x80\x02cos\nsystem\nU\x02ls\x85R.", "its pickle names os.system, and a dump names nothing: it was not run"),
        (b"\xff\xfe", "it is neither a pickle nor UTF-8"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"version": NaN}', "NaN is no JSON number"),
    ],
)
def test_bytes_that_are_none_are_told(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(UsageError, match=why):
        reading.read([tmp_path])


def test_folders_and_names_that_tell_no_rank_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no dumps are in this folder\n  got     no file"):
        reading.read([tmp_path])
    (tmp_path / "README").write_text("")
    with pytest.raises(UsageError, match="no dumps are in this folder\n  got     README"):
        reading.read([tmp_path])
    with pytest.raises(UsageError, match="holds no JSON"):
        reading.read([tmp_path / "README"])
    (tmp_path / "named.json").write_text("{}")
    with pytest.raises(UsageError, match="no rank is at the end of its name"):
        reading.read([tmp_path / "named.json"])
    write(tmp_path, {0: WHOLE})
    assert reading.read([tmp_path]).world_size == 1, "other files of the folder are left alone"
    (tmp_path / "other_0").write_bytes(pickle.dumps(WHOLE))
    with pytest.raises(UsageError, match=r"it is a second dump of rank 0, beside .*nccl_trace_rank_0"):
        reading.read([tmp_path])
    assert reading.read([tmp_path / "other_0"]).world_size == 1
    with pytest.raises(UsageError, match="no regular file"):
        reading.read([Path("/dev/null")])


def test_numbers_that_are_no_ranks_are_told(tmp_path: Path) -> None:
    (tmp_path / "rank_20261123").write_bytes(pickle.dumps(WHOLE))
    with pytest.raises(UsageError, match="the dumps tell of 20261124 ranks"):
        reading.read([tmp_path])


def test_dumps_of_older_releases_lack_fields(tmp_path: Path) -> None:
    """As torch 2.4 wrote them."""
    newer = ("is_p2p", "timeout_ms", "thread_name", "retired", "p2p_seq_id", "frames")
    old = dict.fromkeys(newer)
    write(tmp_path, {0: {**_changed(**old), "version": "2.1", "pg_config": {}}})
    assert [call.op for call in reading.read([tmp_path]).traces[0]] == ["all_reduce"]
