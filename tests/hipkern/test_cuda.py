"""The libraries for NVIDIA GPUs: what they export, forward and answer; kernels go through NVRTC."""

from __future__ import annotations

import ast
import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ds4q.hipkern import cuda
from ds4q.hipkern.build import options
from ds4q.hipkern.errors import HipLibraryError
from ds4q.hipkern.kernels import builds
from tests.checks import check_refused

HIPKERN = Path(cuda.__file__).parents[1]
KERNELS = HIPKERN / "kernels"
ARCH = "sm_90"
ABSENT = "libcuda-that-is-not-there.so.1"
ENUMERATIONS = {"hipMemcpyKind", "hipStreamCaptureMode"}  # the binding's own
RENAMED = {"hipGetDeviceProperties": "hipGetDevicePropertiesR0600"}  # by the binding

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

FAKE_DRIVER = """
#include <cstring>
#include "cuda.h"
extern "C" {
int fake_answer = 0;
const char* fake_called = "";
uintptr_t fake_arguments[11];
void* fake_extra[5];
}
static int answer(const char* symbol, const uintptr_t* arguments) {
  if (!std::strcmp(symbol, "cuInit")) return 0;
  if (!std::strcmp(symbol, "cuDeviceGetCount")) return *(int*)arguments[0] = 2, 0;
  if (!std::strcmp(symbol, "cuDeviceGet")) return *(int*)arguments[0] = arguments[1] + 70, 0;
  if (!std::strcmp(symbol, "cuDevicePrimaryCtxRetain")) {
    return *(uintptr_t*)arguments[0] = arguments[1] + 1000, 0;
  }
  if (!std::strcmp(symbol, "cuDeviceGetAttribute")) *(int*)arguments[0] = arguments[1];
  if (!std::strcmp(symbol, "cuLaunchKernel") && arguments[10]) {
    std::memcpy(fake_extra, (void*)arguments[10], sizeof fake_extra);
  }
  if (std::strcmp(symbol, "cuCtxSetCurrent")) fake_called = symbol;
  std::memcpy(fake_arguments, arguments, sizeof fake_arguments);
  return fake_answer;
}
#define FAKE(name, symbol, arguments)                                                   \\
  extern "C" int fake_##name(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,     \\
                             uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,     \\
                             uintptr_t) __asm__(symbol);                                \\
  extern "C" int fake_##name(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d,        \\
                             uintptr_t e, uintptr_t f, uintptr_t g, uintptr_t h,        \\
                             uintptr_t i, uintptr_t j, uintptr_t k) {                   \\
    const uintptr_t all[] = {a, b, c, d, e, f, g, h, i, j, k};                          \\
    return answer(symbol, all);                                                         \\
  }
CUDA_CALLS(FAKE)
"""

