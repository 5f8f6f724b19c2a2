// Owns libhiprtc.so for NVIDIA GPUs: hiprtc calls as NVRTC's, hiprtc's options as NVRTC's, machine
// code as the result. A program handle is NVRTC's own. It opens no device and loads no module.
#include <cstring>
#include <string>
#include <vector>

#include "cuda.h"

namespace {

using namespace cuda;
using hiprtcResult = int;  // 0 to 11 mean the same on both sides

enum : hiprtcResult { kInvalidInput = 3, kInvalidOption = 5, kInternalError = 11 };

const Compiler* compiler() {  // null: NVRTC cannot be loaded
  static const Compiler* one = [] {
    Compiler* loading = new Compiler;
    return loading->load(DS4Q_NVRTC) ? loading : nullptr;
  }();
  return one;
}

template <class... Of, class... Given>
hiprtcResult call(Result (*Compiler::*function)(Of...), Given... given) {
  if (compiler() == nullptr) return kInternalError;
  Result result = (compiler()->*function)(given...);
  return result <= kInternalError ? result : kInternalError;
}

bool starts(const std::string& text, const char* with) {
  return text.compare(0, std::strlen(with), with) == 0;
}

// What hiprtc is told, said to NVRTC. Contraction is off always, as amdgcn is told with
// -ffp-contract=off; NVRTC knows no levels of optimization. False: no architecture is named.
bool translate(int count, const char* const* options, std::vector<std::string>& nvrtc) {
  nvrtc = {"--fmad=false", "--device-as-default-execution-space", "-D__builtin_memcpy=memcpy"};
  bool architecture = false;
  for (int i = 0; i < count; i++) {
    std::string option = options[i];
    if (option == "-ffp-contract=off" || starts(option, "-O")) continue;
    for (const char* spelt : {"--offload-arch=", "--gpu-architecture="}) {
      if (starts(option, spelt)) {
        option = "--gpu-architecture=" + option.substr(std::strlen(spelt));
        architecture = true;
      }
    }
    nvrtc.push_back(option);
  }
  return architecture;
}

}  // namespace

EXPORT const char* hiprtcGetErrorString(hiprtcResult result) {
  static const char* const names[] = {
      "HIPRTC_SUCCESS",
      "HIPRTC_ERROR_OUT_OF_MEMORY",
      "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE",
      "HIPRTC_ERROR_INVALID_INPUT",
      "HIPRTC_ERROR_INVALID_PROGRAM",
      "HIPRTC_ERROR_INVALID_OPTION",
      "HIPRTC_ERROR_COMPILATION",
      "HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE",
      "HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
      "HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
      "HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
      "HIPRTC_ERROR_INTERNAL_ERROR",
  };
  return result >= 0 && result <= kInternalError ? names[result] : "Invalid HIPRTC error code";
}

EXPORT hiprtcResult hiprtcVersion(int* major, int* minor) {
  return call(&Compiler::version, major, minor);
}

EXPORT hiprtcResult hiprtcCreateProgram(Handle* program, const char* source, const char* name,
                                        int headers, const char* const* texts,
                                        const char* const* names) {
  return call(&Compiler::create, program, source, name, headers, texts, names);
}

EXPORT hiprtcResult hiprtcDestroyProgram(Handle* program) {
  return call(&Compiler::destroy, program);
}

EXPORT hiprtcResult hiprtcAddNameExpression(Handle program, const char* expression) {
  return call(&Compiler::add_name, program, expression);
}

EXPORT hiprtcResult hiprtcGetLoweredName(Handle program, const char* expression,
                                         const char** lowered) {
  return call(&Compiler::lowered_name, program, expression, lowered);
}

EXPORT hiprtcResult hiprtcCompileProgram(Handle program, int count, const char* const* options) {
  if (count < 0 || (count > 0 && options == nullptr)) return kInvalidInput;
  std::vector<std::string> translated;
  if (!translate(count, options, translated)) return kInvalidOption;
  std::vector<const char*> pointers;
  for (const std::string& option : translated) pointers.push_back(option.c_str());
  return call(&Compiler::compile, program, static_cast<int>(pointers.size()), pointers.data());
}

EXPORT hiprtcResult hiprtcGetProgramLogSize(Handle program, size_t* bytes) {
  return call(&Compiler::log_bytes, program, bytes);
}

EXPORT hiprtcResult hiprtcGetProgramLog(Handle program, char* log) {
  return call(&Compiler::log, program, log);
}

EXPORT hiprtcResult hiprtcGetCodeSize(Handle program, size_t* bytes) {
  return call(&Compiler::code_bytes, program, bytes);
}

EXPORT hiprtcResult hiprtcGetCode(Handle program, char* code) {
  return call(&Compiler::code, program, code);
}
