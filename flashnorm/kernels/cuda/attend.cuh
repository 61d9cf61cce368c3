// Attention of one new token against the cache, shared out among blocks by key head and by stretches of the sequence.
//
// Cached keys and values come through the ring like weights, for they do not depend on the token either. A block norms
// and rotates the heads that it needs itself. For every slot of keys and one of values, groups of LANES lanes take the
// products of their tokens with all query heads that share the key head; a warp for each query head turns them into
// weights; then threads that own two channels each mix the values. Blocks join their stretches in a fixed order: the
// block of the first one, which also takes the new token and writes it to the cache for the steps to come.
// Macros: HEADS, KV_HEADS, HEAD_DIM, ROTARY (half the turning channels), INTERLEAVED, CAPPED, STRETCH (tokens that are
// worth a block).

constexpr int SHARING = HEADS / KV_HEADS;  // query heads of one key head
constexpr int HEAD_VECTORS = HEAD_DIM / EIGHT;
constexpr int LANES = HEAD_VECTORS % 32 == 0 ? 32 : HEAD_VECTORS % 16 == 0 ? 16 : HEAD_VECTORS % 8 == 0 ? 8 :
                      HEAD_VECTORS % 4 == 0 ? 4 : HEAD_VECTORS % 2 == 0 ? 2 : 1;
constexpr int OWN = HEAD_VECTORS / LANES;  // vectors of a lane
constexpr int SUBS = THREADS / LANES;
constexpr int TOKENS = SLOT / 2 / HEAD_DIM;           // of keys, or of values, in a slot
constexpr int SPAN = (HEAD_DIM + WARP - 1) / WARP;    // channels of a lane where a warp has one head
constexpr int PAIRS = SHARING * HEAD_DIM / 2;         // of output channels of a key head
constexpr int OF_THREAD = (PAIRS + THREADS - 1) / THREADS;
constexpr int MIXERS = PAIRS < THREADS ? THREADS / PAIRS : 1;  // threads that share a pair, and the tokens
constexpr int SCORES = (TOKENS + 1 + 3) / 4 * 4;               // with the new token
constexpr int PART_WORDS = KV_HEADS * PAIRS * 2;  // of one stretch: sums; and as many: highest score, sum of weights
#define NOTHING __int_as_float(0xFF800000)        // minus infinity: the score of what is not there
static_assert(HEAD_DIM % EIGHT == 0 && HEADS % KV_HEADS == 0 && TOKENS > 0 && SHARING <= WARPS, "does not divide");

struct Heads {
    alignas(16) float raw[SHARING + 2][HEAD_DIM];   // q, k, v
    alignas(16) u16 fresh[2][HEAD_DIM];             // k and v as the cache holds them
    alignas(16) float scores[SHARING][SCORES];      // then weights
    float faded[SHARING], best[SHARING], total[SHARING], mixed[MIXERS][PAIRS][2];
};

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

__device__ __forceinline__ void stream_cache(
    Filler& filler, const Step& step, const Layer& layer, const Place& place) {
    const int stretches = stretches_of(layer, place.position);
#pragma unroll 1
    for (int index = blockIdx.x; index < KV_HEADS * stretches; index += gridDim.x) {
        const Stretch own = stretch_of(layer, place.position, stretches, index);
        long long from = cached(step, place, own.head, own.start);
#pragma unroll 1
        for (int left = own.stop - own.start; left > 0; left -= TOKENS, from += TOKENS * HEAD_DIM)
#pragma unroll 1
            for (int part = 0; part < 2; part++)
                filler.fill((part ? layer.values : layer.keys) + from, min(TOKENS, left) * HEAD_DIM * 2, 1, 0);
    }
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

// One warp norms and turns one head in place.
__device__ __forceinline__ void prepare_head(float* head, const float* gain, float eps, const Angles& angles) {
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
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SPAN; i++)
        if (lane + i * WARP < HEAD_DIM) head[lane + i * WARP] = rounded(own[i]);
    __syncwarp();
}

