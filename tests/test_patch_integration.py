"""Patched models under the things people train with: Trainer, PEFT, checkpointing, autocast, compile, FSDP, DDP."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from models import VOCAB, assert_same_step, batch, step, tiny
from torch import nn

import liger_kernel
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection
from liger_kernel.transformers.monkey_patch import (
    _apply_liger_kernel,
    _apply_liger_kernel_to_instance,
)
from liger_kernel.transformers.patch.apply import seam_of
from liger_kernel.transformers.patch.promise import PromisingHead

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.plain,
    # PEFT 0.21 still asks transformers 5.24 by the old name
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture
def pair():
    plain = tiny("llama")
    return plain, copy.deepcopy(plain)


# Ways to run a step


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(pair, reentrant):
    plain, patched = pair
    with liger_kernel.patched(patched):
        for model in pair:
            enable = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        assert_same_step(plain, patched, **batch(), use_cache=False)


def test_autocast(pair):
    plain, patched = pair
    with liger_kernel.patched(patched):
        exact, wanted = step(plain, **batch())
        with torch.autocast("cpu", torch.bfloat16):
            eager, rounded = step(plain, **batch())
            outputs, found = step(patched, **batch())
    assert outputs.loss.dtype == torch.float32
    assert abs(outputs.loss - exact.loss) <= 2 * abs(eager.loss - exact.loss) + 1e-3
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        allowed = 2 * (rounded[name] - gradient).norm() + 1e-3 * gradient.norm()
        assert (found[name] - gradient).norm() <= allowed, name


def test_fp16_with_a_grad_scaler(pair):
    """Gradients of 1 / N vanish in fp16 before the scale has come; a step that overflows is skipped, by both."""
    liger_kernel.patch(pair[1])
    scales, grads = [], []
    for model in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for seed in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch(seed)).loss
            factor = float("inf") if seed == 2 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[:4] == scales[4:] == [2.0**14, 2.0**15, 2.0**14, 2.0**14]
    for step_of, found in zip(grads[:4], grads[4:], strict=True):
        for name, gradient in step_of.items():
            assert gradient.isfinite().all() == found[name].isfinite().all()
            if gradient.isfinite().all():
                assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm() + 1e-5, name


def test_bf16_model(pair):
    plain, patched = (model.to(torch.bfloat16) for model in pair)
    with liger_kernel.patched(patched):
        expected, outputs = plain(**batch()), patched(**batch())
    torch.testing.assert_close(outputs.loss, expected.loss.float(), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(
    "extra", [{}, {"return_token_accuracy": True}, {"num_items_in_batch": torch.tensor(9)}]
)
def test_compile_has_no_breaks(pair, extra):
    torch._dynamo.reset()
    plain, patched = pair
    with liger_kernel.patched(patched):
        compiled = torch.compile(patched, backend="eager", fullgraph=True)
        outputs = compiled(**batch(), **extra)
        outputs.loss.backward()
    expected, gradients = step(
        plain, **batch(), **{k: v for k, v in extra.items() if k.startswith("num")}
    )
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert outputs.logits is None
    for name, parameter in patched.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()


def test_compile_is_the_first_call(pair, monkeypatch):
    """The output class exists before anything is traced."""
    from liger_kernel.transformers.model import output_classes

    monkeypatch.setattr(output_classes, "_made", {})
    torch._dynamo.reset()
    with liger_kernel.patched(pair[1]):
        compiled = torch.compile(pair[1], backend="eager", fullgraph=True)
        assert compiled(**batch(), return_token_accuracy=True).token_accuracy is not None
        torch._dynamo.reset()
        monkeypatch.setattr(output_classes, "_made", {})
        assert compiled(**batch()).logits is None
    torch._dynamo.reset()


def test_compile_of_many_lengths():
    """No more graphs than the plain model needs."""
    from torch._dynamo.testing import CompileCounter

    graphs = []
    for patched in (False, True):
        torch._dynamo.reset()
        model, counter = tiny("llama", num_hidden_layers=1), CompileCounter()
        if patched:
            liger_kernel.patch(model)
        compiled = torch.compile(model, backend=counter)
        for tokens in range(5, 15):
            compiled(**batch(tokens=tokens))
        graphs.append(counter.frame_count)
    torch._dynamo.reset()
    assert graphs[1] <= graphs[0]


def test_compile_of_a_patched_class():
    """The head is not known before the first call: one break, none after it."""
    torch._dynamo.reset()
    report = _apply_liger_kernel("llama")
    model = tiny("llama")
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert compiled(**batch()).logits is None
    torch._dynamo.reset()
    assert torch.compile(model, backend="eager", fullgraph=True)(**batch()).logits is None
    report.undo()
    torch._dynamo.reset()


def test_resized_embeddings(pair):
    """A head that appears after patching."""
    _, patched = pair
    with liger_kernel.patched(patched):
        patched.resize_token_embeddings(VOCAB + 5, mean_resizing=False)
        assert patched(**batch()).logits is None
        assert patched(input_ids=batch()["input_ids"]).logits.shape[-1] == VOCAB + 5


@pytest.mark.parametrize("hooks_first", [True, False])
def test_accelerate_hooks(pair, hooks_first):
    """Hooks that replace forward on the instance (device_map) keep running, around our forward."""
    hooks = pytest.importorskip("accelerate.hooks")
    plain, patched = pair
    seen = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    def add_hooks():
        for module in (patched, patched.lm_head, patched.model.norm, patched.model.layers[0].mlp):
            hooks.add_hook_to_module(module, Hook())

    if hooks_first:
        add_hooks()
    with liger_kernel.patched(patched) as report:
        if not hooks_first:
            add_hooks()
        assert report.count("head") == 1
        assert report.count("rms_norm") == 5
        assert assert_same_step(plain, patched, **batch()).logits is None
        assert len(seen) == 4
        if not hooks_first:
            hooks.remove_hook_from_module(patched, recurse=True)
    assert patched(**batch()).logits is not None


def test_forward_that_another_library_replaced(pair):
    _, patched = pair
    norm = patched.model.norm
    norm.forward = lambda x: x
    with liger_kernel.patched(patched) as report:
        assert report.count("rms_norm") == 4
        assert report.count("rms_norm", "left") == 1
        assert norm.forward(3) == 3


def test_tied_head():
    plain = tiny("llama", tie_word_embeddings=True)
    patched = copy.deepcopy(plain)
    with liger_kernel.patched(patched) as report:
        assert "tied" in str(report)
        assert_same_step(plain, patched, **batch())


# Trainer


class _Data(torch.utils.data.Dataset):
    def __init__(self, count=8):
        self.rows = batch(rows=count)

    def __len__(self):
        return len(self.rows["input_ids"])

    def __getitem__(self, i):
        return {name: tensor[i] for name, tensor in self.rows.items()}


def _trainer(model, folder, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=3,
        prediction_loss_only=True,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=_Data(), eval_dataset=_Data(4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_trainer(pair, tmp_path):
    """use_liger_kernel=True gives the same losses; train() twice, and evaluation without logits."""
    plain, patched = pair
    results = []
    for model, options in ((plain, {}), (patched, {"use_liger_kernel": True})):
        trainer = _trainer(model, tmp_path, **options)
        trainer.train()
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        results.append(
            [*[entry["loss"] for entry in trainer.state.log_history if "loss" in entry], evaluated]
        )
    assert seam_of(patched.forward) == "head"
    assert isinstance(patched.lm_head, PromisingHead)
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_trainer_passes_its_config(pair, tmp_path):
    config = {
        "rope": False,
        "fused_linear_cross_entropy": False,
        "cross_entropy": True,
        "swiglu": None,
    }
    trainer = _trainer(pair[1], tmp_path, use_liger_kernel=True, liger_kernel_config=config)
    trainer.train()
    model = pair[1]
    assert seam_of(model.forward) is None
    assert seam_of(model.loss_function) == "cross_entropy"
    assert seam_of(model.model.norm.forward) == "rms_norm"
    assert seam_of(model.model.layers[0].mlp.forward) is None


@pytest.fixture
def accelerate():
    """The package; its settings are one for the process, and changed by none but the first who asks."""
    module = pytest.importorskip("accelerate")
    module.state.AcceleratorState._reset_state(True)
    yield module
    module.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(pair, accelerate, precision):
    """A loop of one's own: prepared, accumulating, with clipped gradients."""
    liger_kernel.patch(pair[1])
    losses, norms = [], []
    for model in pair:
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        prepared, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-2)
        )
        for seed in range(6):
            with accelerator.accumulate(prepared):
                loss = prepared(**batch(seed)).loss
                accelerator.backward(loss)
                norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 1.0) or 0))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert accelerator.unwrap_model(prepared) is model
        accelerator.free_memory()
    close = 1e-4 if precision == "no" else 2e-2
    assert losses[6:] == pytest.approx(losses[:6], rel=close)
    assert norms[6:] == pytest.approx(norms[:6], rel=5 * close)


