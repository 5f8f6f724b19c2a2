// Owns the fibers: the lanes of a block take turns on one OS thread; barriers, shuffles and waits
// are where they switch. Knows no streams, memory or modules.
//
// A lane runs until it must wait; the last to arrive at a meeting point runs on, the others follow
// in turn. A lane that ends without waiting leaves its stack to the next, so a kernel without
// barriers is a plain loop. When nobody can run and somebody has not ended, the block diverged.
#include "fiber.h"

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <vector>

#include "context.h"

namespace sim {
namespace {

enum Meeting : uint8_t { kNone, kShuffle, kGroupSum, kGroupMax, kGroupBarrier, kBarrier };
const char* const kMeetingNames[] = {"",          "a shuffle",       "a group sum",
                                     "a group maximum", "a group barrier", "a barrier"};

struct Copy {
  char* to;
  const char* from;
};

struct Group;
struct alignas(64) Lane : ds4q_sim_lane {  // one cache line, then what is seldom used
  void* resume;                            // null before its first step
  char* stack;
  Group* group;
  uint8_t place;  // in its group
  Meeting waits;
  bool ended;
  uint32_t shared_index;            // how many shared objects it has declared
  std::vector<Copy> copies;         // in order of issue
  std::vector<uint32_t> committed;  // copies.size() at each commit that has not landed
};

struct Group {
  Lane* lanes;
  uint32_t n, place;
  uint32_t all, runnable;  // bits by place
  uint32_t arrived;        // at the shuffle, sum or group barrier
  Meeting meeting;
  uint32_t turn;  // which half of values the next exchange uses
  uint32_t values[2][DS4Q_LANES];  // by lane
};

struct SharedObject {
  uint32_t at, bytes;
};
constexpr uint32_t kGapBytes = 64;  // after each, which nobody may write
constexpr uint32_t kMostObjects = 64;

class Runner {  // one per OS thread
 public:
  void run(Launch& launch, uint64_t index);

  Lane* current() { return current_; }
  void meet_block();
  void meet_group(Meeting meeting);
  uint32_t shuffle(uint32_t value, uint32_t source);
  float reduce(float value, Meeting how);
  void* shared(uint32_t bytes);
  void copy16(void* to, const void* from);
  void commit() { current_->committed.push_back(static_cast<uint32_t>(current_->copies.size())); }
  void land(uint32_t pending);
  static void lane_main();

 private:
  void set_up(Launch& launch, uint64_t index);
  void check_gaps();
  void sleep(Lane& lane, Meeting meeting);
  void wake(Group& group);
  uint32_t* exchange(Lane& lane, uint32_t value);
  Lane* next_lane();
  Lane* random_lane();
  void go_on();
  void end_lane(Lane& lane);
  void tell_divergence();
  void name_block(const Lane& lane);
  // Neither returns, but is not told so to the compiler: AddressSanitizer, told, would clear its
  // shadow of the OS thread's stack, on which a fiber is not.
  void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void leave();

