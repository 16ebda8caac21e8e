// One decoding step of at most 32 sequences as one kernel that stays on the GPU from the embedding to the logits.
//
// With few sequences a step only reads weights, and what it costs beyond that is waiting: for launches, for the first
// loads of each kernel, for its last ones. Here one warp of every block (the producer) streams that block's share of all
// weights, in the order of their use, into a ring in shared memory and never waits for results; eight warps compute. They
// meet the other blocks at a barrier between two stages, while the ring fills with what comes next.
//
//   qkv | attention | out | gate and up | down | (sum)     for every layer, then the head
//
// A product takes sixteen rows of a matrix at a time. Its columns are divided among the warps of the block, which keep
// their part of the input in registers for the whole stage; their sums meet in shared memory. Matrices are the left operand
// of the tensor cores, so that one, eight or thirty-two sequences cost the same. Which thread loads which columns follows
// from 16-byte loads: the order of the columns does not matter as long as both operands have the same.
//
// All sums have a fixed order: a sequence's logits do not depend on timing. Rounding is that of cuda.decode: products,
// norms, rotations and the residual are rounded to bfloat16 where it stores them.
//
// few.py gives the sizes as macros: HIDDEN WIDE LAYERS HEADS KV_HEADS HEAD_DIM VOCABULARY PAGE EPSILON QK_NORM, TILES8
// (sequences / 8, rounded up), GRID (blocks), SHARED_MEMORY (bytes of a block), DOWN_SPLIT and DOWN_TILES (how the last product of a
// layer is divided: among so many blocks by its columns, so many tiles each), CHUNK (least tokens of
// context that a block takes) and INLINE (pieces of context that are joined where they are read, without a stage for it).

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float wide(u16 half) { return __uint_as_float((u32)half << 16); }
DEVICE u16 half(float v) { return (u16)pack(v, 0.0f); }
DEVICE float rounded(float v) { return wide(half(v)); }

constexpr int ROWS = 8 * TILES8, WARPS = 8, THREADS = 32 * WARPS;
constexpr int SHARE = HEADS / KV_HEADS, QUERIES = HEADS * HEAD_DIM, QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr float LOG2E = 1.4426950408889634f, NOTHING = -3e38f;
static_assert(HIDDEN % 32 == 0 && WIDE % 32 == 0 && QUERIES % 32 == 0 && PAGE % 16 == 0 && SHARE <= 8, "few.py checks this");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "few.py checks this");
static_assert(CHUNK % 128 == 0, "a block of 16 tokens lies in one page");

BOTH constexpr int over(int a, int b) { return (a + b - 1) / b; }

// How a product is divided. Columns count in steps of 32; a slot of the ring holds 16 rows of CUT steps.
template <int COLUMNS, int OUTPUTS, int ROWS_OF_TILE, int SPLIT_, int TILES_OF_UNIT_, bool NORMED_>
struct Product {
  static constexpr int ALL_STEPS = COLUMNS / 32, SPLIT = SPLIT_, TILES_OF_UNIT = TILES_OF_UNIT_;
  static constexpr int STEPS = over(ALL_STEPS, SPLIT), CUT = STEPS <= 28 ? STEPS : 24, CUTS = over(STEPS, CUT);
  static constexpr int PER_WARP = over(CUT, WARPS), STRIDE = CUT * 64 + (CUT % 2 ? 0 : 64);  // no bank twice
  static constexpr int TILES = over(OUTPUTS, ROWS_OF_TILE), UNITS = over(TILES, TILES_OF_UNIT) * SPLIT;
  static constexpr int COLS = COLUMNS, N = OUTPUTS;
  static constexpr bool PAIRED = ROWS_OF_TILE == 8, NORMED = NORMED_;
  static_assert(SPLIT == 1 || UNITS <= GRID, "a block has one part of a divided product");
};
using Qkv = Product<HIDDEN, QKV, 16, 1, 1, true>;
using Out = Product<QUERIES, HIDDEN, 16, 1, 1, false>;
using Up = Product<HIDDEN, WIDE, 8, 1, 1, true>;  // eight rows of the gate, and the eight of "up" that belong to them
using Down = Product<WIDE, HIDDEN, 16, DOWN_SPLIT, DOWN_TILES, false>;
using Head = Product<HIDDEN, VOCABULARY, 16, 1, 1, true>;

