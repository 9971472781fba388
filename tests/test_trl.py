"""TRL's trainers with and without the kernels: the same losses and metrics. The installed TRL decides what is tested.

`make test-trl` runs this under each release that `trainers.txt` lists. They differ in what they ask of us:

    old      before 1.0: `use_liger_loss` makes DPO, KTO and GRPO import our chunked losses; SFT patches the model
    middle   to 1.14: `use_liger_kernel` for all; SFT wants token accuracy and token scaling from the forward
    new      TRL has losses of its own over a `forward` that it wraps itself; what is ours are the layers
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
from pathlib import Path

import distributed
import pytest
import torch
import torch.distributed as dist
from models import VOCAB, batch, step, tiny
from torch import nn

import liger_kernel
from liger_kernel import _env
from liger_kernel.transformers.patch.apply import seam_of

trl = pytest.importorskip("trl", reason="TRL is not installed; make test-trl installs it")
from datasets import Dataset  # noqa: E402

VERSION = tuple(int(n) for n in importlib.metadata.version("trl").split(".")[:2])
ERA = "old" if VERSION < (1, 0) else "middle" if VERSION < (1, 15) else "new"
pytestmark = [
    pytest.mark.plain,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of TRL's experimental parts, among others
]


def era(*names):
    return pytest.mark.skipif(ERA not in names, reason=f"TRL {VERSION} is not {' or '.join(names)}")


# Data and models

WORDS = [
    "the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "over", "to", "mat",
    "tree", "house", "and", "then", "it", "was", "very", "happy", "sad",
]  # fmt: skip
ROWS = 32


def tokenizer():
    """One word, one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    vocabulary = {word: n for n, word in enumerate([*names.values(), *WORDS])}
    assert len(vocabulary) <= VOCAB
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_input_names=["input_ids", "attention_mask"],
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
        **{f"{name}_token": token for name, token in names.items()},
    )


