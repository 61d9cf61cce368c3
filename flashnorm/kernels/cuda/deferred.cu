// The deferred norm as one warp-specialised matrix multiplication: out = (x Wᵀ) ⊙ 1/RMS(x) + bias.
//
// One warp streams tiles of x and W into a ring in shared memory (TMA); CONSUMERS warpgroups multiply them (wgmma) and
// write the tile of out (stmatrix, TMA). Blocks are persistent: while one tile is written, the next is being loaded.
//
// Built for one configuration at a time, from these macros (see tma_gemm.py):
//   BLOCK_M, BLOCK_N   tile of out; BLOCK_M is a multiple of 64 * CONSUMERS, BLOCK_N one of 8 (of 16 with GATED)
//   STAGES             tiles in the ring; a tile is 64 wide along K, 128 bytes, one row of the 128-byte swizzle
//   NORM               NONE: out = x Wᵀ + bias
//                      INSIDE: consumers add up the squares of the tile of x that their wgmma is just reading
//                      BESIDE: the grid's first blocks, on multiprocessors that the tiles leave idle, take 1/RMS of
//                      every row; the others wait for a tile's rows only before its scale
//   ROWS               rows of x that a warp beside reads at once
//   GATED, ACTIVATION  out = act(gate) ⊙ up, where W holds the rows of gate, then those of up
//   HALF, IS_BF16, wgmma(...)   the element type, and the instruction for BLOCK_N (see wgmma.py)

enum { NONE, INSIDE, BESIDE };

struct Problem {
    int M, N, K;
    float eps;
    int group;     // tiles of rows that are walked together, for the L2 cache
    int prefetch;  // steps of W asked into the L2 before the wait for the kernel before this one
    int x_rows;    // of one load of x: BLOCK_M, or M where that is less
    int beside;    // blocks that take 1/RMS, before those that multiply
    // With BESIDE: (M,) for 1/RMS, and counters that are zero before and after each launch: rows whose scale is there,
    // one counter for each `span` rows, a multiple of BLOCK_M; and blocks that have fetched all they need.
    float* scale;
    u32 *ready, *fetched;
    int span;
};

constexpr int BLOCK_K = 64, ROW_BYTES = 2 * BLOCK_K;
constexpr int X_BYTES = BLOCK_M * ROW_BYTES, W_BYTES = BLOCK_N * ROW_BYTES;
constexpr int SLABS = BLOCK_M / CONSUMERS / 64;  // of 64 rows, the height of a wgmma, for each consumer
constexpr int OUT_N = GATED ? BLOCK_N / 2 : BLOCK_N;
// Columns of out that are staged and stored together, as wide as a swizzle pattern allows.
constexpr int CHUNK = OUT_N % 64 == 0 ? 64 : OUT_N % 32 == 0 ? 32 : OUT_N % 16 == 0 ? 16 : 8;
// Registers of a thread at launch, of which the producers leave the consumers some.
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS), WARPS = THREADS / WARP;
constexpr int LAUNCH_REGISTERS = 168, PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * LAUNCH_REGISTERS, "more registers than at launch");

struct Shared {
    alignas(1024) char x[STAGES][X_BYTES];
    alignas(1024) char w[STAGES][W_BYTES];
    alignas(1024) char staging[CONSUMERS][2][64 * CHUNK * 2];
    float scale[2][BLOCK_M];
    u64 full[STAGES], empty[STAGES], scale_full[2], scale_empty[2];
};

// ---- Where a block is in its work ---------------------------------------------------------------------------------

// The place in the ring, and the parity of the phase that its barrier completes next.
struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ __forceinline__ void step() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// A block's tiles, one after another; producer and consumers walk them in the same order.
struct Tiles {
    int rows, columns, group, stride, index, row, column;

    __device__ Tiles(const Problem& problem) : group(problem.group), index(blockIdx.x - problem.beside) {
        rows = (problem.M + BLOCK_M - 1) / BLOCK_M;
        columns = (problem.N + OUT_N - 1) / OUT_N;
        stride = gridDim.x - problem.beside;
        place();
    }
    __device__ __forceinline__ bool left() const { return index < rows * columns; }
    __device__ __forceinline__ void step() { index += stride, place(); }
    __device__ __forceinline__ void place() {
        const int first = index / (group * columns) * group, height = min(rows - first, group);
        row = (first + index % (group * columns) % height) * BLOCK_M;
        column = index % (group * columns) / height * OUT_N;
    }
};

