"""Every kernel compiles for seven GPUs without one of them, fits their shared memory and their registers: Triton's
interpreter accepts programs that its compiler refuses, and knows no limits.

Each run compiles every kernel once for every target, each time at another of its launches; `make test-all` all that
differ in types, constants or options, and `-m slow --kernels NAME,...` those of some kernels. Registers count at the
sizes of models: where a test's sizes are 1, loops vanish into code that no model runs.
"""

from typing import Any, NamedTuple

import pytest

from liger_kernel import _env

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(_env.interpreting(), reason="the interpreter has replaced the kernels"),
]
pytest.importorskip("triton")

import offline  # noqa: E402

ALL, NVIDIA = tuple(offline.TARGETS), tuple(t for t in offline.TARGETS if t.startswith("sm_"))
FEW = 32  # bytes of a thread, eight registers: they come and go with versions of the compiler


class Spill(NamedTuple):
    """Up to `most` bytes of a thread's registers may spill in a kernel's launches with these traits, and why."""

    kernel: str
    traits: dict[str, Any]
    targets: tuple[str, ...]
    most: int
    why: str

    def fits(self, launch, target):
        """Whether it speaks of this launch."""
        named = self.kernel == offline.name_of(launch.kernel) and target in self.targets
        return named and self.traits.items() <= launch.traits.items()


_WIDE = (
    "A program of 1,024 threads leaves each 64 registers. The widest rows, their gradient and sums over rows need more;"
    " a further pass over memory would cost more than these accesses to the first cache."
)
_UNTRIED = (
    "Tiles were chosen on an H200, where they fit; this card has not been at hand to choose others."
)
_RANK = "256 pairs are compared with one another, once in a layer and in microseconds."
_CAPPED = "An exponential and a slope for each of 128 x 256 sums; another pass over the chunk would cost more."
_PAIR = (
    "Two distributions, caps and a hard loss in one read of both; a second read would cost more."
)
_EXACT = "fp32 products without tensor cores: for tests of exactness, not for speed."

