// Attention of one new token against keys and values that come through the ring, for a block and one of its key heads.
//
// Each warp prepares heads: norms and turns them. Then each takes its share of a chunk's tokens, at most sixteen at a time:
// their scores with all query heads that share the key head, on the tensor cores; their weights against the highest score of
// all warps; and the mixture of their values, some pairs of channels a lane. So what the warps leave need only be added up.
// All of this lies on the way of the step: instructions are counted, not only bytes.
// Macros: HEADS, KV_HEADS, HEAD_DIM, ROTARY (half the turning channels), INTERLEAVED, CAPPED.

constexpr int SHARING = HEADS / KV_HEADS, MOST_SHARING = 8;        // query heads of one key head
constexpr int CHANNELS = 4 * EIGHT;                                // that four lanes take
constexpr int HEAD_BLOCKS = (HEAD_DIM + CHANNELS - 1) / CHANNELS;  // of them, of a head
constexpr int HEAD_PAIRS = HEAD_DIM / 2;                           // of channels
constexpr int LANE_PAIRS = (HEAD_PAIRS + WARP - 1) / WARP;         // of them, of a lane where a warp has one head
constexpr int TOKENS = SLOT / 4 / HEAD_DIM;                        // of which a slot holds keys and values
constexpr int AT_ONCE = 16, TOGETHER = 4;                          // tokens of a warp; of which values are mixed together
constexpr int ELEMENTS = SHARING * HEAD_DIM, PAIRS = ELEMENTS / 2;  // of the outputs of a key head
constexpr float LOG2_E = 1.44269504f;
#define NOTHING __int_as_float(0xFF800000)  // minus infinity: the score of what is not there
static_assert(HEAD_DIM % EIGHT == 0 && HEADS % KV_HEADS == 0 && TOKENS > 0 && SHARING <= MOST_SHARING, "does not fit");

struct Heads {
    alignas(16) u16 ready[SHARING + 2][HEAD_DIM];           // q; the new token's k and v, as the cache holds them
    alignas(16) float raw[WARPS][HEAD_DIM];                 // a head before it is turned
    alignas(16) float weights[WARPS][AT_ONCE][MOST_SHARING];  // of tokens, by head
    alignas(16) float faded[WARPS][MOST_SHARING];           // what is left of the sums so far, by head
    alignas(16) float best[2][MOST_SHARING][WARPS], total[MOST_SHARING][WARPS];  // highest score; sum of weights
    float highest[MOST_SHARING];                            // of all warps

    __device__ __forceinline__ const u16* new_key() const { return ready[SHARING]; }
    __device__ __forceinline__ const u16* new_value() const { return ready[SHARING + 1]; }
};

typedef float Mixed[WARPS][ELEMENTS];

__device__ __forceinline__ float rounded(float value) { return widened(packed(value, 0) & 0xFFFF); }

// Cached tokens: [start, stop).
struct Span {
    int start, stop;
};

// Part `number` of the last `seen` cached tokens and the new one, `share` of them each, from last to first: the new token
// is in part 0.
__device__ __forceinline__ Span span_of(int position, int seen, int share, int number) {
    const int first = position - seen, stop = max(first, position + 1 - number * share);
    return {max(first, stop - share), min(stop, position)};
}

// The pair of channels that a lane has of a head that its warp prepares; perhaps beyond its end.
__device__ __forceinline__ int pair_of_lane(int i) { return threadIdx.x % WARP + i * WARP; }

// What a lane turns its channels by. Nothing is done with what is loaded: that would wait for it.
struct Angles {
    float cos[LANE_PAIRS][2], sin[LANE_PAIRS][2];

    __device__ __forceinline__ Angles(const Rules& rules, int position) {
        const bool turns = ROTARY > 0 && rules.cos;
#pragma unroll
        for (int i = 0; i < 2 * LANE_PAIRS; i++) {
            const int d = 2 * pair_of_lane(i / 2) + i % 2;
            const long long at = (long long)position * ROTARY + (INTERLEAVED ? d / 2 : d % max(1, ROTARY));
            cos[i / 2][i % 2] = 1, sin[i / 2][i % 2] = 0;
            if (turns && d < 2 * ROTARY) cos[i / 2][i % 2] = rules.cos[at], sin[i / 2][i % 2] = rules.sin[at];
        }
    }
};

