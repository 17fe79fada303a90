"""Files that ranks use: an order that nothing fixes is found by search and noted by simulate, and no other is."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdpcheck import search, simulate

Program = Callable[[Path, int], object]


def joined(program: Program, folder: Path) -> Callable[[], object]:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(folder, dist.get_rank())

    return whole


def text_if_there(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def read_too_early(folder: Path, rank: int) -> object:
    if rank == 0:
        (folder / "words").write_text("a b", encoding="utf-8")
    found = text_if_there(folder / "words")
    dist.barrier()
    if rank == 0:
        (folder / "words").unlink()
    return found


def saved_by_torch(folder: Path, rank: int) -> object:
    if rank == 0:
        torch.save({"step": 1}, folder / "state.pt")
    found = torch.load(folder / "state.pt")["step"]
    dist.barrier()
    if rank == 0:
        os.remove(folder / "state.pt")
    return found


def renamed_at_last(folder: Path, rank: int) -> object:
    if rank == 0:
        (folder / "words.part").write_text("a b", encoding="utf-8")
        os.replace(folder / "words.part", folder / "words")
    found = os.path.exists(folder / "words")
    dist.barrier()
    if rank == 0:
        os.unlink(folder / "words")
    return found


@pytest.mark.parametrize(
    ("program", "kind"), [(read_too_early, "order"), (saved_by_torch, "raised"), (renamed_at_last, "order")]
)
def test_a_file_that_is_read_too_early_is_found_and_noted(program: Program, kind: str, tmp_path: Path) -> None:
    one = simulate(joined(program, tmp_path), 2, show=False)
    assert one.failure is None, "the first order hides it"
    (note,) = [note for note in one.notes if "which came first" in note]
    assert note.startswith(f"order: which came first depended on the schedule: {tmp_path}{os.sep}")
    assert f"rank 0 wrote it at {__file__}:" in note
    assert any(void.startswith("ranks used a file in an order that nothing fixes") for void in one.voids)
    found = search(joined(program, tmp_path), 2)
    assert found.simulation.failure is not None
    assert found.simulation.failure.kind == kind
    assert 1 <= len(found.order) <= 2
    assert all(": read of " in decision or ": write of " in decision for decision in found.order)
    assert f", at {__file__}:" in found.simulation.failure.text


def after_a_barrier(folder: Path, rank: int) -> object:
    if rank == 0:
        (folder / "words").write_text("a b", encoding="utf-8")
    dist.barrier()
    found = text_if_there(folder / "words")
    dist.barrier()
    if rank == 0:
        (folder / "words").unlink()
    return found


def after_a_message(folder: Path, rank: int) -> object:
    told = torch.zeros(1)
    if rank == 0:
        (folder / "words").write_text("a b", encoding="utf-8")
        dist.send(told, 1)
        return ""
    dist.recv(told, 0)
    return text_if_there(folder / "words")


def after_a_group_is_made(folder: Path, rank: int) -> object:
    if rank == 0:
        (folder / "words").write_text("a b", encoding="utf-8")
    dist.distributed_c10d._get_default_store().set(f"ready {rank}", "")
    dist.distributed_c10d._get_default_store().wait(["ready 0"])
    return text_if_there(folder / "words")


def every_rank_its_own(folder: Path, rank: int) -> object:
    (folder / "of ranks").mkdir(exist_ok=True)
    own = folder / "of ranks" / f"{rank}.json"
    own.write_text(json.dumps({"rank": rank}), encoding="utf-8")
    return json.loads(own.read_text(encoding="utf-8"))["rank"]


def every_rank_reads_one(folder: Path, rank: int) -> object:
    return len(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")), text_if_there(folder / "none")


def every_rank_a_temporary_folder(folder: Path, rank: int) -> object:
    with tempfile.TemporaryDirectory() as own:
        (Path(own) / "words").write_text("a", encoding="utf-8")
        return text_if_there(Path(own) / "words")


def every_rank_appends(folder: Path, rank: int) -> object:
    with (folder / "log").open("a", encoding="utf-8") as log:
        return log.write(f"{rank}\n")


def every_rank_logs_to_its_own(folder: Path, rank: int) -> object:
    """logging opens the file while it holds a lock that is one for all ranks."""
    logger = logging.getLogger(f"{__name__} {rank}")
    logging._lock.acquire()
    try:
        handler = logging.FileHandler(folder / f"{rank}.log", mode="w")
    finally:
        logging._lock.release()
    logger.addHandler(handler)
    logger.error("begun")
    logger.removeHandler(handler)
    handler.close()
    return rank


LOCK = threading.Lock()
"""Of this module, and so of all ranks."""


def every_rank_under_a_lock(folder: Path, rank: int) -> object:
    with LOCK:
        (folder / f"{rank}").write_text("a", encoding="utf-8")
    return rank


@pytest.mark.parametrize(
    "program",
    [
        every_rank_logs_to_its_own,
        every_rank_under_a_lock,
        after_a_barrier,
        after_a_message,
        after_a_group_is_made,
        every_rank_its_own,
        every_rank_reads_one,
        every_rank_a_temporary_folder,
        every_rank_appends,
    ],
)
def test_files_in_order_and_files_of_one_rank_are_neither_noted_nor_void(program: Program, tmp_path: Path) -> None:
    one = simulate(joined(program, tmp_path), 2, show=False)
    assert one.failure is None, one.failure.text
    assert not [note for note in one.notes if "which came first" in note]
    assert not [void for void in one.voids if "file" in void]
    found = search(joined(program, tmp_path), 2)
    assert (found.proved, found.schedules) == (True, 1), found


def lists_what_others_make(folder: Path, rank: int) -> object:
    (folder / f"{rank}").write_text("", encoding="utf-8")
    found = len(os.listdir(folder))
    dist.barrier()
    (folder / f"{rank}").unlink()
    return found


def asks_for_a_folder(folder: Path, rank: int) -> object:
    if rank == 0:
        (folder / "made").mkdir()
    found = (folder / "made").exists()
    dist.barrier()
    if rank == 0:
        (folder / "made").rmdir()
    return found


def makes_what_another_makes(folder: Path, rank: int) -> object:
    try:
        (folder / "made").mkdir()
    except FileExistsError:
        return "late"
    return "first"


def reads_what_all_append(folder: Path, rank: int) -> object:
    every_rank_appends(folder, rank)
    dist.barrier()
    return (folder / "log").read_text(encoding="utf-8")[:2]


def looks_and_appends(folder: Path, rank: int) -> object:
    """Both may find that there is none, and append a head each."""
    log = folder / "log"
    if not log.exists():
        with log.open("a", encoding="utf-8") as lines:
            lines.write("head")
    dist.barrier()
    heads = log.read_text(encoding="utf-8").count("head")
    dist.barrier()
    if rank == 0:
        log.unlink()
    return heads


def test_a_file_that_is_looked_at_before_it_is_appended_to_is_searched(tmp_path: Path) -> None:
    found = search(joined(looks_and_appends, tmp_path), 2)
    assert found.simulation.failure is not None
    assert found.simulation.failure.kind == "order"
    assert {"2", "1"} <= set(found.simulation.failure.text.split())


def reads_while_another_appends(folder: Path, rank: int) -> object:
    if rank == 0:
        return every_rank_appends(folder, rank)
    return text_if_there(folder / "log")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (lists_what_others_make, "used a folder in an order that nothing fixes: "),
        (asks_for_a_folder, "used a folder in an order that nothing fixes: made"),
        (makes_what_another_makes, "used a folder in an order that nothing fixes: made"),
        (reads_what_all_append, "appended to a file in an order that nothing fixes: log"),
        (reads_while_another_appends, "appended to a file in an order that nothing fixes: log"),
    ],
)
def test_folders_and_appended_files_in_no_fixed_order_are_no_proof(program: Program, told: str, tmp_path: Path) -> None:
    for number, run in enumerate((simulate, search)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = run(joined(program, folder), 2, **{"show": False} if run is simulate else {})  # type: ignore[operator]
        assert any(told in void for void in found.voids), found.voids
        assert not getattr(found, "proved", False)


def test_a_file_that_one_order_leaves_to_the_next_is_no_proof(tmp_path: Path) -> None:
    def program(folder: Path, rank: int) -> object:
        if rank == 0:
            (folder / "left").write_text("a b", encoding="utf-8")
        return text_if_there(folder / "left")[:0]

    found = search(joined(program, tmp_path), 2)
    assert found.simulation.failure is None
    assert found.voids == ("file left of one order was there in the next",)


def test_a_dead_ranks_clean_up_is_not_held_up(tmp_path: Path) -> None:
    def program(folder: Path, rank: int) -> object:
        own = folder / f"scratch {rank}"
        own.write_text("a", encoding="utf-8")
        try:
            return dist.barrier() if rank == 0 else None
        finally:
            own.unlink()

    found = search(joined(program, tmp_path), 2)
    assert found.simulation.failure is not None
    assert found.simulation.failure.kind == "deadlock"
    assert list(tmp_path.iterdir()) == []
