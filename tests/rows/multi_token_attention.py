from liger_kernel.ops import multi_token_attention as mta
from liger_kernel.testing.properties import Case


def _inputs(shape, make, *, groups=1, **_):
    channels = shape[1]
    weight = make(2 * channels, channels // groups, 3, 2, scale=0.4)
    return {"scores": make(*shape, scale=2.0), "weight": weight, "bias": make(2 * channels)}


def _opchecks(tensors, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    given, options = tuple(tensors.values()), ([1, 1], [1, 1], [1, 1], 1, sparse)
    out, p = mta.multi_token_forward(*given, *options)
    return [
        (mta.multi_token_forward, (*given, *options)),
        (mta.multi_token_backward, (out, p, given[1], *options, True, True, True)),
        (mta.multi_token_backward, (out, p, given[1], *options, False, True, False)),
    ]


def _bad(scores, weight):
    return lambda make: mta.multi_token_attention(make(*scores), make(*weight))


ROWS = [
    Case(
        mta.OP,
        mta.multi_token_attention,
        _inputs,
        shapes=[(1, 2, 5, 5), (0, 2, 4, 4), (2, 2, 17, 17)],
        options={
            "padding": [1, (2, 3)],
            "stride": [1, (2, 1)],
            "dilation": [1, 2],
            "groups": [1, 2],
        },
        grads=("scores", "weight", "bias"),
        opchecks=_opchecks,
        bad=[
            (r"must be \[B, C, L, L\]", _bad((1, 2, 4, 5), (2, 2, 3, 3)), ValueError),
            ("weight must be", _bad((1, 2, 4, 4), (2, 3, 3, 3)), ValueError),
        ],
    ),
    # Wide enough a border for the kernel to fit.
    Case(
        mta.OP,
        mta.multi_token_attention,
        _inputs,
        shapes=[(1, 2, 1, 1)],
        options={"padding": [(2, 3)], "dilation": [1, 2], "groups": [1, 2]},
        grads=("scores", "weight", "bias"),
        label="multi_token_attention of one token",
    ),
    # Few rows: narrow dtypes put scores on the edge of a support, where no derivative exists.
    Case(
        mta.OP,
        mta.multi_token_attention,
        _inputs,
        shapes=[(1, 2, 4, 4), (1, 2, 9, 9)],
        options={"sparse": [True], "padding": [1]},
        grads=("scores", "weight", "bias"),
        label="multi_token_attention sparse",
    ),
]