// A head that a warp has in its lanes: normed,
__device__ __forceinline__ void norm_head(float (&own)[LANE_PAIRS][2], const float* gain, float eps) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 2 * LANE_PAIRS; i++) squares = fmaf(own[i / 2][i % 2], own[i / 2][i % 2], squares);
    const float scale = rsqrtf(sum_of_warp(squares) / HEAD_DIM + eps);
#pragma unroll
    for (int i = 0; i < 2 * LANE_PAIRS; i++) {
        const int d = 2 * pair_of_lane(i / 2) + i % 2;
        own[i / 2][i % 2] *= scale * (gain && d < HEAD_DIM ? gain[d] : 1);
    }
}

// and turned. `raw`: the warp's, for the channels that turn with each other.
__device__ __forceinline__ void turn_head(float (&own)[LANE_PAIRS][2], float* raw, const Angles& angles) {
#pragma unroll
    for (int i = 0; i < LANE_PAIRS; i++)
        if (pair_of_lane(i) < HEAD_PAIRS) *(float2*)&raw[2 * pair_of_lane(i)] = make_float2(own[i][0], own[i][1]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * LANE_PAIRS; i++) {
        const int d = 2 * pair_of_lane(i / 2) + i % 2;
        if (d >= 2 * ROTARY) continue;
        const bool first = INTERLEAVED ? d % 2 == 0 : d < ROTARY;
        const float other = raw[INTERLEAVED ? d ^ 1 : first ? d + ROTARY : d - ROTARY], sin = angles.sin[i / 2][i % 2];
        own[i / 2][i % 2] = fmaf(other, first ? -sin : sin, own[i / 2][i % 2] * angles.cos[i / 2][i % 2]);
    }
}

// The queries of a key head and, where the token is `fresh` to the block, its key and value, ready for use.
// `load(row, own)`: this lane's pairs of a row of q, k and v; zero beyond its end.
template <class Load>
__device__ __forceinline__ void prepare_heads(
    Heads& heads, const Rules& rules, const Angles& angles, int head, bool fresh, Load load) {
    const int warp = threadIdx.x / WARP;
#pragma unroll 1
    for (int which = warp; which < SHARING + (fresh ? 2 : 0); which += WARPS) {
        const bool query = which < SHARING, value = which > SHARING;
        float own[LANE_PAIRS][2] = {};
        load(query ? head * SHARING + which : HEADS + (which - SHARING) * KV_HEADS + head, own);
        const float eps = query ? rules.q_eps : rules.k_eps;
        if (!value && eps >= 0) norm_head(own, query ? rules.q_gain : rules.k_gain, eps);
        if (!value && ROTARY) turn_head(own, heads.raw[warp], angles);
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++)
            if (pair_of_lane(i) < HEAD_PAIRS) ((u32*)heads.ready[which])[pair_of_lane(i)] = packed(own[i][0], own[i][1]);
        __syncwarp();  // what is raw has been read
    }
    sync_consumers();
}

// Scores are logarithms to the base of two.
__device__ __forceinline__ float weight_of(float score, float best) {
    return exp2_of(score - (best == NOTHING ? 0 : best));  // 0 where nothing was seen
}

// This lane's pairs of channels that follow each other, of a head's values or sums. Lanes beyond its end have its last.
struct alignas(LANE_PAIRS % 4 ? LANE_PAIRS % 2 ? 4 : 8 : 16) Values {
    u32 pairs[LANE_PAIRS];

    __device__ static __forceinline__ int first() {
        return min((int)threadIdx.x % WARP * LANE_PAIRS, HEAD_PAIRS - LANE_PAIRS);
    }
};

// What a warp has seen so far. Its lane 4 t + i knows of heads 2 i and 2 i + 1 the highest score that any warp has seen, and
// the sum of its own tokens' weights, t, t + 8, …; and it has pairs of channels of all heads.
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

