// One decode step of one sequence as one kernel: from the token to the logits, at the speed at which weights can be read.
//
// Every multiprocessor runs one block for the whole step. One warp of it streams the block's rows of every weight
// matrix, and its stretch of the cache, through a ring of shared memory: it never waits for an activation, so memory
// need not idle. The other warps follow with the arithmetic; blocks hand each other vectors word by word
// (exchange.cuh). Each block keeps the residual stream for itself, in registers. The norm's sum of squares is taken
// beside the products: its scale is needed only where an output is finished.
// All blocks have to be there at once: the launch must be cooperative.
// Macros: those of the other files, and GAINS (some norm's gain is not folded), HIDDEN, INNER, GATED, ACTIVATION, HALF,
// IS_BF16.

constexpr int ATTENDED = HEADS * HEAD_DIM, QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int VECTORS = vectors_of(HIDDEN);  // of a thread
constexpr int LONGEST = vectors_of(HIDDEN > ATTENDED ? (HIDDEN > INNER ? HIDDEN : INNER)
                                                     : (ATTENDED > INNER ? ATTENDED : INNER));
constexpr int EIGHTS = EIGHT * THREADS;
enum Linear { TO_QKV, FROM_ATTENTION, UP, DOWN, HEAD };  // in the order in which a step takes them, but for the last

struct Shared {
    Ring ring;
    Input<LONGEST * EIGHTS, GAINS ? VECTORS * EIGHTS : 0> input;
    Sums sums;
    Heads heads;
    Layer layers[2];  // this one and the next
    Share shares[5];  // of each linear
};

// Vectors that threads take eight elements of are as long as all threads' whole eights.
__device__ __forceinline__ Words words_of(const Step& step) {
    Words words = {step.words, step.words + QKV};
    words.attended = words.parts + max(1, gridDim.x / KV_HEADS) * 2 * PART_WORDS;
    words.attention = words.attended + vectors_of(ATTENDED) * EIGHTS / 2;
    words.inner = words.attention + VECTORS * EIGHTS;
    words.mlp = words.inner + vectors_of(INNER) * EIGHTS / 2;
    return words;
}

__device__ __forceinline__ Place place_of(const Step& step) {
    const long long slot = *step.slot;
    return {(int)slot, (int)step.chosen[slot], (int)step.lengths[slot]};
}

// A linear of a layer, or the head.
__device__ __forceinline__ Matrix matrix_of(Linear linear, const Step& step, const Layer& layer) {
    switch (linear) {
        case TO_QKV: return {layer.qkv, QKV, 1, HIDDEN};
        case FROM_ATTENTION: return {layer.out, HIDDEN, 1, ATTENDED};
        case UP: return {layer.up, INNER, GATED ? 2 : 1, HIDDEN};
        case DOWN: return {layer.down, HIDDEN, 1, INNER};
        default: return {step.head, step.vocabulary, 1, HIDDEN};
    }
}

// The producing warp.
__device__ __forceinline__ void produce(Shared& shared, const Step& step) {
    Filler filler = {shared.ring};
    const Place place = place_of(step);
#pragma unroll 1
    for (int i = 0; i <= 4 * step.layers; i++) {
        const Layer& layer = step.layer[min(i / 4, step.layers - 1)];
        const Linear linear = i == 4 * step.layers ? HEAD : (Linear)(i % 4);
        if (linear == FROM_ATTENTION) stream_cache(filler, step, layer, place);
        const Matrix matrix = matrix_of(linear, step, layer);
        stream_rows(filler, matrix, shared.shares[linear]);
    }
}

// The consuming warps' state.
struct Consumer {
    Shared& shared;
    const Step& step;
    const Place place;
    const Words words;
    Cursor at;
    int buffer = 0, parity = 0;
    float x[VECTORS][EIGHT];  // this thread's part of the residual stream, in the model's dtype but held in fp32

    // This thread's vectors that lie in a vector of `width`.
    __device__ static __forceinline__ int valid_of(int width) {
        return element_of(0) < width ? (width - element_of(0) + EIGHTS - 1) / EIGHTS : 0;
    }

