// Owns libamdhip64.so for NVIDIA GPUs: each hip call is one call of the CUDA driver, in the primary
// context of the calling thread's device. It compiles nothing (hiprtc.cpp) and keeps no handles: a
// hip handle is the driver's own.
//
// Without a driver or a GPU, calls answer as HIP's own library does: 100 to a count, 101 to others.
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include "cuda.h"
#include "hip_types.h"

namespace {

using namespace cuda;

struct Machine {  // the driver, and the devices that it found
  Driver driver;
  Result state;
  std::vector<Handle> contexts;  // a primary context a device, null until it is used
  std::mutex retaining;

  Machine() : state(driver.load(DS4Q_CUDA_DRIVER)) {
    int devices = 0;
    if (state == kSuccess) state = driver.init(0);
    if (state == kSuccess) state = driver.device_count(&devices);
    if (state == kSuccess && devices == 0) state = kNoDevice;
    if (state == kSuccess) contexts.resize(devices);
  }
};

Machine& machine() {
  static Machine* one = new Machine;  // never destroyed: other threads may call until the end
  return *one;
}

thread_local int current_device = 0;
thread_local Handle current_context = nullptr;
thread_local hipError_t last_error = hipSuccess;

// Numbers that both sides know mean the same; for the rest, the nearest that HIP has.
hipError_t translate(Result result) {
  switch (result) {
    case 34:   // stub library
    case 36:   // call requires a newer driver
    case 803:  // driver mismatch
    case 804:  // not supported on this device
      return hipErrorInsufficientDriver;
    case 46:   // device unavailable
    case 102:  // device not licensed
    case 802:  // system not ready
      return hipErrorInvalidDevice;
    case 222:  // PTX version
    case 223:  // compilation of PTX disabled
      return hipErrorNoBinaryForGpu;
    case 714:  // hardware stack
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // address space
    case 718:  // program counter
      return hipErrorLaunchFailure;
    case 800:  // not permitted
      return hipErrorNotSupported;
    default:
      return hip_name_of(result) == nullptr ? hipErrorUnknown : result;
  }
}

hipError_t remember(hipError_t error) {
  if (error != hipSuccess && error != hipErrorNotReady) last_error = error;
  return error;
}

hipError_t answer(Result result) { return remember(translate(result)); }

// Makes the thread's device current; what a call needs before it may use `machine().driver`.
hipError_t enter() {
  Machine& here = machine();
  if (here.state == kNoDevice) return remember(hipErrorInvalidDevice);
  if (here.state != kSuccess) return answer(here.state);
  Handle context;
  {
    std::lock_guard<std::mutex> lock(here.retaining);
    Handle& retained = here.contexts[current_device];
    if (retained == nullptr) {
      Device device;
      Result result = here.driver.device_get(&device, current_device);
      if (result == kSuccess) result = here.driver.context_retain(&retained, device);
      if (result != kSuccess) return answer(result);
    }
    context = retained;
  }
  if (context == current_context) return hipSuccess;
  Result result = here.driver.context_use(context);
  if (result == kSuccess) current_context = context;
  return answer(result);
}

// One driver call: hip arguments in, a hip error out.
template <class... Of, class... Given>
hipError_t call(Result (*Driver::*function)(Of...), Given... given) {
  hipError_t error = enter();
  return error != hipSuccess ? error : answer((machine().driver.*function)(given...));
}

Address address(const void* pointer) { return reinterpret_cast<Address>(pointer); }

int attribute(int which, int device) {  // 0 where the driver does not know it
  int value = 0;
  return machine().driver.device_attribute(&value, which, device) == kSuccess ? value : 0;
}

bool known_device(int device) {
  return device >= 0 && device < static_cast<int>(machine().contexts.size());
}

}  // namespace

// ---- library, devices, errors -------------------------------------------------------------------
EXPORT hipError_t hipInit(unsigned) { return enter(); }

EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  if (version == nullptr) return remember(hipErrorInvalidValue);
  *version = DS4Q_HIP_VERSION;
  return hipSuccess;
}

EXPORT hipError_t hipDriverGetVersion(int* version) {
  return call(&Driver::driver_version, version);
}

EXPORT hipError_t hipGetDeviceCount(int* count) {
  if (count == nullptr) return remember(hipErrorInvalidValue);
  *count = static_cast<int>(machine().contexts.size());
  return answer(machine().state);
}

