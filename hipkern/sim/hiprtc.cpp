// Owns libhiprtc.so of the simulated device: source to shared library by the host's compiler.
// Knows nothing of devices.
//
// DS4Q_SIM_CXX is the compiler's command, its words separated by newlines; DS4Q_SIM_MARCH what it
// is told of the processor.
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "hip.h"

extern char** environ;

namespace {

enum hiprtcResult : int {
  HIPRTC_SUCCESS = 0,
  HIPRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
  HIPRTC_ERROR_INVALID_INPUT = 3,
  HIPRTC_ERROR_INVALID_PROGRAM = 4,
  HIPRTC_ERROR_INVALID_OPTION = 5,
  HIPRTC_ERROR_COMPILATION = 6,
  HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
  HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
  HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
  HIPRTC_ERROR_INTERNAL_ERROR = 11,
};

struct Program {
  std::string source, name, log, code;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::vector<std::pair<std::string, std::string>> expressions;  // name, lowered name
  bool compiled = false;
};

bool plain(const std::string& name) {  // stays inside the folder that it is put in
  return !name.empty() && name[0] != '/' && name.find("..") == std::string::npos;
}

bool put(const std::string& folder, const std::string& name, const std::string& text) {
  for (size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
    mkdir((folder + "/" + name.substr(0, at)).c_str(), 0700);
  }
  FILE* file = std::fopen((folder + "/" + name).c_str(), "wb");
  if (!file) return false;
  bool all = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  return std::fclose(file) == 0 && all;
}

std::string get(const std::string& path) {
  std::string text;
  FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) return text;
  char part[65536];
  while (size_t n = std::fread(part, 1, sizeof part, file)) text.append(part, n);
  std::fclose(file);
  return text;
}

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> found;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size());
    found.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return found;
}

bool starts(const std::string& text, const char* with) {
  return text.compare(0, std::strlen(with), with) == 0;
}

// What of the caller's options the host's compiler is given. Options of the real hiprtc and NVRTC
// that mean nothing here are dropped; one that is not known is an error, not ignored.
bool host_options(int n, const char** given, std::vector<std::string>* kept, std::string* unknown) {
  for (int i = 0; i < n; i++) {
    std::string option = given[i] ? given[i] : "";
    bool joined = option.size() > 2 && (starts(option, "-D") || starts(option, "-U") ||
                                        starts(option, "-I") || starts(option, "-W"));
    if (joined || starts(option, "-march=") || option == "-g" || starts(option, "-fsanitize=")) {
      kept->push_back(option);
    } else if (option == "-O0" || option == "-O1" || option == "-O2" || option == "-O3") {
      kept->push_back(option);
    } else if (!starts(option, "--offload-arch=") && !starts(option, "--gpu-architecture=") &&
               option != "-std=c++17" && option != "--std=c++17" && option != "--fmad=false" &&
               option != "-ffp-contract=off") {
      *unknown = option;
      return false;
    }
  }
  return true;
}

constexpr int kNotRun = -1, kStopped = -2;

// The exit status, or one of the above. Runs in `folder`, so that messages name files as the caller does.
int run(const std::string& folder, std::vector<std::string> command) {
  command.insert(command.begin(), {"/bin/sh", "-c", "cd \"$0\" && exec \"$@\"", folder});
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(&word[0]);
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  std::string log = folder + "/log.txt";
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  pid_t child;
  int failed = posix_spawn(&child, argv[0], &files, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (failed) return kNotRun;
  int status;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return kNotRun;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : kStopped;
}

void remove_folder(const std::string& folder) {
  pid_t child;
  std::string words[] = {"rm", "-rf", folder};
  char* argv[] = {&words[0][0], &words[1][0], &words[2][0], nullptr};
  int status;
  if (posix_spawnp(&child, "rm", nullptr, nullptr, argv, environ) == 0) waitpid(child, &status, 0);
}

hiprtcResult compile_in(const std::string& folder, Program& program,
                        const std::vector<std::string>& options) {
  bool written = put(folder, program.name, program.source);
  for (auto& header : program.headers) {
    written = written && put(folder, header.first, header.second);
  }
  if (!written) {
    program.log = "ds4q sim: could not write to " + folder;
    return HIPRTC_ERROR_INTERNAL_ERROR;
  }
  std::vector<std::string> command = words(DS4Q_SIM_CXX);
  for (const char* word : {"-shared", "-fPIC", "-std=c++17", "-O2", "-ffp-contract=off",
                           "-fno-strict-aliasing", "-fno-math-errno", "-fvisibility=hidden",
                           "-DDS4Q_SIM", "-I."}) {
    command.push_back(word);
  }
  for (const std::string& word : words(DS4Q_SIM_MARCH)) command.push_back(word);
  command.insert(command.end(), options.begin(), options.end());
  for (const std::string& word : {std::string("-o"), std::string("module.out"), std::string("-x"),
                                  std::string("c++"), program.name}) {
    command.push_back(word);
  }
  int status = run(folder, command);
  program.log = get(folder + "/log.txt");
  if (status != 0) {
    // g++ tells so of what it has started: an interrupt, or the system out of memory.
    if (status == kStopped || program.log.find(" signal terminated program ") != std::string::npos) {
      program.log += "ds4q sim: the compiler was stopped\n";
      return HIPRTC_ERROR_INTERNAL_ERROR;
    }
    if (status == kNotRun || status == 127) program.log += "ds4q sim: the compiler could not be run\n";
    return HIPRTC_ERROR_COMPILATION;
  }
  program.code = get(folder + "/module.out");
  return program.code.empty() ? HIPRTC_ERROR_INTERNAL_ERROR : HIPRTC_SUCCESS;
}

}  // namespace