// q, k and v of a key head, from their words, ready for use.
__device__ __forceinline__ void fetch_heads(
    Heads& heads, const u64* words, u32 epoch, const Layer& layer, int head, const Angles& angles) {
#pragma unroll 1
    for (int i = threadIdx.x * 2; i < (SHARING + 2) * HEAD_DIM; i += THREADS * 2) {
        const int which = i / HEAD_DIM, d = i % HEAD_DIM;
        const int row = which < SHARING ? head * SHARING + which : HEADS + (which - SHARING) * KV_HEADS + head;
        u32 data[1][2];
        receive(words + row * HEAD_DIM + d, 0, 1, epoch, data);
        heads.raw[which][d] = __uint_as_float(data[0][0]), heads.raw[which][d + 1] = __uint_as_float(data[0][1]);
    }
    sync_consumers();
#pragma unroll 1
    for (int which = threadIdx.x / WARP; which < SHARING + 2; which += WARPS) {
        const bool query = which < SHARING;
        if (which <= SHARING)
            prepare_head(heads.raw[which], query ? layer.q_gain : layer.k_gain, query ? layer.q_eps : layer.k_eps, angles);
#pragma unroll 1
        for (int d = threadIdx.x % WARP; !query && d < HEAD_DIM; d += WARP)
            heads.fresh[which - SHARING][d] = packed(heads.raw[which][d], 0);
    }
    sync_consumers();
}

__device__ __forceinline__ float weight_of(float score, float best) {
    return __expf(score - (best == NOTHING ? 0 : best));  // 0 where nothing was seen
}

__device__ __forceinline__ float dot(uint4 left, const float (&right)[EIGHT], float sum) {
    const u32 pairs[4] = {left.x, left.y, left.z, left.w};
    float other = 0;  // two chains
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(low_of(pairs[i]), right[2 * i], sum);
        other = fmaf(high_of(pairs[i]), right[2 * i + 1], other);
    }
    return sum + other;
}

// Sums of N values at once over every LANES neighbouring lanes, both powers of two: the first of `values` becomes that
// of value `value_of_lane<N>()`, and where N > LANES the next ones those of the values behind it.
template <int N>
__device__ __forceinline__ void sum_of_each(float (&values)[N]) {
    int apart = 1;
#pragma unroll
    for (int half = N / 2; half >= 1 && apart < LANES; half /= 2, apart *= 2)
#pragma unroll
        for (int i = 0; i < half; i++) {
            const bool upper = threadIdx.x & apart;
            const float mine = upper ? values[i + half] : values[i], theirs = upper ? values[i] : values[i + half];
            values[i] = mine + __shfl_xor_sync(~0u, theirs, apart);
        }
#pragma unroll
    for (; apart < LANES; apart *= 2) values[0] += __shfl_xor_sync(~0u, values[0], apart);
}

template <int N>
__device__ __forceinline__ int value_of_lane() {
    int value = 0, bit = 1;
#pragma unroll
    for (int half = N / 2; half >= 1 && bit < LANES; half /= 2, bit *= 2)
        if (threadIdx.x & bit) value += half;
    return value;
}

// The products of `count` keys, and of the new one where `fresh`, with all query heads.
__device__ __forceinline__ void score(
    Heads& heads, const float (&q)[SHARING][OWN][EIGHT], const uint4* keys, int count, bool fresh, float scale,
    float softcap) {
    constexpr int N = SHARING > 4 ? 8 : SHARING > 2 ? 4 : SHARING;
    const int lane = threadIdx.x % LANES;
#pragma unroll 1
    for (int begin = 0; begin < count + fresh; begin += SUBS) {
        const int token = begin + threadIdx.x / LANES;
        const uint4* key = token < count ? keys + token * HEAD_VECTORS : (const uint4*)heads.fresh[0];
        float sums[N] = {};
#pragma unroll
        for (int v = 0; v < OWN; v++) {
            const uint4 vector = key[v * LANES + lane];
#pragma unroll
            for (int g = 0; g < SHARING; g++) sums[g] = dot(vector, q[g][v], sums[g]);
        }
        sum_of_each(sums);
        constexpr int LEFT = N > LANES ? N / LANES : 1;
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            const int g = value_of_lane<N>() + i;
            sums[i] *= scale;
            if (CAPPED) sums[i] = softcap * tanhf(sums[i] / softcap);
            if (lane < N && g < SHARING && token < count + fresh) heads.scores[g][token] = sums[i];
        }
    }
}

