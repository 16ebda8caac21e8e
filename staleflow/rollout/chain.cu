// The matrix products of a decoding step with some dozens of sequences. Every kernel of the step begins before the one before
// it has ended (programmatic dependent launch): a block first asks for its weights, which nobody writes, then waits for the
// kernel before, then asks for its input. So weights stream while others finish, and no launch is waited for.
//
//   begin | qkv | attention (chain_attention.cu) | out | up | down | qkv | ...
//
// A block has 64 outputs (rows of the matrix), a range of columns, and a part of the sequences. One thread copies them, 64
// columns at a time, into a ring in shared memory; a warpgroup multiplies. Blocks with the other columns of the same outputs
// are in one cluster: they send each other what they found, and each adds up, in a fixed order, the sums of some of the
// sequences.
//
// A norm is divided: who makes the residual also stores it multiplied by the weights of the next norm, and the sum of its
// squares for each 64 outputs; who reads it multiplies its sums by 1 / root mean square. The residual and products are rounded
// to bfloat16 where cuda.decode rounds them.
//
// chain.py gives the sizes as macros: HIDDEN WIDE HEADS KV_HEADS HEAD_DIM PAGE EPSILON QK_NORM SCALE, ROWS (sequences), for each
// product EACH_ (sequences of a part: 8, 16, 32, 64 or 128), SPLIT_ (blocks of a cluster) and STAGES_ (of the ring), and MANY
// (sequences of a part from which on sums are sent in one copy).

struct Job {
  u16 *x, *scaled, *to;  // the residual, the residual times the next norm's weights, other outputs
  float* squares;        // [HIDDEN / 64, ROWS]
  const u16 *bias, *norm;
  int rows;
};

constexpr int TILE = 64, DEPTH = 64, TILES = HIDDEN / TILE;
constexpr u32 WEIGHTS = TILE * DEPTH * 2;                            // bytes of a stage, for 64 outputs
constexpr int STRIDE = TILE + 4;                                     // floats of a sequence's sums: no bank twice
enum Kind { QKV_, OUT, UP };

DEVICE float all_lanes(float v) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) v += across(v, lanes);
  return v;
}

template <Kind KIND, int COLUMNS, int OUTPUTS, int EACH, int SPLIT, int STAGES_>
struct Product {
  static constexpr int STEPS = COLUMNS / DEPTH, OWN = EACH / SPLIT, MINE = over(OWN, GROUP_WARPS), THREADS = GROUP + 32;
  static constexpr int TILES_HERE = OUTPUTS / (KIND == UP ? TILE / 2 : TILE);  // of a part
  static constexpr u32 INPUT = EACH * DEPTH * 2, STAGE = WEIGHTS + INPUT;
  static constexpr bool APART = SPLIT > 1;             // sums come from other blocks, who may not write where the ring is
  static constexpr bool BULK = APART && EACH >= MANY;  // sums are laid out first, and sent in one copy for each block
  static constexpr bool AROUND = over(STEPS, SPLIT) > STAGES_;  // the ring is filled more than once
  static_assert(APART && !BULK || EACH * STRIDE * 4 <= STAGES_ * STAGE, "sums take the place of the ring");
  static_assert(STAGES_ > 1, "a stage is given back after the next one is there");
  static_assert(EACH % SPLIT == 0, "a block adds up the sums of OWN sequences");
  static_assert(EACH <= GROUP, "a thread has one sequence's squares");
  struct Shared {
    alignas(1024) char ring[STAGES_ * STAGE];
    alignas(16) float sums[APART ? EACH * STRIDE : 4];  // of OWN sequences, from every block
    u64 full[STAGES_], empty[STAGES_], all;
    float factor[EACH];
  };

  // What is multiplied, copied by one thread. Of "up", 32 rows of the gate are followed by the 32 that belong to them.
  static DEVICE void weights(char* to, const TensorMap* map, int tile, int step, u64* gate, u64 policy) {
    if (KIND == UP) {
      copy_tile(to, map, step * DEPTH, tile * 32, gate, policy);
      copy_tile(to + WEIGHTS / 2, map, step * DEPTH, WIDE + tile * 32, gate, policy);
    } else copy_tile(to, map, step * DEPTH, tile * TILE, gate, policy);
  }

