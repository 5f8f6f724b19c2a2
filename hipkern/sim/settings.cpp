// Owns the settings, the faults, the counts and the last error: what a test can ask of the device
// beyond HIP. README.md lists the names.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace sim {

std::mutex& lock = *new std::mutex;  // never destroyed, like all state: workers outlive main
Settings& settings = *new Settings;
Counts& counts = *new Counts{};

namespace {

struct Fault {
  std::string name;
  int64_t calls_left;
  hipError_t code;
};
std::vector<Fault>& faults = *new std::vector<Fault>;
int64_t calls_until_lost = 0;  // 0: never; 1: lost at the next call; -1: lost
thread_local hipError_t last_error = hipSuccess;

struct Named {
  const char* name;
  int64_t Settings::*member;
};
constexpr Named kSettings[] = {
    {"devices", &Settings::devices},       {"memory_bytes", &Settings::memory_bytes},
    {"threads", &Settings::threads},       {"lane_seed", &Settings::lane_seed},
    {"delay_us", &Settings::delay_us},     {"delay_seed", &Settings::delay_seed},
    {"lost_after", &Settings::lost_after}, {"lost_code", &Settings::lost_code},
};

int64_t Settings::*setting_named(const char* name) {
  for (const Named& one : kSettings) {
    if (std::strcmp(one.name, name) == 0) return one.member;
  }
  return nullptr;
}

bool parse_number(const std::string& text, int64_t* value) {
  char* end = nullptr;
  *value = std::strtoll(text.c_str(), &end, 10);
  return !text.empty() && *end == 0 && *value >= 0;
}

bool parse_faults(const std::string& text, std::vector<Fault>* parsed) {  // name:n:code[,...]
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string one = text.substr(at, end - at);
    size_t first = one.find(':'), second = one.rfind(':');
    int64_t nth, code;
    if (first == std::string::npos || first == second) return false;
    if (!parse_number(one.substr(first + 1, second - first - 1), &nth) || nth == 0) return false;
    if (!parse_number(one.substr(second + 1), &code) || code == 0) return false;
    parsed->push_back({one.substr(0, first), nth, static_cast<hipError_t>(code)});
    at = end + 1;
  }
  return true;
}

bool set(const std::string& name, const std::string& value) {
  if (name == "fail") {
    std::vector<Fault> parsed;
    if (!parse_faults(value, &parsed)) return false;
    faults = parsed;
    return true;
  }
  int64_t number;
  int64_t Settings::*member = setting_named(name.c_str());
  if (!member || !parse_number(value, &number)) return false;
  settings.*member = number;
  if (name == "lost_after") calls_until_lost = number;
  if (name == "delay_seed") {
    uint64_t state = static_cast<uint64_t>(number);
    for (auto& queue : all_queues()) queue->random = state++;
  }
  return true;
}

void set_defaults() {
  cpu_set_t cpus;
  int cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
  settings.threads = std::min(cores, 16);
  settings.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / 2;
}

struct Count {
  const char* name;
  int64_t (*value)();
};
constexpr Count kCounts[] = {
    {"calls", [] { return counts.calls; }},
    {"launches", [] { return counts.launches; }},
    {"graph_launches", [] { return counts.graph_launches; }},
    {"copies", [] { return counts.copies; }},
    {"pageable_copies", [] { return counts.pageable_copies; }},
    {"overruns", [] { return counts.overruns; }},
    {"failed_launches", [] { return counts.failed_launches; }},
    {"live_bytes", live_bytes},
    {"live_allocations", [] { return live_allocations(false); }},
    {"live_pinned", [] { return live_allocations(true); }},
    {"live_streams", [] { return static_cast<int64_t>(streams.alive.size()); }},
    {"live_events", [] { return static_cast<int64_t>(events.alive.size()); }},
    {"live_graphs", live_graphs},
    {"live_graph_execs", live_graph_execs},
    {"live_modules", live_modules},
};

int64_t query(const char* name) {
  if (int64_t Settings::*member = setting_named(name)) return settings.*member;
  for (const Count& one : kCounts) {
    if (std::strcmp(one.name, name) == 0) return one.value();
  }
  return -1;
}

}  // namespace

void read_environment() {
  set_defaults();
  std::vector<const char*> names = {"fail"};
  for (const Named& one : kSettings) names.push_back(one.name);
  for (const char* name : names) {
    std::string variable = std::string("DS4Q_SIM_") + name;
    for (char& c : variable) c = static_cast<char>(std::toupper(c));
    const char* value = std::getenv(variable.c_str());
    if (value && !set(name, value)) {
      std::fprintf(stderr, "ds4q sim: %s=%s is not understood\n", variable.c_str(), value);
      std::abort();  // a test that believes in a setting that is not there proves nothing
    }
  }
}

bool device_lost() { return calls_until_lost < 0; }

hipError_t entry_error(const char* name) {
  counts.calls++;
  if (settings.devices == 0) {
    return std::strcmp(name, "hipGetDeviceCount") ? hipErrorInvalidDevice : hipErrorNoDevice;
  }
  if (calls_until_lost > 0 && --calls_until_lost == 0) calls_until_lost = -1;
  if (device_lost()) return static_cast<hipError_t>(settings.lost_code);
  hipError_t code = hipSuccess;
  for (Fault& fault : faults) {
    if (fault.name == name && fault.calls_left > 0 && --fault.calls_left == 0) code = fault.code;
  }
  return code;
}

hipError_t framed(const char* name, hipError_t (*body)(void*, Hold&), void* self, bool releasing) {
  Hold hold(lock);
  hipError_t code = entry_error(name);
  if (code == hipSuccess || (releasing && device_lost())) {
    hipError_t own = body(self, hold);
    if (code == hipSuccess) code = own;
  }
  return remember(code);
}

hipError_t remember(hipError_t code) {
  if (code != hipSuccess && code != hipErrorNotReady) last_error = code;
  return code;
}

int64_t random_delay_us(uint64_t& state) {
  if (settings.delay_us == 0) return 0;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(settings.delay_us + 1));
}

DS4Q_EXPORT hipError_t hipGetLastError() {
  hipError_t code = last_error;
  last_error = hipSuccess;
  return code;
}
DS4Q_EXPORT hipError_t hipPeekAtLastError() { return last_error; }

// 0, or -1 for a name or value that is not understood.
DS4Q_EXPORT int ds4q_sim_set(const char* name, const char* value) {
  Hold hold(lock);
  return set(name, value) ? 0 : -1;
}
DS4Q_EXPORT int64_t ds4q_sim_get(const char* name) {  // -1 for a name that is not known
  Hold hold(lock);
  return query(name);
}
DS4Q_EXPORT void ds4q_sim_reset() {  // settings, faults and counts as in a fresh process
  Hold hold(lock);
  settings = Settings();
  counts = Counts{};
  faults.clear();
  calls_until_lost = 0;
  take_error();
  read_environment();
}

}  // namespace sim
