// Attention of one new token against the cache, shared out among blocks by key head and by stretches of the sequence.
//
// Cached keys and values come through the ring like weights, for they do not depend on the token either. A block norms
// and rotates the heads that it needs itself. Each warp takes up to sixteen tokens at a time: their scores with all query
// heads that share the key head, on the tensor cores; their weights; and the mixture of their values, two channels a lane.
// What the warps have seen is joined at the end, and so are the stretches, in a fixed order: by the block of the first one,
// which also takes the new token and writes it to the cache for the steps to come.
// Macros: HEADS, KV_HEADS, HEAD_DIM, ROTARY (half the turning channels), INTERLEAVED, CAPPED, STRETCH (tokens that are
// worth a block).

constexpr int SHARING = HEADS / KV_HEADS;                                 // query heads of one key head
constexpr int HEAD_BLOCKS = (HEAD_DIM + BLOCK - 1) / BLOCK;               // of channels
constexpr int SPAN = (HEAD_DIM + WARP - 1) / WARP;                        // channels of a lane where a warp has one head
constexpr int LANE_PAIRS = (SPAN + 1) / 2;                                // pairs of channels of a lane
constexpr int TOKENS = SLOT / 4 / HEAD_DIM;                               // of which a slot holds keys and values
constexpr int AT_ONCE = 8;                                                // tokens of a warp in a row, and most heads
constexpr int NEXT = WARPS * AT_ONCE;                                     // tokens from a warp's first eight to its others
constexpr int PAIRS = SHARING * HEAD_DIM / 2;                             // of output channels of a key head
constexpr int PART_WORDS = KV_HEADS * PAIRS * 2;  // of one stretch: sums; and as many: highest score, sum of weights
#define NOTHING __int_as_float(0xFF800000)        // minus infinity: the score of what is not there
static_assert(HEAD_DIM % EIGHT == 0 && HEADS % KV_HEADS == 0 && TOKENS >= AT_ONCE && SHARING <= AT_ONCE, "does not fit");

struct Heads {
    alignas(16) float raw[SHARING + 1][HEAD_DIM];            // q and k
    alignas(16) u16 q[SHARING][HEAD_DIM], fresh[2][HEAD_DIM];  // ready; k and v as the cache holds them
    alignas(16) float weights[WARPS][2 * AT_ONCE][AT_ONCE];  // of tokens, by head
    alignas(16) float faded[WARPS][AT_ONCE];                 // what is left of the sums so far, by head
    float best[WARPS][AT_ONCE], total[WARPS][AT_ONCE];       // highest score, sum of weights
};

typedef float Mixed[WARPS][PAIRS][2];

// What the tokens [start, stop) of the cache are to one block; `stretches` of them make the sequence.
struct Stretch {
    int head, number, start, stop;
};

struct Place {
    int slot, token, position;
};

__device__ __forceinline__ int seen_of(const Layer& layer, int position) {  // tokens of the cache
    return layer.window ? min(position, layer.window - 1) : position;
}

__device__ __forceinline__ int stretches_of(const Layer& layer, int position) {
    return max(1, min((seen_of(layer, position) + STRETCH - 1) / STRETCH, (int)gridDim.x / KV_HEADS));
}

__device__ __forceinline__ Stretch stretch_of(const Layer& layer, int position, int stretches, int index) {
    const int tokens = seen_of(layer, position), share = (tokens + stretches - 1) / stretches;
    const int number = index / KV_HEADS, start = position - tokens + min(tokens, number * share);
    return {index % KV_HEADS, number, start, min(position, start + share)};
}

__device__ __forceinline__ long long cached(const Step& step, const Place& place, int head, int token) {
    return place.slot * step.slot_stride + head * step.head_stride + (long long)token * HEAD_DIM;
}

__device__ __forceinline__ float rounded(float value) { return widened(packed(value, 0) & 0xFFFF); }

// What a lane of a warp that has one head turns its channels by.
struct Angles {
    float cos[SPAN], sin[SPAN];