# hip call, arguments, the driver's call that it ends in; 4096 and more stand for pointers
FORWARDED = (
    ("hipDriverGetVersion", (4096,), "cuDriverGetVersion"),
    ("hipDeviceGetName", (4096, 9, 0), "cuDeviceGetName"),
    ("hipDeviceSynchronize", (), "cuCtxSynchronize"),
    ("hipMemGetInfo", (4096, 4104), "cuMemGetInfo_v2"),
    ("hipFree", (4096,), "cuMemFree_v2"),
    ("hipHostFree", (4096,), "cuMemFreeHost"),
    ("hipMemcpy", (4096, 8192, 5, 0), "cuMemcpy"),
    ("hipMemcpy", (4096, 8192, 5, 1), "cuMemcpyHtoD_v2"),
    ("hipMemcpy", (4096, 8192, 5, 2), "cuMemcpyDtoH_v2"),
    ("hipMemcpy", (4096, 8192, 5, 3), "cuMemcpyDtoD_v2"),
    ("hipMemcpy", (4096, 8192, 5, 4), "cuMemcpy"),
    ("hipMemcpyAsync", (4096, 8192, 5, 0, 7), "cuMemcpyAsync"),
    ("hipMemcpyAsync", (4096, 8192, 5, 1, 7), "cuMemcpyHtoDAsync_v2"),
    ("hipMemcpyAsync", (4096, 8192, 5, 2, 7), "cuMemcpyDtoHAsync_v2"),
    ("hipMemcpyAsync", (4096, 8192, 5, 3, 7), "cuMemcpyDtoDAsync_v2"),
    ("hipMemcpyAsync", (4096, 8192, 5, 4, 7), "cuMemcpyAsync"),
    ("hipMemcpyHtoD", (4096, 8192, 5), "cuMemcpyHtoD_v2"),
    ("hipMemcpyDtoH", (4096, 8192, 5), "cuMemcpyDtoH_v2"),
    ("hipMemcpyDtoD", (4096, 8192, 5), "cuMemcpyDtoD_v2"),
    ("hipMemcpyHtoDAsync", (4096, 8192, 5, 7), "cuMemcpyHtoDAsync_v2"),
    ("hipMemcpyDtoHAsync", (4096, 8192, 5, 7), "cuMemcpyDtoHAsync_v2"),
    ("hipMemcpyDtoDAsync", (4096, 8192, 5, 7), "cuMemcpyDtoDAsync_v2"),
    ("hipMemset", (4096, 255, 5), "cuMemsetD8_v2"),
    ("hipMemsetAsync", (4096, 255, 5, 7), "cuMemsetD8Async"),
    ("hipStreamCreate", (4096,), "cuStreamCreate"),
    ("hipStreamCreateWithFlags", (4096, 1), "cuStreamCreate"),
    ("hipStreamDestroy", (7,), "cuStreamDestroy_v2"),
    ("hipStreamSynchronize", (7,), "cuStreamSynchronize"),
    ("hipStreamQuery", (7,), "cuStreamQuery"),
    ("hipStreamWaitEvent", (7, 8, 0), "cuStreamWaitEvent"),
    ("hipEventCreate", (4096,), "cuEventCreate"),
    ("hipEventCreateWithFlags", (4096, 2), "cuEventCreate"),
    ("hipEventDestroy", (8,), "cuEventDestroy_v2"),
    ("hipEventRecord", (8, 7), "cuEventRecord"),
    ("hipEventQuery", (8,), "cuEventQuery"),
    ("hipEventSynchronize", (8,), "cuEventSynchronize"),
    ("hipEventElapsedTime", (4096, 8, 9), "cuEventElapsedTime"),
    ("hipStreamBeginCapture", (7, 2), "cuStreamBeginCapture_v2"),
    ("hipStreamEndCapture", (7, 4096), "cuStreamEndCapture"),
    ("hipStreamIsCapturing", (7, 4096), "cuStreamIsCapturing"),
    ("hipGraphInstantiate", (4096, 9, 0, 0, 0), "cuGraphInstantiateWithFlags"),
    ("hipGraphInstantiateWithFlags", (4096, 9, 1), "cuGraphInstantiateWithFlags"),
    ("hipGraphGetNodes", (9, 4096, 8192), "cuGraphGetNodes"),
    ("hipGraphLaunch", (9, 7), "cuGraphLaunch"),
    ("hipGraphDestroy", (9,), "cuGraphDestroy"),
    ("hipGraphExecDestroy", (9,), "cuGraphExecDestroy"),
    ("hipModuleUnload", (9,), "cuModuleUnload"),
    ("hipModuleGetGlobal", (4096, 4104, 9, 8192), "cuModuleGetGlobal_v2"),
    ("hipFuncGetAttribute", (4096, 4, 9), "cuFuncGetAttribute"),
)
ANSWERED = {  # which end in no call of their own, or in several: tested apart
    *("hipInit", "hipRuntimeGetVersion", "hipGetDeviceCount", "hipGetDevice", "hipSetDevice"),
    *("hipDeviceGetAttribute", "hipGetDevicePropertiesR0600", "hipGetLastError"),
    *("hipPeekAtLastError", "hipMalloc", "hipHostMalloc", "hipModuleLoadData"),
    *("hipModuleGetFunction", "hipModuleLaunchKernel"),
}


def exported(source: str, kind: str) -> list[str]:
    text = (HIPKERN / "cuda" / source).read_text(encoding="utf-8")
    return re.findall(rf"^EXPORT {kind} (\w+)\(", text, re.MULTILINE)


def names_called(*files: str) -> set[str]:
    """HIP functions that these modules name: as attributes, or as words for ``Device.call``."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse((HIPKERN / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {RENAMED.get(n, n) for n in found if re.fullmatch("hip(rtc)?[A-Z][A-Za-z0-9]+", n)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries over a driver and an NVRTC that do not exist."""
    return cuda.build_for(tmp_path_factory.mktemp("cuda"), ABSENT, "libnvrtc-absent.so")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The HIP library over a driver that notes what is called; and that driver."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake.cpp").write_text(FAKE_DRIVER)
    driver = folder / "libcuda-fake.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{HIPKERN / 'cuda'}"]
    subprocess.run([*command, str(folder / "fake.cpp"), "-o", str(driver)], check=True)
    built = cuda.build_for(folder, str(driver), "libnvrtc-absent.so")
    return ctypes.CDLL(str(built / "lib" / "libamdhip64.so")), ctypes.CDLL(str(driver))