__device__ __forceinline__ float inverse_rms(float squares, const Problem& problem) {
    return rsqrtf(squares / problem.K + problem.eps);
}

__device__ __forceinline__ int steps_of(const Problem& problem) { return (problem.K + BLOCK_K - 1) / BLOCK_K; }

// ---- The producer -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void produce(Shared& shared, const TensorMap* x, const TensorMap* w,
                                        const Problem& problem) {
    const int steps = steps_of(problem);
    Ring ring;
    Tiles tiles(problem);
    prefetch_map(x);
    prefetch_map(w);
    for (int step = 0; step < min(problem.prefetch, steps); step++)
        for (int part = 0; part < (GATED ? 2 : 1); part++)
            prefetch_tile(w, step * BLOCK_K, tiles.column + part * problem.N);
    wait_for_predecessor();
    launch_dependents();
    for (; tiles.left(); tiles.step())
        for (int step = 0; step < steps; step++, ring.step()) {
            u64* full = &shared.full[ring.slot];
            barrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
            barrier_expect(full, problem.x_rows * ROW_BYTES + W_BYTES);
            load_tile(shared.x[ring.slot], x, step * BLOCK_K, tiles.row, full);
            load_tile(shared.w[ring.slot], w, step * BLOCK_K, tiles.column, full);
            if (GATED)
                load_tile(shared.w[ring.slot] + W_BYTES / 2, w, step * BLOCK_K, problem.N + tiles.column, full);
        }
}

// ---- BESIDE: blocks that take 1/RMS, and the warp of every other block that fetches it ----------------------------

// A warp's rows on their way through shared memory, ROWS at a time, in pieces of 4096 bytes. The copy engine keeps more
// in flight than loads into registers do, and fetches tiles faster than plain runs of bytes.
constexpr int BOXES = 4096 / (ROWS * ROW_BYTES), PIECE = BOXES * BLOCK_K, GROUPS = ROWS / 4;
constexpr int PIECES = (sizeof(Shared) - 1024) / WARPS / (ROWS * PIECE * 2 + 8);
static_assert(PIECES > 0, "no room for the rows");

struct Rows {
    alignas(1024) u16 ring[WARPS][PIECES][ROWS * PIECE];
    u64 full[WARPS][PIECES];
};
static_assert(sizeof(Rows) <= sizeof(Shared), "more room than there is");

// Where a warp is in its rows.
struct Piece {
    int row, k = 0, stride;
    __device__ __forceinline__ Piece(const Problem& problem)
        : row(ROWS * (blockIdx.x + threadIdx.x / WARP * problem.beside)), stride(ROWS * problem.beside * WARPS) {}
    __device__ __forceinline__ bool last(const Problem& problem) const { return k + PIECE >= problem.K; }
    __device__ __forceinline__ void step(const Problem& problem) {
        const bool done = last(problem);
        row += done ? stride : 0;
        k = done ? 0 : k + PIECE;
    }
    // What lies outside of x comes as zeros.
    __device__ __forceinline__ void bring(const Problem& problem, const TensorMap* rows, u16* to, u64* full) {
        if (row >= problem.M) return;
        barrier_expect(full, ROWS * PIECE * 2);
        for (int box = 0; box < BOXES; box++) load_tile(to + box * ROWS * BLOCK_K, rows, k + box * BLOCK_K, row, full);
        step(problem);
    }
};

// The scales of ROWS rows for all to see. Eight lanes share a row, whose parts the swizzle moves only among them.
__device__ __forceinline__ void publish(const Problem& problem, int row, const float* sums) {
    const int lane = threadIdx.x % WARP, rows = min(ROWS, problem.M - row);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        float sum = sums[i];
        for (int apart = 1; apart < 8; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        const int here = i * 4 + lane / 8;
        if (lane % 8 == 0 && here < rows) problem.scale[row + here] = inverse_rms(sum, problem);
    }
    __syncwarp();
    if (lane == 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(problem.ready + row / problem.span), "r"(rows)
                     : "memory");
}

