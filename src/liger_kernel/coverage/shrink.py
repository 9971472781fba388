"""A Hugging Face config of any family, made tiny: a few layers, a hundred words, everything narrow.

    shrunk(LlamaConfig())            changed in place, and returned

By name: a rule says what an attribute called like that becomes, in a config and in every config inside it. Names repeat
(five hundred config classes share a few dozen), and equal names get equal sizes, so that parts which fit each other
still do. Of the lists that say something of each layer, one layer of every kind remains.
"""

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

VOCAB = 99
WORDS = 50  # ids from 3 up to here are ordinary words; special tokens are 0, 1, 2 or sit at the end
_KINDS = 6  # layers at most
_AS_IT_IS = 1 << 30

# The first pattern that matches a whole name decides; a smaller number, None, True and lists stay as they are.
_RULES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), size)
    for pattern, size in (
        (r"(.*_)?(patch|kernel|merge|group|batch|parallel)_size", _AS_IT_IS),  # no widths
        (r"(.*_)?codebook_size", 64),
        (r"num_filters", 2),
        (r"(.*_)?(vocab_size|num_embeddings|num_embeds)(_per_layer_input|_base)?", VOCAB),
        (r"(n_group|topk_group|num_expert_group|n_groups|mamba_n_?groups|moe_topk_groups?)", 1),
        (r"(.*_)?(key_value_heads|kv_heads|num_(key|value)_heads|query_groups)", 2),
        (r"(.*_)?(num_heads|n_heads?|attention_heads|mamba_num_heads|n_mamba_heads)(_per_layer)?", 4),
        (r"mamba_(d_head|head_?dim)|linear_head_dim|qk_head_dim", 16),
        (r"(.*_)?(head_dim|dim_head|d_head|d_kv|rotary_dim|kv_channels)|query_pre_attn_scalar", 8),
        (r"(.*_)?(state_size|d_state)", 8),
        (r"mamba_d_ssm|d_inner", 64),
        (r"(.*_)?(rank|lowrank)", 8),
        (r"(.*_)?(n_routed_|num_local_|num_)?experts|moe_num_experts|zero_expert_num", 4),
        (r"num_experts_per_tok(en)?|(moe_)?top_?k(_experts)?|moe_k", 2),
        (r"(.*_)?(n_shared_experts|num_shared_experts|nextn_predict_layers|num_dense_layers)", 1),
        (r"first_k_dense_replace|moe_layer_start_index|num_kv_shared_layers|num_mem_blocks", 1),
        (r"(.*_)?(interval|layer_(period|offset|step)|attention_frequency|sparse_step|window_layers|pattern)", 2),
        (r"(.*_)?(num_layers|n_layers?|depth|(en|de)coder_layers|hidden_layers|layers_per_stack)", 2),
        (r"(.*_)?(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_ff|dim_ff|mlp_dim|n_inner|expert_dim)", 48),
        (r"(.*_)?position_embeddings|n_positions|max_.*positions|max_seq_len|context_length|model_max_length", 64),
        (r"(.*_)?num_mem_.*|(.*_)?image_size|crop_size|frame_size", 56),
        (r"sliding_window(_size)?|attention_window(_size)?|local_attention|attention_chunk_size|local_radius", 16),
        (r"(.*_)?(chunk_size|chunksize|block_size)|index_topk|insert_layer_id", 8),
        (r"(.*_)?(d_model|n_embd|size|dim|width|channels|dimension|upsample_groups)(_per_layer_input)?", 32),
    )
)  # fmt: skip

