"""The one home of everything private in torch that the project touches, with the releases each was tried on.

Nothing private is imported at module level: a name that moved must break the one function
that needs it, with its message, and not the import of the package. Tried: 2.13.0 unless a line says otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import library as dispatcher

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SUBJECT_LOCALS = ("self", "handle", "unit")
"""Names of local variables worth giving to ``subject_of`` when a call stack is walked from a collective outwards.

The reference passes the ``unit`` whose data travels to plain functions (impl/sharding/collectives.py).
FSDP2 gathers and reduces inside methods of FSDPParamGroup; FSDP1 gathers inside methods of FlatParamHandle but reduces
inside the free function ``_runtime_utils._reduce_grad(state, handle)``. Tried: 2.13.0.
"""

STORE_SERVER = "pt_tcpstore_uv"
"""Name of the thread, as the system shows it, in which a TCPStore answers over sockets. Tried: 2.13.0."""

ROOT = "(root)"
"""Subject of the root unit, whose fully-qualified name is the empty string."""


def subject_of(frame_self: object) -> str | None:
    """Name of the sharding unit that ``frame_self`` stands for; None when it is no unit or does not know its name.

    Understood: any object with a str attribute ``fqn`` (an implementation's own unit); FSDP2's ``FSDPParamGroup``
    (``_module_fqn``: None before the lazy init of the root, "" for the root); FSDP1's ``FlatParamHandle`` (its place in
    the root's order, because its parameter names are relative to the unit and so equal for equal units).
    Never raises and never runs ``__getattr__`` hooks of modules. Tried: 2.13.0.
    """
    own = _attribute(frame_self, "fqn")
    if isinstance(own, str):
        return own or ROOT
    match type(frame_self).__name__:
        case "FSDPParamGroup":
            name = _attribute(frame_self, "_module_fqn")
            return None if name is None else str(name) or ROOT
        case "FlatParamHandle":
            return _flat_handle(frame_self)
    return None


def _flat_handle(handle: object) -> str | None:
    flat = _attribute(handle, "flat_param")
    names = getattr(flat, "_fqns", None)
    if names is None:
        return None
    place = _attribute(handle, "_handle_index")
    where = "" if place is None else f"unit {place}: "
    return where + ", ".join(names)


def _attribute(thing: object, name: str) -> Any:
    """``thing.name`` from its own dict, slots or class; no user-defined __getattr__ runs. None when absent."""
    try:
        return object.__getattribute__(thing, name)
    except Exception:  # a property of the implementation may raise anything
        return None


BACKEND = "fsdpcheck"
"""Name under which recorded process groups are registered with torch.distributed."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_UNITS = (os.path.join("distributed", "fsdp", ""), os.path.join("distributed", "_composable", ""))
_OURS = str(Path(__file__).parent.parent) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_GLUE = "typing_extensions.py"
_IMPLEMENTATIONS = tuple(_OURS + name + os.sep for name in ("impl", "adapters"))


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, no dispatch mode sees what this thread computes. Tried: 2.13.0."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def is_plumbing(filename: str) -> bool:
    """Whether a file is no part of an implementation: torch outside its FSDP folders, the harness, Python's own."""
    if filename.startswith(_TORCH):
        return not any(part in filename for part in _UNITS)
    if is_harness(filename):
        return True
    return filename.startswith("<") or filename.endswith(_GLUE) or _is_standard_library(filename)


def is_torch(filename: str) -> bool:
    """Whether a file is torch's own."""
    return filename.startswith(_TORCH)


def is_a_program(filename: str) -> bool:
    """Whether a file is none of Python's, torch's or the harness's; torch's own tests are programs."""
    return not is_plumbing(filename) or filename.startswith(_TORCH + "testing" + os.sep)


def is_asked_by_a_program(frame: FrameType | None) -> bool:
    """Whether the innermost caller that is neither the harness nor Python's own is a program, and not torch."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_torch(file) or is_a_program(file):
            return not is_torch(file)
        frame = frame.f_back
    return False


def is_ours(filename: str) -> bool:
    """Whether a file is part of fsdpcheck, the reference implementation and the built-in adapters included."""
    return filename.startswith(_OURS)


def is_harness(filename: str) -> bool:
    """Whether a file is the harness itself, and neither the reference implementation nor an adapter."""
    return filename.startswith(_OURS) and not filename.startswith(_IMPLEMENTATIONS)


def _is_standard_library(filename: str) -> bool:
    return filename.startswith(_STANDARD) and "site-packages" not in filename


def group_identity(group: Any) -> tuple[str, tuple[int, ...]]:
    """(name, global ranks by their rank in the group) of a registered process group. Tried: 2.13.0.

    Ascending, except in a group made with ``sort_ranks=False``.
    """
    world = dist.distributed_c10d._world
    numbers = world.pg_group_ranks[group]
    return world.pg_names[group], tuple(sorted(numbers, key=numbers.__getitem__))


def devices() -> list[str]:
    """What recorded groups are registered for: a library may ask a backend for the device that it wants data on."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class _ThreadLocalWorld(threading.local):
    """Each thread's record of its process groups; starts empty on every thread. Tried: 2.13.0.

    The fields are those of torch.testing's ``WorldData``, which its ``ThreadLocalWorld`` finds through a property each;
    c10d asks a dozen times a collective, and here an answer costs a tenth.
    """

    def __init__(self, enter: Callable[[], object]) -> None:
        enter()
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []


def thread_local_world(enter: Callable[[], object]) -> object:
    """A stand-in for c10d's ``_world`` that gives each thread process groups of its own. Tried: 2.13.0.

    ``enter`` is called on each thread that asks for them, before it gets any, and may raise.
    """
    return _ThreadLocalWorld(enter)


@contextmanager
def isolated_threads(world: object) -> Iterator[None]:
    """While open, each thread sees its own process groups: in Python through ``world``, in C++ by isolation mode.

    Both are put back on leaving, so that other programs of this process see their own groups again. Tried: 2.13.0.
    """
    c10d: Any = torch._C._distributed_c10d
    module = dist.distributed_c10d
    before = module._world
    module._world = cast(Any, world)
    c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        c10d._set_thread_isolation_mode(False)
        module._world = before


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """While open, ``owner`` has these attributes in place of its own."""
    kept = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


@contextmanager
def groups_of_ranks(
    rank: Callable[[], int | None],
    meet: Callable[[str, int, int], tuple[Any, int, int]],
    making: Callable[[str, tuple[int, ...], frozenset[str]], object],
) -> Iterator[None]:
    """While open, whatever backend and init_method a rank asks for, its process groups are those of ``BACKEND``.

    ``meet(url, rank, number of ranks)``, of which -1 stands for the usual, gives the store and both numbers.
    ``making(name, ranks, names of those it has)`` is told of each group before a rank makes it, of no ranks for all.
    They have the name that was asked for. A backend of torch would block the one thread that runs. "mpi", which is not
    built, and "fake", which reaches nobody, stay what they are. Tried: 2.13.0; read in 2.11.0 and 2.12.0.
    """
    module: Any = dist.distributed_c10d
    make, rendezvous, set_timeout = module._new_process_group_helper, module.rendezvous, module._set_pg_timeout

    def make_ours(size: int, place: int, ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        if rank() is None or backend in (dist.Backend.MPI, dist.Backend.FAKE):
            return make(size, place, ranks, backend, *args, **options)
        making(str(args[1]), tuple(ranks), frozenset(map(str, module._world.pg_names.values())))
        group, store = make(size, place, ranks, dist.Backend(BACKEND), *args, **options)
        if group in module._world.pg_map:  # this rank is a member; who asks for the backend hears what was asked for
            module._world.pg_map[group] = backend, module._world.pg_map[group][1]
            module._world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(backend))
        return group, store

    def meet_ours(url: str, own: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        return rendezvous(url, own, world_size, **options) if rank() is None else iter([meet(url, own, world_size)])

    def set_ours(timeout: Any, group: Any = None) -> None:
        """Time-outs are nothing to ranks that know at once that nobody comes."""
        if rank() is None:
            set_timeout(timeout, group)

    with replaced(module, _new_process_group_helper=make_ours, rendezvous=meet_ours, _set_pg_timeout=set_ours):
        yield


def give_up_after(seconds: float | None) -> None:
    """From now on groups of gloo and their stores wait so long where a program does not say. Tried: 2.13.0.

    None: as long as torch has them wait.
    """
    if seconds is not None:
        module: Any = dist.distributed_c10d
        module.default_pg_timeout = timedelta(seconds=seconds)


def join_together() -> None:
    """From now on init_process_group of this process returns when all ranks have joined. Tried: 2.13.0.

    gloo fails to join a rank that is gone already; no program is about that.
    """
    module: Any = dist.distributed_c10d
    init = module.init_process_group

    @functools.wraps(init)
    def joined(*args: Any, **options: Any) -> None:
        init(*args, **options)
        group, store = module._get_default_group(), module._get_default_store()
        timeout = options.get("timeout") or module.default_pg_timeout
        module._store_based_barrier(group.rank(), store, "joined", group.size(), timeout)

    package: Any = dist
    for owner in (package, module):
        owner.init_process_group = joined


def world_of_this_thread() -> dict[str, Any]:
    """What this thread, of which ``thread_local_world`` keeps it, knows of process groups. Tried: 2.13.0."""
    return dict(vars(dist.distributed_c10d._world))


@contextmanager
def in_world(known: dict[str, Any]) -> Iterator[None]:
    """While open, this thread knows the process groups that another one knew. Tried: 2.13.0."""
    c10d: Any = torch._C._distributed_c10d
    own = vars(dist.distributed_c10d._world)
    before, names = dict(own), dict(known["pg_names"])
    own.update(known)
    for group, name in names.items():
        c10d._register_process_group(name, group)
    try:
        yield
    finally:
        for name in names.values():
            c10d._unregister_process_group(name)
        own.clear()
        own.update(before)


def groups_of_this_thread() -> frozenset[Any]:
    """The process groups this rank knows now. Tried: 2.13.0."""
    return frozenset(dist.distributed_c10d._world.pg_map)


def forget_groups_but(keep: frozenset[Any]) -> None:
    """Drop the groups that a case made, so that the next case of this rank finds the world as new. Tried: 2.13.0.

    Their names are counted from where they were, so that a case names its groups alike whenever it runs.
    """
    world = dist.distributed_c10d._world
    made = [group for group in world.pg_map if group not in keep]
    for group in made:
        if group in world.pg_map:  # with a default group all others are destroyed
            dist.destroy_process_group(group)
    whole = keep <= world.pg_map.keys()  # or the case has destroyed what it found, and the next one starts from nothing
    if made or not whole or world.group_count != len(keep):  # a rank that is no member counts too
        world.group_count = len(keep) if whole else 0


_GROUPS = (os.path.join("distributed", "distributed_c10d.py"), os.path.join("distributed", "rendezvous.py"))


def is_called_to_make_groups(frame: FrameType | None) -> bool:
    """Whether a store is used by what makes process groups: its innermost caller that is not the harness.

    Tried: 2.13.0; read in 2.11.0 and 2.12.0.
    """
    while frame is not None and is_harness(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_torch(frame.f_code.co_filename) and frame.f_code.co_filename.endswith(_GROUPS)


def is_called_to_wait(frame: FrameType | None) -> bool:
    """Whether a message is sent or received by dist.send or dist.recv, which wait for it. Tried: 2.13.0."""
    while frame is not None and is_harness(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and is_torch(frame.f_code.co_filename):
        if frame.f_code.co_name in ("send", "recv"):
            return True
        frame = frame.f_back
    return False


_PYTHON_OF_GROUPS = tuple(os.path.join("distributed", name) for name in ("distributed_c10d.py", "c10d_logger.py"))


def asked_directly(frame: FrameType | None) -> str:
    """file:line of who has called torch.distributed, unless that is torch itself; then "". Tried: 2.13.0."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.endswith(_PYTHON_OF_GROUPS) and (is_torch(file) or not is_plumbing(file)):
            break
        frame = frame.f_back
    if frame is None or is_torch(frame.f_code.co_filename):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether another tensor that is alive has the same storage. Tried: 2.13.0."""
    ours = 2  # this tensor, and the object by which we ask
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) > ours


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; any other tensor as it is. Tried: 2.13.0."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def module_called(frame: FrameType) -> torch.nn.Module | None:
    """The module whose call this frame is; None where it is another frame. Tried: 2.13.0."""
    if frame.f_code is not torch.nn.Module._call_impl.__code__:
        return None
    return cast(torch.nn.Module, frame.f_locals["self"])


def is_in_backward() -> bool:
    """Whether this thread runs a backward. Tried: 2.13.0."""
    return int(torch._C._current_graph_task_id()) != -1


def is_step_of_optimizer(frame: FrameType) -> bool:
    """Whether this frame is an optimizer's step."""
    return frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def asked_backend(group: Any) -> str:
    """The backend that a rank asked for when it made this group, which torch need not know. Tried: 2.13.0."""
    return str(dist.distributed_c10d._world.pg_map.get(group, (dist.Backend.GLOO,))[0])


def store_of_group(group: Any) -> Any:
    """The store by which a rank made this group; None where torch does not know it. Tried: 2.13.0."""
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


def backend_on_cpu(group: Any) -> str:
    """Name of the backend by which such a group does what it is asked to do on a CPU. Tried: 2.13.0."""
    asked = asked_backend(group)
    return dist.distributed_c10d.BackendConfig(dist.Backend(asked)).get_device_backend_map().get("cpu", asked)


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