// Tokens that follow each other: `cached` of them, and then, where there are `count`, the new one.
struct Tokens {
    const u16 *keys, *values;
    int cached, count;
};

// A warp's own of them: `mine`, from `first`; none where that is not above zero.
struct Own {
    int first, mine;

    __device__ __forceinline__ explicit Own(int count) {
        const int each = (count + WARPS - 1) / WARPS;
        first = threadIdx.x / WARP * each, mine = min(each, count - first);
    }
};

// Scores of this lane's tokens, t and t + 8, with its two heads; NOTHING where there is no token.
__device__ __forceinline__ void score(
    float (&scores)[2][2], const Heads& heads, const uint4 (&q)[HEAD_BLOCKS], const Tokens& tokens, const Own& own,
    const Rules& rules) {
    const int row = threadIdx.x % WARP / 4;
    const auto key = [&](int token) { return token < tokens.cached ? tokens.keys + token * HEAD_DIM : heads.new_key(); };
    const u16 *low = key(own.first + row), *high = key(own.first + row + EIGHT);
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_BLOCKS; i++) {
        const uint4 k = channels_of(low, i), more = channels_of(high, i);
        multiply(c[0], make_uint4(k.x, more.x, k.y, more.y), q[i].x, q[i].y);
        multiply(c[1], make_uint4(k.z, more.z, k.w, more.w), q[i].z, q[i].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float one = (c[0][i] + c[1][i]) * (CAPPED ? rules.scale : rules.scale * LOG2_E);
        if (CAPPED) one = rules.softcap * LOG2_E * tanhf(one / rules.softcap);
        scores[i / 2][i % 2] = row + i / 2 * EIGHT < own.mine ? one : NOTHING;
    }
}

// The tokens' weights, left in shared memory, against the highest score that any warp has seen. `again`: some were seen
// before; their sums fade if the score is higher now.
__device__ __forceinline__ void weigh(Heads& heads, Seen& seen, float (&scores)[2][2], int parity, bool again) {
    const int warp = threadIdx.x / WARP, row = threadIdx.x % WARP / 4, head = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float highest = highest_of_tokens(fmaxf(scores[0][i], scores[1][i]));
        if (row == 0) heads.best[parity][head + i][warp] = highest;
    }
    sync_consumers();
    float faded[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float best[WARPS], highest = seen.best[i];
        load_floats(best, heads.best[parity][head + i]);
#pragma unroll
        for (int other = 0; other < WARPS; other++) highest = fmaxf(highest, best[other]);
        faded[i] = weight_of(seen.best[i], highest), seen.best[i] = highest;
        scores[0][i] = weight_of(scores[0][i], highest), scores[1][i] = weight_of(scores[1][i], highest);
        seen.total[i] = (again ? seen.total[i] * faded[i] : 0) + scores[0][i] + scores[1][i];
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        *(float2*)&heads.weights[warp][i * EIGHT + row][head] = make_float2(scores[i][0], scores[i][1]);
    if (again && row == 0) *(float2*)&heads.faded[warp][head] = make_float2(faded[0], faded[1]);
    __syncwarp();
}

// Values of tokens that follow each other, mixed into those so far: of rows in the cache while those last, then of the row
// behind them. What is not there weighs nothing.
__device__ __forceinline__ void mix(
    Seen& seen, const float (*weights)[MOST_SHARING], const u16* cached, int left, const u16* behind) {
    Values values[TOGETHER];
    float by[TOGETHER][SHARING > 4 ? MOST_SHARING : 4];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {  // all loads first: they take time
        const u16* row = i < left ? cached + i * HEAD_DIM : behind;
        values[i] = *(const Values*)((const u32*)row + Values::first());
        load_floats(by[i], weights[i]);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER * LANE_PAIRS; i++) {
        const u32 pair = values[i / LANE_PAIRS].pairs[i % LANE_PAIRS];
        const float low = low_of(pair), high = high_of(pair);
#pragma unroll
        for (int g = 0; g < SHARING; g++) {
            float(&mixed)[2] = seen.mixed[g][i % LANE_PAIRS];
            mixed[0] = fmaf(by[i / LANE_PAIRS][g], low, mixed[0]);
            mixed[1] = fmaf(by[i / LANE_PAIRS][g], high, mixed[1]);
        }
    }
}