def sentences(longest, seed):
    """`ROWS` of them, of 2 words or more."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, longest + 1, (ROWS,), generator=generator).tolist()
    picks = [torch.randint(len(WORDS), (n,), generator=generator).tolist() for n in sizes]
    return [" ".join(WORDS[i] for i in pick) for pick in picks]


def talks():
    roles = ("user", sentences(6, 1)), ("assistant", sentences(12, 2))
    return [[{"role": role, "content": texts[n]} for role, texts in roles] for n in range(ROWS)]


PAIRS = {"prompt": sentences(6, 1), "chosen": sentences(12, 2), "rejected": sentences(12, 3)}
DATA = {
    "SFT": {"text": sentences(20, 0)},
    "DPO": PAIRS,
    "ORPO": PAIRS,
    "KTO": {
        "prompt": PAIRS["prompt"],
        "completion": PAIRS["chosen"],
        "label": [n % 3 > 0 for n in range(ROWS)],
    },
    "GRPO": {"prompt": PAIRS["prompt"]},
    "GKD": {"messages": talks()},
}


def saved(folder, name="llama", **changes):
    """A loaded model: some trainers read their reference from the folder it came from."""
    from transformers import AutoModelForCausalLM

    place = folder / name
    if not place.exists():
        tiny(name, **changes).save_pretrained(place)
    return AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")


def reward(completions, **_):
    return [float(text.count("the") + len(text.split()) % 5) for text in completions]


# One run

TIMES = ("time", "per_second")
BUT = (*TIMES, "logits/chosen", "logits/rejected")


def trainer_of(name):
    """(trainer class, config class), where this TRL has them."""
    for place in (trl, f"trl.experimental.{name.lower()}"):
        module = importlib.import_module(place) if isinstance(place, str) else place
        if hasattr(module, f"{name}Trainer"):
            return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    raise AssertionError(f"no {name}Trainer in TRL {VERSION}")


def config_of(cls, folder, **options):
    known = {field.name for field in dataclasses.fields(cls)}
    general = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_steps": 3, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "seed": 3, "dataloader_pin_memory": False, "bf16": False,
        "gradient_checkpointing": False, "prediction_loss_only": True,
    }  # fmt: skip
    lost = set(options) - known
    assert not lost, f"{cls.__name__} of TRL {VERSION} has no {lost}"
    return cls(**{k: v for k, v in general.items() if k in known}, **options)


def train(*args, **kwargs):
    """The trainer after three steps."""
    trainer = made(*args, **kwargs)
    trainer.train()
    return trainer


def made(name, folder, model, classes=None, adapter=None, **options):
    trainer_class, config_class = classes or trainer_of(name)
    torch.manual_seed(5)  # an adapter is made at random
    extra = {}
    if name == "GRPO":
        extra = {"reward_funcs": reward}
    elif name == "GKD":
        extra = {"teacher_model": tiny("llama", seed=7).eval()}
    elif name in ("DPO", "KTO") and adapter is None:
        extra = {"ref_model": tiny("llama", seed=7).eval()}
    data = Dataset.from_dict(DATA[name])
    if options.get("eval_strategy"):
        extra["eval_dataset"] = data.select(range(6))
    if adapter is not None:
        extra["peft_config"] = adapter
    return trainer_class(
        model=model,
        args=config_of(config_class, folder, **options),
        train_dataset=data,
        processing_class=tokenizer(),
        **extra,
    )


def assert_same_history(found, wanted, but=TIMES):
    """Everything that both runs logged, but times."""
    rows = [
        [row for row in t.state.log_history if "train_runtime" not in row] for t in (found, wanted)
    ]
    assert len(rows[0]) == len(rows[1]) >= 3
    for ours, theirs in zip(*rows, strict=True):
        shared = {k for k in ours.keys() & theirs.keys() if not k.endswith(but)}
        assert {"loss", "grad_norm"} <= shared or "eval_loss" in shared
        for key in shared:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5, nan_ok=True), key


def switch(name):
    spelled = (
        "use_liger_loss" if ERA == "old" and name in ("DPO", "KTO", "GRPO") else "use_liger_kernel"
    )
    return {spelled: True}


# name -> trainer, options, eras
OURS = ("old", "middle")
EVERY = (*OURS, "new")
EVAL = {"eval_strategy": "steps", "eval_steps": 2}
SHORT = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
RUNS = {
    "SFT": ("SFT", EVAL, EVERY),
    "SFT, packed": ("SFT", {"packing": True, "max_length": 24, "packing_strategy": "wrapped"}, OURS),
    "SFT, dft": ("SFT", {"loss_type": "dft"}, ("middle",)),
    "DPO": ("DPO", EVAL, EVERY),
    "DPO, apo_zero": ("DPO", {"loss_type": "apo_zero"}, OURS),
    "KTO": ("KTO", EVAL, EVERY),
    "GRPO": ("GRPO", {**SHORT, "beta": 0.1, "num_iterations": 2}, EVERY),
    "GRPO, dr_grpo": ("GRPO", {**SHORT, "loss_type": "dr_grpo", "epsilon": 0.05, "num_iterations": 2}, OURS),
    "GRPO, cispo": ("GRPO", {**SHORT, "loss_type": "cispo", "num_iterations": 2}, ("middle",)),
    "GRPO, sequences": (
        "GRPO",
        {**SHORT, "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
        ("middle",),
    ),
    "GKD": ("GKD", {"lmbda": 0.0, "beta": 0.3, "max_length": 40}, ("middle",)),  # the old one adds cross entropy
}  # fmt: skip


@pytest.mark.parametrize("run", [r for r in RUNS if ERA in RUNS[r][2]])
def test_same_losses(run, tmp_path):
    name, options, _ = RUNS[run]
    wanted = train(name, tmp_path, saved(tmp_path), **options)
    model = saved(tmp_path)
    found = train(name, tmp_path, model, **options, **switch(name))
    # TRL's KTO adds logits up over prompts and padding, or takes means, where it asks us for sums over the answers.
    assert_same_history(found, wanted, BUT if name == "KTO" else TIMES)
    if switch(name) == {"use_liger_kernel": True}:
        assert seam_of(model.model.norm.forward) == "rms_norm"


# The newest TRL, whose forward is its own


@era("new")
def test_forward_is_trls(tmp_path):
    """TRL switches our head off and wraps `forward`; the layers are ours, rematerialised if asked."""
    model = saved(tmp_path)
    wanted = train("SFT", tmp_path, saved(tmp_path))
    config = {"rematerialise": True}
    found = train("SFT", tmp_path, model, use_liger_kernel=True, liger_kernel_config=config)
    assert_same_history(found, wanted)
    assert seam_of(model.forward) is None
    assert "trl" in Path(model.forward.__code__.co_filename).parts
    assert type(model.lm_head) is nn.Linear
    assert seam_of(model.model.layers[0].mlp.forward) == "gated_mlp"
    assert seam_of(model.model.forward) == "rematerialise"


@era("new")
def test_a_patched_model_under_trls_forward(tmp_path):
    """Ours below, TRL's around it, which then computes the loss."""
    model = saved(tmp_path)
    wanted = train("SFT", tmp_path, saved(tmp_path))
    report = liger_kernel.patch(model)
    assert_same_history(train("SFT", tmp_path, model), wanted)
    assert report.rebuilt["model"] > 0


# Models that come patched, adapters


@era(*OURS)
@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_patched_before(name, tmp_path):
    """`liger_kernel.patch` alone, and the switch of the trainer on top of it."""
    wanted = train(name, tmp_path, saved(tmp_path))
    # without the switch the old SFT reads logits
    for more in (switch(name),) if (ERA, name) == ("old", "SFT") else ({}, switch(name)):
        model = saved(tmp_path)
        liger_kernel.patch(model)
        assert_same_history(train(name, tmp_path, model, **more), wanted)


