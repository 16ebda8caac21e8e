// The attention stage of few.cu: contexts are cut into pieces, a block has one piece of one sequence and key head at a time.

struct Attention : Products {
  using Products::Products;

  // Divide the contexts: the same in every block. One warp, a lane for each sequence.
  DEVICE void plan() {
    int length = lane < step.rows ? step.positions[lane] + 1 : 0, all = length;
    for (int lanes = 1; lanes < 32; lanes *= 2) all += across(all, lanes);
    int limit = over(step.rows * KV_HEADS, GRID) * GRID;
    constexpr int PIECES = GRID < 128 ? GRID : 128;  // as many as join can look at
    int chunk = most(CHUNK, over(over(all * KV_HEADS, PIECES), 128) * 128), pieces, items;
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
      join(to, part - it.begin / s.chunk * PART, it.begin / s.chunk, pieces);
    }
    meet();  // the next item writes to the same places
  }

  // What attention found for a sequence and key head, from all its pieces: every block that has a piece joins some of the values.
  // Neighbouring threads share a value, so that each looks at no more than four of 128 pieces, and at all of them at once. The
  // pieces follow each other and are not more than there are blocks: no block waits for a piece that it has yet to begin.
  DEVICE void join(u16* to, const float* parts, int piece, int pieces) {
    int lanes = 1;
    while (4 * lanes < pieces) lanes *= 2;
    int every = SHARE * HEAD_DIM, share = over(every, pieces), mine = thread % lanes;
#pragma unroll 1
    for (int turn = 0; turn < over(share * lanes, THREADS); ++turn) {
      int inside = (turn * THREADS + thread) / lanes, at = piece * share + inside;
      bool counts = inside < share && at < every;
      const float *from = parts + at, *mark = parts + every + at / HEAD_DIM * 2;
      float value[4], peak[4], sum[4];
      u32 missing;
      do {
        missing = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int p = mine + j * lanes;
          value[j] = sum[j] = 0, peak[j] = NOTHING;
          if (counts && p < pieces)
            value[j] = read_float(from + p * PART), peak[j] = read_float(mark + p * PART), sum[j] = read_float(mark + p * PART + 1);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
          missing |= __float_as_uint(value[j]) == ABSENT || __float_as_uint(peak[j]) == ABSENT || __float_as_uint(sum[j]) == ABSENT;
      } while (missing && again());
      meet_warp();
      float best = fmaxf(fmaxf(peak[0], peak[1]), fmaxf(peak[2], peak[3])), total = 0, found = 0;
      for (int apart = 1; apart < lanes; apart *= 2) best = fmaxf(best, across(best, apart));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float weight = power2(peak[j] - best);
        found += value[j] * weight, total += sum[j] * weight;
      }
      for (int apart = 1; apart < lanes; apart *= 2) found += across(found, apart), total += across(total, apart);
      if (counts && mine == 0) to[at] = half(found / total);
    }
  }
};