BOTH constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int SLOT = 16 * most(most(Qkv::STRIDE, Out::STRIDE), Down::STRIDE);
constexpr int SUM_STRIDE = 20, SUMS = WARPS * ROWS * SUM_STRIDE;  // floats; 20: no bank twice
constexpr int QUERY_STRIDE = HEAD_DIM + 8;
constexpr int FOUND = WARPS * SHARE * HEAD_DIM;
constexpr int SCRATCH = most(2 * SUMS, FOUND) * 4;

struct Layer {
  const u16 *qkv, *qkv_bias, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
  const u16 *attention_norm, *mlp_norm, *query_norm, *key_norm;
  u16* entries;  // [2 * KV_HEADS, slots, HEAD_DIM]
};
struct Step {
  const Layer* layers;
  const u16 *embedding, *norm, *head, *cos, *sin;
  const int *given, *positions, *tables;  // a given token below 0: the last one that was drawn
  const i64* last;
  u16 *x, *qkv, *attended, *gated, *logits;
  float *parts, *marks, *sums;
  u32 *meeting, *arrived;  // counters, zero between launches
  i64* stamps;   // for measurements: when each block was where, in clock cycles
  i64 slots;
  int rows, width;
};
struct Kept {
  alignas(16) char scratch[SCRATCH];
  alignas(16) u16 query[8 * QUERY_STRIDE];
  alignas(16) u16 fresh[2][HEAD_DIM];  // this step's key and value
  float peaks[WARPS][8], totals[WARPS][8];
  float squares[WARPS][ROWS];
  int tokens[ROWS], lengths[ROWS], pieces[ROWS], first[ROWS + 1];
  int chunk;
  bool inline_join, is_last;
};
constexpr int SLOTS = (SHARED_MEMORY - (int)sizeof(Kept) - 128) / (SLOT + 16);
static_assert(SLOTS >= 2, "few.py checks this");
struct alignas(128) Ring {
  char ring[SLOTS][SLOT];
  u64 full[SLOTS], empty[SLOTS];
};
struct Shared : Ring, Kept {};
static_assert(sizeof(Shared) <= SHARED_MEMORY, "the ring is too long");

struct Place {  // in the ring
  int slot = 0;
  u32 phase = 0, count = 0;
  DEVICE void next() {
    ++count;
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
};

// ---- the producer

template <class P>
DEVICE void feed(Shared& s, Place& place, Place& landed, int offset, const u16* matrix, int lane, u64 policy) {
  for (int unit = (block_here() + GRID - offset) % GRID; unit < P::UNITS; unit += GRID) {
    int part = unit % P::SPLIT, begin = part * P::ALL_STEPS / P::SPLIT;
    int steps = (part + 1) * P::ALL_STEPS / P::SPLIT - begin;
    int tile = unit / P::SPLIT * P::TILES_OF_UNIT;
    for (int last = tile + P::TILES_OF_UNIT; tile < last && tile < P::TILES; ++tile)
      for (int cut = 0; cut < P::CUTS; ++cut) {
        int count = steps - cut * P::CUT;
        u32 bytes = 64 * (count < P::CUT ? count : P::CUT);
        if (place.count >= WINDOW) gate_wait(&s.full[landed.slot], landed.phase), landed.next();
        gate_wait(&s.empty[place.slot], place.phase ^ 1);
        if (lane == 0) gate_expect(&s.full[place.slot], 16 * bytes);
        meet_warp();
        if (lane < 16) {
          int row = P::PAIRED ? tile * 8 + lane % 8 : tile * 16 + lane;
          if (row >= P::N) row = P::N - 1;
          if (P::PAIRED && lane >= 8) row += P::N;
          const u16* from = matrix + (i64)row * P::COLS + (begin + cut * P::CUT) * 32;
          stream(&s.ring[place.slot][lane * P::STRIDE], from, bytes, &s.full[place.slot], policy);
        }
        place.next();
      }
  }
}

BOTH constexpr int next_offset(int offset, int units) { return (offset + units) % GRID; }

DEVICE void produce(const Step& step, Shared& s, int lane) {
  Place place, landed;  // not more is under way than the memory needs: what else is asked for would wait behind it
  u64 policy = read_once();
  int offset = 0;  // units go round the blocks, so that none has more than its share in the end
  for (int at = 0; at < LAYERS; ++at) {
    const Layer& layer = step.layers[at];
    feed<Qkv>(s, place, landed, offset, layer.qkv, lane, policy);
    offset = next_offset(offset, Qkv::UNITS);
    feed<Out>(s, place, landed, offset, layer.out, lane, policy);
    offset = next_offset(offset, Out::UNITS);
    feed<Up>(s, place, landed, offset, layer.gate_up, lane, policy);
    offset = next_offset(offset, Up::UNITS);
    feed<Down>(s, place, landed, offset, layer.down, lane, policy);
    offset = next_offset(offset, Down::UNITS);
  }
  feed<Head>(s, place, landed, offset, step.head, lane, policy);
}

// ---- products

struct Worker {
  const Step& step;
  Shared& s;
  int thread, warp, lane, g, t;  // lane = 4 g + t, as the tensor cores divide a tile
  Place place;
  u32 target = 0;
  int buffer = 0;

