"""Settings: values that a process or a thread has once, each with how it is read and put back.

The table is generated: every setter of torch and of Python's own modules for which a getter is found by its name, and
which was seen to give back what it was given. What has no such pair, or is not read by a plain call, stands below.
"""

from __future__ import annotations

import decimal
import functools
import gc
import importlib
import itertools
import locale
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import torch

from fsdpcheck.compat import torch_private

_HOMES: Final = (
    "torch", "torch._C", "torch._C._functorch", "torch.distributed", "numpy", "sys", "gc", "threading", "decimal",
    "socket",
)  # fmt: skip
_GETTERS: Final = (
    "{a}get{b}", "get{b}", "_get{b}", "{a}{c}", "{a}{c}_enabled", "_{c}", "is{b}", "_is{b}", "is{b}_enabled",
    "_is{b}_enabled", "are{b}", "are{b}_enabled", "{a}is{b}", "{a}get{b}_enabled",
)  # fmt: skip
"""What a getter may be called whose setter is ``{a}set{b}``; ``c`` is b without its underscore."""

LEFT_OUT: Final = {
    "torch.set_rng_state": "a random stream: kept for each rank, and drawing from it is no setting",
    "torch.set_default_device": "read below: its getter gives a device where none is set",
    "torch._C._set_default_dtype": "the same as torch.set_default_dtype",
    "torch._C._set_deterministic_algorithms": "read below: it takes a second flag",
    "torch._C._set_graph_exec_group": "reads and writes what CUDA graphs capture",
    "torch._C._accelerator_hooks_set_current_device": "may start CUDA; devices are kept for each rank",
    "torch._C._set_thread_name": "a name that debuggers show",
    "torch._C.set_anomaly_enabled": "read below: it takes a second flag",
    "torch.set_anomaly_enabled": "the same",
    "torch._C._set_float32_matmul_precision": "the same as torch.set_float32_matmul_precision",
    "torch._C._set_cublas_allow_tf32": "the same, as a flag",
    "torch._C._set_warnAlways": "the same as torch.set_warn_always",
    "torch.set_deterministic_debug_mode": "another way to say torch.use_deterministic_algorithms",
    "torch._C._jit_set_nvfuser_enabled": "does nothing any more, and says so on stderr at each call",
    "torch._C._jit_set_nvfuser_horizontal_mode": "the same",
    "torch._C._jit_set_nvfuser_single_node_mode": "the same",
    "decimal.setcontext": "read below: a context counts what was computed with it",
    "torch.set_num_interop_threads": "may be called once in a process",
    "torch._C.set_num_interop_threads": "the same",
    "socket.sethostname": "of the machine, not of the process",
    "sys.setprofile": "read below: to write back what a profiler in C is would end it",
    "sys.settrace": "the same, of tracers",
    "threading.setprofile": "the same",
    "threading.settrace": "the same",
}
"""Setters that are no entry of the table, and why."""

_OF_GPUS: Final = "_cuda_"
"""How names of torch._C begin that are no entries either: to ask for some starts CUDA (the size of TunableOp's rotating
buffer), after which no process that is forked can use a GPU. Seen with torch 2.11 on an H200."""


Scope = Literal["process", "thread", "rank"]


@dataclass(frozen=True, slots=True)
class Setting:
    """``read() -> value``, ``write(value)`` puts it back; None: what is not put back costs the thread or the worker.

    ``scope``: "process", what all threads share; "thread", what a rank's thread may have of its own; "rank", what is
    swapped at each hand-over (simulation/globals.py). Those that are not the process's are read on each rank.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    scope: Scope = "thread"

    def told(self, was: Any, now: Any) -> str:
        """What is left, in words: "torch.is_anomaly_enabled() on"."""
        if isinstance(was, bool) and isinstance(now, bool):
            return f"{self.name} {'on' if now else 'off'}"
        if isinstance(was, dict) and isinstance(now, dict):
            if not all(isinstance(key, str | bytes) for key in {*was, *now}):
                return f"{self.name} changed ({len(now)} entries, were {len(was)})"
            keys = sorted(_text(key) for key in {*was, *now} if was.get(key, _short) != now.get(key, _short))
            return f"{self.name} changed: {', '.join(keys[:5])}{', ...' * (len(keys) > 5)}"
        if isinstance(was, list | set):
            return f"{self.name} changed ({len(now)} entries, were {len(was)})"
        return f"{self.name} at {_short(now)} (was {_short(was)})"


def _text(key: object) -> str:
    return os.fsdecode(key) if isinstance(key, bytes) else str(key)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache
def table() -> tuple[Setting, ...]:
    """Every setting, by name; made at the first call, which writes back what it reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # a deprecated getter has a successor that is in the table
        found = {one.name: one for home in _HOMES for one in _pairs(importlib.import_module(home))}
    for one in itertools.chain(_of_torch(), _of_python()):
        found[one.name] = one
    return tuple(found.values())


