// Owns the switch between fibers and their stacks. Knows nothing of blocks or lanes.
//
// x86-64: a hand-written switch, about six pushes and pops. Elsewhere, or with DS4Q_SIM_UCONTEXT:
// ucontext, which costs two system calls a switch.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__) && !defined(DS4Q_SIM_UCONTEXT)
#define DS4Q_SIM_UCONTEXT
#endif
#if defined(DS4Q_SIM_UCONTEXT)
#include <ucontext.h>
#endif

namespace sim {

#if defined(DS4Q_SIM_UCONTEXT)
inline void switch_context(void** save, void* resume) {
  ucontext_t here;  // lives on the stack that it describes, and so as long as it is needed
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(resume));
}
inline void* fresh_context(char* stack, size_t bytes, void (*entry)()) {
  ucontext_t* context = reinterpret_cast<ucontext_t*>(stack);
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = bytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#else
// System V: the callee keeps rbx, rbp, r12 to r15; all else is the caller's to save. `ret` and not
// an indirect jump: lanes switch at the same place, so the return predictor is right.
extern "C" __attribute__((visibility("hidden"))) void ds4q_sim_switch(void** save, void* resume);
asm(R"(
.text
.p2align 4
.globl ds4q_sim_switch
.hidden ds4q_sim_switch
.type ds4q_sim_switch,@function
ds4q_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ds4q_sim_switch,.-ds4q_sim_switch
)");
inline void switch_context(void** save, void* resume) { ds4q_sim_switch(save, resume); }
inline void* fresh_context(char* stack, size_t bytes, void (*entry)()) {
  // At entry the stack must be 8 below a multiple of 16, as after a call.
  uintptr_t* top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~15);
  *--top = 0;  // a return address for debuggers: the end
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; i++) *--top = 0;
  return top;
}
#endif

// Stacks of one OS thread, kept for all its blocks. Each ends in a page without access, so that an
// overflow is a crash and not another lane's wrong sum.
class Stacks {
 public:
  static constexpr size_t kBytes = 64 * 1024;

  Stacks() = default;
  Stacks(const Stacks&) = delete;
  ~Stacks() {
    for (char* stack : all_) munmap(stack - page(), kBytes + page());
  }
  char* take() {
    if (free_.empty()) free_.push_back(make());
    char* stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void give(char* stack) { free_.push_back(stack); }
  void give_all() { free_ = all_; }
  size_t usable(char* stack) const {
    // Tops at one offset of every page would share a few cache sets: spread them.
    size_t number = (reinterpret_cast<uintptr_t>(stack) / page()) % 61;
    return kBytes - number % 16 * 256;
  }

 private:
  static size_t page() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
  }
  char* make() {
    void* whole = mmap(nullptr, kBytes + page(), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED || mprotect(whole, page(), PROT_NONE) != 0) {
      std::fprintf(stderr, "ds4q sim: no memory for the stack of a fiber\n");
      std::abort();
    }
    all_.push_back(static_cast<char*>(whole) + page());
    return all_.back();
  }
  std::vector<char*> all_, free_;
};

}  // namespace sim
