"""Replay tokens: one run as a string, from any machine to any other. Data only: nothing in a token is ever executed.

A token is ``v2:`` and base64url of a header (length and CRC-32 of what follows) and zlib-compressed JSON. The header
comes first, so a token that lost its end in a terminal or a mail is told from garbage.

What a token *names* is imported only when it is part of fsdpcheck: a built-in adapter, a law of fsdpcheck.properties, a
fault of fsdpcheck.impl.faults. Anything else the user has to repeat on the command line.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shlex
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from fsdpcheck import adapters
from fsdpcheck.case import Case, TrainingCase, UserModelSpec, from_json, user_model
from fsdpcheck.errors import InvalidCase, InvalidToken, reading
from fsdpcheck.loading import references

VERSION: Final = 2
MAX_TOKEN: Final = 1 << 16  # characters
MAX_JSON: Final = 1 << 20  # bytes; zlib can swell a thousandfold

Schedule = Literal["forward", "reversed"]
FAULTS: Final = "fsdpcheck.impl.faults:"
_HEADER = struct.Struct(">II")
_DICTIONARY = (
    b'"forward","reversed","fsdpcheck.impl.faults:","law":"plain.private.padding.norms.collectives.deferred."'
    b'"reference","fully_shard","fsdp1","opacus","engine":"processes","replicated","strided","sampler","ragged",'
    b'"leaky_relu","hardtanh","abs","relu","gelu","silu","tanh","sigmoid","softmax","hinge","l1","cross_entropy",'
    b'"attention","group_norm","rms_norm","conv","volume","image","signal","bags","adam","halving","premultiply",'
    b'"real","resume":true,"unclipped","exact","probe","deferred","partial","mixed","adamw","float32","sequence",'
    b'"tokens","mean","adapter":"case":{"arithmetic":{"averaging":"divide","dtype":"float64","inputs":1,'
    b'"numbers":"grid","project":true,"weights":1},"layout":{"batch_size":1,"counts":[],"drop_last":false,'
    b'"kind":"contiguous","shuffle":false},"mesh":{"dp_replicate":1,"dp_shard":1,"reshard_after_forward":true},'
    b'"model":{"features":1,"input":"vector","layer_norm":false,"layers":[{"activation":"identity","bias":false,'
    b'"dilation":1,"frozen":"none","groups":1,"kernel":1,"kind":"linear","padding":0,"stride":1,"width":1}],'
    b'"length":1,"padding_idx":null,"tied":null,"units":[],"vocabulary":2},"seed":0,"step":{"clip_norm":1,'
    b'"clipping":"none","contribution":"complete","loss":"mse","max_grad_norm":null,"micro_batches":1,"normaliser":1,'
    b'"norms":"immediate","optimizer":{"kind":"sgd","lr_exponent":0,"momentum":0.0,"schedule":"constant",'
    b'"weight_decay":0.0},"reduction":"sum","resume":false,"steps":1,"sync_every":true},"version":2},'
    b'"engine":"simulated","installs":[],"law":"'
)
"""Preset dictionary of version 2: what most tokens hold, the commonest last (RFC 1950). Frozen, or old tokens rot."""
_References = tuple[str, str, str, str]
_OWN: Final = ("model", "batch", "loss", "optimizer")
"""Options that name what is a user's own, in the order of ``UserModelSpec.references``."""
_SHAPE = re.compile(r"v(\d{1,6}):([A-Za-z0-9_=-]*)")


@dataclass(frozen=True)
class Token:
    """One run of one law: what ``fsdpcheck replay`` needs. ``engine`` is a hint, overruled by ``--engine``."""

    law: str
    adapter: str
    case: Case
    installs: tuple[str, ...] = ()
    schedule: Schedule = "forward"
    engine: str = "simulated"


