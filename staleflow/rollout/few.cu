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
// (sequences / 8, rounded up), GRID (blocks), SHARED_MEMORY (bytes of a block), LONGEST_CUT and LONG_CUT (steps of a row that
// lie in the ring together), DOWN_SPLIT and DOWN_TILES (how the last product of a layer is divided: parts of its columns, and
// tiles of its rows for each block), CHUNK (least tokens of context that a block takes), MOST_ROWS (of the buffers), ITEMS (most
// pieces of context), WINDOW (slots of the ring under way), POLLED (whether blocks look at values, or meet at a barrier between
// any two stages), PATIENCE (how often a thread looks for what is not there) and TRACED (whether blocks write down when they
// passed which place).

struct Decoding : Attention {
  using Attention::Attention;

  DEVICE void begin() {
    if (warp == 0) {
      if (lane < ROWS) {
        int token = lane < step.rows ? step.given[lane] : 0;
        s.tokens[lane] = token < 0 ? (int)step.last[-1 - token] : token;
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
      layer_now = at;
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
        mark(15);
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
        mark(16);
        arrive(), wait();
        mark(17);
        clear(before, HIDDEN, block_here(), GRID);
        Job down = job_of<Down>(DOWN, p.gated, nullptr, layer.down_bias, DOWN_SPLIT == 1 ? between : nullptr, after, true);
        multiply<Down>(down, offset);
        if constexpr (DOWN_SPLIT > 1) {
          arrive(), wait();
          mark(18);
          down.residual = between, down.kind = OUT;
          for (int i = block_here() * THREADS + thread; i < p.rows * HIDDEN; i += GRID * THREADS) {
            int row = i / HIDDEN, output = i % HIDDEN;
            float sum = 0, already = early(down, output, row);
#pragma unroll
            for (int part = 0; part < DOWN_SPLIT; ++part) sum += read_float(p.sums + (part * ROWS + row) * HIDDEN + output);
            finish(down, output, row, sum, 0, already, 0);
          }
        }
        mark(19);
        between_stages();
        offset = next_offset(offset, Down::UNITS);
        kind = ++at < LAYERS ? QKV_ : HEAD;
      }
    }
    if (thread == 0) leave(p.meeting, GRID);
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
    Decoding(step, s, thread).run();
  }
}