    __device__ __forceinline__ Angles(const Layer& layer, int position) {
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            const int d = threadIdx.x % WARP + i * WARP;
            const bool turns = ROTARY > 0 && layer.cos && d < 2 * ROTARY;
            const long long at = (long long)position * ROTARY + (INTERLEAVED ? d / 2 : d % max(1, ROTARY));
            cos[i] = turns ? layer.cos[at] : 1;
            sin[i] = turns ? layer.sin[at] : 0;
            if (INTERLEAVED ? d % 2 == 0 : d < ROTARY) sin[i] = -sin[i];
        }
    }
};

// One warp norms and turns one head.
__device__ __forceinline__ void prepare_head(
    float* head, u16* ready, const float* gain, float eps, const Angles& angles) {
    const int lane = threadIdx.x % WARP;
    float own[SPAN], squares = 0;
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        const int d = lane + i * WARP;
        own[i] = d < HEAD_DIM ? head[d] : 0;
        squares = fmaf(own[i], own[i], squares);
    }
    if (eps >= 0) {
        const float scale = rsqrtf(sum_of_warp(squares) / HEAD_DIM + eps);
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            const int d = lane + i * WARP;
            own[i] *= scale * (gain && d < HEAD_DIM ? gain[d] : 1);
            if (d < HEAD_DIM) head[d] = own[i];
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        const int d = lane + i * WARP;
        const int partner = INTERLEAVED ? d ^ 1 : d < ROTARY ? d + ROTARY : d - ROTARY;
        if (d < 2 * ROTARY) own[i] = fmaf(head[partner], angles.sin[i], own[i] * angles.cos[i]);
        if (d < HEAD_DIM) ready[d] = packed(own[i], 0);
    }
}

// q, k and v of a key head, from their words, ready for use.
__device__ __forceinline__ void fetch_heads(
    Heads& heads, const u64* words, u32 epoch, const Layer& layer, int head, const Angles& angles) {
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
    sync_consumers();
#pragma unroll 1
    for (int which = threadIdx.x / WARP; which <= SHARING; which += WARPS) {
        const bool query = which < SHARING;
        prepare_head(heads.raw[which], query ? heads.q[which] : heads.fresh[0], query ? layer.q_gain : layer.k_gain,
                     query ? layer.q_eps : layer.k_eps, angles);
    }
    sync_consumers();
}

__device__ __forceinline__ float weight_of(float score, float best) {
    return __expf(score - (best == NOTHING ? 0 : best));  // 0 where nothing was seen
}

// What a warp has seen so far. Its lane 4 t + i holds scores of heads 2 i and 2 i + 1 with the tokens t, t + 8, …; and
// pairs of channels of all heads.
struct Seen {
    float best[2] = {NOTHING, NOTHING}, total[2] = {}, mixed[SHARING][LANE_PAIRS][2] = {};
};

__device__ __forceinline__ float highest_of_tokens(float value) {
#pragma unroll
    for (int apart = 4; apart < WARP; apart *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, apart));
    return value;
}

