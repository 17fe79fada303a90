"""The one home of everything private in torch that the project touches, with the releases each was tried on.

Nothing private is imported at module level: a name that moved must break the one function
that needs it, with its message, and not the import of the package. Tried: 2.13.0 unless a line says otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import library as dispatcher

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, no dispatch mode sees what this thread computes. Tried: 2.13.0."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """While open, ``owner`` has these attributes in place of its own; torch.jit compiles what it had. Tried: 2.13.0."""
    kept = {name: getattr(owner, name) for name in values}
    known: dict[int, str] = {}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
            known |= _scripted_as(value, kept[name])
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)
        for number in known:
            _scripted_builtins().pop(number, None)


def _scripted_builtins() -> dict[int, str]:
    """What torch.jit takes for operators, by identity. Tried: 2.13.0."""
    builtins: Any = torch.jit._builtins
    return cast(dict[int, str], builtins._get_builtin_table())


def _scripted_as(ours: Any, real: Any) -> dict[int, str]:
    """Have torch.jit take one function for another; what was put into its table of builtin functions."""
    if inspect.isbuiltin(real):
        table = _scripted_builtins()
        known = {id(ours): table[id(real)]} if id(real) in table else {}
        table.update(known)
        return known
    if inspect.isfunction(real) and inspect.isfunction(ours):
        replaced_too = getattr(real, "__prepare_scriptable__", None)
        vars(ours)["__prepare_scriptable__"] = replaced_too or (lambda: real)
    return {}


def never_wrapped(step: Callable[..., None]) -> Callable[..., None]:
    """The ``step`` of an optimizer's class, which torch leaves as it is and otherwise replaces. Tried: 2.13.0."""
    step.hooked = True  # type: ignore[attr-defined]
    return step


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether another tensor that is alive has the same storage. Tried: 2.13.0."""
    ours = 2  # this tensor, and the object by which we ask
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) > ours


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; any other tensor as it is. Tried: 2.13.0."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def is_in_backward() -> bool:
    """Whether this thread runs a backward. Tried: 2.13.0."""
    return int(torch._C._current_graph_task_id()) != -1


def remove_kernels(registered: dispatcher.Library) -> None:
    """Take registered kernels out of the dispatcher at once: ``Library._destroy``, which ``_scoped_library`` calls.

    Tried: 2.13.0; read in 2.11.0 and 2.12.0. Otherwise they would stay until the garbage collector comes by.
    """
    registered._destroy()  # type: ignore[no-untyped-call]


def forget_graphs() -> None:
    """Drop what torch.compile has cached, and let it cache as many graphs of one function as ranks and units have.

    Past its usual limit of eight it would run the function uncompiled, and say so on stderr. Nor does it say there
    where it breaks a graph, which is no news of a case that only asks for right bits.
    """
    import torch._dynamo  # takes seconds

    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1024


def quiet_meta_kernels() -> None:
    """Have no stack printed for each operator that raises while DTensor asks for the shape of what it gives.

    What raises is in the report, once and with the rank; torch logs it on each rank, a hundred lines a time.
    Tried: 2.13.0.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


_FILLS = ("FLAGS_caffe2_cpu_allocator_do_junk_fill", "FLAGS_caffe2_cpu_allocator_do_zero_fill")
_C10 = {"darwin": "libc10.dylib", "win32": "c10.dll"}

JUNK = 0x7FEDBEEF
"""What c10's allocator for CPUs writes into all new memory, four bytes at a time, if it is told to fill with junk.

NaN as float32, 1.67e308 as float64 (two of them), large as an integer. c10/core/impl/alloc_cpu.cpp. Tried: 2.13.0.
"""


@functools.cache
def allocator_fills() -> tuple[Any, Any] | None:
    """Flags (junk, zeros) of c10's allocator for CPUs, each with a writable bool ``value``; None where not exported.

    No call of torch switches them, and memory that ``storage.resize_`` or C++ allocates is filled too. Tried: 2.13.0.
    """
    library = Path(torch.__file__).parent / "lib" / _C10.get(sys.platform, "libc10.so")
    try:
        loaded = ctypes.CDLL(str(library))
        junk, zeros = (ctypes.c_bool.in_dll(loaded, name) for name in _FILLS)
    except (OSError, ValueError):
        return None
    return junk, zeros


