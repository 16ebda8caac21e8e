// What few.cu and chain.cu ask of the GPU, in words of their own: tests/rollout/emulation_device.h says the same in C++ for a CPU.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(16) uint4x { u32 x, y, z, w; };
struct alignas(16) float4x { float x, y, z, w; };
struct alignas(8) float2x { float x, y; };

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
DEVICE u32 read_pair(const u16* at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
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
DEVICE void leave(u32* meeting, u32 blocks) {  // the last block to leave makes the counters ready for the next launch
  if (atomicAdd(meeting + 1, 1) == blocks - 1) meeting[0] = meeting[1] = 0;
}
DEVICE float inverse(float x) {
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }
DEVICE void hide(uint4x& v) {  // from the compiler, which would keep what it computed from it before in registers
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
DEVICE u64 cycles() { return clock64(); }
DEVICE int thread_here() { return threadIdx.x; }
DEVICE int block_here() { return blockIdx.x; }
DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}
DEVICE int hidden(int v) {  // so that addresses are computed where they are used, and not kept for all stages
  asm volatile("" : "+r"(v));
  return v;
}

// ---- kernels of which each begins before the one before has ended

DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- tiles of a matrix with rows of 64 halves, and products of them by the four warps of a group

struct alignas(64) TensorMap { char bytes[128]; };
DEVICE void meet_group() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
DEVICE u64 read_often() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void read_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE void copy_tile(char* to, const TensorMap* map, int column, int row, u64* gate, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(gate)), "l"(policy) : "memory");
}
// Where such a tile lies, swizzled as the copy left it: eight rows are 1,024 bytes.
DEVICE u64 tile_at(const char* at) { return (u64)((shared_address(at) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_sent() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
DEVICE void multiply_tiles(float (&d)[64], u64 a, u64 b) {  // 64 outputs, 128 sequences, 16 columns
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b));
}
DEVICE void multiply_tiles(float (&d)[32], u64 a, u64 b) {  // 64 outputs, 64 sequences, 16 columns
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b));
}
DEVICE void multiply_tiles(float (&d)[16], u64 a, u64 b) {  // 64 outputs, 32 sequences, 16 columns
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b));
}
DEVICE void multiply_tiles(float (&d)[8], u64 a, u64 b) {  // 64 outputs, 16 sequences, 16 columns
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b));
}
DEVICE void multiply_tiles(float (&d)[4], u64 a, u64 b) {  // 64 outputs, 8 sequences, 16 columns
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b));
}

// ---- blocks of a cluster, which write into each other's shared memory

DEVICE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE u32 in_block(u32 at, int block) {  // the same place in the shared memory of another block of the cluster
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
// Write there, and count the bytes at a gate of that block.
DEVICE void send(float* to, float v, u64* gate, int block) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
      ::"r"(in_block(shared_address(to), block)), "f"(v), "r"(in_block(shared_address(gate), block)) : "memory");
}
// Many of them, from memory that was written here; it must stay until they are there.
DEVICE void written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void send_many(float* to, const float* from, u32 bytes, u64* gate, int block) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(in_block(shared_address(to), block)), "r"(shared_address(from)), "r"(bytes), "r"(in_block(shared_address(gate), block)) : "memory");
}
