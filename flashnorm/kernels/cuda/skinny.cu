// A linear for few rows of x, with all that surrounds it: out = residual + multiplier · act((x Wᵀ)/RMS(x) + bias), at the
// speed at which W can be read.
//
// A cluster of SPLIT blocks takes ROWS rows of W, each block its part of K. One thread streams tiles of 64 columns of W
// and of all of x through a ring (TMA); every warp multiplies some of those rows, half a tile wide, by all of x (mma). The
// sums of the halves, and of the cluster's blocks, meet in shared memory and are added up in a fixed order; so is the sum
// of squares, from what the warps read anyway. A static W is asked for before the wait for the kernel in front: while
// that one still runs, the ring fills.
// Macros: those of ring.cuh (SLOT: a tile of W and one of x), ROWS (a power of two), TILES (of eight rows of x), SPLIT,
// NORM, WIDE (outputs are fp32), GATED, ACTIVATION, HALF, IS_BF16.

struct Problem {
    const u16 *bias, *residual;  // null: there is none
    void* out;
    long long residual_stride, out_stride;  // elements
    int M, N, K;                            // N: outputs
    float eps, multiplier;
    int static_weight;  // nothing that may still run writes W: it need not wait
};

constexpr int BLOCK_K = 64, ROW_BYTES = 2 * BLOCK_K;
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;  // of a cluster; with GATED their gates come first, then as many of up
constexpr int OWN = OUTPUTS / SPLIT;              // that a block finishes
constexpr int HALVES = 2, GROUPS = WARPS / HALVES;  // of a tile's columns, and of its rows: a warp for each of both
constexpr int SLABS = ROWS / 16 / GROUPS;           // of 16 rows, of a warp
constexpr int SQUARED = (TILES + GROUPS - 1) / GROUPS;  // tiles of x whose squares a warp takes
constexpr int X_ROWS = 8 * TILES, W_BYTES = ROWS * ROW_BYTES;
constexpr int PITCH = ROWS + 8;  // lanes that leave sums meet different banks
static_assert(SLOT == W_BYTES + X_ROWS * ROW_BYTES, "another size than Python's");
static_assert(ROWS == SLABS * GROUPS * 16 && OUTPUTS % 8 == 0 && OUTPUTS % SPLIT == 0, "does not divide");

struct alignas(1024) Shared {
    Ring ring;  // of tiles as the swizzle of 128 bytes leaves them
    float sums[HALVES][X_ROWS][PITCH], squares[HALVES][X_ROWS];
};

// The steps of 64 columns that are this block's.
struct Steps {
    int first, last;
    __device__ __forceinline__ explicit Steps(int K) {
        const int all = (K + BLOCK_K - 1) / BLOCK_K, rank = blockIdx.x % SPLIT;
        first = all * rank / SPLIT, last = all * (rank + 1) / SPLIT;
    }
};

__device__ __forceinline__ int first_output() { return blockIdx.x / SPLIT * OUTPUTS; }

__device__ __forceinline__ void ask_weights(Ring& ring, int slot, int step, const TensorMap* w, const Problem& problem) {
    barrier_expect(&ring.full[slot], SLOT);  // x included
    load_tile(ring.slots[slot], w, step * BLOCK_K, first_output(), &ring.full[slot]);
    if (GATED)
        load_tile(ring.slots[slot] + W_BYTES / 2, w, step * BLOCK_K, problem.N + first_output(), &ring.full[slot]);
}

__device__ __forceinline__ void produce(Ring& ring, const TensorMap* x, const TensorMap* w, const Problem& problem) {
    const Steps steps(problem.K);
    prefetch_map(w);
    prefetch_map(x);
    const int early = problem.static_weight ? min(STAGES, steps.last - steps.first) : 0;
    for (int slot = 0; slot < early; slot++) ask_weights(ring, slot, steps.first + slot, w, problem);
    wait_for_predecessor();
    launch_dependents();
    Cursor at;
    for (int step = steps.first; step < steps.last; step++, at.advance()) {
        if (step - steps.first >= early) {
            barrier_wait(&ring.empty[at.slot], at.phase ^ 1);
            ask_weights(ring, at.slot, step, w, problem);
        }
        load_tile(ring.slots[at.slot] + W_BYTES, x, step * BLOCK_K, 0, &ring.full[at.slot]);
    }
}

// Of eight rows, the one that four lanes of a warp take: lanes that read together then find all banks.
__device__ __forceinline__ int row_of(int i) { return i / 2 + i % 2 * 4; }

// A warp's part of all products, and of some squares: of every GROUPS tiles of x each warp takes one.
struct Sums {
    float products[SLABS][TILES][4] = {}, squares[SQUARED] = {};

