// A GPU on one CPU thread, for few.cu: every thread of every block is a fiber, and what few_device.cu asks of the hardware
// is said in C++. Fibers run in a shuffled order and copies into shared memory come late, so that a missing wait shows.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define BOTH
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) uint4x { u32 x, y, z, w; };
struct alignas(16) float4x { float x, y, z, w; };

namespace emulated {
constexpr int BLOCK = 384;
struct Meeting {
  int arrived = 0;
  u64 generation = 0;
};
struct Gate {
  int count, pending, bytes;
  u32 phase;
  void check() {
    if (pending == 0 && bytes == 0) pending = count, phase ^= 1;
  }
};
struct Warp {
  Meeting meeting;
  float floats[32];
  int ints[32];
  u32 a[32][4], b[32][2];
};
struct Fiber {
  ucontext_t context;
  int block, thread;
  bool done;
  std::vector<char> stack;
};
struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* gate;
};
inline ucontext_t scheduler;
inline Fiber* here;
inline std::vector<Warp> warps;
inline std::vector<Meeting> workers, everyone;
inline std::vector<std::vector<char>> memories;
inline std::map<u64*, Gate> gates;
inline std::vector<Copy> copies;
inline u64 progress;

inline void yield() { swapcontext(&here->context, &scheduler); }
inline void meet(Meeting& m, int count) {
  u64 generation = m.generation;
  if (++m.arrived == count) m.arrived = 0, ++m.generation, ++progress;
  else
    while (m.generation == generation) yield();
}
inline Warp& warp() { return warps[here->block * (BLOCK / 32) + here->thread / 32]; }
}  // namespace emulated

