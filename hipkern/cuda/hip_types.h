// Owns what callers of libamdhip64.so see: error numbers, their names and texts, the device
// properties, attribute numbers. Declared here, so that no HIP header is needed. It calls nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda.h"

using hipError_t = int;

constexpr int DS4Q_HIP_VERSION = 71500000;  // HIP 7.15: the calls are that release's

#define HIP_ERRORS(X)                                                                             \
  X(hipSuccess, 0, "no error")                                                                    \
  X(hipErrorInvalidValue, 1, "invalid argument")                                                  \
  X(hipErrorOutOfMemory, 2, "out of memory")                                                      \
  X(hipErrorNotInitialized, 3, "initialization error")                                            \
  X(hipErrorDeinitialized, 4, "driver shutting down")                                             \
  X(hipErrorInvalidConfiguration, 9, "invalid configuration argument")                            \
  X(hipErrorInvalidDevicePointer, 17, "invalid device pointer")                                   \
  X(hipErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                      \
  X(hipErrorInsufficientDriver, 35, "driver version is insufficient for runtime version")         \
  X(hipErrorNoDevice, 100, "no GPU is detected")                                                  \
  X(hipErrorInvalidDevice, 101, "invalid device ordinal")                                         \
  X(hipErrorInvalidImage, 200, "device kernel image is invalid")                                  \
  X(hipErrorInvalidContext, 201, "invalid device context")                                        \
  X(hipErrorNoBinaryForGpu, 209, "no kernel image is available for execution on the device")      \
  X(hipErrorECCNotCorrectable, 214, "uncorrectable ECC error encountered")                        \
  X(hipErrorUnsupportedLimit, 215, "limit is not supported on this architecture")                 \
  X(hipErrorInvalidKernelFile, 218, "invalid kernel file")                                        \
  X(hipErrorInvalidSource, 300, "device kernel image is invalid")                                 \
  X(hipErrorFileNotFound, 301, "file not found")                                                  \
  X(hipErrorSharedObjectSymbolNotFound, 302, "shared object symbol not found")                    \
  X(hipErrorSharedObjectInitFailed, 303, "shared object initialization failed")                   \
  X(hipErrorOperatingSystem, 304, "OS call failed or operation not supported on this OS")         \
  X(hipErrorInvalidHandle, 400, "invalid resource handle")                                        \
  X(hipErrorIllegalState, 401, "the operation cannot be performed in the present state")          \
  X(hipErrorNotFound, 500, "named symbol not found")                                              \
  X(hipErrorNotReady, 600, "device not ready")                                                    \
  X(hipErrorIllegalAddress, 700, "an illegal memory access was encountered")                      \
  X(hipErrorLaunchOutOfResources, 701, "out of resources")                                        \
  X(hipErrorLaunchTimeOut, 702, "the launch timed out and was terminated")                        \
  X(hipErrorContextIsDestroyed, 709, "context is destroyed")                                      \
  X(hipErrorAssert, 710, "device-side assert triggered")                                          \
  X(hipErrorLaunchFailure, 719, "unspecified launch failure")                                     \
  X(hipErrorCooperativeLaunchTooLarge, 720, "too many blocks in cooperative launch")              \
  X(hipErrorNotSupported, 801, "operation not supported")                                         \
  X(hipErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")    \
  X(hipErrorStreamCaptureInvalidated, 901,                                                        \
    "operation failed due to a previous error during capture")                                    \
  X(hipErrorStreamCaptureMerge, 902,                                                              \
    "operation would result in a merge of separate capture sequences")                            \
  X(hipErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began")  \
  X(hipErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                     \
  X(hipErrorStreamCaptureIsolation, 905,                                                          \
    "dependency created on uncaptured work in another stream")                                    \
  X(hipErrorStreamCaptureImplicit, 906,                                                           \
    "operation would make the legacy stream depend on a capturing stream")                        \
  X(hipErrorCapturedEvent, 907,                                                                   \
    "operation not permitted on an event last recorded in a capturing stream")                    \
  X(hipErrorStreamCaptureWrongThread, 908,                                                        \
    "attempt to terminate a thread-local capture sequence from another thread")                   \
  X(hipErrorGraphExecUpdateFailure, 910, "the graph update was not performed")                    \
  X(hipErrorUnknown, 999, "unknown error")

#define DS4Q_NUMBER(name, number, text) name = number,
enum : hipError_t { HIP_ERRORS(DS4Q_NUMBER) };

#define DS4Q_NAME(name, number, text) \
  if (error == number) return #name;
#define DS4Q_TEXT(name, number, text) \
  if (error == number) return text;
inline const char* hip_name_of(hipError_t error) {  // null: no such error
  HIP_ERRORS(DS4Q_NAME)
  return nullptr;
}
inline const char* hip_text_of(hipError_t error) {
  HIP_ERRORS(DS4Q_TEXT)
  return nullptr;
}

enum hipMemcpyKind : int {
  hipMemcpyHostToHost,
  hipMemcpyHostToDevice,
  hipMemcpyDeviceToHost,
  hipMemcpyDeviceToDevice,
  hipMemcpyDefault,
};

constexpr uintptr_t kHipParamEnd = 3;  // of a launch's extra; buffer and size are CUDA's 1 and 2

struct HipAttribute {
  int hip, cuda;
};
constexpr HipAttribute kHipAttributes[] = {
    {5, cuda::kClockKilohertz},      {19, cuda::kL2Bytes},
    {23, cuda::kMajor},              {56, cuda::kMaxThreadsPerBlock},
    {59, cuda::kMemoryBusBits},      {60, cuda::kMemoryClockKilohertz},
    {61, cuda::kMinor},              {63, cuda::kMultiprocessors},
    {74, cuda::kSharedPerBlock},     {87, cuda::kWarpSize},
};

// An ELF file for machine 224 (amdgcn), or clang's bundle of such files.
inline bool is_for_amd(const unsigned char* image) {
  static const char bundle[] = "__CLANG_OFFLOAD_BUNDLE__";
  if (std::strncmp(reinterpret_cast<const char*>(image), bundle, sizeof bundle - 1) == 0) {
    return true;
  }
  return std::strncmp(reinterpret_cast<const char*>(image), "\177ELF", 4) == 0 &&
         image[18] == 224 && image[19] == 0;
}

struct hipDeviceProp_tR0600 {  // the layout of HIP 6 and 7
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem;
  size_t sharedMemPerBlock;
  int regsPerBlock;
  int warpSize;
  size_t memPitch;
  int maxThreadsPerBlock;
  int maxThreadsDim[3];
  int maxGridSize[3];
  int clockRate;
  size_t totalConstMem;
  int major;
  int minor;
  size_t textureAlignment;
  size_t texturePitchAlignment;
  int deviceOverlap;
  int multiProcessorCount;
  int kernelExecTimeoutEnabled;
  int integrated;
  int canMapHostMemory;
  int computeMode;
  int textures[40];  // and surfaces
  size_t surfaceAlignment;
  int concurrentKernels;
  int ECCEnabled;
  int pciBusID;
  int pciDeviceID;
  int pciDomainID;
  int tccDriver;
  int asyncEngineCount;
  int unifiedAddressing;
  int memoryClockRate;
  int memoryBusWidth;
  int l2CacheSize;
  int persistingL2CacheMaxSize;
  int maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported;
  int globalL1CacheSupported;
  int localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor;
  int managedMemory;
  int isMultiGpuBoard;
  int multiGpuBoardGroupID;
  int hostNativeAtomicSupported;
  int singleToDoublePrecisionPerfRatio;
  int pageableMemoryAccess;
  int concurrentManagedAccess;
  int computePreemptionSupported;
  int canUseHostPointerForRegisteredMem;
  int cooperativeLaunch;
  int cooperativeMultiDeviceLaunch;
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables;
  int directManagedMemAccessFromHost;
  int maxBlocksPerMultiProcessor;
  int accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported;
  int sparseHipArraySupported;
  int hostRegisterReadOnlySupported;
  int timelineSemaphoreInteropSupported;
  int memoryPoolsSupported;
  int gpuDirectRDMASupported;
  unsigned gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering;
  unsigned memoryPoolSupportedHandleTypes;
  int deferredMappingHipArraySupported;
  int ipcEventSupported;
  int clusterLaunch;
  int unifiedFunctionPointers;
  int reserved[63];
  int hipReserved[32];
  char gcnArchName[256];
  size_t maxSharedMemoryPerMultiProcessor;
  int clockInstructionRate;
  unsigned arch;  // one bit a feature
  unsigned* hdpMemFlushCntl;
  unsigned* hdpRegFlushCntl;
  int cooperativeMultiDeviceUnmatchedFunc;
  int cooperativeMultiDeviceUnmatchedGridDim;
  int cooperativeMultiDeviceUnmatchedBlockDim;
  int cooperativeMultiDeviceUnmatchedSharedMem;
  int isLargeBar;
  int asicRevision;
};
static_assert(sizeof(hipDeviceProp_tR0600) == 1472, "the caller's layout");