def encode(token: Token) -> str:
    """The token as text, 100 to 300 characters; ``decode`` is its inverse."""
    data = {
        "law": token.law,
        "adapter": token.adapter,
        "case": json.loads(token.case.to_json()),
        "installs": list(token.installs),
        "schedule": token.schedule,
        "engine": token.engine,
    }
    deflate = zlib.compressobj(9, zdict=_DICTIONARY)
    packed = deflate.compress(json.dumps(data, separators=(",", ":"), sort_keys=True).encode()) + deflate.flush()
    body = _HEADER.pack(len(packed), zlib.crc32(packed)) + packed
    return f"v{VERSION}:{base64.urlsafe_b64encode(body).decode().rstrip('=')}"


def command(token: str, adapter: str, installs: Iterable[str] = (), laws: Iterable[str] = ()) -> str:
    """The command line that runs a token's case again; it repeats whatever a token alone may not import.

    ``laws``: files with laws of a user's own.
    """
    parts = ["fsdpcheck", "replay", f"'{token}'"]
    own = _user_model(token)
    for option, name in zip(_OWN, own.references, strict=True) if own else ():
        parts += [f"--{option}", shlex.quote(name)] if name else []
    if not adapters.is_builtin(adapter):
        parts += ["--adapter", shlex.quote(adapter)]
    for name in installs:
        parts += [] if name.startswith(FAULTS) else ["--install", shlex.quote(name)]
    for file in laws:
        parts += ["--laws", shlex.quote(file)] if file else []
    return " ".join(parts)


def _user_model(token: str) -> UserModelSpec | None:
    """The user's model that a token's case is about; none of a token that another release wrote."""
    try:
        return user_model(decode(token).case)
    except InvalidToken:
        return None


def decode(text: str) -> Token:
    """The token that ``text`` is. Raises InvalidToken saying what is wrong; runs and imports nothing."""
    return _token(_json(_unpacked(text.strip().strip("'\""))))


def tokens_in(path: Path) -> list[str]:
    """Every token in a file: a JSON report, a journal, a log, or the bare token. Raises InvalidToken when none is."""
    try:
        text = reading.text(path, errors="replace")
    except reading.Unreadable as error:
        raise InvalidToken(
            f"wanted a token (v{VERSION}:...) or a file that holds one, got {str(path)[:80]!r}: {error}"
        ) from error
    found = list(dict.fromkeys(match.group() for match in re.finditer(r"\bv\d{1,6}:[A-Za-z0-9_=-]{16,}", text)))
    if not found:
        raise InvalidToken(f"{path} holds no replay token (v{VERSION}:...)")
    return found


def looks_like_token(text: str) -> bool:
    """Whether ``text`` is meant as a token rather than as the name of a file."""
    return re.match(r"\s*['\"]?v\d+:", text) is not None


def trusted(
    token: Token, adapter: str | None = None, installs: Sequence[str] = (), own: _References = ("", "", "", "")
) -> Token:
    """``token`` with what the user repeated in place of what it names. ``own``: model, batch, loss and optimizer.

    Raises InvalidToken when something would have to be imported that is neither ours nor repeated.
    """
    if adapter is None and not adapters.is_builtin(token.adapter):
        raise InvalidToken(
            f"the token names the adapter {token.adapter!r}, which is not part of fsdpcheck; nothing was imported."
            f" If you trust it, repeat it: --adapter {token.adapter!r}"
        )
    foreign = [name for name in token.installs if not name.startswith(FAULTS) and name not in installs]
    if foreign:
        raise InvalidToken(
            f"the token installs {foreign[0]!r}, which is not a fault of fsdpcheck; nothing was imported."
            f" If you trust it, repeat it: --install {foreign[0]!r}"
        )
    extra = tuple(name for name in installs if name not in token.installs)
    token = replace(token, case=_trusted_model(token.case, own))
    return replace(token, adapter=adapter or token.adapter, installs=token.installs + extra)


