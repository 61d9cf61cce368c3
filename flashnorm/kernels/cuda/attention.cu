// Attention of one new token per row against the cache: QK-norm, rotation, the cache write, and all cached tokens.
//
// A cluster of SPLITS blocks takes one key head of one row, each block a part of the cached tokens; the first one also
// the new token, which it writes to the cache for the steps to come. One thread brings keys and values through a ring,
// the other warps see them (attend.cuh); what the blocks have found meets in their shared memory, in a fixed order.
// Macros: those of ring.cuh and attend.cuh, SPLITS, HALF, IS_BF16.

struct Problem {
    Rules rules;
    const u16* qkv;
    u16 *keys, *values, *out;
    const long long *slots, *positions;                          // by row
    long long qkv_stride, out_stride, slot_stride, head_stride;  // elements
    int early;  // whatever is complete but qkv: the kernel in front was started when all before it was
};

struct Shared {
    union alignas(128) {  // one after the other
        Ring ring;
        float found[4][PAIRS];  // by pair: highest score, sum of weights, weighted sums
    };
    Mixed mixed;
    Heads heads;
};
static_assert(sizeof(Shared::found) <= STAGES * SLOT, "what was found lies in the slots");

// Where a block is: its row, its key head, and its part of the row's tokens.
struct Place {
    int row, head, split, position, start, stop;
    long long base;  // of the key head in the cache

    __device__ __forceinline__ explicit Place(const Problem& problem) {
        split = blockIdx.x % SPLITS, head = blockIdx.x / SPLITS % KV_HEADS, row = blockIdx.x / SPLITS / KV_HEADS;
        // Perhaps before the wait: past the L1, which may hold what an earlier step had there.
        position = __ldcg(problem.positions + row);
        base = __ldcg(problem.slots + row) * problem.slot_stride + head * problem.head_stride;
        const int tokens = problem.rules.seen(position), share = (tokens + SPLITS - 1) / SPLITS;
        start = position - tokens + min(tokens, split * share), stop = min(position, start + share);
    }

    __device__ __forceinline__ long long cached(int token) const { return base + (long long)token * HEAD_DIM; }
};

__device__ __forceinline__ void produce(Ring& ring, const Problem& problem) {
    if (!problem.early) wait_for_predecessor();
    const Place place(problem);
    Filler filler = {ring};
#pragma unroll 1
    for (int token = place.start; token < place.stop; token += TOKENS) {
        const u32 bytes = min(TOKENS, place.stop - token) * HEAD_DIM * 2;
        filler.await_room([] {});
        filler.expect(2 * bytes);
        filler.fill(0, problem.keys + place.cached(token), bytes);
        filler.fill(SLOT / 2, problem.values + place.cached(token), bytes);
        filler.at.advance();
    }
}

// q, k and v of the block's key head, ready for use.
__device__ __forceinline__ void take_heads(
    Heads& heads, const Problem& problem, const Place& place, const Angles& angles) {
    const u16* row = problem.qkv + place.row * problem.qkv_stride;
    for (int i = threadIdx.x; i < (SHARING + 2) * HEAD_DIM / 2; i += THREADS) {
        const int which = 2 * i / HEAD_DIM, d = 2 * i % HEAD_DIM;
        const int from = which < SHARING ? place.head * SHARING + which : HEADS + (which - SHARING) * KV_HEADS + place.head;
        const u32 pair = *(const u32*)(row + from * HEAD_DIM + d);
        if (which <= SHARING) *(float2*)&heads.raw[which][d] = make_float2(low_of(pair), high_of(pair));
        if (which == SHARING + 1) *(u32*)&heads.fresh[1][d] = pair;
    }
    prepare_heads(heads, problem.rules, angles);
}

__device__ __forceinline__ void consume(Shared& shared, const Problem& problem) {
    if (!problem.early) wait_for_predecessor();
    const Place place(problem);
    const Angles angles(problem.rules, place.position);
    if (problem.early) wait_for_predecessor();
    Heads& heads = shared.heads;
    take_heads(heads, problem, place, angles);
    Cursor at;
    attend_stretch(shared.ring, at, heads, shared.mixed, problem.rules, place.stop - place.start, place.split == 0);
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const Found found = Found::of_warps(heads, shared.mixed, pair);
        const float all[4] = {found.best, found.total, found.low, found.high};
        for (int i = 0; i < 4; i++) shared.found[i][pair] = all[i];
    }
    for (int d = threadIdx.x; place.split == 0 && d < HEAD_DIM; d += THREADS) {
        problem.keys[place.cached(place.position) + d] = heads.fresh[0][d];
        problem.values[place.cached(place.position) + d] = heads.fresh[1][d];
    }
}

// This block's share of the outputs, from what all of the cluster have found.
__device__ __forceinline__ void finish(const Shared& shared, const Problem& problem) {
    const Place place(problem);
    const auto of = [&](int what, int pair, int split) {
        return SPLITS > 1 ? of_block(&shared.found[what][pair], split) : shared.found[what][pair];
    };
    const int first = PAIRS * place.split / SPLITS, last = PAIRS * (place.split + 1) / SPLITS;
    for (int pair = first + threadIdx.x; pair < last; pair += THREADS) {
        float best[SPLITS], highest = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
        for (int split = 0; split < SPLITS; split++) highest = fmaxf(highest, best[split] = of(0, pair, split));
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            const float by = weight_of(best[split], highest);
            total = fmaf(by, of(1, pair, split), total);
            low = fmaf(by, of(2, pair, split), low);
            high = fmaf(by, of(3, pair, split), high);
        }
        u32* out = (u32*)(problem.out + place.row * problem.out_stride) + place.head * PAIRS;
        out[pair] = packed(low / total, high / total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, 2) attention(const Problem problem) {
    extern __shared__ char memory[];
    Shared& shared = *(Shared*)(memory + (128 - address(memory) % 128) % 128);
    launch_dependents();
    if (threadIdx.x == 0) shared.ring.init();
    __syncthreads();
    if (threadIdx.x < THREADS) {
        consume(shared, problem);
    } else if (threadIdx.x == THREADS) {
        produce(shared.ring, problem);
    }
    __syncwarp();
    sync_cluster();
    if (threadIdx.x < THREADS) finish(shared, problem);
    if (SPLITS > 1) sync_cluster();  // nobody leaves while others read
}