@needs_compiler
@pytest.mark.parametrize("source", ["hip.cpp", "hiprtc.cpp"])
def test_the_source_builds_without_a_warning(source: str, tmp_path: Path) -> None:
    defines = ['-DDS4Q_CUDA_DRIVER="x"', '-DDS4Q_NVRTC="x"']
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-fsyntax-only", *defines]
    done = subprocess.run([*command, str(HIPKERN / "cuda" / source)], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@needs_compiler
def test_a_second_build_is_the_first(root: Path) -> None:
    before = (root / "lib" / "libamdhip64.so").stat().st_mtime_ns
    assert cuda.build_for(root.parent, ABSENT, "libnvrtc-absent.so") == root
    assert (root / "lib" / "libamdhip64.so").stat().st_mtime_ns == before
    assert not list(root.parent.glob("tmp*")), "a build left its temporary folder"


@needs_compiler
def test_every_name_that_the_driver_calls_is_exported(root: Path) -> None:
    modules = [path.name for path in HIPKERN.glob("*.py")]
    called = names_called(*modules)
    assert len(called) > 25, f"the walk of {modules} found only {sorted(called)}"
    libraries = {
        False: ctypes.CDLL(str(root / "lib" / "libamdhip64.so")),
        True: ctypes.CDLL(str(root / "lib" / "libhiprtc.so")),
    }
    missing = {
        n for n in called - ENUMERATIONS if not hasattr(libraries[n.startswith("hiprtc")], n)
    }
    assert missing == set()


@needs_compiler
def test_without_a_driver_every_call_answers_no_device(root: Path) -> None:
    library = ctypes.CDLL(str(root / "lib" / "libamdhip64.so"))
    count = ctypes.c_int(7)
    assert library.hipGetDeviceCount(ctypes.byref(count)) == 100
    assert count.value == 0
    assert library.hipInit(0) == 101
    pointer = ctypes.c_void_p()
    assert library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(64)) == 101
    assert library.hipSetDevice(0) == 101
    names = exported("hip.cpp", "hipError_t")
    assert len(names) > 50
    nothing = (ctypes.c_void_p(0),) * 11
    answers = {name: getattr(library, name)(*nothing) for name in names}
    assert set(answers.values()) <= {0, 1, 100, 101}
    assert [name for name in ("hipGetDevice", "hipRuntimeGetVersion") if answers[name] != 1] == []


@needs_compiler
def test_each_hip_call_becomes_the_driver_call_of_its_meaning(
    fake: tuple[ctypes.CDLL, ctypes.CDLL],
) -> None:
    library, driver = fake
    called = ctypes.c_char_p.in_dll(driver, "fake_called")
    seen = (ctypes.c_uint64 * 11).in_dll(driver, "fake_arguments")
    for name, arguments, symbol in FORWARDED:
        assert getattr(library, name)(*map(ctypes.c_uint64, arguments)) == 0
        assert called.value == symbol.encode(), name
        kept = [a for a in arguments if a > 1]  # kinds of copies and flags are not passed on
        passed = list(seen)[: len(arguments)]
        in_order = [a for a in kept if a in passed]
        assert in_order == [a for a in passed if a in kept][: len(in_order)], (name, passed)
        assert len(in_order) >= len(kept) - 1, (name, passed)
    names = {name for name, _, _ in FORWARDED}
    assert names | ANSWERED == set(exported("hip.cpp", "hipError_t"))