SPILLS = [
    Spill("_gated_norm_kernels.backward_kernel", {"BLOCK": 16384}, ALL, 800, _WIDE),
    Spill("_gated_norm_kernels.backward_kernel", {"BLOCK": 8192}, NVIDIA, 192, _WIDE),
    Spill("_layer_norm_kernels.backward_kernel", {"BLOCK": 16384}, NVIDIA, 224, _WIDE),
    Spill("_layer_norm_kernels.forward_kernel", {"BLOCK": 32768}, NVIDIA, 64, _WIDE),
    Spill(
        "_layer_norm_kernels.backward_phases_kernel", {}, ("sm_86", "sm_89", "sm_120"), 160, _UNTRIED,
    ),
    Spill("_modulated_norm_kernels.backward_kernel", {"BLOCK": 16384}, ALL, 288, _WIDE),
    Spill("_modulated_norm_kernels.forward_kernel", {"BLOCK": 16384}, NVIDIA, 64, _WIDE),
    Spill("_rms_kernels.forward_kernel", {"BLOCK": 32768}, NVIDIA, 64, _WIDE),
    Spill("_rms_kernels.backward_kernel", {"BLOCK": 32768}, ALL, 640, _WIDE),
    Spill("_rms_kernels.backward_kernel", {"BLOCK": 16384}, NVIDIA, 128, _WIDE),
    Spill("attn_res._backward_kernel", {"BLOCK": 32768}, ALL, 704, _WIDE),
    Spill("attn_res._backward_kernel", {"BLOCK": 16384}, NVIDIA, 384, _WIDE),
    Spill("attn_res._forward_kernel", {"BLOCK": 32768}, ALL, 384, _WIDE),
    Spill("attn_res._forward_kernel", {"BLOCK": 16384}, NVIDIA, 96, _WIDE),
    Spill("multi_token_attention._normalise_backward_kernel", {"BLOCK": 32768}, NVIDIA, 160, _WIDE),
    Spill("softmax._backward_kernel", {"BLOCK": 32768}, NVIDIA, 96, _WIDE),
    Spill("_group_norm_kernels.forward_kernel", {"num_warps": 32}, NVIDIA, 64, _WIDE),
    Spill("_moe_routing._place_kernel", {}, NVIDIA, 96, _RANK),
    Spill("_head_pair_kernels.pair_kernel", {"S_FORM": "capped"}, NVIDIA, 64, _PAIR),
    Spill("_head_pair_kernels.pair_kernel", {"num_warps": 32}, ("sm_90",), 160, _PAIR),
    Spill("_moe_kernels.up_kernel", {"HAS_BIAS": True}, ("sm_100",), 192, _UNTRIED),
    Spill("_poly_norm_kernels.backward_wide_kernel", {"BLOCK": 8192}, NVIDIA, 64, _WIDE),
    Spill(
        "_fused_neighborhood_attention_kernels.backward_kernel", {"PRECISION": "ieee"}, ALL, 704, _EXACT,
    ),
    Spill(
        "_fused_neighborhood_attention_kernels.forward_kernel", {"PRECISION": "ieee"}, NVIDIA, 384, _EXACT,
    ),
    Spill("_fused_neighborhood_attention_kernels.forward_kernel", {"DIM": 128}, NVIDIA, 64, _UNTRIED),
    Spill("_fused_neighborhood_attention_kernels.forward_kernel", {"DIM": 256}, NVIDIA, 96, _UNTRIED),
    Spill("_fused_neighborhood_attention_kernels.backward_kernel", {"STEP": 64}, NVIDIA, 256, _UNTRIED),
    Spill("_fused_neighborhood_attention_kernels.backward_kernel", {"DIM": 64}, ("sm_120",), 64, _UNTRIED),
    Spill("_mhc_coeff_kernels.product_backward_kernel", {"PRECISION": "tf32x3"}, NVIDIA, 416, _UNTRIED),
    Spill("_mhc_coeff_kernels.product_kernel", {"PRECISION": "ieee"}, NVIDIA, 64, _EXACT),
    Spill("_head_exp_kernels.product_kernel", {"FORM": "capped"}, ("sm_90",), 384, _CAPPED),
    Spill("_low_rank_kernels.columns_kernel", {}, ("sm_120",), 64, _UNTRIED),
    Spill(
        "_low_rank_kernels.down_kernel", {"RANK": 64, "SEED": "*i64"}, ("sm_86", "sm_89", "sm_120"), 128, _UNTRIED,
    ),
]  # fmt: skip


def test_every_kernel_is_launched():
    """A kernel that is missing here needs a row, or a size in `offline.py`."""
    assert offline.launches("sm_90", full=False).keys() == offline.kernels().keys()


@pytest.mark.parametrize("target", offline.TARGETS)
def test_kernels_compile(target):
    turn = list(offline.TARGETS).index(target)
    ranked = [offline.by_novelty(some) for some in offline.launches(target, full=False).values()]
    _check(target, [some[turn % len(some)] for some in ranked])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", offline.TARGETS)
def test_launches_compile(target, pytestconfig):
    wanted = pytestconfig.getoption("kernels").split(",")
    chosen = {}
    for kernel, some in offline.launches(target, full=True).items():
        if not any(name in kernel for name in wanted):
            continue
        models = [launch for launch in some if launch.real]
        chosen |= {str(launch): launch for launch in (*models, *offline.by_novelty(some))}
    _check(target, chosen.values())


def _check(target, launches):
    wrong = [f"{launch}: {what}" for launch in launches for what in _faults(launch, target)]
    assert not wrong, f"{target}:\n" + "\n".join(wrong)


def _faults(launch, target):
    try:
        taken = offline.compiled(launch, target)
    except Exception as error:  # whatever it is: all that is wrong shall be seen at once
        yield f"{type(error).__name__}: {error}"
        return
    limit = offline.TARGETS[target].shared_memory
    if taken.shared > limit:
        yield f"{taken.shared} bytes of shared memory, of {limit}"
    granted = max((s.most for s in SPILLS if s.fits(launch, target)), default=FEW)
    if launch.real and taken.spilled > granted:
        yield f"{taken.spilled} bytes of a thread's registers spill, {granted} are accepted"