EXPORT hipError_t hipGetDevice(int* device) {
  if (device == nullptr) return remember(hipErrorInvalidValue);
  *device = current_device;
  return hipSuccess;
}

EXPORT hipError_t hipSetDevice(int device) {
  if (!known_device(device)) return remember(hipErrorInvalidDevice);
  current_device = device;
  return enter();
}

EXPORT hipError_t hipDeviceGetName(char* name, int bytes, int device) {
  return call(&Driver::device_name, name, bytes, device);
}

EXPORT hipError_t hipDeviceGetAttribute(int* value, int which, int device) {
  for (const HipAttribute& known : kHipAttributes) {
    if (known.hip == which) return call(&Driver::device_attribute, value, known.cuda, device);
  }
  return remember(hipErrorInvalidValue);
}

EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  if (properties == nullptr) return remember(hipErrorInvalidValue);
  if (!known_device(device)) return remember(hipErrorInvalidDevice);
  hipDeviceProp_tR0600& p = *properties;
  std::memset(&p, 0, sizeof p);
  hipError_t error = call(&Driver::device_name, p.name, static_cast<int>(sizeof p.name), device);
  if (error == hipSuccess) error = call(&Driver::device_memory, &p.totalGlobalMem, device);
  if (error != hipSuccess) return error;
  p.major = attribute(kMajor, device), p.minor = attribute(kMinor, device);
  std::snprintf(p.gcnArchName, sizeof p.gcnArchName, "sm_%d%d", p.major, p.minor);
  p.sharedMemPerBlock = attribute(kSharedPerBlock, device);
  p.sharedMemPerBlockOptin = attribute(kSharedPerBlockOptIn, device);
  p.sharedMemPerMultiprocessor = attribute(kSharedPerMultiprocessor, device);
  p.maxSharedMemoryPerMultiProcessor = p.sharedMemPerMultiprocessor;
  p.totalConstMem = attribute(kConstantMemory, device);
  p.regsPerBlock = attribute(kRegistersPerBlock, device);
  p.regsPerMultiprocessor = attribute(kRegistersPerMultiprocessor, device);
  p.warpSize = attribute(kWarpSize, device);
  p.maxThreadsPerBlock = attribute(kMaxThreadsPerBlock, device);
  p.maxThreadsPerMultiProcessor = attribute(kThreadsPerMultiprocessor, device);
  for (int axis = 0; axis < 3; axis++) {
    p.maxThreadsDim[axis] = attribute(kMaxBlockDimX + axis, device);
    p.maxGridSize[axis] = attribute(kMaxGridDimX + axis, device);
  }
  p.multiProcessorCount = attribute(kMultiprocessors, device);
  p.clockRate = attribute(kClockKilohertz, device);
  p.memoryClockRate = attribute(kMemoryClockKilohertz, device);
  p.memoryBusWidth = attribute(kMemoryBusBits, device);
  p.l2CacheSize = attribute(kL2Bytes, device);
  p.asyncEngineCount = attribute(kAsyncEngines, device);
  p.integrated = attribute(kIntegrated, device);
  p.pciBusID = attribute(kPciBus, device);
  p.pciDeviceID = attribute(kPciDevice, device);
  p.pciDomainID = attribute(kPciDomain, device);
  return hipSuccess;
}

EXPORT hipError_t hipDeviceSynchronize() { return call(&Driver::context_wait); }

EXPORT hipError_t hipGetLastError() {
  hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}

EXPORT hipError_t hipPeekAtLastError() { return last_error; }

EXPORT const char* hipGetErrorName(hipError_t error) {
  const char* name = hip_name_of(error);
  return name == nullptr ? "hipErrorUnknown" : name;
}

EXPORT const char* hipGetErrorString(hipError_t error) {
  const char* text = hip_text_of(error);
  return text == nullptr ? "unknown error" : text;
}

// ---- memory -------------------------------------------------------------------------------------
EXPORT hipError_t hipMemGetInfo(size_t* free, size_t* total) {
  return call(&Driver::memory_info, free, total);
}

EXPORT hipError_t hipMalloc(void** pointer, size_t bytes) {
  if (pointer == nullptr) return remember(hipErrorInvalidValue);
  *pointer = nullptr;
  if (bytes == 0) return hipSuccess;  // the driver refuses what HIP allows
  return call(&Driver::allocate, reinterpret_cast<Address*>(pointer), bytes);
}

