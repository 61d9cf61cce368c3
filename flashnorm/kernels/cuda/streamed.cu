// The deferred norm for one row: out = (W x)/RMS(x) + bias, at the speed at which W can be read.
//
// A block owns neighbouring rows of W. One thread streams them through a ring in shared memory, a chunk of CHUNK_K
// columns of ROWS rows in each slot, by bulk copies that leave the L2 first. All WARPS warps take their part of every
// chunk, in order, with their part of x in registers. Memory must not rest between the last chunk of one kernel and the
// first of the next, though x comes only after the former. So the next kernel is let in while the last chunks
// of this one are on their way, and a kernel that waits for x fills its ring, and asks what comes behind into the L2.
// Macros: those of ring.cuh, K, CHUNK_K (a multiple of 256 * WARPS), ROWS (a power of two), GATED, ACTIVATION, HALF,
// IS_BF16.

struct Problem {
    const u16 *x, *w;
    u16* out;
    const u16* bias;
    long long w_stride;
    int N;
    float eps;
    int prefetch;       // chunks behind the next one that are asked into the L2
    int pace;           // cycles for each KiB that is asked of memory
    int lead;           // chunks that are not asked for yet when the next kernel may start
    int static_weight;  // nothing that may still run writes W: it need not wait
};

constexpr int PARTS = GATED ? 2 : 1;  // rows of W for one output
constexpr int CHUNKS = (K + CHUNK_K - 1) / CHUNK_K;
constexpr int PITCH = K < CHUNK_K ? K : CHUNK_K;  // elements from row to row in a slot
constexpr int VECTORS = CHUNK_K / 8 / THREADS;    // of 16 bytes, of one thread in a row of a chunk
constexpr int GROUP = 32;                         // outputs that are finished at once
constexpr int RESIDENT = CHUNKS * VECTORS <= 8 ? 2 : 1;  // launches at a time; a longer x would leave its registers
static_assert(CHUNK_K % (8 * THREADS) == 0 && K % 8 == 0 && GROUP % ROWS == 0, "does not divide");
static_assert(ROWS * PITCH * 2 <= SLOT && ON_THE_WAY <= STAGES, "does not fit");

struct Shared {
    Ring ring;
    float sums[2][PARTS][GROUP][WARPS + 1], squares[WARPS];  // one more: lanes that add up meet different banks
};

// Neighbouring outputs of a block.
struct Share {
    int first, count;

    __device__ __forceinline__ explicit Share(int n) : first((long long)n * blockIdx.x / gridDim.x) {
        count = (long long)n * (blockIdx.x + 1) / gridDim.x - first;
    }

    __device__ __forceinline__ int chunks() const { return (count + ROWS - 1) / ROWS * PARTS * CHUNKS; }
};

// The block's chunks in order: ROWS outputs, then gate and up, then K.
struct Chunk {
    const u16* from;
    int rows;
    u32 bytes;  // of a row

    __device__ __forceinline__ Chunk(const Problem& problem, Share share, int index) {
        const int k = index % CHUNKS * CHUNK_K, part = index / CHUNKS % PARTS, row = index / CHUNKS / PARTS * ROWS;
        from = problem.w + (share.first + row + (long long)part * problem.N) * problem.w_stride + k;
        rows = min(ROWS, share.count - row);
        bytes = min(CHUNK_K, K - k) * 2;
    }

    // `move(offset in the slot, address, bytes)` for each stretch of memory.
    template <class Move>
    __device__ __forceinline__ void each(const Problem& problem, Move move) const {
        if (problem.w_stride == PITCH) return move(0, from, rows * bytes);
#pragma unroll 1
        for (int row = 0; row < rows; row++) move(row * PITCH * 2, from + row * problem.w_stride, bytes);
    }
};

// The producing thread's view of memory.
struct Asking {
    const Problem& problem;
    const Share share;
    const int count = share.chunks();
    int asked = 0;       // chunks that are in the ring or on their way to the L2
    long long free = 0;  // when memory may be asked again

    __device__ __forceinline__ void take_turn(const Chunk& chunk) {
        free = max(free, clock64()) + (long long)(chunk.rows * chunk.bytes >> 10) * problem.pace;
        asked++;
    }

    // Into the L2, if memory is free: the next chunk that is not further than `prefetch` behind `index`.
    __device__ __forceinline__ void look_ahead(int index) {
        if (asked >= min(index + problem.prefetch, count) || clock64() < free) return;
        const Chunk chunk(problem, share, asked);
        chunk.each(problem, [](u32, const u16* from, u32 bytes) { prefetch_bytes(from, bytes); });
        take_turn(chunk);
    }
};

__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, Share share) {
    Asking asking = {problem, share};
    const u64 policy = evict_first();
    if (blockIdx.x == 0) prefetch_bytes(problem.x, K * 2);
    if (!problem.static_weight) {
        while (asking.asked < min(problem.prefetch, asking.count)) asking.look_ahead(0);
        wait_for_predecessor();
    }
    for (int index = 0; index < asking.count; index++) {
        if (index == max(0, asking.count - problem.lead)) launch_dependents();
        const int slot = index % STAGES, before = index - ON_THE_WAY;
        while (!barrier_passed(&ring.empty[slot], index / STAGES % 2 ^ 1, SOME_TIME)) asking.look_ahead(index);
        if (before >= 0) barrier_wait(&ring.full[before % STAGES], before / STAGES % 2);
        const Chunk chunk(problem, share, index);
        if (asking.asked > index) {
            asking.look_ahead(index);
        } else {
            while (clock64() < asking.free) {}
            asking.take_turn(chunk);
        }
        barrier_expect(&ring.full[slot], chunk.rows * chunk.bytes);
        chunk.each(problem, [&](u32 to, const u16* from, u32 bytes) {
            load_bytes_once(ring.slots[slot] + to, from, bytes, &ring.full[slot], policy);
        });
    }
}