# What no rule can know: (model type, attribute) -> value. For a config that is not the outermost too.
_EXCEPTIONS: dict[tuple[str, str], Any] = {
    # one layer of each kind, where the kinds are not in a list
    ("bamba", "attn_layer_indices"): [1],
    ("granitemoehybrid", "layer_types"): ["linear_attention", "full_attention"],
    ("jamba", "attn_layer_offset"): 1,
    ("jamba", "num_hidden_layers"): 4,
    ("recurrent_gemma", "num_hidden_layers"): 3,
    ("hrm_text", "num_hidden_layers"): 16,
    ("deepseek_ocr2_text", "mlp_layer_types"): ["dense", "sparse"],
    ("lfm2_moe", "layer_types"): ["conv", "full_attention"],
    ("gemma3n_text", "num_kv_shared_layers"): 2,
    ("zamba", "num_hidden_layers"): 4,
    ("zamba", "layers_block_type"): ["linear_attention", "hybrid"] * 2,
    # widths that follow from others
    ("blt_global_transformer", "head_dim"): 16,
    ("blt_global_transformer", "hidden_size"): 64,
    ("blt_local_decoder", "hidden_size_global"): 64,
    ("blt_local_encoder", "hidden_size_global"): 64,
    ("falcon_h1", "mamba_d_head"): 16,
    ("mamba2", "head_dim"): 16,
    ("mistral4", "head_dim"): 16,
    ("zamba", "attention_head_dim"): 16,
    ("zamba", "attention_hidden_size"): 64,
    ("zamba2", "attention_head_dim"): 16,
    ("zamba2", "attention_hidden_size"): 64,
    # what the default leaves out
    ("chameleon", "vocabulary_map"): {"<image>": 98},
    ("cohere_compass_text", "rope_parameters"): {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4}
    },
    ("deepseek_ocr2_text", "num_experts_per_tok"): 2,
    ("deepseek_v2", "num_experts_per_tok"): 2,
    ("dots1", "n_routed_experts"): 4,
    ("dots1", "n_shared_experts"): 1,
    ("dots1", "num_experts_per_tok"): 2,
    ("emu3", "vocabulary_map"): {"<image>": 98, "<|extra_200|>": 97},
    ("granite4_vision", "deepstack_layer_map"): [],
    ("granite4_vision", "downsample_rate"): "1/2",
    ("moonshine_streaming", "num_key_value_heads"): 4,
    ("moshi", "audio_vocab_size"): 64,
    ("qwen3_omni_moe_talker_text", "shared_expert_intermediate_size"): 48,
    ("qwen4_exp_text", "indexer_n_heads"): 2,
    ("qwen4_exp_text", "indexer_kv_heads"): 1,
    ("qwen4_exp_text", "indexer_head_dim"): 8,
    ("qwen4_exp_text", "indexer_budget"): 8,
    ("qwen4_exp_text", "indexer_compress_ratio"): 2,
    ("qwen4_exp_text", "output_gate_type"): "swish",
    ("step3p5", "sliding_window"): 16,
    ("xmod", "default_language"): "en_XX",
    ("", "rope_theta"): 1e4,  # of DBRX's attention, whose config has no model type
    ("", "clip_qkv"): 8.0,
}
_FILLED = {"head_dim": 8, "num_key_value_heads": 2}  # where a default config leaves None


def shrunk(config: Any) -> Any:
    """A tiny config, made of `config` in place."""
    for part in parts(config):
        _shrink(part)
    _renumber_tokens(config)
    return config


def parts(config: Any) -> Iterator[Any]:
    """A config and every config inside it, each once."""
    from transformers import PretrainedConfig

    todo, seen = [config], set()
    while todo:
        part = todo.pop(0)
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            todo += [value for value in vars(part).values() if isinstance(value, PretrainedConfig)]


