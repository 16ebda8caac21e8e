// Attention as a link of the chain: a block has one piece of the context of one sequence and key head. One thread copies its pages
// into a ring in shared memory, and begins before the kernel before has ended: earlier steps made what lies there. Four warps look
// at sixteen tokens at a time. The pieces of a sequence and key head are one cluster: they send each other what they found, and each
// joins some of the values.

struct Context {
  const u16* qkv;  // [ROWS, QKV]
  u16 *entries, *to;
  const u16 *query_norm, *key_norm, *cos, *sin;
  const int *positions, *tables;
  i64 slots;
  int width, stages;
};

constexpr int PAGE_BYTES = PAGE * 128, BOXES = HEAD_DIM / 64;  // of a page, 64 columns are copied at a time
constexpr u32 ENTRIES = 2 * BOXES * PAGE_BYTES;                 // of keys and values of a page
constexpr int READERS = PAGE / 16;                              // warps that look at a page
static_assert(READERS == 1 || READERS == 2 || READERS == 4, "fits checks this");

// Sixteen tokens from a page in shared memory, where the copy swizzled each eight rows.
DEVICE uint4x entry_at(const char* page, int row, int column) {
  return tile16(page + column / 64 * PAGE_BYTES + row * 128 + (column / 8 % 8 ^ row % 8) * 16);
}
DEVICE void take_keys(Block& b, const char* page, int first, int g, int t) {
#pragma unroll
  for (int o = 0; o < 2; ++o)
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 32; ++d) b.keys[o][d] = entry_at(page, first + o * 8 + g, d * 32 + t * 8);
}
DEVICE void take_values(Block& b, const char* page, int first, int valid, int g, int t) {
#pragma unroll
  for (int d = 0; d < BOXES; ++d)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int token = 2 * t + e / 2 * 8 + e % 2;
      b.values[d][e] = entry_at(page + BOXES * PAGE_BYTES, first + token, d * 64 + g * 8);
      if (token >= valid) b.values[d][e] = {0, 0, 0, 0};  // what lies behind the end may be anything, also no number
    }
}

// SHORT: the ring has FEW_STAGES, so that one more of very many blocks fits on a multiprocessor.
template <int PIECES, bool SHORT = false>
struct Attention {
  static constexpr int VALUES = SHARE * HEAD_DIM, OWN = VALUES / PIECES, SENT = OWN + 2 * SHARE, TURNS = over(SHARE + 2, GROUP_WARPS);
  struct Shared {
    alignas(16) u16 query[8 * QUERY_STRIDE];
    alignas(16) u16 fresh[2][HEAD_DIM];  // this step's key and value
    alignas(16) float lines[GROUP_WARPS * SHARE * FOUND_STRIDE];
    float peaks[GROUP_WARPS][8], totals[GROUP_WARPS][8];
    float found[PIECES][SENT];  // by piece: its part of this block's values, and of each head the largest score and the sum
    u64 full[MOST_STAGES], empty[MOST_STAGES], all;
    int pages[32];
  };
  static_assert(sizeof(Shared) <= KEPT, "the ring is behind it");
  static DEVICE char* ring(Shared& s) { return (char*)&s + over((int)sizeof(Shared), 1024) * 1024; }

  static DEVICE int stages(const Context& c) { return SHORT ? FEW_STAGES : c.stages; }

  // The pages of tokens begin to end, by one warp.
  static DEVICE void copy(Shared& s, const TensorMap* map, const Context& c, const int* table, int head, int begin, int end, int lane) {
    int pages = over(end - begin, PAGE), keys = head * c.slots, values = (KV_HEADS + head) * c.slots;
    u64 once = read_once();
    int stage = 0, phase = 1;  // a gate that nobody has passed yet lets the first round through
    for (int at = 0; at < pages; at += 32) {
      if (at + lane < pages) s.pages[lane] = table[begin / PAGE + at + lane] * PAGE;
      meet_warp();
      if (lane == 0)
        for (int i = at; i < pages && i < at + 32; ++i) {
          char* to = ring(s) + stage * ENTRIES;
          gate_wait(&s.empty[stage], phase);
          gate_expect(&s.full[stage], ENTRIES);
#pragma unroll
          for (int box = 0; box < BOXES; ++box) {
            copy_tile(to + box * PAGE_BYTES, map, box * 64, keys + s.pages[i - at], &s.full[stage], once);
            copy_tile(to + (BOXES + box) * PAGE_BYTES, map, box * 64, values + s.pages[i - at], &s.full[stage], once);
          }
          if (++stage == stages(c)) stage = 0, phase ^= 1;
        }
      meet_warp();
    }
  }