@needs_compiler
@pytest.mark.parametrize(
    ("result", "error", "name"),
    [
        (0, 0, b"hipSuccess"),
        (1, 1, b"hipErrorInvalidValue"),
        (2, 2, b"hipErrorOutOfMemory"),
        (34, 35, b"hipErrorInsufficientDriver"),
        (46, 101, b"hipErrorInvalidDevice"),
        (100, 100, b"hipErrorNoDevice"),
        (209, 209, b"hipErrorNoBinaryForGpu"),
        (222, 209, b"hipErrorNoBinaryForGpu"),
        (500, 500, b"hipErrorNotFound"),
        (600, 600, b"hipErrorNotReady"),
        (700, 700, b"hipErrorIllegalAddress"),
        (715, 719, b"hipErrorLaunchFailure"),
        (716, 719, b"hipErrorLaunchFailure"),
        (719, 719, b"hipErrorLaunchFailure"),
        (901, 901, b"hipErrorStreamCaptureInvalidated"),
        (913, 999, b"hipErrorUnknown"),
    ],
)
def test_results_become_hip_errors(
    fake: tuple[ctypes.CDLL, ctypes.CDLL], result: int, error: int, name: bytes
) -> None:
    library, driver = fake
    library.hipGetErrorName.restype = ctypes.c_char_p
    library.hipGetErrorString.restype = ctypes.c_char_p
    library.hipGetLastError()
    answer = ctypes.c_int.in_dll(driver, "fake_answer")
    answer.value = result
    try:
        assert library.hipStreamQuery(ctypes.c_void_p(7)) == error
    finally:
        answer.value = 0
    assert library.hipGetErrorName(error) == name
    assert library.hipGetErrorString(error)
    assert library.hipPeekAtLastError() == (0 if error == 600 else error)
    assert library.hipGetLastError() == (0 if error == 600 else error)
    assert library.hipGetLastError() == 0


@needs_compiler
def test_a_launch_hands_on_its_packed_arguments(fake: tuple[ctypes.CDLL, ctypes.CDLL]) -> None:
    library, driver = fake
    buffer, size = ctypes.c_uint64(5), ctypes.c_size_t(8)
    at, bytes_at = ctypes.addressof(buffer), ctypes.addressof(size)
    grid_and_block = map(ctypes.c_uint, (3, 4, 5, 64, 1, 1, 0))
    launch = [ctypes.c_void_p(9), *grid_and_block, ctypes.c_void_p(7), None]
    passed = (ctypes.c_uint64 * 5).in_dll(driver, "fake_extra")
    for extra in ((1, at, 2, bytes_at, 3), (2, bytes_at, 1, at, 3)):  # 3 ends HIP's list
        packed = (ctypes.c_void_p * 5)(*extra)
        assert library.hipModuleLaunchKernel(*launch, packed) == 0
        assert list(passed) == [1, at, 2, bytes_at, 0]  # 0 ends CUDA's
    for wrong in ((9, at, 2, bytes_at, 3), (1, at, 3, 0, 0)):
        assert library.hipModuleLaunchKernel(*launch, (ctypes.c_void_p * 5)(*wrong)) == 1


@needs_compiler
def test_devices_are_told_apart(fake: tuple[ctypes.CDLL, ctypes.CDLL]) -> None:
    library, driver = fake
    value = ctypes.c_int()
    assert library.hipGetDeviceCount(ctypes.byref(value)) == 0
    assert value.value == 2
    assert library.hipSetDevice(2) == 101
    contexts = []
    for device in (1, 0):
        assert library.hipSetDevice(device) == 0
        assert library.hipGetDevice(ctypes.byref(value)) == 0
        assert value.value == device
        contexts.append((ctypes.c_uint64 * 11).in_dll(driver, "fake_arguments")[0])
    assert contexts == [1071, 1070]
    assert library.hipDeviceGetAttribute(ctypes.byref(value), 63, 0) == 0
    assert value.value == 16  # the fake answers with the number that it was asked for
    assert library.hipDeviceGetAttribute(ctypes.byref(value), 9999, 0) == 1
    properties = ctypes.create_string_buffer(1472)
    assert library.hipGetDevicePropertiesR0600(properties, 0) == 0
    assert properties.raw[1160:].split(b"\0")[0] == b"sm_7576"  # major is number 75, minor 76


@needs_compiler
def test_empty_memory_and_foreign_code_never_reach_the_driver(
    fake: tuple[ctypes.CDLL, ctypes.CDLL],
) -> None:
    library, driver = fake
    called = ctypes.c_char_p.in_dll(driver, "fake_called")
    library.hipStreamQuery(ctypes.c_void_p(7))
    pointer = ctypes.c_void_p(1)
    for allocate in (library.hipMalloc, library.hipHostMalloc):
        assert allocate(ctypes.byref(pointer), ctypes.c_size_t(0), 0) == 0
        assert pointer.value is None
    assert library.hipFree(None) == library.hipHostFree(None) == 0
    elf = b"\x7fELF" + bytes(14) + (224).to_bytes(2, "little") + bytes(44)
    bundle = b"__CLANG_OFFLOAD_BUNDLE__" + bytes(8)
    for image in (elf, bundle):
        assert library.hipModuleLoadData(ctypes.byref(pointer), image) == 209
    assert called.value == b"cuStreamQuery"
    assert library.hipModuleLoadData(ctypes.byref(pointer), elf.replace(b"\xe0", b"\xbe")) == 0
    assert called.value == b"cuModuleLoadData"
    assert library.hipModuleGetFunction(ctypes.byref(pointer), ctypes.c_void_p(9), b"k") == 0
    assert called.value == b"cuFuncLoad"


