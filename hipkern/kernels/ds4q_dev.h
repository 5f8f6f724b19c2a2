// Owns what differs between targets: ids, barriers, shuffles, shared memory, conversions; and the
// few functions (exp, log1p) that must give the same bits on all of them. No kernel lives here.
//
// A kernel file includes this header and files of this folder, nothing else: no vendor header, no
// device library, no standard header. Targets: amdgcn (clang, hiprtc), NVIDIA (NVRTC), and the CPU
// fibers of hipkern/sim (g++, clang++), which define DS4Q_SIM.
//
// Rules that keep the bits equal: built with -ffp-contract=off (--fmad=false), a fused operation is
// written ds4q_fma; reductions run over groups of 32 lanes, whatever the hardware's wave, in a
// fixed order; + - * / sqrt are correctly rounded; subnormals are kept; no vendor math function.
#pragma once

typedef unsigned char ds4q_u8;
typedef unsigned short ds4q_u16;
typedef unsigned int ds4q_u32;
typedef unsigned long long ds4q_u64;

#define DS4Q_LANES 32  // lanes of a group: what shuffles and group barriers span

struct alignas(16) ds4q_piece {
  ds4q_u32 words[4];
};
struct alignas(16) ds4q_four {
  float x[4];
};

// ds4q_count adds to a counter in shared memory, atomically. It returns nothing, so that the order
// in which lanes arrive cannot show.
// ds4q_near4 reads what nothing writes while the kernel runs and others read soon; ds4q_stream16,
// what is read once.
// ds4q_now has a value computed where it stands: LLVM for amdgcn would move that to where the value
// is used, and keep all that it is computed from.
// DS4Q_KERNEL(name, threads, arguments) declares a kernel; DS4Q_KERNEL_OF(resident, ..) one of which
// a multiprocessor should have room for `resident` blocks.

#if defined(DS4Q_SIM)
// ---- CPU fibers ---------------------------------------------------------------------------------
// The simulated device hands its services in through ds4q_sim_bind, so that a module needs no
// symbol of the library that loads it.

struct ds4q_sim_lane {  // one GPU thread; the first fields of what the scheduler keeps of a fiber
  ds4q_u32 thread, threads;
  ds4q_u32 block[3], blocks[3];
};
struct ds4q_sim_calls {
  ds4q_sim_lane* (*lane)();
  void (*barrier)();                                     // all threads of the block
  void (*group_barrier)();                               // the 32 lanes of a group
  ds4q_u32 (*shuffle)(ds4q_u32 value, ds4q_u32 source);  // value of lane `source` of the group
  float (*group_sum)(float value);  // what the shuffles below give, in one switch
  float (*group_max)(float value);
  void* (*shared)(ds4q_u32 bytes);         // the next shared object of the block, 16-byte aligned
  void (*copy16)(void* to, const void* from);  // lands at the wait, not before
  void (*copy_commit)();
  void (*copy_wait)(ds4q_u32 pending);
  ds4q_u32 (*atomic_add)(ds4q_u32* at, ds4q_u32 value);
};
struct ds4q_sim_kernel {  // one kernel of a module; a linked list, newest first
  const char* name;
  void (*run)(const char* packed);  // unpacks its arguments, each at its natural alignment
  void (*gather)(void* const* arguments, char* packed);  // packs what they point to
  ds4q_u32 argument_bytes, threads;
  ds4q_sim_kernel* next;
};

#define DS4Q_HIDDEN __attribute__((visibility("hidden")))
DS4Q_HIDDEN inline ds4q_sim_calls ds4q_sim = {};
DS4Q_HIDDEN inline ds4q_sim_kernel* ds4q_sim_kernels = nullptr;
extern "C" __attribute__((visibility("default"), weak)) ds4q_sim_kernel* ds4q_sim_bind(
    const ds4q_sim_calls* calls) {
  ds4q_sim = *calls;
  return ds4q_sim_kernels;
}

