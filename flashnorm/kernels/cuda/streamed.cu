// The deferred norm for one row: out = (W x)/RMS(x) + bias, at the speed at which W can be read.
//
// A block owns neighbouring rows of W. One thread streams them, in chunks of CHUNK_K elements, into a ring in shared
// memory with bulk copies: long contiguous reads, many in flight, and the first ones asked into the L2 while the kernel
// before still runs. All WARPS warps take their part of every chunk, in order, with their part of x in registers.
// Macros: K, CHUNK_K (a multiple of 256 * WARPS), STAGES, WARPS, GATED, ACTIVATION, HALF, IS_BF16.

struct Problem {
    const u16 *x, *w;
    u16* out;
    const u16* bias;
    long long w_stride;
    int N;
    float eps;
    int prefetch;      // chunks asked into the L2 before the wait for the kernel before this one
    int static_weight;  // nothing that may still run writes W: the first chunks need not wait
};

constexpr int PARTS = GATED ? 2 : 1;  // rows of W for one output
constexpr int CHUNKS = (K + CHUNK_K - 1) / CHUNK_K;
constexpr int THREADS = WARP * WARPS, VECTORS = CHUNK_K / 8 / THREADS;  // of 16 bytes, of one thread in a chunk
constexpr int ROWS = 4;                                                 // summed over a warp at once
constexpr int GROUP = 32;                                               // outputs that are finished at once
static_assert(CHUNK_K % (8 * THREADS) == 0 && K % 8 == 0 && GROUP * PARTS % ROWS == 0, "does not divide");

struct Shared {
    alignas(128) u16 ring[STAGES][CHUNK_K];
    float sums[2][GROUP * PARTS][WARPS], squares[WARPS];
    u64 full[STAGES], empty[STAGES];
};

// The block's chunks of W in order: output, then gate and up, then K.
struct Chunk {
    const u16* from;
    u32 bytes;
    __device__ __forceinline__ Chunk(const Problem& problem, int first, int index) {
        const int k = index % CHUNKS * CHUNK_K, row = index / CHUNKS;
        const long long n = first + row / PARTS + (long long)(row % PARTS) * problem.N;
        from = problem.w + n * problem.w_stride + k;
        bytes = min(CHUNK_K, K - k) * 2;
    }
};

__device__ __forceinline__ void produce(Shared& shared, const Problem& problem, int first, int count) {
    for (int index = 0; index < min(problem.prefetch, count); index++) {
        const Chunk chunk(problem, first, index);
        prefetch_bytes(chunk.from, chunk.bytes);
    }
    const int unheld = problem.static_weight ? min(STAGES, count) : 0;  // chunks that need not wait
    for (int index = 0;; index++) {
        if (index == unheld) {
            wait_for_predecessor();
            launch_dependents();
        }
        if (index == count) return;
        const int slot = index % STAGES;
        const Chunk chunk(problem, first, index);
        barrier_wait(&shared.empty[slot], index / STAGES % 2 ^ 1);
        barrier_expect(&shared.full[slot], chunk.bytes);
        load_bytes(shared.ring[slot], chunk.from, chunk.bytes, &shared.full[slot]);
    }
}

__device__ __forceinline__ float dot(u32 left, u32 right, float sum) {
    return fmaf(high_of(left), high_of(right), fmaf(low_of(left), low_of(right), sum));
}

__device__ __forceinline__ float dot(uint4 left, uint4 right) {
    return (dot(left.x, right.x, 0) + dot(left.y, right.y, 0)) + (dot(left.z, right.z, 0) + dot(left.w, right.w, 0));
}

// This thread's vectors of a chunk; zeros behind the end of a row.
__device__ __forceinline__ void read_chunk(const u16* from, int chunk, uint4* values) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int at = (threadIdx.x + i * THREADS) * 8;
        values[i] = chunk * CHUNK_K + at < K ? *(const uint4*)(from + at) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Outputs `first` to `first + count` from the sums of all warps, one output a lane.
__device__ __forceinline__ void finish(const Shared& shared, int buffer, const Problem& problem, int first, int count) {
    const int lane = threadIdx.x;
    const float (*sums)[WARPS] = shared.sums[buffer];
    if (lane >= count) return;
    float squares = 0;
    for (int warp = 0; warp < WARPS; warp++) squares += shared.squares[warp];
    const float scale = rsqrtf(squares / K + problem.eps);
    float values[PARTS] = {};
    for (int part = 0; part < PARTS; part++) {
        for (int warp = 0; warp < WARPS; warp++) values[part] += sums[lane * PARTS + part][warp];
        values[part] *= scale;
    }
    float value = values[0];
    if (GATED)
        value = activated(value) * values[PARTS - 1];
    else if (problem.bias)
        value += widened(problem.bias[first + lane]);
    problem.out[first + lane] = packed(value, 0);
}

__device__ __forceinline__ void consume(Shared& shared, const Problem& problem, int first, int outputs) {
    uint4 x[CHUNKS][VECTORS];
    float squares = 0;
    wait_for_predecessor();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) read_chunk(problem.x + chunk * CHUNK_K, chunk, x[chunk]);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int i = 0; i < VECTORS; i++) squares += dot(x[chunk][i], x[chunk][i]);
    squares = sum_of_warp(squares);
    if (threadIdx.x % WARP == 0) shared.squares[threadIdx.x / WARP] = squares;
    int slot = 0, buffer = 0;
    u32 phase = 0;
    for (int done = 0; done < outputs; done += GROUP, buffer ^= 1) {
        const int count = min(GROUP, outputs - done);
        for (int row = 0; row < count * PARTS; row += ROWS) {
            float sums[ROWS] = {};
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (row + i < count * PARTS)
#pragma unroll
                    for (int chunk = 0; chunk < CHUNKS; chunk++) {
                        uint4 values[VECTORS];
                        barrier_wait(&shared.full[slot], phase);
                        read_chunk(shared.ring[slot], chunk, values);
#pragma unroll
                        for (int j = 0; j < VECTORS; j++) sums[i] += dot(values[j], x[chunk][j]);
                        __syncwarp();
                        release(&shared.empty[slot]);
                        if (++slot == STAGES) slot = 0, phase ^= 1;
                    }
#pragma unroll
            for (int i = 0; i < ROWS; i++) sums[i] = sum_of_warp(sums[i]);
            if (threadIdx.x % WARP == 0)
#pragma unroll
                for (int i = 0; i < ROWS; i++) shared.sums[buffer][row + i][threadIdx.x / WARP] = sums[i];
        }
        sync_consumers();  // and whoever is a group ahead writes to the other buffer
        if (threadIdx.x < GROUP) finish(shared, buffer, problem, first + done, count);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP) streamed(const Problem problem) {
    extern __shared__ char memory[];
    Shared& shared = *(Shared*)(memory + (128 - address(memory) % 128) % 128);
    const int first = (long long)problem.N * blockIdx.x / gridDim.x;
    const int outputs = (long long)problem.N * (blockIdx.x + 1) / gridDim.x - first;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            barrier_init(&shared.full[slot], 1);
            barrier_init(&shared.empty[slot], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < THREADS)
        consume(shared, problem, first, outputs);
    else if (threadIdx.x == THREADS)
        produce(shared, problem, first, outputs * PARTS * CHUNKS);
}
