// Attention of a step, shared out among blocks by key head and by stretches of the sequence.
//
// Cached keys and values come through the ring like weights, for they do not depend on the token either. The block of
// stretch 0 also takes the new token, and writes it to the cache for the steps to come. What stretches have seen is joined
// in a fixed order by all of a key head's blocks, each for some of the channels.
// Macro: STRETCH (tokens that are worth a block).

constexpr int PART_WORDS = ELEMENTS + 2 * SHARING;  // of a stretch of a key head: sums; highest score, sum of weights
constexpr int JOINING = 8;                          // lanes that join the stretches of a pair of channels

struct Place {
    int slot, token, position;
};

// How a layer's tokens are shared out: `count` stretches of each key head, of `share` tokens; and `pairs` of the outputs'
// channels, which each of their blocks joins.
struct Spread {
    int count, share, pairs;

    __device__ __forceinline__ Spread(const Layer& layer, int position) {
        const int seen = layer.rules.seen(position), most = max(1, (int)gridDim.x / KV_HEADS);
        count = seen / STRETCH + 1, share = STRETCH;
        // Quotients, rounded down, of less than a million: their error is far less than the half that is added.
        if (count > most) count = most, share = (int)__fdividef(seen + 0.5f, most) + 1;
        pairs = (int)__fdividef(PAIRS - 0.5f, count) + 1;
    }
};

// The block's stretch of this index, of all key heads'.
struct Stretch {
    int head, number;
    Span span;

    __device__ __forceinline__ Stretch(const Layer& layer, int position, const Spread& spread, int index)
        : head(index % KV_HEADS), number(index / KV_HEADS),
          span(span_of(position, layer.rules.seen(position), spread.share, number)) {}
};

__device__ __forceinline__ long long cached(const Step& step, const Place& place, int head, int token) {
    return place.slot * step.slot_stride + head * step.head_stride + (long long)token * HEAD_DIM;
}

// A lane's row of q, k or v, from its words.
__device__ __forceinline__ void receive_head(float (&own)[LANE_PAIRS][2], const u64* row, u32 epoch) {
    const int valid = (HEAD_PAIRS - (int)threadIdx.x % WARP + WARP - 1) / WARP;
    receive<LANE_PAIRS>([&](int i) { return row + 2 * pair_of_lane(i); }, valid, epoch, [&](int i, u32 first, u32 second) {
        own[i][0] = __uint_as_float(first), own[i][1] = __uint_as_float(second);
    });
}

// A pair of channels: the sum of weights, and the weighted sums.
struct Averaged {
    float total, low, high;

    __device__ __forceinline__ u32 mean() const { return packed(__fdividef(low, total), __fdividef(high, total)); }
};

// What a lane has received of a pair of channels, of two stretches at a time; joined by all of the lanes that join.
struct Joining {
    float highest = NOTHING;  // of all lanes
    Averaged sums = {};          // of this one

    __device__ __forceinline__ void add(float best, const Averaged& more) {
        const float by = weight_of(best, highest);
        sums = {fmaf(by, more.total, sums.total), fmaf(by, more.low, sums.low), fmaf(by, more.high, sums.high)};
    }

    // `again`: some have been received before.
    __device__ __forceinline__ void receive_two(
        const u64* pairs, const u64* scores, int apart, int there, bool again, u32 epoch) {
        float best[2] = {NOTHING, NOTHING};
        Averaged two[2] = {};
        receive<4>([&](int i) { return (i % 2 ? scores : pairs) + i / 2 * apart; }, 2 * there, epoch,
                   [&](int i, u32 first, u32 second) {
                       const float a = __uint_as_float(first), b = __uint_as_float(second);
                       if (i % 2) best[i / 2] = a, two[i / 2].total = b;
                       else two[i / 2].low = a, two[i / 2].high = b;
                   });
        const float before = highest;
        highest = fmaxf(highest, fmaxf(best[0], best[1]));
#pragma unroll
        for (int apart = 1; apart < JOINING; apart *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, apart));
        const Averaged old = sums;
        sums = {};
        if (again) add(before, old);
        add(best[0], two[0]), add(best[1], two[1]);
    }

    __device__ __forceinline__ void join() {
#pragma unroll
        for (int apart = 1; apart < JOINING; apart *= 2) {
            sums.total += __shfl_xor_sync(~0u, sums.total, apart);
            sums.low += __shfl_xor_sync(~0u, sums.low, apart);
            sums.high += __shfl_xor_sync(~0u, sums.high, apart);
        }
    }
};