template <class... A>
struct ds4q_sim_pack {  // offsets of arguments, as a launch packs them
  template <class T>
  static T take(const char* packed, ds4q_u32& at) {
    at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
    T value;
    __builtin_memcpy(&value, packed + at, sizeof(T));
    at += sizeof(T);
    return value;
  }
  static ds4q_u32 bytes() {
    ds4q_u32 at = 0;
    ((at = (at + alignof(A) - 1) / alignof(A) * alignof(A) + sizeof(A)), ...);
    return at;
  }
  template <class T>
  static void put(const void* value, char* packed, ds4q_u32& at) {
    at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
    __builtin_memcpy(packed + at, value, sizeof(T));
    at += sizeof(T);
  }
  static void gather(void* const* arguments, char* packed) {
    ds4q_u32 at = 0;
    (put<A>(*arguments++, packed, at), ...);
  }
  template <void (*kernel)(A...)>
  static void run(const char* packed) {
    ds4q_u32 at = 0;
    struct call {  // braces fix the order of evaluation
      call(A... values) { kernel(values...); }
    };
    call{take<A>(packed, at)...};
  }
};
template <class... A>
ds4q_sim_pack<A...> ds4q_sim_pack_of(void (*)(A...));

struct ds4q_sim_entry : ds4q_sim_kernel {
  ds4q_sim_entry(const char* n, ds4q_u32 t, void (*r)(const char*),
                 void (*g)(void* const*, char*), ds4q_u32 bytes) {
    name = n, threads = t, run = r, gather = g, argument_bytes = bytes, next = ds4q_sim_kernels;
    ds4q_sim_kernels = this;
  }
};

#define DS4Q_KERNEL_OF(resident, name, block_threads, arguments) \
  DS4Q_KERNEL(name, block_threads, arguments)
#define DS4Q_KERNEL(name, block_threads, arguments)                                       \
  static void name arguments;                                                             \
  static ds4q_sim_entry ds4q_sim_entry_##name(                                            \
      #name, block_threads, &decltype(ds4q_sim_pack_of(&name))::template run<&name>,      \
      &decltype(ds4q_sim_pack_of(&name))::gather,                                         \
      decltype(ds4q_sim_pack_of(&name))::bytes());                                        \
  static void name arguments

// Shared arrays are declared at the top of a kernel, by every lane, in one order.
#define DS4Q_SHARED(type, name, count) \
  type* name = (type*)ds4q_sim.shared(sizeof(type) * (count))
#define DS4Q_UNROLL