  static DEVICE void run(const TensorMap* matrix, const TensorMap* from, const Job& job) {
    Shared& s = *(Shared*)shared_memory();
    int thread = thread_here(), warp = thread / 32, lane = thread % 32;
    int rank = block_here() % SPLIT, cluster = block_here() / SPLIT, tile = cluster % TILES_HERE, part = cluster / TILES_HERE;
    int first_row = part * EACH + rank * OWN;
    int begin = rank * STEPS / SPLIT, count = (rank + 1) * STEPS / SPLIT - begin, first = count < STAGES_ ? count : STAGES_;
    bool copies = thread == GROUP, multiplies = thread < GROUP;
    let_next_begin();
    if (copies) {
      u64 once = read_once();
      read_map(matrix), read_map(from);  // the second is used when there is no time to wait for it
      for (int i = 0; i < STAGES_; ++i) gate_init(&s.full[i], 1), gate_init(&s.empty[i], GROUP_WARPS);
      gate_init(&s.all, 1);
      gates_ready();
      if (APART) gate_expect(&s.all, EACH * (BULK ? STRIDE : TILE) * 4);
      for (int i = 0; i < first; ++i) gate_expect(&s.full[i], STAGE), weights(s.ring + i * STAGE, matrix, tile, begin + i, &s.full[i], once);
    }
    meet_warp();
    if (APART) meet_cluster();
    else meet_all();
    if (copies) {
      u64 once = read_once(), often = read_often();
      await_before();
      for (int i = 0; i < first; ++i) copy_tile(s.ring + i * STAGE + WEIGHTS, from, (begin + i) * DEPTH, part * EACH, &s.full[i], often);
      for (int i = first; i < count; ++i) {
        int stage = i % STAGES_;
        char* to = s.ring + stage * STAGE;
        gate_wait(&s.empty[stage], i / STAGES_ - 1 & 1);
        gate_expect(&s.full[stage], STAGE);
        weights(to, matrix, tile, begin + i, &s.full[stage], once);
        copy_tile(to + WEIGHTS, from, (begin + i) * DEPTH, part * EACH, &s.full[stage], often);
      }
    }
    meet_warp();
    u32 before[MINE], biased = 0, next = 0;
    int output = tile * TILE + 2 * lane;
    if (multiplies) {
      if (KIND != UP && job.bias) biased = *(const u32*)(job.bias + output);
      if (KIND == OUT) next = *(const u32*)(job.norm + output);
      await_before();
      if (KIND == OUT)
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
          int row = first_row + j * GROUP_WARPS + warp;
          before[j] = j * GROUP_WARPS + warp < OWN && row < job.rows ? read_pair(job.x + row * HIDDEN + output) : 0;
        }
      else if (thread < EACH && part * EACH + thread < job.rows) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TILES; ++t) sum += read_float(job.squares + t * ROWS + part * EACH + thread);
        s.factor[thread] = inverse_root(sum / HIDDEN + EPSILON);
      }
      float d[EACH / 2] = {};
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        int stage = i % STAGES_;
        gate_wait(&s.full[stage], i / STAGES_ & 1);
        const char *a = s.ring + stage * STAGE, *b = s.ring + stage * STAGE + WEIGHTS;
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) multiply_tiles(d, tile_at(a + k * 32), tile_at(b + k * 32));
        products_sent();
        if (!AROUND) continue;
        products_wait<1>();  // those before
        if (i > 0 && i - 1 + STAGES_ < count && lane == 0) gate_arrive(&s.empty[(i - 1) % STAGES_]);
      }
      products_wait<0>();
      if (!APART || BULK) meet_group();
      float* mine = (float*)s.ring;
#pragma unroll
      for (int e = 0; e < EACH / 2; ++e) {
        int sequence = e / 4 * 8 + lane % 4 * 2 + e % 2, place = warp * 16 + e % 4 / 2 * 8 + lane / 4;
        if (APART && !BULK) send(s.sums + (rank * OWN + sequence % OWN) * STRIDE + place, d[e], &s.all, sequence / OWN);
        else mine[sequence * STRIDE + place] = d[e];
      }
      if (BULK) {
        written();
        meet_group();
        if (thread < SPLIT) send_many(s.sums + rank * OWN * STRIDE, mine + thread * OWN * STRIDE, OWN * STRIDE * 4, &s.all, thread);
      }
      if (APART) gate_wait(&s.all, 0);
      meet_group();  // also for the factors
      const float* sums = APART ? s.sums : mine;
      if (KIND == UP)