EXPORT hipError_t hipFree(void* pointer) {
  return pointer == nullptr ? hipSuccess : call(&Driver::release, address(pointer));
}

EXPORT hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned flags) {
  if (pointer == nullptr) return remember(hipErrorInvalidValue);
  *pointer = nullptr;
  if (bytes == 0) return hipSuccess;
  return call(&Driver::host_allocate, pointer, bytes, flags & 7);  // portable, mapped, combined
}

EXPORT hipError_t hipHostFree(void* pointer) {
  return pointer == nullptr ? hipSuccess : call(&Driver::host_release, pointer);
}

EXPORT hipError_t hipMemcpy(void* to, const void* from, size_t bytes, int kind) {
  switch (kind) {
    case hipMemcpyHostToDevice:
      return call(&Driver::upload, address(to), from, bytes);
    case hipMemcpyDeviceToHost:
      return call(&Driver::download, to, address(from), bytes);
    case hipMemcpyDeviceToDevice:
      return call(&Driver::move, address(to), address(from), bytes);
    case hipMemcpyHostToHost:
    case hipMemcpyDefault:
      return call(&Driver::copy, address(to), address(from), bytes);
    default:
      return remember(hipErrorInvalidMemcpyDirection);
  }
}

EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind,
                                 Handle stream) {
  switch (kind) {
    case hipMemcpyHostToDevice:
      return call(&Driver::upload_async, address(to), from, bytes, stream);
    case hipMemcpyDeviceToHost:
      return call(&Driver::download_async, to, address(from), bytes, stream);
    case hipMemcpyDeviceToDevice:
      return call(&Driver::move_async, address(to), address(from), bytes, stream);
    case hipMemcpyHostToHost:
    case hipMemcpyDefault:
      return call(&Driver::copy_async, address(to), address(from), bytes, stream);
    default:
      return remember(hipErrorInvalidMemcpyDirection);
  }
}

EXPORT hipError_t hipMemcpyHtoD(void* to, const void* from, size_t bytes) {
  return hipMemcpy(to, from, bytes, hipMemcpyHostToDevice);
}
EXPORT hipError_t hipMemcpyDtoH(void* to, void* from, size_t bytes) {
  return hipMemcpy(to, from, bytes, hipMemcpyDeviceToHost);
}
EXPORT hipError_t hipMemcpyDtoD(void* to, void* from, size_t bytes) {
  return hipMemcpy(to, from, bytes, hipMemcpyDeviceToDevice);
}
EXPORT hipError_t hipMemcpyHtoDAsync(void* to, const void* from, size_t bytes, Handle stream) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyHostToDevice, stream);
}
EXPORT hipError_t hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, Handle stream) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyDeviceToHost, stream);
}
EXPORT hipError_t hipMemcpyDtoDAsync(void* to, void* from, size_t bytes, Handle stream) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyDeviceToDevice, stream);
}

EXPORT hipError_t hipMemset(void* to, int byte, size_t bytes) {
  return call(&Driver::fill, address(to), static_cast<unsigned char>(byte), bytes);
}
EXPORT hipError_t hipMemsetAsync(void* to, int byte, size_t bytes, Handle stream) {
  return call(&Driver::fill_async, address(to), static_cast<unsigned char>(byte), bytes, stream);
}

// ---- streams, events ----------------------------------------------------------------------------
EXPORT hipError_t hipStreamCreate(Handle* stream) {
  return call(&Driver::stream_create, stream, 0u);
}
EXPORT hipError_t hipStreamCreateWithFlags(Handle* stream, unsigned flags) {
  return call(&Driver::stream_create, stream, flags);
}
EXPORT hipError_t hipStreamDestroy(Handle stream) { return call(&Driver::stream_destroy, stream); }
EXPORT hipError_t hipStreamSynchronize(Handle stream) { return call(&Driver::stream_wait, stream); }
EXPORT hipError_t hipStreamQuery(Handle stream) { return call(&Driver::stream_query, stream); }
EXPORT hipError_t hipStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
  return call(&Driver::stream_wait_event, stream, event, flags);
}