DS4Q_EXPORT hiprtcResult hiprtcVersion(int* major, int* minor) {
  if (!major || !minor) return HIPRTC_ERROR_INVALID_INPUT;
  *major = 7, *minor = 1;
  return HIPRTC_SUCCESS;
}

DS4Q_EXPORT hiprtcResult hiprtcCreateProgram(Program** out, const char* source, const char* name,
                                             int n_headers, const char** headers,
                                             const char** include_names) {
  if (!out || !source || n_headers < 0 || (n_headers && (!headers || !include_names))) {
    return HIPRTC_ERROR_INVALID_INPUT;
  }
  *out = nullptr;
  auto program = new Program;
  program->source = source;
  program->name = name && *name ? name : "program.hip";
  bool good = plain(program->name);
  for (int i = 0; i < n_headers && good; i++) {
    good = headers[i] && include_names[i] && plain(include_names[i]);
    if (good) program->headers.push_back({include_names[i], headers[i]});
  }
  if (!good) {
    delete program;
    return HIPRTC_ERROR_PROGRAM_CREATION_FAILURE;
  }
  *out = program;
  return HIPRTC_SUCCESS;
}

DS4Q_EXPORT hiprtcResult hiprtcCompileProgram(Program* program, int n, const char** options) {
  if (!program) return HIPRTC_ERROR_INVALID_PROGRAM;
  std::vector<std::string> kept;
  std::string unknown;
  if (!host_options(n, options, &kept, &unknown)) {
    program->log = "ds4q sim: option " + unknown + " is not known";
    return HIPRTC_ERROR_INVALID_OPTION;
  }
  const char* base = std::getenv("TMPDIR");
  std::string folder = std::string(base && *base ? base : "/tmp") + "/ds4q-hiprtc-XXXXXX";
  if (!mkdtemp(&folder[0])) {
    program->log = "ds4q sim: could not make a folder like " + folder;
    return HIPRTC_ERROR_INTERNAL_ERROR;
  }
  hiprtcResult result = compile_in(folder, *program, kept);
  remove_folder(folder);
  program->compiled = result == HIPRTC_SUCCESS;
  // Kernels are registered by their plain name, whatever the compiler makes of it.
  for (auto& expression : program->expressions) {
    expression.second = expression.first.substr(expression.first.find_first_not_of("& "));
  }
  return result;
}

DS4Q_EXPORT hiprtcResult hiprtcGetProgramLogSize(Program* program, size_t* bytes) {
  if (!program || !bytes) return HIPRTC_ERROR_INVALID_INPUT;
  *bytes = program->log.size() + 1;
  return HIPRTC_SUCCESS;
}
DS4Q_EXPORT hiprtcResult hiprtcGetProgramLog(Program* program, char* log) {
  if (!program || !log) return HIPRTC_ERROR_INVALID_INPUT;
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return HIPRTC_SUCCESS;
}
DS4Q_EXPORT hiprtcResult hiprtcGetCodeSize(Program* program, size_t* bytes) {
  if (!program || !bytes) return HIPRTC_ERROR_INVALID_INPUT;
  if (!program->compiled) return HIPRTC_ERROR_INVALID_PROGRAM;
  *bytes = program->code.size();
  return HIPRTC_SUCCESS;
}
DS4Q_EXPORT hiprtcResult hiprtcGetCode(Program* program, char* code) {
  if (!program || !code) return HIPRTC_ERROR_INVALID_INPUT;
  if (!program->compiled) return HIPRTC_ERROR_INVALID_PROGRAM;
  std::memcpy(code, program->code.data(), program->code.size());
  return HIPRTC_SUCCESS;
}
DS4Q_EXPORT hiprtcResult hiprtcAddNameExpression(Program* program, const char* expression) {
  if (!program || !expression || !*expression) return HIPRTC_ERROR_INVALID_INPUT;
  if (program->compiled) return HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION;
  program->expressions.push_back({expression, ""});
  return HIPRTC_SUCCESS;
}
DS4Q_EXPORT hiprtcResult hiprtcGetLoweredName(Program* program, const char* expression,
                                              const char** name) {
  if (!program || !expression || !name) return HIPRTC_ERROR_INVALID_INPUT;
  if (!program->compiled) return HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION;
  for (auto& one : program->expressions) {
    if (one.first != expression) continue;
    *name = one.second.c_str();
    return HIPRTC_SUCCESS;
  }
  return HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID;
}
DS4Q_EXPORT hiprtcResult hiprtcDestroyProgram(Program** program) {
  if (!program || !*program) return HIPRTC_ERROR_INVALID_INPUT;
  delete *program;
  *program = nullptr;
  return HIPRTC_SUCCESS;
}
DS4Q_EXPORT const char* hiprtcGetErrorString(hiprtcResult result) {
  switch (result) {
    case HIPRTC_SUCCESS: return "HIPRTC_SUCCESS";
    case HIPRTC_ERROR_PROGRAM_CREATION_FAILURE: return "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case HIPRTC_ERROR_INVALID_INPUT: return "HIPRTC_ERROR_INVALID_INPUT";
    case HIPRTC_ERROR_INVALID_PROGRAM: return "HIPRTC_ERROR_INVALID_PROGRAM";
    case HIPRTC_ERROR_INVALID_OPTION: return "HIPRTC_ERROR_INVALID_OPTION";
    case HIPRTC_ERROR_COMPILATION: return "HIPRTC_ERROR_COMPILATION";
    case HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION:
      return "HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION";
    case HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION:
      return "HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION";
    case HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID: return "HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    case HIPRTC_ERROR_INTERNAL_ERROR: return "HIPRTC_ERROR_INTERNAL_ERROR";
  }
  return "HIPRTC_ERROR_UNKNOWN";
}