def _trusted_model(case: Case, repeated: _References) -> Case:
    """The case on what the user repeated, where it names a model of somebody's own."""
    own = user_model(case)
    if not isinstance(case, TrainingCase) or own is None:
        if any(repeated):
            raise InvalidToken(
                "the token's case is on no model of your own; leave out --model, --batch, --loss and --optimizer"
            )
        return case
    for option, name, given in zip(_OWN, own.references, repeated, strict=True):
        if bool(name) != bool(given):
            raise InvalidToken(
                f"the token names the {option} {name!r}, which is not part of fsdpcheck; nothing was imported."
                f" If you trust it, repeat it: --{option} {name!r}"
                if name
                else f"the token names no {option}; leave out --{option}"
            )
    build, batch, loss, optimizer = (references.canonical(name) if name else "" for name in repeated)
    own = replace(own, build=build, batch=batch, loss=loss, optimizer=optimizer)
    return replace(case, model=replace(case.model, own=own))


def _unpacked(text: str) -> bytes:
    if len(text) > MAX_TOKEN:
        raise InvalidToken(f"the token has {len(text)} characters, more than {MAX_TOKEN}: it is none of ours")
    shape = _SHAPE.fullmatch(text)
    if shape is None:
        raise InvalidToken(f"not a replay token: wanted v{VERSION}: and letters, digits, - and _, got {text[:40]!r}")
    if int(shape[1]) != VERSION:
        raise InvalidToken(
            f"the token is of version {shape[1]}, this fsdpcheck reads version {VERSION}: replay it with the release"
            " that printed it"
        )
    body = _decoded(shape[2].rstrip("="))
    if len(body) < _HEADER.size:
        raise InvalidToken(f"the token is cut short: only {len(text)} characters are left of it")
    length, checksum = _HEADER.unpack_from(body)
    packed = body[_HEADER.size :]
    if len(packed) < length:
        raise InvalidToken(f"the token is cut short: {len(packed)} of {length} bytes are there; copy the whole line")
    if len(packed) > length or zlib.crc32(packed) != checksum:
        raise InvalidToken("the token is damaged: its checksum does not match; copy it again")
    return _inflated(packed)


def _decoded(digits: str) -> bytes:
    whole = digits[: len(digits) - 1] if len(digits) % 4 == 1 else digits  # one digit alone carries no byte
    try:
        return base64.urlsafe_b64decode(whole + "=" * (-len(whole) % 4))
    except binascii.Error as error:
        raise InvalidToken(f"the token is damaged: {error}") from error


def _inflated(packed: bytes) -> bytes:
    inflate = zlib.decompressobj(zdict=_DICTIONARY)
    try:
        data = inflate.decompress(packed, MAX_JSON)
    except zlib.error as error:
        raise InvalidToken(f"the token is damaged: {error}") from error
    if not inflate.eof:
        raise InvalidToken(f"the token unpacks to more than {MAX_JSON} bytes, or has no end: it is none of ours")
    return data


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data, parse_constant=lambda name: _refuse(f"it holds {name}"))
    except (ValueError, RecursionError) as error:
        raise InvalidToken(f"the token holds no JSON of ours: {error}") from error
    wanted = {"law", "adapter", "case", "installs", "schedule", "engine"}
    if not isinstance(found, dict) or set(found) != wanted:
        got = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise InvalidToken(f"the token holds {got}, wanted exactly {sorted(wanted)}")
    return found


def _token(data: dict[str, Any]) -> Token:
    for name in ("law", "adapter", "engine"):
        if not isinstance(data[name], str) or len(data[name]) > 1000:
            _refuse(f"its {name!r} is no short text")
    installs = data["installs"]
    if not isinstance(installs, list) or not all(isinstance(name, str) for name in installs) or len(installs) > 16:
        _refuse("its 'installs' is no short list of texts")
    if data["schedule"] not in get_args(Schedule):
        _refuse(f"its schedule is {str(data['schedule'])[:40]!r}, wanted one of {get_args(Schedule)}")
    return Token(data["law"], data["adapter"], _case(data["case"]), tuple(installs), data["schedule"], data["engine"])


def _case(data: Any) -> Case:
    try:
        return from_json(json.dumps(data))
    except InvalidCase as error:
        raise InvalidToken(f"the token's case is not valid: {error}") from error


def _refuse(what: str) -> None:
    raise InvalidToken(f"the token is none of ours: {what}")