  DEVICE Worker(const Step& step, Shared& s, int thread)
      : step(step), s(s), thread(thread), warp(thread / 32), lane(thread % 32), g(lane / 4), t(lane % 4) {}

  DEVICE void arrive() {
    target += GRID;
    meet();
    if (thread == 0) count_up(step.meeting);
  }
  DEVICE void wait() {
    if (thread == 0) wait_for(step.meeting, target);
    meet();
  }

  // The columns that a warp has of a product's part: which ones, and whether there are any.
  template <class P>
  DEVICE bool has(int i, int steps) {
    int inside = i % P::PER_WARP * WARPS + warp;
    return inside < P::CUT && i / P::PER_WARP * P::CUT + inside < steps;
  }
  template <class P>
  DEVICE int column(int i) { return (i / P::PER_WARP * P::CUT + i % P::PER_WARP * WARPS + warp) * 32; }

  // fetch for a matrix of activations.
  template <class P>
  DEVICE auto rows_of(const u16* matrix) {
    return [this, matrix](auto& x, int begin, int steps) {
      const u16* from = matrix + hidden(g * P::COLS + begin * 32 + t * 8);
#pragma unroll
      for (int i = 0; i < P::CUTS * P::PER_WARP; ++i)
#pragma unroll
        for (int n = 0; n < TILES8; ++n) {
          x[i][n] = {0, 0, 0, 0};
          if (has<P>(i, steps) && n * 8 + g < step.rows) x[i][n] = read16(from + n * 8 * P::COLS + column<P>(i));
        }
    };
  }

  // Multiply x by its row's 1 / root mean square and by the weights of the norm.
  template <class P, class X, class F>
  DEVICE void normalise(X& x, F& factor) {
    constexpr int HELD = P::CUTS * P::PER_WARP;
    float squares[TILES8];
#pragma unroll
    for (int n = 0; n < TILES8; ++n) squares[n] = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
      for (int n = 0; n < TILES8; ++n) {
        u32 w[4] = {x[i][n].x, x[i][n].y, x[i][n].z, x[i][n].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) squares[n] += low(w[e]) * low(w[e]) + high(w[e]) * high(w[e]);
      }
#pragma unroll
    for (int n = 0; n < TILES8; ++n) {
      squares[n] += across(squares[n], 1);
      squares[n] += across(squares[n], 2);
      if (t == 0) s.squares[warp][n * 8 + g] = squares[n];
    }
    meet();
#pragma unroll
    for (int n = 0; n < TILES8; ++n) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += s.squares[w][n * 8 + g];
      squares[n] = inverse_root(sum / P::COLS + EPSILON);
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      hide(factor[i]);
#pragma unroll
      for (int n = 0; n < TILES8; ++n) {
        hide(x[i][n]);
        u32 w[4] = {x[i][n].x, x[i][n].y, x[i][n].z, x[i][n].w};
        u32 f[4] = {factor[i].x, factor[i].y, factor[i].z, factor[i].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = pack(low(w[e]) * squares[n] * low(f[e]), high(w[e]) * squares[n] * high(f[e]));
        x[i][n] = {w[0], w[1], w[2], w[3]};
      }
    }
    // s.squares is written again only after another meeting
  }

