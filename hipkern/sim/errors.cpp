// Owns the names and texts of error codes.
#include "hip.h"

namespace {

struct Text {
  int code;
  const char *name, *text;
};

constexpr Text kTexts[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {9, "hipErrorInvalidConfiguration", "invalid configuration argument"},
    {100, "hipErrorNoDevice", "no device is detected"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {200, "hipErrorInvalidImage", "device kernel image is invalid"},
    {209, "hipErrorNoBinaryForGpu", "no kernel image for this device"},
    {303, "hipErrorSharedObjectInitFailed", "shared object initialization failed"},
    {304, "hipErrorOperatingSystem", "an operating system call failed"},
    {400, "hipErrorInvalidHandle", "invalid resource handle"},
    {500, "hipErrorNotFound", "named symbol not found"},
    {600, "hipErrorNotReady", "device not ready"},
    {700, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {719, "hipErrorLaunchFailure", "unspecified launch failure"},
    {801, "hipErrorNotSupported", "operation not supported"},
    {900, "hipErrorStreamCaptureUnsupported", "not permitted while a stream is capturing"},
    {901, "hipErrorStreamCaptureInvalidated", "capture was invalidated by an earlier error"},
    {902, "hipErrorStreamCaptureMerge", "would merge two captures"},
    {903, "hipErrorStreamCaptureUnmatched", "the capture was begun on another stream"},
    {904, "hipErrorStreamCaptureUnjoined", "work of another stream was not joined"},
    {905, "hipErrorStreamCaptureIsolation", "depends on work outside of the capture"},
    {906, "hipErrorStreamCaptureImplicit", "depends on the capture through the null stream"},
    {907, "hipErrorCapturedEvent", "the event was last recorded in a capture"},
    {999, "hipErrorUnknown", "unknown error"},
};

const Text& text_of(hipError_t code) {
  for (const Text& text : kTexts) {
    if (text.code == code) return text;
  }
  return text_of(hipErrorUnknown);
}

}  // namespace

DS4Q_EXPORT const char* hipGetErrorName(hipError_t code) { return text_of(code).name; }
DS4Q_EXPORT const char* hipGetErrorString(hipError_t code) { return text_of(code).text; }
