// One decode step of one sequence as one kernel: from the token to the logits, at the speed at which weights can be read.
//
// Every multiprocessor runs one block for the whole step. One thread of it streams the block's rows of every weight
// matrix, and its stretch of the cache, through a ring of shared memory (stream.cuh): it never waits for an activation, so
// memory need not idle. The other warps follow with the arithmetic (matvec.cuh, attend.cuh); blocks hand each other
// vectors word by word (exchange.cuh). Each block keeps the residual stream for itself, in registers. The norm's sum of squares is taken
// beside the products: its scale is needed only where an output is finished.
// All blocks have to be there at once: the launch must be cooperative.
// Macros: those of the other files, and GAINS (some norm's gain is not folded), HIDDEN, INNER, GATED, ACTIVATION, HALF,
// IS_BF16.

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int LONGEST = larger(HIDDEN, larger(ATTENDED, INNER));
constexpr int PARTS = larger(Form<HIDDEN>::parts, larger(Form<ATTENDED>::parts, Form<INNER>::parts));
constexpr int loads_of(int words) { return (words / 2 + THREADS - 1) / THREADS; }  // of a thread, of two words each
constexpr int OWN = loads_of(HIDDEN);                                               // pairs of the residual stream

// What a linear reads: 16-bit floats; and, for inputs that are not, what is left of them.
struct Input {
    u16 high[LONGEST], rest[GAINS ? HIDDEN : EIGHT];
};

struct Shared {
    Ring ring;
    union alignas(16) {  // one after the other
        Input input;
        Mixed mixed;
    };
    Sums sums;
    Heads heads;
    Layer layers[2];  // this one and the next
    Share shares[5];  // of each linear
};

// The order of logits, and of tokens from last to first among equals. NaN is below all.
__device__ __forceinline__ u64 ranked(float logit, int token) {
    const u32 bits = __float_as_uint(logit);
    if (logit != logit) return 0;
    return (u64)(bits >> 31 ? ~bits : bits | 0x80000000) << 32 | ~(u32)token;
}

// The consuming warps' state.
struct Consumer {
    Shared& shared;
    const Step& step;
    const Place place;
    const Words words;
    Cursor at;
    int buffer = 0, parity = 0;
    float x[OWN][2];    // this thread's pairs of the residual stream, in the model's dtype but held in fp32
    u64 likeliest = 0;  // of the logits of this thread
    float eps;          // of the norm before the linear; below zero: there is none
    Part<PARTS> part;
    Part<GAINS ? PARTS : 0> rest;

    __device__ static __forceinline__ int pair_of(int i) { return threadIdx.x + i * THREADS; }

    // How many of this thread's loads, of two words each, lie in so many words.
    __device__ static __forceinline__ int valid_of(int words) {
        return (words / 2 - (int)threadIdx.x + THREADS - 1) / THREADS;
    }

    __device__ __forceinline__ Consumer(Shared& shared, const Step& step)
        : shared(shared), step(step), place(place_of(step)), words{step.words} {
        const u32* row = (const u32*)(step.embedding + (long long)place.token * HIDDEN);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const u32 pair = i < valid_of(HIDDEN) ? row[pair_of(i)] : 0;
            x[i][0] = rounded(low_of(pair) * step.multiplier);
            x[i][1] = rounded(high_of(pair) * step.multiplier);
        }
    }

    // Leave the sum of what this warp's threads have each summed; another place than the last, which may still be read.
    __device__ __forceinline__ void leave_sum(float sum) {
        sum = sum_of_warp(sum);
        parity ^= 1;
        if (threadIdx.x % WARP == 0) shared.sums.squares[parity][threadIdx.x / WARP] = sum;
    }

    // 1/RMS of the vector whose squares' sums the warps have left, once all have.
    __device__ __forceinline__ float inverse_rms(float eps) const {
        return rsqrtf(sum_of(shared.sums.squares[parity]) / HIDDEN + eps);
    }

    // x += multiplier · post(branch), rounded to the model's dtype.
    __device__ __forceinline__ void join(const u64* from, u32 epoch, const Post& post) {
        float branch[OWN][2] = {}, by = post.multiplier;
        timed(shared.ring, FOR_WORDS, [&] {
            receive<OWN>([&](int i) { return from + 2 * pair_of(i); }, valid_of(HIDDEN), epoch, [&](int i, u32 low, u32 high) {
                branch[i][0] = __uint_as_float(low), branch[i][1] = __uint_as_float(high);
            });
        });
        if (post.eps >= 0) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < 2 * OWN; i++) squares = fmaf(branch[i / 2][i % 2], branch[i / 2][i % 2], squares);
            leave_sum(squares);
            sync_consumers();
            by *= inverse_rms(post.eps);
        }
