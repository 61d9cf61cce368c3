// Attention of a step, shared out among blocks by key head and by stretches of the sequence.
//
// Cached keys and values come through the ring like weights, for they do not depend on the token either. What stretches
// have seen is joined in a fixed order, by the block of the first one, which also takes the new token and writes it to
// the cache for the steps to come.
// Macro: STRETCH (tokens that are worth a block).

constexpr int PART_WORDS = KV_HEADS * PAIRS * 2;  // of one stretch: sums; and as many: highest score, sum of weights

// What the tokens [start, stop) of the cache are to one block; `stretches` of them make the sequence.
struct Stretch {
    int head, number, start, stop;
};

struct Place {
    int slot, token, position;
};

__device__ __forceinline__ int stretches_of(const Layer& layer, int position) {
    return max(1, min((layer.rules.seen(position) + STRETCH - 1) / STRETCH, (int)gridDim.x / KV_HEADS));
}

__device__ __forceinline__ Stretch stretch_of(const Layer& layer, int position, int stretches, int index) {
    const int tokens = layer.rules.seen(position), share = (tokens + stretches - 1) / stretches;
    const int number = index / KV_HEADS, start = position - tokens + min(tokens, number * share);
    return {index % KV_HEADS, number, start, min(position, start + share)};
}

__device__ __forceinline__ long long cached(const Step& step, const Place& place, int head, int token) {
    return place.slot * step.slot_stride + head * step.head_stride + (long long)token * HEAD_DIM;
}

// q, k and v of a key head, from their words, ready for use.
__device__ __forceinline__ void fetch_heads(
    Heads& heads, const u64* words, u32 epoch, const Rules& rules, int head, const Angles& angles) {
    constexpr int ALL = (SHARING + 2) * HEAD_DIM / 2, OWN = (ALL + THREADS - 1) / THREADS;
    const auto element = [](int i) { return 2 * ((int)threadIdx.x + i * THREADS); };
    const auto place = [&](int i) {
        const int which = element(i) / HEAD_DIM, d = element(i) % HEAD_DIM;
        const int row = which < SHARING ? head * SHARING + which : HEADS + (which - SHARING) * KV_HEADS + head;
        return words + row * HEAD_DIM + d;
    };
    receive<OWN>(place, (ALL - (int)threadIdx.x + THREADS - 1) / THREADS, epoch, [&](int i, u32 first, u32 second) {
        const int which = element(i) / HEAD_DIM, d = element(i) % HEAD_DIM;
        const float low = __uint_as_float(first), high = __uint_as_float(second);
        if (which <= SHARING) *(float2*)&heads.raw[which][d] = make_float2(low, high);
        if (which == SHARING + 1) *(u32*)&heads.fresh[1][d] = packed(low, high);
    });
    prepare_heads(heads, rules, angles);
}

// A pair of channels joined with those of the other stretches; a few are asked for at once.
__device__ __forceinline__ u32 join_stretches(Found own, const u64* words, int stretches, u32 epoch) {
    constexpr int BATCH = 8;
#pragma unroll 1
    for (int first = 1; first < stretches; first += BATCH) {
        float data[2 * BATCH][2] = {};
        const auto place = [&](int i) { return words + (2ll * first + i) * PART_WORDS; };
        receive<2 * BATCH>(place, 2 * min(BATCH, stretches - first), epoch, [&](int i, u32 low, u32 high) {
            data[i][0] = __uint_as_float(low), data[i][1] = __uint_as_float(high);
        });
        float highest = own.best;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i < stretches) highest = fmaxf(highest, data[2 * i + 1][0]);
        const float faded = weight_of(own.best, highest);
        own = {highest, own.total * faded, own.low * faded, own.high * faded};
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float by = first + i < stretches ? weight_of(data[2 * i + 1][0], highest) : 0;
            own.total = fmaf(by, data[2 * i + 1][1], own.total);
            own.low = fmaf(by, data[2 * i][0], own.low);
            own.high = fmaf(by, data[2 * i][1], own.high);
        }
    }
    return packed(own.low / own.total, own.high / own.total);
}

// What a block found, to the words of attention's outputs, or to those of its stretch.
__device__ __forceinline__ void publish(
    const Heads& heads, const Mixed& mixed, const Words& to, const Stretch& own, int stretches, u32 epoch) {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const Found found = Found::of_warps(heads, mixed, pair);
        u64* words = to.parts() + (own.head * PAIRS + pair) * 2;
        if (own.number) {
            words += 2ll * own.number * PART_WORDS;
            put_word(words, __float_as_uint(found.low), epoch);
            put_word(words + 1, __float_as_uint(found.high), epoch);
            put_word(words + PART_WORDS, __float_as_uint(found.best), epoch);
            put_word(words + PART_WORDS + 1, __float_as_uint(found.total), epoch);
        } else {
            const u32 both = join_stretches(found, words, stretches, epoch);
            put_word(to.attended() + own.head * PAIRS + pair, both, epoch);
        }
    }
}

// This block's part of a layer's attention, from the words of q, k and v to the words of its outputs, in pairs.
__device__ __forceinline__ void attend(
    Ring& ring, Cursor& at, Heads& heads, Mixed& mixed, const Step& step, const Words& words, const Layer& layer,
    const Place& place, u32 epoch) {
    const int stretches = stretches_of(layer, place.position);
    if (blockIdx.x >= KV_HEADS * stretches) return;
    const Angles angles(layer.rules, place.position);
#pragma unroll 1
    for (int index = blockIdx.x; index < KV_HEADS * stretches; index += gridDim.x) {
        const Stretch own = stretch_of(layer, place.position, stretches, index);
        fetch_heads(heads, words.qkv(), epoch, layer.rules, own.head, angles);
        attend_stretch(ring, at, heads, mixed, layer.rules, own.stop - own.start, own.number == 0);
        publish(heads, mixed, words, own, stretches, epoch);
        const long long here = cached(step, place, own.head, place.position);
#pragma unroll 1
        for (int d = threadIdx.x; own.number == 0 && d < HEAD_DIM; d += THREADS)
            layer.keys[here + d] = heads.fresh[0][d], layer.values[here + d] = heads.fresh[1][d];
        sync_consumers();
    }
}