// The block's channels, joined over all stretches. They follow each other, for what blocks write to the same few bytes,
// which others poll, is slow to be seen.
__device__ __forceinline__ void join_stretches(const Words& to, const Stretch& own, const Spread& spread, u32 epoch) {
    constexpr int STRIDE = KV_HEADS * PART_WORDS;
    const int lane = threadIdx.x % JOINING, first = own.number * spread.pairs, stop = min(first + spread.pairs, PAIRS);
    const u64* parts = to.parts() + own.head * PART_WORDS + lane * STRIDE;
#pragma unroll 1
    for (int begun = first + threadIdx.x / WARP * (WARP / JOINING); begun < stop; begun += THREADS / JOINING) {
        const int pair = begun + threadIdx.x % WARP / JOINING;
        Joining joining;
#pragma unroll 1
        for (int stretch = 0; stretch < spread.count; stretch += 2 * JOINING) {
            const int left = pair < stop ? spread.count - stretch - lane : 0;
            const u64* words = parts + stretch * STRIDE;
            joining.receive_two(words + 2 * pair, words + ELEMENTS + pair / HEAD_PAIRS * 2, JOINING * STRIDE,
                                (left > 0) + (left > JOINING), stretch > 0, epoch);
        }
        joining.join();
        if (pair < stop && lane == 0) put_word(to.attended() + own.head * PAIRS + pair, joining.sums.mean(), epoch);
    }
}

// What the block has seen: to the words of attention's outputs, where that is all; or to those of its stretch.
__device__ __forceinline__ void publish(
    const Heads& heads, const Mixed& mixed, const Words& to, const Stretch& own, const Spread& spread, u32 epoch) {
    if (spread.count == 1) {
#pragma unroll 1
        for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
            const float total = total_of_warps(heads, pair / HEAD_PAIRS);
            const Averaged sums = {total, sum_of_warps(mixed, 2 * pair), sum_of_warps(mixed, 2 * pair + 1)};
            put_word(to.attended() + own.head * PAIRS + pair, sums.mean(), epoch);
        }
        return;
    }
    u64* part = to.parts() + (own.number * KV_HEADS + own.head) * PART_WORDS;
#pragma unroll 1
    for (int element = threadIdx.x; element < ELEMENTS; element += THREADS)
        put_word(part + element, __float_as_uint(sum_of_warps(mixed, element)), epoch);
    const int head = THREADS - 1 - threadIdx.x;
    if (head < SHARING) {
        put_word(part + ELEMENTS + 2 * head, __float_as_uint(heads.highest[head]), epoch);
        put_word(part + ELEMENTS + 2 * head + 1, __float_as_uint(total_of_warps(heads, head)), epoch);
    }
    join_stretches(to, own, spread, epoch);
}

// This block's part of a layer's attention, from the words of q, k and v to the words of its outputs, in pairs.
__device__ __forceinline__ void attend(
    Ring& ring, Cursor& at, Heads& heads, Mixed& mixed, const Step& step, const Words& words, const Layer& layer,
    const Place& place, u32 epoch) {
    const Spread spread(layer, place.position);
    if (blockIdx.x >= KV_HEADS * spread.count) return;
    const Angles angles(layer.rules, place.position);
#pragma unroll 1
    for (int index = blockIdx.x; index < KV_HEADS * spread.count; index += gridDim.x) {
        const Stretch own(layer, place.position, spread, index);
        const bool fresh = own.number == 0;
        timed(ring, FOR_WORDS, [&] {
            prepare_heads(heads, layer.rules, angles, own.head, fresh, [&](int row, float (&pairs)[LANE_PAIRS][2]) {
                receive_head(pairs, words.qkv() + row * HEAD_DIM, epoch);
            });
        });
        attend_tokens(ring, at, heads, mixed, layer.rules, own.span.stop - own.span.start, fresh);
        publish(heads, mixed, words, own, spread, epoch);
        const long long here = cached(step, place, own.head, place.position);
#pragma unroll 1
        for (int i = threadIdx.x; fresh && i < HEAD_DIM; i += THREADS) {
            const bool key = i < HEAD_PAIRS;
            u32* to = (u32*)((key ? layer.keys : layer.values) + here);
            to[i % HEAD_PAIRS] = ((const u32*)(key ? heads.new_key() : heads.new_value()))[i % HEAD_PAIRS];
        }
        sync_consumers();
    }
}