def _shrink(config: Any) -> None:
    held = vars(config)
    before = {name: value for name, value in held.items() if type(value) is int}
    depth = _keep_one_layer_of_a_kind(config)
    for name, value in before.items():
        if name == depth:
            continue
        size = next((size for rule, size in _RULES if rule.fullmatch(name)), value)
        if size < held[name]:
            _set(config, name, size)
    for heads, kv_heads in _pairs_of_heads(held):
        if before[heads] == before[kv_heads]:
            _set(config, kv_heads, held[heads])
    for name, size in _FILLED.items():
        if name in held and held[name] is None:
            _set(config, name, size)
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if held.get(name) is None:
                _set(config, name, 0)
    if "use_cache" in held:
        _set(config, "use_cache", False)
    for (model_type, name), value in _EXCEPTIONS.items():
        if config.model_type == model_type:
            _set(config, name, copy.deepcopy(value))
    if isinstance(held.get("rope_parameters"), dict):
        _rescale_sections(held["rope_parameters"], held.get("head_dim", 8) // 2)


def _set(config: Any, name: str, value: Any) -> None:
    """Past the checks of strict configs, which see one attribute of several that change together."""
    config.__dict__[name] = value


def _pairs_of_heads(held: dict[str, Any]) -> list[tuple[str, str]]:
    names = [name for name in held if re.fullmatch(r"(.*_)?num_key_value_heads|num_kv_heads", name)]
    pairs = [
        (name.replace("key_value", "attention").replace("kv_", "attention_"), name)
        for name in names
    ]
    return [pair for pair in pairs if all(type(held.get(name)) is int for name in pair)]


def _rescale_sections(rope: dict[str, Any], half: int) -> None:
    """Three sections of the frequencies that add up to all of them, for the models that have sections."""
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for value in nested or [rope]:
        n = max(int(half * (value.get("partial_rotary_factor") or 1.0)), 1)
        value["mrope_section"] = [n // 3, n // 3, n - 2 * (n // 3)]


# Layers


def _keep_one_layer_of_a_kind(config: Any) -> str | None:
    """Cut what is said of each layer down to the first layer of every kind; the attribute that counts the layers."""
    held = vars(config)
    counts = [
        n
        for n in ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
        if type(held.get(n)) is int
    ]
    if not counts:
        return None
    count = counts[0]
    depth = held[count]
    per_layer = {n: v for n, v in held.items() if _is_per_layer(v, depth)}
    indices = {n: v for n, v in held.items() if n not in per_layer and _is_layer_list(n, v, depth)}
    if not per_layer and not indices:
        return None

    def kind(layer: int) -> tuple[Any, ...]:
        said = [value[layer] for value in per_layer.values()]
        return (*map(str, said), *(layer in value for value in indices.values()))

    kept = sorted({kind(layer): layer for layer in reversed(range(depth))}.values())[:_KINDS]
    while len(kept) < min(2, depth):
        kept.append(next(layer for layer in range(depth) if layer not in kept))
    kept.sort()
    for name, value in per_layer.items():
        _set(config, name, type(value)(value[layer] for layer in kept))
    for name, value in indices.items():
        _set(config, name, type(value)(new for new, old in enumerate(kept) if old in value))
    _set(config, count, len(kept))
    return count


def _is_per_layer(value: Any, depth: int) -> bool:
    listed = isinstance(value, (list, tuple)) and len(value) == depth > 2
    return listed and not _is_rising(value)


def _is_layer_list(name: str, value: Any, depth: int) -> bool:
    named = re.search(r"layers|idxs|layer_ids|indexes|indices", name) is not None
    listed = named and isinstance(value, (list, tuple)) and _is_rising(value)
    return listed and (not value or value[-1] < depth)


def _is_rising(value: Any) -> bool:
    numbers = all(type(v) is int for v in value)
    return numbers and all(a < b for a, b in itertools.pairwise(value))


# Special tokens


def _renumber_tokens(config: Any) -> None:
    """Special tokens of large vocabularies: the usual three below the words, others above, equal ones equal."""
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    new: dict[int, int] = {}
    for part in parts(config):
        for name, value in list(vars(part).items()):
            if (
                not re.search(r"token_ids?$|token_index$|_id$|_ids$|_index$", name)
                or "layer" in name
            ):
                continue
            if name in usual and value is not None:
                _set(part, name, usual[name])
            elif type(value) is int and value > 2:
                _set(part, name, new.setdefault(value, VOCAB - 1 - len(new)))
            elif isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
                ids = [new.setdefault(v, VOCAB - 1 - len(new)) for v in value]
                _set(part, name, type(value)(ids))
