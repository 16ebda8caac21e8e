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

  DEVICE i64 slot_of(const Item& it, int token) {
    return (i64)step.tables[it.row * step.width + token / PAGE] * PAGE + token % PAGE;
  }
  DEVICE const u16* keys_at(const Layer& layer, const Item& it, i64 slot) {
    return layer.entries + ((i64)it.head * step.slots + slot) * HEAD_DIM;
  }
  DEVICE const u16* values_at(const Layer& layer, const Item& it, i64 slot) {
    return layer.entries + ((i64)(KV_HEADS + it.head) * step.slots + slot) * HEAD_DIM;
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
    a.angle.load(step.cos, step.sin, a.it.length - 1, lane);
    a.slot = slot_of(a.it, a.it.length - 1);
    int first = a.it.begin + warp * 16;
    if (first < a.it.end) {
      i64 slot = slot_of(a.it, first);
      a.block.load_keys(keys_at(layer, a.it, slot), g, t);
      a.block.load_values(values_at(layer, a.it, slot), a.it.end - first, g, t);
    }
  }

  DEVICE void attend(const Layer& layer, int number, Ahead& ahead, int twin) {
    Item& it = ahead.it;
    Block& b = ahead.block;
    int position = it.length - 1, blocks = over(it.end - it.begin, 16);
    const u16* qkv = step.qkv + (twin * MOST_ROWS + it.row) * QKV;
    bool last = it.end == it.length;
    auto turned = [&](const u16* from, u16* to, u16* also, const u16* norm, const Angle& angle) {
      OneHead head;
      head.load(from, lane, [&](const u16* at) { return await_half(at); });
      meet_warp();
      head.turn(to, also, norm, angle, lane);
    };
#pragma unroll 1
    for (int j = warp; j < SHARE + 2; j += WARPS) {
      if (j < 2 && last) {
        const u16* from = qkv + (HEADS + j * KV_HEADS + it.head) * HEAD_DIM;
        u16* to = layer.entries + ((i64)(j * KV_HEADS + it.head) * step.slots + ahead.slot) * HEAD_DIM;
        if (j == 0) turned(from, to, s.fresh[0], layer.key_norm, ahead.angle);
        else
#pragma unroll 1
          for (int i = lane; i < HEAD_DIM; i += 32) to[i] = s.fresh[1][i] = await_half(from + i);
      } else if (j >= 2) {
        const u16* from = qkv + (it.head * SHARE + j - 2) * HEAD_DIM;
        turned(from, s.query + (j - 2) * QUERY_STRIDE, nullptr, layer.query_norm, ahead.angle);
      }
    }
    meet();
    uint4x query[HEAD_DIM / 32];
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 32; ++d) {
      query[d] = {0, 0, 0, 0};
      if (g < SHARE) query[d] = tile16((const char*)(s.query + g * QUERY_STRIDE + d * 32 + t * 8));
    }
    Found found;
    for (int block = warp; block < blocks; block += WARPS) {
      int first = it.begin + block * 16, next = first + WARPS * 16;
      bool more = block + WARPS < blocks;
      i64 slot = more ? slot_of(it, next) : 0;
      if (first <= position && position < first + 16) b.renew_key(position % 16, s.fresh[0], g, t), b.renew_value(position % 16, s.fresh[1], g, t);
      auto load_keys = [&] {
        if (more) b.load_keys(keys_at(layer, it, slot), g, t);
      };
      auto load_values = [&] {
        if (more) b.load_values(values_at(layer, it, slot), it.end - next, g, t);
      };
      found.look(b, query, first, it.end, t, load_keys, load_values);
    }
    float* all = (float*)s.scratch;
    found.leave(all + warp * SHARE * FOUND_STRIDE, s.peaks[warp], s.totals[warp], g, t);
    meet();
    int pieces = s.pieces[it.row];
    u16* to = step.attended + (twin * MOST_ROWS + it.row) * QUERIES + it.head * SHARE * HEAD_DIM;
    float* part = step.parts + (i64)(twin * ITEMS + number) * PART;
#pragma unroll 1
    for (int i = thread; i < SHARE * HEAD_DIM; i += THREADS) {
      int head = i / HEAD_DIM;
      float peak, sum, value = joined<WARPS>(all, s.peaks, s.totals, head, i % HEAD_DIM, peak, sum);
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