  // Wait for the other blocks, then compute this block's share of a product. fetch(x, begin, steps): its input, steps of
  // 32 columns; early(output, sequence): what the output needs from memory and what was there before the meeting;
  // finish(output, sequence, sum, second sum, early, part of the columns).
  template <class P, class Fetch, class Early, class Finish>
  DEVICE void multiply(int offset, const u16* norm, Fetch fetch, Early early, Finish finish) {
    int unit = (block_here() + GRID - offset) % GRID;
    if (unit >= P::UNITS) return wait();
    constexpr int HELD = P::CUTS * P::PER_WARP;
    int part = unit % P::SPLIT, begin = part * P::ALL_STEPS / P::SPLIT;
    int steps = (part + 1) * P::ALL_STEPS / P::SPLIT - begin;
    uint4x x[HELD][TILES8], factor[P::NORMED ? HELD : 1];
    if constexpr (P::NORMED) {
      const u16* weights = norm + hidden(t * 8);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        factor[i] = {0, 0, 0, 0};
        if (has<P>(i, steps)) factor[i] = read_constant(weights + column<P>(i));
      }
    }
    constexpr int OUTPUTS = (P::PAIRED ? 8 : 16) * ROWS, TURNS = over(OUTPUTS, THREADS), TALL = P::PAIRED ? 8 : 16;
    float aside[TURNS];
    auto look = [&](int tile) {
#pragma unroll
      for (int j = 0; j < TURNS; ++j) {
        int o = j * THREADS + thread, output = tile * TALL + o % TALL, sequence = o / TALL;
        if (sequence < step.rows && output < P::N) aside[j] = early(output, sequence);
      }
    };
    look(unit / P::SPLIT * P::TILES_OF_UNIT);
    wait();
    fetch(x, begin, steps);
    if constexpr (P::NORMED) normalise<P>(x, factor);
    for (bool first = true; unit < P::UNITS; unit += GRID) {
      int tile = unit / P::SPLIT * P::TILES_OF_UNIT;
      for (int end = tile + P::TILES_OF_UNIT; tile < end && tile < P::TILES; ++tile, first = false) {
        if (!first) look(tile);
        float sum[TILES8][4];
#pragma unroll
        for (int n = 0; n < TILES8; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
#pragma unroll
        for (int cut = 0; cut < P::CUTS; ++cut) {
          gate_wait(&s.full[place.slot], place.phase);
          const char* here = s.ring[place.slot] + g * P::STRIDE + t * 16;
#pragma unroll
          for (int i = 0; i < P::PER_WARP; ++i) {
            int inside = i * WARPS + warp;
            if (has<P>(cut * P::PER_WARP + i, steps)) {
              uint4x upper = tile16(here + inside * 64), lower = tile16(here + 8 * P::STRIDE + inside * 64);
#pragma unroll
              for (int n = 0; n < TILES8; ++n) {
                const uint4x& b = x[cut * P::PER_WARP + i][n];
                mma(sum[n], upper.x, lower.x, upper.y, lower.y, b.x, b.y);
                mma(sum[n], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
              }
            }
          }
          meet_warp();
          if (lane == 0) gate_arrive(&s.empty[place.slot]);
          place.next();
        }
        float* sums = (float*)s.scratch + buffer * SUMS;
        buffer ^= 1;
        float* mine = sums + warp * ROWS * SUM_STRIDE;
#pragma unroll
        for (int n = 0; n < TILES8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) mine[(n * 8 + 2 * t + e % 2) * SUM_STRIDE + g + e / 2 * 8] = sum[n][e];
        meet();
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
          int o = j * THREADS + thread, output = tile * TALL + o % TALL, sequence = o / TALL;
          if (sequence < step.rows && output < P::N) {
            const float* from = sums + sequence * SUM_STRIDE + o % TALL;
            float first = 0, second = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
              first += from[w * ROWS * SUM_STRIDE];
              if (P::PAIRED) second += from[w * ROWS * SUM_STRIDE + 8];
            }
            finish(output, sequence, first, second, aside[j], part);
          }
        }
      }
    }
  }

  // ---- attention

  // Divide the contexts: the same in every block. One warp, a lane for each sequence.
  DEVICE void plan() {
    int length = lane < step.rows ? step.positions[lane] + 1 : 0, all = length;
    for (int lanes = 1; lanes < 32; lanes *= 2) all += across(all, lanes);
    int limit = over(step.rows * KV_HEADS, GRID) * GRID;
    int chunk = most(CHUNK, over(over(all * KV_HEADS, GRID), 128) * 128), pieces, items;
    for (;; chunk += 128) {
      items = pieces = over(length, chunk);
      for (int lanes = 1; lanes < 32; lanes *= 2) items += across(items, lanes);
      if (items * KV_HEADS <= limit) break;
    }
    int longest = pieces;
    for (int lanes = 1; lanes < 32; lanes *= 2) longest = most(longest, across(longest, lanes));
    if (lane < ROWS) s.lengths[lane] = length, s.pieces[lane] = pieces;
    if (lane == 0) s.chunk = chunk, s.inline_join = TILES8 == 1 && longest * step.rows <= INLINE;
    meet_warp();
    if (lane == 0)
      for (int row = s.first[0] = 0; row < ROWS; ++row) s.first[row + 1] = s.first[row] + s.pieces[row] * KV_HEADS;
  }

