"""Quirks of composite types: towers that must agree with the language model on a width, multimodal rope sections."""

from __future__ import annotations

from typing import Any


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rope parameters whose (time, height, width) sections add up to half of the rotated channels."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [*sections]} | more}


_VQ = {"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 8}

_POST_CONV = {"post_conv_in_channels": 24, "post_conv_mid_channels": 28, "post_conv_out_channels": 36}

_WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1]}
_ONE_TILE = {"image_grid_pinpoints": [[32, 32]]}

CONFIG: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 96, "audio_token_offset": 112},
    "apertus1p5_vision_tokenizer": _VQ | {"codebook_size": 16},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"num_query_tokens": 4, "image_token_index": 96},
    "chameleon": {"vocabulary_map": {"<image>": 120, "IMGIMGAZ": 121, "IMGIMGBZ": 122}},
    "chameleon_vqgan": _VQ | {"num_embeddings": 2},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [28, 32]},
    "deepseek_ocr2_encoder": {"hidden_size": 32, "num_attention_heads": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"global_head_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 121, "<|visual token 000000|>": 122}},
    "emu3_vqgan": _VQ | {"codebook_size": 1, "hidden_size": 64},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [40, 24]} | _mrope(3, 3, 2),
    "florence_vision": {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [32, 48],
        "num_heads": [2, 3],
        "num_groups": [2, 3],
        "window_size": 4,
    },
    "gemma4_vision": {"pooling_kernel_size": 2, "num_key_value_heads": 2},
    "glm4v_text": _mrope(2, 3, 3),
    "glm4v_moe_text": _mrope(2, 1, 1, partial_rotary_factor=0.5),
    "glm5_next_text": {"head_dim": 0, "qk_rope_head_dim": 0, "index_kpool": 2},
    "glm_ocr_text": _mrope(2, 3, 3),
    "granite4_vision": _ONE_TILE
    | {
        "vision_config": {"hidden_size": 64},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [0]},
    "kimi_k25": {"projection_hidden_size": 32},
    "instructblip": {"num_query_tokens": 4, "image_token_index": 96},
    "instructblipvideo": {"num_query_tokens": 4, "video_token_index": 97},
    "janus_vqgan": _VQ | {"num_embeddings": 16, "image_token_embed_dim": 64},
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4},
    "hunyuan_vl_vision": {"temporal_patch_size": 1},
    "hunyuan_vl_text": _mrope(3, 3, 3, 3),
    "hy_v4_vl_text": _mrope(2, 1, 1),
    "llava_next": _ONE_TILE,
    "llava_next_video": _ONE_TILE,
    "llava_onevision": _ONE_TILE,
    "mistral_large4_text": {
        "layer_types": ["indexed_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared"],
        "no_rope_layers": [1, 0, 0],
        "kv_source_layers": [0, 1, 1],
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "hidden_size": 32},
    "molmo2_text": {"num_hidden_layers": 2, "rope_scaling_layers": [0]},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "muse_spark_audio": {"hidden_sizes": [12, 16, 20, 24], "depths": [1, 1, 1, 1]},
    "muse_spark_text": {"moe_hidden_size": 48},
    "omniasr_audio": {"conv_dim": [16] * 7},
    "paddleocr_vl_text": _mrope(4, 4, 4),
    "pix2struct_text_model": {"d_kv": 16},
    "pix2struct_vision_model": {"hidden_size": 64, "patch_embed_hidden_size": 20, "seq_len": 16},
    "pp_formulanet": {"vision_config": _POST_CONV},
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "exaone4_5_vision": _WINDOWS,
    "qwen2_5_omni_vision_encoder": _WINDOWS,
    "qwen2_5_vl_vision": _WINDOWS,
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_vision": {"hidden_size": 64},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 8,
        "num_sliding_attention_heads": 2,
        "share_expert_dim": 56,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "udop": {"max_2d_position_embeddings": 64},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [28, 32]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 8, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "wavtokenizer_encoder": {"codebook_dim": 32, "codebook_size": 8},
}
