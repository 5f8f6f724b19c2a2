// Owns the queues, one worker thread each, and the order between them: points, the legacy stream,
// waits of the host. Knows no HIP names.
#include <algorithm>
#include <chrono>
#include <thread>

#include "fiber.h"
#include "runtime.h"

namespace sim {

Handles<Stream>& streams = *new Handles<Stream>;
Handles<Event>& events = *new Handles<Event>;

namespace {

std::vector<std::weak_ptr<Queue>>& queues = *new std::vector<std::weak_ptr<Queue>>;
uint64_t queues_opened = 0;
hipError_t posted = hipSuccess;

double now_ms() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

void serve(std::shared_ptr<Queue> queue) {
  Hold hold(lock);
  for (;;) {
    queue->work.wait(hold, [&] { return queue->closed || !queue->waiting.empty(); });
    if (queue->waiting.empty()) break;
    Operation operation = std::move(queue->waiting.front());
    queue->waiting.pop_front();
    for (const Point& point : operation.after) wait_for(hold, point);
    if (operation.work) {
      int64_t delay_us = random_delay_us(queue->random);
      hold.unlock();
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      operation.work->run();
      operation.work.reset();  // outside the lock: it may be the last owner
      hold.lock();
    }
    if (operation.stamp_ms) *operation.stamp_ms = now_ms();
    if (++queue->completed >= queue->wanted) {
      queue->wanted = ~0ull;  // those who still wait say so again
      queue->progress.notify_all();
    }
  }
  hold.unlock();
  leave_thread();
}

Stream& legacy() {
  static Stream* one = nullptr;
  if (!one) one = new Stream{open_queue(), true, nullptr, 0, {}};
  return *one;
}

Point tail(const std::shared_ptr<Queue>& queue) { return {queue, queue->enqueued}; }

}  // namespace

std::vector<std::shared_ptr<Queue>> all_queues() {
  std::vector<std::shared_ptr<Queue>> found;
  for (auto& weak : queues) {
    if (auto queue = weak.lock()) found.push_back(queue);
  }
  queues.assign(found.begin(), found.end());
  return found;
}

std::shared_ptr<Queue> open_queue() {
  auto queue = std::make_shared<Queue>();
  queue->random = static_cast<uint64_t>(settings.delay_seed) + queues_opened++;
  queue->random = mix(queue->random);
  all_queues();  // drops those that have ended
  queues.push_back(queue);
  std::thread(serve, queue).detach();
  return queue;
}

void close_queue(const std::shared_ptr<Queue>& queue) {
  queue->closed = true;
  queue->work.notify_one();
}

Point push(const std::shared_ptr<Queue>& queue, Operation operation) {
  queue->waiting.push_back(std::move(operation));
  queue->enqueued++;
  if (queue->waiting.size() == 1) queue->work.notify_one();
  return tail(queue);
}

bool reached(const Point& point) {
  return !point.queue || point.queue->completed >= point.completed;
}

void wait_for(Hold& hold, const Point& point) {
  while (!reached(point)) {
    point.queue->wanted = std::min(point.queue->wanted, point.completed);
    point.queue->progress.wait(hold);
  }
}

void wait_for_all(Hold& hold) {
  std::vector<Point> tails;  // first, so that work put in meanwhile is not waited for
  for (auto& queue : all_queues()) tails.push_back(tail(queue));
  for (const Point& point : tails) wait_for(hold, point);
}

void post_error(hipError_t code) {
  Hold hold(lock);
  posted = code;
}

hipError_t take_error() {
  hipError_t code = posted;
  posted = hipSuccess;
  return code;
}

bool is_legacy(const Stream& stream) { return &stream == &legacy(); }

Stream* find_stream(void* handle) { return handle ? streams.find(handle) : &legacy(); }

Point push_ordered(Stream& stream, Operation operation) {
  if (is_legacy(stream)) {  // after all blocking streams
    for (const void* other : streams.alive) {
      const Stream& blocking = *static_cast<const Stream*>(other);
      if (blocking.blocking && !reached(tail(blocking.queue))) {
        operation.after.push_back(tail(blocking.queue));
      }
    }
  } else if (stream.blocking && !reached(tail(legacy().queue))) {
    operation.after.push_back(tail(legacy().queue));
  }
  return push(stream.queue, std::move(operation));
}

hipError_t submit(Hold& hold, void* handle, std::shared_ptr<const Work> work, bool wait) {
  Stream* stream = find_stream(handle);
  if (!stream) return hipErrorInvalidHandle;
  if (stream->capture) {
    if (wait) return break_capture(*stream->capture, hipErrorStreamCaptureUnsupported);
    return capture_work(*stream, std::move(work));
  }
  if (is_legacy(*stream)) {
    if (hipError_t code = forbid_capture(stream)) return code;
  }
  Point point = push_ordered(*stream, {std::move(work), {}, nullptr});
  if (!wait) return hipSuccess;
  wait_for(hold, point);
  return take_error();
}

}  // namespace sim
