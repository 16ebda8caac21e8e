// One decoding step of at most 32 sequences as one kernel that stays on the GPU from the embedding to the logits.
//
// With few sequences a step only reads weights, and what it costs beyond that is waiting: for launches, for the first
// loads of each kernel, for its last ones. Here one warp of every block (the producer) streams that block's share of all
// weights, in the order of their use, into a ring in shared memory and never waits for results; eight warps compute. They
// wait for the other blocks between two stages, while the ring fills with what comes next.
//
//   qkv | attention | out | gate and up | down | (sum)     for every layer, then the head
//
// A product takes sixteen rows of a matrix at a time. Its columns are divided among the warps of the block, which keep
// their part of the input in registers for the whole stage; their sums meet in shared memory. Matrices are the left operand
// of the tensor cores, so that one, eight or thirty-two sequences cost the same. Which thread loads which columns follows
// from 16-byte loads: the order of the columns does not matter as long as both operands have the same.
//
// Blocks wait for each other's values by looking at them: before they are there, a buffer holds a pattern that no result
// has (ABSENT), and every buffer has a twin that is used in the next layer and made absent in this one. That takes one
// trip through memory where a barrier takes three. One barrier in each layer, before the last product, orders the rest.
//
// All sums have a fixed order: a sequence's logits do not depend on timing. Rounding is that of cuda.decode: products,
// norms, rotations and the residual are rounded to bfloat16 where it stores them.
//
// few.py gives the sizes as macros: HIDDEN WIDE LAYERS HEADS KV_HEADS HEAD_DIM VOCABULARY PAGE EPSILON QK_NORM, TILES8
// (sequences / 8, rounded up), GRID (blocks), SHARED_MEMORY (bytes of a block), DOWN_SPLIT and DOWN_TILES (how the last product of a
// layer is divided: among so many blocks by its columns, so many tiles each), CHUNK (least tokens of
// context that a block takes), MOST_ROWS (of the buffers), ITEMS (most pieces of context), WINDOW
// (slots under way), POLLED (see below) and PATIENCE (how often a thread looks for what is not there).

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float wide(u16 half) { return __uint_as_float((u32)half << 16); }
DEVICE u16 half(float v) { return (u16)pack(v, 0.0f); }
DEVICE float rounded(float v) { return wide(half(v)); }

