// Owns modules, their kernels, and launches. A module is a shared library that hiprtc made.
//
// Modules are never unmapped: graphs may hold their kernels, and symbols that the loader calls
// unique would keep them anyway. The same image loaded again is the same mapping.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pool.h"
#include "runtime.h"

namespace sim {
namespace {

struct Function;

struct Module {
  void* library;
  std::vector<Function*> functions;
};
struct Function {
  const ds4q_sim_kernel* kernel;
};
struct Loaded {  // an image by its hash and length
  uint64_t hash;
  size_t bytes;
  void* library;
  const ds4q_sim_kernel* kernels;
};

Handles<Module>& modules = *new Handles<Module>;
Handles<Function>& functions = *new Handles<Function>;
std::vector<Loaded>& loaded = *new std::vector<Loaded>;

constexpr int kMachineAmdGpu = 224;
constexpr char kBundle[] = "__CLANG_OFFLOAD_BUNDLE__";

size_t elf_bytes(const Elf64_Ehdr& header, const char* image) {
  size_t end = header.e_shoff + static_cast<size_t>(header.e_shnum) * header.e_shentsize;
  for (int i = 0; i < header.e_phnum; i++) {
    Elf64_Phdr part;
    std::memcpy(&part, image + header.e_phoff + i * header.e_phentsize, sizeof part);
    end = std::max<size_t>(end, part.p_offset + part.p_filesz);
  }
  for (int i = 0; i < header.e_shnum; i++) {
    Elf64_Shdr part;
    std::memcpy(&part, image + header.e_shoff + i * header.e_shentsize, sizeof part);
    if (part.sh_type != SHT_NOBITS) end = std::max<size_t>(end, part.sh_offset + part.sh_size);
  }
  return end;
}

hipError_t check_image(const char* image, size_t* bytes) {
  if (!image) return hipErrorInvalidValue;
  if (std::strncmp(image, kBundle, sizeof kBundle - 1) == 0) return hipErrorNoBinaryForGpu;
  if (std::memcmp(image, ELFMAG, SELFMAG) != 0) return hipErrorInvalidImage;
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (header.e_machine == kMachineAmdGpu) return hipErrorNoBinaryForGpu;
  if (header.e_type != ET_DYN) return hipErrorInvalidImage;
  *bytes = elf_bytes(header, image);
  return hipSuccess;
}

bool write_all(int file, const char* from, size_t bytes) {
  while (bytes) {
    ssize_t n = write(file, from, bytes);
    if (n <= 0) return false;
    from += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

hipError_t map_image(const char* image, size_t bytes, Loaded* one) {
  const char* folder = std::getenv("TMPDIR");
  // A fresh name each time: the loader answers a name that it knows with what it has.
  std::string path = std::string(folder && *folder ? folder : "/tmp") + "/ds4q-sim-XXXXXX.so";
  int file = mkstemps(&path[0], 3);
  if (file < 0) return hipErrorOperatingSystem;
  bool written = write_all(file, image, bytes);
  close(file);
  void* library = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) {
    std::fprintf(stderr, "ds4q sim: %s\n", written ? dlerror() : "no room for a module");
  }
  unlink(path.c_str());
  if (!library) return hipErrorSharedObjectInitFailed;
  using Bind = ds4q_sim_kernel* (*)(const ds4q_sim_calls*);
  Bind bind = reinterpret_cast<Bind>(dlsym(library, "ds4q_sim_bind"));
  if (!bind) return hipErrorNoBinaryForGpu;  // a library, but none that ds4q_dev.h was in
  one->library = library;
  one->kernels = bind(&services());
  return hipSuccess;
}

hipError_t load(void** out, const char* image) {
  if (!out) return hipErrorInvalidValue;
  size_t bytes = 0;
  if (hipError_t code = check_image(image, &bytes)) return code;
  Loaded one{14695981039346656037u, bytes, nullptr, nullptr};
  for (size_t i = 0; i < bytes; i++) {
    one.hash = (one.hash ^ static_cast<unsigned char>(image[i])) * 1099511628211u;
  }
  for (const Loaded& known : loaded) {
    if (known.hash == one.hash && known.bytes == bytes) one = known;
  }
  if (!one.library) {
    if (hipError_t code = map_image(image, bytes, &one)) return code;
    loaded.push_back(one);
  }
  auto module = new Module{one.library, {}};
  for (const ds4q_sim_kernel* kernel = one.kernels; kernel; kernel = kernel->next) {
    module->functions.push_back(functions.add(new Function{kernel}));
  }
  *out = modules.add(module);
  return hipSuccess;
}

struct KernelWork : Work {
  const ds4q_sim_kernel* kernel;
  Function* function;
  uint32_t blocks[3];
  std::vector<char> arguments;

  hipError_t check() const override {  // a replay after its module was unloaded
    return functions.find(function) ? hipSuccess : hipErrorInvalidHandle;
  }
  void run() const override {
    Launch launch;
    launch.kernel = kernel;
    launch.arguments = arguments.data();
    launch.threads = kernel->threads;
    std::copy(blocks, blocks + 3, launch.blocks);
    unsigned threads;
    {
      Hold hold(lock);
      counts.launches++;
      threads = static_cast<unsigned>(std::max<int64_t>(settings.threads, 1));
      launch.lane_seed = static_cast<uint64_t>(settings.lane_seed);
    }
    run_launch(launch, threads);
    if (!launch.failed) return;
    post_error(hipErrorLaunchFailure);
    Hold hold(lock);
    counts.failed_launches++;
  }
};

hipError_t gather(const ds4q_sim_kernel& kernel, void** parameters, void** extra,
                  std::vector<char>* packed) {
  packed->assign(kernel.argument_bytes, 0);
  if (parameters) {
    if (extra) return hipErrorInvalidValue;
    kernel.gather(parameters, packed->data());
    return hipSuccess;
  }
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (; extra && reinterpret_cast<uintptr_t>(*extra) != kLaunchEnd; extra += 2) {
    uintptr_t mark = reinterpret_cast<uintptr_t>(*extra);
    if (mark == kLaunchBuffer) {
      buffer = extra[1];
    } else if (mark == kLaunchBufferSize) {
      bytes = *static_cast<size_t*>(extra[1]);
    } else {
      return hipErrorInvalidValue;
    }
  }
  // Callers may round the size up to the alignment of a pointer. Anything else is the wrong list.
  if (bytes < kernel.argument_bytes || bytes > (kernel.argument_bytes + 7u) / 8 * 8) {
    std::fprintf(stderr, "ds4q sim: kernel %s takes %u bytes of arguments, not %zu\n", kernel.name,
                 kernel.argument_bytes, bytes);
    return hipErrorInvalidValue;
  }
  if (kernel.argument_bytes) std::memcpy(packed->data(), buffer, kernel.argument_bytes);
  return hipSuccess;
}

}  // namespace

int64_t live_modules() { return static_cast<int64_t>(modules.alive.size()); }

DS4Q_EXPORT hipError_t hipModuleLoadData(void** module, const void* image) {
  return call("hipModuleLoadData",
              [&](Hold&) { return load(module, static_cast<const char*>(image)); });
}

DS4Q_EXPORT hipError_t hipModuleUnload(void* handle) {
  return call("hipModuleUnload", [&](Hold& hold) {
    if (!modules.find(handle)) return hipErrorInvalidHandle;
    wait_for_all(hold);
    Module* module = modules.find(handle);  // the wait let go of the lock
    if (!module) return hipErrorInvalidHandle;
    for (Function* function : module->functions) functions.drop(function);
    modules.drop(module);
    return hipSuccess;
  }, true);
}

DS4Q_EXPORT hipError_t hipModuleGetFunction(void** function, void* handle, const char* name) {
  return call("hipModuleGetFunction", [&](Hold&) {
    Module* module = modules.find(handle);
    if (!function || !name) return hipErrorInvalidValue;
    if (!module) return hipErrorInvalidHandle;
    for (Function* one : module->functions) {
      if (std::strcmp(one->kernel->name, name) == 0) {
        *function = one;
        return hipSuccess;
      }
    }
    return hipErrorNotFound;
  });
}

DS4Q_EXPORT hipError_t hipModuleGetGlobal(void** at, size_t* bytes, void* handle,
                                          const char* name) {
  return call("hipModuleGetGlobal", [&](Hold&) {
    Module* module = modules.find(handle);
    if (!module) return hipErrorInvalidHandle;
    void* symbol = name ? dlsym(module->library, name) : nullptr;
    Dl_info info;
    ElfW(Sym)* entry = nullptr;
    if (!symbol || !dladdr1(symbol, &info, reinterpret_cast<void**>(&entry), RTLD_DL_SYMENT) ||
        !entry) {
      return hipErrorNotFound;
    }
    if (at) *at = symbol;
    if (bytes) *bytes = entry->st_size;
    return hipSuccess;
  });
}

DS4Q_EXPORT hipError_t hipModuleLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y,
                                             unsigned grid_z, unsigned block_x, unsigned block_y,
                                             unsigned block_z, unsigned shared_bytes, void* stream,
                                             void** parameters, void** extra) {
  return call("hipModuleLaunchKernel", [&](Hold& hold) {
    Function* function = functions.find(handle);
    if (!function) return hipErrorInvalidHandle;
    const ds4q_sim_kernel& kernel = *function->kernel;
    if (shared_bytes) return hipErrorInvalidValue;  // ds4q_dev.h has static arrays only
    // A kernel is compiled for one block size, in one dimension, and a grid within what AMD and
    // NVIDIA devices take.
    bool fits = block_x == kernel.threads && block_x <= kMostThreads && block_y == 1 &&
                block_z == 1 && grid_x && grid_y && grid_z && grid_x <= 0x7fffffffu &&
                grid_y <= 65535 && grid_z <= 65535;
    if (!fits || static_cast<uint64_t>(grid_x) * block_x > 0xffffffffu) {
      return hipErrorInvalidConfiguration;
    }
    auto work = std::make_shared<KernelWork>();
    if (hipError_t code = gather(kernel, parameters, extra, &work->arguments)) return code;
    work->kernel = &kernel;
    work->function = function;
    work->blocks[0] = grid_x, work->blocks[1] = grid_y, work->blocks[2] = grid_z;
    return submit(hold, stream, std::move(work), false);
  });
}

}  // namespace sim