#pragma unroll
        for (int i = 0; i < 2 * OWN; i++) {
            const bool gain = post.gain && i / 2 < valid_of(HIDDEN);
            float& own = x[i / 2][i % 2];
            own = rounded(own + branch[i / 2][i % 2] * by * (gain ? post.gain[2 * pair_of(i / 2) + i % 2] : 1));
        }
    }

    // What a linear behind a norm reads: x times the gain. The sum of squares is known when the outputs are.
    __device__ __forceinline__ void take_residual(const Norm& norm) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            squares = fmaf(x[i][0], x[i][0], fmaf(x[i][1], x[i][1], squares));
            if (i >= valid_of(HIDDEN)) continue;
            float2 gain = make_float2(1, 1);
            if (GAINS && norm.gain) gain = *(const float2*)(norm.gain + 2 * pair_of(i));
            const float low = x[i][0] * gain.x, high = x[i][1] * gain.y;
            const u32 both = packed(low, high);
            ((u32*)shared.input.high)[pair_of(i)] = both;
            if (GAINS) ((u32*)shared.input.rest)[pair_of(i)] = packed(low - low_of(both), high - high_of(both));
        }
        sync_consumers();
        part.take<HIDDEN>(shared.input.high);
        if (GAINS) rest.take<HIDDEN>(shared.input.rest);
        eps = norm.eps;
        leave_sum(squares);
    }

    // What came in pairs of 16-bit floats.
    template <int WIDTH>
    __device__ __forceinline__ void take_pairs(const u64* from, u32 epoch) {
        timed(shared.ring, FOR_WORDS, [&] {
            receive<loads_of(WIDTH / 2)>(
                [&](int i) { return from + 2 * pair_of(i); }, valid_of(WIDTH / 2), epoch,
                [&](int i, u32 low, u32 high) { ((uint2*)shared.input.high)[pair_of(i)] = make_uint2(low, high); });
        });
        sync_consumers();
        part.take<WIDTH>(shared.input.high);
        eps = -1;
    }

    __device__ __forceinline__ const float* bias_of(Linear linear, const Layer& layer) const {
        switch (linear) {
            case TO_QKV: return layer.qkv_bias;
            case FROM_ATTENTION: return layer.out_bias;
            case UP: return layer.up_bias;
            case DOWN: return layer.down_bias;
            default: return step.head_bias;
        }
    }

    // Output n, known to all its lanes, of which one has it if it is `there`. `up`: of a gated MLP.
    __device__ __forceinline__ void finish(Linear linear, int n, bool there, float value, float up, u32 epoch) {
        if (linear == FROM_ATTENTION || linear == DOWN) {
            if (there) put_word((linear == DOWN ? words.mlp() : words.attention()) + n, __float_as_uint(value), epoch);
        } else if (linear == UP) {
            value = activated(value);
            if (GATED) value *= up;
            const float next = __shfl_down_sync(~0u, value, WARPS);
            if (there && n % 2 == 0) put_word(words.inner() + n / 2, packed(value, next), epoch);
        } else if (linear == TO_QKV) {
            if (there) put_word(words.qkv() + n, __float_as_uint(rounded(value)), epoch);
        } else if (there) {
            value *= step.head_multiplier;
            if (step.head_softcap > 0) value = step.head_softcap * tanhf(value / step.head_softcap);
            step.logits[n] = value;
            likeliest = max(likeliest, ranked(value, n));
        }
    }

    // All of this block's outputs of a linear.
    __device__ __forceinline__ void apply(
        Linear linear, const Matrix& of, const Share& share, const float* bias, u32 epoch) {
        const int output = threadIdx.x / WARPS, warp = threadIdx.x % WARPS;  // whose sums this thread adds up
#pragma unroll 1
        for (int begun = 0; begun < share.count; begun += GROUP, buffer ^= 1) {
            auto& sums = shared.sums.rows[buffer];
            const int count = min(GROUP, share.count - begun), n = share.first + begun + min(output, count - 1);
            const float of_value = bias ? bias[n] : 0, of_up = bias && of.parts == 2 ? bias[of.n + n] : 0;
            const Part<0> none = {};
            if (linear == FROM_ATTENTION) {
                sum_rows<ATTENDED>(shared.ring, at, sums, part, none, count, 1);
            } else if (linear == DOWN) {
                sum_rows<INNER>(shared.ring, at, sums, part, none, count, 1);
            } else {
                sum_rows<HIDDEN>(shared.ring, at, sums, part, rest, count, of.parts);
            }
            timed(shared.ring, FOR_WARPS, [] { sync_consumers(); });  // whoever is a group ahead writes elsewhere
            const float by = eps >= 0 ? inverse_rms(eps) : 1;
            float value = sums[warp][output], up = of.parts == 2 ? sums[warp][GROUP + output] : 0;
#pragma unroll
            for (int apart = 1; apart < WARPS; apart *= 2) {
                value += __shfl_xor_sync(~0u, value, apart);
                if (GATED) up += __shfl_xor_sync(~0u, up, apart);
            }
            finish(linear, n, output < count && warp == 0, value * by + of_value, up * by + of_up, epoch);
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
            const Linear linear = linear_of(step, i);
            const Layer &layer = shared.layers[i / 4 % 2], &before = shared.layers[i / 4 % 2 ^ 1];
            if (linear == TO_QKV) epoch++;
            const Matrix of = matrix_of(linear, step, layer);
            const Share share = shared.shares[linear];  // like the bias before the wait, where nobody waits for it
            const float* bias = bias_of(linear, layer);
            // A block without outputs of a linear must not wait for its inputs: nobody waits for such a block, and the
            // words could be those of the next layer when it comes.
            if (linear == FROM_ATTENTION) {
                attend(shared.ring, at, shared.heads, shared.mixed, step, words, layer, place, epoch);
                if (share.count) take_pairs<ATTENDED>(words.attended(), epoch);
            } else if (linear == DOWN) {
                if (share.count) take_pairs<INNER>(words.inner(), epoch);
            } else {
                if (i) join(linear == UP ? words.attention() : words.mlp(), joined,
                            linear == UP ? layer.attention_post : before.mlp_post);
                if (linear == UP) fetch_layer(i / 4 + 1);  // behind it the threads meet, before the layer begins
                take_residual(linear == TO_QKV ? layer.attention : linear == UP ? layer.mlp : step.head_norm);
            }
            joined = epoch;
            apply(linear, of, share, bias, epoch);
        }
        if (!step.following) return;
#pragma unroll
        for (int apart = 1; apart < WARP; apart *= 2) likeliest = max(likeliest, __shfl_xor_sync(~0u, likeliest, apart));
        if (threadIdx.x % WARP == 0) atomicMax(step.likeliest, likeliest);
    }
};

