// Owns what the parts of the simulated runtime share: its one lock, handles, queues, graphs and
// settings. Knows no fibers.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "hip.h"

namespace sim {

// One lock for all state. Work (copies, fills, kernels) runs outside it.
extern std::mutex& lock;
using Hold = std::unique_lock<std::mutex>;

// ---- settings.cpp -------------------------------------------------------------------------------
struct Settings {  // by name through ds4q_sim_set, or DS4Q_SIM_<NAME> in the environment
  int64_t devices = 1, memory_bytes = 0, threads = 0;
  int64_t lane_seed = 0, delay_us = 0, delay_seed = 0;
  int64_t lost_after = 0, lost_code = hipErrorLaunchFailure;
};
extern Settings& settings;  // guarded by lock

struct Counts {  // guarded by lock
  int64_t calls, launches, graph_launches, copies, pageable_copies, overruns, failed_launches;
};
extern Counts& counts;

void read_environment();  // once, when all state is there

// Whether this call of `name` fails before it does anything: no device, a lost one, a fault.
hipError_t entry_error(const char* name);
bool device_lost();
hipError_t remember(hipError_t code);  // for hipGetLastError
int64_t random_delay_us(uint64_t& state);  // 0 where no delay is set; the state is a queue's

// ---- memory.cpp ---------------------------------------------------------------------------------
hipError_t allocate(void** at, size_t bytes, bool pinned);
hipError_t release(void* at, bool pinned);
enum class Place { kDevice, kPinned, kPageable, kInvalid };
Place place_of(const void* at, size_t bytes);  // kInvalid: freed, or beyond its allocation
bool find_allocation(const void* at, void** base, size_t* bytes, bool* pinned);
int64_t live_bytes();
int64_t live_allocations(bool pinned);

// ---- queues.cpp ---------------------------------------------------------------------------------
struct Work {  // what a queue runs, or a graph replays
  virtual ~Work() = default;
  virtual void run() const = 0;
  virtual hipError_t check() const { return hipSuccess; }  // with lock held, before a replay
};

struct Queue;
struct Point {  // reached once that queue has completed so many operations
  std::shared_ptr<Queue> queue;
  uint64_t completed = 0;
};

struct Operation {
  std::shared_ptr<const Work> work;  // null: only its order matters
  std::vector<Point> after;
  std::shared_ptr<double> stamp_ms;  // an event's time
};

struct Queue {  // a stream's worker; outlives its stream until it is empty
  std::deque<Operation> waiting;
  uint64_t enqueued = 0, completed = 0;
  uint64_t wanted = ~0ull;  // the first count that somebody waits for
  bool closed = false;
  uint64_t random;
  std::condition_variable work, progress;
};

struct Capture;
struct Stream {
  std::shared_ptr<Queue> queue;
  bool blocking;
  std::shared_ptr<Capture> capture;
  unsigned branch = 0;          // of the capture
  std::vector<unsigned> after;  // nodes that the next operation of the capture follows
};

struct Event {
  bool timed;
  bool recorded = false;
  Point point;
  std::shared_ptr<double> stamp_ms;
  std::shared_ptr<Capture> capture;  // last recorded while capturing
  std::vector<unsigned> after;
};

std::shared_ptr<Queue> open_queue();
void close_queue(const std::shared_ptr<Queue>& queue);
Point push(const std::shared_ptr<Queue>& queue, Operation operation);
bool reached(const Point& point);
void wait_for(Hold& hold, const Point& point);
void wait_for_all(Hold& hold);
void post_error(hipError_t code);  // of work: the next synchronisation answers it
hipError_t take_error();

// A stream by its handle: null is the legacy stream. nullptr for a handle that is not alive.
Stream* find_stream(void* handle);
// Puts work on a stream as the call `hip...Async` does: captured where the stream is capturing.
hipError_t submit(Hold& hold, void* stream, std::shared_ptr<const Work> work, bool wait);
hipError_t forbid_capture(Stream* stream);  // what a synchronising call on it answers
hipError_t forbid_global_capture();         // what allocation and device synchronisation answer
Point push_ordered(Stream& stream, Operation operation);  // in the legacy stream's order
bool is_legacy(const Stream& stream);
std::vector<std::shared_ptr<Queue>> all_queues();

// ---- graphs.cpp ---------------------------------------------------------------------------------
struct Node {
  std::shared_ptr<const Work> work;
  unsigned branch;
  std::vector<unsigned> after;
};
struct Graph {
  std::vector<Node> nodes;
  unsigned branches = 1;
};
struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  Stream* origin;
  int mode;
  hipError_t broken = hipSuccess;
};
hipError_t capture_work(Stream& stream, std::shared_ptr<const Work> work);
hipError_t break_capture(Capture& capture, hipError_t code);
hipError_t capture_wait(Stream& stream, const Event& event);
void forget_stream(Stream* stream);  // it is destroyed: its capture, if any, is broken
int64_t live_graphs();
int64_t live_graph_execs();

// ---- modules.cpp --------------------------------------------------------------------------------
int64_t live_modules();

// ---- handles ------------------------------------------------------------------------------------
template <class T>
struct Handles {  // what is alive, so that a stale handle is an error and a leak a number
  std::set<const void*> alive;
  T* add(T* thing) {
    alive.insert(thing);
    return thing;
  }
  T* find(void* handle) const {
    return alive.count(handle) ? static_cast<T*>(handle) : nullptr;
  }
  void drop(T* thing) {
    alive.erase(thing);
    delete thing;
  }
};
extern Handles<Stream>& streams;
extern Handles<Event>& events;

// The frame of an exported function: faults, then the body with the lock held, then the last error.
// A `releasing` one does its work on a lost device too, so that a leak stays a leak of the caller.
hipError_t framed(const char* name, hipError_t (*body)(void*, Hold&), void* self, bool releasing);

template <class Body>
hipError_t call(const char* name, Body body, bool releasing = false) {
  auto run = [](void* self, Hold& hold) -> hipError_t { return (*static_cast<Body*>(self))(hold); };
  return framed(name, run, &body, releasing);
}

}  // namespace sim