// scale[m] = 1/RMS of row m of x; low rows first, because they are needed first.
__device__ __forceinline__ void take_scales(Rows& shared, const TensorMap* rows, const Problem& problem) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64* full = shared.full[warp];
    u16(*ring)[ROWS * PIECE] = shared.ring[warp];
    if (lane == 0) {
        prefetch_map(rows);
        for (int slot = 0; slot < PIECES; slot++) barrier_init(&full[slot], 1);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    Piece piece(problem), ahead(problem);
    wait_for_predecessor();
    launch_dependents();
    if (lane == 0)
        for (int slot = 0; slot < PIECES; slot++) ahead.bring(problem, rows, ring[slot], &full[slot]);
    float sums[GROUPS] = {};
    int slot = 0;
    u32 phase = 0;
    for (; piece.row < problem.M; piece.step(problem)) {
        barrier_wait(&full[slot], phase);
#pragma unroll
        for (int i = 0; i < BOXES * GROUPS; i++)
            sums[i % GROUPS] = add_squares(((uint4*)ring[slot])[i * WARP + lane], sums[i % GROUPS]);
        u32 read = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) read ^= __float_as_uint(sums[i]);
        loads_have_come(read);
        __syncwarp();
        if (lane == 0) ahead.bring(problem, rows, ring[slot], &full[slot]);
        if (++slot == PIECES) slot = 0, phase ^= 1;
        if (!piece.last(problem)) continue;
        publish(problem, piece.row, sums);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) sums[i] = 0;
    }
}

__device__ __forceinline__ void wait_for_rows(const Problem& problem, int row) {
    const u32 span = row / problem.span, rows = min(problem.span, problem.M - (int)span * problem.span);
    u32 ready = 0;
    for (;; __nanosleep(50)) {  // the consumers' warps need the issue slots
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(problem.ready + span) : "memory");
        if (ready >= rows) return;
    }
}

// One warp brings the scales of the block's tiles to shared memory, as soon as they are there: long before they are
// needed. The blocks beside come first in the grid and wait for no other block of it, so this ends.
__device__ __forceinline__ void fetch_scales(Shared& shared, const Problem& problem) {
    const int lane = threadIdx.x % WARP;
    u32 buffer = 0, phase = 0;
    wait_for_predecessor();  // else the counters may still be those of an earlier launch
    for (Tiles tiles(problem); tiles.left(); tiles.step()) {
        barrier_wait(&shared.scale_empty[buffer], phase ^ 1);
        wait_for_rows(problem, tiles.row);
        for (int i = lane; i < BLOCK_M; i += WARP)
            shared.scale[buffer][i] = tiles.row + i < problem.M ? __ldcg(problem.scale + tiles.row + i) : 0;
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.scale_full[buffer]);
        buffer ^= 1, phase ^= buffer == 0;
    }
    // The last block to have fetched puts the counters back, for the next launch that uses them.
    __syncwarp();
    if (lane == 0 && atomicAdd(problem.fetched, 1) == gridDim.x - problem.beside - 1) {
        for (int span = 0; span * problem.span < problem.M; span++) problem.ready[span] = 0;
        *problem.fetched = 0;
    }
}

// ---- The consumers ------------------------------------------------------------------------------------------------

// Two neighbouring outputs of one row.
__device__ __forceinline__ u32 output(const float* products, int at, float scale, const float* bias) {
    float pair[2];
    for (int i = 0; i < 2; i++) {
        pair[i] = products[at + i] * scale;
        pair[i] = GATED ? activated(pair[i]) * (products[at + i + BLOCK_N / 4] * scale) : pair[i] + bias[i];
    }
    return packed(pair[0], pair[1]);
}

// A slab's squares, eight lanes a row and 16 bytes a lane: four groups of four rows for each warp of the consumer. The
// swizzle moves bytes only within a row.
struct Squares {
    float sums[SLABS][4] = {};
    uint4 values[SLABS][4];

    __device__ __forceinline__ void load(const char* slabs) {
        const uint4* rows = (const uint4*)slabs + threadIdx.x % WARPGROUP;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[slab][i] = rows[slab * 64 * 8 + i * WARPGROUP];
    }
    __device__ __forceinline__ void add() {
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[slab][i] = add_squares(values[slab][i], sums[slab][i]);
    }
    __device__ __forceinline__ void finish(float* scale, const Problem& problem) {
        const int lane = threadIdx.x % WARPGROUP;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = sums[slab][i];
                for (int apart = 1; apart < 8; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
                if (lane % 8 == 0) scale[slab * 64 + (i * WARPGROUP + lane) / 8] = inverse_rms(sum, problem);
                sums[slab][i] = 0;
            }
    }
};

