// What few.cu and chain.cu share: numbers of bfloat16, and attention of one step's token over sixteen tokens of its context.

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float wide(u16 half) { return __uint_as_float((u32)half << 16); }
DEVICE u16 half(float v) { return (u16)pack(v, 0.0f); }
DEVICE float rounded(float v) { return wide(half(v)); }

BOTH constexpr int over(int a, int b) { return (a + b - 1) / b; }
BOTH constexpr int most(int a, int b) { return a > b ? a : b; }

constexpr int GROUP = 128, GROUP_WARPS = GROUP / 32;  // threads of chain.cu that compute
constexpr int SHARE = HEADS / KV_HEADS, QUERIES = HEADS * HEAD_DIM, QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int QUERY_STRIDE = HEAD_DIM + 8, FOUND_STRIDE = HEAD_DIM + 4;  // in shared memory: no bank twice
constexpr float LOG2E = 1.4426950408889634f, NOTHING = -3e38f;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "fits checks this");
static_assert(SHARE <= 8 && PAGE % 16 == 0, "fits checks this");

// One head of the step's token: norm and rotation. Two values that turn together are HEAD_DIM / 2 apart.
constexpr int EACH = HEAD_DIM / 64, HALF = HEAD_DIM / 2;
struct Angle {
  float cosine[EACH], sine[EACH];
  DEVICE void load(const u16* cos, const u16* sin, int position, int lane) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      i64 at = (i64)position * HEAD_DIM + lane * EACH + e;
      cosine[e] = wide(cos[at]), sine[e] = wide(sin[HALF + at]);
    }
  }
};
struct OneHead {
  float a[EACH], b[EACH];
  template <class Read>
  DEVICE void load(const u16* from, int lane, Read read) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) a[e] = wide(read(from + lane * EACH + e)), b[e] = wide(read(from + HALF + lane * EACH + e));
  }
  DEVICE void turn(u16* to, u16* also, const u16* norm, const Angle& angle, int lane) {
    if (QK_NORM) {
      float squares = 0;
#pragma unroll
      for (int e = 0; e < EACH; ++e) squares += a[e] * a[e] + b[e] * b[e];
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
};

// Sixteen tokens of a context, as the tensor cores want them: lane = 4 g + t.
struct Block {
  uint4x keys[2][HEAD_DIM / 32], values[HEAD_DIM / 64][4];

  DEVICE void load_keys(const u16* first, int g, int t) {
    const u16* at = first + g * HEAD_DIM + t * 8;
#pragma unroll
    for (int o = 0; o < 2; ++o)
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 32; ++d) keys[o][d] = read16(at + o * 8 * HEAD_DIM + d * 32);
  }
  DEVICE void load_values(const u16* first, int valid, int g, int t) {
    const u16* at = first + 2 * t * HEAD_DIM + g * 8;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 64; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int token = e / 2 * 8 + e % 2;  // after 2 t
        values[d][e] = {0, 0, 0, 0};    // what lies behind the end may be anything, also no number
        if (2 * t + token < valid) values[d][e] = read16(at + token * HEAD_DIM + d * 64);
      }
  }
  // Put this step's key and value where the block was loaded without them.
  DEVICE void renew_key(int token, const u16* key, int g, int t) {
#pragma unroll
    for (int o = 0; o < 2; ++o)
      if (o * 8 + g == token)
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 32; ++d) keys[o][d] = tile16((const char*)(key + d * 32 + t * 8));
  }
  DEVICE void renew_value(int token, const u16* value, int g, int t) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (2 * t + e / 2 * 8 + e % 2 == token)
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 64; ++d) values[d][e] = tile16((const char*)(value + d * 64 + g * 8));
  }
};

// What a warp found of the queries that share a key head: the largest score, and sums relative to it.
struct Found {
  float best = NOTHING, total = 0, value[HEAD_DIM / 64][8][2] = {};

  // With one more block, whose tokens begin at first; the next one is loaded as soon as there is room for it.
  template <class Keys, class Values>
  DEVICE void look(
      Block& b, const uint4x (&query)[HEAD_DIM / 32], int first, int end, int t, Keys load_keys, Values load_values) {
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
    load_keys();
    float higher = best;
#pragma unroll
    for (int o = 0; o < 2; ++o)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        bool counts = first + o * 8 + 2 * t + e < end;
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
        float c[4] = {value[d][i][0] * shrink, value[d][i][1] * shrink, 0, 0};
        mma(c, early, 0, late, 0, permute(v[0], v[1], how), permute(v[2], v[3], how));
        value[d][i][0] = c[0], value[d][i][1] = c[1];
      }
    load_values();
  }

  // For the other warps: the sums of each head in its line of FOUND_STRIDE floats.
  DEVICE void leave(float* lines, float* peaks, float* totals, int g, int t) {
    total += across(total, 1);
    total += across(total, 2);
    if (g < SHARE) {
      if (t == 0) peaks[g] = best, totals[g] = total;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 64; ++d)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int i = 0; i < 8; i += 4)
            *(float4x*)(lines + g * FOUND_STRIDE + d * 64 + (2 * t + e) * 8 + i) = {
                value[d][i][e], value[d][i + 1][e], value[d][i + 2][e], value[d][i + 3][e]};
    }
  }
};

// One value of a head, from what all warps left.
template <int WARPS_>
DEVICE float joined(const float* lines, const float (*peaks)[8], const float (*totals)[8], int head, int at, float& peak, float& sum) {
  float value = 0;
  peak = NOTHING, sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS_; ++w) peak = fmaxf(peak, peaks[w][head]);
#pragma unroll
  for (int w = 0; w < WARPS_; ++w) {
    float weight = power2(peaks[w][head] - peak);
    sum += totals[w][head] * weight;
    value += lines[(w * SHARE + head) * FOUND_STRIDE + at] * weight;
  }
  return value;
}
