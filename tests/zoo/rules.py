"""Small values for config fields, by the field's name: what makes any architecture tiny.

Sizes are pairwise distinct (64 hidden, 96 = 4 heads of 24, 112 intermediate, 40 per expert, ...) so that code which
confuses two axes cannot pass by accident.
"""

from __future__ import annotations

import re

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 64, 4, 2, 24, 112, 128

# value: the field names that take it. A field that is None by default takes it too, unless OPTIONAL names it.
_BY_VALUE: list[tuple[object, str]] = [
    (HIDDEN, "hidden_size d_model n_embd emb_dim dim embed_dim"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (HEADS, "num_encoder_attention_heads num_decoder_attention_heads attention_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads"),
    (HEAD_DIM, "head_dim d_kv kv_channels attention_head_size dim_head d_head query_pre_attn_scalar"),
    (INTERMEDIATE, "intermediate_size ffn_dim n_inner d_ff d_inner dff dim_ff hidden_dim encoder_ffn_dim"),
    (INTERMEDIATE, "decoder_ffn_dim ffn_hidden_size intermediate_size_mlp feed_forward_size"),
    (INTERMEDIATE + 8, "dense_intermediate_size prefix_dense_intermediate_size"),
    (VOCAB, "vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (VOCAB, "unpadded_vocab_size"),
    (2, "encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_layers n_layer n_layers"),
    (2, "num_hidden_layers depth num_blocks layers"),
    (20, "hidden_size_per_layer_input"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings"),
    (64, "max_source_positions max_target_positions max_encoder_position_embeddings"),
    (64, "max_decoder_position_embeddings context_length"),
    # mixture of experts
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts num_dense_layers"),
    (1, "first_k_dense_replace moe_layer_start_index n_group topk_group"),
    (40, "moe_intermediate_size expert_ffn_hidden_size"),
    (56, "shared_expert_intermediate_size shared_intermediate_size shared_experts_intermediate_size"),
    (56, "moe_shared_expert_intermediate_size"),
    # latent attention and sparse indexers
    (44, "q_lora_rank"),
    (36, "kv_lora_rank"),
    (8, "qk_rope_head_dim"),
    (16, "qk_nope_head_dim"),
    (20, "v_head_dim"),
    (16, "index_head_dim"),
    (3, "index_n_heads"),
    (4, "index_topk"),
    # state spaces and linear attention
    (8, "state_size ssm_state_size mamba_d_state"),
    (4, "mamba_chunk_size chunk_size"),
    (2, "mamba_n_groups n_groups mamba_ngroups"),
    (16, "linear_key_head_dim"),
    (12, "linear_value_head_dim"),
    (16, "linear_head_dim mamba_head_dim"),
    (2, "linear_num_key_heads"),
    (4, "linear_num_value_heads linear_num_heads mamba_num_heads mamba_n_heads"),
    # windows
    (8, "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size"),
    (8, "attention_window"),
    (4, "block_size"),
    (16, "rel_extent d_rel swa_head_dim"),
    (2, "swa_num_attention_heads swa_num_key_value_heads"),
    # vision and audio towers, and what joins them to the language model
    (32, "image_size max_image_size max_img_size resolution"),
    (8, "patch_size num_mel_bins canvas_length"),
    (4, "mm_tokens_per_image"),
    (16, "num_position_embeddings num_patches"),
    (64, "position_embedding_size"),
    (2, "spatial_merge_size temporal_patch_size"),
    (12, "downsample_hidden_size"),
    (24, "output_channels"),
    (72, "mlp_dim"),
    (32, "audio_hidden_size vision_hidden_size encoder_hidden_size"),
    (HIDDEN, "out_hidden_size text_hidden_size adapter_out_dim output_dim decoder_hidden_size projection_dim"),
    (48, "projector_hidden_size projection_hidden_dim projection_hidden_size projection_intermediate_size"),
    (48, "projector_input_dim projector_output_dim alignment_intermediate_size image_text_hidden_size"),
    (0.0, "dropout attention_dropout hidden_dropout activation_dropout"),
]
VALUES: dict[str, object] = {name: value for value, names in _BY_VALUE for name in names.split()}

# A field that is None by default and means "absent" then.
OPTIONAL = frozenset(
    {"sliding_window", "unpadded_vocab_size", "ffn_hidden_size", "intermediate_size_mlp", "q_lora_rank"}
)

# In a tower that reads pixels or sound, where the language model's sizes would hide a confusion of the two.
TOWER_VALUES: dict[str, object] = {
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "intermediate_size": 72,
}

# Token ids that a config gives a role. Text inputs avoid all of them.
_FIXED_IDS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
_ROLES = [
    *("image", "video", "audio", "vision_start", "vision_end", "image_start", "image_end"),
    *("video_start", "video_end", "boi", "eoi", "boa", "eoa"),
]
FIRST_SPECIAL_ID = 96
_ROLE_IDS = {role: FIRST_SPECIAL_ID + i for i, role in enumerate(_ROLES)}
_TOKEN_FIELD = re.compile(r"(?P<role>.+?)(_token)?_(id|index)$")


def token_id(name: str, default: object, index: int) -> int | None:
    """An id inside the vocabulary for the token field `name`, or None where the field is no such thing.

    `default` is an id or several; `index` numbers the config's fields, so that two unknown roles do not share an id.
    """
    matched = _TOKEN_FIELD.match(name)
    first = default[0] if isinstance(default, (list, tuple)) and default else default
    if matched is None or isinstance(first, bool) or not isinstance(first, int) or first < 0:
        return None
    if name in _FIXED_IDS:
        return _FIXED_IDS[name]
    if first < FIRST_SPECIAL_ID // 2:
        return first
    unknown = FIRST_SPECIAL_ID + len(_ROLES)
    return _ROLE_IDS.get(matched["role"], unknown + index % (VOCAB - unknown))