// Scores to weights; `best` and `total` are those of this warp's query head so far.
__device__ __forceinline__ void weigh(Heads& heads, int count, float& best, float& total) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (warp >= SHARING) return;
    float* scores = heads.scores[warp];
    float highest = best, sum = 0;
#pragma unroll 1
    for (int token = lane; token < count; token += WARP) highest = fmaxf(highest, scores[token]);
#pragma unroll
    for (int apart = 1; apart < WARP; apart *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, apart));
#pragma unroll 1
    for (int token = lane; token < count; token += WARP) sum += scores[token] = weight_of(scores[token], highest);
    const float faded = weight_of(best, highest);
    best = highest;
    total = total * faded + sum_of_warp(sum);
    if (lane == 0) heads.faded[warp] = faded, heads.best[warp] = best, heads.total[warp] = total;
}

// Weighted values of this thread's pairs of channels; `mixed` are those so far.
__device__ __forceinline__ void mix(
    const Heads& heads, float (&mixed)[OF_THREAD][2], const u32* values, int count, bool fresh) {
#pragma unroll
    for (int i = 0; i < OF_THREAD; i++) {
        const int mixer = threadIdx.x / PAIRS, pair = MIXERS > 1 ? threadIdx.x % PAIRS : threadIdx.x + i * THREADS;
        if (mixer >= MIXERS || pair >= PAIRS) continue;
        const int g = pair / (HEAD_DIM / 2), channels = pair % (HEAD_DIM / 2);
        const float faded = heads.faded[g], *weights = heads.scores[g];
        float low = mixed[i][0] * faded, high = mixed[i][1] * faded;
#pragma unroll 4
        for (int token = mixer; token < count; token += MIXERS) {
            const u32 value = values[token * (HEAD_DIM / 2) + channels];
            low = fmaf(weights[token], low_of(value), low);
            high = fmaf(weights[token], high_of(value), high);
        }
        if (fresh && mixer == 0) {
            const u32 value = ((const u32*)heads.fresh[1])[channels];
            low = fmaf(weights[count], low_of(value), low);
            high = fmaf(weights[count], high_of(value), high);
        }
        mixed[i][0] = low, mixed[i][1] = high;
    }
}

// A pair of channels joined with those of the other stretches; a few are asked for at once.
__device__ __forceinline__ u32 join_stretches(
    float best, float total, float low, float high, const u64* words, int stretches, u32 epoch) {
    constexpr int BATCH = 8;
#pragma unroll 1
    for (int first = 1; first < stretches; first += BATCH) {
        u32 data[2 * BATCH][2];
        receive(words + 2ll * first * PART_WORDS, PART_WORDS, 2 * min(BATCH, stretches - first), epoch, data);
        float highest = best;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i < stretches) highest = fmaxf(highest, __uint_as_float(data[2 * i + 1][0]));
        const float faded = weight_of(best, highest);
        best = highest, total *= faded, low *= faded, high *= faded;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float by = first + i < stretches ? weight_of(__uint_as_float(data[2 * i + 1][0]), highest) : 0;
            total = fmaf(by, __uint_as_float(data[2 * i + 1][1]), total);
            low = fmaf(by, __uint_as_float(data[2 * i][0]), low);
            high = fmaf(by, __uint_as_float(data[2 * i][1]), high);
        }
    }
    return packed(low / total, high / total);
}

