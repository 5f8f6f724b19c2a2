// Owns the OS threads that share the blocks of a launch. Knows no streams.
#include "pool.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

namespace sim {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kAloneFor = std::chrono::microseconds(50);  // about what waking a thread costs

struct Job {
  Launch& launch;
  uint64_t blocks;
  uint64_t stride, offset;  // the order of blocks: (i * stride + offset) % blocks
  std::atomic<uint64_t> next{0};
  unsigned helpers_wanted;
  unsigned helpers = 0;  // guarded by the pool's lock
};

struct Pool {
  std::mutex lock;
  std::condition_variable work, done;
  std::vector<Job*> jobs;
  unsigned threads = 0;
};

Pool& pool() {
  static Pool& one = *new Pool;  // never destroyed: its threads outlive main
  return one;
}

bool step(Job& job) {  // one block; false when none is left
  uint64_t i = job.next.fetch_add(1, std::memory_order_relaxed);
  if (i >= job.blocks || job.launch.failed.load(std::memory_order_relaxed)) return false;
  run_block(job.launch, (i * job.stride + job.offset) % job.blocks);
  return true;
}

void help() {
  Pool& p = pool();
  std::unique_lock<std::mutex> hold(p.lock);
  for (;;) {
    p.work.wait(hold, [&] { return !p.jobs.empty(); });
    Job& job = *p.jobs.front();
    if (++job.helpers == job.helpers_wanted) p.jobs.erase(p.jobs.begin());
    hold.unlock();
    while (step(job)) {
    }
    hold.lock();
    p.jobs.erase(std::remove(p.jobs.begin(), p.jobs.end(), &job), p.jobs.end());
    if (--job.helpers == 0) p.done.notify_all();
  }
}

void offer(Job& job) {
  Pool& p = pool();
  std::lock_guard<std::mutex> hold(p.lock);
  for (; p.threads < job.helpers_wanted; p.threads++) std::thread(help).detach();
  p.jobs.push_back(&job);
  p.work.notify_all();
}

void withdraw(Job& job) {
  Pool& p = pool();
  std::unique_lock<std::mutex> hold(p.lock);
  p.jobs.erase(std::remove(p.jobs.begin(), p.jobs.end(), &job), p.jobs.end());
  p.done.wait(hold, [&] { return job.helpers == 0; });
}

}  // namespace

void run_launch(Launch& launch, unsigned threads) {
  uint64_t blocks = static_cast<uint64_t>(launch.blocks[0]) * launch.blocks[1] * launch.blocks[2];
  uint64_t helpers = std::min<uint64_t>(threads, blocks) - 1;
  Job job{launch, blocks, 1, 0, {}, static_cast<unsigned>(helpers)};
  if (launch.lane_seed && blocks < (1u << 31)) {  // a multiplier without a common factor permutes
    job.offset = mix(launch.lane_seed) % blocks;
    job.stride = mix(launch.lane_seed + 1) % blocks | 1;
    while (std::gcd(job.stride, blocks) != 1) job.stride++;
  }
  bool offered = helpers == 0;
  Clock::time_point start = Clock::now();
  while (step(job)) {
    if (!offered && Clock::now() - start > kAloneFor) {
      offer(job);
      offered = true;
    }
  }
  if (helpers && offered) withdraw(job);
}

}  // namespace sim