def _pairs(home: ModuleType) -> Iterator[Setting]:
    """The settings whose getter and setter both are plain calls of one module."""
    for setter in sorted(dir(home)):
        match = re.fullmatch(r"(\w*_)?set(_?[a-z]\w*)", setter)
        if match is None or setter.startswith(_OF_GPUS) or f"{home.__name__}.{setter}" in LEFT_OUT:
            continue
        a, b = match[1] or "", match[2]
        names = (form.format(a=a, b=b, c=b.removeprefix("_")) for form in _GETTERS)
        special = re.fullmatch(r"_set_sdp_use_(\w+)", setter)
        names = (f"_get_{special[1]}_sdp_enabled",) if special else names  # type: ignore[assignment]
        for getter in dict.fromkeys(names):
            if found := _tried(home, getter, setter):
                yield from found
                break


def _tried(home: ModuleType, getter: str, setter: str) -> list[Setting]:
    """The setting of two names, if they are one; one for each device where both ask for one."""
    read, write = getattr(home, getter, None), getattr(home, setter)
    if not callable(read) or not callable(write) or isinstance(read, type) or isinstance(write, type):
        return []
    name = f"{_public(home, getter, read)}.{getter}"
    for arguments in ((), *((device,) for device in ("cpu", "cuda"))):
        one = _spelled(f"{name}({', '.join(map(repr, arguments))})", read, write, arguments)
        if one is not None and not arguments:
            return [one]
        if one is not None:
            other = _spelled(f"{name}('cuda')", read, write, ("cuda",))
            return [one, other] if other else [one]
    return []


def _public(home: ModuleType, getter: str, read: object) -> str:
    return "torch" if home.__name__ == "torch._C" and getattr(torch, getter, None) is read else home.__name__


def _spelled(name: str, read: Any, write: Any, arguments: tuple[Any, ...]) -> Setting | None:
    """The setting, with the first way to write that leaves what was read as it was."""
    try:
        value = read(*arguments)
    except Exception:
        return None
    if isinstance(value, torch.Tensor | Iterator) or callable(value):
        return None
    for spelled in _SPELLINGS:
        setter = functools.partial(spelled, write, arguments)
        try:
            setter(value)
            if read(*arguments) == value:
                reader = functools.partial(read, *arguments) if arguments else read
                return Setting(name, reader, setter, _scope(name))
        except Exception:
            continue
    return None


def _one(write: Any, arguments: tuple[Any, ...], value: Any) -> None:
    write(*arguments, value)


def _several(write: Any, arguments: tuple[Any, ...], value: Any) -> None:
    write(*arguments, *value)


def _named(write: Any, arguments: tuple[Any, ...], value: Any) -> None:
    write(*arguments, **value)


_SPELLINGS: Final = (_one, _several, _named)