// What a block found, to the words of attention's outputs, or to those of its stretch.
__device__ __forceinline__ void publish(
    const Heads& heads, const Words& to, const Stretch& own, int stretches, u32 epoch) {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const int g = pair / (HEAD_DIM / 2), channel = pair % (HEAD_DIM / 2) * 2;
        float low = 0, high = 0;
#pragma unroll
        for (int mixer = 0; mixer < MIXERS; mixer++)
            low += heads.mixed[mixer][pair][0], high += heads.mixed[mixer][pair][1];
        u64* words = to.parts + (own.head * PAIRS + pair) * 2;
        if (own.number) {
            words += 2ll * own.number * PART_WORDS;
            put_word(words, __float_as_uint(low), epoch);
            put_word(words + 1, __float_as_uint(high), epoch);
            put_word(words + PART_WORDS, __float_as_uint(heads.best[g]), epoch);
            put_word(words + PART_WORDS + 1, __float_as_uint(heads.total[g]), epoch);
        } else {
            const u32 both = join_stretches(heads.best[g], heads.total[g], low, high, words, stretches, epoch);
            put_word(to.attended + pair_place((own.head * SHARING + g) * HEAD_DIM + channel), both, epoch);
        }
    }
}

// One stretch of one key head.
__device__ __forceinline__ void attend_stretch(
    Ring& ring, Cursor& at, Heads& heads, const Layer& layer, int tokens, bool first) {
    float q[SHARING][OWN][EIGHT], best = NOTHING, total = 0, mixed[OF_THREAD][2] = {};
#pragma unroll
    for (int g = 0; g < SHARING; g++)
#pragma unroll
        for (int i = 0; i < OWN * EIGHT; i++)
            q[g][i / EIGHT][i % EIGHT] = heads.raw[g][(i / EIGHT * LANES + threadIdx.x % LANES) * EIGHT + i % EIGHT];
    const float scale = layer.scale, softcap = layer.softcap;
#pragma unroll 1
    for (int left = tokens;; left -= TOKENS) {
        const int count = min(TOKENS, left);
        const bool fresh = first && left <= TOKENS, old = count > 0;  // the new token comes with the last
        Cursor behind = at;
        behind.advance();
        const uint4* keys = old ? (const uint4*)await(ring, at) : nullptr;
        score(heads, q, keys, count, fresh, scale, softcap);
        sync_consumers();
        weigh(heads, count + fresh, best, total);
        sync_consumers();
        const u32* values = old ? (const u32*)await(ring, behind) : nullptr;
        mix(heads, mixed, values, count, fresh);
        if (old) done(ring, at), done(ring, at);
        if (left <= TOKENS) break;
        sync_consumers();  // the weights have been used
    }
#pragma unroll
    for (int i = 0; i < OF_THREAD; i++) {
        const int mixer = threadIdx.x / PAIRS, pair = MIXERS > 1 ? threadIdx.x % PAIRS : threadIdx.x + i * THREADS;
        if (mixer < MIXERS && pair < PAIRS)
            heads.mixed[mixer][pair][0] = mixed[i][0], heads.mixed[mixer][pair][1] = mixed[i][1];
    }
    sync_consumers();
}

// This block's part of a layer's attention, from the words of q, k and v to the words of its outputs, in pairs.
__device__ __forceinline__ void attend(
    Ring& ring, Cursor& at, Heads& heads, const Step& step, const Words& words, const Layer& layer, const Place& place,
    u32 epoch) {
    const int stretches = stretches_of(layer, place.position);
    if (blockIdx.x >= KV_HEADS * stretches) return;
    const Angles angles(layer, place.position);
#pragma unroll 1
    for (int index = blockIdx.x; index < KV_HEADS * stretches; index += gridDim.x) {
        const Stretch own = stretch_of(layer, place.position, stretches, index);
        fetch_heads(heads, words.qkv, epoch, layer, own.head, angles);
        attend_stretch(ring, at, heads, layer, own.stop - own.start, own.number == 0);
        publish(heads, words, own, stretches, epoch);
        const long long here = cached(step, place, own.head, place.position);
#pragma unroll 1
        for (int d = threadIdx.x; own.number == 0 && d < HEAD_DIM; d += THREADS)
            layer.keys[here + d] = heads.fresh[0][d], layer.values[here + d] = heads.fresh[1][d];
        sync_consumers();
    }
}
