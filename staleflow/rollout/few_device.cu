// What few.cu asks of the GPU, in words of its own: tests/rollout/emulation.h says the same in C++ for a CPU.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(16) uint4x { u32 x, y, z, w; };
struct alignas(16) float4x { float x, y, z, w; };

#define DEVICE __device__ __forceinline__
#define BOTH __host__ __device__

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
// What another block writes. A weak load ("ld.global.cg") would be moved out of the loop that waits for it.
DEVICE uint4x read16(const void* at) {
  uint4x v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
DEVICE uint4x read_constant(const void* at) {  // what no block writes
  uint4x v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
DEVICE float read_float(const float* at) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}
DEVICE u16 read_half(const u16* at) {
  u16 v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return v;
}
DEVICE uint4x tile16(const char* at) {
  uint4x v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(at)));
  return v;
}
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 pack(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
DEVICE u32 permute(u32 a, u32 b, u32 how) { return __byte_perm(a, b, how); }
DEVICE float power2(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE float across(float v, int lanes) { return __shfl_xor_sync(0xffffffffu, v, lanes); }
DEVICE int across(int v, int lanes) { return __shfl_xor_sync(0xffffffffu, v, lanes); }
DEVICE void meet_warp() { __syncwarp(); }
DEVICE void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }  // the eight warps that compute
DEVICE void meet_all() { __syncthreads(); }
DEVICE void gate_init(u64* gate, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(count) : "memory");
}
DEVICE void gate_arrive(u64* gate) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(gate)) : "memory");
}
DEVICE void gate_expect(u64* gate, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate)), "r"(bytes) : "memory");
}
DEVICE void gate_wait(u64* gate, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
      ::"r"(shared_address(gate)), "r"(phase) : "memory");
}
DEVICE void gates_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void stream(void* to, const void* from, u32 bytes, u64* gate, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(gate)), "l"(policy) : "memory");
}
DEVICE void count_up(u32* at) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory"); }
DEVICE u32 read_counter(const u32* at) {
  u32 seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
  return seen;
}
DEVICE void pause() {}  // another thread's turn, where threads are emulated
DEVICE void leave(u32* meeting) {  // the last block to leave makes the counters ready for the next launch
  if (atomicAdd(meeting + 1, 1) == GRID - 1) meeting[0] = meeting[1] = 0;
}
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }
DEVICE void hide(uint4x& v) {  // from the compiler, which would keep what it computed from it before in registers
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
DEVICE int thread_here() { return threadIdx.x; }
DEVICE int block_here() { return blockIdx.x; }
DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
DEVICE int hidden(int v) {  // so that addresses are computed where they are used, and not kept for all stages
  asm volatile("" : "+r"(v));
  return v;
}