  Launch* launch_ = nullptr;
  Lane* current_ = nullptr;
  void* home_ = nullptr;  // the OS thread's own context
  Stacks stacks_;
  std::vector<Lane> lanes_;
  Group groups_[kMostThreads / DS4Q_LANES];
  uint64_t random_ = 0;  // who runs next, where the launch has a seed
  uint32_t n_groups_ = 0, runnable_groups_ = 0;  // bits by place
  uint32_t at_barrier_ = 0, ended_ = 0;
  std::vector<SharedObject> objects_;
  uint32_t shared_used_ = sizeof arena_;  // so that the first block finds poison too
  alignas(64) char arena_[kSharedBytes + kGapBytes * kMostObjects];
};

// Fibers never change their OS thread, so the address of a thread-local does not move under them.
__attribute__((tls_model("initial-exec"))) thread_local Runner* self = nullptr;

uint32_t low_bits(uint32_t n) { return n >= 32 ? ~0u : (1u << n) - 1; }

void Runner::set_up(Launch& launch, uint64_t index) {
  launch_ = &launch;
  if (lanes_.size() < launch.threads) lanes_.resize(launch.threads);
  uint32_t x = static_cast<uint32_t>(index % launch.blocks[0]);
  uint64_t rest = index / launch.blocks[0];
  uint32_t y = static_cast<uint32_t>(rest % launch.blocks[1]);
  uint32_t z = static_cast<uint32_t>(rest / launch.blocks[1]);
  random_ = mix(launch.lane_seed ^ mix(index + 1));
  n_groups_ = (launch.threads + DS4Q_LANES - 1) / DS4Q_LANES;
  Lane* lane = lanes_.data();
  for (uint32_t g = 0; g < n_groups_; g++) {
    Group& group = groups_[g];
    uint32_t first = g * DS4Q_LANES;
    group.lanes = lane, group.place = g;
    group.n = std::min<uint32_t>(launch.threads - first, DS4Q_LANES);
    group.all = group.runnable = low_bits(group.n);
    group.arrived = group.turn = 0, group.meeting = kNone;
    for (uint32_t i = 0; i < group.n; i++, lane++) {
      lane->thread = first + i, lane->threads = launch.threads;
      lane->block[0] = x, lane->block[1] = y, lane->block[2] = z;
      for (int k = 0; k < 3; k++) lane->blocks[k] = launch.blocks[k];
      lane->resume = nullptr, lane->stack = nullptr;
      lane->group = &group, lane->place = static_cast<uint8_t>(i);
      lane->shared_index = 0, lane->waits = kNone, lane->ended = false;
    }
  }
  runnable_groups_ = low_bits(n_groups_);
  at_barrier_ = ended_ = 0;
  objects_.clear();
  // The last block's contents must not pass for this one's: all bits set is NaN.
  std::memset(arena_, 0xff, shared_used_);
  shared_used_ = 0;
}

void Runner::run(Launch& launch, uint64_t index) {
  set_up(launch, index);
  current_ = lanes_.data();
  if (launch.lane_seed) current_ = random_lane();
  current_->stack = stacks_.take();
  void* start = fresh_context(current_->stack, stacks_.usable(current_->stack), lane_main);
  switch_context(&home_, start);
  stacks_.give_all();
  check_gaps();
  if (!launch.failed.load(std::memory_order_relaxed)) return;
  for (Lane& lane : lanes_) lane.copies.clear(), lane.committed.clear();
}

void Runner::check_gaps() {
  for (const SharedObject& object : objects_) {
    const char* gap = arena_ + object.at + object.bytes;
    bool intact = gap[0] == -1 && std::memcmp(gap, gap + 1, kGapBytes - 1) == 0;
    if (intact || launch_->failed.exchange(true)) continue;
    name_block(*current_);
    std::fprintf(stderr, "or another of its block wrote beyond a shared object of %u bytes\n",
                 object.bytes);
  }
}

void Runner::lane_main() {
  Runner& runner = *self;
  for (;;) {
    Lane* lane = runner.current_;
    runner.launch_->kernel->run(runner.launch_->arguments);
    runner.end_lane(*lane);
    Lane* next = runner.next_lane();
    if (!next) {
      if (runner.ended_ != runner.launch_->threads) runner.tell_divergence();
      runner.leave();
    }
    runner.current_ = next;
    if (!next->resume) {
      next->stack = lane->stack;
      continue;
    }
    runner.stacks_.give(lane->stack);  // safe: this thread takes none before it has switched away
    void* nobody;
    switch_context(&nobody, next->resume);
  }
}

void Runner::end_lane(Lane& lane) {
  if (!lane.copies.empty()) {
    fail("ends with %zu asynchronous copies that it never waited for", lane.copies.size());
  }
  lane.ended = true;
  ended_++;
  sleep(lane, kNone);
}

void Runner::sleep(Lane& lane, Meeting meeting) {
  Group& group = *lane.group;
  lane.waits = meeting;
  group.runnable &= ~(1u << lane.place);
  if (!group.runnable) runnable_groups_ &= ~(1u << group.place);
}

void Runner::wake(Group& group) {
  group.runnable = group.all;
  runnable_groups_ |= 1u << group.place;
}

uint32_t first_after(uint32_t bits, uint32_t place) {  // the next set bit, cyclic; bits != 0
  uint32_t later = bits & ~low_bits(place + 1);
  return static_cast<uint32_t>(__builtin_ctz(later ? later : bits));
}

Lane* Runner::random_lane() {  // any that can run, so that groups overtake each other too
  if (!runnable_groups_) return nullptr;
  random_ = mix(random_);
  uint32_t low = static_cast<uint32_t>(random_), high = static_cast<uint32_t>(random_ >> 32);
  const Group& group = groups_[first_after(runnable_groups_, low % n_groups_)];
  return group.lanes + first_after(group.runnable, high % group.n);
}

Lane* Runner::next_lane() {  // of the same group while one can run: its data is in the cache
  const Group* group = current_->group;
  if (launch_->lane_seed) return random_lane();
  if (group->runnable) return group->lanes + first_after(group->runnable, current_->place);
  if (!runnable_groups_) return nullptr;
  group = &groups_[first_after(runnable_groups_, group->place)];
  return group->lanes + __builtin_ctz(group->runnable);
}

void Runner::go_on() {  // the current lane waits: run another
  Lane* from = current_;
  Lane* to = next_lane();
  if (!to) {
    tell_divergence();
    leave();
  }
  current_ = to;
  if (!to->resume) {
    to->stack = stacks_.take();
    to->resume = fresh_context(to->stack, stacks_.usable(to->stack), lane_main);
  }
  switch_context(&from->resume, to->resume);
}

void Runner::meet_block() {
  if (++at_barrier_ == launch_->threads) {
    at_barrier_ = 0;
    for (uint32_t g = 0; g < n_groups_; g++) wake(groups_[g]);
    return;
  }
  sleep(*current_, kBarrier);
  go_on();
}

void Runner::meet_group(Meeting meeting) {
  Group& group = *current_->group;
  if (group.arrived && group.meeting != meeting) {
    fail("reaches %s while others of its group wait at %s", kMeetingNames[meeting],
         kMeetingNames[group.meeting]);
  }
  group.meeting = meeting;
  if (++group.arrived == group.n) {
    group.arrived = 0;
    group.turn ^= 1;
    wake(group);
    return;
  }
  sleep(*current_, meeting);
  go_on();
}

// Two halves: nobody can reach the exchange after the next before all have read this one.
uint32_t* Runner::exchange(Lane& lane, uint32_t value) {
  uint32_t* values = lane.group->values[lane.group->turn];
  values[lane.thread % DS4Q_LANES] = value;
  return values;
}

uint32_t Runner::shuffle(uint32_t value, uint32_t source) {
  Lane& lane = *current_;
  if (source >= lane.group->n) {
    fail("shuffles from lane %u of a group of %u", source, lane.group->n);
  }
  uint32_t* values = exchange(lane, value);
  meet_group(kShuffle);
  return values[source];
}

float larger(float a, float b) { return a > b ? a : b; }

// The butterfly of ds4q_group_sum in one meeting: the last to arrive does it for all.
float Runner::reduce(float value, Meeting how) {
  Lane& lane = *current_;
  if (lane.group->n != DS4Q_LANES) fail("reduces over a group of %u", lane.group->n);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint32_t* values = exchange(lane, bits);
  bool last = lane.group->arrived + 1 == DS4Q_LANES;
  if (last) {
    float before[DS4Q_LANES], after[DS4Q_LANES];
    std::memcpy(before, values, sizeof before);
    for (uint32_t d = 1; d < DS4Q_LANES; d *= 2) {
      for (uint32_t i = 0; i < DS4Q_LANES; i++) {
        after[i] = how == kGroupSum ? before[i] + before[i ^ d] : larger(before[i], before[i ^ d]);
      }
      std::memcpy(before, after, sizeof before);
    }
    std::memcpy(values, before, sizeof before);
  }
  meet_group(how);
  std::memcpy(&value, values + lane.thread % DS4Q_LANES, sizeof value);
  return value;
}

void* Runner::shared(uint32_t bytes) {
  Lane& lane = *current_;
  uint32_t i = lane.shared_index++;
  if (i == objects_.size()) {
    uint32_t room = (bytes + 15) / 16 * 16, before = shared_used_ - i * kGapBytes;
    if (bytes > kSharedBytes || before + room > kSharedBytes || i == kMostObjects) {
      fail("needs more than %u bytes of shared memory in %u objects", kSharedBytes, kMostObjects);
    }
    objects_.push_back({shared_used_, bytes});
    shared_used_ += room + kGapBytes;
  } else if (objects_[i].bytes != bytes) {
    fail("declares shared object %u with %u bytes, another thread with %u", i, bytes,
         objects_[i].bytes);
  }
  return arena_ + objects_[i].at;
}

void Runner::copy16(void* to, const void* from) {
  char* target = static_cast<char*>(to);
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
    fail("copies 16 bytes from or to an address that is not a multiple of 16");
  }
  if (target < arena_ || target + 16 > arena_ + shared_used_) {
    fail("copies asynchronously to memory that is not shared");
  }
  std::memset(target, 0xff, 16);  // whoever reads before the wait reads NaN
  current_->copies.push_back({target, static_cast<const char*>(from)});
}

void Runner::land(uint32_t pending) {
  Lane& lane = *current_;
  if (lane.committed.size() <= pending) return;
  size_t groups = lane.committed.size() - pending;
  uint32_t copies = lane.committed[groups - 1];
  for (uint32_t i = 0; i < copies; i++) std::memcpy(lane.copies[i].to, lane.copies[i].from, 16);
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + copies);
  lane.committed.erase(lane.committed.begin(), lane.committed.begin() + groups);
  for (uint32_t& end : lane.committed) end -= copies;
}

