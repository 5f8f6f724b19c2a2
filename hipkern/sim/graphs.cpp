// Owns capture and replay: calls on capturing streams become nodes; a launch puts the nodes back on
// queues, one for each stream that took part, so that they run as apart as they did.
//
// A node keeps what the call was given: pointers, sizes, and the launch's argument bytes. What the
// pointers point to is read at the replay.
#include <algorithm>

#include "runtime.h"

namespace sim {
namespace {

struct GraphExec {
  std::shared_ptr<const Graph> graph;
  std::vector<std::shared_ptr<Queue>> queues;  // of branches 1 and on; 0 is the launching stream's
  Point last;                                  // the launch before: two of one graph never overlap
};

struct GraphHandle {
  std::shared_ptr<const Graph> graph;
};

Handles<GraphHandle>& graphs = *new Handles<GraphHandle>;
Handles<GraphExec>& execs = *new Handles<GraphExec>;

void leave_capture(const std::shared_ptr<Capture>& capture) {
  for (const void* one : streams.alive) {
    Stream& stream = *static_cast<Stream*>(const_cast<void*>(one));
    if (stream.capture != capture) continue;
    stream.capture = nullptr;
    stream.after.clear();
  }
}

bool joined(const Graph& graph, const std::vector<unsigned>& ends) {
  std::vector<bool> seen(graph.nodes.size());
  std::vector<unsigned> open(ends);
  size_t found = 0;
  while (!open.empty()) {
    unsigned node = open.back();
    open.pop_back();
    if (seen[node]) continue;
    seen[node] = true;
    found++;
    const std::vector<unsigned>& after = graph.nodes[node].after;
    open.insert(open.end(), after.begin(), after.end());
  }
  return found == graph.nodes.size();
}

hipError_t replay(GraphExec& exec, Stream& stream) {
  for (const Node& node : exec.graph->nodes) {
    if (!node.work) continue;
    if (hipError_t code = node.work->check()) return code;
  }
  Operation start;
  start.after.push_back(exec.last);
  Point begin = push_ordered(stream, std::move(start));
  std::vector<Point> points;
  std::vector<Point> tails(exec.queues.size() + 1);
  for (const Node& node : exec.graph->nodes) {
    Operation operation{node.work, {}, nullptr};
    bool first = node.branch && !tails[node.branch].queue;
    if (first) operation.after.push_back(begin);
    for (unsigned before : node.after) {
      if (exec.graph->nodes[before].branch != node.branch) {
        operation.after.push_back(points[before]);
      }
    }
    auto& queue = node.branch ? exec.queues[node.branch - 1] : stream.queue;
    points.push_back(push(queue, std::move(operation)));
    tails[node.branch] = points.back();
  }
  Operation end;
  for (size_t branch = 1; branch < tails.size(); branch++) {
    if (tails[branch].queue) end.after.push_back(tails[branch]);
  }
  exec.last = push(stream.queue, std::move(end));
  return hipSuccess;
}

}  // namespace

int64_t live_graphs() { return static_cast<int64_t>(graphs.alive.size()); }
int64_t live_graph_execs() { return static_cast<int64_t>(execs.alive.size()); }

hipError_t break_capture(Capture& capture, hipError_t code) {
  if (!capture.broken) capture.broken = hipErrorStreamCaptureInvalidated;
  return code;
}

hipError_t capture_work(Stream& stream, std::shared_ptr<const Work> work) {
  Capture& capture = *stream.capture;
  if (capture.broken) return capture.broken;
  Graph& graph = *capture.graph;
  graph.nodes.push_back({std::move(work), stream.branch, stream.after});
  stream.after = {static_cast<unsigned>(graph.nodes.size() - 1)};
  return hipSuccess;
}

hipError_t capture_wait(Stream& stream, const Event& event) {
  if (!event.capture) {  // what it stands for is outside of the graph
    return stream.capture ? break_capture(*stream.capture, hipErrorStreamCaptureIsolation)
                          : hipSuccess;
  }
  if (stream.capture && stream.capture != event.capture) {
    return break_capture(*stream.capture, hipErrorStreamCaptureMerge);
  }
  if (event.capture->broken) return event.capture->broken;
  if (!event.capture->origin) return hipErrorCapturedEvent;  // that capture has ended
  if (is_legacy(stream)) return break_capture(*event.capture, hipErrorStreamCaptureImplicit);
  if (!stream.capture) {
    stream.capture = event.capture;
    stream.branch = event.capture->graph->branches++;
  }
  for (unsigned node : event.after) {
    auto& after = stream.after;
    if (std::find(after.begin(), after.end(), node) == after.end()) after.push_back(node);
  }
  return hipSuccess;
}

hipError_t forbid_capture(Stream* stream) {
  if (stream->capture) return break_capture(*stream->capture, hipErrorStreamCaptureUnsupported);
  if (!is_legacy(*stream)) return hipSuccess;
  for (const void* one : streams.alive) {  // the legacy stream would wait for them
    const Stream& other = *static_cast<const Stream*>(one);
    if (other.blocking && other.capture) {
      return break_capture(*other.capture, hipErrorStreamCaptureImplicit);
    }
  }
  return hipSuccess;
}

hipError_t forbid_global_capture() {
  for (const void* one : streams.alive) {
    const Stream& stream = *static_cast<const Stream*>(one);
    if (stream.capture && stream.capture->mode != hipStreamCaptureModeRelaxed) {
      return break_capture(*stream.capture, hipErrorStreamCaptureUnsupported);
    }
  }
  return hipSuccess;
}

void forget_stream(Stream* stream) {
  if (!stream->capture) return;
  break_capture(*stream->capture, hipErrorStreamCaptureInvalidated);
  if (stream->capture->origin == stream) {
    stream->capture->origin = nullptr;
    leave_capture(stream->capture);
  }
}

DS4Q_EXPORT hipError_t hipStreamBeginCapture(void* handle, int mode) {
  return call("hipStreamBeginCapture", [&](Hold&) {
    Stream* stream = find_stream(handle);
    if (!stream) return hipErrorInvalidHandle;
    if (is_legacy(*stream)) return hipErrorStreamCaptureUnsupported;
    if (stream->capture) return hipErrorStreamCaptureUnsupported;
    if (mode < hipStreamCaptureModeGlobal || mode > hipStreamCaptureModeRelaxed) {
      return hipErrorInvalidValue;
    }
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
    stream->capture->mode = mode;
    stream->branch = 0;
    stream->after.clear();
    return hipSuccess;
  });
}

DS4Q_EXPORT hipError_t hipStreamEndCapture(void* handle, void** graph) {
  return call("hipStreamEndCapture", [&](Hold&) {
    if (!graph) return hipErrorInvalidValue;
    *graph = nullptr;
    Stream* stream = find_stream(handle);
    if (!stream) return hipErrorInvalidHandle;
    if (!stream->capture) return hipErrorInvalidValue;
    std::shared_ptr<Capture> capture = stream->capture;
    if (capture->origin != stream) {
      return break_capture(*capture, hipErrorStreamCaptureUnmatched);
    }
    if (!capture->broken && !joined(*capture->graph, stream->after)) {
      capture->broken = hipErrorStreamCaptureUnjoined;
    }
    leave_capture(capture);
    capture->origin = nullptr;  // for events that were recorded in it
    if (capture->broken) return capture->broken;
    *graph = graphs.add(new GraphHandle{capture->graph});
    return hipSuccess;
  });
}

DS4Q_EXPORT hipError_t hipStreamIsCapturing(void* handle, int* status) {
  return call("hipStreamIsCapturing", [&](Hold&) {
    Stream* stream = find_stream(handle);
    if (!stream) return hipErrorInvalidHandle;
    if (!status) return hipErrorInvalidValue;
    *status = !stream->capture ? 0 : stream->capture->broken ? 2 : 1;
    return hipSuccess;
  });
}

DS4Q_EXPORT hipError_t hipGraphGetNodes(void* handle, void** nodes, size_t* n) {
  return call("hipGraphGetNodes", [&](Hold&) {  // nodes have no handles here: only their number
    GraphHandle* graph = graphs.find(handle);
    if (!graph || !n || nodes) return hipErrorInvalidValue;
    *n = graph->graph->nodes.size();
    return hipSuccess;
  });
}

hipError_t instantiate(const char* name, void** exec, void* handle) {
  return call(name, [&](Hold&) {
    GraphHandle* graph = graphs.find(handle);
    if (!graph || !exec) return hipErrorInvalidValue;
    auto made = new GraphExec{graph->graph, {}, {}};
    for (unsigned b = 1; b < graph->graph->branches; b++) made->queues.push_back(open_queue());
    *exec = execs.add(made);
    return hipSuccess;
  });
}

DS4Q_EXPORT hipError_t hipGraphInstantiate(void** exec, void* graph, void** error_node, char* log,
                                           size_t log_bytes) {
  if (error_node) *error_node = nullptr;
  if (log && log_bytes) *log = 0;
  return instantiate("hipGraphInstantiate", exec, graph);
}

DS4Q_EXPORT hipError_t hipGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
  return instantiate("hipGraphInstantiateWithFlags", exec, graph);
}

DS4Q_EXPORT hipError_t hipGraphLaunch(void* handle, void* stream_handle) {
  return call("hipGraphLaunch", [&](Hold&) {
    GraphExec* exec = execs.find(handle);
    Stream* stream = find_stream(stream_handle);
    if (!exec || !stream) return hipErrorInvalidHandle;
    if (hipError_t code = forbid_capture(stream)) return code;
    counts.graph_launches++;
    return replay(*exec, *stream);
  });
}

DS4Q_EXPORT hipError_t hipGraphDestroy(void* handle) {
  return call("hipGraphDestroy", [&](Hold&) {
    GraphHandle* graph = graphs.find(handle);
    if (!graph) return hipErrorInvalidHandle;
    graphs.drop(graph);
    return hipSuccess;
  }, true);
}

DS4Q_EXPORT hipError_t hipGraphExecDestroy(void* handle) {
  return call("hipGraphExecDestroy", [&](Hold&) {
    GraphExec* exec = execs.find(handle);
    if (!exec) return hipErrorInvalidHandle;
    for (auto& queue : exec->queues) close_queue(queue);  // each runs what it holds first
    execs.drop(exec);
    return hipSuccess;
  }, true);
}

}  // namespace sim