  static DEVICE void run(const TensorMap* map, const Context& c) {
    Shared& s = *(Shared*)shared_memory();
    int thread = thread_here(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    int piece = block_here() % PIECES, head = block_here() / PIECES % KV_HEADS, row = block_here() / PIECES / KV_HEADS;
    let_next_begin();
    const int* table = c.tables + row * c.width;
    int position = c.positions[row], length = position + 1, chunk = over(over(length, PIECES), PAGE) * PAGE;
    int begin = piece * chunk, end = begin + chunk < length ? begin + chunk : length;
    bool last = begin < end && end == length;
    if (thread == GROUP) {
      for (int i = 0; i < stages(c); ++i) gate_init(&s.full[i], 1), gate_init(&s.empty[i], READERS);
      gate_init(&s.all, 1);
      gates_ready();
      if (PIECES > 1) gate_expect(&s.all, PIECES * SENT * 4);
    }
    meet_warp();
    if (PIECES > 1) meet_cluster();
    else meet_all();
    if (warp == GROUP_WARPS) {
      copy(s, map, c, table, head, begin, end, lane);
      await_before();
    } else {
      Angle angle;
      angle.load(c.cos, c.sin, position, lane);
      i64 own = ((i64)table[position / PAGE] * PAGE + position % PAGE) * HEAD_DIM;
      await_before();
      look(s, c, angle, own, warp, lane, g, t, row, head, position, begin, end, last);
      finish(s, c, thread, row, head, piece);
    }
  }

  static DEVICE void look(
      Shared& s, const Context& c, const Angle& angle, i64 own, int warp, int lane, int g, int t, int row, int head, int position,
      int begin, int end, bool last) {
    const u16* qkv = c.qkv + (i64)row * QKV;
    OneHead heads[TURNS];  // all are asked for before one is looked at: queries, then the key
    uint4x value = {0, 0, 0, 0};
    bool stores = warp == (SHARE + 1) % GROUP_WARPS && last && lane < HEAD_DIM / 8;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      int j = i * GROUP_WARPS + warp;
      if (j < SHARE || j == SHARE && last)
        heads[i].load(qkv + (j < SHARE ? head * SHARE + j : HEADS + head) * HEAD_DIM, lane, [](const u16* at) { return read_half(at); });
    }
    if (stores) value = read16(qkv + (HEADS + KV_HEADS + head) * HEAD_DIM + lane * 8);
    u16* to = c.entries + (i64)head * c.slots * HEAD_DIM + own;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      int j = i * GROUP_WARPS + warp;
      if (j < SHARE) heads[i].turn(s.query + j * QUERY_STRIDE, nullptr, c.query_norm, angle, lane);
      else if (j == SHARE && last) heads[i].turn(to, s.fresh[0], c.key_norm, angle, lane);
    }
    if (stores) *(uint4x*)(to + KV_HEADS * c.slots * HEAD_DIM + lane * 8) = *(uint4x*)(s.fresh[1] + lane * 8) = value;
    meet_group();
    uint4x asked[HEAD_DIM / 32];
    auto ask = [&] {
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 32; ++d) {
        asked[d] = {0, 0, 0, 0};
        if (g < SHARE) asked[d] = tile16((const char*)(s.query + g * QUERY_STRIDE + d * 32 + t * 8));
      }
    };
    if (!SHORT) ask();
    Found mine;
#pragma unroll 1
    for (int block = warp; begin + block * 16 < end; block += GROUP_WARPS) {
      int first = begin + block * 16, page = block / READERS, stage = page % stages(c);
      gate_wait(&s.full[stage], page / stages(c) & 1);
      const char* here = ring(s) + stage * ENTRIES;
      bool fresh = first <= position && position < first + 16;
      Block b;
      if (SHORT) ask();  // there are no registers to keep them in
      take_keys(b, here, block % READERS * 16, g, t);
      if (fresh) b.renew_key(position % 16, s.fresh[0], g, t);
      auto values = [&] {
        take_values(b, here, block % READERS * 16, end - first, g, t);
        if (fresh) b.renew_value(position % 16, s.fresh[1], g, t);
      };
      mine.look(b, asked, first, end, t, values, [] {});
      meet_warp();
      if (lane == 0) gate_arrive(&s.empty[stage]);
    }
    mine.leave(s.lines + warp * SHARE * FOUND_STRIDE, s.peaks[warp], s.totals[warp], g, t);
    meet_group();
  }

  // What the warps found, joined; and what the pieces did.
  static DEVICE void finish(Shared& s, const Context& c, int thread, int row, int head, int piece) {
    u16* to = c.to + (i64)row * QUERIES + head * VALUES;
    for (int i = thread; i < VALUES; i += GROUP) {
      float peak, sum, value = joined<GROUP_WARPS>(s.lines, s.peaks, s.totals, i / HEAD_DIM, i % HEAD_DIM, peak, sum);
      if (PIECES == 1) to[i] = half(value / sum);
      else {
        send(&s.found[piece][i % OWN], value, &s.all, i / OWN);
        if (i % HEAD_DIM == 0)
#pragma unroll
          for (int p = 0; p < PIECES; ++p) {
            send(&s.found[piece][OWN + i / HEAD_DIM * 2], peak, &s.all, p);
            send(&s.found[piece][OWN + i / HEAD_DIM * 2 + 1], sum, &s.all, p);
          }
      }
    }
    if (PIECES == 1) return;
    gate_wait(&s.all, 0);
    for (int i = thread; i < OWN; i += GROUP) {
      int at = OWN + (piece * OWN + i) / HEAD_DIM * 2;
      float best = NOTHING, all = 0, total = 0;
#pragma unroll
      for (int p = 0; p < PIECES; ++p) best = fmaxf(best, s.found[p][at]);
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        float weight = power2(s.found[p][at] - best);
        all += s.found[p][i] * weight, total += s.found[p][at + 1] * weight;
      }
      to[piece * OWN + i] = half(all / total);
    }
  }
};

#define ATTENTION(NAME, PIECES, CROWD, ...)                                                                      \
  extern "C" __global__ void __cluster_dims__(PIECES, 1, 1) __launch_bounds__(GROUP + 32, CROWD)                 \
      NAME(const __grid_constant__ TensorMap entries, const __grid_constant__ Context context) {                 \
    Attention<__VA_ARGS__>::run(&entries, context);                                                              \
  }
constexpr int USUAL = HEAD_DIM == 128 ? 2 : 3;  // blocks on a multiprocessor, as registers allow
ATTENTION(attend_1, 1, USUAL, 1)
ATTENTION(attend_2, 2, USUAL, 2)
ATTENTION(attend_4, 4, USUAL, 4)
ATTENTION(attend_8, 8, USUAL, 8)
ATTENTION(attend_16, 16, USUAL, 16)
ATTENTION(attend_crowd, 1, HEAD_DIM == 128 ? 2 : 4, 1, true)