void Runner::name_block(const Lane& lane) {
  std::fprintf(stderr, "ds4q sim: kernel %s, block (%u, %u, %u): thread %u ", launch_->kernel->name,
               lane.block[0], lane.block[1], lane.block[2], lane.thread);
}

void Runner::fail(const char* format, ...) {
  if (!launch_->failed.exchange(true)) {  // one message a launch
    name_block(*current_);
    va_list values;
    va_start(values, format);
    std::vfprintf(stderr, format, values);
    va_end(values);
    std::fputc('\n', stderr);
  }
  leave();
}

void Runner::tell_divergence() {
  if (launch_->failed.exchange(true)) return;
  auto find = [&](auto fits) -> const Lane* {
    for (uint32_t i = 0; i < launch_->threads; i++) {
      if (fits(lanes_[i])) return &lanes_[i];
    }
    return nullptr;
  };
  // One that waits for its group, if there is one: the smaller circle.
  const Lane* waiting = find([](const Lane& l) { return !l.ended && l.waits != kBarrier; });
  if (!waiting) waiting = find([](const Lane& l) { return !l.ended; });
  const Lane* missing = find([&](const Lane& l) {
    return l.waits != waiting->waits && (waiting->waits == kBarrier || l.group == waiting->group);
  });
  name_block(*waiting);
  std::fprintf(stderr, "waits at %s that thread %u never reaches: it ",
               kMeetingNames[waiting->waits], missing->thread);
  if (missing->ended) {
    std::fprintf(stderr, "has ended\n");
  } else {
    std::fprintf(stderr, "waits at %s\n", kMeetingNames[missing->waits]);
  }
}

void Runner::leave() {  // the fibers that are left are dropped; kernels own nothing
  void* nobody;
  switch_context(&nobody, home_);
}

}  // namespace

uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

void run_block(Launch& launch, uint64_t index) {
  if (!self) self = new Runner;
  self->run(launch, index);
}

void leave_thread() {
  delete self;
  self = nullptr;
}

const ds4q_sim_calls& services() {
  static const ds4q_sim_calls calls = {
      []() -> ds4q_sim_lane* { return self->current(); },
      [] { self->meet_block(); },
      [] { self->meet_group(kGroupBarrier); },
      [](ds4q_u32 value, ds4q_u32 source) { return self->shuffle(value, source); },
      [](float value) { return self->reduce(value, kGroupSum); },
      [](float value) { return self->reduce(value, kGroupMax); },
      [](ds4q_u32 bytes) { return self->shared(bytes); },
      [](void* to, const void* from) { self->copy16(to, from); },
      [] { self->commit(); },
      [](ds4q_u32 pending) { self->land(pending); },
      [](ds4q_u32* at, ds4q_u32 value) {
        return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);  // blocks run on several threads
      },
  };
  return calls;
}

}  // namespace sim