constexpr u32 ABSENT = 0xffffffffu;  // as two halves or as a float: not a number, and not the one that arithmetic makes
DEVICE u32 absent(const uint4x& v) {  // not 0 if any half of it is
  u32 a = ~v.x, b = ~v.y, c = ~v.z, d = ~v.w, ones = 0x00010001u;
  return (((a - ones) & v.x) | ((b - ones) & v.y) | ((c - ones) & v.z) | ((d - ones) & v.w)) & 0x80008000u;
}

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
  static constexpr int STEPS = over(ALL_STEPS, SPLIT), CUT = STEPS <= LONGEST_CUT ? STEPS : LONG_CUT, CUTS = over(STEPS, CUT);
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
constexpr int FOUND_STRIDE = HEAD_DIM + 4, FOUND = WARPS * SHARE * FOUND_STRIDE;
constexpr int PART = SHARE * HEAD_DIM + 2 * SHARE;  // floats: a piece's values, then the largest score and the sum
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
  u16 *x, *qkv, *attended, *gated, *logits;  // x is four of its kind, the next two are two
  float *parts, *sums;                       // parts is two of its kind
  u32* meeting;                              // two counters, zero between launches
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
};
constexpr int SLOTS = (SHARED_MEMORY - (int)sizeof(Kept) - 128) / (SLOT + 16);
static_assert(SLOTS > WINDOW, "the producer would wait for a copy that it has yet to start");
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
#pragma unroll 1
  for (int unit = (block_here() + GRID - offset) % GRID; unit < P::UNITS; unit += GRID) {
    int part = unit % P::SPLIT, begin = part * P::ALL_STEPS / P::SPLIT;
    int steps = (part + 1) * P::ALL_STEPS / P::SPLIT - begin;
    int tile = unit / P::SPLIT * P::TILES_OF_UNIT;
#pragma unroll 1
    for (int last = tile + P::TILES_OF_UNIT; tile < last && tile < P::TILES; ++tile)
#pragma unroll 1
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

enum Kind { QKV_, OUT, UP, DOWN, HEAD };
struct Job {
  Kind kind;
  int units, tiles, outputs;
  const u16 *from, *norm, *bias, *residual;
  u16* to;
  bool ordered;  // the input is known to be there
};
template <class P>
DEVICE Job job_of(Kind kind, const u16* from, const u16* norm, const u16* bias, const u16* residual, u16* to, bool ordered) {
  return {kind, P::UNITS, P::TILES, P::N, from, norm, bias, residual, to, ordered};
}

struct Worker {
  const Step& step;
  Shared& s;
  int thread, warp, lane, g, t;  // lane = 4 g + t, as the tensor cores divide a tile
  Place place;
  u32 target = 0;
  int buffer = 0, patience = PATIENCE;

  DEVICE Worker(const Step& step, Shared& s, int thread)
      : step(step), s(s), thread(thread), warp(thread / 32), lane(thread % 32), g(lane / 4), t(lane % 4) {}

  DEVICE void arrive() {
    target += GRID;
    meet();
    if (thread == 0) count_up(step.meeting);
  }
  DEVICE void wait() {
    if (thread == 0)
      while ((int)(read_counter(step.meeting) - target) < 0 && again());
    meet();
  }
  // Between two stages. With POLLED, values are looked at instead: see ABSENT.
  DEVICE void between_stages() {
    if (!POLLED) arrive(), wait();
  }
  // Whether to look once more for what is not there. Who has looked too often goes on without it: what is absent is not a
  // number, so all that comes of it is none either, and the step fails instead of never ending.
  DEVICE bool again() {
    if (patience) pause(), --patience;
    return patience;
  }

  // The columns that a warp has of a product's part: which ones, and whether there are any.
  template <class P>
  DEVICE bool has(int i, int steps) {
    int inside = i % P::PER_WARP * WARPS + warp;
    return inside < P::CUT && i / P::PER_WARP * P::CUT + inside < steps;
  }
  template <class P>
  DEVICE int column(int i) { return (i / P::PER_WARP * P::CUT + i % P::PER_WARP * WARPS + warp) * 32; }

  // This warp's columns of the input, as soon as all of it that this thread needs is there.
  template <class P, class X>
  DEVICE void fetch(X& x, const Job& job, int begin, int steps) {
    const u16* from = job.from + hidden(g * P::COLS + begin * 32 + t * 8);
    u32 missing;
    do {
      missing = 0;
#pragma unroll
      for (int i = 0; i < P::CUTS * P::PER_WARP; ++i)
#pragma unroll
        for (int n = 0; n < TILES8; ++n) {
          x[i][n] = {0, 0, 0, 0};
          if (has<P>(i, steps) && n * 8 + g < step.rows) x[i][n] = read16(from + n * 8 * P::COLS + column<P>(i));
        }
      if (!job.ordered)
#pragma unroll
        for (int i = 0; i < P::CUTS * P::PER_WARP; ++i)
#pragma unroll
          for (int n = 0; n < TILES8; ++n) missing |= absent(x[i][n]);
    } while (missing && again());
    meet_warp();
  }

  // Make absent: the part of one block among several.
  DEVICE void clear(u16* buffer, int columns, int part, int parts) {
#pragma unroll 1
    for (int i = part * THREADS + thread; i < step.rows * (columns / 8); i += parts * THREADS)
      *(uint4x*)(buffer + i * 8) = {ABSENT, ABSENT, ABSENT, ABSENT};
  }

  template <int CHAINS, class More, class Sum>
  DEVICE auto& more_or(More& more, Sum& sum) {
    if constexpr (CHAINS == 2) return more;
    else return sum;
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

  // Compute this block's share of a product. P says how its columns are divided; the job says the rest at run time, so that
  // products with equally many columns share their code: it must stay in the instruction cache through all layers.
  template <class P>
  DEVICE void multiply(const Job& job, int offset) {
    int unit = (block_here() + GRID - offset) % GRID;
    if (unit >= job.units) return;
    constexpr int HELD = P::CUTS * P::PER_WARP;
    int part = unit % P::SPLIT, begin = part * P::ALL_STEPS / P::SPLIT;
    int steps = (part + 1) * P::ALL_STEPS / P::SPLIT - begin;
    uint4x x[HELD][TILES8], factor[P::NORMED ? HELD : 1];
    if (P::NORMED && job.norm) {
      const u16* weights = job.norm + hidden(t * 8);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        factor[i] = {0, 0, 0, 0};
        if (has<P>(i, steps)) factor[i] = read_constant(weights + column<P>(i));
      }
    }
    constexpr int TURNS = over(16 * ROWS, THREADS);
    int shift = job.kind == UP ? 3 : 4, tall = 1 << shift;
    fetch<P>(x, job, begin, steps);
    if constexpr (P::NORMED)
      if (job.norm) normalise<P>(x, factor);
#pragma unroll 1
    for (; unit < job.units; unit += GRID) {
      int tile = unit / P::SPLIT * P::TILES_OF_UNIT;
#pragma unroll 1
      for (int end = tile + P::TILES_OF_UNIT; tile < end && tile < job.tiles; ++tile) {
        float aside[TURNS];
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
          int o = j * THREADS + thread, output = tile * tall + (o & (tall - 1)), sequence = o >> shift;
          if (sequence < step.rows && output < job.outputs) aside[j] = early(job, output, sequence);
        }
        constexpr int CHAINS = TILES8 < 4 ? 2 : 1;  // of products that wait for each other
        float sum[TILES8][4] = {}, more[CHAINS == 2 ? TILES8 : 1][4] = {};
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
                mma(more_or<CHAINS>(more, sum)[n], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
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
          for (int e = 0; e < 4; ++e) mine[(n * 8 + 2 * t + e % 2) * SUM_STRIDE + g + e / 2 * 8] = CHAINS == 2 ? sum[n][e] + more_or<CHAINS>(more, sum)[n][e] : sum[n][e];
        meet();
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
          int o = j * THREADS + thread, output = tile * tall + (o & (tall - 1)), sequence = o >> shift;
          if (sequence < step.rows && output < job.outputs) {
            const float* from = sums + sequence * SUM_STRIDE + (o & (tall - 1));
            float first = 0, second = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
              first += from[w * ROWS * SUM_STRIDE];
              if (job.kind == UP) second += from[w * ROWS * SUM_STRIDE + 8];
            }
            finish(job, output, sequence, first, second, aside[j], part);
          }
        }
      }
    }
  }

  // What an output needs from memory besides its sum: there as soon as the input is.
  DEVICE float early(const Job& job, int output, int row) {
    if (job.kind == QKV_) return job.bias ? wide(job.bias[output]) : 0.0f;
    return job.residual ? wide(read_half(job.residual + row * HIDDEN + output)) : 0.0f;
  }
  DEVICE void finish(const Job& job, int output, int row, float sum, float second, float before, int part) {
    u16* to = job.to + (i64)row * job.outputs + output;
    if (job.kind == QKV_) *to = half(sum + before);
    else if (job.kind == UP) {
      if (job.bias) sum += wide(job.bias[output]), second += wide(job.bias[WIDE + output]);
      float gate = rounded(sum), up = rounded(second);
      *to = half(gate / (1 + power2(-gate * LOG2E)) * up);
    } else if (job.kind == HEAD) *to = half(sum);
    else if (DOWN_SPLIT > 1 && job.kind == DOWN) step.sums[(part * ROWS + row) * HIDDEN + output] = sum;
    else *to = half(before + rounded(job.bias ? sum + wide(job.bias[output]) : sum));
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
    if (lane < ROWS) s.lengths[lane] = length, s.pieces[lane] = pieces;
    if (lane == 0) s.chunk = chunk;
    meet_warp();
    if (lane == 0)
#pragma unroll 1
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
      a[e] = wide(await_half(from + i)), b[e] = wide(await_half(from + HALF + i));
      squares += a[e] * a[e] + b[e] * b[e];
    }
    meet_warp();
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

  DEVICE u16 await_half(const u16* at) {
    u16 v;
    do v = read_half(at);
    while (v == (u16)ABSENT && again());
    return v;
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

  DEVICE void attend(const Layer& layer, int number, Ahead& ahead, int twin) {
    Item& it = ahead.it;
    Block& b = ahead.block;
    int position = it.length - 1, blocks = over(it.end - it.begin, 16);
    const u16* qkv = step.qkv + (twin * MOST_ROWS + it.row) * QKV;
    bool last = it.end == it.length;
#pragma unroll 1
    for (int j = warp; j < SHARE + 2; j += WARPS) {
      if (j < 2 && last) {
        const u16* from = qkv + (HEADS + j * KV_HEADS + it.head) * HEAD_DIM;
        u16* to = layer.entries + ((i64)(j * KV_HEADS + it.head) * step.slots + ahead.slot) * HEAD_DIM;
        if (j == 0) turn(from, to, s.fresh[0], layer.key_norm, ahead.angle);
        else
#pragma unroll 1
          for (int i = lane; i < HEAD_DIM; i += 32) to[i] = s.fresh[1][i] = await_half(from + i);
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
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int i = 0; i < 8; i += 4)
            *(float4x*)(all + (warp * SHARE + g) * FOUND_STRIDE + d * 64 + (2 * t + e) * 8 + i) = {
                found[d][i][e], found[d][i + 1][e], found[d][i + 2][e], found[d][i + 3][e]};
    }
    meet();
    int pieces = s.pieces[it.row];
    u16* to = step.attended + (twin * MOST_ROWS + it.row) * QUERIES + it.head * SHARE * HEAD_DIM;
    float* part = step.parts + (i64)(twin * ITEMS + number) * PART;
#pragma unroll 1
    for (int i = thread; i < SHARE * HEAD_DIM; i += THREADS) {
      int head = i / HEAD_DIM;
      float peak = NOTHING, sum = 0, value = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, s.peaks[w][head]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        float weight = power2(s.peaks[w][head] - peak);
        sum += s.totals[w][head] * weight;
        value += all[(w * SHARE + head) * FOUND_STRIDE + i % HEAD_DIM] * weight;
      }
      if (pieces == 1) to[i] = half(value / sum);
      else {
        part[i] = value;
        if (i % HEAD_DIM == 0) part[SHARE * HEAD_DIM + 2 * head] = peak, part[SHARE * HEAD_DIM + 2 * head + 1] = sum;
      }
    }
    if (pieces > 1) {
      float* other = step.parts + (i64)((1 - twin) * ITEMS + number) * PART;
#pragma unroll 1
      for (int i = thread; i < PART; i += THREADS) other[i] = __uint_as_float(ABSENT);
      if (it.begin == 0)  // who has the first piece joins them all
#pragma unroll 1
        for (int i = thread; i < SHARE * HEAD_DIM; i += THREADS) to[i] = half(joined(part, pieces, i));
    }
    meet();  // the next item writes to the same places
  }

  // One value of what attention found for a sequence, from all its pieces.
  DEVICE float joined(const float* part, int pieces, int at) {
    float best = NOTHING, total = 0, value = 0;
    const float* mark = part + SHARE * HEAD_DIM + at / HEAD_DIM * 2;
#pragma unroll 1
    for (int first = 0; first < pieces; first += 4) {
      float v[4], peak[4], sum[4];
      u32 missing;
      do {
        missing = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int p = first + j < pieces ? first + j : first;
          v[j] = read_float(part + p * PART + at), peak[j] = read_float(mark + p * PART), sum[j] = read_float(mark + p * PART + 1);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
          missing |= __float_as_uint(v[j]) == ABSENT || __float_as_uint(peak[j]) == ABSENT || __float_as_uint(sum[j]) == ABSENT;
      } while (missing && again());
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (first + j < pieces) {
          float higher = fmaxf(best, peak[j]), shrink = power2(best - higher), weight = power2(peak[j] - higher);
          value = value * shrink + v[j] * weight, total = total * shrink + sum[j] * weight, best = higher;
        }
    }
    return value / total;
  }

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
    u16* x = step.x + MOST_ROWS * HIDDEN;  // as if a layer before the first had made it
