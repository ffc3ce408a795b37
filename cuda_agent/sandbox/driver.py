"""Calls the CUDA driver (``libcuda``) through ctypes. Covers only the functions that the sandbox needs.

Device addresses are integers. The module uses only the default stream. It does not use textures or graphs.

As a program (``python -m cuda_agent.sandbox.driver``), the module prints JSON: the device's architecture and identity,
or an error. A process that must not open the device itself runs this program instead."""

import ctypes
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

_POSIX_DESCRIPTOR, _PINNED, _ON_DEVICE = 1, 1, 1
READ, READ_WRITE = 1, 3
_MAJOR, _MINOR, _L2_BYTES, _SHARED_OPTIN = 75, 76, 38, 97
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # function attributes
_STATIC_SHARED, _LOCAL, _REGISTERS = 1, 3, 4  # function attributes
_CLUSTER, _COOPERATIVE = 4, 2  # launch attributes
_NOT_SUPPORTED = 801
_RELEASE_THRESHOLD = 4  # attribute of a memory pool


class DriverError(RuntimeError):
    """A call of the driver failed. ``code`` is the ``CUresult`` of the call."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call}: CUDA error {code} ({_name(code)})")
        self.code = code


class NoDevice(RuntimeError):
    """No CUDA device can be used in this process."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("metadata", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NoDevice("there is no NVIDIA driver here (libcuda.so.1)") from None


def _name(code: int) -> str:
    text = ctypes.c_char_p()
    if _library().cuGetErrorName(code, ctypes.byref(text)) or not text.value:
        return "unknown"
    return text.value.decode()


def _call(name: str, *arguments: Any) -> None:
    wide = (ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments)  # sizes and addresses
    if code := getattr(_library(), name)(*wide):
        raise DriverError(code, name)


# ------------------------------------------------------------------------------------------------------------- devices


def open_device() -> None:
    """Makes the first device's primary context current in this thread. Raises ``NoDevice`` if that fails."""
    try:
        _call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _call("cuDeviceGet", ctypes.byref(device), 0)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)
    except DriverError as error:
        raise NoDevice(str(error)) from None


def attribute(which: int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), which, 0)
    return value.value


def architecture() -> str:
    """Returns the device's architecture, such as ``sm_90a``. The suffix ``a`` allows instructions that only this
    architecture has."""
    major, minor = attribute(_MAJOR), attribute(_MINOR)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def l2_bytes() -> int:
    return attribute(_L2_BYTES)


def memory_bytes() -> tuple[int, int]:
    """Returns the free bytes and the total bytes of the device's memory."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def identity() -> str:
    """Returns the device's name and the driver's version."""
    name, version = ctypes.create_string_buffer(100), ctypes.c_int()
    _call("cuDeviceGetName", name, 100, 0)
    _call("cuDriverGetVersion", ctypes.byref(version))
    return f"{name.value.decode()}, driver {version.value}"


def synchronize() -> None:
    _call("cuCtxSynchronize")


# -------------------------------------------------------------------------------------------------------------- memory


def allocate(size: int) -> int:
    """Allocates ``size`` bytes of device memory and returns their address. Other processes cannot map
    this memory, unlike the memory of ``Shared``."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), max(size, 1))
    return address.value


def keep_freed() -> None:
    """Makes the driver keep the memory that ``give_back`` frees, for later calls of ``take``. ``trim`` returns this
    memory to the device."""
    forever = ctypes.c_uint64((1 << 64) - 1)
    _call("cuMemPoolSetAttribute", _pool(), ctypes.c_int(_RELEASE_THRESHOLD), ctypes.byref(forever))


def take(size: int) -> int:
    """Allocates ``size`` bytes of device memory and returns their address. The allocation is queued on the default
    stream, so this function does not wait for the device."""
    address = ctypes.c_uint64()
    _call("cuMemAllocAsync", ctypes.byref(address), max(size, 1), None)
    return address.value


