// Owns the declarations of what is called of the CUDA driver and NVRTC, and finds them at run time.
// It defines no hip name. No CUDA header is needed to build, no CUDA library to load the result.
#pragma once
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda {

using Result = int;       // CUresult
using Device = int;       // CUdevice
using Address = uint64_t;  // CUdeviceptr
using Handle = void*;       // CUcontext, CUstream, CUevent, CUmodule, CUfunction, CUgraph(Exec)

enum : Result { kSuccess = 0, kInsufficientDriver = 35, kNoDevice = 100 };

enum Attribute : int {  // CUdevice_attribute
  kMaxThreadsPerBlock = 1,
  kMaxBlockDimX = 2,  // Y and Z follow, then the grid's three
  kMaxGridDimX = 5,
  kSharedPerBlock = 8,
  kConstantMemory = 9,
  kWarpSize = 10,
  kRegistersPerBlock = 12,
  kClockKilohertz = 13,
  kMultiprocessors = 16,
  kIntegrated = 18,
  kPciBus = 33,
  kPciDevice = 34,
  kMemoryClockKilohertz = 36,
  kMemoryBusBits = 37,
  kL2Bytes = 38,
  kThreadsPerMultiprocessor = 39,
  kAsyncEngines = 40,
  kPciDomain = 50,
  kMajor = 75,
  kMinor = 76,
  kSharedPerMultiprocessor = 81,
  kRegistersPerMultiprocessor = 82,
  kSharedPerBlockOptIn = 97,
};

enum : uintptr_t { kParamEnd = 0, kParamBuffer = 1, kParamBufferSize = 2 };  // extra of a launch

// name, symbol (the newest version of each call), arguments
#define CUDA_CALLS(X)                                                                          \
  X(init, "cuInit", (unsigned))                                                                \
  X(driver_version, "cuDriverGetVersion", (int*))                                              \
  X(device_count, "cuDeviceGetCount", (int*))                                                  \
  X(device_get, "cuDeviceGet", (Device*, int))                                                 \
  X(device_name, "cuDeviceGetName", (char*, int, Device))                                      \
  X(device_memory, "cuDeviceTotalMem_v2", (size_t*, Device))                                   \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, Device))                             \
  X(context_retain, "cuDevicePrimaryCtxRetain", (Handle*, Device))                             \
  X(context_use, "cuCtxSetCurrent", (Handle))                                                  \
  X(context_wait, "cuCtxSynchronize", ())                                                      \
  X(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                        \
  X(allocate, "cuMemAlloc_v2", (Address*, size_t))                                             \
  X(release, "cuMemFree_v2", (Address))                                                        \
  X(host_allocate, "cuMemHostAlloc", (void**, size_t, unsigned))                               \
  X(host_release, "cuMemFreeHost", (void*))                                                    \
  X(copy, "cuMemcpy", (Address, Address, size_t))                                              \
  X(copy_async, "cuMemcpyAsync", (Address, Address, size_t, Handle))                           \
  X(upload, "cuMemcpyHtoD_v2", (Address, const void*, size_t))                                 \
  X(upload_async, "cuMemcpyHtoDAsync_v2", (Address, const void*, size_t, Handle))              \
  X(download, "cuMemcpyDtoH_v2", (void*, Address, size_t))                                     \
  X(download_async, "cuMemcpyDtoHAsync_v2", (void*, Address, size_t, Handle))                  \
  X(move, "cuMemcpyDtoD_v2", (Address, Address, size_t))                                       \
  X(move_async, "cuMemcpyDtoDAsync_v2", (Address, Address, size_t, Handle))                    \
  X(fill, "cuMemsetD8_v2", (Address, unsigned char, size_t))                                   \
  X(fill_async, "cuMemsetD8Async", (Address, unsigned char, size_t, Handle))                   \
  X(stream_create, "cuStreamCreate", (Handle*, unsigned))                                      \
  X(stream_destroy, "cuStreamDestroy_v2", (Handle))                                            \
  X(stream_wait, "cuStreamSynchronize", (Handle))                                              \
  X(stream_query, "cuStreamQuery", (Handle))                                                   \
  X(stream_wait_event, "cuStreamWaitEvent", (Handle, Handle, unsigned))                        \
  X(event_create, "cuEventCreate", (Handle*, unsigned))                                        \
  X(event_destroy, "cuEventDestroy_v2", (Handle))                                              \
  X(event_record, "cuEventRecord", (Handle, Handle))                                           \
  X(event_query, "cuEventQuery", (Handle))                                                     \
  X(event_wait, "cuEventSynchronize", (Handle))                                                \
  X(event_elapsed, "cuEventElapsedTime", (float*, Handle, Handle))                             \
  X(capture_begin, "cuStreamBeginCapture_v2", (Handle, int))                                   \
  X(capture_end, "cuStreamEndCapture", (Handle, Handle*))                                      \
  X(capture_status, "cuStreamIsCapturing", (Handle, int*))                                     \
  X(graph_destroy, "cuGraphDestroy", (Handle))                                                 \
  X(graph_nodes, "cuGraphGetNodes", (Handle, Handle*, size_t*))                                \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", (Handle*, Handle, unsigned long long))   \
  X(graph_launch, "cuGraphLaunch", (Handle, Handle))                                           \
  X(graph_exec_destroy, "cuGraphExecDestroy", (Handle))                                        \
  X(module_load, "cuModuleLoadData", (Handle*, const void*))                                   \
  X(module_unload, "cuModuleUnload", (Handle))                                                 \
  X(module_function, "cuModuleGetFunction", (Handle*, Handle, const char*))                    \
  X(module_global, "cuModuleGetGlobal_v2", (Address*, size_t*, Handle, const char*))           \
  X(function_load, "cuFuncLoad", (Handle))                                                     \
  X(function_attribute, "cuFuncGetAttribute", (int*, int, Handle))                             \
  X(launch, "cuLaunchKernel",                                                                  \
    (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle,     \
     void**, void**))

#define NVRTC_CALLS(X)                                                                         \
  X(version, "nvrtcVersion", (int*, int*))                                                     \
  X(create, "nvrtcCreateProgram",                                                              \
    (Handle*, const char*, const char*, int, const char* const*, const char* const*))          \
  X(destroy, "nvrtcDestroyProgram", (Handle*))                                                 \
  X(compile, "nvrtcCompileProgram", (Handle, int, const char* const*))                         \
  X(log_bytes, "nvrtcGetProgramLogSize", (Handle, size_t*))                                    \
  X(log, "nvrtcGetProgramLog", (Handle, char*))                                                \
  X(code_bytes, "nvrtcGetCUBINSize", (Handle, size_t*))                                        \
  X(code, "nvrtcGetCUBIN", (Handle, char*))                                                    \
  X(add_name, "nvrtcAddNameExpression", (Handle, const char*))                                 \
  X(lowered_name, "nvrtcGetLoweredName", (Handle, const char*, const char**))

#define DS4Q_MEMBER(name, symbol, arguments) Result(*name) arguments = nullptr;
#define DS4Q_LOOK_UP(name, symbol, arguments)                        \
  name = reinterpret_cast<decltype(name)>(dlsym(library, symbol)); \
  complete = complete && name != nullptr;

struct Driver {
  CUDA_CALLS(DS4Q_MEMBER)
  Result load(const char* file) {
    void* library = dlopen(file, RTLD_NOW);
    if (library == nullptr) return kNoDevice;
    bool complete = true;
    CUDA_CALLS(DS4Q_LOOK_UP)
    return complete ? kSuccess : kInsufficientDriver;
  }
};

struct Compiler {
  NVRTC_CALLS(DS4Q_MEMBER)
  bool load(const char* file) {
    void* library = dlopen(file, RTLD_NOW);
    if (library == nullptr) return false;
    bool complete = true;
    NVRTC_CALLS(DS4Q_LOOK_UP)
    return complete;
  }
};

}  // namespace cuda