  struct Item {
    int row, head, begin, end, length;
  };
  DEVICE Item item(int number) {
    int row = 0;
    while (s.first[row + 1] <= number) ++row;
    int inside = number - s.first[row], pieces = s.pieces[row], begin = inside % pieces * s.chunk;
    int end = begin + s.chunk, length = s.lengths[row];
    return {row, inside / pieces, begin, end < length ? end : length, length};
  }

  struct Block {  // sixteen tokens, as the tensor cores want them
    uint4x keys[2][HEAD_DIM / 32], values[HEAD_DIM / 64][4];
  };
  DEVICE i64 slot_of(const Item& it, int token) {
    return (i64)step.tables[it.row * step.width + token / PAGE] * PAGE + token % PAGE;
  }
  DEVICE void load_keys(Block& b, const u16* entries, const Item& it, i64 slot) {
    const u16* at = entries + ((i64)it.head * step.slots + slot + g) * HEAD_DIM + t * 8;
#pragma unroll
    for (int o = 0; o < 2; ++o)
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 32; ++d) b.keys[o][d] = read16(at + o * 8 * HEAD_DIM + d * 32);
  }
  DEVICE void load_values(Block& b, const u16* entries, const Item& it, i64 slot, int valid) {
    const u16* at = entries + ((i64)(KV_HEADS + it.head) * step.slots + slot + 2 * t) * HEAD_DIM + g * 8;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 64; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int token = e / 2 * 8 + e % 2;  // after 2 t
        b.values[d][e] = {0, 0, 0, 0};  // what lies behind the end may be anything, also no number
        if (2 * t + token < valid) b.values[d][e] = read16(at + token * HEAD_DIM + d * 64);
      }
  }

  // Put this step's key and value where the block was loaded without them.
  DEVICE void renew(Block& b, int token) {
#pragma unroll
    for (int o = 0; o < 2; ++o)
      if (o * 8 + g == token)
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 32; ++d) b.keys[o][d] = tile16((const char*)(s.fresh[0] + d * 32 + t * 8));
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (2 * t + e / 2 * 8 + e % 2 == token)
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 64; ++d) b.values[d][e] = tile16((const char*)(s.fresh[1] + d * 64 + g * 8));
  }

  // One head of the step's token: norm and rotation. Two values that turn together are HEAD_DIM / 2 apart.
  static constexpr int EACH = HEAD_DIM / 64, HALF = HEAD_DIM / 2;
  struct Angle {
    float cosine[EACH], sine[EACH];
  };
  DEVICE Angle angle_of(int position) {
    Angle angle;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      i64 at = (i64)position * HEAD_DIM + lane * EACH + e;
      angle.cosine[e] = wide(step.cos[at]), angle.sine[e] = wide(step.sin[HALF + at]);
    }
    return angle;
  }
  DEVICE void turn(const u16* from, u16* to, u16* also, const u16* norm, const Angle& angle) {
    float a[EACH], b[EACH], squares = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      int i = lane * EACH + e;
      a[e] = wide(read_half(from + i)), b[e] = wide(read_half(from + HALF + i));
      squares += a[e] * a[e] + b[e] * b[e];
    }
    if (QK_NORM) {
      for (int lanes = 1; lanes < 32; lanes *= 2) squares += across(squares, lanes);
      float scale = inverse_root(squares / HEAD_DIM + EPSILON);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        int i = lane * EACH + e;
        a[e] = rounded(a[e] * scale) * wide(norm[i]), b[e] = rounded(b[e] * scale) * wide(norm[HALF + i]);
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      int i = lane * EACH + e;
      u16 first = half(a[e] * angle.cosine[e] - b[e] * angle.sine[e]);
      u16 second = half(b[e] * angle.cosine[e] + a[e] * angle.sine[e]);
      to[i] = first, to[HALF + i] = second;
      if (also) also[i] = first, also[HALF + i] = second;
    }
  }

  // Everything about an item that was there before this step's queries, keys and values.
  struct Ahead {
    Item it;
    Block block;
    Angle angle;
    i64 slot;  // of this step's token
  };
  DEVICE void look_ahead(Ahead& a, const Layer& layer, int number) {
    a.it = item(number);
    a.angle = angle_of(a.it.length - 1);
    a.slot = slot_of(a.it, a.it.length - 1);
    int first = a.it.begin + warp * 16;
    if (first < a.it.end) {
      i64 slot = slot_of(a.it, first);
      load_keys(a.block, layer.entries, a.it, slot);
      load_values(a.block, layer.entries, a.it, slot, a.it.end - first);
    }
  }

  DEVICE void attend(const Layer& layer, int number, Ahead& ahead) {
    Item& it = ahead.it;
    Block& b = ahead.block;
    int position = it.length - 1, blocks = over(it.end - it.begin, 16);
    const u16* qkv = step.qkv + (i64)it.row * QKV;
    bool last = it.end == it.length;
    for (int j = warp; j < SHARE + 2; j += WARPS) {
      if (j < 2 && last) {
        const u16* from = qkv + (HEADS + j * KV_HEADS + it.head) * HEAD_DIM;
        u16* to = layer.entries + ((i64)(j * KV_HEADS + it.head) * step.slots + ahead.slot) * HEAD_DIM;
        if (j == 0) turn(from, to, s.fresh[0], layer.key_norm, ahead.angle);
        else
          for (int i = lane; i < HEAD_DIM; i += 32) to[i] = s.fresh[1][i] = read_half(from + i);
      } else if (j >= 2) {
        const u16* from = qkv + (it.head * SHARE + j - 2) * HEAD_DIM;
        turn(from, s.query + (j - 2) * QUERY_STRIDE, nullptr, layer.query_norm, ahead.angle);
      }
    }
    meet();
    uint4x query[HEAD_DIM / 32];
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 32; ++d) {
      query[d] = {0, 0, 0, 0};
      if (g < SHARE) query[d] = tile16((const char*)(s.query + g * QUERY_STRIDE + d * 32 + t * 8));
    }
    float best = NOTHING, total = 0, found[HEAD_DIM / 64][8][2];
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 64; ++d)
#pragma unroll
      for (int i = 0; i < 8; ++i) found[d][i][0] = found[d][i][1] = 0;
    for (int block = warp; block < blocks; block += WARPS) {
      int first = it.begin + block * 16;
      bool more = block + WARPS < blocks;
      i64 slot = more ? slot_of(it, first + WARPS * 16) : 0;
      if (first <= position && position < first + 16) renew(b, position % 16);
      float score[2][4];
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        score[o][0] = score[o][1] = score[o][2] = score[o][3] = 0;
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 32; ++d) {
          mma(score[o], query[d].x, 0, query[d].y, 0, b.keys[o][d].x, b.keys[o][d].y);
          mma(score[o], query[d].z, 0, query[d].w, 0, b.keys[o][d].z, b.keys[o][d].w);
        }
      }
      if (more) load_keys(b, layer.entries, it, slot);
      float higher = best;
