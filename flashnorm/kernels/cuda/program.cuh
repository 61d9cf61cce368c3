// A decode step as data. Vectors (gains, biases, angles) are fp32; a null pointer: there is none; an eps below zero: no
// norm. Matrices are of the model's dtype with rows that follow each other.

struct Norm {
    const float* gain;  // before the matmul, where it is not folded
    float eps;
};

struct Post {  // between a branch and the residual stream
    const float* gain;
    float eps, multiplier;
};

struct Rules {  // of attention
    const float *q_gain, *k_gain, *cos, *sin;
    float q_eps, k_eps, scale, softcap;  // softcap 0: none
    int window;                          // 0: none

    __device__ __forceinline__ int seen(int position) const {  // tokens of the cache
        return window ? min(position, window - 1) : position;
    }
};

struct Layer {
    const u16 *qkv, *out, *up, *down;  // q, k, v; gate and up
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;
    u16 *keys, *values;
    Norm attention, mlp;
    Post attention_post, mlp_post;
    Rules rules;
};

struct Step {
    const Layer* layer;
    const u16 *embedding, *head;
    const float* head_bias;
    Norm head_norm;
    const long long* slot;
    long long *chosen, *lengths;  // by slot
    float* logits;
    long long* following;  // the likeliest next token, which then also ends the step: chosen, one longer. Null: it does not
    u64* words;
    u32 *epoch, *left;
    u64* likeliest;
    u64* waited;  // where the kernel is timed: (blocks, WAITING)
    long long slot_stride, head_stride;  // of the cache, in elements
    float multiplier, head_multiplier, head_softcap;
    int layers, vocabulary, words_in_all, spare;  // `spare`: the slot that never grows
};