__device__ __forceinline__ float sum_of_tokens(float value) {
#pragma unroll
    for (int apart = 4; apart < WARP; apart *= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

// This lane's eight channels of block i of a head, zero beyond its end.
__device__ __forceinline__ uint4 channels_of(const u16* head, int i) {
    const int d = i * BLOCK + threadIdx.x % 4 * EIGHT;
    return d < HEAD_DIM ? *(const uint4*)(head + d) : make_uint4(0, 0, 0, 0);
}

// The weights of tokens `first` to `first + 7` and, where there are any, of those NEXT behind them, left in shared memory.
__device__ __forceinline__ void weigh(
    Heads& heads, Seen& seen, const uint4 (&q)[HEAD_BLOCKS], const u16* keys, int first, int count, float scale,
    float softcap) {
    const int warp = threadIdx.x / WARP, row = threadIdx.x % WARP / 4, head = threadIdx.x % 4 * 2;
    const int token[2] = {first + row, first + NEXT + row};
    const u16 *low = keys + min(token[0], count - 1) * HEAD_DIM, *high = keys + min(token[1], count - 1) * HEAD_DIM;
    float c[2][4] = {}, scores[2][2];  // by eight and by head
#pragma unroll
    for (int i = 0; i < HEAD_BLOCKS; i++) {
        const uint4 k = channels_of(low, i), more = channels_of(high, i);
        multiply(c[0], make_uint4(k.x, more.x, k.y, more.y), q[i].x, q[i].y);
        multiply(c[1], make_uint4(k.z, more.z, k.w, more.w), q[i].z, q[i].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float score = (c[0][i] + c[1][i]) * scale;
        if (CAPPED) score = softcap * tanhf(score / softcap);
        scores[i / 2][i % 2] = token[i / 2] < count ? score : NOTHING;
    }
    float faded[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float highest = fmaxf(seen.best[i], highest_of_tokens(fmaxf(scores[0][i], scores[1][i])));
        faded[i] = weight_of(seen.best[i], highest), seen.best[i] = highest;
        scores[0][i] = weight_of(scores[0][i], highest), scores[1][i] = weight_of(scores[1][i], highest);
        seen.total[i] = seen.total[i] * faded[i] + scores[0][i] + scores[1][i];
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        *(float2*)&heads.weights[warp][i * AT_ONCE + row][head] = make_float2(scores[i][0], scores[i][1]);
    if (row == 0) *(float2*)&heads.faded[warp][head] = make_float2(faded[0], faded[1]);
    __syncwarp();
}

// The values of eight tokens, mixed into those so far.
__device__ __forceinline__ void mix(
    const float (&weights)[AT_ONCE], Seen& seen, const u32* value) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < LANE_PAIRS; i++) {
        const u32 pair = value[min(lane + i * WARP, HEAD_DIM / 2 - 1)];
        const float low = low_of(pair), high = high_of(pair);
#pragma unroll
        for (int g = 0; g < SHARING; g++) {
            seen.mixed[g][i][0] = fmaf(weights[g], low, seen.mixed[g][i][0]);
            seen.mixed[g][i][1] = fmaf(weights[g], high, seen.mixed[g][i][1]);
        }
    }
}

// What `weigh` says of these tokens, and their values mixed into those so far.
__device__ __forceinline__ void see(
    Heads& heads, Seen& seen, const uint4 (&q)[HEAD_BLOCKS], const u16* keys, const u16* values, int first, int count,
    const Layer& layer) {
    const int warp = threadIdx.x / WARP;
    weigh(heads, seen, q, keys, first, count, layer.scale, layer.softcap);
#pragma unroll
    for (int g = 0; g < SHARING; g++)
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++)
            seen.mixed[g][i][0] *= heads.faded[warp][g], seen.mixed[g][i][1] *= heads.faded[warp][g];
#pragma unroll 1
    for (int part = 0; part < 2 && first + part * NEXT < count; part++)
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {  // what is not there weighs nothing
            const int token = min(first + part * NEXT + i, count - 1);
            mix(heads.weights[warp][part * AT_ONCE + i], seen, (const u32*)(values + token * HEAD_DIM));
        }
    __syncwarp();  // the weights have been used
}

// A pair of channels joined with those of the other stretches; a few are asked for at once.
__device__ __forceinline__ u32 join_stretches(
    float best, float total, float low, float high, const u64* words, int stretches, u32 epoch) {
    constexpr int BATCH = 8;
#pragma unroll 1
    for (int first = 1; first < stretches; first += BATCH) {
        float data[2 * BATCH][2] = {};
        const auto place = [&](int i) { return words + (2ll * first + i) * PART_WORDS; };
        receive<2 * BATCH>(place, 2 * min(BATCH, stretches - first), epoch, [&](int i, u32 low, u32 high) {
            data[i][0] = __uint_as_float(low), data[i][1] = __uint_as_float(high);
        });
        float highest = best;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i < stretches) highest = fmaxf(highest, data[2 * i + 1][0]);
        const float faded = weight_of(best, highest);
        best = highest, total *= faded, low *= faded, high *= faded;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float by = first + i < stretches ? weight_of(data[2 * i + 1][0], highest) : 0;
            total = fmaf(by, data[2 * i + 1][1], total);
            low = fmaf(by, data[2 * i][0], low);
            high = fmaf(by, data[2 * i][1], high);
        }
    }
    return packed(low / total, high / total);
}

