import torch

from liger_kernel.ops import _mhc_coeffs, _mhc_streams, mhc
from liger_kernel.testing.properties import Case


def _coeffs(shape, make, **_):
    """Weights of such a size that every gate and matrix entry is in its lively range. `small` is b and
    the three alphas, so that a run takes its gradient as one."""
    hc, c = shape[-2:]
    out = hc * hc + 2 * hc
    other = torch.float16 if make.dtype == torch.bfloat16 else None  # the layer's default
    phi = make(hc * c, out, scale=(hc * c) ** -0.5, dtype=other)
    return {"x": make(*shape), "phi": phi, "small": make(out + 3, scale=0.7, dtype=torch.float32)}


def _taken_apart(function, **given):
    def call(x, phi, small, **options):
        b, *alphas = small.split((small.numel() - 3, 1, 1, 1))
        return function(x, phi, b, *alphas, **given, **options)

    return call


def _coeffs_opchecks(tensors, tmax=20, pre_eps=0.0, post_mult=2.0):
    x, phi, small = tensors.values()
    b, *alphas = (t.clone() for t in small.split((small.numel() - 3, 1, 1, 1)))
    given, scalars = (x, phi, b, *alphas), (tmax, 1e-6, pre_eps, 1e-6, post_mult)
    pre, post, res, *kept = _mhc_coeffs.mhc_coeffs_forward(*given, *scalars)
    saved = (*given, res, *kept, tmax, post_mult)
    return [
        (_mhc_coeffs.mhc_coeffs_forward, (*given, *scalars)),
        (_mhc_coeffs.mhc_coeffs_backward, (pre, post, res, *saved, True, True)),
        (_mhc_coeffs.mhc_coeffs_backward, (pre, None, None, *saved, True, False)),
    ]


def _bad_coeffs(x=(3, 2, 4), phi=(8, 8), b=(8,), alpha=(), **options):
    def call(make):
        options.setdefault("allow_fp32", True)
        alphas = (make(*alpha) for _ in range(3))
        return mhc.mhc_coeffs(make(*x), make(*phi), make(*b), *alphas, **options)

    return call


def _pre(shape, make, **_):
    return {"x": make(*shape), "h_pre": make(*shape[:-1], dtype=torch.float32)}


def _pre_opchecks(tensors):
    x, h = tensors.values()
    y = _mhc_streams.mhc_pre_forward(x, h)
    return [
        (_mhc_streams.mhc_pre_forward, (x, h)),
        (_mhc_streams.mhc_pre_backward, (y, x, h, True, True)),
        (_mhc_streams.mhc_pre_backward, (y, x, h, True, False)),
    ]


def _post_res(shape, make, **_):
    *lead, hc, c = shape
    h = {"h_post": make(*lead, hc, dtype=torch.float32), "h_res": make(*lead, hc, hc)}
    return {"x": make(*shape), "f_out": make(*lead, c), **h}


def _post_res_opchecks(tensors):
    given = tuple(tensors.values())
    y = _mhc_streams.mhc_post_res_forward(*given)
    return [
        (_mhc_streams.mhc_post_res_forward, given),
        (_mhc_streams.mhc_post_res_backward, (y, *given, True, True, True)),
        (_mhc_streams.mhc_post_res_backward, (y, *given, False, True, False)),
    ]


def _bad_post_res(f=(3, 4), post=(3, 2), res=(3, 2, 2)):
    return lambda make: mhc.mhc_post_res(make(3, 2, 4), make(*f), make(*post), make(*res))


_STREAMS = [(3, 2, 8), (1, 1), (0, 2, 5), (1, 2, 2, 8), (4, 3, 33), (2, 5, 2100)]

ROWS = [
    Case(
        mhc.OP_COEFFS,
        _taken_apart(mhc.mhc_coeffs, allow_fp32=True),
        _coeffs,
        shapes=[(3, 2, 4), (1, 1, 1), (0, 2, 4), (1, 2, 3, 4), (33, 3, 24)],
        options={"tmax": [3, 1], "pre_eps": [0.0, 1e-2], "post_mult": [2.0, 1.5]},
        grads=("x", "phi", "small"),
        reference=_taken_apart(mhc.OP_COEFFS.reference),
        opchecks=_coeffs_opchecks,
        bad=[
            (r"x must be \[\*, HC, C\]", _bad_coeffs(x=(4,)), ValueError),
            ("phi must have shape", _bad_coeffs(phi=(8, 9)), ValueError),
            ("b must have shape", _bad_coeffs(b=(9,)), ValueError),
            ("must have one element", _bad_coeffs(alpha=(2,)), ValueError),
            ("tmax must be at least 1", _bad_coeffs(tmax=0), ValueError),
            ("unless allow_fp32", _bad_coeffs(allow_fp32=False), AssertionError),
        ],
    ),
    Case(
        mhc.OP_PRE,
        mhc.mhc_pre,
        _pre,
        shapes=_STREAMS,
        grads=("x", "h_pre"),
        opchecks=_pre_opchecks,
        bad=[
            (
                "h_pre must have shape",
                lambda make: mhc.mhc_pre(make(3, 2, 4), make(3, 3)),
                ValueError,
            )
        ],
    ),
    Case(
        mhc.OP_POST_RES,
        mhc.mhc_post_res,
        _post_res,
        shapes=_STREAMS,
        grads=("x", "f_out", "h_post", "h_res"),
        opchecks=_post_res_opchecks,
        bad=[
            ("f_out must have shape", _bad_post_res(f=(3, 5)), ValueError),
            ("h_post must have shape", _bad_post_res(post=(3, 1)), ValueError),
            ("h_res must have shape", _bad_post_res(res=(3, 2, 1)), ValueError),
        ],
    ),
]
