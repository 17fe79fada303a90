"""Replay tokens: they survive the way there, and nothing that arrives instead of one does any harm."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.case import (
    BatchLayout,
    KernelCase,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    SamplerCase,
    TrainingCase,
    user_model,
)
from fsdpcheck.errors import InvalidToken, UsageError
from fsdpcheck.findings import tokens
from fsdpcheck.findings.tokens import Token, decode, encode
from fsdpcheck.judging.registry import chapters
from fsdpcheck.session import run
from tests.common.tables import each

CASE = TrainingCase(
    model=ModelSpec(layers=(LayerSpec(width=4, bias=True), LayerSpec(width=3, activation="relu")), units=(1,)),
    mesh=MeshSpec(dp_shard=3),
    layout=BatchLayout(kind="ragged", batch_size=3, counts=(2, 0, 1)),
    seed=12345678901234567890,
)
TOKEN = Token("training.plain", "fully_shard", CASE, ("fsdpcheck.impl.faults:averaged_twice",), "reversed", "processes")

VERSION_1 = (
    "v1:AAAAgW6b5hV4-VmiiuirRsoZqEUEXfKJMVI-MdIx0DHEl1ngpQ05GcV4EGQUSLDgyCcmtTpo-qHFJjGZzJi8TGaIM5"
    "cZGhmbmJqZW1gaIFijGY-EjIdcjyJlPBy1fCLQkERg4o4vKc8E1l_w7FlSBKz0QfU8uPYHuQSoN6UUlPYRTYdaAIX4R0c"
)
"""A token as version 1 wrote it, of cases of version 1: it names a release, and is never read as something else."""
GOLDEN = (
    "v2:AAAAfDc5pZl4-fgd9xKrRsquqOXsIMq8xkiZ10jHQMcQXw6GF-zk5F7jQZB7IcFC88xrUquD5hJoXUffMsSYvD"
    "LEEGchYmhkbGJqZm5haYBgjZYr1C5XkNtaSOUKjpYgpNRITYkvKc8EthngpU9JEbBhCGoLgluISiiegjcvawGVdY8y"
)
"""A token as version 2 wrote it. It must stay readable: change the version rather than this line."""


def _wrapped(data: bytes, version: int = 2) -> str:
    """``data`` compressed and framed as a token is."""
    deflate = zlib.compressobj(9, zdict=tokens._DICTIONARY)
    packed = deflate.compress(data) + deflate.flush()
    body = struct.pack(">II", len(packed), zlib.crc32(packed)) + packed
    return f"v{version}:{base64.urlsafe_b64encode(body).decode().rstrip('=')}"


def _forged(**changes: Any) -> str:
    data = {
        "law": "training.plain",
        "adapter": "fully_shard",
        "case": json.loads(CASE.to_json()),
        "installs": [],
        "schedule": "forward",
        "engine": "simulated",
    }
    return _wrapped(json.dumps({**data, **changes}).encode())


def test_a_token_comes_back_as_it_went() -> None:
    assert decode(encode(TOKEN)) == TOKEN


@pytest.mark.parametrize("around", ["'{}'", '"{}"', "  {}\n"])
def test_quotes_and_blanks_around_a_token_do_no_harm(around: str) -> None:
    assert decode(around.format(encode(TOKEN))) == TOKEN


def test_a_token_of_this_version_stays_readable() -> None:
    assert decode(GOLDEN) == TOKEN


def test_a_token_fits_on_a_line() -> None:
    assert len(encode(TOKEN)) < 250


def test_a_token_cut_short_is_told_from_garbage() -> None:
    text = encode(TOKEN)
    for length in range(len("v2:"), len(text) - 2):
        with pytest.raises(InvalidToken, match="cut short"):
            decode(text[:length])


def test_a_changed_character_is_noticed() -> None:
    text = encode(TOKEN)
    for place in range(len("v2:") + 11, len(text) - 1):
        changed = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(InvalidToken, match="damaged"):
            decode(changed)


@each(
    ("text", "said"),
    [
        ("", "not a replay token"),
        ("hello", "not a replay token"),
        ("v2:", "cut short"),
        ("v2:!!!", "not a replay token"),
        ("v1:AAAA", "version 1, this fsdpcheck reads version 2: replay it with the release that printed it"),
        (VERSION_1, "version 1, this fsdpcheck reads version 2: replay it with the release that printed it"),
        ("v2:" + "A" * (1 << 16), "more than 65536"),
        (_wrapped(b"not json"), "no JSON of ours"),
        (_wrapped(b"[1]"), "the token holds list"),
        (_wrapped(b"[" * 100_000), "no JSON of ours"),
        (_wrapped(b"1" * 10_000), "no JSON of ours"),
        (_wrapped(b'{"law": NaN}'), "none of ours"),
        (_wrapped(b"\xff\xfe"), "no JSON of ours"),
        (_forged(extra=1), "wanted exactly"),
        (_forged(law=1), "'law' is no short text"),
        (_forged(adapter="x" * 1001), "'adapter' is no short text"),
        (_forged(installs="os:system"), "'installs' is no short list"),
        (_forged(installs=[1]), "'installs' is no short list"),
        (_forged(schedule="sideways"), "its schedule is 'sideways'"),
        (_forged(case={}), "case is not valid"),
        (_forged(case=None), "case is not valid"),
        (_forged(case={**json.loads(CASE.to_json()), "mesh": {"dp_shard": 10**9}}), "case is not valid"),
    ],
)
def test_what_is_no_token_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidToken, match=said):
        decode(text)


def test_a_case_too_large_to_run_is_refused() -> None:
    case = json.loads(CASE.to_json())
    case["mesh"]["dp_shard"] = 10**6
    with pytest.raises(InvalidToken, match="case is not valid"):
        decode(_forged(case=case))


def test_a_zip_bomb_is_not_unpacked() -> None:
    text = _wrapped(b" " * (64 << 20))
    assert len(text) < tokens.MAX_TOKEN * 2
    with pytest.raises(InvalidToken):
        decode(text)
    with pytest.raises(InvalidToken, match="unpacks to more than"):
        decode(_wrapped(b" " * (tokens.MAX_JSON + 1)))


def test_a_builtin_adapter_and_a_fault_of_ours_are_trusted() -> None:
    assert tokens.trusted(TOKEN) == TOKEN


def test_a_foreign_adapter_must_be_repeated() -> None:
    foreign = replace(TOKEN, adapter="os:system")
    with pytest.raises(InvalidToken, match="nothing was imported"):
        tokens.trusted(foreign)
    assert tokens.trusted(foreign, adapter="os:system").adapter == "os:system"


def test_the_adapter_of_the_command_line_overrules_the_tokens() -> None:
    assert tokens.trusted(replace(TOKEN, adapter="evil.py:x"), adapter="reference").adapter == "reference"


@pytest.mark.parametrize("name", ["os:abort", "fsdpcheck.impl.faultsx:y", "fsdpcheck.impl.faults"])
def test_a_foreign_install_must_be_repeated(name: str) -> None:
    foreign = replace(TOKEN, installs=(name,))
    with pytest.raises(InvalidToken, match="nothing was imported"):
        tokens.trusted(foreign)
    assert tokens.trusted(foreign, installs=[name]).installs == (name,)


def test_an_install_of_the_command_line_is_added() -> None:
    assert tokens.trusted(TOKEN, installs=["mine:it"]).installs == (*TOKEN.installs, "mine:it")


def test_tokens_are_found_in_any_text_once_each(tmp_path: Path) -> None:
    one, two = encode(TOKEN), encode(replace(TOKEN, law="padding.zero"))
    file = tmp_path / "log.txt"
    file.write_text(f"replay with: fsdpcheck replay '{one}'\n{json.dumps({'token': two})}\nagain {one}\n")
    assert tokens.tokens_in(file) == [one, two]


@pytest.mark.parametrize("content", ["", "nothing here", "v2:short"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "log.txt"
    file.write_text(content)
    with pytest.raises(InvalidToken, match="holds no replay token"):
        tokens.tokens_in(file)


@pytest.mark.parametrize(("text", "is_token"), [("v1:AAAA", True), (" 'v12:x'", True), ("v1.json", False), ("", False)])
def test_a_token_is_told_from_a_file_name(text: str, is_token: bool) -> None:
    assert tokens.looks_like_token(text) is is_token


def test_whatever_lies_where_a_report_is_looked_for_is_refused_in_one_line(tmp_path: Path) -> None:
    """A folder, a pipe, a device, no text, a report with any part of it damaged: nothing is waited for or run."""
    pipe, file = tmp_path / "pipe", tmp_path / "report.json"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe, Path("/dev/zero"), tmp_path / "missing", Path("\0"), Path("x" * 5000)):
        with pytest.raises(InvalidToken, match=r"wanted a token \(v2:...\) or a file that holds one, got"):
            tokens.tokens_in(path)
    token, draw = encode(TOKEN), random.Random(0)
    report = json.dumps({"verdicts": [{"finding": {"token": token}}]}).encode()
    texts = [b"", b"\xff\xfe", b"[" * 100_000, b"v2:" + b"A" * 100_000, b"v2:" + b"A" * 40, b"v99999:" + b"A" * 40]
    for _ in range(120):
        place, size = draw.randrange(len(report)), draw.randrange(4)
        texts.append(report[:place] + draw.randbytes(draw.randrange(4)) + report[place + size :])
    refused = []
    for text in texts:
        file.write_bytes(text)
        try:
            assert all(decode(found) == TOKEN for found in tokens.tokens_in(file))
        except InvalidToken as error:
            refused.append(str(error))
    assert len(refused) > 40
    assert [text for text in refused if len(text.splitlines()) != 1 or len(text) > 1000] == []


def test_a_token_names_laws_and_faults_that_are_registered_and_nothing_else() -> None:
    """No other attribute of the faults' package, so that nothing of it is called."""
    for name in ("install", "importlib", "ALL", "Fault", "__doc__", "no_such", "a:b", "", "averaged_twice.target"):
        token = replace(TOKEN, installs=(f"{tokens.FAULTS}{name}",))
        with pytest.raises(UsageError, match="unknown fault"):
            run.replayed(tokens.trusted(token), "simulated")
    for name in ("training.no_such", "", "__class__", "\x1b[31m"):
        with pytest.raises(UsageError, match="is about the law"):
            run.replayed(tokens.trusted(replace(TOKEN, law=name)), "simulated")