__device__ __forceinline__ void store_slab(Shared& shared, const float* products, const TensorMap* out,
                                           const void* bias, int consumer, float upper, float lower, int row,
                                           int column, int N, int& stores) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int chunk = 0; chunk < OUT_N / CHUNK; chunk++, stores++) {
        char* staging = shared.staging[consumer][stores % 2];
        if (threadIdx.x % WARPGROUP == 0) stores_have_read<1>();  // the store before the last, from this same buffer
        sync_warpgroup(1 + consumer);
#pragma unroll
        for (int block = 0; block < CHUNK / 8; block++) {
            const int n = chunk * CHUNK + block * 8, at = n / 2, first = column + n + 2 * (lane % 4);
            float offsets[2] = {0, 0};
            if (bias)
                for (int i = 0; i < 2; i++)
                    if (first + i < N) offsets[i] = widened(((const u16*)bias)[first + i]);
            const u32 above = output(products, at, upper, offsets), below = output(products, at + 2, lower, offsets);
            constexpr int units = CHUNK / 8;  // of 16 bytes, in a row of the chunk
            const int staged = warp * 16 + lane % 16, unit = block ^ (staged / (8 / units) % units);
            asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(
                             address(staging + staged * CHUNK * 2 + unit * 16)),
                         "r"(above), "r"(below) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync_warpgroup(1 + consumer);
        if (threadIdx.x % WARPGROUP == 0) store_tile(out, column + chunk * CHUNK, row, staging);
    }
}

__device__ __forceinline__ void consume(Shared& shared, int consumer, const TensorMap* out, const void* bias,
                                        const Problem& problem) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, steps = steps_of(problem);
    const int first = consumer * SLABS * 64;
    Ring ring;
    int stores = 0;
    u32 buffer = 0, phase = 0;
    float products[SLABS][BLOCK_N / 2];
    Squares squares;
    for (Tiles tiles(problem); tiles.left(); tiles.step()) {
        int before = -1;
        for (int step = 0; step < steps; step++) {
            barrier_wait(&shared.full[ring.slot], ring.phase);
            const char* slabs = shared.x[ring.slot] + first * ROW_BYTES;
            const u64 x = descriptor(slabs), w = descriptor(shared.w[ring.slot]);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < BLOCK_K / 16; k++)
#pragma unroll
                for (int slab = 0; slab < SLABS; slab++)
                    wgmma(products[slab], x + (slab * 64 * ROW_BYTES + k * 32) / 16, w + k * 32 / 16, step + k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (NORM == INSIDE) squares.load(slabs);
            if (before >= 0) {
                wgmma_wait<1>();  // the step before has been multiplied; this one stays in flight
                release(&shared.empty[before]);
            }
            if (NORM == INSIDE) squares.add();
            before = ring.slot;
            ring.step();
        }
        wgmma_wait<0>();
        release(&shared.empty[before]);
        if (NORM == INSIDE) {
            squares.finish(shared.scale[0] + first, problem);
            sync_warpgroup(1 + consumer);
        }
        if (NORM == BESIDE) barrier_wait(&shared.scale_full[buffer], phase);
        const float* scale = shared.scale[buffer] + first + warp * 16 + lane / 4;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const float upper = NORM == NONE ? 1 : scale[slab * 64], lower = NORM == NONE ? 1 : scale[slab * 64 + 8];
            store_slab(shared, products[slab], out, bias, consumer, upper, lower, tiles.row + first + slab * 64,
                       tiles.column, problem.N, stores);
        }
        if (NORM == BESIDE) {
            release(&shared.scale_empty[buffer]);
            buffer ^= 1, phase ^= buffer == 0;
        }
    }
    if (threadIdx.x % WARPGROUP == 0) stores_have_read<0>();
}

extern "C" __global__ void __maxnreg__(LAUNCH_REGISTERS)
    deferred(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
             const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap rows, const void* bias,
             const Problem problem) {
    extern __shared__ char memory[];
    char* aligned = memory + (1024 - address(memory) % 1024) % 1024;
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (NORM == BESIDE && blockIdx.x < problem.beside) return take_scales(*(Rows*)aligned, &rows, problem);
    Shared& shared = *(Shared*)aligned;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            barrier_init(&shared.full[slot], 1);
            barrier_init(&shared.empty[slot], 4 * CONSUMERS);
        }
        for (int buffer = 0; buffer < 2; buffer++) {
            barrier_init(&shared.scale_full[buffer], 1);
            barrier_init(&shared.scale_empty[buffer], 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (warpgroup == 0) {
        if (CONSUMERS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0)
            produce(shared, &x, &w, problem);
        else if (NORM == BESIDE && threadIdx.x / WARP == 1)
            fetch_scales(shared, problem);
    } else {
        if (CONSUMERS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        if (threadIdx.x % WARPGROUP == 0) prefetch_map(&out);
        consume(shared, warpgroup - 1, &out, bias, problem);
    }
}
