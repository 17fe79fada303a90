"""A process that answers: what it gives, what it raises, and how its end is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpcheck.errors import AdapterError, NoProgress, NotPlain, OtherWorldSize, UsageError
from fsdpcheck.processes.limit import Limit
from fsdpcheck.processes.remote import Died, Remote, Unexpected


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    remote = Remote("answering")
    yield remote
    remote.close()


def test_questions_are_answered_in_another_process(remote: Remote, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = remote.ask("one"), remote.ask(("two", 2))
    assert first == (second[0], "one")
    assert second == (first[0], ("two", 2))
    assert first[0] != os.getpid()
    remote.ask("print")
    assert capfd.readouterr().err == "printed there\n"


def test_errors_of_ours_are_raised_again_and_others_are_told_with_their_traceback(remote: Remote) -> None:
    with pytest.raises(AdapterError, match="its own fault"):
        remote.ask("raise")
    with pytest.raises(Unexpected, match=r"(?s)Traceback .*ZeroDivisionError: a bug"):
        remote.ask("break")
    with pytest.raises(NotPlain, match="wanted numbers, strings, tensors"):
        remote.ask("hide")
    assert remote.ask("still")[1] == "still"


def test_an_answer_may_ask_back_and_is_given_what_that_raises(remote: Remote) -> None:
    def served(asked: object) -> object:
        if asked == "there":
            raise OtherWorldSize("not here", 3)
        return asked, "at once"

    assert remote.ask(("ask back", "what"), served) == ("it said", ("what", "at once"))
    with pytest.raises(OtherWorldSize, match="not here") as raised:
        remote.ask(("ask back", "there"), served)
    assert raised.value.there == 3
    with pytest.raises(NotPlain, match="wanted numbers, strings, tensors"):
        remote.ask(("ask back", "what"), lambda _: len)
    with pytest.raises(UsageError, match="asks 'what' of one who answers nothing"):
        remote.ask(("ask back", "what"))
    with pytest.raises(KeyboardInterrupt):
        remote.ask(("ask back", "what"), _interrupted)
    assert not remote.is_open


def _interrupted(_: object) -> object:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("question", "end"),
    [("die", "it was ended by SIGKILL\nit wrote last:\nfamous last words"), ("leave", "it exited with code 7 ")],
)
def test_its_end_is_told_and_nothing_of_it_is_left(remote: Remote, question: str, end: str) -> None:
    folder = remote._folder
    assert folder.exists()
    with pytest.raises(Died) as death:
        remote.ask(question)
    assert str(death.value).startswith(end)
    assert not remote.is_open
    assert not folder.exists()


def test_one_that_never_comes_back_is_ended_with_its_stacks(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_limit", Limit(0.3, 0.0))
    with pytest.raises(NoProgress, match=r"(?s)no progress: .*answering.py\", line \d+ in _answer"):
        remote.ask("compute")
    assert not remote.is_open


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Whatever it is in the middle of."""
    import subprocess
    import sys

    from tests.common.commands import environment

    program = (
        "import os, signal\n"
        "from fsdpcheck.processes.remote import Remote\n"
        "remote = Remote('answering')\n"
        "print(remote.ask('who')[0], flush=True)\n"
        "remote.send('compute')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment(), **path}, stdout=subprocess.PIPE, text=True
    )
    process = os.pidfd_open(int(done.stdout)) if Path(f"/proc/{int(done.stdout)}").exists() else None
    if process is not None:  # it is ending: this returns when it has
        import select

        select.select([process], [], [])
        os.close(process)
