// What the stages of few.cu have in common: how memory is laid out, the producer that streams weights, and products.

constexpr u32 ABSENT = 0xffffffffu;  // as two halves or as a float: not a number, and not the one that arithmetic makes
DEVICE u32 absent(const uint4x& v) {  // not 0 if any half of it is
  u32 a = ~v.x, b = ~v.y, c = ~v.z, d = ~v.w, ones = 0x00010001u;
  return (((a - ones) & v.x) | ((b - ones) & v.y) | ((c - ones) & v.z) | ((d - ones) & v.w)) & 0x80008000u;
}

constexpr int ROWS = 8 * TILES8, WARPS = 8, THREADS = 32 * WARPS;
static_assert(HIDDEN % 32 == 0 && WIDE % 32 == 0 && QUERIES % 32 == 0, "few.py checks this");
static_assert(CHUNK % 128 == 0, "a block of 16 tokens lies in one page");

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

constexpr int SLOT = 16 * most(most(Qkv::STRIDE, Out::STRIDE), Down::STRIDE);
constexpr int SUM_STRIDE = 20, SUMS = WARPS * ROWS * SUM_STRIDE;  // floats; 20: no bank twice
constexpr int FOUND = WARPS * SHARE * FOUND_STRIDE;
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
  const int *given, *positions, *tables;  // a given token -1 - n: the one that was drawn last in row n
  const i64* last;
  u16 *x, *qkv, *attended, *gated, *logits;  // x is four of its kind, the next two are two
  float *parts, *sums;                       // parts is two of its kind
  u32* meeting;                              // two counters, zero between launches
  u64* trace;                                // with TRACED: cycles, [GRID, LAYERS + 1, MARKS]
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
constexpr int MARKS = 20;  // three for each kind of product (begun, input there, done), then those of few.cu
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

struct Products {
  const Step& step;
  Shared& s;
  int thread, warp, lane, g, t;  // lane = 4 g + t, as the tensor cores divide a tile
  Place place;
  u32 target = 0;
  int buffer = 0, patience = PATIENCE;
  int layer_now = 0;

  // When this block passed a place in the code; bench/gpu/stages.py makes a table of them.
  DEVICE void mark(int place) {
    if (TRACED && thread == 0) step.trace[(block_here() * (LAYERS + 1) + layer_now) * MARKS + place] = cycles();
  }

  DEVICE Products(const Step& step, Shared& s, int thread)
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
  // Whether to look once more for what is not there. A thread that has looked too often continues without it: what is absent is
  // not a number, so nothing computed from it is one, and the step fails instead of never ending.
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
    mark(3 * job.kind);
    fetch<P>(x, job, begin, steps);
    if constexpr (P::NORMED)
      if (job.norm) normalise<P>(x, factor);
    mark(3 * job.kind + 1);
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
    mark(3 * job.kind + 2);
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
};