    // `w`, `x`: where this lane's sixteen bytes lie in the first eight rows. Returns what all its loads have made.
    __device__ __forceinline__ u32 add(const char* w, const char* x, int group) {
        uint4 rows[SLABS][2];
        u32 read = 0;
#pragma unroll
        for (int i = 0; i < 2 * SLABS; i++) {
            rows[i / 2][i % 2] = *(const uint4*)(w + i * 8 * ROW_BYTES);
            read ^= rows[i / 2][i % 2].x;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint4 eight = *(const uint4*)(x + tile * 8 * ROW_BYTES);
            read ^= eight.x;
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const uint4 &low = rows[slab][0], &high = rows[slab][1];
                multiply(products[slab][tile], make_uint4(low.x, high.x, low.y, high.y), eight.x, eight.y);
                multiply(products[slab][tile], make_uint4(low.z, high.z, low.w, high.w), eight.z, eight.w);
            }
        }
#pragma unroll
        for (int i = 0; NORM && i < SQUARED; i++) {
            const uint4 eight = *(const uint4*)(x + min(i * GROUPS + group, TILES - 1) * 8 * ROW_BYTES);
            squares[i] = add_squares(eight, squares[i]);
            read ^= eight.x;
        }
        return read;
    }
};

__device__ __forceinline__ void consume(Shared& shared, const Problem& problem) {
    const int warp = threadIdx.x / WARP, half = warp / GROUPS, group = warp % GROUPS;
    const int lane = threadIdx.x % WARP, row = row_of(lane / 4), third = lane % 4;
    const int offset = row * ROW_BYTES + ((half * 4 + third) ^ row) * 16, first = group * SLABS * 16;
    const Steps steps(problem.K);
    Sums sums;
    Cursor at;
#pragma unroll 1
    for (int step = steps.first; step < steps.last; step++) {
        const char* slot = await(shared.ring, at);
        done(shared.ring, at, sums.add(slot + first * ROW_BYTES + offset, slot + W_BYTES + offset, group));
    }
#pragma unroll
    for (int i = 0; i < SLABS * TILES * 4; i++) {
        const int slab = i / 4 / TILES, tile = i / 4 % TILES, m = tile * 8 + third + i % 2 * 4;
        shared.sums[half][m][first + slab * 16 + i % 4 / 2 * 8 + row] = sums.products[slab][tile][i % 4];
    }
#pragma unroll
    for (int i = 0; NORM && i < SQUARED; i++) {
        float squares = sums.squares[i];
        squares += __shfl_xor_sync(~0u, squares, 1);
        squares += __shfl_xor_sync(~0u, squares, 2);
        const int tile = i * GROUPS + group;
        if (third == 0 && tile < TILES) shared.squares[half][tile * 8 + row] = squares;
    }
}

// The sum over the cluster's blocks of what lies at the same place in each, in the order of their ranks.
__device__ __forceinline__ float of_cluster(const float* own) {
    float sum = 0;
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) sum += SPLIT > 1 ? of_block(own, rank) : *own;
    return sum;
}

__device__ __forceinline__ float both_halves(const float* first, const float* second) {
    return of_cluster(first) + of_cluster(second);
}

__device__ __forceinline__ void finish(const Shared& shared, const Problem& problem) {
    wait_for_predecessor();  // which may have written the residual
    const auto product = [&](int m, int row) { return both_halves(&shared.sums[0][m][row], &shared.sums[1][m][row]); };
    for (int i = threadIdx.x; i < OWN * problem.M; i += THREADS) {
        const int m = i / OWN, row = blockIdx.x % SPLIT * OWN + i % OWN, n = first_output() + row;
        if (n >= problem.N) continue;
        float scale = 1;
        if (NORM) scale = rsqrtf(both_halves(&shared.squares[0][m], &shared.squares[1][m]) / problem.K + problem.eps);
        float value = product(m, row) * scale;
        if (problem.bias) value += widened(problem.bias[n]);
        if (GATED) value = activated(value) * (product(m, OUTPUTS + row) * scale);
        value *= problem.multiplier;
        if (problem.residual) value += widened(problem.residual[m * problem.residual_stride + n]);
        const long long at = m * problem.out_stride + n;
        if (WIDE)
            ((float*)problem.out)[at] = value;
        else
            ((u16*)problem.out)[at] = packed(value, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, 2)
    skinny(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const Problem problem) {
    extern __shared__ char memory[];
    Shared& shared = *(Shared*)(memory + (1024 - address(memory) % 1024) % 1024);
    if (threadIdx.x == 0) shared.ring.init();
    __syncthreads();
    if (threadIdx.x < THREADS) {
        consume(shared, problem);
    } else if (threadIdx.x == THREADS) {
        produce(shared.ring, &x, &w, problem);
    }
    __syncwarp();
    sync_cluster();
    if (threadIdx.x < THREADS) finish(shared, problem);
    __syncwarp();
    if (SPLIT > 1) sync_cluster();  // nobody leaves while others read
}