# PEFT


def _lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


LORA = {
    "attention and MLP": {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "trained norms": {"target_modules": ["up_proj"], "modules_to_save": ["input_layernorm"]},
    "adapter on the head": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA": {"target_modules": ["q_proj", "gate_proj", "down_proj"], "use_dora": True},
}


@pytest.mark.parametrize("after", [True, False], ids=["patched after", "patched before"])
@pytest.mark.parametrize("name", LORA)
def test_lora(pair, name, after):
    plain, patched = pair
    if not after:
        _apply_liger_kernel_to_instance(model=patched)
    plain, patched = _lora(plain, **LORA[name]), _lora(patched, **LORA[name])
    if after:
        _apply_liger_kernel_to_instance(model=patched.get_base_model())
        again = liger_kernel.patch(patched, rematerialise=False)
        assert {row.status for row in again.rows} <= {"already", "left"}
    outputs = assert_same_step(plain, patched, **batch())
    assert outputs.logits is None
    with patched.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(patched(**batch()).loss, plain(**batch()).loss)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT's
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens(pair, kind):
    """Inputs come as embeddings with further tokens in front, or beside a cache: nothing has to be refused."""
    peft = pytest.importorskip("peft")
    steps = []
    for model in pair:
        torch.manual_seed(6)
        tuned = peft.get_peft_model(
            model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
        )
        if model is pair[1]:
            liger_kernel.patch(tuned)
        steps.append(step(tuned, **batch()))
    (expected, wanted), (outputs, found) = steps
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert found.keys() == wanted.keys()
    assert len(found) == 1
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


# Several processes (one here: the hooks are the same)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp(pair, group):
    plain, patched = pair
    with liger_kernel.patched(patched):
        parallel = nn.parallel.DistributedDataParallel(patched)
        expected, gradients = step(plain, **batch())
        outputs, found = step(parallel, **batch())
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[f"module.{name}"], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("own_unit", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("patched_first", [True, False])
def test_fsdp2(pair, group, own_unit, reshard, patched_first):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, sharded = pair
    mesh = init_device_mesh("cpu", (1,))
    patch = contextlib.ExitStack()
    if patched_first:
        patch.enter_context(liger_kernel.patched(sharded))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    if own_unit:
        fully_shard(sharded.lm_head, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
    if not patched_first:
        patch.enter_context(liger_kernel.patched(sharded))
    with patch:
        expected, gradients = step(plain, **batch())
        outputs, found = step(sharded, **batch())
        assert outputs.logits is None
        torch.testing.assert_close(outputs.loss, expected.loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name].full_tensor(), gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("own_unit", [True, False])
def test_fsdp1(pair, group, own_unit):
    """Also with the head as a unit of its own, whose flat weight exists inside its forward only."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    plain, patched = pair
    options = {"device_id": torch.device("cpu"), "use_orig_params": False}
    expected, gradients = step(plain, **batch())
    liger_kernel.patch(patched)
    if own_unit:
        patched.lm_head = FullyShardedDataParallel(patched.lm_head, **options)
    outputs, found = step(FullyShardedDataParallel(patched, **options), **batch())
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss)
    total = sum(float(g.square().sum()) for g in found.values())
    assert total == pytest.approx(
        sum(float(g.square().sum()) for g in gradients.values()), rel=1e-4
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_fsdp1_redirection(group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    layer = nn.Linear(4, 3)
    expected = layer.weight.detach().clone()
    wrapped = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    found = _FSDPForwardRedirection()(wrapped, lambda: layer.weight.detach().clone())
    assert torch.equal(found, expected)
    assert wrapped(torch.zeros(2, 4)).shape == (2, 3)
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        _FSDPForwardRedirection()(nn.Linear(1, 1), print)


def test_hooks_that_handle_the_outputs():
    """accelerate moves a model's outputs between devices: it must not meet logits that are only promised."""
    hooks = pytest.importorskip("accelerate.hooks")
    seen = []

    class Looks(hooks.ModelHook):
        def post_forward(self, module, output):
            seen.append(output.logits)
            return output

    plain = tiny("llama")
    model = copy.deepcopy(plain)
    hooks.add_hook_to_module(model, Looks())
    report = liger_kernel.patch(model)
    assert_same_step(plain, model, **batch())
    assert seen == [None]
    assert liger_kernel.patch(model).count("head", "already") == 1
    report.undo()
    assert model(**batch()).logits is not None
