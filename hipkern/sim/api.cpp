// Owns the exported calls on devices, memory, copies, streams and events; what they do is in
// memory.cpp and queues.cpp.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "fiber.h"
#include "runtime.h"

namespace sim {
namespace {

// The build makes one unit of all files, this one after those with state.
const bool environment_read = (read_environment(), true);

constexpr char kName[] = "ds4q simulated device (CPU)";
constexpr char kArch[] = "sim";
constexpr int kVersion = 70100000;  // major * 10^7 + minor * 10^5 + patch

struct CopyWork : Work {
  void* to;
  const void* from;
  size_t bytes;
  Place to_place, from_place;

  hipError_t check() const override {
    bool alive = place_of(to, bytes) == to_place && place_of(from, bytes) == from_place;
    return alive ? hipSuccess : hipErrorInvalidValue;
  }
  void run() const override {
    std::memmove(to, from, bytes);
    Hold hold(lock);
    counts.copies++;
  }
};

struct FillWork : Work {
  char* to;
  uint32_t pattern;
  size_t unit, units;  // bytes of the pattern, and how many of them

  hipError_t check() const override {
    Place place = place_of(to, unit * units);
    return place == Place::kDevice || place == Place::kPinned ? hipSuccess : hipErrorInvalidValue;
  }
  void run() const override {
    for (size_t i = 0; i < units; i++) std::memcpy(to + i * unit, &pattern, unit);
  }
};

bool fits(Place place, bool device) {
  return device ? place == Place::kDevice : place == Place::kPinned || place == Place::kPageable;
}

hipError_t copy(const char* name, void* to, const void* from, size_t bytes, int kind, void* stream,
                bool async) {
  return call(name, [&](Hold& hold) {
    if (!find_stream(stream)) return hipErrorInvalidHandle;
    if (kind < hipMemcpyHostToHost || kind > hipMemcpyDefault) return hipErrorInvalidValue;
    if (bytes == 0) return hipSuccess;
    auto work = std::make_shared<CopyWork>();
    work->to = to, work->from = from, work->bytes = bytes;
    work->to_place = place_of(to, bytes), work->from_place = place_of(from, bytes);
    if (work->to_place == Place::kInvalid || work->from_place == Place::kInvalid) {
      return hipErrorInvalidValue;
    }
    bool from_device = kind == hipMemcpyDeviceToHost || kind == hipMemcpyDeviceToDevice;
    bool to_device = kind == hipMemcpyHostToDevice || kind == hipMemcpyDeviceToDevice;
    if (kind != hipMemcpyDefault &&
        (!fits(work->from_place, from_device) || !fits(work->to_place, to_device))) {
      return hipErrorInvalidValue;
    }
    bool pageable = work->to_place == Place::kPageable || work->from_place == Place::kPageable;
    if (async && pageable) counts.pageable_copies++;
    // The real runtime stages pageable memory: the call returns when the copy is done.
    return submit(hold, stream, std::move(work), !async || pageable);
  });
}

hipError_t fill(const char* name, void* to, uint32_t pattern, size_t unit, size_t units,
                void* stream, bool async) {
  return call(name, [&](Hold& hold) {
    if (!find_stream(stream)) return hipErrorInvalidHandle;
    if (units == 0) return hipSuccess;
    auto work = std::make_shared<FillWork>();
    work->to = static_cast<char*>(to), work->pattern = pattern;
    work->unit = unit, work->units = units;
    if (hipError_t code = work->check()) return code;
    return submit(hold, stream, std::move(work), !async);
  });
}

}  // namespace

// ---- device -------------------------------------------------------------------------------------
DS4Q_EXPORT hipError_t hipInit(unsigned) {
  return call("hipInit", [](Hold&) { return hipSuccess; });
}
DS4Q_EXPORT hipError_t hipRuntimeGetVersion(int* version) {  // answers without a device too
  if (!version) return hipErrorInvalidValue;
  *version = kVersion;
  return hipSuccess;
}
DS4Q_EXPORT hipError_t hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }
DS4Q_EXPORT hipError_t hipGetDeviceCount(int* n) {
  if (n) *n = 0;
  return call("hipGetDeviceCount", [&](Hold&) {
    if (!n) return hipErrorInvalidValue;
    *n = 1;
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipSetDevice(int device) {
  return call("hipSetDevice",
              [&](Hold&) { return device == 0 ? hipSuccess : hipErrorInvalidDevice; });
}
DS4Q_EXPORT hipError_t hipGetDevice(int* device) {
  return call("hipGetDevice", [&](Hold&) {
    if (!device) return hipErrorInvalidValue;
    *device = 0;
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipDeviceGet(int* device, int ordinal) {
  return call("hipDeviceGet", [&](Hold&) {
    if (!device || ordinal != 0) return hipErrorInvalidDevice;
    *device = 0;
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipDeviceGetName(char* name, int bytes, int device) {
  return call("hipDeviceGetName", [&](Hold&) {
    if (device != 0) return hipErrorInvalidDevice;
    if (!name || bytes <= 0) return hipErrorInvalidValue;
    std::snprintf(name, static_cast<size_t>(bytes), "%s", kName);
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipDeviceTotalMem(size_t* bytes, int device) {
  return call("hipDeviceTotalMem", [&](Hold&) {
    if (device != 0) return hipErrorInvalidDevice;
    if (!bytes) return hipErrorInvalidValue;
    *bytes = static_cast<size_t>(settings.memory_bytes);
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  return call("hipGetDeviceProperties", [&](Hold&) {
    if (!properties) return hipErrorInvalidValue;
    if (device != 0) return hipErrorInvalidDevice;
    hipDeviceProp_tR0600& p = *properties;
    std::memset(&p, 0, sizeof p);
    std::strcpy(p.name, kName);
    std::strcpy(p.gcnArchName, kArch);
    p.totalGlobalMem = static_cast<size_t>(settings.memory_bytes);
    p.sharedMemPerBlock = p.sharedMemPerMultiprocessor = kSharedBytes;
    p.maxSharedMemoryPerMultiProcessor = kSharedBytes;
    p.warpSize = DS4Q_LANES;
    p.maxThreadsPerBlock = p.maxThreadsPerMultiProcessor = kMostThreads;
    p.maxThreadsDim[0] = kMostThreads;
    p.maxThreadsDim[1] = p.maxThreadsDim[2] = 1;
    p.maxGridSize[0] = 0x7fffffff;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.multiProcessorCount = static_cast<int>(settings.threads);
    p.integrated = p.canMapHostMemory = p.unifiedAddressing = p.concurrentKernels = 1;
    p.asyncEngineCount = 1;
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipDeviceGetAttribute(int* value, int attribute, int device) {
  return call("hipDeviceGetAttribute", [&](Hold&) {
    if (!value) return hipErrorInvalidValue;
    if (device != 0) return hipErrorInvalidDevice;
    switch (attribute) {
      case 16: *value = 1; break;  // integrated
      case 56: *value = kMostThreads; break;
      case 63: *value = static_cast<int>(settings.threads); break;  // multiprocessors
      case 74:
      case 76: *value = kSharedBytes; break;
      case 87: *value = DS4Q_LANES; break;
      default: return hipErrorInvalidValue;
    }
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipDeviceSynchronize() {
  return call("hipDeviceSynchronize", [](Hold& hold) {
    if (hipError_t code = forbid_global_capture()) return code;
    wait_for_all(hold);
    return take_error();
  });
}

// ---- memory -------------------------------------------------------------------------------------
DS4Q_EXPORT hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return call("hipMemGetInfo", [&](Hold&) {
    if (free_bytes) *free_bytes = static_cast<size_t>(settings.memory_bytes - live_bytes());
    if (total_bytes) *total_bytes = static_cast<size_t>(settings.memory_bytes);
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipMalloc(void** at, size_t bytes) {
  return call("hipMalloc", [&](Hold&) {
    if (hipError_t code = forbid_global_capture()) return code;
    return allocate(at, bytes, false);
  });
}
DS4Q_EXPORT hipError_t hipFree(void* at) {
  return call("hipFree", [&](Hold& hold) {
    if (hipError_t code = forbid_global_capture()) return code;
    wait_for_all(hold);  // as the real one does
    return release(at, false);
  }, true);
}
DS4Q_EXPORT hipError_t hipHostMalloc(void** at, size_t bytes, unsigned) {
  return call("hipHostMalloc", [&](Hold&) {
    if (hipError_t code = forbid_global_capture()) return code;
    return allocate(at, bytes, true);
  });
}
DS4Q_EXPORT hipError_t hipHostFree(void* at) {
  return call("hipHostFree", [&](Hold& hold) {
    if (hipError_t code = forbid_global_capture()) return code;
    wait_for_all(hold);
    return release(at, true);
  }, true);
}
DS4Q_EXPORT hipError_t hipHostGetDevicePointer(void** device, void* host, unsigned) {
  return call("hipHostGetDevicePointer", [&](Hold&) {
    if (!device || place_of(host, 1) != Place::kPinned) return hipErrorInvalidValue;
    *device = host;
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* at) {
  return call("hipPointerGetAttributes", [&](Hold&) {
    void* base;
    size_t bytes;
    bool pinned;
    if (!attributes || !find_allocation(at, &base, &bytes, &pinned)) return hipErrorInvalidValue;
    void* same = const_cast<void*>(at);
    *attributes = {pinned ? 1 : 2, 0, same, pinned ? same : nullptr, 0, 0};
    return hipSuccess;
  });
}

#define DS4Q_COPY(name, to_type, from_type, kind)                                      \
  DS4Q_EXPORT hipError_t name(to_type to, from_type from, size_t bytes) {              \
    return copy(#name, (void*)to, (const void*)from, bytes, kind, nullptr, false);     \
  }                                                                                    \
  DS4Q_EXPORT hipError_t name##Async(to_type to, from_type from, size_t bytes, void* stream) { \
    return copy(#name "Async", (void*)to, (const void*)from, bytes, kind, stream, true);       \
  }
DS4Q_COPY(hipMemcpyHtoD, void*, const void*, hipMemcpyHostToDevice)
DS4Q_COPY(hipMemcpyDtoH, void*, const void*, hipMemcpyDeviceToHost)
DS4Q_COPY(hipMemcpyDtoD, void*, const void*, hipMemcpyDeviceToDevice)
DS4Q_EXPORT hipError_t hipMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return copy("hipMemcpy", to, from, bytes, kind, nullptr, false);
}
DS4Q_EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind,
                                      void* stream) {
  return copy("hipMemcpyAsync", to, from, bytes, kind, stream, true);
}
DS4Q_EXPORT hipError_t hipMemset(void* to, int value, size_t bytes) {
  return fill("hipMemset", to, static_cast<uint8_t>(value), 1, bytes, nullptr, false);
}
DS4Q_EXPORT hipError_t hipMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  return fill("hipMemsetAsync", to, static_cast<uint8_t>(value), 1, bytes, stream, true);
}
DS4Q_EXPORT hipError_t hipMemsetD8(void* to, unsigned char value, size_t count) {
  return fill("hipMemsetD8", to, value, 1, count, nullptr, false);
}
DS4Q_EXPORT hipError_t hipMemsetD8Async(void* to, unsigned char value, size_t count, void* stream) {
  return fill("hipMemsetD8Async", to, value, 1, count, stream, true);
}
DS4Q_EXPORT hipError_t hipMemsetD32(void* to, int value, size_t count) {
  return fill("hipMemsetD32", to, static_cast<uint32_t>(value), 4, count, nullptr, false);
}
DS4Q_EXPORT hipError_t hipMemsetD32Async(void* to, int value, size_t count, void* stream) {
  return fill("hipMemsetD32Async", to, static_cast<uint32_t>(value), 4, count, stream, true);
}

// ---- streams ------------------------------------------------------------------------------------
DS4Q_EXPORT hipError_t hipStreamCreateWithFlags(void** stream, unsigned flags) {
  return call("hipStreamCreateWithFlags", [&](Hold&) {
    if (!stream || flags > hipStreamNonBlocking) return hipErrorInvalidValue;
    bool blocking = !(flags & hipStreamNonBlocking);
    *stream = streams.add(new Stream{open_queue(), blocking, nullptr, 0, {}});
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipStreamCreate(void** stream) {
  return call("hipStreamCreate", [&](Hold&) {
    if (!stream) return hipErrorInvalidValue;
    *stream = streams.add(new Stream{open_queue(), true, nullptr, 0, {}});
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipStreamDestroy(void* handle) {
  return call("hipStreamDestroy", [&](Hold&) {
    Stream* stream = streams.find(handle);
    if (!stream) return hipErrorInvalidHandle;
    forget_stream(stream);
    close_queue(stream->queue);  // what is in it still runs
    streams.drop(stream);
    return hipSuccess;
  }, true);
}
DS4Q_EXPORT hipError_t hipStreamSynchronize(void* handle) {
  return call("hipStreamSynchronize", [&](Hold& hold) {
    Stream* stream = find_stream(handle);
    if (!stream) return hipErrorInvalidHandle;
    if (hipError_t code = forbid_capture(stream)) return code;
    if (is_legacy(*stream)) {
      Point point = push_ordered(*stream, {});
      wait_for(hold, point);
    } else {
      wait_for(hold, {stream->queue, stream->queue->enqueued});
    }
    return take_error();
  });
}
DS4Q_EXPORT hipError_t hipStreamQuery(void* handle) {
  return call("hipStreamQuery", [&](Hold&) {
    Stream* stream = find_stream(handle);
    if (!stream) return hipErrorInvalidHandle;
    if (hipError_t code = forbid_capture(stream)) return code;
    if (!reached({stream->queue, stream->queue->enqueued})) return hipErrorNotReady;
    return take_error();
  });
}
DS4Q_EXPORT hipError_t hipStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  return call("hipStreamWaitEvent", [&](Hold&) {
    Stream* stream = find_stream(handle);
    Event* event = events.find(event_handle);
    if (!stream || !event) return hipErrorInvalidHandle;
    if (stream->capture || event->capture) return capture_wait(*stream, *event);
    if (!event->recorded || reached(event->point)) return hipSuccess;
    push_ordered(*stream, {nullptr, {event->point}, nullptr});
    return hipSuccess;
  });
}

// ---- events -------------------------------------------------------------------------------------
DS4Q_EXPORT hipError_t hipEventCreateWithFlags(void** event, unsigned flags) {
  return call("hipEventCreateWithFlags", [&](Hold&) {
    if (!event) return hipErrorInvalidValue;
    *event = events.add(new Event{!(flags & hipEventDisableTiming), false, {}, {}, {}, {}});
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipEventCreate(void** event) {
  return call("hipEventCreate", [&](Hold&) {
    if (!event) return hipErrorInvalidValue;
    *event = events.add(new Event{true, false, {}, {}, {}, {}});
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipEventDestroy(void* handle) {
  return call("hipEventDestroy", [&](Hold&) {
    Event* event = events.find(handle);
    if (!event) return hipErrorInvalidHandle;
    events.drop(event);
    return hipSuccess;
  }, true);
}
DS4Q_EXPORT hipError_t hipEventRecord(void* handle, void* stream_handle) {
  return call("hipEventRecord", [&](Hold&) {
    Event* event = events.find(handle);
    Stream* stream = find_stream(stream_handle);
    if (!event || !stream) return hipErrorInvalidHandle;
    event->capture = stream->capture;
    event->after = stream->after;
    if (stream->capture) return stream->capture->broken;
    event->recorded = true;
    event->stamp_ms = std::make_shared<double>();
    event->point = push_ordered(*stream, {nullptr, {}, event->stamp_ms});
    return hipSuccess;
  });
}
DS4Q_EXPORT hipError_t hipEventSynchronize(void* handle) {
  return call("hipEventSynchronize", [&](Hold& hold) {
    Event* event = events.find(handle);
    if (!event) return hipErrorInvalidHandle;
    if (event->capture) return hipErrorCapturedEvent;
    Point point = event->point;  // a record meanwhile is not waited for
    wait_for(hold, point);
    return take_error();
  });
}
DS4Q_EXPORT hipError_t hipEventQuery(void* handle) {
  return call("hipEventQuery", [&](Hold&) {
    Event* event = events.find(handle);
    if (!event) return hipErrorInvalidHandle;
    if (event->capture) return hipErrorCapturedEvent;
    return reached(event->point) ? take_error() : hipErrorNotReady;
  });
}
DS4Q_EXPORT hipError_t hipEventElapsedTime(float* ms, void* start_handle, void* stop_handle) {
  return call("hipEventElapsedTime", [&](Hold&) {
    Event* start = events.find(start_handle);
    Event* stop = events.find(stop_handle);
    if (!ms) return hipErrorInvalidValue;
    if (!start || !stop || !start->recorded || !stop->recorded || !start->timed || !stop->timed) {
      return hipErrorInvalidHandle;
    }
    if (!reached(start->point) || !reached(stop->point)) return hipErrorNotReady;
    *ms = static_cast<float>(*stop->stamp_ms - *start->stamp_ms);
    return hipSuccess;
  });
}

}  // namespace sim
