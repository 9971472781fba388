"""Sizes that people use, for `liger-kernel bench --sizes`: is ours ever slower than eager, does time grow linearly?

Vocabularies of Llama 2, GPT-2, Llama 3, Qwen 2 and Gemma; widths of models from Qwen2-0.5B to Llama-3-405B, and an
odd one; one token to 65,536. One of the sizes varies at a time.
"""

_TOKENS = (1, 17, 128, 1024, 8192, 65536)
_VOCABULARIES = (32000, 50257, 128256, 151936, 262144)
_WIDTHS = (896, 1537, 3072, 5120, 12288, 16384)
_HIDDEN = 2048  # of the linear cross entropy

Sizes = dict[str, tuple[int, ...]]


def _labelled(*sizes: tuple[int, ...]) -> Sizes:
    return {"x".join(map(str, size)): size for size in sizes}


def _rows(width: int = 4096) -> Sizes:
    """Every width at 8,192 tokens, every number of tokens at one width."""
    return _labelled(*((8192, w) for w in _WIDTHS), *((n, width) for n in _TOKENS))


def _classes() -> Sizes:
    """Every vocabulary at 8,192 tokens, every number of tokens at the smallest."""
    first = _VOCABULARIES[0]
    return _labelled(*((n, first) for n in _TOKENS), *((8192, v) for v in _VOCABULARIES))


def _heads() -> Sizes:
    return _labelled(*((n, _HIDDEN, v) for n, v in _classes().values()))


SIZES: dict[str, Sizes] = {
    "rms_norm": _rows(),
    "fused_add_rms_norm": _rows(),
    "layer_norm": _rows(),
    "swiglu": _rows(),
    "geglu": _rows(),
    "softmax": _rows(),
    "rope": _labelled(*((1, n, 32, 8, 128) for n in _TOKENS)),
    "cross_entropy": _classes(),
    "fused_linear_cross_entropy": _heads(),
}