#pragma unroll
        for (int j = 0; j < over(OWN, 2 * GROUP_WARPS); ++j) {
          int own = 2 * (j * GROUP_WARPS + warp) + lane / 16, row = first_row + own;
          if (own < OWN && row < job.rows) gate(job, sums + own * STRIDE, tile, row, lane % 16, s.factor[rank * OWN + own]);
        }
      else
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
          int own = j * GROUP_WARPS + warp, row = first_row + own;
          if (own < OWN && row < job.rows)
            finish(job, sums + own * STRIDE, tile, row, lane, before[j], biased, next, s.factor[rank * OWN + own]);
        }
    }
    meet_warp();
    if (BULK) meet_cluster();  // the others have what was sent from here
  }

  // Two outputs of one sequence, from the sums of all blocks of the cluster.
  static DEVICE float2x summed(const float* sums) {
    float2x v = {0, 0};
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      float2x found = *(const float2x*)(sums + s * OWN * STRIDE);
      v.x += found.x, v.y += found.y;
    }
    return v;
  }

  // The gated values of one sequence, two for each lane of half a warp.
  static DEVICE void gate(const Job& job, const float* sums, int tile, int row, int lane, float factor) {
    float2x g = summed(sums + 2 * lane), u = summed(sums + 32 + 2 * lane);
    int output = tile * 32 + 2 * lane;
    g.x *= factor, g.y *= factor, u.x *= factor, u.y *= factor;
    if (job.bias) {
      u32 of_gate = *(const u32*)(job.bias + output), of_up = *(const u32*)(job.bias + WIDE + output);
      g.x += low(of_gate), g.y += high(of_gate), u.x += low(of_up), u.y += high(of_up);
    }
    *(u32*)(job.to + row * (i64)WIDE + output) = pack(gated(rounded(g.x), rounded(u.x)), gated(rounded(g.y), rounded(u.y)));
  }
  static DEVICE float gated(float gate, float up) { return gate * inverse(1 + power2(-gate * LOG2E)) * up; }

  // One sequence, two outputs for each lane.
  static DEVICE void finish(
      const Job& job, const float* sums, int tile, int row, int lane, u32 before, u32 biased, u32 next, float factor) {
    float2x v = summed(sums + 2 * lane);
    int output = tile * TILE + 2 * lane;
    if (KIND == QKV_) {
      *(u32*)(job.to + row * (i64)OUTPUTS + output) = pack(v.x * factor + low(biased), v.y * factor + high(biased));
      return;
    }
    v.x = rounded(v.x + low(biased)), v.y = rounded(v.y + high(biased));
    u32 x = pack(low(before) + v.x, high(before) + v.y);
    keep(job, tile, row, lane, x, next);
  }

  // The residual, the same times the weights of the next norm, and its squares.
  static DEVICE void keep(const Job& job, int tile, int row, int lane, u32 x, u32 next) {
    int at = row * HIDDEN + tile * TILE + 2 * lane;
    *(u32*)(job.x + at) = x;
    *(u32*)(job.scaled + at) = pack(low(x) * low(next), high(x) * high(next));
    float squares = all_lanes(low(x) * low(x) + high(x) * high(x));
    if (lane == 0) job.squares[tile * ROWS + row] = squares;
  }
};

#define PRODUCT(NAME, SPLIT, ...)                                                                              \
  extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(Product<__VA_ARGS__>::THREADS)    \
      NAME(const __grid_constant__ TensorMap matrix, const __grid_constant__ TensorMap from, const __grid_constant__ Job job) { \
    Product<__VA_ARGS__>::run(&matrix, &from, job);                                                              \
  }
PRODUCT(product_qkv, SPLIT_QKV, QKV_, HIDDEN, QKV, EACH_QKV, SPLIT_QKV, STAGES_QKV)
PRODUCT(product_out, SPLIT_OUT, OUT, QUERIES, HIDDEN, EACH_OUT, SPLIT_OUT, STAGES_OUT)
PRODUCT(product_up, SPLIT_UP, UP, HIDDEN, WIDE, EACH_UP, SPLIT_UP, STAGES_UP)
PRODUCT(product_down, SPLIT_DOWN, OUT, WIDE, HIDDEN, EACH_DOWN, SPLIT_DOWN, STAGES_DOWN)

// The first residual: what the embedding has for each token. A given token -1 - n is the one that was drawn last in row n.
struct Begin {
  const u16* embedding;
  const int* given;
  const i64* last;
  Job job;
};
extern "C" __global__ void __launch_bounds__(GROUP) chain_begin(const __grid_constant__ Begin b) {
  let_next_begin();
  await_before();
  int row = block_here(), warp = thread_here() / 32, lane = thread_here() % 32, token = b.given[row];
  i64 from = (token < 0 ? b.last[-1 - token] : token) * HIDDEN;
  for (int tile = warp; tile < TILES; tile += GROUP_WARPS) {
    int output = tile * TILE + 2 * lane;
    u32 x = *(const u32*)(b.embedding + from + output), next = *(const u32*)(b.job.norm + output);
    Product<OUT, HIDDEN, HIDDEN, EACH_OUT, 1, STAGES_OUT>::keep(b.job, tile, row, lane, x, next);
  }
}
