// Rows of a weight matrix times a vector, on the tensor cores: eight rows of weights are one side of an instruction, the
// vector is one column of the other side. That leaves most of the instruction unused, and still it does in two
// instructions what takes a dozen otherwise, sums over the warp included; code that runs once a layer must be short.
//
// Weights come through the ring in tiles of TILE rows by COLUMNS. The products of a tile may be taken in any order, so
// long as weights and vector agree: a lane reads sixteen bytes of each and feeds two instructions with them. Of every
// WARPS blocks of 32 columns each warp takes one, and it alone holds that part of the vector, so that warps need not
// wait for each other.
// Macro: COLUMNS (of a tile, a multiple of 32).

constexpr int TILE = 8;     // rows
constexpr int BLOCK = 32;   // columns of two instructions
constexpr int GROUP = 32;   // outputs that are finished at once, one a lane of the first warp
constexpr int PITCH = 2 * COLUMNS + 64;  // bytes from one part of a row to the next row's: they lie in other banks
static_assert(SLOT == TILE * PITCH && COLUMNS % BLOCK == 0, "a slot holds a tile");

constexpr int vectors_of(int width) { return (width + EIGHT * THREADS - 1) / (EIGHT * THREADS); }  // of a thread

// The vectors of eight elements are dealt out to threads: block b of 32 columns to warp b % WARPS, four lanes each.
__device__ __forceinline__ int thread_of(int vector) {
    const int block = vector / 4 % (THREADS / 4);
    return block % WARPS * WARP + block / WARPS * 4 + vector % 4;
}

__device__ __forceinline__ int element_of(int v) {  // the first of this thread's v-th vector
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return v * THREADS * EIGHT + ((lane / 4 * WARPS + warp) * 4 + lane % 4) * EIGHT;
}

// Where the word of an element lies that a linear or the residual stream will read, so that neighbouring threads ask for
// neighbouring words: first the first two elements of every thread, then the next two. Of words that hold one element
// in fp32, and of words that hold a pair of 16-bit floats.
__device__ __forceinline__ int place(int element) {
    const int vector = element / EIGHT, i = element % EIGHT;
    return (vector / THREADS * EIGHT + i / 2 * 2) * THREADS + thread_of(vector) * 2 + i % 2;
}

__device__ __forceinline__ int pair_place(int element) {
    const int vector = element / EIGHT, i = element % EIGHT / 2;
    return (vector / THREADS * EIGHT / 2 + i / 2 * 2) * THREADS + thread_of(vector) * 2 + i % 2;
}

struct Sums {
    float rows[2][WARPS][2 * GROUP];  // by buffer; gate, then up
    float squares[2][WARPS];
};

// Neighbouring outputs of this block, even numbers of them: [first, first + count).
struct Share {
    int first, count;

    __device__ static __forceinline__ Share of(int n) {
        const u32 pairs = n / 2, first = pairs * blockIdx.x / gridDim.x * 2;  // times blocks: below 2^32
        return {(int)first, blockIdx.x + 1 == gridDim.x ? n - (int)first
                                                        : (int)(pairs * (blockIdx.x + 1) / gridDim.x * 2 - first)};
    }
};

// A weight of `k` columns and one part of `n` rows, or two: gate and up.
struct Matrix {
    const u16* weight;
    int n, parts, k;
};

// Bytes from row to row in a slot. Whole rows follow each other in memory too, and come in one copy; parts of rows come
// in one each, which costs the producer more.
__device__ __forceinline__ int pitch_of(int width) { return width <= COLUMNS ? 2 * width : PITCH; }

// By the producing warp.
__device__ __forceinline__ void stream_rows(Filler& filler, const Matrix& of, const Share& share) {
    const int lane = threadIdx.x % WARP;
    const bool whole = of.k <= COLUMNS;
#pragma unroll 1
    for (int row = 0; row < share.count; row += TILE)
#pragma unroll 1
        for (int part = 0; part < of.parts; part++) {
            const int rows = min(TILE, share.count - row);
            const u16* from = of.weight + ((long long)part * of.n + share.first + row + (whole ? 0 : lane)) * of.k;
#pragma unroll 1
            for (int k = 0; k < of.k; k += COLUMNS) {
                const u32 bytes = min(COLUMNS, of.k - k) * 2;
                filler.fill(from + k, whole ? rows * bytes : bytes, whole ? 1 : rows, PITCH);
            }
        }
}

// c += a b for sixteen rows of a, of which the last eight are zero, and eight columns of b.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

// What a linear reads: 16-bit floats; and, for inputs that are not, what is left of them.
template <int WIDTH, int REST>
struct Input {
    alignas(16) u16 high[WIDTH], rest[REST ? REST : 8];
};

// The sums of up to GROUP outputs, left in shared memory by warp.
template <class In>
__device__ __forceinline__ void sum_rows(
    Ring& ring, Cursor& at, float (&to)[WARPS][2 * GROUP], const In& in, bool rest, int count, int parts, int width) {
    const int warp = threadIdx.x / WARP, row = threadIdx.x % WARP / 4, quarter = threadIdx.x % 4;
    const bool has = row == 0 || (rest && row == 1);  // the lane's column of the other side is not zero
    const u16* x = row ? in.rest : in.high;
    const int pitch = pitch_of(width);
#pragma unroll 1
    for (int tile = 0; tile < (count + TILE - 1) / TILE * parts; tile++) {
        float sums[2][4] = {};
#pragma unroll 1
        for (int k = 0; k < width; k += COLUMNS) {
            const char* weights = await(ring, at) + row * pitch;
            const int last = min(COLUMNS, width - k) - EIGHT;  // no weight is read that is not there
            const int first = (warp + WARPS - k / BLOCK % WARPS) % WARPS * BLOCK;  // of this warp's blocks
#pragma unroll 2
            for (int column = first + quarter * EIGHT; column - quarter * EIGHT <= last; column += WARPS * BLOCK) {
                const uint4 w = *(const uint4*)(weights + 2 * min(column, last));
                const uint4 v = has ? *(const uint4*)(x + k + column) : make_uint4(0, 0, 0, 0);
                multiply(sums[0], w.x, w.y, v.x, v.y);
                multiply(sums[1], w.z, w.w, v.z, v.w);
            }
            done(ring, at);
        }
        const int part = parts == 2 ? tile % 2 : 0, output = (parts == 2 ? tile / 2 : tile) * TILE + row;
        if (quarter == 0) to[warp][part * GROUP + output] = (sums[0][0] + sums[1][0]) + (sums[0][1] + sums[1][1]);
    }
}