def _of_torch() -> Iterator[Setting]:
    """What torch has no plain pair for."""
    anomaly, nan = torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled
    strict, warn = torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled
    yield Setting("torch.is_anomaly_enabled()", anomaly, lambda v: torch.set_anomaly_enabled(v, nan()))
    yield Setting("torch.is_anomaly_check_nan_enabled()", nan, lambda v: torch.set_anomaly_enabled(anomaly(), v))
    yield Setting(
        "torch.are_deterministic_algorithms_enabled()",
        strict,
        lambda v: torch.use_deterministic_algorithms(v, warn_only=warn()),
        "rank",
    )
    yield Setting(
        "torch.is_deterministic_algorithms_warn_only_enabled()",
        warn,
        lambda v: torch.use_deterministic_algorithms(strict(), warn_only=v),
        "rank",
    )
    yield Setting("torch.set_default_device", torch_private.default_device, torch.set_default_device)
    yield Setting("torch.set_flush_denormal", _denormals_flushed, torch.set_flush_denormal)
    yield Setting("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled, None)
    options = torch_private.print_options()
    yield Setting("torch.set_printoptions", lambda: dict(vars(options)), functools.partial(_fill, vars(options)))
    for name, read in torch_private.stack_depths().items():
        yield Setting(name, read, None)


_OF_THE_PROCESS: Final = re.compile(
    r"_jit_(?!get_inline)|_sdp_|cudnn|cublas|blas|linalg|mkldnn|nnpack|miopen|rocm|backcompat|qengine|sys\.get(recursion|switch|dlopen|int)"
    r"|gc\.|socket\.|warn|reduction|te_|debug"
)
"""Names of settings of which no thread has a value of its own: read once a run and not on each rank."""

_OF_THE_RANK: Final = frozenset({
    "torch.get_default_dtype()", "torch.are_deterministic_algorithms_enabled()", "torch._C._get_mkldnn_enabled()",
    "torch.is_deterministic_algorithms_warn_only_enabled()", "torch.get_float32_matmul_precision()", "os.getcwd()",
    "os.environ", "warnings.filters",
})  # fmt: skip


def _fill(held: dict[str, Any], wanted: dict[str, Any]) -> None:
    held.clear()
    held.update(wanted)


def _scope(name: str) -> Scope:
    if name in _OF_THE_RANK:
        return "rank"
    return "process" if _OF_THE_PROCESS.search(name) else "thread"


_TINY, _UNIT = float.fromhex("0x1p-1060"), [1.0]


def _denormals_flushed() -> bool:
    return _TINY * _UNIT[0] == 0.0  # computed as tensors are: the switch is the processor's


def _of_python() -> Iterator[Setting]:
    """What Python's own modules have no plain pair for, or a value that cannot be compared."""
    for name, home in (("gettrace", sys), ("getprofile", sys), ("gettrace", threading), ("getprofile", threading)):
        setter = getattr(home, name.replace("get", "set"))
        yield Setting(f"{home.__name__}.{name}()", getattr(home, name), setter)
    yield Setting("gc.isenabled()", gc.isenabled, lambda v: gc.enable() if v else gc.disable(), "process")
    yield Setting("decimal.getcontext()", _decimal, _set_decimal)
    yield Setting(
        "locale.setlocale", lambda: locale.setlocale(locale.LC_ALL), lambda v: locale.setlocale(locale.LC_ALL, v)
    )
    yield Setting("os.getcwd()", _working_directory, os.chdir, "rank")
    yield Setting("os.environ", _environment, _set_environment, "rank")
    yield Setting("warnings.filters", lambda: list(warnings.filters), _set_filters, "rank")


_DECIMAL: Final = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")  # not the flags: what it has met
_TRAPS: Final = tuple(decimal.getcontext().traps)


def _decimal() -> tuple[Any, ...]:
    now = decimal.getcontext()
    return *map(now.traps.__getitem__, _TRAPS), *(getattr(now, name) for name in _DECIMAL)


def _set_decimal(fields: tuple[Any, ...]) -> None:
    now = decimal.getcontext()
    now.traps.update(zip(_TRAPS, fields, strict=False))
    for name, value in zip(_DECIMAL, fields[len(_TRAPS) :], strict=True):
        setattr(now, name, value)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that is gone"


_TORCH_WRITES: Final = (b"TORCHINDUCTOR_CACHE_DIR", b"TRITON_CACHE_DIR")  # when something imports its compiler


def _environment() -> dict[bytes, bytes]:
    now = dict(os.environ._data)  # type: ignore[attr-defined]
    for name in _TORCH_WRITES:
        now.pop(name, None)
    return now


def _set_environment(wanted: dict[bytes, bytes]) -> None:
    now = os.environb
    for name in [name for name in now if name not in wanted and name not in _TORCH_WRITES]:
        del now[name]
    now.update({name: value for name, value in wanted.items() if now.get(name) != value})


def _set_filters(wanted: list[Any]) -> None:
    warnings.filters[:] = wanted  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


@functools.cache
def of_signals() -> tuple[Setting, ...]:
    """What is done on each signal, as Python knows it and, where it can be read, as the system does."""
    python = Setting("signal handlers", _handlers, _set_handlers, "process")
    system = Setting("signals as the system has them, and umask", _dispositions, _set_dispositions, "process")
    return (python, system) if _STATUS.exists() else (python,)


_STATUS: Final = Path("/proc/self/status")
_SIGNALS: Final = tuple(sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


_getsignal: Final[Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)  # 60 ns instead of 1.5 us


def _handlers() -> dict[int, Any]:
    return dict(zip(_SIGNALS, map(_getsignal, _SIGNALS), strict=True))


def _set_handlers(wanted: dict[int, Any]) -> None:
    for number, handler in wanted.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _dispositions() -> tuple[int, ...]:
    """(umask, signals ignored, signals handled), which a C library may have changed behind Python's back.

    Without those that the C library keeps for itself (glibc: 32 and 33): it handles one from the first thread on.
    """
    with open(_STATUS, "rb", buffering=0) as status:
        text = status.read(8192)
    return tuple(
        int(text[(at := text.index(name) + len(name)) : text.index(b"\n", at)], base) & mask
        for name, base, mask in _LINES
    )


_OPEN: Final = sum(1 << (number - 1) for number in _SIGNALS)
_LINES: Final = ((b"\nUmask:", 8, 0o777), (b"\nSigIgn:", 16, _OPEN), (b"\nSigCgt:", 16, _OPEN))


def _set_dispositions(wanted: tuple[int, ...]) -> None:
    """Have Python tell the system again what it believes of each signal that has another disposition."""
    os.umask(wanted[0])
    now = _dispositions()
    other = (wanted[1] ^ now[1]) | (wanted[2] ^ now[2])
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler is not None and other >> (number - 1) & 1:
            signal.signal(number, handler)
