// What device.cu asks of the hardware, for the GPU of emulation.h.

struct alignas(16) uint4x { u32 x, y, z, w; };
struct alignas(16) float4x { float x, y, z, w; };
struct alignas(8) float2x { float x, y; };

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
inline u64 cycles() { return emulated::progress; }
inline int thread_here() { return emulated::here->thread; }
inline int block_here() { return emulated::here->block->index; }
inline char* shared_memory() { return emulated::here->block->memory; }
inline uint4x read16(const void* at) { return *(const uint4x*)at; }
inline uint4x read_constant(const void* at) { return *(const uint4x*)at; }
inline float read_float(const float* at) { return *at; }
inline u32 read_pair(const u16* at) { return *(const u32*)at; }
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
inline float inverse(float x) { return 1 / x; }
inline float inverse_root(float x) { return 1 / sqrtf(x); }
inline void hide(uint4x&) {}
inline int hidden(int v) { return v; }
inline void give_registers() {}
inline void take_registers() {}
inline void meet_warp() { emulated::meet(emulated::warp().meeting, 32); }
inline void meet() { emulated::meet(emulated::here->block->workers, 256); }
inline void meet_group() { emulated::meet(emulated::here->block->workers, 128); }
inline void meet_all() { emulated::meet(emulated::here->block->everyone, emulated::here->block->kernel->threads); }
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
inline float times(u32 a, u32 b, bool upper) {  // two pairs of halves
  u32 mask = 0xffff0000u;
  return upper ? __uint_as_float(a & mask) * __uint_as_float(b & mask) : __uint_as_float(a << 16) * __uint_as_float(b << 16);
}
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto& w = emulated::warp();
  int lane = emulated::here->thread % 32, g = lane / 4, t = lane % 4;
  u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(w.a[lane], a, 16), memcpy(w.b[lane], b, 8);
  meet_warp();
  for (int e = 0; e < 4; ++e) {
    int row = g + e / 2 * 8, column = 2 * t + e % 2;
    for (int k = 0; k < 16; ++k)
      c[e] += times(w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], w.b[column * 4 + k % 8 / 2][k / 8], k % 2);
  }
  meet_warp();
}
inline void gate_init(u64* gate, u32 count) { emulated::gates[gate] = {(int)count, (int)count, 0, 0}; }
inline void gates_ready() {}
inline void gate_arrive(u64* gate) {
  auto& g = emulated::gate_at(gate);
  --g.pending, g.check(), ++emulated::progress;
}
inline void gate_expect(u64* gate, u32 bytes) { emulated::gate_at(gate).bytes += bytes, gate_arrive(gate); }
inline void gate_wait(u64* gate, u32 phase) { emulated::wait_while(&emulated::gate_at(gate).phase, phase); }
inline u64 read_once() { return 0; }
inline u64 read_often() { return 0; }
inline void stream(void* to, const void* from, u32 bytes, u64* gate, u64) {
  emulated::send({(char*)to, (const char*)from, 1, (int)bytes, 0, 1, (int)bytes, false, gate});
}
inline void count_up(u32* at) { ++*at, ++emulated::progress; }
inline u32 read_counter(const u32* at) { return *at; }
inline void pause() { emulated::yield(); }
inline void leave(u32* meeting, u32 blocks) {
  if (meeting[1]++ == blocks - 1) meeting[0] = meeting[1] = 0;
}

// ---- kernels of which each begins before the one before has ended

inline void let_next_begin() { emulated::ready(*emulated::here->block); }
inline void await_before() {
  if (auto before = emulated::here->block->kernel->before) emulated::wait_while(&before->over, 0);
}

// ---- tiles and products of them

struct TensorMap {  // decoding_case.py makes them
  const char* matrix;
  u64 columns, outputs, rows;  // rows: of a tile
  u64 room[12];
};
inline void read_map(const TensorMap*) {}
inline void copy_tile(char* to, const TensorMap* map, int column, int row, u64* gate, u64) {
  if ((uintptr_t)to % 1024) emulated::failure = "a tile does not lie at a multiple of 1,024 bytes";
  int rows = map->rows, left = (int)map->outputs - row, bytes = 2 * ((int)map->columns - column), pitch = 2 * map->columns;
  emulated::send({to, map->matrix + (i64)row * pitch + 2 * column, rows, 128, pitch, left, bytes, true, gate});
}
inline u64 tile_at(const char* at) { return (u64)at; }
inline const u16* row_of(u64 tile, int row, int half) { return (const u16*)emulated::swizzled((char*)tile + row * 128 + half * 16); }

// A product happens at any time between its being asked for and its being waited for.
inline void multiply(const emulated::Product& p) {
  int lane = emulated::here->thread % 32, g = lane / 4, t = lane % 4;
  for (int half = 0; half < 2; ++half)
    for (int e = 0; e < p.count; ++e) {
      const u16* a = row_of(p.a, emulated::here->thread / 32 % 4 * 16 + g + e % 4 / 2 * 8, half);
      const u16* b = row_of(p.b, e / 4 * 8 + 2 * t + e % 2, half);
      for (int k = 0; k < 8; ++k) p.sums[e] += __uint_as_float((u32)a[k] << 16) * __uint_as_float((u32)b[k] << 16);
    }
}
inline void multiply_until(int group) {
  auto& products = emulated::here->products;
  size_t done = 0;
  while (done < products.size() && products[done].group < group) multiply(products[done++]);
  products.erase(products.begin(), products.begin() + done);
}
inline void products_begin() {}
template <int COUNT>
inline void multiply_tiles(float (&d)[COUNT], u64 a, u64 b) {
  emulated::here->products.push_back({d, COUNT, a, b, emulated::here->groups});
  if (emulated::chance() % 2) multiply_until(emulated::here->groups + 1);
}
inline void products_sent() { ++emulated::here->groups; }
template <int LEFT>
inline void products_wait() { multiply_until(emulated::here->groups - LEFT); }

// ---- blocks of a cluster

inline void meet_cluster() {
  emulated::Block& b = *emulated::here->block;
  emulated::meet(b.cluster->meeting, b.kernel->cluster * b.kernel->threads);
}
template <class T>
inline T* in_block(T* at, int block) {
  emulated::Block &mine = *emulated::here->block, &other = mine.cluster->blocks[block];
  if (other.left == 0) emulated::failure = "a block wrote to the shared memory of one that has ended";
  return (T*)(other.memory + ((char*)at - mine.memory));
}
inline void send(float* to, float v, u64* gate, int block) {
  emulated::gate_at(in_block(gate, block));
  emulated::send({(char*)in_block(to, block), nullptr, 1, 4, 0, 1, 4, false, in_block(gate, block), v});
}
inline void written() {}
inline void send_many(float* to, const float* from, u32 bytes, u64* gate, int block) {
  emulated::gate_at(in_block(gate, block));
  emulated::send({(char*)in_block(to, block), (const char*)from, 1, (int)bytes, 0, 1, (int)bytes, false, in_block(gate, block)});
}