// Append the likeliest token, as `settle` of kernels/decode/settle.py does. Where all logits are NaN: the last token.
__device__ __forceinline__ void settle(const Step& step) {
    const u64 best = atomicExch(step.likeliest, 0);
    const long long token = best ? ~(u32)best : step.vocabulary - 1, slot = *step.slot;
    *step.following = step.chosen[slot] = token;
    step.lengths[slot] = slot == step.spare ? 0 : step.lengths[slot] + 1;
}

// The last block to leave ends the step and moves the epoch on. Where it would wrap, words that have long not been
// written could come to look new, so all are forgotten.
__device__ __forceinline__ void leave(const Step& step, u32 epoch) {
    __threadfence();
    if (atomicAdd(step.left, 1) != gridDim.x - 1) return;
    __threadfence();
    *step.left = 0;
    if (step.following) settle(step);
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
    } else if (threadIdx.x == THREADS) {
        produce(shared.ring, step, shared.shares);
    }
    if (TIMED && threadIdx.x == 0) shared.ring.waited[IN_ALL] = clock64() - begun;
    __syncthreads();
    if (TIMED && threadIdx.x < WAITING) step.waited[blockIdx.x * WAITING + threadIdx.x] = shared.ring.waited[threadIdx.x];
    if (threadIdx.x == 0) leave(step, epoch);
}