inline ds4q_u32 ds4q_thread() { return ds4q_sim.lane()->thread; }
inline ds4q_u32 ds4q_threads() { return ds4q_sim.lane()->threads; }
inline ds4q_u32 ds4q_block_x() { return ds4q_sim.lane()->block[0]; }
inline ds4q_u32 ds4q_block_y() { return ds4q_sim.lane()->block[1]; }
inline ds4q_u32 ds4q_block_z() { return ds4q_sim.lane()->block[2]; }
inline ds4q_u32 ds4q_blocks_x() { return ds4q_sim.lane()->blocks[0]; }
inline ds4q_u32 ds4q_blocks_y() { return ds4q_sim.lane()->blocks[1]; }
inline void ds4q_barrier() { ds4q_sim.barrier(); }
inline void ds4q_group_barrier() { ds4q_sim.group_barrier(); }
inline ds4q_u32 ds4q_shuffle_bits(ds4q_u32 v, ds4q_u32 lane) { return ds4q_sim.shuffle(v, lane); }
inline float ds4q_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float ds4q_sqrt(float x) { return __builtin_sqrtf(x); }
inline float ds4q_half(ds4q_u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
inline ds4q_u16 ds4q_to_half(float x) { return __builtin_bit_cast(ds4q_u16, (_Float16)x); }
inline void ds4q_copy16(void* to_shared, const void* from) { ds4q_sim.copy16(to_shared, from); }
inline void ds4q_copy_commit() { ds4q_sim.copy_commit(); }
template <int PENDING>
inline void ds4q_copy_wait() { ds4q_sim.copy_wait(PENDING); }
inline void ds4q_count(ds4q_u32* at, ds4q_u32 more) { ds4q_sim.atomic_add(at, more); }
inline ds4q_piece ds4q_stream16(const void* from) { return *(const ds4q_piece*)from; }
inline float ds4q_now(float x) { return x; }
inline ds4q_four ds4q_near4(const float* from) { return *(const ds4q_four*)from; }
// A constant that is worth a register: a compiler would make it anew for each use. By whole groups.
inline ds4q_u32 ds4q_keep(ds4q_u32 x) { return ds4q_sim.shuffle(x, 0); }
// Byte i of the result is byte (selector >> 4 i) & 15 < 8 of the eight bytes of low, then high. The
// upper half of the selector is not looked at.
inline ds4q_u32 ds4q_bytes(ds4q_u32 low, ds4q_u32 high, ds4q_u32 selector) {
  ds4q_u64 all = (ds4q_u64)high << 32 | low;
  ds4q_u32 found = 0;
  for (int i = 0; i < 4; i++) {
    found |= (ds4q_u32)(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  }
  return found;
}

#elif defined(__CUDACC_RTC__) || defined(__CUDACC__)
// ---- NVIDIA: NVRTC with --device-as-default-execution-space --fmad=false -------------------------
#define DS4Q_KERNEL_OF(resident, name, block_threads, arguments) \
  extern "C" __global__ void __launch_bounds__(block_threads, resident) name arguments
#define DS4Q_KERNEL(name, block_threads, arguments) DS4Q_KERNEL_OF(1, name, block_threads, arguments)
#define DS4Q_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define DS4Q_UNROLL _Pragma("unroll")
#if defined(__CUDACC_RTC__)
#define DS4Q_FN inline
#else
#define DS4Q_FN __device__ inline
#endif

DS4Q_FN ds4q_u32 ds4q_thread() { return threadIdx.x; }
DS4Q_FN ds4q_u32 ds4q_threads() { return blockDim.x; }
DS4Q_FN ds4q_u32 ds4q_block_x() { return blockIdx.x; }
DS4Q_FN ds4q_u32 ds4q_block_y() { return blockIdx.y; }
DS4Q_FN ds4q_u32 ds4q_block_z() { return blockIdx.z; }
DS4Q_FN ds4q_u32 ds4q_blocks_x() { return gridDim.x; }
DS4Q_FN ds4q_u32 ds4q_blocks_y() { return gridDim.y; }
DS4Q_FN void ds4q_barrier() { __syncthreads(); }
DS4Q_FN void ds4q_group_barrier() { __syncwarp(); }
DS4Q_FN ds4q_u32 ds4q_shuffle_bits(ds4q_u32 v, ds4q_u32 lane) {
  return __shfl_sync(0xffffffffu, v, (int)lane, 32);
}
DS4Q_FN float ds4q_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DS4Q_FN float ds4q_sqrt(float x) { return __fsqrt_rn(x); }
DS4Q_FN float ds4q_half(ds4q_u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
DS4Q_FN ds4q_u16 ds4q_to_half(float x) {
  ds4q_u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DS4Q_FN void ds4q_copy16(void* to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   (ds4q_u32)__cvta_generic_to_shared(to_shared)),
               "l"(from)
               : "memory");
}
DS4Q_FN void ds4q_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DS4Q_FN void ds4q_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
DS4Q_FN void ds4q_count(ds4q_u32* at, ds4q_u32 more) { atomicAdd(at, more); }
DS4Q_FN ds4q_piece ds4q_stream16(const void* from) {
  ds4q_piece p;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
      : "l"(from));
  return p;
}
DS4Q_FN float ds4q_now(float x) { return x; }
DS4Q_FN ds4q_four ds4q_near4(const float* from) {
  ds4q_four f;
  asm("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
      : "=f"(f.x[0]), "=f"(f.x[1]), "=f"(f.x[2]), "=f"(f.x[3])
      : "l"(from));
  return f;
}
DS4Q_FN ds4q_u32 ds4q_keep(ds4q_u32 x) {  // a move would be seen through
  return __shfl_sync(0xffffffffu, x, 0, 32);
}
DS4Q_FN ds4q_u32 ds4q_bytes(ds4q_u32 low, ds4q_u32 high, ds4q_u32 selector) {
  ds4q_u32 found;  // __byte_perm would spend an operation on clearing what is clear
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(selector));
  return found;
}

#else
// ---- amdgcn: clang -x hip, hiprtc ---------------------------------------------------------------
#pragma clang force_cuda_host_device begin
#define DS4Q_FN __attribute__((always_inline)) inline  // a call would cost scratch
#define DS4Q_KERNEL_OF(resident, name, block_threads, arguments) \
  DS4Q_KERNEL(name, block_threads, arguments)