__device__ __forceinline__ float dot(u32 left, u32 right, float sum) {
    return fmaf(high_of(left), high_of(right), fmaf(low_of(left), low_of(right), sum));
}

__device__ __forceinline__ float dot(uint4 left, uint4 right) {
    return (dot(left.x, right.x, 0) + dot(left.y, right.y, 0)) + (dot(left.z, right.z, 0) + dot(left.w, right.w, 0));
}

// This thread's vectors of a row of a chunk; zeros behind the end of the row.
__device__ __forceinline__ void read_chunk(const u16* from, int chunk, uint4* values) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int at = (threadIdx.x + i * THREADS) * 8;
        const bool inside = (chunk + 1) * CHUNK_K <= K || chunk * CHUNK_K + at < K;
        values[i] = inside ? *(const uint4*)(from + at) : make_uint4(0, 0, 0, 0);
    }
}

// ROWS sums over the warp, that of row i in lane i. In each step lanes keep half of the rows, and give half away.
__device__ __forceinline__ float sums_of_warp(float* sums) {
#pragma unroll
    for (int half = ROWS / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) {
            const bool upper = threadIdx.x & half;
            const float kept = upper ? sums[i + half] : sums[i], given = upper ? sums[i] : sums[i + half];
            sums[i] = kept + __shfl_xor_sync(~0u, given, half);
        }
    for (int apart = ROWS; apart < WARP; apart *= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], apart);
    return sums[0];
}

// This thread's part of x.
struct Input {
    uint4 vectors[CHUNKS][VECTORS];

    __device__ __forceinline__ explicit Input(const u16* x) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) read_chunk(x + chunk * CHUNK_K, chunk, vectors[chunk]);
    }

    __device__ __forceinline__ float squares_of_warp() const {
        float squares = 0;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
            for (int i = 0; i < VECTORS; i++) squares += dot(vectors[chunk][i], vectors[chunk][i]);
        return sum_of_warp(squares);
    }
};

// ROWS rows times x: this thread's sums, of one row after the other.
__device__ __forceinline__ void multiply(Ring& ring, Cursor& at, const Input& x, float* sums) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        uint4 values[ROWS][VECTORS];
        u32 read = 0;
        const u16* from = (const u16*)await(ring, at);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            read_chunk(from + row * PITCH, chunk, values[row]);
#pragma unroll
            for (int i = 0; i < VECTORS; i++) read ^= values[row][i].x;
        }
        done(ring, at, read);
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int i = 0; i < VECTORS; i++) sums[row] += dot(values[row][i], x.vectors[chunk][i]);
    }
}

// Outputs `first` to `first + count` from the sums of all warps, one output a lane.
__device__ __forceinline__ void finish(const Shared& shared, int buffer, const Problem& problem, int first, int count) {
    const int lane = threadIdx.x;
    if (lane >= count) return;
    float squares = 0, values[PARTS] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        squares += shared.squares[warp];
        for (int part = 0; part < PARTS; part++) values[part] += shared.sums[buffer][part][lane][warp];
    }
    const float scale = rsqrtf(squares / K + problem.eps);
    float value = values[0] * scale;
    if (GATED)
        value = activated(value) * (values[PARTS - 1] * scale);
    else if (problem.bias)
        value += widened(problem.bias[first + lane]);
    problem.out[first + lane] = packed(value, 0);
}

__device__ __forceinline__ void consume(Shared& shared, const Problem& problem, Share share) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Cursor at;
    int buffer = 0;
    wait_for_predecessor();
    const Input x(problem.x);
    for (int done = 0; done < share.count; done += GROUP, buffer ^= 1) {
        const int count = min(GROUP, share.count - done);
#pragma unroll 1
        for (int row = 0; row < count; row += ROWS)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float sums[ROWS] = {};
                multiply(shared.ring, at, x, sums);
                const float sum = sums_of_warp(sums);
                if (lane < ROWS) shared.sums[buffer][part][row + lane][warp] = sum;
            }
        if (done == 0) {  // behind the first products, so that the ring does not wait for it
            const float squares = x.squares_of_warp();
            if (lane == 0) shared.squares[warp] = squares;
        }
        sync_consumers();  // and whoever is a group ahead writes to the other buffer
        if (threadIdx.x < GROUP) finish(shared, buffer, problem, share.first + done, count);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, RESIDENT) streamed(const Problem problem) {
    extern __shared__ char memory[];
    Shared& shared = *(Shared*)(memory + (128 - address(memory) % 128) % 128);
    const Share share(problem.N);
    if (threadIdx.x == 0) shared.ring.init();
    __syncthreads();
    if (threadIdx.x < THREADS)
        consume(shared, problem, share);
    else if (threadIdx.x == THREADS)
        produce(shared.ring, problem, share);
}