EXPORT hipError_t hipEventCreate(Handle* event) { return call(&Driver::event_create, event, 0u); }
EXPORT hipError_t hipEventCreateWithFlags(Handle* event, unsigned flags) {
  return call(&Driver::event_create, event, flags);
}
EXPORT hipError_t hipEventDestroy(Handle event) { return call(&Driver::event_destroy, event); }
EXPORT hipError_t hipEventRecord(Handle event, Handle stream) {
  return call(&Driver::event_record, event, stream);
}
EXPORT hipError_t hipEventQuery(Handle event) { return call(&Driver::event_query, event); }
EXPORT hipError_t hipEventSynchronize(Handle event) { return call(&Driver::event_wait, event); }
EXPORT hipError_t hipEventElapsedTime(float* ms, Handle first, Handle last) {
  return call(&Driver::event_elapsed, ms, first, last);
}

// ---- graphs -------------------------------------------------------------------------------------
EXPORT hipError_t hipStreamBeginCapture(Handle stream, int mode) {
  return call(&Driver::capture_begin, stream, mode);
}
EXPORT hipError_t hipStreamEndCapture(Handle stream, Handle* graph) {
  return call(&Driver::capture_end, stream, graph);
}
EXPORT hipError_t hipStreamIsCapturing(Handle stream, int* status) {
  return call(&Driver::capture_status, stream, status);
}
EXPORT hipError_t hipGraphInstantiate(Handle* executable, Handle graph, Handle*, char*, size_t) {
  return call(&Driver::graph_instantiate, executable, graph, 0ull);
}
EXPORT hipError_t hipGraphInstantiateWithFlags(Handle* executable, Handle graph,
                                               unsigned long long flags) {
  return call(&Driver::graph_instantiate, executable, graph, flags);
}
EXPORT hipError_t hipGraphGetNodes(Handle graph, Handle* nodes, size_t* count) {
  return call(&Driver::graph_nodes, graph, nodes, count);
}
EXPORT hipError_t hipGraphLaunch(Handle executable, Handle stream) {
  return call(&Driver::graph_launch, executable, stream);
}
EXPORT hipError_t hipGraphDestroy(Handle graph) { return call(&Driver::graph_destroy, graph); }
EXPORT hipError_t hipGraphExecDestroy(Handle executable) {
  return call(&Driver::graph_exec_destroy, executable);
}

// ---- modules, launches --------------------------------------------------------------------------
EXPORT hipError_t hipModuleLoadData(Handle* module, const void* image) {
  if (module == nullptr || image == nullptr) return remember(hipErrorInvalidValue);
  if (is_for_amd(static_cast<const unsigned char*>(image))) {
    return remember(hipErrorNoBinaryForGpu);
  }
  return call(&Driver::module_load, module, image);
}
EXPORT hipError_t hipModuleUnload(Handle module) { return call(&Driver::module_unload, module); }
EXPORT hipError_t hipModuleGetFunction(Handle* function, Handle module, const char* name) {
  hipError_t error = call(&Driver::module_function, function, module, name);
  // Loaded now: a first launch inside a capture could not load it.
  return error == hipSuccess ? call(&Driver::function_load, *function) : error;
}
EXPORT hipError_t hipModuleGetGlobal(void** pointer, size_t* bytes, Handle module,
                                     const char* name) {
  return call(&Driver::module_global, reinterpret_cast<Address*>(pointer), bytes, module, name);
}
EXPORT hipError_t hipFuncGetAttribute(int* value, int which, Handle function) {
  return call(&Driver::function_attribute, value, which, function);  // the same numbers
}

EXPORT hipError_t hipModuleLaunchKernel(Handle function, unsigned grid_x, unsigned grid_y,
                                        unsigned grid_z, unsigned block_x, unsigned block_y,
                                        unsigned block_z, unsigned shared_bytes, Handle stream,
                                        void** parameters, void** extra) {
  void* packed[] = {reinterpret_cast<void*>(kParamBuffer), nullptr,
                    reinterpret_cast<void*>(kParamBufferSize), nullptr,
                    reinterpret_cast<void*>(kParamEnd)};
  if (extra != nullptr) {  // the two libraries end the list with different numbers
    for (; *extra != reinterpret_cast<void*>(kHipParamEnd); extra += 2) {
      if (*extra != packed[0] && *extra != packed[2]) return remember(hipErrorInvalidValue);
      packed[*extra == packed[0] ? 1 : 3] = extra[1];
    }
    if (packed[1] == nullptr || packed[3] == nullptr) return remember(hipErrorInvalidValue);
  }
  return call(&Driver::launch, function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
              shared_bytes, stream, parameters, extra == nullptr ? nullptr : packed);
}