#define DS4Q_KERNEL(name, block_threads, arguments)                   \
  extern "C" __attribute__((global))                                  \
  __attribute__((amdgpu_flat_work_group_size(block_threads, block_threads))) void name arguments
#define DS4Q_SHARED(type, name, count) \
  static __attribute__((shared, aligned(16))) type name[count]
#define DS4Q_UNROLL _Pragma("unroll")

inline ds4q_u32 ds4q_thread() { return __builtin_amdgcn_workitem_id_x(); }
// The workgroup size and grid come from the dispatch packet, whose layout is the HSA standard's.
inline ds4q_u32 ds4q_threads() {
  return ((const ds4q_u16 __attribute__((address_space(4)))*)__builtin_amdgcn_dispatch_ptr())[2];
}
inline ds4q_u32 ds4q_block_x() { return __builtin_amdgcn_workgroup_id_x(); }
inline ds4q_u32 ds4q_block_y() { return __builtin_amdgcn_workgroup_id_y(); }
inline ds4q_u32 ds4q_block_z() { return __builtin_amdgcn_workgroup_id_z(); }
inline ds4q_u32 ds4q_blocks_x() {
  const ds4q_u32 __attribute__((address_space(4)))* packet =
      (const ds4q_u32 __attribute__((address_space(4)))*)__builtin_amdgcn_dispatch_ptr();
  return packet[3] / ds4q_threads();
}
inline ds4q_u32 ds4q_blocks_y() {  // blocks are one-dimensional: grid y counts blocks
  return ((const ds4q_u32 __attribute__((address_space(4)))*)__builtin_amdgcn_dispatch_ptr())[4];
}
inline void ds4q_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
inline void ds4q_group_barrier() {  // a wave runs in step; only its memory operations need order
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
inline ds4q_u32 ds4q_shuffle_bits(ds4q_u32 v, ds4q_u32 lane) {
  ds4q_u32 first = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)) & ~31u;
  return (ds4q_u32)__builtin_amdgcn_ds_bpermute((int)((first | lane) << 2), (int)v);
}
inline float ds4q_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float ds4q_sqrt(float x) { return __builtin_sqrtf(x); }
inline float ds4q_half(ds4q_u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
inline ds4q_u16 ds4q_to_half(float x) { return __builtin_bit_cast(ds4q_u16, (_Float16)x); }
inline void ds4q_copy16(void* to_shared, const void* from) {
  *(ds4q_piece*)to_shared = *(const ds4q_piece*)from;
}
inline ds4q_four ds4q_near4(const float* from) { return *(const ds4q_four*)from; }
inline float ds4q_now(float x) {
  asm volatile("" : "+v"(x));
  return x;
}
typedef ds4q_u32 ds4q_vector __attribute__((ext_vector_type(4)));
inline ds4q_piece ds4q_stream16(const void* from) {
  return __builtin_bit_cast(ds4q_piece, __builtin_nontemporal_load((const ds4q_vector*)from));
}
inline void ds4q_copy_commit() {}
template <int PENDING>
inline void ds4q_copy_wait() {}
inline void ds4q_count(ds4q_u32* at, ds4q_u32 more) {
  __hip_atomic_fetch_add(at, more, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
inline ds4q_u32 ds4q_keep(ds4q_u32 x) { return x; }
inline ds4q_u32 ds4q_bytes(ds4q_u32 low, ds4q_u32 high, ds4q_u32 selector) {
  ds4q_u32 pairs = __builtin_amdgcn_perm(0, selector, 0x0c010c00u);
  return __builtin_amdgcn_perm(high, low, (pairs | pairs << 4) & 0x0f0f0f0fu);
}
#endif

#if !defined(DS4Q_FN)
#define DS4Q_FN inline
#endif

// ---- the same source for all targets ------------------------------------------------------------
DS4Q_FN ds4q_u32 ds4q_lane() { return ds4q_thread() % DS4Q_LANES; }
DS4Q_FN ds4q_u32 ds4q_bits(float x) { return __builtin_bit_cast(ds4q_u32, x); }
DS4Q_FN float ds4q_float(ds4q_u32 bits) { return __builtin_bit_cast(float, bits); }
DS4Q_FN float ds4q_shuffle(float v, ds4q_u32 lane) {
  return ds4q_float(ds4q_shuffle_bits(ds4q_bits(v), lane));
}
DS4Q_FN float ds4q_infinity() { return ds4q_float(0x7f800000u); }
DS4Q_FN float ds4q_max(float a, float b) { return a > b ? a : b; }

// Sum over the 32 lanes of a group, in every lane: partners at distance 1, 2, 4, 8, 16. Addition
// commutes, so all lanes hold the same bits.
#if defined(DS4Q_SIM)  // the same sums in one switch of fibers in place of five
inline float ds4q_group_sum(float v) { return ds4q_sim.group_sum(v); }
inline float ds4q_group_max(float v) { return ds4q_sim.group_max(v); }
#else
DS4Q_FN float ds4q_group_sum(float v) {
  ds4q_u32 lane = ds4q_lane();
  DS4Q_UNROLL
  for (ds4q_u32 d = 1; d < DS4Q_LANES; d *= 2) v = v + ds4q_shuffle(v, lane ^ d);
  return v;
}
DS4Q_FN float ds4q_group_max(float v) {
  ds4q_u32 lane = ds4q_lane();
  DS4Q_UNROLL
  for (ds4q_u32 d = 1; d < DS4Q_LANES; d *= 2) v = ds4q_max(v, ds4q_shuffle(v, lane ^ d));
  return v;
}
#endif

// The largest errors below are over all floats of the range, against float64.

// e^x. Cody-Waite reduction x = n ln 2 + r, |r| <= ln(2)/2, a polynomial in r (near-minimax, 1e-9),
// and 2^n in two steps, the second of which rounds where the result is subnormal. At most 0.88 ulp.
// NaN gives NaN, above the largest float +inf, below -104 +0.
DS4Q_FN float ds4q_exp(float x) {
  if (!(x < 88.7228394f)) return x < 88.7228394f || x != x ? x : ds4q_infinity();
  if (x < -104.0f) return 0.0f;
  float shifted = ds4q_fma(x, 1.44269504f, 12582912.0f);  // rounds to the nearest integer
  float n = shifted - 12582912.0f;
  float r = ds4q_fma(n, -0.693145752f, x);
  r = ds4q_fma(n, -1.42860677e-6f, r);
  float p = 1.98992901e-4f;
  p = ds4q_fma(p, r, 1.39336544e-3f);
  p = ds4q_fma(p, r, 8.33329763e-3f);
  p = ds4q_fma(p, r, 4.16664630e-2f);
  p = ds4q_fma(p, r, 1.66666672e-1f);
  p = ds4q_fma(p, r, 0.5f);
  p = ds4q_fma(p, r, 1.0f);
  p = ds4q_fma(p, r, 1.0f);
  int whole = (int)n, half = whole / 2;
  float up = ds4q_float((ds4q_u32)(half + 127) << 23);
  return p * up * ds4q_float((ds4q_u32)(whole - half + 127) << 23);
}

// ln(1 + x) for 0 <= x <= 1, all that softplus asks. From 0.5 on as ln 2 + ln(1 + (x - 1) / 2), an
// exact step; then, with s = f / (2 + f), ln(1 + f) = f - f^2/2 + s (f^2/2 + p(s^2)). At most
// 0.91 ulp. NaN gives NaN.
DS4Q_FN float ds4q_log1p(float x) {
  bool upper = x >= 0.5f;
  float f = upper ? 0.5f * (x - 1.0f) : x;
  float s = f / (2.0f + f);
  float z = s * s;
  float p = 0.23749055f;
  p = ds4q_fma(p, z, 0.28532643f);
  p = ds4q_fma(p, z, 0.40000313f);
  p = ds4q_fma(p, z, 0.66666666f);
  p = p * z;
  float half = 0.5f * f * f;
  float low = s * (half + p);
  if (!upper) return f - (half - low);
  return 0.693359375f - ((half - (low - 2.12194440e-4f)) - f);
}

// 1 / (1 + e^-x). Relative error: 0.88 ulp of e^-x times its share of the sum, and two roundings;
// below -88.7, where e^-x overflows, +0.
DS4Q_FN float ds4q_sigmoid(float x) { return 1.0f / (1.0f + ds4q_exp(-x)); }
