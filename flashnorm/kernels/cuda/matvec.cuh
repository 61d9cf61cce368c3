// Rows of a weight matrix times a vector, on the tensor cores, in the order in which the weights lie in memory.
//
// A slot of the ring holds eight pieces of rows that follow each other: eight rows; or four, two or one, in 2, 4 or 8
// pieces. They are one side of an instruction. Its other side has eight columns: column i is the part of the vector that
// piece i meets, in the order in which the lanes take that piece, and the diagonal of the result is what is wanted. So
// pieces may meet different parts of the vector, and neighbouring pieces are taken in different orders, by lanes that
// then find different banks. Most of the instruction is wasted, and still it does in two instructions what takes dozens
// otherwise, sums over the warp included.
//
// Of every WARPS blocks of 32 columns each warp takes one, and keeps its part of the vector in registers while rows pass.
// Macro: COLUMNS (of a piece, at most, unless eight pieces of a row are longer).

constexpr int PIECES = 8;
constexpr int BLOCK = 32;             // columns that a warp takes at once
constexpr int APART = WARPS * BLOCK;  // columns from one block of a warp to its next
constexpr int GROUP = 32;             // outputs that are finished at once, each by as many threads as there are warps

// How rows of so many columns are taken.
template <int WIDTH>
struct Form {
    static constexpr int pieces() {  // of a row
        int pieces = 1;
        while (pieces < PIECES && WIDTH / pieces > COLUMNS && WIDTH % (2 * pieces * EIGHT) == 0) pieces *= 2;
        return pieces;
    }

    static constexpr int columns = WIDTH / pieces();                // of a piece
    static constexpr int rows = PIECES / pieces();                  // of a slot
    static constexpr int blocks = (columns + APART - 1) / APART;    // of a warp, in a piece
    static_assert(PIECES * columns * 2 <= SLOT, "a slot holds eight pieces");
};

struct Sums {
    float rows[2][WARPS][2 * GROUP + WARP / WARPS];  // by buffer; gate, then up; lanes that add up meet different banks
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

// A weight of `width` columns and one part of `n` rows, or two: gate and up; a slot holds so many `rows`.
struct Matrix {
    const u16* weight;
    int n, parts, width, rows;
};

// c += a b for sixteen rows of a and eight columns of b.
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// The first column that this lane takes of its piece. Lanes of odd pieces begin with the block that even ones take next.
__device__ __forceinline__ int first_column() {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, piece = lane / 4;
    return warp / 2 * 2 * BLOCK + (piece + warp) % 2 * BLOCK + lane % 4 * EIGHT;
}

// This lane's eight columns of a block of a piece, which begins at the lane's first column; zero beyond the piece's end.
template <int WIDTH>
__device__ __forceinline__ uint4 eight_of(const u16* from, int block) {
    const bool whole = Form<WIDTH>::columns % APART == 0;
    if (!whole && first_column() + block * APART >= Form<WIDTH>::columns) return make_uint4(0, 0, 0, 0);
    return *(const uint4*)(from + block * APART);
}

// What this lane multiplies its piece of every slot by: the part of a linear's input that lies in its columns.
template <int COUNT>
struct Part {
    uint4 blocks[COUNT ? COUNT : 1];

    template <int WIDTH>
    __device__ __forceinline__ void take(const u16* input) {
        const int piece = threadIdx.x % WARP / 4 % Form<WIDTH>::pieces();
#pragma unroll
        for (int i = 0; i < Form<WIDTH>::blocks; i++)
            blocks[i] = eight_of<WIDTH>(input + piece * Form<WIDTH>::columns + first_column(), i);
    }
};

// Eight columns of sixteen halves of pieces times those of the vector: a lane's sixteen bytes are columns 0, 1, 4 and 5 of
// one row of the instruction and 2, 3, 6 and 7 of another. `c`: sums of the former and of the latter.
__device__ __forceinline__ void multiply_eight(float (&c)[2][4], const uint4& w, const uint4& x) {
    multiply(c[0], w, x.x, x.z);
    multiply(c[1], w, x.y, x.w);
}

// The sums of up to GROUP outputs, left in shared memory by warp. Where REST, inputs are x + rest.
template <int WIDTH, int COUNT, int REST>
__device__ __forceinline__ void sum_rows(
    Ring& ring, Cursor& at, float (&to)[WARPS][2 * GROUP + WARP / WARPS], const Part<COUNT>& x, const Part<REST>& rest,
    int count, int parts) {
    typedef Form<WIDTH> By;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, piece = lane / 4;
    const bool diagonal = lane % 4 == piece / 2 && piece % By::pieces() == 0;
    const int from = piece * By::columns + first_column();
    float* sums = &to[warp][piece / By::pieces()];
#pragma unroll 1
    for (int row = 0; row < count; row += By::rows)
#pragma unroll 1
        for (int part = 0; part < parts; part++) {
            const u16* weights = (const u16*)await(ring, at) + from;
            uint4 w[By::blocks];
#pragma unroll
            for (int i = 0; i < By::blocks; i++) w[i] = eight_of<WIDTH>(weights, i);
            float c[2][2][4] = {};  // chains
#pragma unroll
            for (int i = 0; i < By::blocks; i++) {
                multiply_eight(c[i % 2], w[i], x.blocks[i]);
                if (REST) multiply_eight(c[i % 2], w[i], rest.blocks[i]);
            }
            done(ring, at);
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 2; i++)
                sum += piece % 2 ? c[i][0][1] + c[i][1][3] : c[i][0][0] + c[i][1][2];
            // The diagonal lies in lanes 0, 4, 9, 13, 18, 22, 27 and 31; pieces of a row are added up.
            if (By::pieces() > 1) sum += __shfl_xor_sync(~0u, sum, 4);
            if (By::pieces() > 2) sum += __shfl_xor_sync(~0u, sum, 9);
            if (By::pieces() > 4) sum += __shfl_xor_sync(~0u, sum, 18);
            if (diagonal) sums[part * GROUP + row] = sum;
        }
}