inline float __uint_as_float(u32 v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline u32 __float_as_uint(float f) {
  u32 v;
  memcpy(&v, &f, 4);
  return v;
}
inline u32 bf16(float f) {
  u32 v = __float_as_uint(f);
  if (f != f) return 0x7fff;
  return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
inline int thread_here() { return emulated::here->thread; }
inline int block_here() { return emulated::here->block; }
inline char* shared_memory() {
  auto at = (uintptr_t)emulated::memories[emulated::here->block].data();
  return (char*)((at + 127) / 128 * 128);
}
inline uint4x read16(const void* at) { return *(const uint4x*)at; }
inline uint4x read_constant(const void* at) { return *(const uint4x*)at; }
inline float read_float(const float* at) { return *at; }
inline u16 read_half(const u16* at) { return *at; }
inline uint4x tile16(const char* at) { return *(const uint4x*)at; }
inline u32 pack(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline u32 permute(u32 a, u32 b, u32 how) {
  u64 both = (u64)b << 32 | a;
  u32 v = 0;
  for (int i = 0; i < 4; ++i) v |= (u32)(both >> 8 * (how >> 4 * i & 7) & 255) << 8 * i;
  return v;
}
inline float power2(float x) { return exp2f(x); }
inline float inverse_root(float x) { return 1 / sqrtf(x); }
inline void hide(uint4x&) {}
inline void give_registers() {}
inline void take_registers() {}
inline void meet_warp() { emulated::meet(emulated::warp().meeting, 32); }
inline void meet() { emulated::meet(emulated::workers[emulated::here->block], 256); }
inline void meet_all() { emulated::meet(emulated::everyone[emulated::here->block], emulated::BLOCK); }
inline float across(float v, int lanes) {
  auto& w = emulated::warp();
  int lane = emulated::here->thread % 32;
  w.floats[lane] = v;
  meet_warp();
  v = w.floats[lane ^ lanes];
  meet_warp();
  return v;
}
inline int across(int v, int lanes) {
  auto& w = emulated::warp();
  int lane = emulated::here->thread % 32;
  w.ints[lane] = v;
  meet_warp();
  v = w.ints[lane ^ lanes];
  meet_warp();
  return v;
}
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto& w = emulated::warp();
  int lane = emulated::here->thread % 32, g = lane / 4, t = lane % 4;
  u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(w.a[lane], a, 16), memcpy(w.b[lane], b, 8);
  meet_warp();
  for (int e = 0; e < 4; ++e) {
    int row = g + e / 2 * 8, column = 2 * t + e % 2;
    for (int k = 0; k < 16; ++k) {
      u32 left = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], right = w.b[column * 4 + k % 8 / 2][k / 8];
      c[e] += __uint_as_float(k % 2 ? left & 0xffff0000u : left << 16) *
              __uint_as_float(k % 2 ? right & 0xffff0000u : right << 16);
    }
  }
  meet_warp();
}
inline void gate_init(u64* gate, u32 count) { emulated::gates[gate] = {(int)count, (int)count, 0, 0}; }
inline void gates_ready() {}
inline void gate_arrive(u64* gate) {
  auto& g = emulated::gates.at(gate);
  --g.pending, g.check(), ++emulated::progress;
}
inline void gate_expect(u64* gate, u32 bytes) { emulated::gates.at(gate).bytes += bytes, gate_arrive(gate); }
inline void gate_wait(u64* gate, u32 phase) {
  while (emulated::gates.at(gate).phase == phase) emulated::yield();
}
inline u64 read_once() { return 0; }
inline void stream(void* to, const void* from, u32 bytes, u64* gate, u64) {
  memset(to, 0xff, bytes);  // not a number, until it is there
  emulated::copies.push_back({to, from, bytes, gate});
}
inline void count_up(u32* at) { ++*at, ++emulated::progress; }
inline int hidden(int v) { return v; }
inline u32 read_counter(const u32* at) { return *at; }
inline void pause() { emulated::yield(); }

struct Step;
extern "C" void decode_few(const Step step);

namespace emulated {
inline const Step* argument;
void enter();  // decode_few(*argument), once Step is known

inline int launch(const Step* step, int blocks, u32 seed) {
  argument = step;
  std::mt19937 chance(seed);
  warps.assign(blocks * BLOCK / 32, {}), workers.assign(blocks, {}), everyone.assign(blocks, {});
  memories.assign(blocks, std::vector<char>(SHARED_MEMORY + 128));
  gates.clear(), copies.clear();
  std::vector<Fiber> fibers(blocks * BLOCK);
  std::vector<int> order(fibers.size());
  for (int i = 0; i < (int)fibers.size(); ++i) {
    Fiber& f = fibers[i];
    f.block = i / BLOCK, f.thread = i % BLOCK, f.done = false, order[i] = i;
    f.stack.resize(1 << 16);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size(), f.context.uc_link = &scheduler;
    makecontext(&f.context, (void (*)())enter, 0);
  }
  for (int i = 0; i < blocks * (BLOCK / 32); ++i)  // whole warps change places
    std::swap_ranges(&order[i * 32], &order[i * 32] + 32, &order[chance() % (blocks * BLOCK / 32) * 32]);
  u64 seen = 0;
  int idle = 0;
  for (size_t left = fibers.size(); left;) {
    for (int i : order) {
      Fiber& f = fibers[i];
      if (f.done) continue;
      here = &f;
      swapcontext(&scheduler, &f.context);
      if (f.done) --left, ++progress;
    }
    size_t due = copies.size() - (chance() % 2 ? copies.size() / 2 : 0);
    for (size_t i = 0; i < due; ++i) {
      Copy c = copies[i];
      memcpy(c.to, c.from, c.bytes);
      Gate& g = gates.at(c.gate);
      g.bytes -= c.bytes, g.check(), ++progress;
    }
    copies.erase(copies.begin(), copies.begin() + due);
    idle = progress == seen ? idle + 1 : 0, seen = progress;
    if (idle > 64) return 1;  // everybody waits
  }
  return 0;
}
}  // namespace emulated

inline void leave(u32* meeting);