    __device__ __forceinline__ Consumer(Shared& shared, const Step& step)
        : shared(shared), step(step), place(place_of(step)),
          words(words_of(step)) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                const bool there = element_of(v) < HIDDEN;
                x[v][i] = there ? widened(step.embedding[(long long)place.token * HIDDEN + element_of(v) + i]) : 0;
                x[v][i] = rounded(x[v][i] * step.multiplier);
            }
    }

    // The sum of what the warps have each summed, known to all threads.
    __device__ __forceinline__ float squares_of_all(float squares) {
        squares = sum_of_warp(squares);
        sync_consumers();  // the place may still be read
        if (threadIdx.x % WARP == 0) shared.sums.squares[parity][threadIdx.x / WARP] = squares;
        sync_consumers();
        return squares_of_warps();
    }

    __device__ __forceinline__ float squares_of_warps() const {
        float squares = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) squares += shared.sums.squares[parity][warp];
        return squares;
    }

    // x += multiplier · post(branch), rounded to the model's dtype.
    __device__ __forceinline__ void join(const u64* from, u32 epoch, const Post& post) {
        u32 data[VECTORS * EIGHT / 2][2];
        timed(shared.ring, FOR_WORDS, [&] {
            receive(from + 2 * threadIdx.x, 2 * THREADS, valid_of(HIDDEN) * EIGHT / 2, epoch, data);
        });
        float scale = post.multiplier, squares = 0;
        if (post.eps >= 0) {
#pragma unroll
            for (int i = 0; i < VECTORS * EIGHT; i++) {
                const float value = __uint_as_float(data[i / 2][i % 2]);
                squares = fmaf(value, value, squares);
            }
            scale *= rsqrtf(squares_of_all(squares) / HIDDEN + post.eps);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                const bool gain = post.gain && element_of(v) < HIDDEN;
                const float branch = __uint_as_float(data[(v * EIGHT + i) / 2][i % 2]) * scale;
                x[v][i] = rounded(x[v][i] + branch * (gain ? post.gain[element_of(v) + i] : 1));
            }
    }

    // This thread's eight elements of a linear's input, which its own warp will read; and what is left of them.
    __device__ __forceinline__ void put(int v, const float (&values)[EIGHT], bool rest) {
        u32 high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float first = values[2 * i], second = values[2 * i + 1];
            high[i] = packed(first, second);
            low[i] = packed(first - low_of(high[i]), second - high_of(high[i]));
        }
        *(uint4*)(shared.input.high + element_of(v)) = make_uint4(high[0], high[1], high[2], high[3]);
        if (rest) *(uint4*)(shared.input.rest + element_of(v)) = make_uint4(low[0], low[1], low[2], low[3]);
    }

    // What a linear behind a norm reads: x times the gain. Leaves the sum of squares for the scale.
    __device__ __forceinline__ void take_residual(const Norm& norm) {
        float squares = 0;
        parity ^= 1;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float scaled[EIGHT];
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                squares = fmaf(x[v][i], x[v][i], squares);
                const bool gain = GAINS && norm.gain && element_of(v) < HIDDEN;
                scaled[i] = gain ? x[v][i] * norm.gain[element_of(v) + i] : x[v][i];
            }
            put(v, scaled, GAINS);
        }
        squares = sum_of_warp(squares);
        if (threadIdx.x % WARP == 0) shared.sums.squares[parity][threadIdx.x / WARP] = squares;
        __syncwarp();
    }

    // What came in pairs of 16-bit floats.
    __device__ __forceinline__ void take_pairs(const u64* from, int width, u32 epoch) {
        u32 data[LONGEST * EIGHT / 4][2];
        timed(shared.ring, FOR_WORDS, [&] {
            receive(from + 2 * threadIdx.x, 2 * THREADS, valid_of(width) * EIGHT / 4, epoch, data);
        });
#pragma unroll
        for (int v = 0; v < LONGEST; v++)
            *(uint4*)(shared.input.high + element_of(v)) =
                make_uint4(data[2 * v][0], data[2 * v][1], data[2 * v + 1][0], data[2 * v + 1][1]);
        __syncwarp();
    }

    // What an output is finished with.
    struct Ending {
        const float* bias;
        float eps;
    };

    __device__ __forceinline__ Ending ending_of(Linear linear, const Layer& layer) const {
        switch (linear) {
            case TO_QKV: return {layer.qkv_bias, layer.attention.eps};
            case FROM_ATTENTION: return {layer.out_bias, -1};
            case UP: return {layer.up_bias, layer.mlp.eps};
            case DOWN: return {layer.down_bias, -1};
            default: return {step.head_bias, step.head_norm.eps};
        }
    }

    // One of this block's outputs in each lane of the first warp; `there`: whether the lane has one of its own.
    __device__ __forceinline__ void finish(
        Linear linear, const Ending& by, int n, bool there, float value, float up, u32 epoch) const {
        const float scale = by.eps >= 0 ? rsqrtf(squares_of_warps() / HIDDEN + by.eps) : 1;
        value = value * scale + (by.bias ? by.bias[n] : 0);
        if (linear == FROM_ATTENTION || linear == DOWN) {
            u64* to = linear == DOWN ? words.mlp : words.attention;
            if (there) put_word(to + ::place(n), __float_as_uint(value), epoch);
        } else if (linear == UP) {
            value = activated(value);
            if (GATED) value *= up * scale + (by.bias ? by.bias[INNER + n] : 0);
            const float next = __shfl_down_sync(~0u, value, 1);
            if (there && n % 2 == 0) put_word(words.inner + pair_place(n), packed(value, next), epoch);
        } else if (linear == TO_QKV) {
            if (there) put_word(words.qkv + n, __float_as_uint(rounded(value)), epoch);
        } else if (there) {
            value *= step.head_multiplier;
            step.logits[n] = step.head_softcap > 0 ? step.head_softcap * tanhf(value / step.head_softcap) : value;
        }
    }

    // All of this block's outputs of a linear.
    __device__ __forceinline__ void apply(Linear linear, const Layer& layer, u32 epoch) {
        const int parts = GATED && linear == UP ? 2 : 1, lane = threadIdx.x % WARP;
        const int width = linear == DOWN ? INNER : linear == FROM_ATTENTION ? ATTENDED : HIDDEN;
        const bool behind_norm = linear != DOWN && linear != FROM_ATTENTION;
        const Share share = shared.shares[linear];
        const Ending ending = ending_of(linear, layer);
#pragma unroll 1
        for (int begun = 0; begun < share.count; begun += GROUP, buffer ^= 1) {
            float (&sums)[WARPS][2 * GROUP] = shared.sums.rows[buffer];
            const int count = min(GROUP, share.count - begun);
            sum_rows(shared.ring, at, sums, shared.input, GAINS && behind_norm, count, parts, width);
            timed(shared.ring, FOR_WARPS, [] { sync_consumers(); });  // whoever is a group ahead writes elsewhere
            if (threadIdx.x >= WARP) continue;
            float value = 0, up = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) value += sums[warp][lane], up += sums[warp][GROUP + lane];
            finish(linear, ending, share.first + begun + min(lane, count - 1), lane < count, value, up, epoch);
        }
    }

    // Copy a layer's data to where it can be read at once.
    __device__ __forceinline__ void fetch_layer(int index) {
        if (threadIdx.x < sizeof(Layer) / 4 && index < step.layers)
            ((u32*)&shared.layers[index % 2])[threadIdx.x] = ((const u32*)&step.layer[index])[threadIdx.x];
    }

    __device__ __forceinline__ void run(u32 epoch) {
        fetch_layer(0);
        sync_consumers();
        u32 joined = epoch;
#pragma unroll 1
        for (int i = 0; i <= 4 * step.layers; i++) {
            const Linear linear = i == 4 * step.layers ? HEAD : (Linear)(i % 4);
            const Layer &layer = shared.layers[i / 4 % 2], &before = shared.layers[i / 4 % 2 ^ 1];
            if (linear == TO_QKV) epoch++;
            if (linear == FROM_ATTENTION) attend(shared.ring, at, shared.heads, step, words, layer, place, epoch);
            if (linear == FROM_ATTENTION || linear == DOWN) {
                const bool down = linear == DOWN;
                take_pairs(down ? words.inner : words.attended, down ? INNER : ATTENDED, epoch);
            } else {
                if (i) join(linear == UP ? words.attention : words.mlp, joined,
                            linear == UP ? layer.attention_post : before.mlp_post);
                if (linear == UP) fetch_layer(i / 4 + 1);  // behind it the warps meet, before the layer begins
                take_residual(linear == TO_QKV ? layer.attention : linear == UP ? layer.mlp : step.head_norm);
            }
            joined = epoch;
            apply(linear, layer, epoch);
        }
    }
};