def lora(**options):
    from peft import LoraConfig

    names = {"target_modules": ["q_proj", "gate_proj", "down_proj"], **options}
    return LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **names)


@pytest.mark.parametrize("name", ["SFT", "DPO"] if ERA == "middle" else ["SFT"])
def test_adapters(name, tmp_path):
    wanted = train(name, tmp_path, saved(tmp_path), adapter=lora())
    found = train(name, tmp_path, saved(tmp_path), adapter=lora(), **switch(name))
    assert_same_history(found, wanted)


# Activation offloading


def offloading(model, monkeypatch):
    """TRL's context manager, with the CPU for an accelerator, and the sizes of what it takes away."""
    from trl.models import activation_offloading as trls

    cpu, taken = torch.device("cpu"), []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: cpu)
    manager = trls.get_act_offloading_ctx_manager(
        model, use_pin_memory=False, use_streams=False, min_offload_size=64
    )
    pack = manager.pack_hook

    @functools.wraps(pack)
    def noted(tensor):
        key = pack(tensor)
        taken.extend([tensor.nbytes] if manager.tracker[key][1] else [])
        return key

    monkeypatch.setattr(manager, "pack_hook", noted)
    return manager, taken


@era("new")
def test_activation_offloading(monkeypatch, tmp_path):
    """Within TRL's hooks everything is TRL's, and nothing is rebuilt; said once. Without them we are back."""
    plain, model = saved(tmp_path), saved(tmp_path)
    report = liger_kernel.patch(model)
    manager, taken = offloading(model, monkeypatch)
    for _ in range(2):
        expected, wanted = step(plain, **batch())
        _env.warn_once.cache_clear()
        with pytest.warns(UserWarning, match="activation_offloading.*hooks do not nest"), manager:
            outputs = model(**batch())
        model.zero_grad()
        outputs.loss.backward()
        torch.testing.assert_close(outputs.loss, expected.loss)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5)
    assert taken
    assert not manager.tracker
    assert not report.rebuilt
    step(model, **batch())
    assert report.rebuilt["model"] > 0


# ORPO

ORPO_MODELS = {
    "llama": {},
    "gemma2": {},  # capped logits
    "mixtral": {"sliding_window": None},  # a router loss
}


def orpo_trainer():
    from liger_kernel.transformers.trainer import LigerORPOTrainer

    return LigerORPOTrainer, trainer_of("ORPO")[1]


@pytest.mark.parametrize("family", ORPO_MODELS)
def test_orpo(family, tmp_path):
    models = [saved(tmp_path, family, **ORPO_MODELS[family]) for _ in range(2)]
    wanted = train("ORPO", tmp_path, models[0], **EVAL)
    both = {"use_liger_kernel": True} if family == "llama" else {}  # a head that is patched already
    with no_logits(models[1]):
        found = train("ORPO", tmp_path, models[1], orpo_trainer(), **EVAL, **both)
    assert_same_history(found, wanted, BUT)
    assert "_loss_function" not in vars(models[1])


@contextlib.contextmanager
def no_logits(model):
    """Fails if the head's product is formed for more than the engine's own use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", counted(nn.Linear.forward, model.lm_head))
        yield


def counted(forward, head):
    def call(self, x):
        assert self is not head, "logits were built"
        return forward(self, x)

    return call


@pytest.mark.parametrize("on_head", [False, True])
def test_orpo_adapters(on_head, tmp_path):
    adapters = {"target_modules": ["q_proj", "lm_head"]} if on_head else {}
    wanted = train("ORPO", tmp_path, saved(tmp_path), adapter=lora(**adapters))
    _env.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="full logits") if on_head else contextlib.nullcontext():
        found = train("ORPO", tmp_path, saved(tmp_path), orpo_trainer(), lora(**adapters))
    assert_same_history(found, wanted, BUT)


def _ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    for part in (*model.model.layers, model.lm_head, model):
        fully_shard(part, mesh=mesh)
    return model


def _orpo_in_parallel(folder):
    for wrapped in (_ddp, _fsdp1, _fsdp2):
        plain, model = saved(folder), saved(folder)
        trainers = made("ORPO", folder, plain), made("ORPO", folder, model, orpo_trainer())
        rows = next(iter(trainers[0].get_train_dataloader()))
        losses = []
        for trainer, run in zip(trainers, (plain, wrapped(model)), strict=True):
            loss, _ = trainer.get_batch_loss_metrics(run, rows)
            loss.backward()
            losses.append(loss)
        assert not trainers[1]._plain
        torch.testing.assert_close(losses[1], losses[0])
        found = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
        for gradient, p in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient.view_as(p), p.grad, rtol=1e-3, atol=1e-5)


def test_orpo_in_parallel(tmp_path):
    """The loss is computed within the forward: weights are there, and gradients reach every parameter.

    In a process of its own: a DDP model that outlives its group waits for gloo's threads and holds the interpreter.
    """
    distributed.run(_orpo_in_parallel, 1, tmp_path)