DETERMINISTIC = (
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_set_deterministic_algorithms",
    "_get_deterministic_fill_uninitialized_memory",
    "_set_deterministic_fill_uninitialized_memory",
)
"""Functions of ``torch._C`` through which Python reads and sets the deterministic algorithms. Tried: 2.13.0."""


def default_device() -> torch.device | None:
    """The device that ``torch.set_default_device`` set on this thread; None where it set none. Tried: 2.13.0."""
    context = getattr(cast(Any, torch)._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else cast("torch.device", context.device)


def print_options() -> object:
    """What ``torch.set_printoptions`` changes, an object with an attribute each. Tried: 2.13.0."""
    return cast(Any, torch)._tensor_str.PRINT_OPTS


def stack_depths() -> dict[str, Callable[[], object]]:
    """What is open on this thread and has no setter, by name: how deep modes and transforms are. Tried: 2.13.0."""
    private: Any = torch._C
    return {
        "dispatch modes": private._len_torch_dispatch_stack,
        "torch function modes": private._len_torch_function_stack,
        "functorch transforms": private._functorch.get_dynamic_layer_stack_depth,
        "hooks on saved tensors": lambda: private._autograd._top_saved_tensors_default_hooks(True),
    }


def dtensor_handlers() -> dict[Any, Any]:
    """What DTensor does with some operators instead of its rule, which ``loss_parallel()`` changes. Tried: 2.13.0.

    Empty as long as nothing has imported DTensor.
    """
    dispatch = _loaded("torch.distributed.tensor._api", "DTensor", "_op_dispatcher")
    return {} if dispatch is None else dispatch._custom_op_handlers


def set_dtensor_handlers(handlers: dict[Any, Any]) -> None:
    """Put another dict in place of ``dtensor_handlers()``; an empty one stands for what torch begins with.

    So it is right for a rank that had none because nothing had imported DTensor yet. Tried: 2.13.0.
    """
    dispatch = _loaded("torch.distributed.tensor._api", "DTensor", "_op_dispatcher")
    if dispatch is not None:
        dispatch._custom_op_handlers = handlers or type(dispatch)()._custom_op_handlers


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; asked without the import of DTensor, which takes half a second."""
    kind = _loaded("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def own_dtensor_handlers() -> tuple[Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], None]]:
    """How to read, and to write, what ``dtensor_handlers()`` has beyond what torch begins with. Tried: 2.13.0."""
    first: dict[Any, Any] = {}

    def read() -> dict[Any, Any]:
        now = dtensor_handlers()
        if now and not first:
            dispatch = _loaded("torch.distributed.tensor._api", "DTensor", "_op_dispatcher")
            first.update(type(dispatch)()._custom_op_handlers)
        return {} if now == first else {op: now.get(op) for op in {*now, *first} if now.get(op) is not first.get(op)}

    def write(own: dict[Any, Any]) -> None:
        if dtensor_handlers():
            read()
            set_dtensor_handlers({op: how for op, how in {**first, **own}.items() if how is not None})

    return read, write


def fsdp1_profiling() -> set[str]:
    """What FSDP1's SimpleProfiler believes is being profiled now, in the whole process. Tried: 2.13.0."""
    profiler = _loaded("torch.distributed.fsdp._debug_utils", "SimpleProfiler")
    return set() if profiler is None else profiler.profiling


_known: dict[str, Any] = {}


def _loaded(module: str, *path: str) -> Any:
    """An object of a module of torch, by the names that lead to it; None as long as nothing has imported the module."""
    found = _known.get(module)
    if found is None and module in sys.modules:
        found = sys.modules[module]
        for name in path:
            found = getattr(found, name, None)  # None, too, while the module is being imported
        _known[module] = found
    return found