#pragma unroll
      for (int o = 0; o < 2; ++o)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bool counts = first + o * 8 + 2 * t + e < it.end;
          score[o][e] = counts ? score[o][e] * (SCALE * LOG2E) : NOTHING;
          higher = fmaxf(higher, score[o][e]);
        }
      higher = fmaxf(higher, across(higher, 1));
      higher = fmaxf(higher, across(higher, 2));
      float shrink = power2(best - higher);
      best = higher;
      total *= shrink;
#pragma unroll
      for (int o = 0; o < 2; ++o)
#pragma unroll
        for (int e = 0; e < 2; ++e) total += score[o][e] = power2(score[o][e] - higher);
      u32 early = pack(score[0][0], score[0][1]), late = pack(score[1][0], score[1][1]);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 64; ++d)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          u32 v[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const uint4x& w = b.values[d][e];
            v[e] = i / 2 == 0 ? w.x : i / 2 == 1 ? w.y : i / 2 == 2 ? w.z : w.w;
          }
          u32 how = i % 2 ? 0x7632 : 0x5410;
          float c[4] = {found[d][i][0] * shrink, found[d][i][1] * shrink, 0, 0};
          mma(c, early, 0, late, 0, permute(v[0], v[1], how), permute(v[2], v[3], how));
          found[d][i][0] = c[0], found[d][i][1] = c[1];
        }
      if (more) load_values(b, layer.entries, it, slot, it.end - first - WARPS * 16);
    }
    total += across(total, 1);
    total += across(total, 2);
    float* all = (float*)s.scratch;
    if (g < SHARE) {
      if (t == 0) s.peaks[warp][g] = best, s.totals[warp][g] = total;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 64; ++d)
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) all[(warp * SHARE + g) * HEAD_DIM + d * 64 + (2 * t + e) * 8 + i] = found[d][i][e];
    }
    meet();
    bool whole = s.pieces[it.row] == 1;
    for (int i = thread; i < SHARE * HEAD_DIM; i += THREADS) {
      int head = i / HEAD_DIM;
      float peak = NOTHING, sum = 0, value = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, s.peaks[w][head]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        float weight = power2(s.peaks[w][head] - peak);
        sum += s.totals[w][head] * weight;
        value += all[w * SHARE * HEAD_DIM + i] * weight;
      }
      if (whole) step.attended[(i64)it.row * QUERIES + it.head * SHARE * HEAD_DIM + i] = half(value / sum);
      else {
        step.parts[(i64)number * SHARE * HEAD_DIM + i] = value;
        if (i % HEAD_DIM == 0) step.marks[(number * SHARE + head) * 2] = peak, step.marks[(number * SHARE + head) * 2 + 1] = sum;
      }
    }
    if (!whole && !s.inline_join) {  // who comes last joins the pieces of this sequence and head
      meet();
      u32* count = step.arrived + it.row * KV_HEADS + it.head;
      if (thread == 0 && (s.is_last = count_and_see(count) == s.pieces[it.row] - 1)) *count = 0;
      meet();
      if (s.is_last && thread < SHARE * HEAD_DIM / 8) {
        int column = it.head * SHARE * HEAD_DIM + thread * 8;
        Joined joined;
        for (int p = 0; p < s.pieces[it.row]; ++p) joined.add(*this, it.row, column, p);
        *(uint4x*)(step.attended + (i64)it.row * QUERIES + column) = joined.result();
      }
    }
    meet();  // the next item writes to the same places
  }

  // Eight values of what attention found for a sequence, joined from its pieces.
  struct Joined {
    float best = NOTHING, total = 0, v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    DEVICE void add(const Worker& worker, int row, int column, int piece) {
      int head = column / HEAD_DIM, item = worker.s.first[row] + head / SHARE * worker.s.pieces[row] + piece;
      i64 at = (i64)item * SHARE + head % SHARE;
      const float* part = worker.step.parts + at * HEAD_DIM + column % HEAD_DIM;
      float peak = read_float(worker.step.marks + at * 2), sum = read_float(worker.step.marks + at * 2 + 1);
      uint4x a = read16(part), b = read16(part + 4);
      float higher = fmaxf(best, peak), shrink = power2(best - higher), weight = power2(peak - higher);
      u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] = v[e] * shrink + __uint_as_float(w[e]) * weight;
      total = total * shrink + sum * weight, best = higher;
    }
    DEVICE uint4x result() {
      float r = 1 / total;
      return {pack(v[0] * r, v[1] * r), pack(v[2] * r, v[3] * r), pack(v[4] * r, v[5] * r), pack(v[6] * r, v[7] * r)};
    }
  };

  // ---- the step

  DEVICE void begin() {
    if (warp == 0) {
      if (lane < ROWS) {
        int token = lane < step.rows ? step.given[lane] : 0;
        s.tokens[lane] = token < 0 ? (int)step.last[lane] : token;
      }
      plan();
    }
    meet();
    for (int i = block_here() * THREADS + thread; i < step.rows * (HIDDEN / 8); i += GRID * THREADS) {
      int row = i / (HIDDEN / 8), column = i % (HIDDEN / 8) * 8;
      *(uint4x*)(step.x + (i64)row * HIDDEN + column) = *(const uint4x*)(step.embedding + (i64)s.tokens[row] * HIDDEN + column);
    }
  }

  DEVICE void attention(const Layer& layer) {
    int number = block_here(), items = s.first[ROWS];
    Ahead ahead;
    if (number < items) look_ahead(ahead, layer, number);
    wait();
    while (number < items) {
      attend(layer, number, ahead);
      number += GRID;
      if (number < items) look_ahead(ahead, layer, number);
    }
  }

  // fetch for the output of attention: as it is, or joined on the way.
  DEVICE auto found() {
    return [this](auto& x, int begin, int steps) {
      if (TILES8 > 1 || !s.inline_join) return rows_of<Out>(step.attended)(x, begin, steps);
      constexpr int HELD = Out::CUTS * Out::PER_WARP;
      int pieces = g < step.rows ? s.pieces[g] : 0, from = hidden(t * 8);
      if (pieces == 1) return rows_of<Out>(step.attended)(x, begin, steps);
      Joined joined[HELD];
      for (int p = 0; p < pieces; ++p)
#pragma unroll
        for (int i = 0; i < HELD; ++i)
          if (has<Out>(i, steps)) joined[i].add(*this, g, from + column<Out>(i), p);
#pragma unroll
      for (int i = 0; i < HELD; ++i) x[i][0] = pieces ? joined[i].result() : uint4x{0, 0, 0, 0};
    };
  }

