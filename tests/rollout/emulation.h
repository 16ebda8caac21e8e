// A GPU on one CPU thread: every thread of every block is a fiber, and emulation_device.h says in C++ what device.cu asks of
// the hardware. Warps run in a shuffled order, copies into shared memory come late and in any order, and a kernel begins as
// early as it may, so that a missing wait shows: as a wrong result, or as one of the failures named here.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
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
#define __cluster_dims__(...)

namespace emulated {
constexpr int ALIVE = 3, STACK = 1 << 16, GUARD = 4096;  // kernels at once; bytes of a fiber, and behind a shared memory
constexpr int NAP = 64, PATIENT = 8 * NAP;               // rounds: a warp sits out, and nothing happens
struct Meeting {
  int arrived = 0;
  u32 generation = 0;
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
  int asleep = 0;  // rounds
  float floats[32];
  int ints[32];
  u32 a[32][4], b[32][2];
};
struct Kernel {
  void (*run)(void**);
  void** arguments;
  int blocks, threads, cluster, shared_memory;
  Kernel* before = nullptr;
  int begun = 0, ready = 0, ended = 0;  // blocks; ready: the next kernel need not wait for them
  u32 over = 0;
};
struct Cluster;
struct Block {
  Kernel* kernel;
  Cluster* cluster;
  int index, left;
  char* memory;
  bool ready = false;
  Meeting workers, everyone;
  std::vector<Warp> warps;
};
struct Product {  // of two tiles, asked for by one thread
  float* sums;
  int count;
  u64 a, b;
  int group;
};
struct Fiber {
  jmp_buf at;
  Block* block;
  int thread;
  char* stack;
  bool begun = false, done = false;
  const u32* awaited = nullptr;  // nothing to do while it is still this:
  u32 still;
  std::vector<Product> products;
  int groups = 0;
};
struct Cluster {
  Meeting meeting;
  int left;
  std::vector<Block> blocks;
  std::vector<Fiber> fibers;
};
struct Copy {
  char* to;
  const char* from;  // rows of this many bytes follow each other in memory and are `pitch` apart there
  int rows, bytes, pitch, valid_rows, valid_bytes;
  bool swizzled;
  u64* gate;
  float value = 0;  // where it is one value, and `from` is nowhere
};
inline jmp_buf scheduler;
inline Fiber* here;
inline std::vector<std::unique_ptr<Cluster>> running;
inline std::vector<char*> stacks;  // that nobody uses
inline std::map<u64*, Gate> gates;
inline std::vector<Copy> copies;
inline std::mt19937 chance;
inline u64 progress;
inline const char* failure;

__attribute__((noinline)) inline void yield() {
  if (!_setjmp(here->at)) _longjmp(scheduler, 1);
}
inline void wait_while(const u32* at, u32 value) {
  while (*at == value) here->awaited = at, here->still = value, yield();
  here->awaited = nullptr;
}
inline void meet(Meeting& m, int count) {
  u32 generation = m.generation;
  if (++m.arrived == count) m.arrived = 0, ++m.generation, ++progress;
  else wait_while(&m.generation, generation);
}
inline Gate& gate_at(u64* at) {
  if (!gates.count(at)) failure = "a gate is used that is not there";
  return gates[at];
}
inline Warp& warp() { return here->block->warps[here->thread / 32]; }

// 16 bytes of a tile, where the hardware puts them: bits 4 to 6 of the address are changed by bits 7 to 9.
inline char* swizzled(char* at) { return (char*)((uintptr_t)at ^ ((uintptr_t)at >> 7 & 7) << 4); }

inline void land(const Copy& c) {
  if (!c.from) memcpy(c.to, &c.value, 4);
  else for (int row = 0; row < c.rows; ++row)
    for (int i = 0; i < c.bytes; i += 16) {
      char* to = c.to + row * c.bytes + i;
      if (c.swizzled) to = swizzled(to);
      if (row < c.valid_rows && i < c.valid_bytes) memcpy(to, c.from + (i64)row * c.pitch + i, 16);
      else memset(to, 0, 16);
    }
  Gate& g = gate_at(c.gate);
  g.bytes -= c.rows * c.bytes, g.check(), ++progress;
}
inline void send(const Copy& c) {
  memset(c.to, 0xff, c.rows * c.bytes);  // not a number, until it is there
  copies.push_back(c);
}

inline void ready(Block& b) {
  if (!b.ready) b.ready = true, ++b.kernel->ready, ++progress;
}
inline void end(Block& b) {
  int bytes = b.kernel->shared_memory;
  ready(b);
  if (++b.kernel->ended == b.kernel->blocks) b.kernel->over = 1;
  for (Copy& c : copies)
    if (c.to >= b.memory && c.to < b.memory + bytes) return void(failure = "a block has ended before a copy to it");
  if (!std::all_of(b.memory + bytes, b.memory + bytes + GUARD, [](char c) { return c == (char)0xff; }))
    failure = "a block wrote behind its shared memory";
  gates.erase(gates.lower_bound((u64*)b.memory), gates.lower_bound((u64*)(b.memory + bytes)));
  memset(b.memory, 0xff, bytes);  // nobody may read it any more
}

inline void enter() {
  Kernel& k = *here->block->kernel;
  k.run(k.arguments);
  here->done = true;
  _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void resume(Fiber& f) {
  here = &f;
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.at, 1);
  static ucontext_t context;
  f.begun = true;
  getcontext(&context);
  context.uc_stack.ss_sp = f.stack, context.uc_stack.ss_size = STACK;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

inline bool may_begin(const std::vector<Kernel>& kernels, int k, int room) {
  const Kernel& kernel = kernels[k];
  return kernel.begun < kernel.blocks && kernel.cluster <= room && (k == 0 || kernels[k - 1].ready == kernels[k - 1].blocks) &&
         (k < ALIVE || kernels[k - ALIVE].over);
}
inline void begin(Kernel& kernel) {
  running.push_back(std::make_unique<Cluster>());
  Cluster& c = *running.back();
  int count = kernel.cluster, bytes = kernel.shared_memory + GUARD, warps = kernel.threads / 32;
  c.left = count, c.blocks.resize(count), c.fibers.resize(count * kernel.threads);
  for (int i = 0; i < count; ++i) {
    Block& b = c.blocks[i];
    b.kernel = &kernel, b.cluster = &c, b.index = kernel.begun++, b.left = kernel.threads, b.warps.resize(warps);
    b.memory = (char*)memset(aligned_alloc(1024, (bytes + 1023) / 1024 * 1024), 0xff, bytes);
    for (int t = 0; t < kernel.threads; ++t) {
      Fiber& f = c.fibers[i * kernel.threads + t];
      f.block = &b, f.thread = t;
      if (stacks.empty()) stacks.push_back((char*)mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      f.stack = stacks.back(), stacks.pop_back();
    }
  }
  ++progress;
}
inline void remove(Cluster& c) {
  for (Block& b : c.blocks) free(b.memory);
  for (Fiber& f : c.fibers) stacks.push_back(f.stack);
}
inline void turn(Fiber& f) {
  if (f.done || f.awaited && *f.awaited == f.still) return;
  resume(f);
  if (!f.done) return;
  ++progress;
  if (--f.block->left == 0) --f.block->cluster->left, end(*f.block);
}

// Run them in order, as many blocks at once as there is room for. Returns what went wrong, if anything.
inline const char* launch(std::vector<Kernel> kernels, int room, u32 seed) {
  chance.seed(seed), gates.clear(), copies.clear(), failure = nullptr;
  for (size_t k = 1; k < kernels.size(); ++k) kernels[k].before = &kernels[k - 1];
  std::vector<Fiber*> warps;
  u64 seen = 0;
  for (int idle = 0; !failure;) {
    for (size_t k = 0; k < kernels.size(); ++k)
      while (may_begin(kernels, k, room)) room -= kernels[k].cluster, begin(kernels[k]);
    if (running.empty()) break;
    warps.clear();
    for (auto& c : running)
      for (size_t i = 0; i < c->fibers.size(); i += 32) warps.push_back(&c->fibers[i]);
    std::shuffle(warps.begin(), warps.end(), chance);
    for (Fiber* first : warps) {
      int& asleep = first->block->warps[first->thread / 32].asleep;
      if (asleep == 0 && chance() % 64 == 0) asleep = chance() % NAP;
      if (asleep > 0) --asleep;
      else
        for (int lane = 0; lane < 32; ++lane) turn(first[lane]);
    }
    auto late = std::partition(copies.begin(), copies.end(), [](const Copy&) { return chance() % 2; });
    if (!failure) std::for_each(late, copies.end(), land);
    copies.erase(late, copies.end());
    auto ended = std::partition(running.begin(), running.end(), [](auto& c) { return c->left > 0; });
    for (auto c = ended; c != running.end(); ++c) room += (*c)->blocks.size(), remove(**c);
    running.erase(ended, running.end());
    idle = progress == seen ? idle + 1 : 0, seen = progress;
    if (idle > PATIENT) failure = "all threads wait";
  }
  if (!failure && !kernels.back().over) failure = "there is no room for a cluster";
  for (auto& c : running) remove(*c);
  running.clear();
  return failure;
}

template <class T>
T taken(void* from) {
  T v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) { kernel(taken<A>(arguments[I])...); }
template <class... A>
void call(void (*kernel)(A...), void** arguments) { call(kernel, arguments, std::index_sequence_for<A...>()); }
}  // namespace emulated