#pragma unroll 1
    for (int i = block_here() * THREADS + thread; i < step.rows * (HIDDEN / 8); i += GRID * THREADS) {
      int row = i / (HIDDEN / 8), column = i % (HIDDEN / 8) * 8;
      *(uint4x*)(x + row * HIDDEN + column) = *(const uint4x*)(step.embedding + (i64)s.tokens[row] * HIDDEN + column);
    }
    int me = block_here();
    clear(step.x, HIDDEN, me, GRID), clear(step.x + 2 * MOST_ROWS * HIDDEN, HIDDEN, me, GRID);
    clear(step.qkv, QKV, me, GRID), clear(step.attended, QUERIES, me, GRID);
    for (int number = block_here(); number < s.first[ROWS]; number += GRID)
#pragma unroll 1
      for (int i = thread; i < PART; i += THREADS) step.parts[(i64)number * PART + i] = __uint_as_float(ABSENT);
  }

  DEVICE void run() {
    const Step& p = step;
    begin();
    arrive(), wait();
    int offset = 0, at = 0;
    Kind kind = QKV_;
#pragma unroll 1
    for (;;) {
      const Layer& layer = p.layers[at < LAYERS ? at : 0];
      int twin = at % 2, other = 1 - twin, number = block_here(), items = s.first[ROWS];
      u16 *before = p.x + other * MOST_ROWS * HIDDEN, *between = p.x + (2 + twin) * MOST_ROWS * HIDDEN;
      u16 *after = p.x + twin * MOST_ROWS * HIDDEN, *qkv = p.qkv + twin * MOST_ROWS * QKV;
      u16* attended = p.attended + twin * MOST_ROWS * QUERIES;
      Job out = job_of<Out>(OUT, attended, nullptr, layer.out_bias, before, between, !POLLED);
      Job job = out;
      if (kind == QKV_) job = job_of<Qkv>(QKV_, before, layer.attention_norm, layer.qkv_bias, nullptr, qkv, !POLLED || at == 0);
      if (kind == UP) job = job_of<Up>(UP, between, layer.mlp_norm, layer.gate_up_bias, nullptr, p.gated, !POLLED);
      if (kind == HEAD) job = job_of<Head>(HEAD, before, p.norm, nullptr, nullptr, p.logits, !POLLED);
      Ahead ahead;
      if (kind == QKV_ && number < items) look_ahead(ahead, layer, number);
      multiply<Up>(job, offset);
      if (kind == HEAD) break;
      int last = offset;
      offset = next_offset(offset, job.units);
      if (kind == QKV_) {
        between_stages();
        while (number < items) {
          attend(layer, number, ahead, twin);
          number += GRID;
          if (number < items) look_ahead(ahead, layer, number);
        }
        between_stages();
        kind = OUT;
        if constexpr (QUERIES != HIDDEN) {
          multiply<Out>(out, offset);
          between_stages();
          offset = next_offset(offset, Out::UNITS), kind = UP;
        }
      } else if (kind == OUT) between_stages(), kind = UP;
      else {
        // What the next layer fills. Who has the input of this product knows that nobody needs it any more.
        constexpr int HOLDERS = Up::UNITS < GRID ? Up::UNITS : GRID;
        int mine = (block_here() + GRID - last) % GRID;
        if (mine < HOLDERS) {
          clear(p.x + (2 + other) * MOST_ROWS * HIDDEN, HIDDEN, mine, HOLDERS);
          clear(p.qkv + other * MOST_ROWS * QKV, QKV, mine, HOLDERS);
          clear(p.attended + other * MOST_ROWS * QUERIES, QUERIES, mine, HOLDERS);
        }
        arrive(), wait();
        clear(before, HIDDEN, block_here(), GRID);
        Job down = job_of<Down>(DOWN, p.gated, nullptr, layer.down_bias, DOWN_SPLIT == 1 ? between : nullptr, after, true);
        multiply<Down>(down, offset);
        if constexpr (DOWN_SPLIT > 1) {
          arrive(), wait();
          down.residual = between, down.kind = OUT;
          for (int i = block_here() * THREADS + thread; i < p.rows * HIDDEN; i += GRID * THREADS) {
            int row = i / HIDDEN, output = i % HIDDEN;
            float sum = 0, already = early(down, output, row);
#pragma unroll
            for (int part = 0; part < DOWN_SPLIT; ++part) sum += read_float(p.sums + (part * ROWS + row) * HIDDEN + output);
            finish(down, output, row, sum, 0, already, 0);
          }
        }
        between_stages();
        offset = next_offset(offset, Down::UNITS);
        kind = ++at < LAYERS ? QKV_ : HEAD;
      }
    }
    if (thread == 0) leave(p.meeting);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) decode_few(const __grid_constant__ Step step) {
  Shared& s = *(Shared*)shared_memory();
  int thread = thread_here();
  if (thread == 0) {
#pragma unroll 1
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
