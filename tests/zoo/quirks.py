"""What single model types need beyond the rules: relationships between sizes, and reasons where nothing helps."""

from __future__ import annotations

from typing import Any

from tests.zoo import quirks_multimodal

# Gemma 4's speculative heads compute no keys and values of their own and refuse the per-layer embeddings.
_ASSISTANT_TEXT: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
}

_CROSS_BERT = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True}
_MUSICGEN = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}

# Composites that take their parts as dicts only in Transformers 5.17.
PARTS_AS_DICTS = frozenset({"encoder-decoder", "vision-encoder-decoder"})

# What a config class needs before it can be instantiated at all, or before it has all its parts.
REQUIRED: dict[str, dict[str, Any]] = {
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}},
    "encoder-decoder": {"encoder": {"model_type": "bert"}, "decoder": _CROSS_BERT},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_assistant": {"text_config": _ASSISTANT_TEXT | {"model_type": "gemma4_text", "num_hidden_layers": 2}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "granite4_vision": {"text_config": {"model_type": "granite4_vision_text"}},
    "musicgen": _MUSICGEN,
    "musicgen_melody": _MUSICGEN,
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": _CROSS_BERT},
}

_TEXT: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 50,
        "local_attention_window_len": 8,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "global_config": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 112},
    },
    "codegen": {"rotary_dim": 8},
    "cohere2_moe": {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 112, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 12,
        "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 28,
        "swa_kv_lora_rank": 20,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 48},
    "flint": {"mlp_only_layers": [0]},
    "funnel": {"block_sizes": [2, 2]},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "enable_moe_block": True,
    },
    "gemma4": {"text_config": {"enable_moe_block": False}},
    "gemma4_assistant": {"backbone_hidden_size": 40, "text_config": _ASSISTANT_TEXT},
    "gemma4_unified_assistant": {"backbone_hidden_size": 40, "text_config": {"num_kv_shared_layers": 2}},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "helium": {"head_dim": 16},
    "hrm_text": {"num_hidden_layers": 1},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_gate_rank": 12,
    },
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"], "n_layers_per_attn_res_block": 2},
    "jamba": {"num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        "no_rope_layers": [1, 1, 0],
        "moe_layers": [1, 2],
    },
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"head_dim": 32},
    "luke": {"entity_vocab_size": 30, "entity_emb_size": 20},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mobilebert": {"embedding_size": 40, "intra_bottleneck_size": 48, "num_feedforward_networks": 2},
    "neomme": {"head_dim": 16, "embedding_rank": 20, "embedding_dim": 12},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "perceiver": {"num_latents": 16, "d_latents": 48, "num_self_attends_per_block": 2},
    "phi4_multimodal_audio": {
        "depthwise_separable_out_channel": 20,
        "ext_pw_out_channel": 32,
        "nemo_conv_channels": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 24,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 12,
        "ple_layer_ids": [1],
        "ple_embed_dim": 20,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 1,
        "eos_token_id": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rembert": {"input_embedding_size": 40, "output_embedding_size": 48},
    "roc_bert": {
        "pronunciation_embed_dim": 20,
        "pronunciation_vocab_size": 30,
        "shape_embed_dim": 24,
        "shape_vocab_size": 30,
    },
    "reformer": {
        "axial_pos_embds_dim": [24, 40],
        "axial_pos_shape": [4, 8],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
        "attn_layers": ["local", "lsh"],
    },
    "squeezebert": {"embedding_size": 64},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {
        "router_hidden_size": 20,
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 8,
    },
}

# By the config's own model type, wherever it occurs: fields that win over the rules. A dict for a sub-config's name
# overrides that sub-config's fields.
CONFIG = _TEXT | quirks_multimodal.CONFIG

# Why a type cannot be run, where the exception that it raises does not say so.
REASONS: dict[tuple[str, str], str] = {
    ("image_text", "llama4"): "its forward fails in Transformers itself: its language model returns no `image_outputs`",
    ("image_text", "pi0"): "it predicts a robot's actions, not tokens",
}

# Stock `save_pretrained` then `from_pretrained` does not give these back; no on-disk transform can be tested on them.
BROKEN_ROUND_TRIP: dict[str, str] = {
    "shieldgemma2": "saving puts a prefix `model.` before every name, which the loader of this class does not take off",
}