// At most WARPS * AT_ONCE tokens. `parity`: another one than the last time.
__device__ __forceinline__ void see(
    Heads& heads, Seen& seen, const uint4 (&q)[HEAD_BLOCKS], const Tokens& tokens, int parity, bool again,
    const Rules& rules) {
    const Own own(tokens.count);
    float scores[2][2];
    score(scores, heads, q, tokens, own, rules);
    weigh(heads, seen, scores, parity, again);
    const float(*weights)[MOST_SHARING] = heads.weights[threadIdx.x / WARP];
#pragma unroll
    for (int i = 0; again && i < SHARING * LANE_PAIRS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            seen.mixed[i / LANE_PAIRS][i % LANE_PAIRS][half] *= heads.faded[threadIdx.x / WARP][i / LANE_PAIRS];
    const int left = tokens.cached - own.first;
    const u16* values = tokens.values + own.first * HEAD_DIM;
    const u16* behind = tokens.count > tokens.cached ? heads.new_value() : values + (left - 1) * HEAD_DIM;
#pragma unroll 1
    for (int token = 0; token < own.mine; token += TOGETHER)
        mix(seen, weights + token, values + token * HEAD_DIM, left - token, behind);
}

// What was seen by this block of one key head and `tokens` that come through the ring and, where it is `fresh` to the
// block, the new one, is left in shared memory: see `total_of_warps` and `sum_of_warps`; and heads.highest.
__device__ __forceinline__ void attend_tokens(
    Ring& ring, Cursor& at, Heads& heads, Mixed& mixed, const Rules& rules, int tokens, bool fresh) {
    constexpr int MOST = WARPS * AT_ONCE;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint4 q[HEAD_BLOCKS];
    Seen seen;
#pragma unroll
    for (int i = 0; i < HEAD_BLOCKS; i++)
        q[i] = lane / 4 < SHARING ? channels_of(heads.ready[min(lane / 4, SHARING - 1)], i) : make_uint4(0, 0, 0, 0);
    bool again = false;
    int parity = 0;
#pragma unroll 1
    for (int left = tokens; left + fresh > 0;) {
        const int cached = min(TOKENS, left), all = cached + (fresh && left <= TOKENS);
        const u16* keys = cached ? (const u16*)await(ring, at) : heads.new_key();
#pragma unroll 1
        for (int first = 0; first < all; first += MOST, again = true, parity ^= 1)
            see(heads, seen, q,
                {keys + first * HEAD_DIM, keys + SLOT / 4 + first * HEAD_DIM, cached - first, min(MOST, all - first)},
                parity, again, rules);
        if (cached) {
            u32 read = __float_as_uint(seen.total[0]);
#pragma unroll
            for (int i = 0; i < LANE_PAIRS; i++) read ^= __float_as_uint(seen.mixed[0][i][0]);
            done(ring, at, read);
        }
        left -= cached;
        if (all > cached) break;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float total = sum_of_tokens(seen.total[i]);
        if (lane / 4 == 0) heads.total[lane * 2 + i][warp] = total;
        if (lane / 4 == 0 && warp == 0) heads.highest[lane * 2 + i] = seen.best[i];
    }
#pragma unroll
    for (int g = 0; g < SHARING; g++)
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++)
            *(float2*)&mixed[warp][g * HEAD_DIM + 2 * (Values::first() + i)] =
                make_float2(seen.mixed[g][i][0], seen.mixed[g][i][1]);
    sync_consumers();
}

// The weights of a head.
__device__ __forceinline__ float total_of_warps(const Heads& heads, int head) { return sum_of(heads.total[head]); }

// The weighted values of a channel.
__device__ __forceinline__ float sum_of_warps(const Mixed& mixed, int element) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += mixed[warp][element];
    return sum;
}
