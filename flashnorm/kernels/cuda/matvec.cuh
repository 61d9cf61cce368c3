// Rows of a weight matrix times a vector, on the tensor cores, in the order in which the weights lie in memory.
//
// A slot of the ring holds eight pieces of rows that follow each other: eight rows; or four, two or one, in 2, 4 or 8
// pieces. They are one side of an instruction, each as two of its sixteen rows: a lane's sixteen bytes are columns 0, 1, 4
// and 5 of one and 2, 3, 6 and 7 of the other. Its other side has eight columns: two for each of four classes of pieces, the
// halves of the vector that they meet. Pieces of one class meet the same part of the vector in the same order; neighbouring
// pieces are taken in different orders, by lanes that then find different banks. Eight classes take two instructions. Most
// of an instruction is wasted, and still it does what takes dozens otherwise, sums over the warp included.
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
    static constexpr int classes = pieces() == 1 ? 2 : pieces();    // of pieces
    static constexpr int sets = (classes + 3) / 4;                  // of four classes
    static constexpr int parts = sets * blocks;                     // of the vector, in a lane
    static_assert(PIECES * columns * 2 <= SLOT, "a slot holds eight pieces");
};

struct Sums {
    float rows[2][WARPS][2 * GROUP + WARP / WARPS];  // by buffer; gate, then up; lanes that add up meet different banks
    alignas(16) float squares[2][WARPS];
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

// The first column that this lane takes of a piece. Of odd pieces it is in the block that comes second of even ones.
__device__ __forceinline__ int first_column(int piece) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return warp / 2 * 2 * BLOCK + (piece + warp) % 2 * BLOCK + lane % 4 * EIGHT;
}

// This lane's eight columns of a block of a piece that begins at `from`; zero beyond its end.
template <int WIDTH>
__device__ __forceinline__ uint4 eight_of(const u16* from, int piece, int block) {
    const int column = first_column(piece) + block * APART;
    const bool whole = Form<WIDTH>::columns % APART == 0;
    return whole || column < Form<WIDTH>::columns ? *(const uint4*)(from + column) : make_uint4(0, 0, 0, 0);
}

// What this lane gives to the other side of the instructions: of a linear's input, half of what its columns' class meets.
template <int COUNT>
struct Part {
    uint2 eights[COUNT ? COUNT : 1];

    template <int WIDTH>
    __device__ __forceinline__ void take(const u16* input) {
        typedef Form<WIDTH> By;
        const int column = threadIdx.x % WARP / 4;
#pragma unroll
        for (int i = 0; i < By::parts; i++) {
            const int piece = (i / By::blocks * 4 + column / 2) % By::classes;
            const uint4 eight = eight_of<WIDTH>(input + piece % By::pieces() * By::columns, piece, i % By::blocks);
            eights[i] = column % 2 ? make_uint2(eight.y, eight.w) : make_uint2(eight.x, eight.z);
        }
    }
};

// The sums of up to GROUP outputs, left in shared memory by warp. Where REST, inputs are x + rest.
template <int WIDTH, int COUNT, int REST>
__device__ __forceinline__ void sum_rows(
    Ring& ring, Cursor& at, float (&to)[WARPS][2 * GROUP + WARP / WARPS], const Part<COUNT>& x, const Part<REST>& rest,
    int count, int parts) {
    typedef Form<WIDTH> By;
    constexpr int CHAINS = 4 / By::sets;  // of instructions that wait for each other
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, piece = lane / 4;
    const bool finds = lane % 4 == piece % By::classes % 4 && piece % By::pieces() == 0;  // the sum of a row
    float* sums = &to[warp][piece / By::pieces()];
#pragma unroll 1
    for (int row = 0; row < count; row += By::rows)
#pragma unroll 1
        for (int part = 0; part < parts; part++) {
            const u16* weights = (const u16*)await(ring, at) + piece * By::columns;
            uint4 w[By::blocks];
            u32 read = 0;
#pragma unroll
            for (int i = 0; i < By::blocks; i++) {
                w[i] = eight_of<WIDTH>(weights, piece, i);
                read ^= w[i].x;
            }
            float c[By::sets][CHAINS][4] = {};
#pragma unroll
            for (int i = 0; i < By::parts; i++) {
                auto& chain = c[i / By::blocks][i % By::blocks % CHAINS];
                multiply(chain, w[i % By::blocks], x.eights[i].x, x.eights[i].y);
                if (REST) multiply(chain, w[i % By::blocks], rest.eights[i].x, rest.eights[i].y);
            }
            done(ring, at, read);
            float sum = 0;
#pragma unroll
            for (int i = 0; i < CHAINS; i++) {
                const bool second = By::sets == 2 && piece >= 4;
                sum += second ? c[By::sets - 1][i][0] + c[By::sets - 1][i][3] : c[0][i][0] + c[0][i][3];
            }
            // Lanes 0, 5, 10, 15, 16, 21, 26 and 31 have found the pieces of a row, if those are eight.
            if (By::pieces() > 1) sum += __shfl_xor_sync(~0u, sum, 5);
            if (By::pieces() > 2) sum += __shfl_xor_sync(~0u, sum, 10);
            if (By::pieces() > 4) sum += __shfl_xor_sync(~0u, sum, 16);
            if (finds) sums[part * GROUP + row] = sum;
        }
}