def test_a_missing_nvrtc_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    check_refused(
        HipLibraryError,
        lambda: cuda.build(tmp_path),
        says=("pip install nvidia-cuda-nvrtc", str(tmp_path / "lib64" / "libnvrtc.so")),
    )


# ---- compiling ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rtc(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        nvrtc = cuda.find_nvrtc()
    except HipLibraryError as error:
        pytest.skip(f"kernels are not compiled for NVIDIA here: {error}")
    built = cuda.build_for(tmp_path_factory.mktemp("rtc"), ABSENT, nvrtc)
    return ctypes.CDLL(str(built / "lib" / "libhiprtc.so"))


def compiled(rtc: ctypes.CDLL, source: str, *words: str) -> tuple[int, str, bytes]:
    """Result, log and code of one program; all of the kernels' headers are at hand."""
    headers = sorted(KERNELS.glob("*.h"))
    texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
    program = ctypes.c_void_p()
    created = rtc.hiprtcCreateProgram(
        ctypes.byref(program), source.encode(), b"test.hip", len(headers), texts, names
    )
    assert created == 0
    given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    result = rtc.hiprtcCompileProgram(program, len(words), given)
    size = ctypes.c_size_t()
    assert rtc.hiprtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert rtc.hiprtcGetProgramLog(program, log) == 0
    code = b""
    if result == 0:
        assert rtc.hiprtcGetCodeSize(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert rtc.hiprtcGetCode(program, buffer) == 0
        code = buffer.raw
    assert rtc.hiprtcDestroyProgram(ctypes.byref(program)) == 0
    return result, log.value.decode(), code


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.hip")), ids=lambda path: path.name)
def test_every_kernel_file_compiles_for_nvidia(rtc: ctypes.CDLL, path: Path) -> None:
    result, log, code = compiled(rtc, path.read_text(encoding="utf-8"), *options(ARCH, {}))
    assert (result, log) == (0, "")
    assert code.startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "defines"), builds(), ids=str)
def test_every_build_compiles_for_nvidia(
    rtc: ctypes.CDLL, file: str, defines: dict[str, int]
) -> None:
    source = (KERNELS / file).read_text(encoding="utf-8")
    result, log, code = compiled(rtc, source, *options(ARCH, defines))
    assert (result, log) == (0, "")
    assert code.startswith(b"\x7fELF")


def test_nothing_is_contracted_and_errors_are_in_the_log(rtc: ctypes.CDLL) -> None:
    kernel = '#include "ds4q_dev.h"\nDS4Q_KERNEL(k, 32, (float* x)) {{ {} }}\n'
    plainly = (f"--gpu-architecture={ARCH}", "-std=c++17")
    result, log, plain = compiled(rtc, kernel.format("x[0] = x[1] * x[2] + x[3];"), *plainly)
    assert (result, log) == (0, "")
    result, log, fused = compiled(
        rtc, kernel.format("x[0] = ds4q_fma(x[1], x[2], x[3]);"), *plainly
    )
    assert (result, log) == (0, "")
    assert plain != fused
    result, log, _ = compiled(rtc, kernel.format("x[0] = unheard_of;"), *plainly)
    assert result == 6
    assert "test.hip(2): error: identifier" in log
    assert compiled(rtc, kernel.format(""), "-std=c++17")[0] == 5, "no architecture was named"
    assert compiled(rtc, kernel.format(""), *plainly, "--no-such-option")[0] == 5
    rtc.hiprtcGetErrorString.restype = ctypes.c_char_p
    assert rtc.hiprtcGetErrorString(6) == b"HIPRTC_ERROR_COMPILATION"


@needs_compiler
def test_without_nvrtc_a_program_is_an_error(root: Path) -> None:
    library = ctypes.CDLL(str(root / "lib" / "libhiprtc.so"))
    program = ctypes.c_void_p()
    assert library.hiprtcCreateProgram(ctypes.byref(program), b"", b"x", 0, None, None) == 11
    names = exported("hiprtc.cpp", "hiprtcResult")
    nothing = (ctypes.c_void_p(0),) * 6
    answers = {name: getattr(library, name)(*nothing) for name in names}
    assert answers.pop("hiprtcCompileProgram") == 5
    assert set(answers.values()) == {11}