// What a block found, to the words of attention's outputs, or to those of its stretch.
__device__ __forceinline__ void publish(
    const Heads& heads, const Mixed& mixed, const Words& to, const Stretch& own, int stretches, u32 epoch) {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const int g = pair / (HEAD_DIM / 2), channel = pair % (HEAD_DIM / 2) * 2;
        float best = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) best = fmaxf(best, heads.best[warp][g]);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float by = weight_of(heads.best[warp][g], best);
            total = fmaf(by, heads.total[warp][g], total);
            low = fmaf(by, mixed[warp][pair][0], low), high = fmaf(by, mixed[warp][pair][1], high);
        }
        u64* words = to.parts() + (own.head * PAIRS + pair) * 2;
        if (own.number) {
            words += 2ll * own.number * PART_WORDS;
            put_word(words, __float_as_uint(low), epoch);
            put_word(words + 1, __float_as_uint(high), epoch);
            put_word(words + PART_WORDS, __float_as_uint(best), epoch);
            put_word(words + PART_WORDS + 1, __float_as_uint(total), epoch);
        } else {
            const u32 both = join_stretches(best, total, low, high, words, stretches, epoch);
            put_word(to.attended() + ((own.head * SHARING + g) * HEAD_DIM + channel) / 2, both, epoch);
        }
    }
}

// One stretch of one key head.
__device__ __forceinline__ void attend_stretch(
    Ring& ring, Cursor& at, Heads& heads, Mixed& mixed, const Layer& layer, int tokens, bool first) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint4 q[HEAD_BLOCKS];
    Seen seen;
#pragma unroll
    for (int i = 0; i < HEAD_BLOCKS; i++)
        q[i] = lane / 4 < SHARING ? channels_of(heads.q[min(lane / 4, SHARING - 1)], i) : make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int left = tokens; left > 0; left -= TOKENS) {
        const int count = min(TOKENS, left);
        const u16* keys = (const u16*)await(ring, at);
#pragma unroll 1
        for (int token = warp * AT_ONCE; token < count; token += 2 * NEXT)
            see(heads, seen, q, keys, keys + SLOT / 4, token, count, layer);
        u32 read = __float_as_uint(seen.total[0]);
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++) read ^= __float_as_uint(seen.mixed[0][i][0]);
        done(ring, at, read);
    }
    if (first && warp == WARPS - 1) see(heads, seen, q, heads.fresh[0], heads.fresh[1], 0, 1, layer);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        seen.total[i] = sum_of_tokens(seen.total[i]);
        if (lane / 4 == 0) heads.best[warp][lane * 2 + i] = seen.best[i], heads.total[warp][lane * 2 + i] = seen.total[i];
    }
#pragma unroll
    for (int g = 0; g < SHARING; g++)
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++)
            if (lane + i * WARP < HEAD_DIM / 2)
                *(float2*)mixed[warp][g * (HEAD_DIM / 2) + lane + i * WARP] =
                    make_float2(seen.mixed[g][i][0], seen.mixed[g][i][1]);
    sync_consumers();
}

// This block's part of a layer's attention, from the words of q, k and v to the words of its outputs, in pairs.
__device__ __forceinline__ void attend(
    Ring& ring, Cursor& at, Heads& heads, Mixed& mixed, const Step& step, const Words& words, const Layer& layer,
    const Place& place, u32 epoch) {
    const int stretches = stretches_of(layer, place.position);
    if (blockIdx.x >= KV_HEADS * stretches) return;
    const Angles angles(layer, place.position);
#pragma unroll 1
    for (int index = blockIdx.x; index < KV_HEADS * stretches; index += gridDim.x) {
        const Stretch own = stretch_of(layer, place.position, stretches, index);
        fetch_heads(heads, words.qkv(), epoch, layer, own.head, angles);
        attend_stretch(ring, at, heads, mixed, layer, own.stop - own.start, own.number == 0);
        publish(heads, mixed, words, own, stretches, epoch);
        const long long here = cached(step, place, own.head, place.position);
#pragma unroll 1
        for (int d = threadIdx.x; own.number == 0 && d < HEAD_DIM; d += THREADS)
            layer.keys[here + d] = heads.fresh[0][d], layer.values[here + d] = heads.fresh[1][d];
        sync_consumers();
    }
}
