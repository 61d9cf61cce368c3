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

// What a block has seen: weighted sums; by head, the highest score and the sum of weights.
struct Found {
    float sums[ELEMENTS], highest[SHARING], total[SHARING];
};

struct Shared {
    union alignas(128) {  // one after the other
        Ring ring;
        Found found;
    };
    alignas(16) Mixed mixed;
    Heads heads;
};
static_assert(sizeof(Found) <= STAGES * SLOT, "what was found lies in the slots");

// Where a block is: its row, its key head, and its part of the row's tokens.
struct Place {
    int row, head, split, position;
    Span span;
    long long base;  // of the key head in the cache

    __device__ __forceinline__ explicit Place(const Problem& problem) {
        split = blockIdx.x % SPLITS, head = blockIdx.x / SPLITS % KV_HEADS, row = blockIdx.x / SPLITS / KV_HEADS;
        // Perhaps before the wait: past the L1, which may hold what an earlier step had there.
        position = __ldcg(problem.positions + row);
        base = __ldcg(problem.slots + row) * problem.slot_stride + head * problem.head_stride;
        const int seen = problem.rules.seen(position);
        span = span_of(position, seen, seen / SPLITS + 1, split);
    }

    __device__ __forceinline__ long long cached(int token) const { return base + (long long)token * HEAD_DIM; }
};

__device__ __forceinline__ void produce(Ring& ring, const Problem& problem) {
    if (!problem.early) wait_for_predecessor();
    const Place place(problem);
    Filler filler = {ring};
#pragma unroll 1
    for (int token = place.span.start; token < place.span.stop; token += TOKENS) {
        const u32 bytes = min(TOKENS, place.span.stop - token) * HEAD_DIM * 2;
        filler.await_room([] {});
        filler.expect(2 * bytes);
        filler.fill(0, problem.keys + place.cached(token), bytes);
        filler.fill(SLOT / 2, problem.values + place.cached(token), bytes);
        filler.at.advance();
    }
}

__device__ __forceinline__ void consume(Shared& shared, const Problem& problem) {
    if (!problem.early) wait_for_predecessor();
    const Place place(problem);
    const bool fresh = place.split == 0;
    const Angles angles(problem.rules, place.position);
    if (problem.early) wait_for_predecessor();
    Heads& heads = shared.heads;
    const u16* row = problem.qkv + place.row * problem.qkv_stride;
    prepare_heads(heads, problem.rules, angles, place.head, fresh, [&](int head, float (&own)[LANE_PAIRS][2]) {
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++) {
            const u32 pair = pair_of_lane(i) < HEAD_PAIRS ? ((const u32*)(row + head * HEAD_DIM))[pair_of_lane(i)] : 0;
            own[i][0] = low_of(pair), own[i][1] = high_of(pair);
        }
    });
    Cursor at;
    attend_tokens(shared.ring, at, heads, shared.mixed, problem.rules, place.span.stop - place.span.start, fresh);
    Found& found = shared.found;
    for (int i = threadIdx.x; i < ELEMENTS; i += THREADS) found.sums[i] = sum_of_warps(shared.mixed, i);
    if (threadIdx.x < SHARING) {
        found.highest[threadIdx.x] = heads.highest[threadIdx.x];
        found.total[threadIdx.x] = total_of_warps(heads, threadIdx.x);
    }
    for (int d = threadIdx.x; fresh && d < HEAD_DIM; d += THREADS) {
        problem.keys[place.cached(place.position) + d] = heads.new_key()[d];
        problem.values[place.cached(place.position) + d] = heads.new_value()[d];
    }
}

// This block's share of the outputs, from what all of the cluster have found.
__device__ __forceinline__ void finish(const Shared& shared, const Problem& problem) {
    const Place place(problem);
    const auto of = [](const float& own, int split) { return SPLITS > 1 ? of_block(&own, split) : own; };
    const Found& found = shared.found;
    const int first = PAIRS * place.split / SPLITS, last = PAIRS * (place.split + 1) / SPLITS;
    for (int pair = first + threadIdx.x; pair < last; pair += THREADS) {
        const int head = pair / HEAD_PAIRS;
        float best[SPLITS], highest = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
        for (int split = 0; split < SPLITS; split++) highest = fmaxf(highest, best[split] = of(found.highest[head], split));
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            const float by = weight_of(best[split], highest);
            total = fmaf(by, of(found.total[head], split), total);
            low = fmaf(by, of(found.sums[2 * pair], split), low);
            high = fmaf(by, of(found.sums[2 * pair + 1], split), high);
        }
        u32* out = (u32*)(problem.out + place.row * problem.out_stride) + place.head * PAIRS;
        out[pair] = packed(__fdividef(low, total), __fdividef(high, total));
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
    __syncwarp();
    if (SPLITS > 1) sync_cluster();  // nobody leaves while others read
}