// The last block to leave moves the epoch on. Where it would wrap, words that have long not been written could come to
// look new, so all are forgotten.
__device__ __forceinline__ void leave(const Step& step, u32 epoch) {
    if (atomicAdd(step.left, 1) != gridDim.x - 1) return;
    *step.left = 0;
    const u32 next = epoch + step.layers;
    const bool wraps = next + step.layers < next;  // in the next launch
    *step.epoch = wraps ? 0 : next;
    for (int i = 0; wraps && i < step.words_in_all; i++) step.words[i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, 1) step(const Step step) {
    extern __shared__ char memory[];
    Shared& shared = *(Shared*)(memory + (128 - address(memory) % 128) % 128);
    const u32 epoch = *(volatile u32*)step.epoch;
    const long long begun = TIMED ? clock64() : 0;
    if (threadIdx.x == 0) shared.ring.init();
    if (threadIdx.x < WAITING) shared.ring.waited[threadIdx.x] = 0;
    if (threadIdx.x < 5) {
        const int outputs[5] = {QKV, HIDDEN, INNER, HIDDEN, step.vocabulary};
        shared.shares[threadIdx.x] = Share::of(outputs[threadIdx.x]);
    }
    __syncthreads();
    if (threadIdx.x < THREADS) {
        Consumer(shared, step).run(epoch);
    } else {
        produce(shared, step);
    }
    if (TIMED && threadIdx.x == 0) shared.ring.waited[IN_ALL] = clock64() - begun;
    __syncthreads();
    if (TIMED && threadIdx.x < WAITING) step.waited[blockIdx.x * WAITING + threadIdx.x] = shared.ring.waited[threadIdx.x];
    if (threadIdx.x == 0) leave(step, epoch);
}