KEPT: dict[str, str] = json.loads(Path(__file__).parents[1].joinpath("tokens.json").read_text())
"""Tokens of 2026-11-22, of all chapters and kinds of cases -> 16 digits of a SHA-256 of what each says."""


def test_tokens_of_the_first_form_mean_the_same_for_ever() -> None:
    assert len(KEPT) == 300
    for text, meaning in KEPT.items():
        token = decode(text)
        said = {**vars(token), "case": json.loads(token.case.to_json()), "installs": list(token.installs)}
        assert hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16] == meaning, text
        assert decode(encode(token)) == token


@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng packs the same data otherwise")
def test_tokens_of_the_first_form_are_written_the_same() -> None:
    assert [text for text in KEPT if encode(decode(text)) != text] == []


def test_the_kept_tokens_are_of_every_kind() -> None:
    kept = [decode(text) for text in KEPT]
    own = [name for name, law in chapters().items() if not law.file]  # others' tests load laws of their own
    assert {name.partition(".")[0] for name in own} == {token.law.partition(".")[0] for token in kept}
    for kind in (SamplerCase, KernelCase):
        assert sum(isinstance(token.case, kind) for token in kept) >= 10
    assert {token.schedule for token in kept} == {"forward", "reversed"}
    assert {token.engine for token in kept} == {"simulated", "processes", "torchrun"}
    assert any(token.installs for token in kept)
    assert any(user_model(token.case) is not None for token in kept)
