// Owns the interface of the fibers: one block of a launch on the calling OS thread. Knows no
// streams, memory or modules.
#pragma once
#include <atomic>
#include <cstdint>

#include "ds4q_dev.h"

namespace sim {

struct Launch {  // what the blocks of one kernel launch share
  const ds4q_sim_kernel* kernel;
  const char* arguments;
  uint32_t blocks[3];
  uint32_t threads;
  uint64_t lane_seed;  // 0: lanes and blocks run in their natural order
  std::atomic<bool> failed{false};
};

constexpr uint32_t kSharedBytes = 64 * 1024;  // LDS of one workgroup on every AMD target
constexpr uint32_t kMostThreads = 1024;

// Runs block `index` (x fastest) here. After a failure, which is told on stderr, launch.failed.
void run_block(Launch& launch, uint64_t index);

// Frees what run_block keeps for this OS thread; before a thread ends.
void leave_thread();

// What a module is bound to.
const ds4q_sim_calls& services();

uint64_t mix(uint64_t value);  // a fixed bijection whose output looks random

}  // namespace sim
