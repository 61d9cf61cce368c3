// Attention of one new token against keys and values that come through the ring, for a block and one of its key heads.
//
// A block norms and rotates the heads that it needs itself. Each warp takes up to sixteen tokens at a time: their scores
// with all query heads that share the key head, on the tensor cores; their weights; and the mixture of their values, two
// channels a lane. What the warps have seen is joined at the end.
// Macros: HEADS, KV_HEADS, HEAD_DIM, ROTARY (half the turning channels), INTERLEAVED, CAPPED.

constexpr int SHARING = HEADS / KV_HEADS;                                 // query heads of one key head
constexpr int CHANNELS = 4 * EIGHT;                                       // that four lanes take
constexpr int HEAD_BLOCKS = (HEAD_DIM + CHANNELS - 1) / CHANNELS;         // of them, of a head
constexpr int SPAN = (HEAD_DIM + WARP - 1) / WARP;                        // channels of a lane where a warp has one head
constexpr int LANE_PAIRS = (SPAN + 1) / 2;                                // pairs of channels of a lane
constexpr int TOKENS = SLOT / 4 / HEAD_DIM;                               // of which a slot holds keys and values
constexpr int AT_ONCE = 8;                                                // tokens of a warp in a row, and most heads
constexpr int NEXT = WARPS * AT_ONCE;                                     // tokens from a warp's first eight to its others
constexpr int PAIRS = SHARING * HEAD_DIM / 2;                             // of output channels of a key head
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

__device__ __forceinline__ float rounded(float value) { return widened(packed(value, 0) & 0xFFFF); }

// What a lane of a warp that has one head turns its channels by.
struct Angles {
    float cos[SPAN], sin[SPAN];

    __device__ __forceinline__ Angles(const Rules& rules, int position) {
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            const int d = threadIdx.x % WARP + i * WARP;
            const bool turns = ROTARY > 0 && rules.cos && d < 2 * ROTARY;
            const long long at = (long long)position * ROTARY + (INTERLEAVED ? d / 2 : d % max(1, ROTARY));
            cos[i] = turns ? rules.cos[at] : 1;
            sin[i] = turns ? rules.sin[at] : 0;
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

// q, k and v of a key head are there in fp32, and v as the cache holds it: q and k normed and turned, ready for use.
__device__ __forceinline__ void prepare_heads(Heads& heads, const Rules& rules, const Angles& angles) {
    sync_consumers();
#pragma unroll 1
    for (int which = threadIdx.x / WARP; which <= SHARING; which += WARPS) {
        const bool query = which < SHARING;
        prepare_head(heads.raw[which], query ? heads.q[which] : heads.fresh[0], query ? rules.q_gain : rules.k_gain,
                     query ? rules.q_eps : rules.k_eps, angles);
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
    const int d = i * CHANNELS + threadIdx.x % 4 * EIGHT;
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
    const Rules& rules) {
    const int warp = threadIdx.x / WARP;
    weigh(heads, seen, q, keys, first, count, rules.scale, rules.softcap);
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

// What was seen of a pair of channels: the highest score, the sum of weights, and the weighted sums.
struct Found {
    float best = NOTHING, total = 0, low = 0, high = 0;

    // By all warps of the block.
    __device__ __forceinline__ static Found of_warps(const Heads& heads, const Mixed& mixed, int pair) {
        const int g = pair / (HEAD_DIM / 2);
        Found found;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) found.best = fmaxf(found.best, heads.best[warp][g]);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float by = weight_of(heads.best[warp][g], found.best);
            found.total = fmaf(by, heads.total[warp][g], found.total);
            found.low = fmaf(by, mixed[warp][pair][0], found.low);
            found.high = fmaf(by, mixed[warp][pair][1], found.high);
        }
        return found;
    }
};

// One stretch of one key head.
__device__ __forceinline__ void attend_stretch(
    Ring& ring, Cursor& at, Heads& heads, Mixed& mixed, const Rules& rules, int tokens, bool first) {
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
            see(heads, seen, q, keys, keys + SLOT / 4, token, count, rules);
        u32 read = __float_as_uint(seen.total[0]);
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++) read ^= __float_as_uint(seen.mixed[0][i][0]);
        done(ring, at, read);
    }
    if (first && warp == WARPS - 1) see(heads, seen, q, heads.fresh[0], heads.fresh[1], 0, 1, rules);
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
