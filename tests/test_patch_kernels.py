"""A patched model on the Triton kernels (in the interpreter where there is no accelerator)."""

import copy

import pytest
from models import assert_same_step, batch, tiny

import liger_kernel
from liger_kernel import _env

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_training_step(family, device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("no Triton on this device: set TRITON_INTERPRET=1")
    plain = tiny(family, num_hidden_layers=1).to(device)
    inputs = {name: tensor.to(device) for name, tensor in batch(tokens=6).items()}
    patched = copy.deepcopy(plain)
    with liger_kernel.patched(patched), _env.using_impl("triton"):
        assert_same_step(plain, patched, 1e-5, **inputs)