def give_back(address: int) -> None:
    """Frees memory that ``take`` allocated. The release is queued on the default stream."""
    _call("cuMemFreeAsync", address, None)


def trim() -> None:
    """Waits for the device, then returns to the device all memory that ``give_back`` has freed."""
    synchronize()
    _call("cuMemPoolTrimTo", _pool(), 0)


def _pool() -> ctypes.c_void_p:
    pool, device = ctypes.c_void_p(), ctypes.c_int()
    _call("cuCtxGetDevice", ctypes.byref(device))
    _call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device)
    return pool


def copy(target: int, source: int, size: int) -> None:
    """Copies ``size`` bytes from device to device, asynchronously."""
    if size:
        _call("cuMemcpyDtoDAsync_v2", target, source, size, None)


def read(address: int, size: int) -> bytes:
    content = ctypes.create_string_buffer(max(size, 1))
    if size:
        _call("cuMemcpyDtoH_v2", content, address, size)
    return content.raw[:size]


def write(address: int, content: bytes) -> None:
    if content:
        _call("cuMemcpyHtoD_v2", address, content, len(content))


def fill_words(address: int, word: int, count: int) -> None:
    """Fills ``count`` 32-bit words at ``address`` with ``word``, asynchronously."""
    if count:
        _call("cuMemsetD32Async", address, ctypes.c_uint(word), count, None)


def fill_bytes(address: int, value: int, count: int) -> None:
    if count:
        _call("cuMemsetD8Async", address, ctypes.c_ubyte(value), count, None)


def forget_persisting_lines() -> None:
    """Makes all persisting lines of the L2 cache normal lines. Does nothing on a device without persisting lines."""
    code = _library().cuCtxResetPersistingL2Cache()
    if code not in (0, _NOT_SUPPORTED):
        raise DriverError(code, "cuCtxResetPersistingL2Cache")


