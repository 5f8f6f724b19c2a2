// Owns device and pinned memory: what is alive, what is poison, and what a pointer points to.
//
// Device memory is host memory with all bits set (NaN in floats) when it is new and when it is
// freed. Freed memory is kept a while, so that a stale pointer reads NaN and not the next owner's
// numbers. Zones on both sides of an allocation tell writes beyond it, when it is freed.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>

#if defined(__SANITIZE_ADDRESS__)  // kernels built with it then see each access out of place
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

#include "runtime.h"

namespace sim {
namespace {

constexpr size_t kZoneBytes = 256;           // also the alignment of an allocation, as on hardware
constexpr size_t kKeptBytes = 64ull << 20;   // of freed memory

struct Allocation {
  size_t bytes;
  bool pinned;
};
std::map<uintptr_t, Allocation>& live = *new std::map<uintptr_t, Allocation>;
std::map<uintptr_t, size_t>& freed = *new std::map<uintptr_t, size_t>;  // still mapped
std::deque<uintptr_t>& freed_order = *new std::deque<uintptr_t>;
size_t device_bytes = 0, kept_bytes = 0;

size_t mapped_bytes(size_t bytes) {
  return (bytes + kZoneBytes - 1) / kZoneBytes * kZoneBytes + 2 * kZoneBytes;
}

void unmap_oldest() {
  uintptr_t at = freed_order.front();
  freed_order.pop_front();
  size_t whole = mapped_bytes(freed[at]);
  void* start = reinterpret_cast<void*>(at - kZoneBytes);
  ASAN_UNPOISON_MEMORY_REGION(start, whole);
  munmap(start, whole);
  kept_bytes -= whole;
  freed.erase(at);
}

bool all_ones(const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) {
    if (from[i] != 0xff) return false;
  }
  return true;
}

template <class Map>
typename Map::const_iterator at_or_before(const Map& map, uintptr_t address) {
  auto next = map.upper_bound(address);
  return next == map.begin() ? map.end() : std::prev(next);
}

size_t length(const Allocation& allocation) { return allocation.bytes; }
size_t length(size_t bytes) { return bytes; }

template <class Map>
bool overlaps(const Map& map, uintptr_t start, size_t bytes) {
  auto found = at_or_before(map, start + bytes - 1);
  return found != map.end() && found->first + length(found->second) > start;
}

}  // namespace

hipError_t allocate(void** at, size_t bytes, bool pinned) {
  if (!at) return hipErrorInvalidValue;
  *at = nullptr;
  if (bytes == 0) return hipSuccess;
  size_t limit = static_cast<size_t>(settings.memory_bytes);
  if (!pinned && (bytes > limit || device_bytes + bytes > limit)) return hipErrorOutOfMemory;
  if (bytes > (size_t{1} << 46)) return hipErrorOutOfMemory;
  void* whole = mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) return hipErrorOutOfMemory;
  std::memset(whole, 0xff, mapped_bytes(bytes));
  ASAN_POISON_MEMORY_REGION(whole, mapped_bytes(bytes));
  ASAN_UNPOISON_MEMORY_REGION(static_cast<char*>(whole) + kZoneBytes, bytes);
  uintptr_t address = reinterpret_cast<uintptr_t>(whole) + kZoneBytes;
  live[address] = {bytes, pinned};
  if (!pinned) device_bytes += bytes;
  *at = reinterpret_cast<void*>(address);
  return hipSuccess;
}

hipError_t release(void* at, bool pinned) {
  if (!at) return hipSuccess;
  uintptr_t address = reinterpret_cast<uintptr_t>(at);
  auto found = live.find(address);
  if (found == live.end() || found->second.pinned != pinned) return hipErrorInvalidValue;
  size_t bytes = found->second.bytes, whole = mapped_bytes(bytes);
  unsigned char* start = static_cast<unsigned char*>(at) - kZoneBytes;
  ASAN_UNPOISON_MEMORY_REGION(start, whole);
  bool intact = all_ones(start, kZoneBytes) &&
                all_ones(start + kZoneBytes + bytes, whole - kZoneBytes - bytes);
  live.erase(found);
  if (!pinned) device_bytes -= bytes;
  std::memset(start, 0xff, whole);
  ASAN_POISON_MEMORY_REGION(start, whole);
  freed[address] = bytes;
  freed_order.push_back(address);
  kept_bytes += whole;
  while (kept_bytes > kKeptBytes) unmap_oldest();
  if (intact) return hipSuccess;
  counts.overruns++;
  std::fprintf(stderr, "ds4q sim: something wrote beyond an allocation of %zu bytes\n", bytes);
  return hipErrorIllegalAddress;
}

Place place_of(const void* at, size_t bytes) {
  uintptr_t start = reinterpret_cast<uintptr_t>(at);
  auto found = at_or_before(live, start);
  if (found != live.end() && start + bytes <= found->first + found->second.bytes) {
    return found->second.pinned ? Place::kPinned : Place::kDevice;
  }
  bool ours = overlaps(live, start, bytes) || overlaps(freed, start, bytes);
  return ours || !at ? Place::kInvalid : Place::kPageable;
}

bool find_allocation(const void* at, void** base, size_t* bytes, bool* pinned) {
  uintptr_t address = reinterpret_cast<uintptr_t>(at);
  auto found = at_or_before(live, address);
  if (found == live.end() || address >= found->first + found->second.bytes) return false;
  *base = reinterpret_cast<void*>(found->first);
  *bytes = found->second.bytes;
  *pinned = found->second.pinned;
  return true;
}

int64_t live_bytes() { return static_cast<int64_t>(device_bytes); }

int64_t live_allocations(bool pinned) {
  int64_t n = 0;
  for (const auto& one : live) n += one.second.pinned == pinned;
  return n;
}

}  // namespace sim