#ifdef STAMPS
#define STAMP(which) if (thread == 0) p.stamps[(block_here() * LAYERS + (which == 7 ? LAYERS - 1 : at)) * 8 + which] = clock64()
#else
#define STAMP(which)
#endif

  DEVICE void run() {
    const Step& p = step;
    begin();
    arrive();
    auto none = [](int, int) { return 0.0f; };
    auto residual = [&](int output, int row) { return wide(read_half(p.x + (i64)row * HIDDEN + output)); };
    int offset = 0;
    for (int at = 0; at < LAYERS; ++at) {
      const Layer& layer = p.layers[at];
      STAMP(0);
      multiply<Qkv>(offset, layer.attention_norm, rows_of<Qkv>(p.x),
          [&](int output, int) { return layer.qkv_bias ? wide(layer.qkv_bias[output]) : 0.0f; },
          [&](int output, int row, float sum, float, float bias, int) { p.qkv[(i64)row * QKV + output] = half(sum + bias); });
      offset = next_offset(offset, Qkv::UNITS);
      STAMP(1);
      arrive();
      attention(layer);
      STAMP(2);
      arrive();
      auto add = [&](const u16* bias) {
        return [&p, bias](int output, int row, float sum, float, float before, int) {
          float y = rounded(bias ? sum + wide(bias[output]) : sum);
          p.x[(i64)row * HIDDEN + output] = half(before + y);
        };
      };
      multiply<Out>(offset, nullptr, found(), residual, add(layer.out_bias));
      offset = next_offset(offset, Out::UNITS);
      STAMP(3);
      arrive();
      multiply<Up>(offset, layer.mlp_norm, rows_of<Up>(p.x), none, [&](int output, int row, float gate, float up, float, int) {
        if (layer.gate_up_bias) gate += wide(layer.gate_up_bias[output]), up += wide(layer.gate_up_bias[WIDE + output]);
        gate = rounded(gate), up = rounded(up);
        p.gated[(i64)row * WIDE + output] = half(gate / (1 + power2(-gate * LOG2E)) * up);
      });
      offset = next_offset(offset, Up::UNITS);
      STAMP(4);
      arrive();
      if constexpr (DOWN_SPLIT == 1) multiply<Down>(offset, nullptr, rows_of<Down>(p.gated), residual, add(layer.down_bias));
      else {
        multiply<Down>(offset, nullptr, rows_of<Down>(p.gated), none, [&](int output, int row, float sum, float, float, int part) {
          p.sums[((i64)part * ROWS + row) * HIDDEN + output] = sum;
        });
        STAMP(5);
        arrive();
        int each = block_here() * THREADS + thread;
        float before = each < p.rows * HIDDEN ? residual(each % HIDDEN, each / HIDDEN) : 0.0f;
        wait();
        for (int i = each; i < p.rows * HIDDEN; i += GRID * THREADS) {
          int row = i / HIDDEN, output = i % HIDDEN;
          if (i != each) before = residual(output, row);
          float sum = 0;
#pragma unroll
          for (int part = 0; part < DOWN_SPLIT; ++part) sum += read_float(p.sums + ((i64)part * ROWS + row) * HIDDEN + output);
          add(layer.down_bias)(output, row, sum, 0, before, 0);
        }
      }
      offset = next_offset(offset, Down::UNITS);
      STAMP(6);
      arrive();
    }
    STAMP(7);
    multiply<Head>(offset, p.norm, rows_of<Head>(p.x), none, [&](int output, int row, float sum, float, float, int) {
      p.logits[(i64)row * VOCABULARY + output] = half(sum);
    });
    if (thread == 0) leave(p.meeting);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) decode_few(const __grid_constant__ Step step) {
  Shared& s = *(Shared*)shared_memory();
  int thread = thread_here();
  if (thread == 0) {
    for (int i = 0; i < SLOTS; ++i) gate_init(&s.full[i], 1), gate_init(&s.empty[i], WARPS);
    gates_ready();
  }
  meet_all();
  if (thread >= THREADS) {  // registers are handed over by four warps at a time, so the producer has three idle companions
    give_registers();
    if (thread < THREADS + 32) produce(step, s, thread - THREADS);
  } else {
    take_registers();
    Worker(step, s, thread).run();
  }
}