class Shared:
    """Device memory that several processes can map. In the process that allocates the memory, the attribute
    ``descriptor`` is a file descriptor. A process that receives a copy of the descriptor can map the memory, too. In
    the latter process, the attribute is -1."""

    def __init__(self, size: int, descriptor: int | None = None, access: int = READ_WRITE) -> None:
        """Allocates ``size`` bytes, rounded up to the driver's granularity, and maps them. If the argument
        ``descriptor`` (a file descriptor from another process) is given, allocates nothing and maps the memory to which
        it refers. ``access`` is ``READ`` or ``READ_WRITE``."""
        properties = _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, 0))
        granularity, self._handle = ctypes.c_size_t(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        self.size = -(-max(size, 1) // granularity.value) * granularity.value
        self.descriptor = -1
        if descriptor is None:
            _call("cuMemCreate", ctypes.byref(self._handle), self.size, ctypes.byref(properties), 0)
            number = ctypes.c_int()
            _call("cuMemExportToShareableHandle", ctypes.byref(number), self._handle, _POSIX_DESCRIPTOR, 0)
            self.descriptor = number.value
        else:
            import_it = "cuMemImportFromShareableHandle"
            _call(import_it, ctypes.byref(self._handle), ctypes.c_void_p(descriptor), _POSIX_DESCRIPTOR)
        address = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(address), self.size, 0, 0, 0)
        self.address = address.value
        _call("cuMemMap", address, self.size, 0, self._handle, 0)
        allowed = _Access(_Location(_ON_DEVICE, 0), access)
        _call("cuMemSetAccess", address, self.size, ctypes.byref(allowed), 1)

    def close(self) -> None:
        _call("cuMemUnmap", self.address, self.size)
        _call("cuMemAddressFree", self.address, self.size)
        _call("cuMemRelease", self._handle)
        if self.descriptor >= 0:
            os.close(self.descriptor)


# ------------------------------------------------------------------------------------------------------------- kernels


class Module:
    """A cubin that is loaded into the device's context."""

    def __init__(self, image: bytes) -> None:
        self._module = ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._module), image)

    def unload(self) -> None:
        _call("cuModuleUnload", self._module)

    def function(self, name: str, shared: int = 0, wide_cluster: bool = False) -> ctypes.c_void_p:
        """Returns the kernel ``name``. Permits launches of the kernel with ``shared`` bytes of dynamic shared memory.
        If ``wide_cluster`` is true, also permits clusters of more than 8 blocks."""
        found = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(found), self._module, name.encode())
        if shared > 48 << 10:
            _call("cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED, shared)
        if wide_cluster:
            _call("cuFuncSetAttribute", found, _NON_PORTABLE_CLUSTER, 1)
        return found

    def constant(self, name: str) -> bytes:
        """Returns the bytes of the module's global variable ``name``."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        _call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), self._module, name.encode())
        return read(address.value, size.value)


def resources(function: ctypes.c_void_p) -> list[int]:
    """Returns what the compiler gave a kernel: the registers of a thread, the bytes of local memory of a thread, and
    the bytes of static shared memory of a block."""
    values = [ctypes.c_int() for _ in range(3)]
    for value, which in zip(values, (_REGISTERS, _LOCAL, _STATIC_SHARED), strict=True):
        _call("cuFuncGetAttribute", ctypes.byref(value), which, function)
    return [value.value for value in values]


def blocks_at_once(function: ctypes.c_void_p, threads: int, shared: int) -> int:
    """Returns how many blocks of a kernel a multiprocessor holds at once, as the driver computes it. ``shared`` is the
    dynamic shared memory in bytes."""
    blocks = ctypes.c_int()
    _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, threads, shared)
    return blocks.value


class Launch:
    """A prepared kernel launch on the default stream. Calling the object launches the kernel with ``arguments`` (ctypes
    values)."""

    def __init__(
        self,
        function: ctypes.c_void_p,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
        cluster: Sequence[int] = (),
        cooperative: bool = False,
    ) -> None:
        self._function = function
        self._keep = list(arguments)
        self._pointers = (ctypes.c_void_p * max(1, len(self._keep)))(*(ctypes.addressof(a) for a in self._keep))
        attributes = []
        if cluster:
            attributes.append(_LaunchAttribute(_CLUSTER, b"", (ctypes.c_uint * 16)(*cluster)))
        if cooperative:
            attributes.append(_LaunchAttribute(_COOPERATIVE, b"", (ctypes.c_uint * 16)(1)))
        self._attributes = (_LaunchAttribute * max(1, len(attributes)))(*attributes)
        self._config = _LaunchConfig(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared, None, self._attributes, len(attributes)
        )

    def __call__(self) -> None:
        code = _library().cuLaunchKernelEx(ctypes.byref(self._config), self._function, self._pointers, None)
        if code:  # without ``_call``, whose work would be part of a timed call
            raise DriverError(code, "cuLaunchKernelEx")


def shared_memory_limit() -> int:
    """Returns the largest number of bytes of dynamic shared memory that a block may have."""
    return attribute(_SHARED_OPTIN)


def explain(error: DriverError) -> str:
    return explain_code(error.code) or str(error)


def explain_code(code: int) -> str:
    """Explains a ``CUresult`` to the author of a kernel. Returns an empty string if there is no explanation."""
    return {
        700: "a kernel accessed an illegal address (out of bounds, or a write to an input)",
        701: "a kernel needs more resources than a block can have (registers or shared memory)",
        716: "a kernel accessed a misaligned address",
        717: "a kernel used an address in the wrong space",
        719: "a kernel failed (an assertion, a trap or a stack overflow)",
        1: "a kernel cannot be launched with this grid, block or shared memory",
        2: "out of device memory",
        720: "a cooperative grid is larger than what fits on the device at once",
    }.get(code, "")


def _main() -> None:
    try:
        open_device()
        print(json.dumps({"architecture": architecture(), "identity": identity()}))
    except NoDevice as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    _main()
